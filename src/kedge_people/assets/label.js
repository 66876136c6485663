// Texts of prompts and responses are only ever set as text, never as markup.
const LETTERS = "ABCDEFGHI";
const GRADES = [1, 2, 3, 4, 5, 6, 7];
const RETRY_MS = 1500;
const PAUSE_MS = 200; // a key that bounces must not answer the next question
// What would be invisible, or change the direction of other text: control and bidi characters, halves of surrogate pairs.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]/gu;

const at = (id) => document.getElementById(id);
let state = null; // what the server said last
let draft = null; // the answer so far
let back = 0; // 0: the next question, 1: the one before, ...
let busy = false;
let drawnAt = 0;
let shownSince = null; // null while the page is hidden

const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", setTheme);
setTheme();

function make(tag, name, text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}

const named = (character) => `\u2039U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u203a`;
const visible = (text) => text.replaceAll("\r\n", "\n").replace(HIDDEN, named).trim();

function setText(element, text) {
  if (element.given === text) return;
  element.given = text;
  // Layout of a megabyte takes seconds; of its parts, only those in sight are laid out.
  const parts = visible(text).match(/[^]{1,3000}\n|[^]{1,3000}/gu) ?? [""];
  if (parts.length === 1) element.textContent = parts[0];
  else element.replaceChildren(...parts.map((part) => make("div", "part", part)));
}

function button(label, key, act, name = "") {
  const made = make("button", name, `${label} `);
  made.type = "button";
  made.append(make("kbd", "", key));
  made.addEventListener("click", () => { if (!busy) act(); });
  return made;
}

// The draft survives a reload, in this tab alone.
const draftKey = () => `${location.pathname} ${state.question.id} ${state.question.replaces ?? ""}`;

function keepDraft() {
  if (!state?.question || !draft) return;
  countSeconds();
  try {
    sessionStorage.setItem(draftKey(), JSON.stringify(draft));
  } catch { /* storage is full or forbidden: the draft lives until a reload */ }
}

function startDraft() {
  const { responses, answer } = state.question;
  const size = responses.length;
  const fill = (given, value) => (given?.length ? [...given] : Array(size).fill(value));
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(draftKey()));
  } catch { /* as above */ }
  draft = kept ?? {
    ranks: fill(answer?.ranks, null),
    axes: Object.fromEntries(state.axes.map((axis) => [axis, fill(answer?.axes[axis], null)])),
    thumbs: fill(answer?.thumbs, 0),
    edits: fill(answer?.edits, null),
    note: answer?.note ?? "",
    seconds: 0,
  };
  shownSince = document.hidden ? null : performance.now();
}

function countSeconds() {
  if (draft && shownSince !== null) draft.seconds += (performance.now() - shownSince) / 1000;
  shownSince = document.hidden ? null : performance.now();
}
document.addEventListener("visibilitychange", () => { if (!busy) keepDraft(); });
window.addEventListener("pagehide", () => { if (!busy) keepDraft(); });

function say(text) { at("status").textContent = text; }
function sayShortly(text) {
  say(text);
  setTimeout(() => { if (at("status").textContent === text) say(""); }, 2500);
}
function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

// --- Drawing

const isPair = () => state.question.responses.length === 2;
const isRanking = () => state.question.responses.length > 2;

function draw() {
  const { question } = state;
  at("person").textContent = state.person;
  at("count").textContent = `${state.done} of ${state.total}`;
  at("pace").textContent = state.seconds === null ? "" : `${state.seconds.toFixed(state.seconds < 10 ? 1 : 0)} s each`;
  at("bar").setAttribute("aria-valuenow", state.done);
  at("bar").setAttribute("aria-valuemax", state.total);
  at("bar").firstElementChild.style.width = `${state.total ? (100 * state.done) / state.total : 100}%`;
  at("changing").hidden = back === 0;
  at("prompt").hidden = at("responses").hidden = !question;
  at("finished").hidden = Boolean(question);
  if (!question) {
    draft = null;
    at("finished").textContent = state.total
      ? `All ${state.total} questions are answered. Thank you. You can close this page.`
      : "No questions wait for you.";
    at("remark").hidden = true;
    drawChoices();
    return;
  }
  startDraft();
  drawnAt = performance.now();
  at("note").value = draft.note;
  at("remark").hidden = !draft.note;
  drawPrompt();
  const size = question.responses.length;
  at("responses").style.setProperty("--size", [5, 6, 9].includes(size) ? 3 : Math.min(size, 4));
  at("responses").classList.toggle("many", size > 2);
  at("responses").replaceChildren(...question.responses.map((text, place) => card(text, place)));
  drawChoices();
  refresh();
  window.scrollTo({ top: 0 });
  at("prompt").focus({ preventScroll: true });
}

function drawPrompt() {
  const { prompt } = state.question;
  const turns = typeof prompt === "string" ? [{ role: "prompt", content: prompt }] : prompt;
  at("prompt").replaceChildren(...turns.map(({ role, content }) => {
    const said = make("div", "said");
    const text = make("div", "text");
    text.dir = "auto";
    setText(text, content);
    said.append(make("h4", "", visible(role)), text);
    return said;
  }));
  at("prompt").scrollTop = turns.length > 1 ? at("prompt").scrollHeight : 0;
}

function card(response, place) {
  const letter = LETTERS[place];
  const made = make("article", "response card");
  const head = make("div", "head");
  head.append(make("h2", "", state.question.responses.length > 1 ? letter : "Response"));
  if (isRanking()) {
    const ranks = make("span", "ranks");
    ranks.setAttribute("role", "group");
    ranks.setAttribute("aria-label", `Rank of ${letter}`);
    state.question.responses.forEach((_, index) => {
      const choice = make("button", "", String(index + 1));
      choice.type = "button";
      choice.tabIndex = -1;
      choice.addEventListener("click", () => setRank(place, index + 1));
      ranks.append(choice);
    });
    head.append(ranks);
  }
  const tools = make("span", "tools");
  tools.append(
    button("Good", "u", () => setThumb(place, 1), "up"),
    button("Bad", "d", () => setThumb(place, -1), "down"),
    button("Edit", "e", () => edit(place), "edit"),
    button("Undo edit", "x", () => setEdit(place, null), "restore"),
  );
  for (const tool of tools.children) tool.tabIndex = -1; // Tab goes from response to response; tools have keys
  head.append(tools);
  const text = make("div", "text");
  text.tabIndex = 0;
  text.dir = "auto";
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", `Response ${letter}`);
  made.append(head, text);
  if (state.axes.length) made.append(axes(place));
  return made;
}

function axes(place) {
  const grid = make("div", "axes");
  for (const axis of state.axes) {
    const scale = make("div", "segments");
    scale.setAttribute("role", "radiogroup");
    scale.setAttribute("aria-label", `${axis} of ${LETTERS[place]}, 1 to 7`);
    scale.dataset.axis = axis;
    scale.dataset.place = place;
    for (const grade of GRADES) {
      const label = make("label");
      const input = make("input");
      Object.assign(input, { type: "radio", name: `${axis} ${place}`, value: grade });
      input.addEventListener("change", () => setGrade(axis, place, grade));
      label.append(input, String(grade));
      scale.append(label);
    }
    grid.append(make("span", "", axis), scale);
  }
  return grid;
}

function drawChoices() {
  const choices = [];
  const others = [];
  if (state.question) {
    if (isPair()) {
      choices.push(
        button("A is better", "←", () => send("ranked", [1, 2])),
        button("Tie", "=", () => send("ranked", [1, 1]), "middle"),
        button("B is better", "→", () => send("ranked", [2, 1])),
      );
    } else {
      choices.push(button(isRanking() ? "Send the ranks" : "Send", "Enter", sendRanks));
    }
    if (state.question.responses.length > 1) others.push(button(isPair() ? "Both bad" : "All bad", "0", () => send("bad", [])));
    others.push(
      button("Skip", "s", () => send("skipped", [])),
      button("Note", "n", openNote),
    );
  }
  const undo = button(back ? "One further back" : "Undo", "z", goBack);
  undo.disabled = state.back >= state.most_back;
  at("choices").replaceChildren(...choices);
  at("others").replaceChildren(...others, undo);
}

function refresh() {
  // Show the draft.
  const next = draft.ranks.indexOf(null);
  document.querySelectorAll(".response").forEach((made, place) => {
    const press = (selector, on) => made.querySelector(selector).setAttribute("aria-pressed", String(on));
    press(".up", draft.thumbs[place] > 0);
    press(".down", draft.thumbs[place] < 0);
    const isEdited = draft.edits[place] !== null;
    made.classList.toggle("edited", isEdited);
    made.querySelector(".restore").hidden = !isEdited;
    const text = made.querySelector(".text");
    if (text) setText(text, draft.edits[place] ?? state.question.responses[place]);
    made.querySelectorAll(".ranks button").forEach((choice, index) => {
      choice.setAttribute("aria-pressed", String(draft.ranks[place] === index + 1));
    });
    made.querySelector(".ranks")?.classList.toggle("next", place === next);
    made.querySelectorAll(".segments").forEach((scale) => {
      const grade = draft.axes[scale.dataset.axis][place];
      scale.querySelectorAll("input").forEach((input) => { input.checked = Number(input.value) === grade; });
    });
    made.classList.toggle("picked", isPair() && draft.ranks[place] === 1);
  });
  if (isRanking()) at("choices").firstElementChild.disabled = next >= 0;
}

// --- Changing the draft

function change(act) {
  act();
  keepDraft();
  refresh();
}

const setRank = (place, rank) => change(() => { draft.ranks[place] = rank; });
const setGrade = (axis, place, grade) => change(() => { draft.axes[axis][place] = grade; });
const setThumb = (place, thumb) => change(() => { draft.thumbs[place] = draft.thumbs[place] === thumb ? 0 : thumb; });
const setEdit = (place, text) => change(() => { draft.edits[place] = text === state.question.responses[place] ? null : text; });

function edit(place) {
  const text = document.querySelectorAll(".response")[place].querySelector(".text");
  if (!text) return;
  const field = make("textarea");
  const before = draft.edits[place];
  field.value = before ?? state.question.responses[place];
  field.setAttribute("aria-label", `Edit response ${LETTERS[place]}. Escape cancels, Control and Enter keeps.`);
  let isOpen = true;
  const close = (kept, byKey = true) => {
    if (!isOpen) return;
    isOpen = false;
    field.replaceWith(text);
    setEdit(place, kept);
    if (byKey) text.focus();
    say("");
  };
  field.addEventListener("input", () => {
    draft.edits[place] = field.value.trim() && field.value !== state.question.responses[place] ? field.value : null;
    keepDraft();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close(before);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) close(draft.edits[place]);
  });
  field.addEventListener("blur", () => close(draft.edits[place], false));
  text.replaceWith(field);
  field.focus();
  say("Escape cancels; Ctrl+Enter or a click elsewhere keeps the text.");
}

function openNote() {
  at("remark").hidden = false;
  at("note").focus();
}
at("note").addEventListener("input", () => {
  draft.note = at("note").value;
  keepDraft();
});
at("note").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" && (event.key !== "Enter" || event.shiftKey)) return;
  event.preventDefault();
  at("remark").hidden = !draft.note;
  at("prompt").focus();
});

// --- Talking to the server

async function load(steps) {
  busy = true;
  try {
    const reply = await fetch(`question/${steps}`, { cache: "no-store" });
    if (!reply.ok) throw new Error(reply.status === 403 ? "This link is not valid anymore. Ask for a new one." : await reply.text());
    state = await reply.json();
    back = state.back;
    showError("");
    draw();
  } catch (error) {
    showError(error instanceof TypeError ? "The server does not answer. Is kedge label still running?" : error.message);
  }
  busy = false;
}

function goBack() {
  if (state.back >= state.most_back) return;
  keepDraft();
  load(back + 1);
}

async function send(verdict, ranks) {
  if (busy || !state?.question || performance.now() - drawnAt < PAUSE_MS) return;
  keepDraft();
  busy = true;
  const key = draftKey();
  const { id, replaces } = state.question;
  // A draft may be sent again after a reload, or from a copy of the tab, as another answer: the id is that of the sending.
  const body = JSON.stringify({ ...draft, id: crypto.randomUUID(), question: id, replaces, verdict, ranks });
  const slow = setTimeout(() => say("Saving …"), 300);
  let reply = null;
  while (reply === null) {
    let reason = "the server does not answer";
    try {
      reply = await fetch("answer", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      if (reply.status === 503) {
        reason = (await reply.json()).error;
        reply = null;
      }
    } catch { /* the connection was lost */ }
    if (reply) break;
    showError(`Not saved yet: ${reason}. Trying again; keep this page open.`);
    await new Promise((done) => { setTimeout(done, RETRY_MS); });
  }
  clearTimeout(slow);
  busy = false;
  if (reply.ok || reply.status === 409) sessionStorage.removeItem(key);
  if (reply.ok) {
    state = await reply.json();
    back = 0;
    showError("");
    draw();
    sayShortly("Saved.");
    return;
  }
  const reason = reply.headers.get("Content-Type") === "application/json" ? (await reply.json()).error : await reply.text();
  if (reply.status === 409) await load(0);
  say("");
  showError(reply.status === 409 ? `Not saved: ${reason}.` : `Not saved: ${reason}`);
}

function sendRanks() {
  if (!isRanking()) return send("ranked", [1]);
  if (draft.ranks.includes(null)) return say("Give each response a rank: type its number, 1 for the best; ties are allowed.");
  return send("ranked", draft.ranks);
}

// --- Keys

const KEYS = [
  ["←  →", "two responses: the left or right one is better"],
  ["=", "they are equally good"],
  ["1 2 3 …", "three or more: type the rank of A, then B, …; Backspace takes one back"],
  ["Enter", "sends the ranks"],
  ["0", "all are bad"],
  ["s", "skip"],
  ["Tab", "goes from response to response"],
  ["u  d", "thumb up or down for the focused response"],
  ["e  x", "edit the focused response; undo the edit"],
  ["g", "grade: then 1 to 7 for each axis, 0 for none; Escape ends"],
  ["n", "note"],
  ["z", "back to the last answer, to change it"],
];
for (const [key, meaning] of KEYS) {
  const term = make("dt");
  term.append(...key.split("  ").map((each) => make("kbd", "", each)));
  at("keys").querySelector("dl").append(term, make("dd", "", meaning));
}

function focused() {
  // The place of the response that has the focus, or the only one.
  const cards = [...document.querySelectorAll(".response")];
  if (cards.length === 1) return 0;
  const place = cards.findIndex((each) => each.contains(document.activeElement));
  if (place < 0) say("Which one? Press Tab to choose a response first.");
  return place;
}

function gradeByKey(scale, key) {
  const scales = [...document.querySelectorAll(".axes .segments")];
  const { axis, place } = scale.dataset;
  if (key === "Escape") return at("prompt").focus();
  if (!/^[0-7]$/.test(key)) return undefined;
  setGrade(axis, Number(place), Number(key) || null);
  const next = scales[scales.indexOf(scale) + 1];
  return next ? focusScale(next) : at("prompt").focus();
}

const focusScale = (scale) => (scale.querySelector(":checked") ?? scale.querySelector("input")).focus();

function rankByKey(key) {
  const next = draft.ranks.indexOf(null);
  if (key === "Backspace") {
    const last = (next < 0 ? draft.ranks.length : next) - 1;
    if (last >= 0) setRank(last, null);
  } else if (next >= 0) {
    setRank(next, Number(key));
  } else {
    say("All have a rank. Enter sends, Backspace takes one back.");
  }
}

const ACTIONS = {
  ArrowLeft: () => isPair() && send("ranked", [1, 2]),
  ArrowRight: () => isPair() && send("ranked", [2, 1]),
  "=": () => (isPair() ? send("ranked", [1, 1]) : isRanking() && change(() => draft.ranks.fill(1))),
  0: () => (isPair() || isRanking()) && send("bad", []),
  s: () => send("skipped", []),
  Enter: () => isPair() || sendRanks(),
  Backspace: () => isRanking() && rankByKey("Backspace"),
  n: openNote,
  g: () => document.querySelector(".axes .segments") && focusScale(document.querySelector(".axes .segments")),
  u: () => focused() >= 0 && setThumb(focused(), 1),
  d: () => focused() >= 0 && setThumb(focused(), -1),
  e: () => focused() >= 0 && edit(focused()),
  x: () => focused() >= 0 && setEdit(focused(), null),
};

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat || at("keys").open) return;
  if (busy || !state || target.closest("textarea")) return;
  const scale = target.closest(".axes .segments");
  if (scale && (/^[0-7]$/.test(key) || key.startsWith("Arrow") || key === "Escape")) {
    if (!key.startsWith("Arrow")) {
      event.preventDefault();
      gradeByKey(scale, key);
    }
    return;
  }
  if (key === "Enter" && target.closest("button")) return;
  const act = key === "?" ? () => at("keys").showModal()
    : key === "z" ? goBack
    : key === "Escape" ? () => back && load(0)
    : !state.question ? null
    : isRanking() && Number(key) >= 1 && Number(key) <= draft.ranks.length ? () => rankByKey(key)
    : ACTIONS[key];
  if (!act) return;
  event.preventDefault();
  say("");
  act();
});
at("help").addEventListener("click", () => at("keys").showModal());
at("return").addEventListener("click", () => load(0));

load(0);
