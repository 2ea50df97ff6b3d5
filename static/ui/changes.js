// What agents have changed, turn by turn: the files, their patches, undo and redo.

import { api } from "./api.js";
import { mountCopies } from "./copies.js";
import { busy, drawn, h, problem, putAt, redraw } from "./dom.js";
import { KINDS, carryOut, escapedPath, pathOf, riskOf, statusOf, visible } from "./effects.js";
import { ago, count, named, size } from "./format.js";
import { icon } from "./icons.js";
import { store } from "./store.js";

const SHOWN_FILES = 200; // at a time
const SHOWN_TITLE = 300; // characters
const SHOWN_LINES = 10_000; // of a patch at a time
const SLICE_LINES = 500; // drawn between two frames
const LINE_CHARS = 5000;

// --- Patches ---

function* linesOf(patch) {
  let [old, now] = [0, 0];
  for (const text of patch.replace(/\n$/, "").split("\n")) {
    const hunk = /^@@ -(\d+)(?:,\d+)? \+(\d+)/.exec(text);
    if (hunk) [old, now] = [Number(hunk[1]), Number(hunk[2])];
    if (hunk || text.startsWith("\\")) yield ["hunk", "", text];
    else if (text.startsWith("+")) yield ["plus", now++, text];
    else if (text.startsWith("-")) yield ["minus", old++, text];
    else yield ["", (old++, now++), text];
  }
}

function lineOf([kind, number, text]) {
  const cut = text.length > LINE_CHARS;
  return h("div", { class: kind || null, "data-number": String(number) },
    visible(cut ? text.slice(0, LINE_CHARS) : text),
    cut && h("em", {}, ` … ${count(text.length - LINE_CHARS, "character")} more`));
}

/** A patch in a box of its own. What is at its top is there at once, the rest between later frames. */
function patchOf(file) {
  const lines = linesOf(file.patch);
  const box = h("div", { class: "patch", tabindex: "0", role: "group", "aria-label": "Patch" });
  const more = h("button", { class: "quiet small", type: "button", onclick: () => {
    more.remove();
    draw(SHOWN_LINES);
  } }, "Show more lines");
  const draw = (left) => {
    const slice = h("div", { class: "slice" });
    for (let number = 0; number < Math.min(left, SLICE_LINES); number++) {
      const { value, done } = lines.next();
      if (!done) slice.append(lineOf(value));
      else left = 0;
    }
    box.append(slice);
    if (left > SLICE_LINES) requestAnimationFrame(() => draw(left - SLICE_LINES));
    else if (left) box.append(more);
  };
  draw(SHOWN_LINES);
  return box;
}

/** What there is to see of a file. */
function contentOf(file) {
  if (file.patch) return patchOf(file);
  return h("p", { class: "hint" }, file.kept === false ? `What it held was not kept: ${file.why ?? file.seen}.`
    : file.binary || file.truncated ? "It is no text, or too long to be compared."
      : file.status === "mode" ? "Only its mode has changed." : "It is empty.");
}

// --- Files of a turn ---

const counts = ({ added = 0, deleted = 0 }) => [
  h("span", { class: "plus" }, `+${added}`), " ", h("span", { class: "minus" }, `−${deleted}`)];

const about = (file) => [
  file.oldMode && file.newMode && file.oldMode !== file.newMode
    && `mode ${file.oldMode.slice(-4)} → ${file.newMode.slice(-4)}`,
  file.files !== undefined && count(file.files, "file"),
  (file.binary || file.kept === false) && file.size !== undefined && size(file.size)].filter(Boolean).join(" · ");

function fileRow(turn, file) {
  const body = h("div", { class: "file-body", hidden: true });
  const open = h("button", { class: "quiet file", type: "button", "aria-expanded": "false", onclick: toggle },
    statusOf(file), pathOf(file.path),
    h("span", { class: "counts" }, about(file), " ", !file.binary && file.kept !== false && counts(file)));
  const again = h("button", { class: "quiet small", type: "button", onclick: () =>
    turn.change(again, turn.isUndone(file.path) ? "redo" : "undo", escapedPath(file.path), { paths: [file.path] }) });
  async function toggle() {
    body.hidden = !body.hidden;
    open.ariaExpanded = String(!body.hidden);
    if (body.hidden || body.childNodes.length) return;
    if (file.truncated) {
      body.replaceChildren(h("p", { class: "hint" }, "Loading…"));
      try {
        const alone = (await api.diff(turn.name, turn.id, file.path)).files.find(({ path }) => path === file.path);
        redraw(body, contentOf({ ...file, ...alone }),
          alone?.truncated && h("p", { class: "hint" }, "The rest is too long to be shown."));
      } catch (error) {
        body.replaceChildren(problem(error));
      }
    } else body.append(contentOf(file));
  }
  return {
    element: h("li", {}, h("div", { class: "file-line" }, open, again), riskOf(file.risk), body),
    update() {
      const label = turn.isUndone(file.path) ? "Redo" : "Undo";
      if (again.textContent !== label) again.replaceChildren(label);
      again.setAttribute("aria-label", `${label} ${escapedPath(file.path)}`);
    },
  };
}

// --- Turns ---

class Turn {
  constructor(screen, id) {
    Object.assign(this, { screen, id, name: screen.name, rows: [] });
    this.title = h("span", { class: "what" });
    this.facts = h("span", { class: "facts dim" });
    this.open = h("button", { class: "quiet turn-line", type: "button", "aria-expanded": "false",
      onclick: () => this.toggle() }, this.title, this.facts);
    this.act = h("button", { class: "small", type: "button", onclick: () =>
      this.change(this.act, this.event.state === "undone" ? "redo" : "undo", `“${this.title.textContent}”`, {}) });
    this.since = h("button", { class: "quiet small", type: "button", onclick: () =>
      this.change(this.since, "undo", "all since then", { only: false }) }, "Undo all since");
    this.report = h("div", { role: "status" });
    this.body = h("div", { class: "files", hidden: true });
    this.element = h("li", { class: "change", "data-turn": escapedPath(id) },
      h("div", { class: "change-head" }, this.open, h("div", { class: "row nowrap" }, this.since, this.act)),
      this.report, this.body);
  }

  /** Show what the log says of it now; what is the same stays, with the focus. */
  update(event, events) {
    const before = this.event && `${this.event.after} ${this.event.files}`;
    Object.assign(this, { event, events });
    const { kind = "turn", state, risky } = event;
    const undone = state === "undone";
    const what = kind === "turn" ? event.command || event.what || event.id : named(KINDS, kind);
    redraw(this.title, visible(what.split("\n")[0].slice(0, SHOWN_TITLE)));
    const files = event.files === undefined ? [state || "not ended"] : [count(event.files, "file"),
      ...(event.added === undefined ? [] : [counts(event)])];
    redraw(this.facts, risky ? h("span", { class: "chip bad" }, count(risky, "warning")) : null,
      undone ? h("span", { class: "chip" }, "undone") : null,
      [kind === "turn" && event.what, event.when && h("time", { datetime: event.when }, ago(event.when)), ...files]
        .filter(Boolean).flatMap((part) => [" · ", part]).slice(1),
      event.beside?.length ? ` · beside ${count(event.beside.length, "other turn")}, with their changes` : null);
    this.element.classList.toggle("undone", undone);
    this.act.hidden = kind !== "turn" && kind !== "merge";
    this.act.replaceChildren(undone ? "Redo" : "Undo");
    this.act.setAttribute("aria-label", `${undone ? "Redo" : "Undo"} ${this.title.textContent}`);
    const later = events.slice(events.indexOf(event) + 1);
    this.since.hidden = kind !== "turn" || undone
      || !later.some((one) => one.kind === "turn" && one.state !== "undone");
    for (const row of this.rows) row.update();
    if (before !== undefined && before !== `${event.after} ${event.files}` && !this.body.hidden) this.load();
  }

  /** Whether a path of this turn was undone: the last undo or redo of it says so. */
  isUndone(path) {
    const [last] = this.events.filter(({ kind, turns, paths }) => (kind === "undo" || kind === "redo")
      && turns?.includes(this.id) && (paths ?? [""]).some((top) => !top || top === path
        || path.startsWith(`${top}/`))).slice(-1);
    return last ? last.kind === "undo" : false;
  }

  toggle(on = this.body.hidden) {
    this.body.hidden = !on;
    this.open.ariaExpanded = String(on);
    if (on && !this.rows.length) this.load();
  }

  async load() {
    const asked = (this.asked = {});
    if (!this.rows.length) this.body.replaceChildren(h("p", { class: "hint" }, "Loading…"));
    try {
      const { files, more } = await api.diff(this.name, this.id);
      if (asked === this.asked) this.draw(files ?? [], more ?? 0);
    } catch (error) {
      if (asked === this.asked) this.body.replaceChildren(problem(error));
    }
  }

  draw(files, unlisted) {
    const list = h("ul", {});
    const rest = files.sort((a, b) => Boolean(b.risk?.length) - Boolean(a.risk?.length));
    const more = h("button", { class: "quiet", type: "button", onclick: () => add() });
    const add = () => {
      for (const file of rest.splice(0, SHOWN_FILES)) {
        const row = drawn(() => fileRow(this, file), (why) => ({ update() {},
          element: h("li", { class: "undrawn" }, h("p", { class: "bad-text" }, why), pathOf(file.path)) }));
        row.update();
        this.rows.push(row);
        list.append(row.element);
      }
      more.hidden = !rest.length;
      more.textContent = `Show ${count(rest.length, "file")} more`;
    };
    this.rows = [];
    this.body.replaceChildren(files.length ? list : h("p", { class: "hint" }, this.event.after
      ? "Nothing was changed." : "It goes on; what it changes is listed when it ends."), more);
    if (unlisted) this.body.append(h("p", { class: "hint" }, `${count(unlisted, "file")} more are not listed.`));
    add();
  }

  change(button, verb, title, what) {
    what = { turn: this.id, only: true, ...what };
    return this.screen.change({ button, verb, what, where: this.report, title });
  }
}

// --- The screen ---

export function mount(root, context) {
  const { name } = context;
  const turns = new Map();
  const list = h("ol", { class: "changes" });
  const top = h("div", {});
  const facts = h("p", { class: "hint grow" });
  const again = h("button", { class: "quiet small", type: "button", onclick: () =>
    busy(again, load) }, icon("again"), "Read again");
  const copies = mountCopies(context);
  root.append(h("div", { class: "scroll", tabindex: "-1" }, copies.element, h("div", { class: "row" }, facts, again),
    top, list));
  let gone = false;
  let wanted = context.turn; // what the address names, or the last one, is open at first

  const screen = {
    name,
    change: async (about) => {
      const { directory = "" } = context.session;
      if (await carryOut({ name, directory, ...about })) await load();
      if (document.activeElement === document.body) about.button.focus({ preventScroll: true });
    },
  };

  function draw({ turns: events = [], read }) {
    facts.textContent = [count(events.filter(({ kind }) => kind === "turn").length, "turn"),
      read && `read ${ago(read)}`].filter(Boolean).join(" · ");
    redraw(top, !events.length && h("div", { class: "blank" }, h("h2", {}, "No turn yet"),
      h("p", { class: "dim" }, "What an agent changes is listed here, turn by turn, and can be undone.")));
    for (const [id, turn] of turns) {
      if (events.some((event) => event.id === id)) continue;
      turn.element.remove();
      turns.delete(id);
    }
    events.toReversed().forEach((event, index) => {
      if (!turns.has(event.id)) turns.set(event.id, new Turn(screen, event.id));
      const turn = turns.get(event.id);
      drawn(() => turn.update(event, events), (why) => turn.report.replaceChildren(why));
      putAt(list, index, turn.element);
    });
    const first = turns.get(wanted) ?? (wanted === undefined && turns.get(events.at(-1)?.id));
    if (first) {
      first.toggle(true);
      if (wanted) first.element.scrollIntoView({ block: "start" });
      wanted = null;
    }
  }

  async function load() {
    try {
      const data = await api.changes(name);
      if (!gone) draw(data);
    } catch (error) {
      if (!gone) redraw(top, problem(error));
    }
  }

  const state = () => {
    const row = store.find(name);
    return row && `${row.jobs} ${row.terminals} ${row.last?.id} ${row.last?.state}`;
  };
  let known = state();
  const changed = () => { // a turn has begun or ended
    const now = state();
    if (now === known || document.hidden) return;
    const first = known === undefined;
    known = now;
    if (!first) load();
  };
  store.addEventListener("change", changed);
  redraw(top, h("p", { class: "dim" }, "Loading…"));
  load();
  return { changed: (session) => (context.session = session), unmount() {
    gone = true;
    copies.end();
    store.removeEventListener("change", changed);
  } };
}
