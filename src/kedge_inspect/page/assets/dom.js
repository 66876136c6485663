// Elements and number formats. All text of a run goes through `el`, which never parses markup.

const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
};

const known = value => typeof value === "number" && Number.isFinite(value);

/** A number with four significant digits and a typographic minus sign. */
const format = (value, digits = 4) => {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(digits - 2).replaceAll("-", "−");
  const form = size >= 1 ? { maximumFractionDigits: Math.max(0, digits - 1 - Math.floor(Math.log10(size))) } : { maximumSignificantDigits: digits };
  return value.toLocaleString("en-US", form).replace("-", "−");
};
const signed = value => (known(value) && value > 0 ? `+${format(value, 3)}` : format(value, 3));
const percent = value => (known(value) ? `${format(100 * value, 3)}%` : "–");
const seconds = value => {
  if (!known(value)) return "–";
  if (value < 90) return `${format(value, 3)} s`;
  return value < 5400 ? `${format(value / 60, 3)} min` : `${format(value / 3600, 3)} h`;
};
const gibibytes = value => {
  if (!known(value)) return "–";
  const [size, name] = [[1, "GiB"], [2 ** -10, "MiB"], [2 ** -20, "KiB"]].find(([least]) => value >= least) ?? [2 ** -20, "KiB"];
  return value ? `${format(value / size, 3)} ${name}` : "0";
};
const large = value => {
  if (!known(value)) return "–";
  const steps = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, name] = steps.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return `${format(value / size, 3)} ${name}`.trim();
};

const card = (...children) => el("div", { class: "card stack" }, children);
const empty = reason => el("p", { class: "empty" }, reason);
const count = value => value.toLocaleString("en-US");
const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Narrow screens show small charts, and sections that open on demand. */
const narrow = matchMedia("(max-width: 720px)");

/** What folds: a summary and its content, whose charts are drawn when it opens. */
const fold = (open, summary, ...content) => el("details", { open, class: "fold", ontoggle: () => drawSoon() }, el("summary", {}, summary), content);

/**
 * A section with a `refresh` that fills it again from the current data. It is left out while `fill` returns nothing;
 * `why` returns the reasons. On narrow screens it is folded at first, unless it is the `main` one.
 */
const section = (id, title, lead, fill, { why = () => [], main = false } = {}) => {
  const body = el("div", { class: "stack" });
  const head = [el("h2", { id: `${id}-title` }, title), lead ? el("p", {}, lead) : null];
  const node = el("section", { id, "aria-labelledby": `${id}-title` }, fold(main || !narrow.matches, el("span", { class: "head" }, head), body));
  const refresh = () => {
    forget(body);
    body.replaceChildren(...[fill()].flat(Infinity).filter(Boolean));
    node.hidden = !body.childElementCount;
  };
  return { id, title, node, refresh, why };
};
/** Whether there is data for a part of the page; without, `empty` is the reason, or an empty text if there is no need. */
const has = part => part.empty === undefined;
/** Why a section has no data: the reasons that PPO runs give. */
const reasons = (data, name) => () => [...new Set(data.runs.map(run => run[name].empty).filter(Boolean))];

/** The number of items in each row if `total` items fill rows of at most `most` evenly, so that none is left over. */
const evenRows = (total, most) => {
  const rows = Math.ceil(total / most), least = Math.floor(total / rows);
  return Array.from({ length: rows }, (_, at) => least + (at < total % rows));
};
/** A grid of charts with full rows; on narrow screens, charts of a single line share a row. */
const grid = (nodes, most = 4) => {
  const wide = evenRows(nodes.length, most).flatMap(length => Array(length).fill(12 / length));
  const medium = evenRows(nodes.length, 2).flatMap(length => Array(length).fill(12 / length));
  let open = null;
  const small = nodes.map(() => 12);
  nodes.forEach((node, at) => {
    if (!node.classList.contains("simple")) open = null;
    else if (open === null) open = at;
    else { small[open] = small[at] = 6; open = null; }
  });
  nodes.forEach((node, at) => {
    for (const [name, spans] of Object.entries({ wide, medium, small })) node.style.setProperty(`--${name}`, spans[at]);
  });
  return el("div", { class: "grid" }, nodes);
};

/** A choice among options [value, text, why it is unavailable]: radio buttons, or a list if there are many. */
let choices = 0;
const choice = (label, options, selected, onchange) => {
  if (options.length > 6) {
    const list = el("select", { "aria-label": label, onchange: event => onchange(options[event.target.selectedIndex][0]) },
      options.map(([value, text]) => el("option", { value, selected: value === selected }, text)));
    return el("label", { class: "field" }, el("span", {}, label), list);
  }
  const name = `choice-${choices++}`;
  return el("fieldset", { class: "field" }, el("legend", {}, label), el("div", { class: "segments" },
    options.map(([value, text, unavailable]) => el("label", { title: unavailable || null },
      el("input", { type: "radio", name, value, checked: value === selected, disabled: Boolean(unavailable), onchange: () => onchange(value) }), text))));
};

const slider = (label, { min, max, step = 1, value, show }, oninput) => {
  const output = el("output", { class: "number small" }, show(value));
  const input = el("input", { type: "range", min, max, step, value, "aria-label": label, oninput: () => {
    output.textContent = show(Number(input.value));
    oninput(Number(input.value));
  } });
  return el("label", { class: "field" }, el("span", {}, label), input, output);
};

/** A table; `wrapped` columns hold text that may wrap; a `stacked` one lists the cells of a row on narrow screens. */
const table = (head, rows, wrapped = [], stacked = false) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": head.find(text => typeof text === "string" && text) || "Table" },
  el("table", { class: stacked ? "stacked" : null },
    el("thead", {}, el("tr", {}, head.map((text, place) => el("th", { scope: "col", class: wrapped.includes(place) ? "wrap" : null }, text)))),
    el("tbody", {}, rows.map(row => el("tr", {}, row.map((cell, place) => place
      ? el("td", { class: wrapped.includes(place) ? "wrap" : wrapped.length ? "fixed" : null, "data-label": head[place]?.textContent ?? head[place] }, cell) : el("th", { scope: "row" }, cell)))))));
