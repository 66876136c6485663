// Charts, drawn by plotly one after the other, those in view first: a picture or a print of the page is whole.

const state = { x: "update", smoothing: {}, hidden: new Set(), range: null };
const plots = new Map();
let library = null;

const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
/** The color of a run; of many settings of a sweep, only the best ones have one of their own. */
const colorName = index => (index === null ? "rest" : `c${index % 8}`);
const runColor = index => color(colorName(index));
/** The color of a line on a page with one run: the run's own for the first, others that no run has for the rest. */
const lineColor = (run, number) => (number ? color(`line${(number - 1) % 3 + 1}`) : runColor(run.color));
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
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 18, t: 8, b: 36 },
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

const isShown = host => host.offsetWidth > 0 && !host.closest("details:not([open])");
const waiting = () => [...plots].filter(([host, plot]) => plot.stale && isShown(host)).map(([host]) => host);

/** Charts narrower than this have no axis titles and few ticks. */
const SMALL = 240;
const small = { margin: { l: 30, r: 6, t: 6, b: 22 }, xaxis: { title: { text: "" }, nticks: 4, tickfont: { size: 10 } }, yaxis: { title: { text: "" }, nticks: 4, tickfont: { size: 10 } } };

const draw = async host => {
  const plot = plots.get(host);
  if (!library || !plot?.stale || !isShown(host)) return;
  plot.stale = false;
  const { traces, layout = {} } = plot.build(), laid = merged(baseLayout(), layout);
  await library.react(host, traces, host.offsetWidth < SMALL ? merged(laid, small) : laid, OPTIONS);
  host.dataset.drawn = "";
  if (plot.isListening) return;
  plot.isListening = true;
  if (plot.onrange) host.on("plotly_relayout", change => plot.onrange(change));
};

const SLICE_MILLISECONDS = 25;
const distance = host => {
  const { top, bottom } = host.getBoundingClientRect();
  return bottom < 0 ? -bottom : Math.max(0, top - innerHeight);
};
let drawing = null;
/** Draw what waits, the charts nearest to the view first, in slices between which the page answers to its reader. */
const drawSoon = () => {
  if (library) drawing ??= drawSlices().finally(() => { drawing = null; });
  return drawing;
};
const drawSlices = async () => {
  for (let hosts = waiting(); hosts.length; hosts = waiting()) {
    await new Promise(resolve => setTimeout(resolve));
    const started = performance.now();
    for (const [, host] of hosts.map(each => [distance(each), each]).sort((one, other) => one[0] - other[0])) {
      await draw(host);
      if (performance.now() - started > SLICE_MILLISECONDS) break;
    }
  }
  performance.mark("kedge:complete");
};

/** Redraw charts with current data. */
const redraw = hosts => {
  for (const host of hosts) if (plots.has(host)) plots.get(host).stale = true;
  drawSoon();
};
const redrawAll = () => redraw([...plots.keys()]);

/** A print shows all that is folded, at the width of the paper. */
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const each of folded) each.open = true;
  document.documentElement.classList.add("printed");
  for (const host of plots.keys()) {
    draw(host);
    if (library && host.dataset.drawn !== undefined) library.Plots.resize(host);
  }
});
addEventListener("afterprint", () => {
  for (const each of folded) each.open = false;
  document.documentElement.classList.remove("printed");
  for (const host of plots.keys()) if (library && host.dataset.drawn !== undefined && isShown(host)) library.Plots.resize(host);
});

/** Release the charts below an element that is about to be removed. */
const forget = root => {
  for (const host of plots.keys()) {
    if (!root.contains(host)) continue;
    if (library && host.dataset.drawn !== undefined) library.purge(host);
    plots.delete(host);
  }
};

/** A chart with a caption; `build` returns plotly's traces and layout, `summary` is the text for screen readers. */
const chart = ({ title, unit = "", note = "", summary = "", size = "", build, onrange = null, bare = false, simple = false }) => {
  const host = el("div", { class: "plot", role: "img", "aria-label": `${title}. ${summary}` });
  plots.set(host, { build, onrange, stale: true, isListening: false });
  const widen = el("button", { type: "button", "aria-pressed": "false", "aria-label": `Enlarge ${title}`, onclick: () => {
    const wide = node.classList.toggle("wide");
    widen.setAttribute("aria-pressed", wide);
    widen.textContent = wide ? "smaller" : "larger";
    redraw([host]);
    if (library && host.dataset.drawn !== undefined) library.Plots.resize(host);
  } }, "larger");
  const node = el("figure", { class: `${bare ? "" : "card"} chart ${size} ${simple ? "simple" : ""}` },
    el("figcaption", {}, el("h3", {}, title), el("span", { class: "unit" }, unit), bare ? null : widen), host, note ? el("p", { class: "note" }, note) : null);
  return Object.assign(node, { host });
};

/** Delay the page's load event until all charts are drawn: browsers take a picture or a print of the page at that event. */
const holdLoading = () => {
  const frame = el("iframe", { hidden: true, title: "Loading", "aria-hidden": "true" });
  document.body.append(frame);
  frame.contentDocument?.open();
  return () => frame.remove();
};

const loadLibrary = async () => {
  const release = holdLoading();
  try {
    library = await unpack();
    await Promise.all(waiting().filter(host => distance(host) === 0).map(draw));
    requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("kedge:drawn")));
    await drawSoon();
  } finally {
    release();
  }
};
