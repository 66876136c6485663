// Verdict: what each run did, the doctor's findings, and first and last values.

const finding = each => el("li", { class: `finding ${each.severity}` },
  el("h3", {}, `${each.rule}`, " ", el("span", { class: "badge" }, each.severity)),
  el("dl", {}, [["Seen", each.seen], ["Meaning", each.means], ["Try", each.try], ["Docs", each.docs]]
    .filter(([, text]) => text).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));

const findingsOf = run => {
  if (run.findings === null) return null;
  if (!run.findings.length) return el("p", { class: "healthy" }, "✓ The doctor found no problems.");
  const [first, rest] = [run.findings.slice(0, 3), run.findings.slice(3)];
  return [el("ul", { class: "findings" }, first.map(finding)),
    rest.length ? el("details", {}, el("summary", {}, `${rest.length} more`), el("ul", { class: "findings" }, rest.map(finding))) : null];
};

const changeOf = ({ first, last, good }) => {
  const change = last - first;
  const better = !good || change === 0 || Math.abs(change) < 1e-12 ? "" : (change > 0) === (good === "up") ? "up" : "down";
  return el("span", { class: better }, first === last ? "0" : signed(change));
};

const valuesTable = run => table(["", "first", "last", "change"],
  run.first_and_last.map(row => [[row.label, " ", el("span", { class: "unit-of" }, row.unit)], format(row.first), el("b", {}, format(row.last)), changeOf(row)]));

/** On the page of a single run, its first two curves are next to the table. */
const firstCurves = (data, run) => (data.panels[run.stage] ?? []).slice(0, 2).map(panel => curveChart(data, run.stage, { ...panel, note: "" }, { size: "short" }));

const runCard = (data, run) => {
  const many = data.runs.length > 1;
  const facts = [run.stage, run.facts.device, run.facts.precision].filter(Boolean).join(" · ");
  const versions = Object.entries(run.facts).filter(([name]) => !["stage", "device", "precision"].includes(name));
  return el("article", { class: "card stack" },
    el("div", { class: "run-title" },
      many ? el("span", { class: "swatch", style: { background: `var(--c${run.index % 8})` } }) : null,
      many ? el("h3", {}, run.name) : null, el("span", { class: `badge ${run.state}` }, run.state), el("span", { class: "muted small" }, facts)),
    run.sentences.map(text => el("p", { class: "sentences" }, text)),
    run.incidents ? el("p", { class: "down" }, `${run.incidents} incident${run.incidents > 1 ? "s" : ""}: see incidents.jsonl.`) : null,
    findingsOf(run),
    run.first_and_last.length === 0 ? null : el("div", { class: many ? "stack" : "two" },
      el("details", { open: !many || run.stage === "ppo" }, el("summary", {}, "First and last values: means over the first and last 5% of the run"), valuesTable(run)),
      many ? null : el("div", { class: "stack" }, firstCurves(data, run))),
    versions.length ? el("p", { class: "muted small" }, versions.map(([name, value]) => `${name} ${value}`).join(" · ")) : null);
};

const verdict = data => section("verdict", data.title, "", () => {
  const headlines = data.headlines.map(each => el("div", { class: "card headline" },
    el("span", { class: "muted small" }, each.label), el("b", { class: "number" }, format(each.value, 3)),
    known(each.low) ? el("span", { class: "muted small number" }, `${format(each.low, 3)} to ${format(each.high, 3)}`) : null));
  return [headlines.length ? el("div", { class: "headlines" }, headlines) : null,
    el("div", { class: data.runs.length > 1 ? "two" : "stack" }, data.runs.toSorted((one, other) => (other.stage === "ppo") - (one.stage === "ppo"))
      .map(run => runCard(data, run)))];
}, "h1");
