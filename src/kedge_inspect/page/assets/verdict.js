// Verdict: what each run did, the doctor's findings, first and last values, and the most important curves.

const STAGES = { ppo: "PPO", reward: "Reward model", sft: "Fine-tuning", critic: "Critic", control: "Control", evaluate: "Evaluation", generate: "Generation" };
const stageName = stage => STAGES[stage] ?? stage;
const MOST_KEY_CHARTS = 4;
const MOST_FINDINGS = 4;

const swatch = run => el("span", { class: "swatch", style: { background: `var(--${colorName(run.color)})` } });
const words = rule => `${rule[0].toUpperCase()}${rule.slice(1).replaceAll("_", " ")}`;

const describeFinding = (data, each, alone) => el("div", { class: "described" },
  alone ? null : el("p", { class: "rule" }, el("b", {}, words(each.rule)), data.runs.length > 1 ? el("span", { class: "of" }, swatch(data.runs[each.run]), data.runs[each.run].name) : null),
  el("dl", {}, [["Seen", each.seen], ["Meaning", each.means], ["Try", each.try]].filter(([, text]) => text).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));

/** Findings with one remedy: the title and the figures of the worst one, and the rest on demand. */
const findingGroup = (data, group) => {
  const [worst] = group.findings, names = [...new Set(group.findings.map(each => each.run))].map(at => data.runs[at]);
  const others = [...new Set(group.findings.map(each => each.rule))].length - 1;
  return el("li", {}, el("details", { class: `finding ${group.severity}` },
    el("summary", {}, el("span", { class: `badge ${group.severity}` }, group.severity), " ", el("b", {}, words(worst.rule)),
      others ? el("span", { class: "muted" }, ` and ${others} more of the same cause`) : null,
      data.runs.length > 1 ? findingRuns(data, names) : null,
      el("span", { class: "seen" }, worst.seen)),
    group.findings.map(each => describeFinding(data, each, group.findings.length === 1))));
};

const findingsCard = data => {
  const groups = (data.findings ?? []).map(group => findingGroup(data, group)), rest = groups.slice(MOST_FINDINGS);
  return groups.length ? el("div", { class: "card stack doctor" }, el("h2", {}, "The doctor's findings"),
    el("ul", { class: "findings" }, groups.slice(0, MOST_FINDINGS)), rest.length ? fold(false, `${rest.length} more`, el("ul", { class: "findings" }, rest)) : null) : null;
};

/** What the doctor checked; a check mark only if it found nothing. */
const checked = run => (run.doctor?.verdict ? el("p", { class: "checked small" }, run.doctor.clean ? el("span", { class: "healthy" }, "✓ ") : null,
  el("span", { class: run.doctor.clean ? "healthy" : "muted" }, `Doctor: ${run.doctor.verdict.split("; ")[0]}`), el("span", { class: "muted" }, [...run.doctor.verdict.split("; ").slice(1).map(text => `; ${text}`), "."].join(""))) : null);

const runRow = (data, run) => {
  const many = data.runs.length > 1;
  const facts = [run.facts.library ?? stageName(run.stage), run.facts.device, run.facts.precision].filter(Boolean).join(" · ");
  return el("article", { class: "run" },
    el("div", { class: "run-title" }, many ? [swatch(run), el("h2", {}, run.name)] : null, el("span", { class: `badge ${run.state}` }, run.state), el("span", { class: "muted small" }, facts)),
    run.sentences.map(text => el("p", { class: "sentences" }, text)),
    run.incidents ? el("p", { class: "worse" }, `${run.incidents} incident${run.incidents > 1 ? "s" : ""}: updates that were not trained on, in incidents.jsonl.`) : null,
    checked(run));
};

const changeOf = row => (row ? el("span", { class: row.change || "muted" }, row.first === row.last ? "0" : signed(row.last - row.first)) : "");
const labelOf = row => [row.label, row.unit ? [" ", el("span", { class: "unit-of" }, row.unit)] : null];

/** First and last values of runs of one stage: three columns for one run, one column per run for several. */
const valuesTable = runs => {
  if (runs.length === 1) return table(["", "first", "last", "change"], runs[0].first_and_last.map(row => [labelOf(row), format(row.first, 3), el("b", {}, format(row.last, 3)), changeOf(row)]));
  const labels = new Map(runs.flatMap(run => run.first_and_last.map(row => [row.label, row])));
  return table(["", ...runs.map(run => el("span", { class: "of" }, swatch(run), run.name))], [...labels.values()].map(row => [labelOf(row), ...runs.map(run => {
    const own = run.first_and_last.find(each => each.label === row.label);
    return own ? [el("span", { class: "pair" }, `${format(own.first, 3)} → `, el("b", {}, format(own.last, 3))), " ", el("span", { class: "delta" }, changeOf(own))] : "–";
  })]), [], runs.length > 2);
};

const valuesOf = (data, stage) => {
  const runs = data.runs.filter(run => run.stage === stage && run.first_and_last.length);
  return runs.length ? valuesTable(runs) : null;
};
const WINDOWS = "Means over the first and last 5% of the run. A change is colored if a direction is better and the change is beyond noise.";

/** The runs that a finding is about; on the page of a sweep, their settings. */
const findingRuns = (data, runs) => (data.sweep ? settingsOfRuns(data, runs) : runs.map(run => el("span", { class: "of" }, swatch(run), run.name)));

const verdict = data => {
  const body = el("div", { class: "stack" });
  const node = el("section", { id: "verdict", "aria-labelledby": "verdict-title" }, el("header", {}, el("h1", { id: "verdict-title" }, data.title)), body);
  const fill = () => {
    if (data.sweep) return sweepVerdict(data);
    const headlines = data.headlines.map(each => el("div", { class: "headline" }, el("span", { class: "muted small" }, each.label),
      el("span", {}, el("b", { class: "number" }, format(each.value, 3)), known(each.low) ? el("span", { class: "muted small number" }, ` ${format(each.low, 3)} to ${format(each.high, 3)}`) : null)));
    const runs = data.runs.toSorted((one, other) => (other.stage === "ppo") - (one.stage === "ppo"));
    const stages = [...new Set(runs.map(run => run.stage))], [first, ...others] = stages.filter(stage => valuesOf(data, stage));
    const keys = (data.panels[first] ?? []).filter(panel => panel.key).slice(0, MOST_KEY_CHARTS);
    const findings = findingsCard(data), described = el("div", { class: `card runs${runs.length > 1 ? "" : " alone"}` }, runs.map(run => runRow(data, run)));
    const versions = Object.entries(runs[0]?.facts ?? {}).filter(([name]) => !["stage", "device", "precision", "library"].includes(name));
    return [headlines.length ? el("div", { class: "card headlines" }, headlines) : null,
      el("div", { class: runs.length > 1 || !findings ? "stack" : "sides" }, described, findings),
      first ? el("div", { class: `sides figures${runs.filter(run => run.stage === first).length > 2 ? " crowded" : ""}` },
        el("div", { class: "card stack" }, el("h2", {}, stages.length > 1 ? `${stageName(first)}: first and last values` : "First and last values"), valuesOf(data, first), el("p", { class: "muted small" }, WINDOWS)),
        keys.length ? grid(keys.map(panel => curveChart(data, first, { ...panel, note: "" }))) : null) : null,
      others.length ? fold(false, `First and last values: ${others.map(stage => stageName(stage).toLowerCase()).join(", ")}`,
        el("div", { class: "two" }, others.map(stage => card(el("h3", {}, stageName(stage)), valuesOf(data, stage))))) : null,
      versions.length ? el("p", { class: "muted small versions" }, versions.map(([name, value]) => `${name} ${value}`).join(" · ")) : null];
  };
  const refresh = () => { forget(body); body.replaceChildren(...fill().filter(Boolean)); };
  return { id: "verdict", title: "Verdict", node, refresh, why: () => [] };
};
