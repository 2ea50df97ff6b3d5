// What agents have used of their models, where the keys are hidden: of one session, or of all.

import { api } from "./api.js";
import { chart, sumOf } from "./chart.js";
import { busy, h, problem, redraw } from "./dom.js";
import { usageText } from "./format.js";
import { icon } from "./icons.js";
import { budgetOf } from "./keys.js";
import { refresh, store } from "./store.js";

const modelsOf = ({ days = [] }) => days.flatMap(({ models = [] }) => models);

/** What is said of models without a price. */
const unpricedNote = (models, prices) => models.length > 0 && h("p", { class: "hint" },
  `No price is known of ${models.slice(0, 10).join(", ")}${models.length > 10 ? " and others" : ""}: `
  + `only ${models.length > 1 ? "their" : "its"} tokens are counted. The prices are of ${prices}.`);

/** Keep a view up to date while jobs begin and end; `load` asks and draws. Gives what ends that. */
function follow(load, where) {
  const state = () => store.sessions?.map(({ name, jobs, last }) => [name, jobs, last?.id, last?.state]).join();
  let known = state();
  const look = async () => {
    try {
      await load();
    } catch (error) {
      redraw(where, problem(error));
    }
  };
  const changed = () => known !== (known = state()) && !document.hidden && look();
  store.addEventListener("change", changed);
  look();
  return { look, end: () => store.removeEventListener("change", changed) };
}

const againButton = (view) => {
  const button = h("button", { class: "quiet small", type: "button", onclick: () => busy(button, view.look) },
    icon("again"), "Read again");
  return button;
};

export function mount(root, { name }) {
  const facts = h("div", { class: "usage-facts" }, h("p", { class: "dim" }, "Loading…"));
  const bars = chart("model");
  bars.element.hidden = true;
  let gone = false;
  const view = follow(async () => {
    const data = await api.usage(name);
    if (gone) return;
    const { days = [], unpriced = [], prices } = data;
    redraw(facts, h("p", {}, h("strong", {}, usageText(data)), " in all"), budgetOf(data),
      h("p", {}, h("a", { href: `#/s/${encodeURIComponent(name)}/settings` }, "Keys and budget")),
      unpricedNote(unpriced, prices));
    bars.element.hidden = !days.length;
    bars.update(days.flatMap(({ day, models = [] }) => models.map((model) =>
      ({ day, name: model.model, ...sumOf([model]) }))));
  }, facts);
  root.append(h("div", { class: "scroll", tabindex: "-1" }, h("div", { class: "usage" },
    h("div", { class: "row end" }, againButton(view)), facts, bars.element)));
  return { unmount() {
    gone = true;
    view.end();
  } };
}

/** The page of all sessions. */
export function mountAll(root) {
  const facts = h("div", { class: "usage-facts" }, h("p", { class: "dim" }, "Loading…"));
  const list = h("ul", { class: "copies" });
  const bars = chart("session");
  bars.element.hidden = true;
  let gone = false;
  const view = follow(async () => {
    const { sessions = [], prices } = await api.allUsage();
    if (gone) return;
    redraw(facts, !sessions.length ? h("p", { class: "dim" }, "No session has hidden keys: what agents use is counted "
      + "where a session is created with them.")
      : h("p", {}, h("strong", {}, usageText({ days: sessions.flatMap(({ days = [] }) => days) })), " in all"),
    unpricedNote([...new Set(sessions.flatMap(({ unpriced = [] }) => unpriced))], prices));
    redraw(list, sessions.map((entry) => h("li", { class: "card" }, h("h3", {},
      h("a", { href: `#/s/${encodeURIComponent(entry.name)}/usage` }, entry.name)),
    entry.error ? h("p", { class: "bad-text" }, entry.error) : [h("p", {}, usageText(entry)), budgetOf(entry)])));
    bars.element.hidden = !sessions.some((entry) => modelsOf(entry).length);
    bars.update(sessions.flatMap(({ name, days = [] }) => days.map(({ day, models = [] }) =>
      ({ day, name, ...sumOf(models) }))));
  }, facts);
  root.replaceChildren(h("div", { class: "page usage" }, h("div", { class: "page-head" },
    h("a", { class: "button quiet back", href: "#/", "aria-label": "All sessions" }, icon("back")),
    h("h1", { class: "grow" }, "Usage"), againButton(view)), facts, bars.element, list));
  refresh();
  return () => {
    gone = true;
    view.end();
  };
}
