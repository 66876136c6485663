// Curves: the metrics of all runs; all charts share the x axis and its zoom.

const DASHES = ["solid", "dot", "dash", "dashdot"];
/** The names of a stage's updates and of their items. */
const unitsOf = stage => ({ ppo: ["Updates", "Responses"], control: ["Updates", "Environment steps"] })[stage] ?? ["Steps", "Rows"];
const SMOOTHED_FROM = 60;
const GROUPS_OPEN = 1;

/** What the charts of a stage draw: its runs, or the settings of a sweep. */
const drawnOf = (data, stage) => (data.sweep ? data.sweep.settings.filter(each => each.curves) : data.runs.filter(run => run.stage === stage));
const runsOf = (data, stage) => drawnOf(data, stage).filter(run => !state.hidden.has(run.name));
const smoothingOf = (data, stage) => {
  const longest = Math.max(0, ...data.runs.filter(run => run.stage === stage).map(run => run.curves.update.length));
  return (state.smoothing[stage] ??= longest >= SMOOTHED_FROM ? 0.6 : 0);
};

/** Exponential smoothing with bias correction at the start; gaps stay gaps. */
const smoothed = (values, weight) => {
  let sum = 0, mass = 0;
  return values.map(value => {
    if (!known(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
};

const timeUnit = runs => {
  const longest = Math.max(0, ...runs.map(run => run.curves.seconds.at(-1) ?? 0));
  return longest < 180 ? [1, "seconds"] : longest < 10800 ? [60, "minutes"] : [3600, "hours"];
};

/** Whether all runs have an axis: logs of other libraries may lack the number of responses, or times. */
const haveAxis = (runs, axis) => axis === "update" || runs.every(({ curves }) => (axis === "items" ? curves.items : curves.seconds.at(-1) !== 0));
const axisOf = runs => (haveAxis(runs, state.x) ? state.x : "update");
const positions = (run, { axis, unit: [size] }) => (axis === "seconds" ? run.curves.seconds.map(value => value / size) : run.curves[axis]);

/** The traces of one metric of one run: its values, faded behind the smoothed curve if smoothing is on. */
const lineTraces = (panel, line, number, run, how) => {
  const values = run.curves.columns[line.metric];
  if (!values) return [];
  const { alone, smoothing } = how, x = positions(run, how), { several } = panel;
  const tint = panel.stacked && alone ? color(`phase${number}`) : alone ? lineColor(run, number) : runColor(run.color);
  const label = [alone ? null : run.brief ?? run.name, several || alone ? line.label : null].filter(Boolean).join(" · ");
  const trace = { type: "scatter", x, y: values, name: plain(label), connectgaps: true, mode: x.length > 40 && values.filter(known).length > 40 ? "lines" : "lines+markers",
    marker: { size: 4, color: tint }, legendgroup: line.metric, line: { color: tint, width: 2, dash: alone ? "solid" : DASHES[number % 4] },
    showlegend: alone && several, hovertemplate: "%{y:.4~g}" };
  if (panel.stacked && alone) return [{ ...trace, mode: x.length > 1 ? "lines" : "markers", stackgroup: "whole", line: { color: tint, width: 0.5 }, fillcolor: faint(tint, 0.65) }];
  if (!smoothing) return [trace];
  return [{ ...trace, line: { color: tint, width: 1 }, opacity: 0.35, mode: "lines", showlegend: false, hoverinfo: "skip", hovertemplate: null },
    { ...trace, y: smoothed(values, smoothing), customdata: values, mode: "lines", hovertemplate: "%{y:.4~g} <i>(raw %{customdata:.4~g})</i>" }];
};

/** On a page of several runs, color marks the run and dash the metric; the legend lists the dashes. */
const dashLegend = (panel, alone) => alone || !panel.several ? [] : panel.lines.map((line, number) => ({
  type: "scatter", mode: "lines", x: [null], y: [null], name: plain(line.label), legendgroup: line.metric, hoverinfo: "skip",
  line: { color: color("muted"), width: 2, dash: DASHES[number % 4] } }));

/** The range of an axis: the values with a margin; never below 0 if no value is, and with 0 for a constant. */
const rangeOf = (panel, values) => {
  const levels = panel.level === null ? values : [...values, panel.level];
  let lowest = Math.min(...levels), highest = Math.max(...levels);
  // A share of 0.999 among ones, or a page of memory more, is no change.
  const slack = panel.unit.startsWith("share") || panel.unit === "GiB" ? 0.01 : 1e-9;
  if (highest - lowest <= slack * Math.max(Math.abs(lowest), Math.abs(highest))) {
    const isShare = panel.unit.startsWith("share") && highest >= 0 && highest <= 1;
    return isShare || !highest ? [-0.02, 1.05] : highest > 0 ? [0, 1.4 * highest] : [1.4 * lowest, 0];
  }
  if (panel.floor !== null) lowest = Math.max(lowest, panel.floor);
  const margin = 0.06 * (highest - lowest);
  if (panel.stacked) lowest = 0;
  return [lowest >= 0 && lowest < margin ? -0.3 * margin : lowest - margin, highest + margin];
};

const yAxis = (panel, values) => {
  const lowest = Math.min(...values), highest = Math.max(...values);
  const scale = { exponentformat: "power", tickformat: "~g", nticks: 6 };
  if (panel.logarithmic && lowest > 0 && highest / lowest > 4) return { ...scale, type: "log", ...(highest / lowest < 100 ? { dtick: "D2" } : {}) };
  return values.length && !panel.stacked ? { ...scale, range: rangeOf(panel, values) } : { ...scale, rangemode: "tozero" };
};

const summaryOf = (panel, runs) => runs.flatMap(run => panel.lines.filter(line => run.curves.columns[line.metric]).map(line => {
  const values = run.curves.columns[line.metric].filter(known);
  return `${run.name}, ${line.label}: from ${format(values[0])} to ${format(values.at(-1))}, between ${format(Math.min(...values))} and ${format(Math.max(...values))}`;
})).join("; ");

const curveChart = (data, stage, panel, { onrange = null, size = "" } = {}) => chart({
  title: panel.title, unit: panel.unit, note: panel.note, simple: panel.lines.length === 1, summary: summaryOf(panel, runsOf(data, stage)), onrange, size,
  build: () => {
    const runs = runsOf(data, stage), unit = timeUnit(runs), axis = axisOf(drawnOf(data, stage)), [updates, items] = unitsOf(stage);
    const how = { alone: drawnOf(data, stage).length === 1, axis, unit, smoothing: smoothingOf(data, stage) };
    const lines = runs.flatMap(run => panel.lines.flatMap((line, number) => lineTraces(panel, line, number, run, how).map(trace => (data.sweep ? withInterval(run, line, trace, how) : trace))));
    const { behind, values } = data.sweep ? seedTraces(data, panel, runs, lines, how) : { behind: [], values: lines.flatMap(trace => trace.y) };
    const traces = [...behind, ...lines, ...dashLegend(panel, how.alone)];
    const level = { type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.level, y1: panel.level, line: { color: color("muted"), width: 1, dash: "dash" } };
    return { traces, layout: {
      xaxis: { title: { text: { update: updates, items, seconds: unit[1] }[axis].toLowerCase() }, ...(state.range ? { range: [...state.range], autorange: false } : { autorange: true }) },
      yaxis: yAxis(panel, values.filter(known)),
      shapes: panel.level === null ? [] : [level],
    } };
  },
});

const runToggles = (data, stage, changed) => drawnOf(data, stage).map(run => el("button", {
  type: "button", class: "chip", "aria-pressed": String(!state.hidden.has(run.name)), onclick: event => {
    if (!state.hidden.delete(run.name)) state.hidden.add(run.name);
    event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(run.name)));
    changed();
  } }, el("span", { class: "swatch", style: { background: `var(--${colorName(run.color)})` } }), run.name));

const curves = data => {
  let stage = null, followers = [], titles = "";
  const titlesOf = name => (data.panels[name]?.length ? [...data.panels[name].map(panel => panel.title), ...drawnOf(data, name).map(run => run.name)].join() : "");
  const zoom = range => {
    state.range = range;
    reset.disabled = !range;
    redraw(followers);
  };
  const reset = el("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Reset zoom");
  /** Apply a zoom in one chart to all others. */
  const follow = change => {
    const range = change["xaxis.range[0]"] === undefined ? change["xaxis.range"] ?? null : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if ((range || change["xaxis.autorange"]) && JSON.stringify(range) !== JSON.stringify(state.range)) zoom(range);
  };

  const part = section("curves", "Curves", isTouch ? "Tap a chart for exact values." : "Drag across a chart to zoom all charts; double-click to reset.", () => {
    const stages = Object.keys(data.panels);
    stage ??= stages[0];
    titles = titlesOf(stage);
    if (!data.panels[stage]?.length) return null;
    const panels = data.panels[stage], groups = [...new Set(panels.map(panel => panel.group))];
    const nodes = new Map(panels.map(panel => [panel, curveChart(data, stage, panel, { onrange: follow })]));
    const toggles = runToggles(data, stage, () => redraw(followers));
    const drawn = drawnOf(data, stage), [updates, items] = unitsOf(stage), axes = { update: updates, items, seconds: "Wall time" };
    const thinned = Math.max(1, ...data.runs.filter(run => run.stage === stage).map(run => run.curves.every));
    followers = [...nodes.values()].map(node => node.host);
    return [
      el("div", { class: "controls sticky" },
        stages.length > 1 ? choice("Stage", stages.map(name => [name, stageName(name)]), stage, name => { stage = name; zoom(null); part.refresh(); }) : null,
        choice("Over", Object.entries(axes).map(([axis, text]) => [axis, text, haveAxis(drawn, axis) ? "" : "Not known for these runs"]), axisOf(drawn), name => { state.x = name; zoom(null); }),
        slider("Smoothing", { min: 0, max: 0.99, step: 0.01, value: smoothingOf(data, stage), show: value => value.toFixed(2) }, value => { state.smoothing[stage] = value; redraw(followers); }),
        data.sweep ? seedsButton(() => redraw(followers)) : null, reset, toggles.length > 1 ? el("div", { class: "field", role: "group", "aria-label": data.sweep ? "Settings" : "Runs" }, toggles) : null),
      data.sweep ? el("p", { class: "muted small" }, SEEDS_NOTE) : null,
      thinned > 1 ? el("p", { class: "muted small" }, `Each point is the mean of ${thinned} ${updates.toLowerCase()}; for maxima and minima, the maximum or minimum.`) : null,
      groups.map((group, at) => fold(!narrow.matches || at < GROUPS_OPEN, el("h3", {}, group), grid(panels.filter(panel => panel.group === group).map(panel => nodes.get(panel))))),
    ];
  }, { why: () => (data.runs.some(run => run.curves.update.length) ? [] : ["No metrics yet: they come with the first update."]) });
  /** Redraw the charts with newer data; rebuild the section only if it gets new charts. */
  const renew = () => (titlesOf(stage) === titles && titles ? redraw(followers) : part.refresh());
  return { ...part, renew };
};
