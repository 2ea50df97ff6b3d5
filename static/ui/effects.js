// What undo, redo and merge change: said before and after, with names that an agent has chosen.

import { api } from "./api.js";
import { busy, confirmed, h, say, toast } from "./dom.js";
import { count, named, tailOf } from "./format.js";

const SHOWN_PATHS = 50; // of an answer, or a question
const MARKS = 40; // elements of a line; with more of them the rest is text

const STATUS = { added: "new", deleted: "deleted", modified: "changed", mode: "mode", type: "other kind" };
const TONES = { added: "good", deleted: "bad" };
export const KINDS = { undo: "Undone", redo: "Done again", merge: "Merged" };
const VERBS = { undo: "Undo", redo: "Redo", merge: "Merge" };

// --- Text that an agent has written ---

// What a page would obey or not show: controls, marks of direction, what has no width, halves of
// characters. Tabs stay, and what makes an emoji of a sign.
const HIDDEN = /(?:(?![\t\ufe0f])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}])+/gu;

/** As programmers write them; a half of a character is a byte that was no UTF-8. */
const escaped = (run) => Array.from(run, (char) => {
  const code = char.codePointAt(0);
  const byte = code >= 0xdc80 && code <= 0xdcff ? code - 0xdc00 : code;
  const hex = byte.toString(16);
  if (byte < 0x80 || byte !== code) return `\\x${hex.padStart(2, "0")}`;
  return code > 0xffff ? `\\u{${hex}}` : `\\u${hex.padStart(4, "0")}`;
}).join("");

/** Text as children of an element, with a mark for each run of characters that could not be seen. */
export function visible(text) {
  const parts = [];
  let at = 0;
  for (const { 0: run, index } of text.matchAll(HIDDEN)) {
    if (parts.length >= 2 * MARKS) break;
    parts.push(text.slice(at, index), h("mark", {}, escaped(run)));
    at = index + run.length;
  }
  return [...parts, text.slice(at).replace(HIDDEN, escaped)];
}

export const escapedPath = (path) => path.replace(HIDDEN, escaped);
export const pathOf = (text, props) => h("span", { class: "path mono", ...props }, visible(text));

export const statusOf = ({ status = "" }) =>
  h("span", { class: `chip ${Object.hasOwn(TONES, status) ? TONES[status] : ""}` }, named(STATUS, status));

export const riskOf = (reasons = []) => reasons.length > 0 && h("p", { class: "risk" },
  h("strong", {}, "Look at it: "), visible(reasons.join("; ")));

// --- Undo, redo and merge ---

const pathList = (rows, draw) => h("ul", { class: "paths", tabindex: rows.length > 5 ? "0" : null },
  rows.slice(0, SHOWN_PATHS).map((row) => h("li", {}, draw(row))),
  rows.length > SHOWN_PATHS && h("li", {}, `and ${rows.length - SHOWN_PATHS} more`));

/** What an undo, redo or merge changes, or has changed, and what it leaves as it is. */
function effect({ changed = [], left = [], commits }, verb, words) {
  return h("div", { class: "effect" },
    changed.length > 0 && [h("p", {}, `${words} ${count(changed.length, "path")}:`),
      pathList(changed, (row) => [statusOf(row), " ", pathOf(row.path), verb !== "undo" && riskOf(row.risk)])],
    left.length > 0 && [h("p", {}, h("strong", {}, `Left as before: ${count(left.length, "path")}`)),
      pathList(left, ({ path, why }) => [pathOf(path), " — ", ...visible(why ?? "")])],
    commits?.count > 0 && h("p", {}, `${count(commits.count, "commit")} as the branch ${commits.branch}`),
    commits?.problem && h("p", { class: "bad-text" }, visible(commits.problem)));
}

/** Say what would change, ask, do it, and show what has changed; whether it was done. */
export async function carryOut({ button, name, directory, verb, what, where, title }) {
  let is = false;
  await busy(button, async () => {
    const dry = await api.change(name, verb, { ...what, dry: true });
    if (!dry.changed?.length && !dry.commits?.count) {
      where.replaceChildren(h("p", {}, "Nothing would change."), effect(dry, verb));
      return;
    }
    const words = `In ${tailOf(directory)} this changes`;
    if (!(await confirmed(`${VERBS[verb]} ${title.slice(0, 100)}?`, effect(dry, verb, words), VERBS[verb]))) return;
    const done = await api.change(name, verb, what);
    is = true;
    where.replaceChildren(effect(done, verb, `${KINDS[verb]}:`));
    say(`${KINDS[verb]}: ${count(done.changed?.length ?? 0, "path")}`);
    if (done.left?.length) toast(`Left as before: ${count(done.left.length, "path")}`);
  });
  return is;
}
