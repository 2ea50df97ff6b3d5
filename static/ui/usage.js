// What agents have used of their models, where the keys are hidden: of one session, or of all.

import { api } from "./api.js";
import { chart } from "./chart.js";
import { busy, h, problem, redraw } from "./dom.js";
import { sumOf, usageText } from "./format.js";
import { icon } from "./icons.js";
import { budgetOf } from "./keys.js";
import { refresh, store } from "./store.js";

const NAMED = 10; // models without a price

/** What is said of models without a price. */
const unpricedNote = (models, prices) => models.length > 0 && h("p", { class: "hint" },
  `No price is known of ${models.slice(0, NAMED).join(", ")}`,
  models.length > NAMED ? ` and ${models.length - NAMED} others` : "",
  `: only ${models.length > 1 ? "their" : "its"} tokens are counted. The prices are of ${prices}.`);

const total = (entry) => h("p", {}, h("strong", {}, usageText(entry)), " in all");

/** Draw a chart by `by` while jobs begin and end: `load` asks, draws facts and gives the rows. */
function follow(by, load) {
  const facts = h("div", { class: "usage-facts" }, h("p", { class: "dim" }, "Loading…"));
  const bars = chart(by);
  bars.element.hidden = true;
  let gone = false;
  const look = async () => {
    try {
      const { shown, rows } = await load();
      if (gone) return;
      redraw(facts, shown);
      bars.element.hidden = !rows.length;
      bars.update(rows);
    } catch (error) {
      if (!gone) redraw(facts, problem(error));
    }
  };
  const state = () => store.sessions?.map(({ name, jobs, last }) =>
    [name, jobs, last?.id, last?.state]).join();
  let known = state();
  const changed = () => known !== (known = state()) && !document.hidden && look();
  const again = h("button", { class: "quiet small", type: "button", onclick: () =>
    busy(again, look) }, icon("again"), "Read again");
  store.addEventListener("change", changed);
  look();
  return { again, facts, bars: bars.element, end() {
    gone = true;
    store.removeEventListener("change", changed);
  } };
}

export function mount(root, { name }) {
  const settings = `#/s/${encodeURIComponent(name)}/settings`;
  const view = follow("model", async () => {
    const data = await api.usage(name);
    const { days = [], unpriced = [], prices } = data;
    return {
      shown: [total(data), budgetOf(data),
        h("p", {}, h("a", { href: settings }, "Keys and budget")), unpricedNote(unpriced, prices)],
      rows: days.flatMap(({ day, models = [] }) => models.map((model) =>
        ({ day, name: model.model, ...sumOf([model]) }))),
    };
  });
  root.append(h("div", { class: "scroll", tabindex: "-1" }, h("div", { class: "usage" },
    h("div", { class: "row end" }, view.again), view.facts, view.bars)));
  return { unmount: view.end };
}

const card = (entry) => h("li", { class: "card" },
  h("h3", {}, h("a", { href: `#/s/${encodeURIComponent(entry.name)}/usage` }, entry.name)),
  entry.error ? h("p", { class: "bad-text" }, entry.error)
    : [h("p", {}, usageText(entry)), budgetOf(entry)]);

/** The page of all sessions. */
export function mountAll(root) {
  const list = h("ul", { class: "copies" });
  const view = follow("session", async () => {
    const { sessions = [], prices } = await api.allUsage();
    redraw(list, sessions.map(card));
    const unpriced = new Set(sessions.flatMap((entry) => entry.unpriced ?? []));
    return {
      shown: [sessions.length ? total({ days: sessions.flatMap(({ days = [] }) => days) })
        : h("p", { class: "dim" }, "No session has hidden keys: what agents use is counted where "
          + "they are."), unpricedNote([...unpriced], prices)],
      rows: sessions.flatMap(({ name, days = [] }) => days.filter(({ models }) => models?.length)
        .map(({ day, models }) => ({ day, name, ...sumOf(models) }))),
    };
  });
  root.replaceChildren(h("div", { class: "page usage" }, h("div", { class: "page-head" },
    h("a", { class: "button quiet back", href: "#/", "aria-label": "All sessions" }, icon("back")),
    h("h1", { class: "grow" }, "Usage"), view.again), view.facts, view.bars, list));
  refresh();
  return view.end;
}
