// Over-optimisation: what the proxy says and what judges say whom training never sees, over √KL.

const CROWDED = 60;

/** A run's course over √KL: its points, and where they are many, pale behind their smooth course. */
const frontierTraces = (run, figures, several) => {
  const { root_kl: x, update } = run.frontier, tint = runColour(run.index), crowded = x.length > CROWDED;
  const points = { type: "scatter", mode: crowded ? "markers" : "lines+markers", name: plain(run.name), legendgroup: run.name, x, y: figures, customdata: update, showlegend: several,
    marker: { size: crowded ? 4 : 5, color: crowded ? faint(tint, 0.3) : tint }, line: { color: faint(tint, 0.5), width: 1.5 },
    hovertemplate: "%{y:.4~g} at √KL %{x:.3~g}, update %{customdata}<extra>%{fullData.name}</extra>" };
  const course = { ...points, mode: "lines", x: smoothed(x, 0.9), y: smoothed(figures, 0.9), line: { color: tint, width: 2 }, hoverinfo: "skip", hovertemplate: null, showlegend: false };
  return crowded ? [points, course] : [points];
};

const frontier = data => section("overoptimisation", "Over-optimisation",
  "The reward that is trained on goes on rising; a judge's may turn. Over √KL, the axis on which both courses are simple.", () => {
    const runs = data.runs.map((run, index) => ({ ...run, index })).filter(run => run.stage === "ppo" && !run.frontier.empty);
    if (!runs.length) return empty((data.runs.find(run => run.stage === "ppo") ?? data.runs[0])?.frontier.empty ?? "There is no run.");
    const names = [...new Set(runs.flatMap(run => run.frontier.judges.map(judge => judge.name)))];
    const several = runs.length > 1;
    const layout = { hovermode: "closest", xaxis: { title: { text: "√KL to the reference (KL in nats per response)" } } };
    const proxy = chart({ title: "Proxy: what PPO maximises", unit: "mean score", size: "tall",
      build: () => ({ traces: runs.flatMap(run => frontierTraces(run, run.frontier.proxy, several)), layout }) });
    const judged = names.map(name => chart({ title: `Judge: ${name}`, unit: "figure", size: "tall", note: "The ring marks the best policy in this judge's eyes.",
      build: () => ({ layout, traces: runs.flatMap((run, number) => {
        const judge = run.frontier.judges.find(each => each.name === name);
        if (!judge) return [];
        const at = judge.best, limits = judge.low ? { error_y: { type: "data", symmetric: false, thickness: 1, width: 2, color: faint(runColour(run.index), 0.5),
          array: judge.high.map((high, place) => high - judge.figures[place]), arrayminus: judge.figures.map((value, place) => value - judge.low[place]) } } : {};
        return [...frontierTraces(run, judge.figures, several).map((trace, place) => (place ? trace : { ...trace, ...limits })),
          { type: "scatter", mode: "markers+text", x: [run.frontier.root_kl[at]], y: [judge.figures[at]], text: [`best: update ${run.frontier.update[at]}`], textposition: number % 2 ? "bottom right" : "top center", textfont: { color: runColour(run.index) },
            marker: { size: 14, color: "rgba(0,0,0,0)", line: { width: 2.5, color: runColour(run.index) } }, hoverinfo: "skip", showlegend: false, cliponaxis: false }];
      }) }) }));
    const told = runs.flatMap(run => run.frontier.judges.map(judge => {
      const last = judge.figures.length - 1;
      const lost = figure(judge.figures[judge.best], 3) !== figure(judge.figures[last], 3);
      const verdict = judge.best === last ? "the last update is the best so far" : !lost ? `the last update is as good as the best, ${run.frontier.update[judge.best]}` : `update ${run.frontier.update[judge.best]} is the best (${figure(judge.figures[judge.best], 3)}; at the end ${figure(judge.figures[last], 3)})`;
      return el("p", {}, `${run.name}, by the judge ${judge.name}: ${verdict}.`);
    }));
    return [told, el("div", { class: "two" }, proxy, judged),
      names.length ? null : empty("No judge was asked, so nobody can tell whether the proxy was gamed. A reward term of weight 0 is one: it is measured and never trained on.")];
  });
