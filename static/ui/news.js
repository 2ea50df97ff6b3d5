// What a person comes back for, of all sessions: told by the page's title and icon, and by the desktop where that was
// permitted, as long as nobody looks at the session.

import { api, pause } from "./api.js";
import { $, h, say, toast } from "./dom.js";
import { named } from "./format.js";
import { icon } from "./icons.js";
import { store } from "./store.js";

const PERIOD = 2000;
const HIDDEN_PERIOD = 5000; // browsers make it a minute where a page is hidden for long
const WORDS = { turn: "the turn has ended", waits: "it waits for you", refused: "the network was refused",
  error: "it has failed", end: "the agent has ended" };
const BAD = ["refused", "error"];

/** The sessions that something has happened in since somebody looked: whether it is bad. Told by "change". */
export const unseen = Object.assign(new EventTarget(), { sessions: new Map() });
export const heard = new Set(); // terminals that the page shows: it hears them itself
let shown = () => null; // the name of the session that is looked at, or null for all of them
let title = { text: document.title, count: null };

export const away = () => document.hidden || !document.hasFocus();

/** Name the page; `count` is shown before it instead of the number of sessions with news. */
export function setTitle(text, count = null) {
  title = { text, count };
  draw();
}

function draw() {
  if (store.sessions) for (const name of unseen.sessions.keys()) store.find(name) || unseen.sessions.delete(name);
  const number = title.count ?? unseen.sessions.size;
  document.title = (number ? `(${number}) ` : "") + title.text;
  const tone = unseen.sessions.size ? ([...unseen.sessions.values()].includes(true) ? "-bad" : "-good") : "";
  const link = $("link[rel=icon]");
  const href = link.href.replace(/icon[^/]*[.]svg$/, `icon${tone}.svg`);
  if (link.href !== href) link.href = href;
  unseen.dispatchEvent(new Event("change"));
}

/** Note that something has happened in a session. */
export function note(session, bad = false) {
  unseen.sessions.set(session, bad || unseen.sessions.get(session) === true);
  draw();
}

function look() {
  if (away() || !unseen.sessions.size) return;
  if (shown() === null) unseen.sessions.clear();
  else unseen.sessions.delete(shown());
  draw();
}

/** Tell the desktop, where that was permitted. */
export function notifyDesktop(heading, body, tag, open) {
  if (!("Notification" in window) || Notification.permission !== "granted") return;
  const notification = new Notification(heading, { body, tag });
  notification.onclick = () => {
    window.focus();
    open();
  };
}

/** The button that asks for permission, which goes once there is one. */
export function notifyButton() {
  const label = "Notify me when an agent waits, ends or fails";
  const button = h("button", { class: "quiet small", type: "button", title: label, "aria-label": label, onclick: async () => {
    const answer = await Notification.requestPermission();
    toast(answer === "granted" ? "You will be notified when you are elsewhere"
      : "The browser does not allow notifications");
    update();
  } }, icon("bell"));
  const update = () => (button.hidden = !("Notification" in window) || Notification.permission === "granted");
  update();
  return button;
}

function take({ session, what, text, turn }) {
  if ((what === "waits" && heard.has(turn)) || (!away() && [null, session].includes(shown()))) return;
  note(session, BAD.includes(what));
  const words = `${session}: ${named(WORDS, what)}`;
  if (away()) notifyDesktop(words, text, `${session}/${turn}`, () => location.assign(`/#/s/${encodeURIComponent(session)}`));
  else say(words);
}

/** Ask for news from now on; `session()` is the name of the session that is looked at, null for all. */
export async function startNews(session = () => null) {
  shown = session;
  for (const [target, event] of [[window, "focus"], [window, "hashchange"], [document, "visibilitychange"]]) {
    target.addEventListener(event, look);
  }
  store.addEventListener("change", () => unseen.sessions.size && draw());
  for (let after = -1; ; await pause(document.hidden ? HIDDEN_PERIOD : PERIOD)) {
    try {
      const { number, news } = await api.news(Math.max(after, 0));
      if (after >= 0) news.forEach(take);
      after = Math.max(after, number);
    } catch { /* the list of sessions says what is wrong */ }
  }
}
