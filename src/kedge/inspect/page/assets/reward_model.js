// Reward model: how often it is right, whether it knows, and where its scores lie.

const distributions = (title, unit, scores, note) => chart({ title, unit, note, size: "tall",
  summary: scores.named.map(each => `${each.name}: median ${figure(each.median, 3)}`).join("; "),
  build: () => {
    const middles = scores.edges.slice(1).map((edge, bin) => (edge + scores.edges[bin]) / 2);
    return { traces: scores.named.map((each, at) => ({ type: "bar", name: `${plain(each.name)} (median ${figure(each.median, 3)})`, x: middles, y: each.shares,
      marker: { color: faint(runColour(at ? 1 : 0), 0.55), line: { width: 0 } }, hovertemplate: "%{y:.3~%}" })),
    layout: { barmode: "overlay", bargap: 0, xaxis: { title: { text: "score" } }, yaxis: { tickformat: "~%", rangemode: "tozero" },
      shapes: scores.named.map((each, at) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: each.median, x1: each.median, line: { color: runColour(at ? 1 : 0), width: 1.5, dash: "dash" } })) } };
  } });

const calibrationChart = model => chart({ title: "Calibration", unit: "share of pairs in which it is right, over its confidence", size: "tall",
  note: `On the dashed line it is as often right as it believes. Mean distance: ${figure(model.error, 3)}. Areas: numbers of pairs.`,
  build: () => {
    const most = Math.max(...model.bins.map(bin => bin.num_pairs));
    return { traces: [
      { type: "scatter", mode: "lines", x: [0.5, 1], y: [0.5, 1], name: "honest", line: { color: colour("muted"), dash: "dash", width: 1.2 }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines+markers", name: "reward model", x: model.bins.map(bin => bin.confidence), y: model.bins.map(bin => bin.accuracy), customdata: model.bins.map(bin => bin.num_pairs),
        line: { color: faint(runColour(0), 0.5), width: 1.5 }, marker: { color: runColour(0), size: model.bins.map(bin => 6 + 16 * Math.sqrt(bin.num_pairs / most)) }, hovertemplate: "%{y:.1%} right at %{x:.1%}: %{customdata} pairs" },
    ], layout: { hovermode: "closest", showlegend: false, xaxis: { tickformat: ".0%", title: { text: "confidence" } }, yaxis: { tickformat: ".0%" } } };
  } });

const accuracyTable = model => table(["", "in the right order", "from", "to"],
  [["Reward model", model.accuracy], ["Taking the longer answer", model.length_accuracy]].filter(([, interval]) => interval)
    .map(([name, interval]) => [name, el("b", {}, percent(interval.value)), percent(interval.low), percent(interval.high)]));

const rewardModel = data => section("reward-model", "Reward model", "How often it is right, whether it knows, and where its scores lie before and after.", () => {
  const models = data.runs.flatMap(run => run.reward_models), policies = data.runs.filter(run => run.stage === "ppo");
  const judged = models.filter(model => !model.empty);
  const parts = judged.map(model => [
    card(el("h3", {}, judged.length > 1 ? model.name : `Accuracy on ${(model.num_pairs ?? 0).toLocaleString("en-GB")} held-out pairs`), accuracyTable(model)),
    el("div", { class: "two" }, model.bins.length ? calibrationChart(model) : null,
      model.scores ? distributions("Chosen and rejected", "share of answers by their score", model.scores, "The further apart, the surer it is. Scores as PPO sees them, from their quantiles.")
        : empty("The scores of chosen and rejected answers are not known: runs of this version put their quantiles into summary.json.")),
  ]);
  const before = policies.map(run => run.policy_scores.empty ? null : distributions(`The policy's scores${policies.length > 1 ? `: ${run.name}` : ""}`, "share of responses by their score", run.policy_scores.scores,
    "First and last update, from their quantiles.")).filter(Boolean);
  return [parts,
    judged.length ? null : empty(models[0]?.empty ?? "No reward model was trained in these runs: kedge reward trains one, and a run that was trained against it shows it here."),
    before.length ? el("div", { class: "two" }, before) : policies.length ? empty(policies[0].policy_scores.empty) : null];
});
