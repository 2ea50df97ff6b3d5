// Sessions that work on copies of one directory: one prompt to several agents, what each has done
// beside the others, and the merge of one.

import { api } from "./api.js";
import { busy, drawn, h, problem, putAt, redraw, toast } from "./dom.js";
import { carryOut } from "./effects.js";
import { changesAddress, changesText, tailOf } from "./format.js";
import { icon } from "./icons.js";
import { activity } from "./sessions.js";
import { agentName, refresh, store } from "./store.js";

const AGENTS = 3;
const NAME_CHARS = 40; // of a session, before the number of its copy

/** Names for so many copies of a session that no session has. */
function freeNames(name, count) {
  const names = [];
  for (let number = 2; names.length < count; number++) {
    const free = `${name.slice(0, NAME_CHARS)}-${number}`;
    if (!store.find(free)) names.push(free);
  }
  return names;
}

/** Make a copy with an agent, and prompt it. It is isolated as the session is. */
async function begin(context, name, agent, prompt) {
  await api.act(context.name, "duplicate", { name, agent, workspace: "copy" });
  await api.prompt(name, prompt);
}

/** Ask for a prompt and the agents, and send it to a new copy for each. */
function askSeveral(context) {
  const known = [...store.agents.keys()];
  const first = [...new Set([context.session.agent || known[0], ...known])];
  const choose = (number) => h("select", { "aria-label": `Agent ${number + 1}` },
    number > 1 && h("option", { value: "" }, "none"),
    known.map((agent) => h("option", { value: agent, selected: number < 2 && agent === first[number] }, agentName(agent))));
  const selects = Array.from({ length: AGENTS }, (_, number) => choose(number));
  const area = h("textarea", { rows: "4", required: true, "aria-label": "Prompt" });
  const errors = h("div", {});
  const start = h("button", { class: "primary", type: "submit" }, "Start");
  const dialog = h("dialog", { class: "several", "aria-labelledby": "several-title" }, h("form", {},
    h("h2", { id: "several-title" }, "One prompt to several agents"),
    h("p", { class: "hint" }, `Each works on a copy of ${tailOf(context.session.directory)} of its own. `
      + "Nothing comes into the directory until you merge it."),
    area, selects, errors, h("div", { class: "row end" },
      h("button", { class: "quiet", type: "button", onclick: () => dialog.close() }, "Cancel"), start)));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("submit", (event) => {
    event.preventDefault();
    busy(start, async () => {
      const agents = selects.map((select) => select.value).filter(Boolean);
      const names = freeNames(context.name, agents.length);
      const begun = await Promise.allSettled(agents.map((agent, at) => begin(context, names[at], agent, area.value)));
      await refresh();
      const failed = begun.flatMap(({ reason }, at) => reason ? [[names[at], reason]] : []);
      if (!failed.length) return dialog.close();
      errors.replaceChildren(...failed.map(([name, { message, hint }]) => problem({ message: `${name}: ${message}`, hint })));
    });
  });
  document.body.append(dialog);
  dialog.showModal();
}

/** What one copy has done. */
function card(context, name) {
  const doing = h("p", { class: "doing" });
  const changes = h("a", { href: changesAddress(name) });
  const report = h("div", { role: "status" });
  const merge = h("button", { class: "small", type: "button", "aria-label": `Merge ${name}`, onclick: () =>
    carryOut({ button: merge, name, directory: context.session.directory ?? "", verb: "merge", what: {},
      where: report, title: name }) }, "Merge");
  const agent = h("p", { class: "dim" });
  return {
    element: h("li", { class: "card" }, h("div", { class: "row" }, h("h3", { class: "grow" },
      h("a", { href: `/#/s/${encodeURIComponent(name)}/agent` }, name)), merge), agent, doing, changes, report),
    update(row) {
      const { text, tone } = activity(row);
      redraw(agent, row.agent ? agentName(row.agent) : "no agent");
      redraw(doing, text);
      doing.className = `doing ${tone}`;
      redraw(changes, changesText(row.last?.changes) || (row.last?.changes ? "Nothing changed" : "Changes"));
    },
  };
}

/** The copies of the session's directory side by side, and the way to more. */
export function mountCopies(context) {
  const cards = new Map();
  const list = h("ul", { class: "copies" });
  const ask = h("button", { type: "button", onclick: () => askSeveral(context) }, icon("grid"), "Ask several agents");
  const draw = () => {
    const copies = (store.sessions ?? []).filter(({ workspace, directory }) =>
      workspace === "copy" && directory === context.session.directory)
      .sort((one, other) => (one.name < other.name ? -1 : 1));
    for (const [name, { element }] of cards) {
      if (copies.some((row) => row.name === name)) continue;
      element.remove();
      cards.delete(name);
    }
    copies.forEach((row, index) => {
      if (!cards.has(row.name)) cards.set(row.name, card(context, row.name));
      const { element, update } = cards.get(row.name);
      drawn(() => update(row), (why) => toast(why, "error"));
      putAt(list, index, element);
    });
  };
  store.addEventListener("change", draw);
  draw();
  return { element: h("div", {}, h("div", { class: "row end" }, ask), list),
    end: () => store.removeEventListener("change", draw) };
}
