// Evaluations: outcomes, both sides' figures, the judge's consistency, and every pair of responses.

const OUTCOMES = ["won", "tied", "lost"];
const interval = (value, show) => (value && known(value.value) ? `${show(value.value)}${known(value.low) ? ` (${show(value.low)} to ${show(value.high)})` : ""}` : "–");

const outcomeBar = each => el("div", { class: "outcomes", role: "img", "aria-label": OUTCOMES.map(name => `${name} ${each[name]}`).join(", ") },
  OUTCOMES.map(name => (each[name] ? el("span", { class: name, style: { "flex-grow": String(each[name]) } }, count(each[name])) : null)));

/** A column for the controlled win rate only if a run has one. */
const outcomesTable = runs => {
  const controlled = runs.some(run => run.evaluation.win_rate_controlled);
  return table(["", "won · tied · lost", "win rate", ...(controlled ? ["controlled"] : []), "against", "judge", "KL"], runs.map(({ name, evaluation: each }) => [
    runs.length > 1 ? name : each.model, outcomeBar(each), el("b", {}, interval(each.win_rate, percent)), ...(controlled ? [interval(each.win_rate_controlled, percent)] : []),
    each.against, each.judge, interval(each.kl, value => format(value, 3))]), [1], true);
};

const sidesTable = each => {
  const rows = [["Score", "score", value => interval(value, other => format(other, 3))], ["Length, tokens", "length", value => format(value, 3)], ["End with a stop token", "eos_rate", percent]];
  return table(["", "model", "against"], rows.filter(([, name]) => each[name] !== null && each[name] !== undefined)
    .map(([label, name, show]) => [label, show(each[name]), show(each[`${name}_against`])]));
};

const shareOf = (part, whole) => percent(whole ? part / whole : NaN);
const ordersCard = each => {
  if (!each.orders) return null;
  const { pairs, same, first, second } = each.orders;
  return card(el("h3", {}, "The judge in both orders"), table(["", "pairs", "share"], [
    ["Same winner in both orders", count(same), shareOf(same, pairs)],
    ["Always the response shown first", count(first), shareOf(first, pairs)],
    ["Always the response shown second", count(second), shareOf(second, pairs)],
    ["A tie in one order only", count(pairs - same - first - second), shareOf(pairs - same - first - second, pairs)]]),
  el("p", { class: "muted small" }, "A pair counts as decided only if both orders have the same winner; all others are ties."));
};

const biasSentences = each => [
  each.win_rate_controlled ? `If both sides were alike in ${each.win_rate_controlled.for.join(", ")}, the win rate would be ${interval(each.win_rate_controlled, percent)}, by logistic regression over the pairs.` : "",
  each.longer_wins ? `The longer response wins ${interval(each.longer_wins, percent)} of ${counted(each.num_unequal_lengths, "pair")} of different length; ${known(each.longer_wins_expected) ? `${percent(each.longer_wins_expected)} is expected from the win rates alone` : "50% is no length bias"}.` : "",
  each.num_equal ? `${counted(each.num_equal, "pair")} with equal texts.` : "",
  each.num_judged < each.num_prompts ? `The judge did not decide ${count(each.num_prompts - each.num_judged)} of ${counted(each.num_prompts, "pair")}.` : "",
].filter(Boolean).map(text => el("p", {}, text));

const frontierOf = (each, index) => chart({ title: "Frontier", unit: `${each.frontier.of} over √KL to ${each.against}`, size: "tall", note: "The further up and left, the better. Bars are confidence intervals.",
  summary: each.frontier.points.map(point => `${point.model}: ${format(point.value, 3)} at √KL ${format(point.root_kl, 3)}`).join("; "),
  build: () => {
    const { points } = each.frontier;
    return { traces: [{ type: "scatter", mode: "lines+markers+text", x: points.map(point => point.root_kl), y: points.map(point => point.value),
      text: points.map(point => plain(point.model.split("/").slice(-2).join("/"))), textposition: points.map((_, at) => (at === 0 ? "top right" : at === points.length - 1 ? "top left" : "top center")), textfont: { size: 11 }, cliponaxis: false,
      error_y: { type: "data", symmetric: false, thickness: 1, width: 3, array: points.map(point => point.high - point.value), arrayminus: points.map(point => point.value - point.low) },
      line: { color: faint(runColor(index), 0.5), width: 1.5 }, marker: { size: 8, color: runColor(index) }, hovertemplate: "%{text}: %{y:.4~g} at √KL %{x:.3~g}<extra></extra>" }],
    layout: { hovermode: "closest", showlegend: false, xaxis: { rangemode: "tozero", title: { text: "√KL (KL in nats per response)" } } } };
  } });

const pairCard = each => el("article", { class: "card stack pair" },
  el("p", {}, el("span", { class: `badge ${each.outcome}` }, each.outcome),
    each.orders ? el("span", { class: "muted small" }, ` shown first: ${each.orders[0] || "undecided"}, shown second: ${each.orders[1] || "undecided"}`) : null),
  promptOf(each.prompt),
  el("div", { class: "two" },
    answerOf("model", each.completion, figuresOf([known(each.score) && `score ${format(each.score, 3)}`, each.reason, known(each.length) && counted(each.length, "token")]), each.outcome === "won"),
    answerOf("against", each.completion_against, figuresOf([known(each.score_against) && `score ${format(each.score_against, 3)}`, each.reason_against, known(each.length_against) && counted(each.length_against, "token")]), each.outcome === "lost")));

const marginOf = each => (known(each.score) && known(each.score_against) ? each.score - each.score_against : null);
const pairsOf = run => {
  const { pairs, of } = run.evaluation, has = name => pairs.some(each => each.outcome === name);
  const filters = [["all", `all ${count(pairs.length)}`, () => true], ...[...OUTCOMES, "undecided"].filter(has)
    .map(name => [name, `${name} ${count(pairs.filter(each => each.outcome === name).length)}`, each => each.outcome === name])];
  const contradicted = each => each.orders && each.orders.includes("model") && each.orders.includes("against");
  if (pairs.some(contradicted)) filters.push(["contradicted", "another winner in the other order", contradicted]);
  const orders = [["data", "as in the data", null]];
  if (pairs.some(each => marginOf(each) !== null)) orders.push(["best", "largest gain", descending(marginOf)], ["worst", "largest loss", ascending(marginOf)]);
  if (pairs.some(each => known(each.length))) orders.push(["longest", "longest", descending(each => each.length)]);
  return textList({ id: `pairs ${run.name}`, rows: pairs, filters, orders, textOf: each => `${each.prompt}\n${each.completion}\n${each.completion_against}`, draw: pairCard,
    note: pairs.length < of ? `This page has ${count(pairs.length)} of ${counted(of, "pair")} in judgments.jsonl.` : "" });
};

const agreementCard = data => (data.judge_agreement?.length ? card(el("h3", {}, "Agreement of the judges"),
  table(["", "pairs in common", "same outcome", "κ"], data.judge_agreement.map(each => [
    each.judges.map((judge, at) => `${judge} (${each.runs[at]})`).join(" and "), count(each.pairs), shareOf(each.same, each.pairs), format(each.kappa, 3)])),
  el("p", { class: "muted small" }, "Evaluations of the same responses by several judges. Cohen's κ is 0 for judges that agree by chance, and 1 for judges that always agree.")) : null);

/** The last distribution has the color of the run. */
const modelLast = sides => ({ ...sides, named: sides.named.toReversed() });

const evaluation = data => {
  const judges = run => run.stage === "evaluate" && run.evaluation.empty !== ""; // not the check of a critic
  let chosen = "";
  const part = section("evaluation", "Evaluation", "Which response the judge prefers, prompt by prompt. Intervals are 95 % confidence intervals over prompts.", () => {
    const runs = data.runs.filter(judges), done = runs.filter(run => !run.evaluation.empty);
    const waiting = runs.filter(run => run.evaluation.empty).map(run => empty(`${run.name}: ${run.evaluation.empty}`));
    if (!done.length) return waiting;
    const run = done.find(each => each.name === chosen) ?? done[0], each = run.evaluation;
    const charts = [each.frontier && frontierOf(each, run.index),
      each.scores && distributions("Scores", "share of responses by score", modelLast(each.scores), "The judge's scores of both sides.", { index: run.index }),
      each.lengths && distributions("Lengths", "share of responses by length", modelLast(each.lengths), "A judge that prefers long responses rewards length.", { index: run.index, axis: "tokens" })];
    return [waiting, card(outcomesTable(done)), agreementCard(data),
      done.length > 1 ? choice("Evaluation", done.map(one => [one.name, one.name]), run.name, name => { chosen = name; part.refresh(); }) : null,
      grid([card(el("h3", {}, "Both sides"), sidesTable(each), biasSentences(each)), ordersCard(each), ...charts].filter(Boolean), 3),
      fold(!narrow.matches, el("h3", {}, "Responses side by side"), pairsOf(run))];
  }, { main: true });
  return part;
};
