// A sweep: results by setting, the result over each numeric field, and curves as means over seeds with bands.

/** The sections of a sweep's page; the others are about single runs, which have reports of their own. */
const OF_A_SWEEP = [curves, samples, clipping];
const SEEDS_NOTE = "Each line is the mean over a setting's seeds, with Student's 95% interval of the mean as a band. Thin lines are single seeds: where only one has got that far, or all of them with “Single seeds”.";
const MOST_TRIALS_OPEN = 8;
const MOST_FIELDS_BESIDE = 2;
const MOST_TICKS = 6;

let seedsShown = false, arePicked = false;
const seedsButton = changed => el("label", { class: "field" }, el("input", { type: "checkbox", checked: seedsShown, onchange: event => {
  seedsShown = event.currentTarget.checked;
  changed();
} }), el("span", {}, "Single seeds"));

/** The outline of a band, over the points that have both ends. */
const bandTrace = (x, low, high, tint) => {
  const places = x.map((_, at) => at).filter(at => known(low[at]) && known(high[at]));
  return { type: "scatter", mode: "lines", fill: "toself", fillcolor: faint(tint, 0.14), line: { width: 0 }, hoverinfo: "skip", showlegend: false,
    x: [...places.map(at => x[at]), ...places.toReversed().map(at => x[at])], y: [...places.map(at => high[at]), ...places.toReversed().map(at => low[at])] };
};

/** How far bands may widen an axis beyond its lines, in spans of the lines: two seeds have wide intervals. */
const BAND_REACH = 0.5;

/** Hovering over a mean shows half the width of its interval. */
const withInterval = (setting, { metric }, trace, { smoothing }) => {
  if (!trace.hovertemplate) return trace;
  const halves = setting.curves.high[metric].map((high, at) => (known(high) ? (high - setting.curves.low[metric][at]) / 2 : null));
  const even = smoothing ? smoothed(halves, smoothing) : halves;
  return { ...trace, customdata: even.map(half => (known(half) ? ` ± ${format(half, 2)}` : "")), hovertemplate: "%{y:.3~g}%{customdata}" };
};

/** Bands and thin lines of single seeds, drawn behind the means, and the values that the axis has to show. */
const seedTraces = (data, panel, settings, lines, how) => {
  const { smoothing } = how, even = values => (smoothing ? smoothed(values, smoothing) : values);
  const drawn = settings.flatMap(setting => panel.lines.filter(line => setting.curves.columns[line.metric]).map(line => ({ setting, name: line.metric, dash: DASHES[panel.lines.indexOf(line) % 4], tint: runColor(setting.color) })));
  const thin = (x, y, { tint, dash }, name) => ({ type: "scatter", mode: "lines", x, y, connectgaps: true, name: plain(name), showlegend: false, opacity: 0.5, line: { color: tint, width: 1, dash }, hoverinfo: "skip" });
  const tails = drawn.filter(({ setting, name }) => setting.curves.tails[name].some(known))
    .map(each => ({ ...thin(positions(each.setting, how), even(each.setting.curves.tails[each.name]), each, each.setting.name), connectgaps: false }));
  const seeds = !seedsShown ? [] : drawn.filter(({ setting }) => setting.runs.length > 1).flatMap(each => each.setting.runs.map(at => data.runs[at]).filter(run => run.curves.columns[each.name])
    .map(run => thin(positions(run, how), even(run.curves.columns[each.name]), each, run.name)));
  const values = [...lines, ...tails, ...seeds].flatMap(trace => trace.y).filter(known);
  const lowest = Math.min(...values), highest = Math.max(...values), reach = BAND_REACH * (highest - lowest);
  const isLog = panel.logarithmic && lowest > 0 && highest / lowest > 4;
  const bands = panel.stacked ? [] : drawn.map(({ setting, name, tint }) => {
    const { low, high } = setting.curves;
    // A logarithmic axis has no place for the part of an interval below 0.
    return bandTrace(positions(setting, how), even(low[name]).map(value => (isLog && known(value) ? Math.max(value, lowest / 2) : value)), even(high[name]), tint);
  });
  const reached = bands.flatMap(trace => trace.y).map(value => Math.min(Math.max(value, lowest - (isLog ? 0 : reach)), highest + reach));
  return { behind: [...bands.filter(trace => trace.x.length), ...tails, ...seeds], values: [...values, ...reached.filter(value => !isLog || value > 0)] };
};

const settingLabel = (data, setting, place) => [el("span", { class: "swatch", style: { background: `var(--${colorName(setting.color)})` } }),
  data.sweep.fields.length ? String(place + 1) : setting.name, place === 0 && known(setting.value) && data.sweep.settings.length > 1 ? el("span", { class: "badge best" }, "best") : null];
const between = setting => (known(setting.low) ? el("span", { class: "between" }, ` ${format(setting.low, 3)} to ${format(setting.high, 3)}`) : null);
const seedsOf = setting => (setting.num_values === setting.num_seeds ? String(setting.num_seeds) : `${setting.num_values} of ${setting.num_seeds}`);

const resultsTable = data => {
  const { fields, settings, order } = data.sweep, withKl = settings.some(setting => known(setting.kl));
  return table(["", ...fields.map(field => field.short), data.sweep.metric ?? "result", ...(withKl ? ["KL"] : []), "seeds"],
    order.map((at, place) => [settingLabel(data, settings[at], place), ...fields.map(field => settings[at].values[field.name] ?? "–"),
      el("span", {}, el("b", {}, format(settings[at].value, 3)), between(settings[at])), ...(withKl ? [format(settings[at].kl, 3)] : []), seedsOf(settings[at])]), [], true);
};

const trialsTable = ({ sweep }) => {
  const withKl = sweep.trials.some(trial => known(trial.kl));
  return table(["run", "state", "update", sweep.metric ?? "result", ...(withKl ? ["KL"] : [])], sweep.trials.map(trial => [
    [el("span", { class: "swatch", style: { background: `var(--${colorName(sweep.settings[trial.setting].color)})` } }), trial.name],
    el("span", { class: `badge ${trial.state}` }, trial.state), trial.update ? count(trial.update) : "–", format(trial.value, 3), ...(withKl ? [format(trial.kl, 3)] : [])]), [], true);
};

const failures = ({ sweep }) => {
  const failed = sweep.trials.filter(trial => trial.error !== null);
  return failed.length ? el("ul", { class: "failures" }, failed.map(trial => el("li", {}, el("span", { class: "badge failed" }, "failed"), " ", el("b", {}, trial.name), ": ", el("span", { class: "mono" }, trial.error)))) : null;
};

/** The result of each setting with its interval over some value, and lines between settings that differ in it alone. */
const resultsPlot = (data, { title, axis, values, texts = null, log = false, lines = [] }) => chart({
  title, size: "short", simple: true,
  summary: data.sweep.settings.map((setting, at) => `${setting.name}: ${format(setting.value, 3)} at ${format(values[at], 3)}`).join("; "),
  build: () => {
    const { settings } = data.sweep, ends = at => known(settings[at].low);
    const links = lines.map(line => line.filter(at => known(settings[at].value))).map(line => ({ type: "scatter", mode: "lines", x: line.map(at => values[at]), y: line.map(at => settings[at].value),
      line: { color: faint(color("muted"), 0.45), width: 1.5 }, hoverinfo: "skip", showlegend: false }));
    const points = settings.flatMap((setting, at) => (known(setting.value) && known(values[at]) ? [{ type: "scatter", mode: "markers", x: [values[at]], y: [setting.value], name: plain(setting.name), showlegend: false,
      marker: { size: 9, color: runColor(setting.color) }, error_y: { type: "data", symmetric: false, visible: ends(at), array: [setting.high - setting.value], arrayminus: [setting.value - setting.low], thickness: 1.5, width: 4, color: runColor(setting.color) },
      hovertemplate: `%{y:.3~g}${ends(at) ? ` (${format(setting.low, 3)} to ${format(setting.high, 3)})` : ""}<extra>${plain(setting.name)}</extra>` }] : []));
    const ticks = new Map(texts?.map((text, at) => [values[at], plain(text)]) ?? []);
    const few = ticks.size && ticks.size <= MOST_TICKS ? { tickmode: "array", tickvals: [...ticks.keys()], ticktext: [...ticks.values()] } : {};
    return { traces: [...links, ...points], layout: { hovermode: "closest", xaxis: { ...few, type: log ? "log" : "linear", title: { text: plain(axis) } }, yaxis: { tickformat: "~g", nticks: 5 } } };
  },
});

const resultPlots = data => {
  const { sweep } = data, names = Object.fromEntries(sweep.fields.map(field => [field.name, field.short]));
  if (sweep.settings.filter(setting => known(setting.value)).length < 2) return [];
  const plots = sweep.plots.map(plot => resultsPlot(data, { ...plot, title: `${sweep.metric} by ${names[plot.field]}`, axis: names[plot.field], texts: sweep.settings.map(setting => setting.values[plot.field]) }));
  const withKl = sweep.settings.some(setting => known(setting.kl));
  return [...plots, ...(withKl ? [resultsPlot(data, { title: `${sweep.metric} by KL`, axis: "KL to the reference, nats per response", values: sweep.settings.map(setting => setting.kl) })] : [])];
};

/** The settings of some runs, with the number of their runs if not all of a setting are meant. */
const settingsOfRuns = (data, runs) => data.sweep.settings.map(setting => [setting, runs.filter(run => setting.runs.includes(run.index)).length]).filter(([, found]) => found)
  .map(([setting, found]) => el("span", { class: "of" }, swatch(setting), setting.name, setting.num_seeds > 1 ? ` (${found} of ${setting.num_seeds} seeds)` : ""));

/** At first, settings without a color of their own are hidden. */
const pickSettings = ({ sweep }) => {
  if (!arePicked) for (const setting of sweep.settings) if (setting.color === null) state.hidden.add(setting.name);
  arePicked = true;
};

const sweepVerdict = data => {
  pickSettings(data);
  const panels = data.panels[data.sweep.stage] ?? [], compared = panels.filter(panel => panel.lines.some(line => line.metric === data.sweep.metric)).slice(0, 1);
  const keys = [...compared, ...panels.filter(panel => panel.key && !compared.includes(panel))].slice(0, MOST_KEY_CHARTS), plots = resultPlots(data), { trials } = data.sweep;
  const results = el("div", { class: "card stack sweep" }, data.sweep.sentences.map(text => el("p", { class: "sentences" }, text)), resultsTable(data), failures(data),
    el("p", { class: "muted small" }, "A result is the mean over the last tenth of a finished run, its interval Student's 95% interval of the mean over seeds."));
  const isNarrow = plots.length && data.sweep.fields.length <= MOST_FIELDS_BESIDE;
  return [
    el("div", { class: isNarrow ? "sides" : "stack" }, results, plots.length ? grid(plots, isNarrow ? 2 : 4) : null),
    keys.length ? grid(keys.map(panel => curveChart(data, data.sweep.stage, { ...panel, note: "" }))) : null,
    findingsCard(data),
    el("div", { class: "sweep" }, fold(trials.length <= MOST_TRIALS_OPEN && !narrow.matches, el("h3", {}, `${trials.length} runs`), el("div", { class: "card" }, trialsTable(data)),
      el("p", { class: "muted small" }, "Values are means over the last tenth of the updates so far. Every run's folder has a report of its own."))),
  ];
};
