// Held-out evaluations during PPO: a row for each, with the best one marked.

const heldOutTable = ({ columns, rows }) => table(["Update", ...columns.map(column => column.label)], rows.map(row => [
  [count(row.update), row.is_best ? el("span", { class: "badge best" }, "best") : null],
  ...row.values.map((value, at) => (columns[at].is_share ? percent(value) : format(value, 3)))]));

const heldOut = data => section("held-out", "Held-out evaluations", "The policy on held-out prompts, at the start, during training and at the end.", () => {
  const runs = data.runs.filter(run => has(run.held_out));
  return runs.length ? grid(runs.map(run => el("div", { class: "card stack figures held-out" }, data.runs.length > 1 ? el("h3", {}, swatch(run), ` ${run.name}`) : null,
    run.held_out.sentence ? el("p", {}, run.held_out.sentence) : null, heldOutTable(run.held_out),
    run.held_out.left_out ? el("p", { class: "muted small" }, `${count(run.held_out.left_out)} more in evaluations.jsonl.`) : null)), 2) : null;
}, { why: reasons(data, "held_out") });
