// Reward model: accuracy, calibration, and distributions of its scores.

const distributions = (title, unit, scores, note, { index = 0, axis = "score" } = {}) => chart({ title, unit, note, size: "tall",
  summary: scores.named.map(each => `${each.name}: median ${format(each.median, 3)}`).join("; "),
  build: () => {
    const tints = scores.named.length > 1 ? [color("muted"), runColor(index)] : [runColor(index)];
    const middles = scores.edges.slice(1).map((edge, bin) => (edge + scores.edges[bin]) / 2);
    return { traces: scores.named.map((each, at) => ({ type: "bar", name: `${plain(each.name)} (median ${format(each.median, 3)})`, x: middles, y: each.shares,
      marker: { color: faint(tints[at], 0.5), line: { width: 0 } }, hovertemplate: "%{y:.3~%}" })),
    layout: { barmode: "overlay", bargap: 0, xaxis: { title: { text: axis } }, yaxis: { tickformat: "~%", rangemode: "tozero" },
      shapes: scores.named.map((each, at) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: each.median, x1: each.median, line: { color: tints[at], width: 1.5, dash: "dash" } })) } };
  } });

const calibrationChart = model => chart({ title: "Calibration", unit: "accuracy over confidence", size: "tall",
  note: `The dashed line is perfect calibration. Calibration error: ${format(model.error, 3)}. Area: number of pairs.`,
  build: () => {
    const most = Math.max(...model.bins.map(bin => bin.num_pairs));
    return { traces: [
      { type: "scatter", mode: "lines", x: [0.5, 1], y: [0.5, 1], name: "perfect", line: { color: color("muted"), dash: "dash", width: 1.2 }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines+markers", name: "reward model", x: model.bins.map(bin => bin.confidence), y: model.bins.map(bin => bin.accuracy), customdata: model.bins.map(bin => bin.num_pairs),
        line: { color: faint(runColor(model.index), 0.5), width: 1.5 }, marker: { color: runColor(model.index), size: model.bins.map(bin => 6 + 16 * Math.sqrt(bin.num_pairs / most)) }, hovertemplate: "%{y:.1%} correct at %{x:.1%} confidence: %{customdata} pairs" },
    ], layout: { hovermode: "closest", showlegend: false, xaxis: { tickformat: ".0%", title: { text: "confidence" } }, yaxis: { tickformat: ".0%" } } };
  } });

const accuracyTable = model => table(["", "ranked correctly", "from", "to"],
  [["Reward model", model.accuracy], ["Picking the longer response", model.length_accuracy]].filter(([, interval]) => interval)
    .map(([name, interval]) => [name, el("b", {}, percent(interval.value)), percent(interval.low), percent(interval.high)]));

const rewardModel = data => section("reward-model", "Reward model", "Accuracy and calibration on held-out pairs, and scores before and after PPO.", () => {
  const indexOf = (name, other) => data.runs.find(run => run.name === name)?.index ?? other;
  const models = data.runs.flatMap(run => run.reward_models.map(model => ({ ...model, index: indexOf(model.name, run.index) })));
  const judged = models.filter(model => has(model));
  const parts = judged.map(model => [
    card(el("h3", {}, judged.length > 1 ? model.name : `Accuracy on ${counted(model.num_pairs ?? 0, "held-out pair")}`), accuracyTable(model)),
    el("div", { class: "two" }, model.bins.length ? calibrationChart(model) : null,
      model.scores ? distributions("Chosen and rejected", "share of responses by score", { ...model.scores, named: model.scores.named.toReversed() }, "The further apart, the more confident it is. Scores as PPO uses them, drawn from quantiles.", { index: model.index }) : null),
  ]);
  const before = data.runs.filter(run => has(run.policy_scores) && run.policy_scores.scores).map(run => distributions(
    `Scores of the policy${data.runs.length > 1 ? `: ${run.name}` : ""}`, "share of responses by score", run.policy_scores.scores, "First and last update, drawn from quantiles.", { index: run.index }));
  return [parts, before.length ? el("div", { class: "two" }, before) : null];
}, { why: () => data.runs.flatMap(run => run.reward_models.map(model => model.empty)).filter(Boolean) });
