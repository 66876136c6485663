// Curves: every metric of every run over one axis, which all charts share; zoom in one and all follow.

const DASHES = ["solid", "dot", "dash", "dashdot"];
const STAGES = { ppo: "PPO", reward: "Reward model", sft: "Fine-tuning" };
const AXES = { update: "Updates", items: "Responses", seconds: "Wall time" };

/** Exponential smoothing that is not drawn to zero at its start; gaps stay gaps. */
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

const curves = data => {
  const stages = Object.keys(data.panels);
  let stage = stages[0], followers = [];
  const longest = name => Math.max(0, ...data.runs.filter(run => run.stage === name).map(run => run.curves.update.length));
  for (const name of stages) state.smoothing[name] ??= longest(name) >= 60 ? 0.6 : 0;
  const shown = () => data.runs.map((run, index) => ({ ...run, index })).filter(run => run.stage === stage && !state.hidden.has(run.index));

  const positions = (run, [size]) => {
    const axis = state.x === "items" && !run.curves.items ? "update" : state.x;
    return axis === "seconds" ? run.curves.seconds.map(value => value / size) : run.curves[axis];
  };
  const axisTitle = ([, unit]) => ({ update: stage === "ppo" ? "update" : "step", items: stage === "ppo" ? "responses" : "rows", seconds: unit })[state.x];

  const tracesOf = (panel, runs, unit) => runs.flatMap(run => panel.lines.flatMap((line, number) => {
    const figures = run.curves.columns[line.metric];
    if (!figures) return [];
    const alone = runs.length === 1, x = positions(run, unit);
    const tint = alone && panel.lines.length > 1 ? runColour(number) : runColour(run.index);
    const dense = figures.filter(known).length > 1 && x.length > 40;
    const label = [alone ? null : run.name, panel.lines.length > 1 || alone ? line.label : null].filter(Boolean).join(" · ");
    const trace = { type: "scatter", x, y: figures, name: plain(label), connectgaps: figures.some(value => value === null),
      mode: dense ? "lines" : "lines+markers", marker: { size: 4, color: tint }, legendgroup: line.metric,
      line: { color: tint, width: 2, dash: alone ? "solid" : DASHES[number % 4] },
      showlegend: alone && panel.lines.length > 1, hovertemplate: "%{y:.4~g}" };
    if (panel.stacked && alone) return [{ ...trace, mode: "lines", stackgroup: "whole", line: { color: tint, width: 0.5 }, fillcolor: faint(tint, 0.65) }];
    if (!state.smoothing[stage]) return [trace];
    return [{ ...trace, line: { ...trace.line, width: 1, dash: "solid" }, opacity: 0.35, mode: "lines", showlegend: false, hoverinfo: "skip", hovertemplate: null },
      { ...trace, y: smoothed(figures, state.smoothing[stage]), customdata: figures, mode: "lines", hovertemplate: "%{y:.4~g} <i>(raw %{customdata:.4~g})</i>" }];
  }));

  /** With several runs a colour is a run, and a dash is a line: the legend tells the dashes. */
  const legendOf = (panel, runs) => runs.length < 2 || panel.lines.length < 2 ? [] : panel.lines.map((line, number) => ({
    type: "scatter", mode: "lines", x: [null], y: [null], name: plain(line.label), legendgroup: line.metric, hoverinfo: "skip",
    line: { color: colour("muted"), width: 2, dash: DASHES[number % 4] } }));

  const build = panel => () => {
    const runs = shown(), unit = timeUnit(runs), traces = [...tracesOf(panel, runs, unit), ...legendOf(panel, runs)];
    const figures = traces.flatMap(trace => trace.y).filter(known);
    const lowest = Math.min(...figures), highest = Math.max(...figures);
    const wild = panel.floor !== null && lowest < panel.floor;
    const spans = panel.logarithmic && lowest > 0 && highest / lowest > 4;
    return { traces, layout: {
      xaxis: { title: { text: axisTitle(unit) }, ...(state.range ? { range: [...state.range], autorange: false } : { autorange: true }) },
      yaxis: { type: spans ? "log" : "linear", exponentformat: "power", tickformat: "~g", nticks: 6,
        ...(wild ? { range: [panel.floor - 0.05, Math.max(highest, 0) + 0.1] } : { rangemode: panel.stacked ? "tozero" : "normal" }) },
      shapes: panel.level === null ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.level, y1: panel.level, line: { color: colour("muted"), width: 1, dash: "dash" } }],
    } };
  };

  const follow = change => {
    const range = change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.range"] ?? null;
    if (!range && !change["xaxis.autorange"]) return;
    if (JSON.stringify(range) === JSON.stringify(state.range)) return;
    zoom(range);
  };
  const zoom = range => {
    state.range = range;
    reset.disabled = !range;
    redraw(followers);
  };
  const reset = el("button", { type: "button", disabled: true, onclick: () => zoom(null) }, "Reset zoom");

  const summary = panel => shown().map(run => panel.lines.filter(line => run.curves.columns[line.metric]).map(line => {
    const figures = run.curves.columns[line.metric].filter(known);
    return `${run.name}, ${line.label}: from ${figure(figures[0])} to ${figure(figures.at(-1))}, between ${figure(Math.min(...figures))} and ${figure(Math.max(...figures))}`;
  })).flat().join("; ");

  const toggles = () => data.runs.map((run, index) => run.stage !== stage ? null : el("button", {
    type: "button", class: "chip", "aria-pressed": String(!state.hidden.has(index)), onclick: event => {
      state.hidden.has(index) ? state.hidden.delete(index) : state.hidden.add(index);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      redraw(followers);
    } }, el("span", { class: "swatch", style: { background: `var(--c${index % 8})` } }), run.name)).filter(Boolean);

  const part = section("curves", "Curves", "Drag across a chart to zoom: all follow. Double-click to see the whole again.", () => {
    if (!stages.length) return empty("No stage that is known here has any figures: metrics.jsonl fills with the first update.");
    const panels = data.panels[stage], groups = [...new Set(panels.map(panel => panel.group))], runs = toggles();
    followers = [];
    const thinned = Math.max(1, ...data.runs.filter(run => run.stage === stage).map(run => run.curves.every));
    const drawn = panel => {
      const node = chart({ title: panel.title, unit: panel.unit, note: panel.note, summary: summary(panel), build: build(panel), onrange: follow });
      followers.push(node.host);
      return node;
    };
    return [
      el("div", { class: "controls sticky" },
        stages.length > 1 ? choice("Stage", stages.map(name => [name, STAGES[name]]), stage, name => { stage = name; state.range = null; part.refresh(); }) : null,
        choice("Over", Object.entries(AXES).map(([name, label]) => [name, name === "items" && stage !== "ppo" ? "Rows" : name === "update" && stage !== "ppo" ? "Steps" : label]),
          state.x, name => { state.x = name; zoom(null); }),
        slider("Smoothing", { min: 0, max: 0.99, step: 0.01, value: state.smoothing[stage], show: value => value.toFixed(2) }, value => { state.smoothing[stage] = value; redraw(followers); }),
        reset, runs.length > 1 ? el("div", { class: "field", role: "group", "aria-label": "Runs" }, runs) : null),
      thinned > 1 ? el("p", { class: "muted small" }, `Each point is the mean of ${thinned} updates; of largest and smallest figures it is the largest and smallest.`) : null,
      groups.map(group => [el("h4", {}, group), el("div", { class: "grid" }, panels.filter(panel => panel.group === group).map(drawn))]),
    ];
  });
  return part;
};
