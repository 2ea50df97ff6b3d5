// Of a session's settings: the keys that what runs in it does not see, and what it may use of them.

import { api } from "./api.js";
import { busy, h, problem, redraw, say } from "./dom.js";
import { dollars, grouped, named } from "./format.js";
import { field } from "./sessions.js";

const BROKER = {
  ready: "The broker has them, and puts them into what agents send to their models.",
  empty: "The broker has none: it gets them with the next command, prompt or terminal.",
  down: "The broker does not run: it starts with the next command, prompt or terminal.",
};

const AMOUNTS = { // the label of each amount, how it reads, and its unit
  usd: ["Dollars", dollars, ""],
  tokens: ["Tokens", grouped, " tokens"],
  minutes: ["Minutes", grouped, " minutes"],
};

/** What is left of each amount of a budget; null where there is none. */
export function budgetOf({ budget = {}, left = {} }) {
  const limited = Object.keys(AMOUNTS).filter((key) => budget[key] !== undefined);
  const day = budget.per === "day" ? " today" : "";
  const line = (key) => {
    const [, text, unit] = AMOUNTS[key];
    return h("li", { class: left[key] ? null : "bad-text" },
      h("meter", { max: String(budget[key] || 1), value: left[key] ?? 0, "aria-hidden": "true" }),
      ` ${text(left[key] ?? 0)} of ${text(budget[key])}${unit} left${day}`,
      !left[key] && ": requests are refused until the budget is raised");
  };
  return limited.length > 0 && h("ul", { class: "budget" }, limited.map(line));
}

/** The names of a session's hidden keys, the state of their broker, and the budget to raise: all of
 * it once `look()` resolves, so that nothing below it moves. */
export function keysSection(name) {
  const usage = `#/s/${encodeURIComponent(name)}/usage`;
  const facts = h("div", {});
  const left = h("div", { role: "status" });
  const errors = h("div", {});
  const own = { oninput: (event) => event.stopPropagation() }; // it has a button of its own
  const inputs = Object.fromEntries(Object.keys(AMOUNTS).map((key) =>
    [key, h("input", { type: "number", min: "0", step: "any", placeholder: "no limit", ...own })]));
  const per = h("select", own, h("option", { value: "session" }, "per session"),
    h("option", { value: "day" }, "per day, in UTC"));
  const set = h("button", { type: "button", onclick: () => busy(set, save) }, "Set budget");
  const enter = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would save the settings
    set.click();
  };

  function draw(data) {
    const { hiddenKeys = [], budget = {}, broker = "" } = data;
    const keys = hiddenKeys.map((key) => h("li", { class: "mono" }, key));
    redraw(facts, keys.length ? [h("ul", { class: "keys", "aria-label": "Hidden keys" }, keys),
      h("p", { class: "hint broker" }, named(BROKER, broker))]
      : h("p", {}, "No key is configured that could be hidden."));
    redraw(left, budgetOf(data) || h("p", { class: "hint" }, "There is no budget."));
    for (const [key, input] of Object.entries(inputs)) input.value = budget[key] ?? "";
    per.value = budget.per === "day" ? "day" : "session";
  }

  async function save() {
    const given = Object.entries(inputs)
      .filter(([, input]) => input.value !== "" || input.validity.badInput)
      .map(([key, input]) => [key, input.valueAsNumber]);
    const budget = given.length ? { ...Object.fromEntries(given), per: per.value } : {};
    errors.replaceChildren();
    try {
      await api.saveSettings(name, { budget });
      draw(await api.usage(name));
      say("The budget was set");
    } catch (error) {
      errors.replaceChildren(problem(error));
    }
  }

  const look = () => api.usage(name).then(draw)
    .catch((error) => facts.replaceChildren(problem(error)));
  const elements = [
    h("fieldset", {}, h("legend", {}, "Hidden keys"),
      h("p", { class: "hint" }, "What runs in the session sees placeholders for the values of "
        + "these variables."), facts),
    h("fieldset", { onkeydown: enter }, h("legend", {}, "Budget"), left,
      h("div", { class: "amounts" },
        Object.entries(AMOUNTS).map(([key, [label]]) => field(label, inputs[key])),
        field("Counted", per)), errors,
      h("div", { class: "row" }, set, h("p", { class: "hint grow" },
        "In force with the next request, and kept. ", h("a", { href: usage }, "What was used")))),
  ];
  return { elements, look };
}
