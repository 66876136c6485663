// Texts of users and models are only ever set as text, never as markup.
const LETTERS = "AB";
const at = (id) => document.getElementById(id);
let state = null;
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

function make(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

function post(path, values) {
  return fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(values),
  });
}

function showError(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

async function act(path, values) {
  // The result of a request, or null after showing why there is none.
  showError("");
  try {
    const answer = await post(path, values);
    const result = await answer.json();
    if (answer.ok) return result;
    showError(result.error ?? `The server answered ${answer.status}.`);
  } catch {
    showError("The server does not answer. Is kedge chat still running?");
  }
  return null;
}

function figures(reply, isHigher) {
  const parts = make("p", "figures");
  if (reply.score !== null) parts.append(make("span", isHigher ? "score higher" : "score", `score ${shown(reply.score)}`));
  if (reply.score_error) parts.append(make("span", "fault", `no score: ${reply.score_error}`));
  parts.append(make("span", "", `${reply.num_tokens} token${reply.num_tokens === 1 ? "" : "s"}`), make("span", "", reply.ending));
  if (reply.num_dropped) parts.append(make("span", "fault", `the ${reply.num_dropped} oldest messages no longer fit`));
  return parts;
}

const shown = (score) => (Math.abs(score) >= 1000 ? score.toFixed(0) : Number(score.toPrecision(3)).toString());

function labelTools(card, reply) {
  // Thumbs and a correction; each is sent at once.
  const tools = make("div", "tools");
  const text = card.querySelector(".answer");
  const add = (label, click) => {
    const button = make("button", "", label);
    button.type = "button";
    button.addEventListener("click", click);
    tools.append(button);
    return button;
  };
  const up = add("Good", () => send({ thumb: reply.thumb === 1 ? 0 : 1 }));
  const down = add("Bad", () => send({ thumb: reply.thumb === -1 ? 0 : -1 }));
  add("Edit", () => edit());
  const restore = add("Undo edit", () => send({ edit: null }));
  const show = () => {
    up.setAttribute("aria-pressed", String(reply.thumb > 0));
    down.setAttribute("aria-pressed", String(reply.thumb < 0));
    restore.hidden = reply.edit === null;
    text.textContent = (reply.edit ?? reply.text).trim();
    card.classList.toggle("edited", reply.edit !== null);
  };
  async function send(values) {
    const result = await act("label", { item: reply.item, thumb: reply.thumb, edit: reply.edit, ...values });
    if (result) Object.assign(reply, result);
    show();
    return result;
  }
  function edit() {
    const field = make("textarea", "");
    field.value = reply.edit ?? reply.text;
    field.setAttribute("aria-label", "Corrected answer");
    const form = make("form", "correction");
    const keep = make("button", "", "Keep");
    const cancel = make("button", "", "Cancel");
    cancel.type = "button";
    form.append(field, keep, cancel);
    const close = () => { form.replaceWith(text, tools); show(); };
    cancel.addEventListener("click", close);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const value = field.value === reply.text ? null : field.value;
      if (await send({ edit: value })) close();
    });
    tools.remove();
    text.replaceWith(form);
    field.focus();
  }
  text.after(tools);
  show();
}

function newTurn(text) {
  // An empty card per model, below what the user wrote.
  const turn = make("section", "turn");
  const replies = make("div", "replies");
  for (const [index, model] of state.models.entries()) {
    const card = make("article", "reply");
    if (state.models.length > 1) card.append(make("h2", "", `${LETTERS[index]}  ${model.name}`));
    card.append(make("div", "answer"));
    replies.append(card);
  }
  turn.append(make("p", "asked", text), replies);
  at("turns").append(turn);
  return turn;
}

function finish(turn, replies) {
  const scores = replies.map((reply) => reply.score);
  const best = scores.length > 1 && !scores.includes(null) && scores[0] !== scores[1] ? Math.max(...scores) : null;
  for (const [index, card] of [...turn.querySelectorAll(".reply")].entries()) {
    const reply = replies[index];
    card.classList.remove("sampling");
    if (!reply) {
      card.append(make("p", "figures", "did not answer, because the answer before was interrupted"));
      continue;
    }
    card.querySelector(".answer").textContent = reply.text.trim();
    card.append(figures(reply, reply.score !== null && reply.score === best));
    if (reply.item) labelTools(card, reply);
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

const isAtEnd = () => window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
const scrollToEnd = () => window.scrollTo({ top: document.body.scrollHeight });

async function receive(turn, answer) {
  // Whether all replies came.
  const cards = turn.querySelectorAll(".reply");
  for await (const line of lines(answer.body)) {
    const follows = isAtEnd();
    if (line.error) {
      showError(line.error);
      return false;
    }
    if (line.replies) {
      finish(turn, line.replies);
    } else {
      const shownText = cards[line.model].querySelector(".answer");
      cards.forEach((card, index) => card.classList.toggle("sampling", index === line.model));
      shownText.textContent = (shownText.textContent + line.piece).trimStart();
    }
    if (follows) scrollToEnd();
    if (line.replies) return true;
  }
  throw new Error("the answer ended early");
}

async function ask(text) {
  showError("");
  setBusy(true);
  const turn = newTurn(text);
  turn.querySelector(".reply").classList.add("sampling");
  scrollToEnd();
  let isComplete = false;
  try {
    const answer = await post("ask", { text });
    if (answer.ok) isComplete = await receive(turn, answer);
    else showError((await answer.json()).error);
  } catch {
    showError("The server does not answer. Is kedge chat still running?");
  }
  if (!isComplete) {
    turn.remove();
    if (!at("text").value) at("text").value = text;
  }
  setBusy(false);
  grow();
}

function setBusy(busy) {
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  at("reset").disabled = busy;
  if (!busy) at("text").focus();
}

function grow() {
  at("text").style.height = "auto";
  at("text").style.height = `${at("text").scrollHeight + 2}px`;
}

function fillSettings() {
  for (const [name, value] of Object.entries(state.settings)) at("settings").elements[name].value = value;
}

at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings").addEventListener("change", async (event) => {
  const { name, value } = event.target;
  const result = await act("set", { [name]: value });
  if (result) state.settings = result.settings;
  fillSettings();
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value;
  if (!text.trim() || at("send").hidden) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("text").addEventListener("input", grow);
at("stop").addEventListener("click", () => act("stop", {}));
at("reset").addEventListener("click", async () => {
  if (await act("reset", {})) at("turns").replaceChildren();
});

async function start() {
  try {
    state = await (await fetch("state", { cache: "no-store" })).json();
  } catch {
    showError("The server does not answer. Is kedge chat still running?");
    return;
  }
  document.body.classList.toggle("both", state.models.length > 1);
  for (const [index, model] of state.models.entries()) {
    const label = state.models.length > 1 ? `${LETTERS[index]}  ${model.name}` : model.name;
    const entry = make("div", "");
    entry.append(make("dt", "", label), make("dd", "", model.about));
    at("models").append(entry);
  }
  if (state.reward !== null) at("models").append(make("div", "", `Scores: ${state.reward}`));
  fillSettings();
  for (const turn of state.turns) finish(newTurn(turn.text), turn.replies);
  scrollToEnd();
}

start();
