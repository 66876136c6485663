// A browser starts no worker for a page that was opened from the disk. There a hidden frame runs the search's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.window = new Promise((resolve) => frame.addEventListener("load", () => resolve(frame.contentWindow)));
      this.window.then((inner) => { inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data })); });
      document.body.append(frame);
    }

    postMessage(data) {
      this.window.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
