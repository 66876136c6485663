// Texts of a run that can be filtered, searched and sorted.

const AT_ONCE = 20;

/** What was chosen in each list, so that a refresh of the page keeps it. */
const chosenIn = new Map();

/**
 * A list of rows with a filter, a search box and an order.
 *
 * `filters` are [value, text, predicate], `orders` are [value, text, comparison or null], `textOf` is what the search
 * looks through, and `draw` makes the element of a row.
 */
const textList = ({ id, rows, filters, orders, textOf, draw, note }) => {
  if (!chosenIn.has(id)) chosenIn.set(id, { filter: filters[0][0], order: orders[0][0], query: "", shown: AT_ONCE });
  const state = chosenIn.get(id);
  const list = el("div", { class: "stack" }), tally = el("p", { class: "muted small", role: "status" });
  const fill = () => {
    const keeps = filters.find(([value]) => value === state.filter)[2], compare = orders.find(([value]) => value === state.order)[2];
    const query = state.query.trim().toLowerCase();
    const found = rows.filter(row => keeps(row) && (!query || textOf(row).toLowerCase().includes(query)));
    if (compare) found.sort(compare);
    tally.textContent = `${count(found.length)} of ${count(rows.length)} shown${found.length > state.shown ? `, the first ${count(state.shown)} below` : ""}. ${note}`;
    list.replaceChildren(...found.slice(0, state.shown).map(draw),
      ...(found.length > state.shown ? [el("button", { type: "button", onclick: () => { state.shown += 5 * AT_ONCE; fill(); } }, "Show more")] : []));
  };
  const change = (name, value) => { Object.assign(state, { [name]: value, shown: AT_ONCE }); fill(); };
  const search = el("input", { type: "search", value: state.query, placeholder: "Search in prompts and responses", "aria-label": "Search in prompts and responses",
    oninput: event => change("query", event.target.value) });
  fill();
  return el("div", { class: "stack texts" },
    el("div", { class: "controls" },
      filters.length > 1 ? choice("Show", filters.map(([value, text]) => [value, text]), state.filter, value => change("filter", value)) : null,
      orders.length > 1 ? choice("Order", orders.map(([value, text]) => [value, text]), state.order, value => change("order", value)) : null,
      search),
    tally, list);
};

const figuresOf = parts => el("span", { class: "muted small number" }, parts.filter(Boolean).join(" · "));
const answerOf = (title, text, figures, marked) => el("div", { class: `answer ${marked ? "winner" : ""}` },
  el("p", { class: "head" }, el("b", {}, title), figures), el("p", { class: "text", dir: "auto" }, text || "(empty)"));
const promptOf = text => el("p", { class: "prompt", dir: "auto" }, text);
const descending = of => (one, other) => (of(other) ?? -Infinity) - (of(one) ?? -Infinity);
const ascending = of => (one, other) => (of(one) ?? Infinity) - (of(other) ?? Infinity);
