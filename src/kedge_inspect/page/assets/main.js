// The page: sections, theme, and live updates.

const stored = (name, value) => {
  try { return value === undefined ? localStorage.getItem(name) : localStorage.setItem(name, value); } catch { return null; }
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
const setTheme = name => {
  document.documentElement.dataset.theme = name;
  themeButton.textContent = name === "dark" ? "☀ Light" : "☾ Dark";
  themeButton.setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} theme`);
  redrawAll();
};
setTheme(stored("kedge-theme") ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!stored("kedge-theme")) setTheme(dark.matches ? "dark" : "light"); });
themeButton.addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  stored("kedge-theme", name);
  setTheme(name);
});

const main = document.getElementById("main"), nav = document.getElementById("nav"), foot = document.getElementById("foot");
const here = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    const link = nav.querySelector(`[href="#${target.id}"]`);
    if (!isIntersecting) link?.removeAttribute("aria-current");
    else if (link) {
      link.setAttribute("aria-current", "true");
      nav.scrollTo({ left: link.offsetLeft - nav.offsetLeft - 40 });
    }
  }
}, { rootMargin: "-45% 0px -50% 0px" });

/** The data of all sections; live updates replace its entries in place. */
const data = JSON.parse(document.getElementById("data").textContent);
const isTrained = run => !["evaluate", "generate"].includes(run.stage);
const OF_TRAINING = data.sweep ? OF_A_SWEEP : [episode, heldOut, critic, curves, samples, clipping, frontier, cost, rewardModel];
const parts = data.labels ? labels(data) : [verdict, evaluation, ...(data.runs.every(run => !isTrained(run)) && data.runs.some(run => has(run.critic)) ? [critic] : []), generation, ...(data.runs.every(run => !isTrained(run)) && data.runs.length ? [] : OF_TRAINING)]
  .map(make => make(data));
const links = parts.map(part => el("a", { href: `#${part.id}`, onclick: () => { for (const each of part.node.querySelectorAll(":scope > details")) each.open = true; } }, part.title));
const omitted = el("div", { class: "omitted muted small" });
nav.append(...links);
main.replaceChildren(...parts.map(part => part.node), omitted);
foot.textContent = data.written;

/** Show the sections that have something to show, and say at the end which are left out for a reason that can be changed. */
const listSections = () => {
  parts.forEach((part, at) => { links[at].hidden = part.node.hidden; });
  const missing = parts.filter(part => part.node.hidden).map(part => [part.title, part.why()]).filter(([, why]) => why.length);
  omitted.replaceChildren(...missing.map(([title, why]) => el("p", {}, el("b", {}, title), `: ${why.join(" ")}`)));
};
for (const part of parts) {
  part.refresh();
  here.observe(part.node);
}
listSections();
if (!data.labels) loadLibrary();

/** Poll for newer data on a live page; a section that has the keyboard focus is not refreshed. */
const POLL_SECONDS = 5;
/** Newer data; null if there are none, or the server does not answer. */
const newer = async () => {
  try {
    const answer = await fetch(data.live, { headers: { "If-None-Match": data.version } });
    return answer.ok ? await answer.json() : null;
  } catch { return null; }
};
const poll = async () => {
  const found = await newer();
  if (found) {
    Object.assign(data, found);
    foot.textContent = data.written;
    for (const part of parts) {
      if (part.renew) part.renew();
      else if (!part.node.contains(document.activeElement)) part.refresh();
    }
    listSections();
    drawSoon();
  }
  setTimeout(poll, 1000 * POLL_SECONDS);
};
if (data.live) setTimeout(poll, 1000 * POLL_SECONDS);
