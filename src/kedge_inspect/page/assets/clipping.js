// Clipping: the objective by sign of the advantage, with the run's ratios, and the share of tokens in each case.

const CASES = [
  ["raised", "A ≥ 0, ρ ≤ 1 + ε", "Made more likely.", "plus", 0.45],
  ["raised_held", "A ≥ 0, ρ > 1 + ε", "Clipped: already more likely; gradient 0.", "plus", 1],
  ["lowered", "A < 0, ρ ≥ 1 − ε", "Made less likely.", "minus", 0.45],
  ["lowered_held", "A < 0, ρ < 1 − ε", "Clipped: already less likely; gradient 0.", "minus", 1],
];

const summed = epochs => epochs.reduce((sum, epoch) => ({
  raised: epoch.ratios.raised.map((count, bin) => count + (sum.raised[bin] ?? 0)),
  lowered: epoch.ratios.lowered.map((count, bin) => count + (sum.lowered[bin] ?? 0)),
}), { raised: [], lowered: [] });

/** The objective over the ratio for advantages of one sign, with a histogram of ratios behind it. */
const objectiveChart = (clip, sign, boundsNow, ratiosNow, logScale) => chart({
  title: sign > 0 ? "A ≥ 0" : "A < 0", unit: "objective per unit of advantage, over the ratio ρ", size: "tall",
  note: `${sign > 0 ? "Above 1 + ε" : "Below 1 − ε"} the objective is flat and the gradient 0.`,
  build: () => {
    const { low, high } = boundsNow();
    const counts = ratiosNow()[sign > 0 ? "raised" : "lowered"], total = counts.reduce((a, b) => a + b, 0) || 1;
    const edge = bin => Math.exp(-clip.span + (2 * clip.span * bin) / counts.length);
    const bound = sign > 0 ? high : low;
    const reach = Math.max(4 * (high - 1), 4 * (1 - low), 0.1);
    const [left, right] = [Math.max(0, 1 - reach), 1 + reach];
    const isClipped = counts.map((_, bin) => { const middle = Math.sqrt(edge(bin) * edge(bin + 1)); return sign > 0 ? middle > bound : middle < bound; });
    const line = { type: "scatter", mode: "lines", hovertemplate: "%{y:.3~f}" };
    const clipped = sign > 0 ? [left, bound, bound] : [-bound, -bound, -right];
    return { traces: [
      { type: "bar", x: counts.map((_, bin) => (edge(bin) + edge(bin + 1)) / 2), width: counts.map((_, bin) => edge(bin + 1) - edge(bin)),
        y: counts.map(count => count / total), yaxis: "y2", name: "tokens of this run", customdata: counts.map((_, bin) => `${format(edge(bin), 3)} to ${format(edge(bin + 1), 3)}`),
        marker: { color: counts.map((_, bin) => `rgba(${color(sign > 0 ? "plus" : "minus")}, ${isClipped[bin] ? 0.9 : 0.4})`), line: { width: 0 } }, hovertemplate: "%{y:.3~%} of tokens, ρ %{customdata}" },
      { ...line, x: [left, right], y: sign > 0 ? [left, right] : [-left, -right], name: "unclipped: ρA", line: { color: color("muted"), dash: "dash", width: 1.5 } },
      { ...line, x: [left, bound, right], y: clipped, name: "clipped objective", line: { color: color("ink"), width: 2.5 } },
    ], layout: { hovermode: "x", bargap: 0,
      xaxis: { range: [left, right], title: { text: "ratio ρ" } },
      yaxis: { title: { text: sign > 0 ? "objective, A = 1" : "objective, A = −1" }, zeroline: true },
      yaxis2: { overlaying: "y", side: "right", showgrid: false, type: logScale() ? "log" : "linear", title: { text: "share of tokens" },
        tickformat: "~%", nticks: 5, ...(logScale() ? { range: [Math.log10(0.5 / total), 0.1], dtick: 1 } : { rangemode: "tozero" }) },
      shapes: [
        { type: "rect", yref: "paper", y0: 0, y1: 1, x0: sign > 0 ? bound : left, x1: sign > 0 ? right : bound, fillcolor: `rgba(${color(sign > 0 ? "plus" : "minus")}, 0.08)`, line: { width: 0 }, layer: "below" },
        ...[low, 1, high].map(at => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: at, x1: at, line: { color: color("muted"), width: 1, dash: "dot" } })),
      ] } };
  },
});

const casesTable = epochs => {
  const mark = (name, opacity) => el("span", { class: "case", style: { background: `rgba(var(--${name}), ${opacity})` } });
  const row = (name, text, shares, tint, opacity) => [[mark(tint, opacity), name, el("span", { class: "aside" }, text)], ...shares];
  return table(["Case", ...epochs.map((_, at) => `epoch ${at + 1}`)], [
    ...CASES.map(([key, name, text, tint, opacity]) => row(name, text, epochs.map(epoch => percent(epoch.cases[key])), tint, opacity)),
    [["Approximate KL", el("span", { class: "aside" }, "Distance of the policy from the one that sampled, nats per token.")], ...epochs.map(epoch => format(epoch.approx_kl, 3))],
  ]);
};

const clippedChart = epochsNow => chart({
  title: "Clipped in each epoch", unit: "share of tokens", note: "Each epoch over the same responses moves the policy further, so more tokens are clipped.",
  build: () => ({ traces: ["raised_held", "lowered_held"].map((key, at) => ({
    type: "bar", name: at ? "A < 0" : "A ≥ 0", x: epochsNow().map((_, epoch) => `epoch ${epoch + 1}`), y: epochsNow().map(epoch => epoch.cases[key]),
    marker: { color: `rgb(${color(at ? "minus" : "plus")})` }, hovertemplate: "%{y:.3~%}" })),
  layout: { barmode: "stack", yaxis: { tickformat: "~%", rangemode: "tozero" }, bargap: 0.4 } }),
});

const clippedCurves = (clip, index) => chart({
  title: "Clipped over the run", unit: "share of tokens", note: "Clip fraction of each epoch.",
  build: () => ({ traces: clip.whole.map((_, epoch) => ({
    type: "scatter", mode: clip.updates.length > 30 ? "lines" : "lines+markers", name: `epoch ${epoch + 1}`, x: clip.updates.map(each => each.update), y: clip.updates.map(each => each.epochs[epoch]?.clip_fraction ?? null),
    line: { color: runColor(index), width: 2, dash: DASHES[epoch % 4] }, marker: { size: 4, color: runColor(index) }, hovertemplate: "%{y:.3~%}" })),
  layout: { xaxis: { title: { text: "update" } }, yaxis: { tickformat: "~%", rangemode: "tozero" } } }),
});

const clipping = data => {
  let chosen = null, updateAt = 0, epochAt = 0, logScale = true;
  const part = section("clipping", "Clipping", "The ratios of the run on the clipped objective, and the share of tokens in each case.", () => {
    const runs = data.runs.filter(each => has(each.clipping)), run = runs.find(each => each.name === chosen) ?? runs[0];
    if (!run) return null;
    const clip = run.clipping;
    updateAt = Math.min(updateAt, clip.updates.length);
    const boundsNow = () => (updateAt ? clip.updates[updateAt - 1] : clip);
    const epochsNow = () => (updateAt ? clip.updates[updateAt - 1].epochs : clip.whole);
    const ratiosNow = () => summed(epochAt ? epochsNow().slice(epochAt - 1, epochAt) : epochsNow());
    const charts = [objectiveChart(clip, 1, boundsNow, ratiosNow, () => logScale), objectiveChart(clip, -1, boundsNow, ratiosNow, () => logScale), clippedChart(epochsNow)];
    const cases = el("div", {}, casesTable(epochsNow()));
    const change = () => { redraw(charts.map(each => each.host)); cases.replaceChildren(casesTable(epochsNow())); };
    return [
      el("div", { class: "controls" },
        runs.length > 1 ? choice("Run", runs.map(each => [each.name, each.name]), run.name, name => { chosen = name; updateAt = epochAt = 0; part.refresh(); }) : null,
        slider("Update", { min: 0, max: clip.updates.length, value: updateAt, show: at => (at ? `${clip.updates[at - 1].update}` : "whole run") }, at => { updateAt = at; change(); }),
        choice("Epoch", [[0, "all"], ...clip.whole.map((_, at) => [at + 1, String(at + 1)])], epochAt, at => { epochAt = at; change(); }),
        el("label", { class: "field" }, el("input", { type: "checkbox", checked: logScale, onchange: event => { logScale = event.target.checked; change(); } }), el("span", {}, "logarithmic shares"))),
      clip.loss === "clipped" ? null : el("p", { class: "muted" }, `This run's policy loss is ${clip.loss}: the charts show what clipping would do.`),
      el("div", { class: "two" }, charts.slice(0, 2)),
      card(el("h3", {}, "The four cases"), cases),
      el("div", { class: "two" }, charts[2], clippedCurves(clip, run.color)),
      clip.updates.length < clip.of ? el("p", { class: "muted small" }, `The slider offers ${clip.updates.length} of ${clip.of} updates; “whole run” covers all of them.`) : null,
    ];
  }, { why: reasons(data, "clipping") });
  return part;
};
