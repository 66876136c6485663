// Cost: seconds and FLOPs by phase, equivalent fine-tuning steps, and memory by role.

const PHASES = { rollout: "Rollout", reward: "Reward", experience: "Experience", train: "Training", other: "Other" };

const shareChart = (title, unit, runs, key) => chart({ title, unit, size: "short", build: () => ({
  traces: Object.keys(PHASES).flatMap((phase, at) => {
    const parts = runs.map(run => run.cost.phases.find(each => each.phase === phase)?.[key] ?? 0);
    if (!parts.some(Boolean)) return [];
    const totals = runs.map(run => run.cost.phases.reduce((sum, each) => sum + (each[key] ?? 0), 0) || 1);
    return [{ type: "bar", orientation: "h", name: PHASES[phase], y: runs.map(run => plain(run.name)), x: parts.map((part, place) => part / totals[place]),
      customdata: parts.map(part => (key === "seconds" ? seconds(part) : `${large(part)}FLOP`)), marker: { color: runColor(at) }, hovertemplate: "%{x:.1%}: %{customdata}" }];
  }),
  layout: { barmode: "stack", hovermode: "closest", xaxis: { tickformat: ".0%", range: [0, 1] }, yaxis: { automargin: true, showgrid: false, autorange: "reversed" }, bargap: 0.45 } }) });

const phasesTable = run => {
  const total = run.cost.phases.reduce((sum, each) => sum + each.seconds, 0), flops = run.cost.phases.reduce((sum, each) => sum + (each.flops ?? 0), 0);
  return table(["Phase", "time", "share", ...(flops ? ["FLOPs", "share", "FLOP/s"] : [])], run.cost.phases.map(each => [PHASES[each.phase], seconds(each.seconds), percent(each.seconds / total),
    ...(flops ? [each.flops ? large(each.flops) : "–", each.flops ? percent(each.flops / flops) : "–", each.flops ? large(each.flops / each.seconds) : "–"] : [])]));
};

const memoryTable = run => table(["Role", "parameters", "weights", "optimizer", "trained"],
  run.cost.roles.map(role => [role.role, large(role.parameters), gibibytes(role.weights), gibibytes(role.optimizer), role.trained ? "yes" : "no"]));

const cost = data => section("cost", "Cost", "Time, FLOPs and memory.", () => {
  const runs = data.runs.filter(run => !run.cost.empty), phased = runs.filter(run => run.cost.phases.length);
  if (!runs.length) return whyEmpty(data, "cost");
  const sentences = runs.map(run => el("p", {}, el("b", {}, run.name), `: ${seconds(run.cost.seconds)} for ${count(run.cost.updates)} ${run.stage === "ppo" ? "updates" : "steps"}`,
    known(run.cost.sft_steps) ? `; one update costs as much as ${format(run.cost.sft_steps, 3)} fine-tuning steps on the same tokens` : "",
    Object.entries(run.cost.peak).map(([place, size]) => `; peak ${place} memory ${gibibytes(size)}`), "."));
  const counted = phased.filter(run => run.cost.phases.some(phase => phase.flops));
  return [card(sentences),
    phased.length ? el("div", { class: "two" }, shareChart("Time", "share of each phase", phased, "seconds"),
      counted.length ? shareChart("FLOPs", "share of each phase", counted, "flops") : empty("FLOPs were not counted: the run was written by an earlier version.")) : null,
    el("div", { class: "two" }, phased.map(run => card(el("h3", {}, phased.length > 1 ? `By phase: ${run.name}` : "By phase"), phasesTable(run))),
    runs.filter(run => run.cost.roles.length).map(run => card(el("h3", {}, `Memory by role${phased.length > 1 ? `: ${run.name}` : ""}`), memoryTable(run)))),
    phased.length && !runs.some(run => run.cost.roles.length) ? empty("Model sizes are unknown: the run has no roles.json.") : null];
});
