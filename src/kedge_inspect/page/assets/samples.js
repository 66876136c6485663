// Samples: responses to the same prompts over time, token by token.

/** Colorings of tokens: the value, the middle of the scale (0 unless given), and labels of its ends. */
const COLORINGS = {
  advantage: { label: "Advantage", of: (row, at) => row.advantages?.[at], low: "worse than expected", high: "better than expected" },
  value: { label: "Value", of: (row, at) => row.values?.[at], middle: "median", low: "low value", high: "high value" },
  kl: { label: "KL", of: (row, at) => row.ref_logprobs && row.logprobs[at] - row.ref_logprobs[at], low: "likelier under the reference", high: "likelier under the policy" },
  reward: { label: "Reward", of: (row, at) => row.rewards?.[at], low: "cost", high: "gain" },
  ratio: { label: "Logprob ratio", of: (row, at) => row.new_logprobs && Math.exp(row.new_logprobs[at] - row.logprobs[at]), logarithmic: true, low: "less likely in the last epoch", high: "more likely" },
  entropy: { label: "Entropy", of: (row, at) => row.entropies?.[at], oneSided: true, low: "certain", high: "uncertain" },
};
const TOOLTIP = [
  ["log probability", (row, at) => row.logprobs?.[at]], ["probability", (row, at) => row.logprobs && Math.exp(row.logprobs[at])],
  ["reference's log probability", (row, at) => row.ref_logprobs?.[at]], ["KL", COLORINGS.kl.of], ["entropy", COLORINGS.entropy.of],
  ["value", COLORINGS.value.of], ["reward", COLORINGS.reward.of], ["advantage", COLORINGS.advantage.of], ["ratio in the last epoch", COLORINGS.ratio.of],
];

const scaleOf = (coloring, rows) => {
  const raw = rows.flatMap(row => row.tokens.map((_, at) => coloring.of(row, at))).filter(known);
  const values = (coloring.logarithmic ? raw.map(Math.log) : raw).sort((a, b) => a - b);
  const middle = coloring.middle ? values[values.length >> 1] ?? 0 : 0;
  const sizes = values.map(value => Math.abs(value - middle)).sort((a, b) => a - b);
  // One extreme token must not make all others pale.
  const reach = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1;
  const text = value => format(coloring.logarithmic ? Math.exp(value) : value, 3);
  const tint = value => {
    if (!known(value)) return "transparent";
    const share = ((coloring.logarithmic ? Math.log(value) : value) - middle) / reach;
    return `rgba(var(--${share < 0 ? "minus" : "plus"}), ${(0.75 * Math.min(1, Math.abs(share)) ** 0.8).toFixed(3)})`;
  };
  return { tint, ends: [coloring.oneSided ? text(0) : text(middle - reach), text(middle + reach)], middle: text(middle) };
};

const legend = (coloring, scale) => el("p", { class: "scale" },
  el("span", {}, `${scale.ends[0]} ${coloring.low}`),
  el("i", { style: { background: coloring.oneSided ? "linear-gradient(90deg, transparent, rgba(var(--plus), .75))"
    : "linear-gradient(90deg, rgba(var(--minus), .75), transparent, rgba(var(--plus), .75))" } }),
  el("span", {}, `${scale.ends[1]} ${coloring.high}`));

const tip = document.getElementById("tip");
const hideTip = () => { tip.hidden = true; };
const showTip = (token, row, at) => {
  tip.replaceChildren(el("b", {}, row.tokens[at] ? JSON.stringify(row.tokens[at]) : "no text of its own: part of the next character"), el("span", {}, `token ${at + 1} of ${row.length}`),
    el("dl", {}, TOOLTIP.filter(([, of]) => known(of(row, at))).map(([name, of]) => [el("dt", {}, name), el("dd", {}, format(of(row, at), 5))])));
  tip.hidden = false;
  const place = token.getClientRects()[0], width = tip.offsetWidth;
  const left = Math.max(8, Math.min(place.left, document.documentElement.clientWidth - width - 8));
  const below = place.bottom + tip.offsetHeight + 12 < innerHeight || place.top < tip.offsetHeight + 12;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(below ? place.bottom + 8 : place.top - tip.offsetHeight - 8) + scrollY}px`;
};
addEventListener("keydown", event => { if (event.key === "Escape") hideTip(); });

/** Line breaks and tabs get a visible symbol. */
const visible = text => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");

/** What was said, in order: the policy's tokens with their number, and between them what it only read. */
const saidIn = row => {
  const read = at => (row.foreign ?? []).filter(([place]) => place === at).map(([place, text]) => ({ text, place }));
  return [...row.tokens.flatMap((text, at) => [...read(at), { text, at }]), ...read(row.tokens.length)];
};
const isStop = (row, at) => row.stopped && at === row.length - 1;
const textOf = row => saidIn(row).filter(({ at }) => !isStop(row, at)).map(({ text }) => text).join("").trim();
const endOf = row => row.ending ? `the episode ended: ${row.ending.replaceAll("_", " ")}` : row.stopped ? "ended with a stop token" : "cut at the token limit";

const several = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
/** What a turn continues, has read, and was worth. */
const headOf = (turn, number, tree) => {
  const whole = turn.after && turn.kept === (tree[turn.after]?.at ?? Infinity) - tree[turn.after - 1].at;
  const place = turn.after === undefined ? null : !turn.after ? "begins anew"
    : `continues turn ${turn.after}${whole ? "" : ` after ${several(turn.kept, "token")} of it`}`;
  return [`Turn ${number}`, place, `reads ${several(turn.reads, "token")}${number > 1 ? `, ${count(turn.new)} of them new` : ""}`,
    turn.left_out ? `${count(turn.left_out)} of the policy's own tokens ${turn.left_out === 1 ? "is" : "are"} left out` : null,
    ...["reward", "value", "advantage"].map(name => known(turn[name]) ? `${name} ${format(turn[name], 3)}` : null),
  ].filter(Boolean).join(" · ");
};
/** The tokens of an episode turn by turn, each indented below the one that it continues. */
const turnsOf = (row, spans) => {
  const blocks = row.tree.map((turn, at) => {
    const head = headOf(turn, at + 1, row.tree);
    return el("div", { class: `turn ${turn.after === undefined ? "" : "anew"} ${turn.new < turn.reads ? "partly" : ""}`, role: "group", "aria-label": head, style: { "--level": turn.level } },
      el("p", { class: "turn-head", "aria-hidden": "true" }, head));
  });
  saidIn(row).forEach(({ at, place }, index) => blocks[Math.max(0, row.tree.findLastIndex(turn => turn.at <= (at ?? place)))].append(spans[index]));
  return blocks;
};

const contextsOf = row => {
  const number = (row.tree ?? []).filter(({ after }) => after !== undefined).length;
  return number ? ` in ${number + 1} contexts` : "";
};

const tokensOf = (row, coloring, scale) => {
  const spans = saidIn(row).map(({ text, at }, place) => {
    const option = { role: "option", "aria-selected": "false", tabindex: place ? -1 : 0, dir: "auto" };
    if (at === undefined) return el("span", { ...option, class: "foreign", "aria-disabled": "true", "aria-label": `only read: ${text}` }, visible(text));
    const value = coloring.of(row, at);
    const show = () => showTip(span, row, at);
    const span = el("span", { ...option, class: "token",
      "aria-label": `${text} ${coloring.label} ${format(value)}`, style: { background: scale.tint(value) },
      onmouseenter: show, onmouseleave: hideTip, onfocus: show, onblur: hideTip }, isStop(row, at) ? el("span", { class: "special" }, text) : text ? visible(text) : el("span", { class: "special" }, "·"));
    return span;
  });
  const move = event => {
    const from = spans.indexOf(document.activeElement);
    const to = { ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (from < 0 || to === undefined || !spans[to]) return;
    event.preventDefault();
    spans[from].tabIndex = -1;
    spans[to].tabIndex = 0;
    spans[to].focus();
  };
  return el("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the response; arrow keys move between tokens", onkeydown: move }, row.tree?.length ? turnsOf(row, spans) : spans);
};

const startsOf = row => row.tree?.length ? row.tree.map(({ at }) => at) : (row.foreign ?? []).map(([at]) => at);
const betweenTurns = row => startsOf(row).filter(at => at && at < row.tokens.length).map(at => (
  { type: "line", yref: "paper", y0: 0, y1: 1, x0: at + 0.5, x1: at + 0.5, line: { color: color("muted"), width: 1 } }));

const valueChart = (row, index) => chart({
  title: "Values", unit: "the critic's estimate of the return, token by token", size: "short", bare: true,
  summary: row.values ? `From ${format(row.values[0], 3)} to ${format(row.values.at(-1), 3)}; the score is ${format(row.score, 3)}` : "",
  build: () => {
    const x = row.tokens.map((_, at) => at + 1), last = x.length;
    let rest = row.later;
    const remaining = row.rewards?.map(known).includes(true) ? row.rewards.toReversed().map(reward => (rest += reward ?? 0)).toReversed() : null;
    const level = { type: "scatter", mode: "lines", x: [1, last], hovertemplate: "%{y:.4~g}" };
    return { traces: [
      { type: "scatter", mode: "lines+markers", x, y: row.values, name: "value", customdata: row.tokens.map(plain), marker: { size: 4, color: runColor(index) },
        line: { color: runColor(index), width: 2 }, hovertemplate: "%{y:.4~g} before “%{customdata}”" },
      remaining && { type: "scatter", mode: "lines", x, y: remaining, name: "actual: sum of the remaining rewards", line: { color: color("muted"), width: 1.5, dash: "dot" }, hovertemplate: "%{y:.4~g}" },
      known(row.score) && { ...level, y: [row.score, row.score], name: "score", line: { color: color("ink"), width: 1.5, dash: "dash" } },
    ].filter(Boolean), layout: { xaxis: { title: { text: "token" } }, margin: { l: 44, r: 12, t: 4, b: 34 }, shapes: betweenTurns(row) } };
  },
});

const responseCard = (index, prompt, row, coloringName, pick) => {
  const available = Object.entries(COLORINGS).filter(([, each]) => row.tokens.some((_, at) => known(each.of(row, at))));
  const offered = Object.entries(COLORINGS).map(([each, { label }]) => [each, label, available.some(([name]) => name === each) ? "" : "Not measured for this response"]);
  if (!available.length) return card(el("p", { class: "prompt" }, prompt.prompt || row.prompt), el("p", { class: "tokens" }, saidIn(row).map(({ text }) => text).join("")));
  const [name, coloring] = available.find(([each]) => each === coloringName) ?? available[0];
  const scale = scaleOf(coloring, prompt.responses);
  const cut = row.length > row.tokens.length ? `, of which the first ${row.tokens.length} are shown` : "";
  return card(
    el("p", { class: "prompt", tabindex: 0, dir: "auto" }, prompt.prompt || row.prompt),
    el("div", { class: "controls" }, choice("Color by", offered, name, pick)),
    tokensOf(row, coloring, scale), legend(coloring, scale),
    el("p", { class: "muted small" }, `${row.update ? `Update ${row.update}` : "Before the first update"} · score ${format(row.score)}${row.reason ? ` (${row.reason})` : ""} · ${row.turns ? `${several(row.turns, "turn")}${contextsOf(row)} with ` : ""}${row.length} tokens${cut} · ${endOf(row)}`),
    row.values ? valueChart(row, index) : null);
};

const samples = data => {
  let chosen = null, promptAt = 0, rowAt = -1, coloringName = "advantage";
  const part = section("samples", "Samples", "Responses to the same prompts over time. Point at a token, or move with the arrow keys, for exact values.", () => {
    hideTip();
    const runs = data.runs.filter(each => has(each.samples)), run = runs.find(each => each.name === chosen) ?? runs[0];
    if (!run) return null;
    const prompt = run.samples.prompts[promptAt] ?? run.samples.prompts[0], rows = prompt.responses, row = rows.at(rowAt) ?? rows.at(-1);
    const answers = el("ol", { class: "answers", "aria-label": "Responses over time" }, rows.map((each, at) => el("li", {},
      el("button", { type: "button", "aria-pressed": String(each === row), onclick: () => { rowAt = at; refill(); } },
        el("span", { class: "head" }, each.update ? `update ${each.update}` : "before training", el("b", { class: "number" }, format(each.score, 3))),
        el("span", { class: "text", dir: "auto" }, textOf(each) || "(empty)")))));
    return [
      el("div", { class: "controls" },
        runs.length > 1 ? choice("Run", runs.map(each => [each.name, each.name]), run.name,
          name => { chosen = name; promptAt = 0; rowAt = -1; refill(); }) : null,
        run.samples.prompts.length > 1 ? choice("Prompt", run.samples.prompts.map((each, at) => [at, each.title || "Trained on"]), promptAt,
          at => { promptAt = at; rowAt = -1; refill(); }) : null,
        el("span", { class: "muted small" }, run.samples.kept < run.samples.of ? `${run.samples.kept} of ${counted(run.samples.of, "response")} in samples.jsonl are on this page.` : "")),
      el("div", { class: "samples" }, answers, responseCard(run.color, prompt, row, coloringName, name => { coloringName = name; refill(); })),
    ];
  }, { why: reasons(data, "samples") });
  /** Refresh the section, keeping keyboard focus and the scroll position of the list. */
  const refill = () => {
    const scrolled = part.node.querySelector(".answers")?.scrollTop ?? 0;
    const focused = [...part.node.querySelectorAll("button, input, select")].indexOf(document.activeElement);
    part.refresh();
    part.node.querySelector(".answers").scrollTop = scrolled;
    if (focused >= 0) part.node.querySelectorAll("button, input, select")[focused]?.focus({ preventScroll: true });
  };
  return part;
};
