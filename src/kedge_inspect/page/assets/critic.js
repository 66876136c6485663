// Checks of the critic: its values of prefixes against the mean returns of fresh continuations.

/** On narrow screens there is no room for the interval. */
const withRange = each => (each ? [el("b", {}, format(each.value, 3)), known(each.low) ? el("span", { class: "muted small range" }, ` ${format(each.low, 3)} to ${format(each.high, 3)}`) : null] : "–");

const criticTable = ({ figures }) => table(["", "critic", "prompt's mean", "perfect", "chance"], figures.map(each => [
  each.label, withRange(each.critic), withRange(each.prompt_mean), each.ceiling === null ? "–" : format(each.ceiling, 2), format(each.chance, 2)]));

const criticRows = ({ rows }) => table(["Update", "pairs, different prompts", "pairs, same prompt", "explained variance"],
  rows.map(({ update, values }) => [count(update), withRange(values[0]), withRange(values[1]), values[2] ? format(values[2].value, 3) : "–"]));

const criticCalibration = run => chart({ title: "Calibration of the critic", unit: "mean return over value", size: "tall",
  note: "Large: tenths of the prefixes by value, with 95% intervals. Small: single prefixes. The dashed line is perfect.",
  summary: run.critic.bins.map(bin => `value ${format(bin.at, 3)}: return ${format(bin.value, 3)}`).join("; "),
  build: () => {
    const { bins, points } = run.critic, values = points.map(point => point[0]), ends = [Math.min(...values), Math.max(...values)];
    return { traces: [
      { type: "scatter", mode: "lines", x: ends, y: ends, name: "perfect", line: { color: color("muted"), dash: "dash", width: 1.2 }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x: values, y: points.map(point => point[1]), name: "prefix", marker: { color: faint(runColor(run.color), 0.25), size: 4 }, hovertemplate: "value %{x:.3}, return %{y:.3}" },
      { type: "scatter", mode: "markers", x: bins.map(bin => bin.at), y: bins.map(bin => bin.value), customdata: bins.map(bin => bin.count), name: "tenth",
        error_y: { type: "data", symmetric: false, array: bins.map(bin => bin.high - bin.value), arrayminus: bins.map(bin => bin.value - bin.low), thickness: 1.5, width: 0, color: runColor(run.color) },
        marker: { color: runColor(run.color), size: 9 }, hovertemplate: "value %{x:.3}, return %{y:.3}: %{customdata} prefixes" },
    ], layout: { hovermode: "closest", showlegend: false, xaxis: { title: { text: "value of the prefix" } }, yaxis: { title: { text: "mean return" } } } };
  } });

const critic = data => section("critic", "Critic", "Its values of prefixes, against what the policy went on to earn from there.", () => {
  const runs = data.runs.filter(run => has(run.critic));
  return runs.map(run => [
    card(data.runs.length > 1 ? el("h3", {}, swatch(run), ` ${run.name}`) : null, el("p", {}, run.critic.sentence), criticTable(run.critic)),
    el("div", { class: "two" }, criticCalibration(run), run.critic.rows.length ? card(el("h3", {}, "Over the run"), criticRows(run.critic)) : null),
  ]);
}, { why: reasons(data, "critic") });
