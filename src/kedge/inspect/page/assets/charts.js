// Charts, drawn by plotly when they come into view.

const state = { x: "update", smoothing: {}, hidden: new Set(), range: null };
const plots = new Map();
let library = null;

const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const runColor = index => color(`c${index % 8}`);
const faint = (hex, alpha) => `rgba(${[1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)).join(", ")}, ${alpha})`;
/** Text for plotly with its markup escaped. */
const plain = text => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/** Bytes of a base64 text; the fallback is a plain loop because a callback per byte is ten times slower. */
const bytesOf = text => {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const decoded = atob(text), bytes = new Uint8Array(decoded.length);
  for (let at = 0; at < decoded.length; at++) bytes[at] = decoded.charCodeAt(at);
  return bytes;
};

/** Unpack plotly from the page and load it as a blob, so that the browser compiles it in the background. */
const unpack = async () => {
  const stream = new Blob([bytesOf(document.getElementById("plotly").textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = el("script", { src: URL.createObjectURL(await new Response(stream).blob()) });
  await new Promise(resolve => {
    script.addEventListener("load", resolve);
    document.head.append(script);
  });
  return window.Plotly;
};

/** On touch screens, dragging scrolls instead of zooming. */
const isTouch = matchMedia("(pointer: coarse)").matches;

const baseLayout = () => {
  const axis = { gridcolor: color("line"), linecolor: color("line"), zerolinecolor: color("line"), tickcolor: color("line"),
    automargin: true, tickfont: { size: 11, color: color("muted") }, title: { font: { size: 11, color: color("muted") }, standoff: 6 } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 12, t: 8, b: 36 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("ink") },
    hovermode: "x unified", hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 } },
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, itemwidth: 30 },
    xaxis: axis, yaxis: axis, yaxis2: axis, dragmode: isTouch ? false : "zoom",
  };
};
const merged = (base, changes) => {
  const result = { ...base };
  for (const [name, value] of Object.entries(changes)) {
    const nested = value && typeof value === "object" && !Array.isArray(value);
    result[name] = nested ? merged(base[name] ?? {}, value) : value;
  }
  return result;
};
const OPTIONS = { displaylogo: false, responsive: true, scrollZoom: false, showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"] };

const viewport = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    const plot = plots.get(target);
    if (!plot) continue;
    plot.visible = isIntersecting;
    if (isIntersecting) draw(target);
  }
}, { rootMargin: "250px" });

const draw = async host => {
  const plot = plots.get(host);
  if (!library || !plot?.visible || !plot.stale) return;
  plot.stale = false;
  const { traces, layout = {} } = plot.build();
  await library.react(host, traces, merged(baseLayout(), layout), OPTIONS);
  host.dataset.drawn = "";
  if (plot.isListening) return;
  plot.isListening = true;
  if (plot.onrange) host.on("plotly_relayout", change => plot.onrange(change));
};

/** Redraw charts with current data: now if visible, otherwise when they come into view. */
const redraw = hosts => { for (const host of hosts) if (plots.has(host)) { plots.get(host).stale = true; draw(host); } };
const redrawAll = () => redraw([...plots.keys()]);

/** Release the charts below an element that is about to be removed. */
const forget = root => {
  for (const host of plots.keys()) {
    if (!root.contains(host)) continue;
    viewport.unobserve(host);
    if (library && host.dataset.drawn !== undefined) library.purge(host);
    plots.delete(host);
  }
};

/** A chart with a caption; `build` returns plotly's traces and layout, `summary` is the text for screen readers. */
const chart = ({ title, unit = "", note = "", summary = "", size = "", build, onrange = null, bare = false }) => {
  const host = el("div", { class: "plot", role: "img", "aria-label": `${title}. ${summary}` });
  plots.set(host, { build, onrange, stale: true, visible: false, isListening: false });
  viewport.observe(host);
  const widen = el("button", { type: "button", "aria-pressed": "false", "aria-label": `Enlarge ${title}`, onclick: () => {
    const wide = node.classList.toggle("wide");
    widen.setAttribute("aria-pressed", wide);
    widen.textContent = wide ? "smaller" : "larger";
    if (library && host.dataset.drawn !== undefined) library.Plots.resize(host);
  } }, "larger");
  const node = el("figure", { class: `${bare ? "" : "card"} chart ${size}` },
    el("figcaption", {}, el("h3", {}, title), el("span", { class: "unit" }, unit), bare ? null : widen), host, note ? el("p", { class: "note" }, note) : null);
  return Object.assign(node, { host });
};

const loadLibrary = async () => {
  library = await unpack();
  await Promise.all([...plots.keys()].map(draw));
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("kedge:drawn")));
};
