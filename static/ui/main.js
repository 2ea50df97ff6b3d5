// The frame: the list of sessions beside the session at hand, whose screen the address names (#/s/<session>/<screen>).

import { api, link } from "./api.js";
import { $, busy, confirmed, h, problem, redraw, say, toast } from "./dom.js";
import { canBePrompted, count, inUse, tailOf, usageText } from "./format.js";
import { icon } from "./icons.js";
import { networkText } from "./network.js";
import { setTitle, startNews } from "./news.js";
import { mountForm, mountList } from "./sessions.js";
import { agentName, agentsKnown, refresh, startPolling, store } from "./store.js";

const SCREENS = {
  agent: ["Agent", () => import("./agent.js")],
  changes: ["Changes", () => import("./changes.js")],
  command: ["Command", () => import("./command.js")],
  terminal: ["Terminal", () => import("./terminal.js")],
  network: ["Network", () => import("./decisions.js")],
  settings: ["Settings", () => import("./settings.js")],
  // Where keys are hidden. It comes late, and moves no other.
  usage: ["Usage", () => import("./usage.js")],
};

const main = $("#main");
let leave = () => {}; // undoes the view at hand
let frame = {}; // what stands around the screens of the session at hand

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

/** What the address asks for: { view, name, screen, turn }. */
function place() {
  const [view, name, screen, turn] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  const known = Object.hasOwn(SCREENS, screen);
  if (view === "s" && name) return { view, name, screen: known ? screen : "agent", turn };
  return { view: Object.hasOwn(PAGES, view) ? view : "" };
}

export const addressOf = (name, screen = "agent") => `#/s/${encodeURIComponent(name)}/${screen}`;

const PAGES = { // beside those of a session
  "": ["sandbox", () => showHome()],
  new: ["New session — sandbox", () => showWith(agentsKnown(), () => mountForm(main, { // it has a choice for each
    created: (made) => (location.hash = addressOf(made.name)) }))],
  usage: ["Usage — sandbox", () => showWith(SCREENS.usage[1]().catch(SCREENS.usage[1]), ({ mountAll }) => mountAll(main))],
};

/** Mount a page when what it needs is there, unless another one is shown by then. */
async function showWith(needed, mount) {
  let gone = false;
  leave = () => (gone = true);
  const found = await needed;
  if (!gone) leave = mount(found);
}

async function show() {
  const { view, name, screen, turn } = place();
  leave();
  leave = () => {};
  document.body.dataset.view = view || "home";
  if (view === "s") return showSession(name, screen, turn);
  setTitle(PAGES[view][0]);
  await PAGES[view][1]();
}

function showHome() {
  const draw = () => {
    if (!store.sessions) {
      main.replaceChildren(h("div", { class: "empty choose" }, h("h1", {}, "Sessions"),
        store.error ? problem(store.error) : h("p", { class: "dim" }, "Loading…")));
      return;
    }
    const some = store.sessions.length > 0;
    main.replaceChildren(h("div", { class: some ? "empty choose" : "empty" },
      h("h1", {}, some ? "Choose a session" : "No session yet"),
      h("p", {}, some
        ? "Each session is a container in which an agent works. It goes on when you close this page."
        : "A session is a container in which an agent works on one of your directories, and on nothing else."),
      h("p", {}, h("a", { class: "button primary", href: "#/new" }, icon("plus"), "New session"))));
  };
  const some = () => `${Boolean(store.sessions)} ${store.sessions?.length > 0} ${store.error?.message}`;
  let drawn = some();
  const changed = () => drawn !== (drawn = some()) && draw();
  store.addEventListener("change", changed);
  leave = () => store.removeEventListener("change", changed);
  draw();
}

async function showSession(name, screen, turn) {
  setTitle(`${name} · ${SCREENS[screen][0]} — sandbox`);
  const view = { gone: false, detail: null, unmount: () => {} };
  const body = h("div", { class: "screen", "data-screen": screen }, h("p", { class: "dim pad" }, "Loading…"));
  if (frame.name !== name || !frame.body.isConnected) mountFrame(name, view);
  frame.view = view;
  frame.body.replaceWith(body);
  frame.body = body;
  Object.keys(SCREENS).forEach((key, index) =>
    (frame.tabs.children[index].ariaCurrent = key === screen ? "page" : null));

  const load = async () => {
    [view.detail] = await Promise.all([api.session(name), agentsKnown()]);
    if (!view.gone) drawHead(name, view.detail, view);
    return view.detail;
  };
  view.reload = async () => {
    await Promise.all([load(), refresh()]);
    view.screen?.changed?.(view.detail);
  };
  const changed = () => { // what others have changed
    const [row, detail] = [store.find(name), view.detail];
    if (!row || !detail) return;
    // There may have been no list yet when it was drawn.
    const drawn = view.network !== undefined && view.used === usedBy(name);
    if (!drawn) drawHead(name, detail, view);
    const same = row.state === detail.state && row.agentMode === canBePrompted(detail) && row.network === view.network;
    if (!same) view.reload().catch(() => {});
  };
  store.addEventListener("change", changed);
  leave = () => {
    view.gone = true;
    store.removeEventListener("change", changed);
    view.screen?.unmount?.();
  };
  try {
    const fetched = SCREENS[screen][1];
    const [module, detail] = await Promise.all([fetched().catch(fetched), load()]);
    if (view.gone) return;
    body.replaceChildren();
    view.screen = module.mount(body, { name, turn, session: detail, reload: view.reload });
  } catch (error) {
    if (!view.gone) body.replaceChildren(h("div", { class: "pad" }, problem(error)));
  }
}

/** What a person clicks is made once for a session: replaced amid a click, it would lose the click. */
function mountFrame(name, view) {
  const act = (label, symbol, action) => h("button", {
    class: "quiet", type: "button", "aria-label": `${label} ${name}`, hidden: true,
    onclick: (event) => busy(event.currentTarget, action),
  }, icon(symbol), h("span", { class: "label" }, label));
  frame = {
    name, title: h("h1"), facts: h("p", { class: "dim" }), body: h("div"),
    tabs: h("nav", { class: "tabs", "aria-label": "Modes" }, Object.entries(SCREENS).map(([key, [label]]) =>
      h("a", { href: addressOf(name, key) }, label))),
    stop: act("Stop", "stop", () => change(frame.view, name, "stop", "stopped")),
    start: act("Start", "play", () => change(frame.view, name, "start", "started")),
    remove: act("Remove", "trash", () => remove(name)),
  };
  main.replaceChildren(h("header", { class: "session-head" },
    h("a", { class: "button quiet back", href: "#/", "aria-label": "All sessions" }, icon("back")),
    h("div", { class: "who" }, frame.title, frame.facts),
    h("div", { class: "row acts" }, frame.stop, frame.start, frame.remove)), frame.tabs, frame.body);
  drawHead(name, null, view);
}

function usedBy(name) {
  const entry = store.usage.get(name);
  return entry && !entry.error ? usageText(entry) : "";
}

function drawHead(name, session, view) {
  const state = session?.state ?? store.find(name)?.state ?? "";
  const running = state === "running";
  const { keys } = session ?? store.find(name) ?? {};
  view.network = store.find(name)?.network;
  view.used = usedBy(name);
  const facts = session ? [
    session.agent ? agentName(session.agent) : "no agent", session.directory && tailOf(session.directory),
    session.runtime, session.network && session.network !== "open" ? networkText(session.network) : null,
  ].filter(Boolean) : [];
  redraw(frame.title, name, " ", state && h("span", { class: `state ${running ? "on" : "off"}` }, state));
  frame.facts.title = session?.directory ?? "";
  const cut = { class: "chip bad", href: addressOf(name, "network") };
  redraw(frame.facts, view.network === "cut" && [h("a", cut, "network cut"), " "],
    view.used && [h("a", { href: addressOf(name, "usage") }, view.used), " · "],
    facts.join(" · "), portLinks(session?.ports));
  Object.keys(SCREENS).forEach((key, index) =>
    (frame.tabs.children[index].hidden = key === "usage" && keys !== "hidden"));
  frame.stop.hidden = !session || !running;
  frame.start.hidden = !session || running;
  frame.remove.hidden = !session;
}

/** What a session publishes, as links under another name than this page's: cookies know no ports. */
function portLinks(ports = []) {
  const loopback = /^(127\..*|\[::1\]|(.*\.)?localhost)$/;
  return ports.map((port) => {
    const [, at, number] = /^(.*):(\d+):\d+(?:\/tcp)?$/.exec(port) ?? [];
    const address = { "0.0.0.0": "127.0.0.1", "[::]": "[::1]" }[at] ?? at;
    const names = loopback.test(address) ? [address, "localhost"] : [address];
    const name = names.find((other) => other !== location.hostname);
    const there = name && (loopback.test(location.hostname) || !loopback.test(name));
    const href = `http://${name}:${number}/`;
    const link = { class: "port", href, target: "_blank", rel: "noreferrer" };
    return [" · ", there ? h("a", link, `port ${number}`) : `port ${number ?? port}`];
  });
}

async function change(view, name, action, done) {
  if (action === "stop" && !(await mayStop(name))) return;
  await api.act(name, action);
  say(`${name} ${done}`);
  await view.reload();
}

function mayStop(name) {
  const row = store.find(name);
  const busyWith = [row?.jobs && count(row.jobs, "running job"), row?.terminals && count(row.terminals, "terminal")];
  const what = busyWith.filter(Boolean).join(" and ");
  return what ? confirmed(`Stop ${name}?`, `This ends ${what}. The container and its files stay.`, "Stop") : true;
}

async function remove(name) {
  const users = await api.users(name);
  const text = "The container goes, and with it the agent's conversation and this session's settings and history. "
    + "Your directory stays as it is." + inUse(users);
  if (!(await confirmed(`Remove ${name}?`, text, "Remove"))) return;
  try {
    await api.remove(name);
  } catch (error) {
    if (error.status !== 409) throw error;
    if (!(await confirmed(`Remove ${name} all the same?`, `${error.message}.`, "Remove"))) return;
    await api.remove(name, "?force=1");
  }
  toast(`${name} was removed`);
  await refresh();
  location.hash = "#/";
}

function showLink() {
  const banner = $("#banner");
  banner.hidden = link.up;
  banner.textContent = link.up ? "" : "The server does not answer. Trying again… What runs in your sessions goes on.";
  if (link.up) say("Connected again");
}

link.addEventListener("change", showLink);
window.addEventListener("hashchange", () => {
  show();
  main.focus({ preventScroll: true });
});
$("#skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
mountList($("#side"), { place });
startPolling();
startNews(() => place().name ?? "");
show();
