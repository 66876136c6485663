// Labels by people: figures, the doctor's findings, and disagreements side by side.

/** A longer table opens on demand. */
const MANY_ROWS = 30;

const opposed = each => el("article", { class: "card stack pair" },
  el("p", {}, el("b", {}, each.sides[0].person), " prefers the first, ", el("b", {}, each.sides[1].person), " the second response. ",
    figuresOf([`item ${each.item}`, `each right with a probability of ${percent(each.sureness)} or more, taken alone`])),
  promptOf(each.prompt),
  el("div", { class: "two" }, each.sides.map(({ person, model, text, seconds: time, note }) =>
    el("div", { class: "stack" }, answerOf(model, text, figuresOf([`preferred by ${person} after ${seconds(time)}`]), false),
      note ? el("p", { class: "small", dir: "auto" }, `${person}: ${note}`) : null))));

const labels = data => {
  const { sentences, findings, tables, disagreements, num_disagreements: total } = data.labels;
  const overview = section("verdict", "Overview", "", () => [
    card(sentences.map(text => el("p", {}, text))), findingsCard({ findings, runs: [] }),
    ...tables.map(({ title, columns, rows }) => card(fold(rows.length <= MANY_ROWS, el("h3", {}, title), table(columns, rows))))], { main: true });
  overview.node.prepend(el("h1", {}, data.title));
  return [overview, section("disagreements", "Second looks", "Opposite choices, the surest first. Sureness is by the person's reliability and biases.", () => disagreements.length && textList({
    id: "disagreements", rows: disagreements, filters: [["all", "all", () => true]], orders: [["sure", "surest", null]],
    textOf: each => `${each.item}\n${each.prompt}\n${each.sides.map(({ person, text }) => `${person}\n${text}`).join("\n")}`, draw: opposed,
    note: disagreements.length < total ? `This page has ${count(disagreements.length)} of ${count(total)} disagreements.` : "" }))];
};
