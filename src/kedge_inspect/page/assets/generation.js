// Generated responses: scores, lengths, and every response.

const generatedTable = runs => table(["", "responses", "prompts", "mean score", "tokens", "stopped", "distinct"], runs.map(({ name, generation: each }) => [
  name, count(each.num_responses ?? each.of), known(each.num_prompts) ? count(each.num_prompts) : "–", interval(each.score, value => format(value, 3)),
  format(each.length, 3), percent(each.eos_rate), known(each.num_distinct) ? count(each.num_distinct) : "–"]), [], true);

const generatedCard = each => el("article", { class: "card stack pair" }, promptOf(each.prompt),
  answerOf("response", each.completion, figuresOf([each.model, known(each.score) && `score ${format(each.score, 3)}`, each.reason, each.answer && `answer ${each.answer}`, each.stopped ? "" : "cut at the token limit"])));

const generatedList = run => {
  const { responses, of } = run.generation, cut = responses.filter(each => !each.stopped).length;
  const filters = [["all", `all ${count(responses.length)}`, () => true]];
  if (cut && cut < responses.length) filters.push(["stopped", `stopped ${count(responses.length - cut)}`, each => each.stopped], ["cut", `cut ${count(cut)}`, each => !each.stopped]);
  const orders = [["data", "as in the data", null]];
  if (responses.some(each => known(each.score))) orders.push(["best", "highest score", descending(each => each.score)], ["worst", "lowest score", ascending(each => each.score)]);
  orders.push(["longest", "longest", descending(each => each.completion.length)], ["shortest", "shortest", ascending(each => each.completion.length)]);
  return textList({ id: `responses ${run.name}`, rows: responses, filters, orders, textOf: each => `${each.prompt}\n${each.completion}`, draw: generatedCard,
    note: responses.length < of ? `This page has ${count(responses.length)} of ${counted(of, "response")} in ${run.stage === "generate" ? "responses" : "judgments"}.jsonl.` : "" });
};

const solvedTable = runs => table(["", "k", "pass@k", "maj@k"], runs.flatMap(({ name, generation: each }) => (each.solved ?? []).map(row => [
  runs.length > 1 ? `${name}: ${row.model}` : row.model, row.k, interval(row.pass, percent), interval(row.maj, percent)])), [1], true);

const generation = data => {
  const shows = run => run.generation.empty !== "";
  let chosen = "";
  const part = section("generation", "Responses", "What the policy wrote, with its scores if a reward was given.", () => {
    const runs = data.runs.filter(shows), done = runs.filter(run => !run.generation.empty);
    const waiting = runs.filter(run => run.generation.empty).map(run => empty(`${run.name}: ${run.generation.empty}`));
    if (!done.length) return waiting;
    const run = done.find(each => each.name === chosen) ?? done[0], each = run.generation;
    return [waiting, card(generatedTable(done)), done.some(one => one.generation.solved) ? card(solvedTable(done)) : null,
      done.length > 1 ? choice("Run", done.map(one => [one.name, one.name]), run.name, name => { chosen = name; part.refresh(); }) : null,
      el("div", { class: "two" }, each.scores && distributions("Scores", "share of responses by score", each.scores, "", { index: run.index }),
        each.lengths && distributions("Lengths", "share of responses by length", each.lengths, "", { index: run.index, axis: "characters" })),
      fold(!narrow.matches, el("h3", {}, "All responses"), generatedList(run))];
  }, { main: true });
  return part;
};
