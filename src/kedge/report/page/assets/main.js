// The page: its sections in their order, its theme, and newer figures where it follows a run.

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

const main = document.getElementById("main"), nav = document.getElementById("nav");
let parts = [];
const show = data => {
  for (const part of parts) forget(part.node);
  parts = [verdict, curves, samples, clipping, frontier, cost, rewardModel].map(make => make(data));
  nav.replaceChildren(...parts.map(part => el("a", { href: `#${part.id}` }, part.id === "verdict" ? "Verdict" : part.title)));
  main.replaceChildren(...parts.map(part => part.node));
  document.getElementById("foot").textContent = data.written;
  for (const part of parts) part.refresh();
  for (const part of parts) here.observe(part.node);
};
const here = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    const link = nav.querySelector(`[href="#${target.id}"]`);
    if (isIntersecting) link?.setAttribute("aria-current", "true"); else link?.removeAttribute("aria-current");
  }
}, { rootMargin: "-45% 0px -50% 0px" });

const first = JSON.parse(document.getElementById("data").textContent);
show(first);
wakeLibrary();

/** Newer figures are asked for while nobody is in the middle of something. */
const LIVE_SECONDS = 5;
const follow = async (url, known) => {
  const answer = await fetch(url, { cache: "no-store", headers: { "If-None-Match": known } }).catch(() => null);
  const newer = answer?.ok ? await answer.json().catch(() => null) : null;
  if (newer && !main.contains(document.activeElement)) {
    const scrolled = scrollY;
    known = newer.version;
    show(newer);
    scrollTo({ top: scrolled, behavior: "instant" });
  }
  setTimeout(follow, 1000 * LIVE_SECONDS, url, known);
};
if (first.live) setTimeout(follow, 1000 * LIVE_SECONDS, first.live, first.version);
