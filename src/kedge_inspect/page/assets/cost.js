// Cost: seconds and FLOPs by phase, equivalent fine-tuning steps, and memory by role.

const PHASES = { rollout: "Rollout", reward: "Reward", experience: "Experience", train: "Training", other: "Other", waiting_for_rollout: "Waiting for rollout" };

const inBackground = (run, phase) => run.cost.background.includes(phase.phase);

// What a phase adds to the run; in the background that is no time.
const added = (run, phase, key) => (key === "seconds" && inBackground(run, phase) ? 0 : phase[key] ?? 0);

const sumOf = (run, key) => run.cost.phases.reduce((sum, each) => sum + added(run, each, key), 0);

const shareChart = (title, unit, runs, key) => chart({ title, unit, size: "short", build: () => ({
  traces: Object.keys(PHASES).flatMap((phase, at) => {
    const parts = runs.map(run => run.cost.phases.filter(each => each.phase === phase).reduce((sum, each) => sum + added(run, each, key), 0));
    if (!parts.some(Boolean)) return [];
    const totals = runs.map(run => sumOf(run, key) || 1);
    return [{ type: "bar", orientation: "h", name: PHASES[phase], y: runs.map(run => plain(run.name)), x: parts.map((part, place) => part / totals[place]),
      customdata: parts.map(part => (key === "seconds" ? seconds(part) : `${large(part)}FLOP`)), marker: { color: color(`phase${at}`) }, hovertemplate: "%{x:.1%}: %{customdata}" }];
  }),
  layout: { barmode: "stack", hovermode: "closest", xaxis: { tickformat: ".0%", range: [0, 1] }, yaxis: { automargin: true, showgrid: false, autorange: "reversed" }, bargap: 0.45 } }) });

const phasesTable = run => {
  const total = sumOf(run, "seconds"), flops = sumOf(run, "flops");
  const share = text => el("span", { class: "aside" }, text);
  return table(["Phase", "time", ...(flops ? ["FLOPs", "FLOP/s"] : [])], run.cost.phases.map(each => [PHASES[each.phase], [seconds(each.seconds), share(inBackground(run, each) ? "in the background" : percent(each.seconds / total))],
    ...(flops ? [each.flops ? [large(each.flops), share(percent(each.flops / flops))] : "–", each.flops ? large(each.flops / each.seconds) : "–"] : [])]));
};

const memoryTable = run => table(["Role", "parameters", "weights", "optimizer"],
  run.cost.roles.map(role => [role.role, large(role.parameters), gibibytes(role.weights), role.trained ? gibibytes(role.optimizer) : "not trained"]));

const cost = data => section("cost", "Cost", "Time, FLOPs and memory.", () => {
  const runs = data.runs.filter(run => has(run.cost)), phased = runs.filter(run => run.cost.phases.length);
  if (!runs.length) return null;
  const sentences = runs.map(run => el("p", {}, el("b", {}, run.name), `: ${seconds(run.cost.seconds)} for ${count(run.cost.updates)} ${unitsOf(run.stage)[0].toLowerCase()}`,
    known(run.cost.sft_steps) ? `; one update costs as much as ${format(run.cost.sft_steps, 3)} fine-tuning steps on the same tokens` : "",
    Object.entries(run.cost.peak).map(([place, size]) => `; peak ${place} memory ${gibibytes(size)}`), "."));
  const counted = phased.filter(run => run.cost.phases.some(phase => phase.flops));
  return [card(sentences),
    phased.length ? el("div", { class: "two" }, shareChart("Time", "share of each phase", phased, "seconds"),
      counted.length ? shareChart("FLOPs", "share of each phase", counted, "flops") : null) : null,
    phased.length || runs.some(run => run.cost.roles.length) ? grid(runs.flatMap(run => [
      run.cost.phases.length ? card(el("h3", {}, `By phase${runs.length > 1 ? `: ${run.name}` : ""}`), phasesTable(run)) : null,
      run.cost.roles.length ? card(el("h3", {}, `Memory by role${runs.length > 1 ? `: ${run.name}` : ""}`), memoryTable(run)) : null]).filter(Boolean), 2) : null];
});
