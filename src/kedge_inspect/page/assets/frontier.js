// Over-optimization: the proxy reward and the judges that are not trained on, over √KL.

const CROWDED = 60;

/** One score of a run over √KL: its points, faded behind a smoothed curve if there are many. */
const frontierTraces = (run, values, several) => {
  const { root_kl: x, update } = run.frontier, tint = runColor(run.color), crowded = x.length > CROWDED;
  const points = { type: "scatter", mode: crowded ? "markers" : "lines+markers", name: plain(run.name), legendgroup: run.name, x, y: values, customdata: update, showlegend: several,
    marker: { size: crowded ? 4 : 5, color: crowded ? faint(tint, 0.3) : tint }, line: { color: faint(tint, 0.5), width: 1.5 },
    hovertemplate: "%{y:.4~g} at √KL %{x:.3~g}, update %{customdata}<extra>%{fullData.name}</extra>" };
  const curve = { ...points, mode: "lines", x: smoothed(x, 0.9), y: smoothed(values, 0.9), line: { color: tint, width: 2 }, hoverinfo: "skip", hovertemplate: null, showlegend: false };
  return crowded ? [points, curve] : [points];
};

const frontier = data => section("overoptimization", "Over-optimization",
  "The reward that is trained on keeps rising, while a judge's score may turn. Both over √KL to the reference.", () => {
    const runs = data.runs.filter(run => run.stage === "ppo" && has(run.frontier));
    if (!runs.length) return null;
    const names = [...new Set(runs.flatMap(run => run.frontier.judges.map(judge => judge.name)))];
    const several = runs.length > 1;
    const layout = { hovermode: "closest", xaxis: { title: { text: "√KL to the reference (KL in nats per response)" } } };
    const proxy = chart({ title: "Proxy: what PPO maximizes", unit: "mean score", size: "tall",
      build: () => ({ traces: runs.flatMap(run => frontierTraces(run, run.frontier.proxy, several)), layout }) });
    const judged = names.map(name => chart({ title: `Judge: ${name}`, unit: "mean score", size: "tall", note: "The ring marks the best policy according to this judge.",
      build: () => ({ layout, traces: runs.flatMap((run, number) => {
        const judge = run.frontier.judges.find(each => each.name === name);
        if (!judge) return [];
        const at = judge.best, limits = judge.low ? { error_y: { type: "data", symmetric: false, thickness: 1, width: 2, color: faint(runColor(run.color), 0.5),
          array: judge.high.map((high, place) => high - judge.values[place]), arrayminus: judge.values.map((value, place) => value - judge.low[place]) } } : {};
        return [...frontierTraces(run, judge.values, several).map((trace, place) => (place ? trace : { ...trace, ...limits })),
          { type: "scatter", mode: "markers+text", x: [run.frontier.root_kl[at]], y: [judge.values[at]], text: [`best: update ${run.frontier.update[at]}`], textposition: number % 2 ? "bottom right" : "top center", textfont: { color: runColor(run.color) },
            marker: { size: 14, color: "rgba(0,0,0,0)", line: { width: 2.5, color: runColor(run.color) } }, hoverinfo: "skip", showlegend: false, cliponaxis: false }];
      }) }) }));
    const sentences = runs.flatMap(run => run.frontier.judges.map(judge => {
      const last = judge.values.length - 1;
      const lost = format(judge.values[judge.best], 3) !== format(judge.values[last], 3);
      const verdict = judge.best === last ? "the last update is the best so far" : !lost ? `the last update is as good as the best one, ${run.frontier.update[judge.best]}` : `update ${run.frontier.update[judge.best]} is the best (${format(judge.values[judge.best], 3)}; at the end ${format(judge.values[last], 3)})`;
      return el("p", {}, `${run.name}, by the judge ${judge.name}: ${verdict}.`);
    }));
    return [sentences, el("div", { class: "two" }, proxy, judged),
      names.length ? null : empty("Without a judge, over-optimization of the proxy cannot be detected. A reward term of weight 0 is a judge: it is measured but not trained on.")];
  }, { why: reasons(data, "frontier") });
