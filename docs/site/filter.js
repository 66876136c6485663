// A filter for the reference of fields: words narrow its entries to those that contain all of them. Without JavaScript
// the page stays whole.
(() => {
  const fields = document.querySelector("article h1#every-field");
  if (!fields) return;

  // An entry is a heading of level 3 with what follows it; a group is one of level 2 with its entries.
  const groups = [];
  for (let node = fields.nextElementSibling; node; node = node.nextElementSibling) {
    if (node.tagName === "H2") groups.push({ id: node.id, own: [node], entries: [] });
    else if (!groups.length) continue;
    else if (node.tagName === "H3") groups.at(-1).entries.push({ id: node.id, nodes: [node] });
    else (groups.at(-1).entries.at(-1)?.nodes ?? groups.at(-1).own).push(node);
  }
  const reference = groups.filter((group) => group.entries.length);
  for (const { entries } of reference)
    for (const entry of entries) {
      entry.name = entry.nodes[0].textContent.replace("¶", "").trim();
      entry.text = entry.nodes.map((node) => node.textContent).join(" ").toLowerCase();
    }
  const total = reference.reduce((sum, group) => sum + group.entries.length, 0);

  const box = document.createElement("div");
  box.className = "filter";
  box.innerHTML = '<input type="search" placeholder="Filter: a name or words, such as kl or learning rate" ' +
    'aria-label="Filter the fields" autocomplete="off" spellcheck="false"><output></output>';
  const [input, count] = box.children;
  reference[0].own[0].before(box);

  const inContents = (id) => document.querySelector(`.md-nav--secondary a[href="#${CSS.escape(id)}"]`)?.closest("li");
  const show = (id, nodes, visible) => {
    for (const node of nodes) node.hidden = !visible;
    const item = inContents(id);
    if (item) item.hidden = !visible;
  };
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const { id, own, entries } of reference) {
      let any = false;
      for (const entry of entries) {
        const visible = words.every((word) => entry.text.includes(word));
        show(entry.id, entry.nodes, visible);
        any ||= visible;
        found += visible;
      }
      show(id, own, any);
    }
    count.textContent = words.length ? `${found} of ${total}` : `${total} fields`;
    const hash = words.length ? `#filter=${encodeURIComponent(input.value)}` : "";
    history.replaceState(null, "", location.pathname + location.search + hash);
  };
  count.textContent = `${total} fields`;
  input.addEventListener("input", apply);
  // A link to a field shows it even while the filter hides it.
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target?.hidden) return;
    input.value = "";
    apply();
    target.scrollIntoView();
  });
  const given = location.hash.match(/^#filter=(.*)/);
  if (given) {
    input.value = decodeURIComponent(given[1]);
    apply();
  }
})();
