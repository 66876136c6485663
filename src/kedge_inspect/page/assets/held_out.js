// Held-out evaluations during PPO: a row for each, with the best one marked.

const heldOutTable = ({ columns, rows }) => table(["Update", ...columns.map(column => column.label)], rows.map(row => [
  [count(row.update), row.is_best ? el("span", { class: "badge best" }, "best") : null],
  ...row.values.map((value, at) => (columns[at].is_share ? percent(value) : format(value, 3)))]));

const sideOf = (title, { text, score, length, reason }, marked) => answerOf(title, text, figuresOf([known(score) && `score ${format(score, 3)}`, reason, known(length) && `${length} tokens`]), marked);
const gainOf = ({ before, after }) => (known(before.score) && known(after.score) ? after.score - before.score : null);
const beforeAndAfter = run => {
  const { pairs, num_pairs: of, ends: [start, end] } = run.held_out, filters = [["all", `all ${count(pairs.length)}`, () => true]];
  for (const [name, fits] of [["better", gain => gain > 0], ["equal", gain => gain === 0], ["worse", gain => gain < 0]]) {
    const found = pairs.filter(pair => gainOf(pair) !== null && fits(gainOf(pair)));
    if (found.length) filters.push([name, `${name} ${count(found.length)}`, pair => found.includes(pair)]);
  }
  return textList({ id: `before and after ${run.name}`, rows: pairs, filters, orders: [["data", "as in the data", null], ["best", "largest gain", descending(gainOf)], ["worst", "largest loss", ascending(gainOf)]],
    textOf: pair => `${pair.prompt}\n${pair.before.text}\n${pair.after.text}`,
    draw: pair => el("article", { class: "card stack pair" }, promptOf(pair.prompt), el("div", { class: "two" },
      sideOf(start, pair.before, gainOf(pair) < 0), sideOf(end, pair.after, gainOf(pair) > 0))),
    note: pairs.length < of ? `This page has ${count(pairs.length)} of ${counted(of, "pair")} in evaluations.jsonl.` : "" });
};

const heldOut = data => section("held-out", "Held-out evaluations", "The policy on held-out prompts, at the start, during training and at the end.", () => {
  const runs = data.runs.filter(run => has(run.held_out));
  return runs.length ? grid(runs.map(run => el("div", { class: "card stack figures held-out" }, data.runs.length > 1 ? el("h3", {}, swatch(run), ` ${run.name}`) : null,
    run.held_out.sentence ? el("p", {}, run.held_out.sentence) : null, heldOutTable(run.held_out),
    run.held_out.left_out ? el("p", { class: "muted small" }, `${count(run.held_out.left_out)} more in evaluations.jsonl.`) : null,
    run.held_out.pairs.length ? fold(!narrow.matches, el("h3", {}, "Before and after"), beforeAndAfter(run)) : null)), runs.some(run => run.held_out.pairs.length) ? 1 : 2) : null;
}, { why: reasons(data, "held_out") });
