// Interactive Terminal: xterm.js on the session's terminals. The server keeps them and their last megabyte of output;
// this page says from which byte it wants to go on.

import { api, pause } from "./api.js";
import { $, busy, confirmed, h, problem, putAt, redraw, say, toast } from "./dom.js";
import { icon } from "./icons.js";
import { stoppedNotice } from "./jobs.js";
import { away, heard, note, notifyDesktop } from "./news.js";
import { agentName, refresh } from "./store.js";

const ACK_BYTES = 128 * 1024;
const ACK_MILLISECONDS = 200;
const INPUT_BYTES = 64 * 1024; // per frame
const SCROLLBACK_LINES = 10_000;
const LABEL_CHARS = 80;
const NEWS_CHARS = 300;
const NEWS_MILLISECONDS = 500; // a program's bells and notifications are told no more often
const dark = matchMedia("(prefers-color-scheme: dark)");

let libraries;

/** xterm.js, loaded when the first terminal is opened. */
async function load() {
  const style = h("link", { rel: "stylesheet", href: new URL("./vendor/xterm.css", import.meta.url).href });
  document.head.append(style);
  const [core, fit, search, links, unicode] = await Promise.all([
    import("./vendor/xterm.mjs"), import("./vendor/addon-fit.mjs"), import("./vendor/addon-search.mjs"),
    import("./vendor/addon-web-links.mjs"), import("./vendor/addon-unicode11.mjs"),
    new Promise((done, lost) => Object.assign(style, { onload: done, onerror: () => lost(new Error("xterm.css")) })),
  ]);
  return { ...core, ...fit, ...search, ...links, ...unicode };
}

const THEMES = {
  dark: { background: "#16181c", foreground: "#dfe2e7", cursor: "#dfe2e7", cursorAccent: "#16181c",
    selectionBackground: "#3f4a75", black: "#2a2d34", red: "#f47c7c", green: "#7fc98a", yellow: "#e3c078",
    blue: "#8aa8ff", magenta: "#d39bea", cyan: "#74c7cf", white: "#d5d8de", brightBlack: "#7d838f", brightRed: "#ff9d9d",
    brightGreen: "#a1e0aa", brightYellow: "#f2d798", brightBlue: "#b0c4ff", brightMagenta: "#e5bff5",
    brightCyan: "#9be0e6", brightWhite: "#ffffff" },
  light: { background: "#fdfdfc", foreground: "#22252a", cursor: "#22252a", cursorAccent: "#fdfdfc",
    selectionBackground: "#c3cdfb", black: "#22252a", red: "#b42323", green: "#1d7a35", yellow: "#8a6100",
    blue: "#2f4bc7", magenta: "#8b2fa8", cyan: "#0f7480", white: "#6c727c", brightBlack: "#6c727c", brightRed: "#cf3838",
    brightGreen: "#24913f", brightYellow: "#a27400", brightBlue: "#4762e0", brightMagenta: "#a344c2",
    brightCyan: "#168a97", brightWhite: "#3a3f47" },
};

// --- One terminal ---

class View {
  constructor(lib, session, { id = "", run = "shell", title = "" }, tell) {
    Object.assign(this, { session, id, run, title, tell });
    this.label = "";
    this.early = [];
    this.typing = "";
    this.position = 0; // sequence number of the next byte
    this.acked = 0;
    this.writer = true;
    this.fits = true; // whether the terminal has the size that this page has asked for
    this.replaying = false;
    this.over = null; // how it ended
    this.ctrl = false;
    this.holder = h("div", { class: "term" });
    this.screen = h("div", { class: "term-screen" });
    this.note = h("div", { class: "term-note", role: "status", hidden: true });
    this.holder.append(this.screen, this.note);
    this.term = new lib.Terminal({
      allowProposedApi: true, cursorBlink: true, scrollback: SCROLLBACK_LINES, theme: THEMES[dark.matches ? "dark" : "light"],
      fontFamily: 'ui-monospace, "Cascadia Mono", "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace',
      fontSize: matchMedia("(max-width: 700px)").matches ? 12 : 14, macOptionIsMeta: true, minimumContrastRatio: 4.5,
      screenReaderMode: localStorage.getItem("screenReader") === "1",
    });
    this.fitter = new lib.FitAddon();
    this.search = new lib.SearchAddon();
    this.term.loadAddon(this.fitter);
    this.term.loadAddon(this.search);
    this.term.loadAddon(new lib.WebLinksAddon((event, uri) => window.open(uri, "_blank", "noopener,noreferrer")));
    this.term.loadAddon(new lib.Unicode11Addon());
    this.term.unicode.activeVersion = "11";
    this.listen();
  }

  listen() {
    const { term } = this;
    term.onData((text) => this.typed(text));
    term.onBinary((text) => this.send(Uint8Array.from(text, (char) => char.charCodeAt(0))));
    term.onTitleChange((title) => {
      this.label = title.slice(0, LABEL_CHARS);
      this.tell("label", this);
    });
    term.onBell(() => this.news("The terminal rang its bell"));
    term.parser.registerOscHandler(9, (text) => {
      if (!/^\d+;/.test(text)) this.news(text); // 9;4;… is a progress bar
      return true;
    });
    term.parser.registerOscHandler(777, (text) => {
      const [, title, body] = /^notify;([^;]*);?([^]*)$/.exec(text) ?? [];
      if (title !== undefined) this.news(body || title, title);
      return true;
    });
    term.attachCustomKeyEventHandler((event) => this.shortcut(event));
    for (const kind of ["keydown", "paste", "beforeinput"]) {
      this.holder.addEventListener(kind, (event) => this.isTyping(event) && this.take(), true);
    }
    this.theme = () => (term.options.theme = THEMES[dark.matches ? "dark" : "light"]);
    dark.addEventListener("change", this.theme);
    this.sizes = new ResizeObserver(() => this.fit());
  }

  /** Tell a bell or a notification at once, and of those that come too fast after it the last. */
  news(text, title = "") {
    if (this.replaying) return;
    this.latest = [text.slice(0, NEWS_CHARS), title.slice(0, NEWS_CHARS)];
    const wait = (this.told ?? -Infinity) + NEWS_MILLISECONDS - performance.now();
    if (wait <= 0) this.tellNews();
    else this.newsTimer ??= setTimeout(() => this.tellNews(), wait);
  }

  tellNews() {
    clearTimeout(this.newsTimer);
    this.newsTimer = undefined;
    this.told = performance.now();
    this.tell("bell", this, ...this.latest);
  }

  isTyping({ key, ctrlKey, shiftKey }) {
    return !["Shift", "Control", "Alt", "Meta", "Tab"].includes(key) && !(ctrlKey && shiftKey);
  }

  /** Be the window that types; whoever types last has the size. */
  take() {
    if (this.writer || this.over || !this.greeted) return;
    this.control({ type: "take" });
    this.setRole(true, this.viewers);
  }

  /** Keys that are the page's; false keeps them from the program. */
  shortcut(event) {
    if (!(event.ctrlKey && event.shiftKey) || event.type !== "keydown") return !(event.ctrlKey && event.shiftKey && event.code === "KeyV");
    const action = { KeyC: "copy", KeyF: "search", KeyL: "leave", KeyV: "paste" }[event.code];
    if (!action) return true;
    if (action !== "paste") { // the browser pastes by itself
      event.preventDefault();
      this.tell(action, this);
    }
    return false;
  }

  show(root) {
    root.replaceChildren(this.holder);
    if (!this.term.element) {
      this.term.open(this.screen);
      this.term.textarea.setAttribute("aria-describedby", "term-hint");
      this.sizes.observe(this.holder);
      this.fit();
      this.connect();
    }
    this.fit();
    this.focus();
  }

  focus() {
    this.term.focus();
  }

  /** Ask for the size that fits; the server says which it is, and it may be another window's. */
  fit() {
    const size = this.holder.isConnected && this.holder.clientWidth && this.fitter.proposeDimensions();
    if (!size) return;
    this.wish = size;
    if (this.fits && this.writer) this.term.resize(size.cols, size.rows);
    this.control({ type: "resize", rows: size.rows, cols: size.cols });
  }

  setSize({ rows, cols }) {
    this.fits = rows === this.wish.rows && cols === this.wish.cols;
    this.term.resize(cols, rows);
    this.sayRole();
  }

  // --- The connection ---

  connect() {
    const { rows, cols } = this.wish ?? this.term;
    const query = new URLSearchParams({ rows, cols });
    if (this.id) query.set("id", this.id);
    else query.set("run", this.run);
    query.set("from", this.position);
    if (this.id && !this.writer) query.set("view", "1");
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(`${scheme}//${location.host}/api/sessions/${encodeURIComponent(this.session)}/terminal?${query}`);
    this.socket = socket;
    this.greeted = false;
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => (typeof data === "string" ? this.obey(JSON.parse(data)) : this.output(new Uint8Array(data)));
    socket.onclose = () => socket === this.socket && this.lost();
  }

  obey(message) {
    switch (message.type) {
      case "hello":
        this.greeted = true;
        this.id = message.id;
        this.run = message.run;
        this.say("");
        this.wish ??= this.term;
        this.setSize(message);
        this.fit(); // it may be another one since the connection was asked for
        if (!message.resumed || this.position === 0) this.restart(message.seq);
        this.replayEnd = message.end;
        this.replaying = message.end > this.position && this.position === message.start;
        this.early.splice(0).forEach((bytes) => this.socket.send(bytes));
        this.tell("open", this);
        break;
      case "role":
        this.setRole(message.writer, message.viewers);
        break;
      case "size":
        this.setSize(message);
        break;
      case "modes":
        this.term.write(message.data);
        break;
      case "reset":
        this.restart(message.seq);
        break;
      case "exit":
        this.ended(message.reason ? `This terminal has ended: ${message.reason}.`
          : message.status ? `The program has ended with status ${message.status}.`
          : message.status === 0 ? "The program has ended." : "The program has ended; its status is not known.");
    }
  }

  /** What was shown is not what comes next: begin with an empty screen. */
  restart(position) {
    this.term.reset();
    this.position = this.acked = position;
  }

  setRole(writer, viewers) {
    this.writer = writer;
    this.viewers = viewers;
    this.term.options.disableStdin = !writer; // nor does the emulator answer what another one answers
    this.sayRole();
  }

  sayRole() {
    if (!this.over) this.say(this.writer && this.fits ? "" : "Another window types here. Type to go on in this one.");
  }

  output(bytes) {
    this.position += bytes.length;
    const reached = this.position;
    this.term.write(bytes, () => {
      if (reached >= this.replayEnd) this.replaying = false;
      this.written = reached;
      clearTimeout(this.ackTimer);
      if (reached - this.acked >= ACK_BYTES) this.ack();
      else this.ackTimer = setTimeout(() => this.ack(), ACK_MILLISECONDS);
    });
  }

  ack() {
    if (this.written > this.acked && this.written <= this.position) {
      this.acked = this.written;
      this.control({ type: "ack", seq: this.acked });
    }
  }

  control(message) {
    if (this.greeted && this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  /** The connection is gone and the program may not be: come back, unless the server knows nothing of it any more. */
  async lost() {
    if (this.over || this.gone) return;
    const greeted = this.greeted;
    this.greeted = false;
    this.say("The connection was lost. Trying again…");
    for (let wait = greeted ? 100 : 1000; !this.gone; wait = Math.min(wait * 2, 4000)) {
      await pause(wait);
      try {
        const rows = await api.terminals(this.session);
        if (this.gone) return;
        if (this.id && rows.some((row) => row.id === this.id)) return this.connect();
        return this.ended(this.id ? "This terminal has ended." : "The terminal could not be opened.");
      } catch (error) {
        if (error.code !== "offline") return this.ended(error.message);
      }
    }
  }

  ended(text) {
    this.over = text;
    this.term.options.disableStdin = true;
    this.term.options.cursorBlink = false;
    this.say(text, h("button", { type: "button", class: "small", onclick: () => this.tell("again", this) }, "Open a new one"));
    this.tell("ended", this);
  }

  say(text, ...more) {
    this.note.hidden = !text;
    this.note.replaceChildren(h("span", {}, text), ...more);
  }

  // --- Input ---

  typed(text) {
    if (this.replaying) return; // answers of the emulator to questions that were answered long ago
    if (this.ctrl && text.length === 1) {
      const code = text.toUpperCase().charCodeAt(0);
      if (code >= 63 && code < 96) text = String.fromCharCode(code === 63 ? 127 : code & 31);
      else if (text === " ") text = "\0";
      this.ctrl = false;
      this.tell("ctrl", this);
    }
    // The answers to many questions of a program go together.
    if (!this.typing) queueMicrotask(() => this.sendTyped());
    this.typing += text;
  }

  sendTyped() {
    const text = this.typing;
    this.typing = "";
    this.send(new TextEncoder().encode(text));
  }

  send(bytes) {
    if (!this.greeted && !this.id) this.early.push(bytes); // typed before the terminal was there
    if (!this.greeted || !this.writer || this.socket.readyState !== WebSocket.OPEN) return;
    for (let at = 0; at < bytes.length; at += INPUT_BYTES) this.socket.send(bytes.subarray(at, at + INPUT_BYTES));
  }

  /** A key of the bar below the terminal. */
  key(name) {
    this.take();
    const arrow = { Up: "A", Down: "B", Right: "C", Left: "D" }[name];
    if (arrow) {
      const lead = this.ctrl ? "\x1b[1;5" : this.term.modes.applicationCursorKeysMode ? "\x1bO" : "\x1b[";
      this.ctrl = false;
      this.tell("ctrl", this);
      this.send(new TextEncoder().encode(lead + arrow));
    } else {
      this.typed({ Esc: "\x1b", Tab: "\t" }[name] ?? name);
    }
    this.term.scrollToBottom();
  }

  close() {
    this.gone = true;
    heard.delete(this.id);
    clearTimeout(this.ackTimer);
    clearTimeout(this.newsTimer);
    this.sizes.disconnect();
    dark.removeEventListener("change", this.theme);
    this.socket?.close();
    this.term.dispose();
  }
}

// --- The screen ---

const KEYS = ["Esc", "Tab", "Ctrl", "Left", "Up", "Down", "Right", "|", "/", "-", "~"];
const SIGNS = { Left: "←", Up: "↑", Down: "↓", Right: "→" };

export function mount(root, context) {
  const { name } = context;
  const views = [];
  let current = null;
  let gone = false;
  let starting = null;
  let drawing;

  const notice = h("div", {});
  const tabs = h("div", {
    class: "term-tabs", role: "tablist", "aria-label": "Terminals", hidden: true });
  const place = h("div", { class: "term-place", id: "term-place", role: "tabpanel" });
  const tool = (symbol, label, action, extra = {}) => h("button", { class: "quiet small", type: "button", title: label, "aria-label": label,
    onclick: action, ...extra }, icon(symbol));
  const find = h("input", { type: "search", placeholder: "Find", "aria-label": "Find in the terminal" });
  const found = h("span", { class: "hint", role: "status" });
  const findBar = h("form", { class: "term-find", hidden: true }, find, found,
    h("button", { class: "small", type: "submit" }, "Next"),
    h("button", { class: "quiet small", type: "button", onclick: () => search(true) }, "Previous"),
    tool("close", "Close the search", () => toggleFind(false)));
  const reader = h("button", { class: "quiet small", type: "button", "aria-pressed": String(localStorage.getItem("screenReader") === "1"),
    title: "Screen reader mode", "aria-label": "Screen reader mode", onclick: () => setReader() }, icon("eye"));
  const closing = tool("close", "", () => shut(current), { hidden: true });
  const bar = h("div", { class: "term-bar" }, tabs, closing,
    h("div", { class: "row term-tools" },
      h("button", { class: "quiet small", type: "button", onclick: (e) => busy(e.currentTarget, () => open({})) }, icon("plus"), "Shell"),
      context.session.agent && h("button", { class: "quiet small", type: "button",
        onclick: (e) => busy(e.currentTarget, () => open({ run: "agent" })) }, icon("plus"), agentName(context.session.agent)),
      tool("copy", "Copy the selection (Ctrl+Shift+C)", () => copy()),
      tool("paste", "Paste (Ctrl+Shift+V)", () => paste()),
      tool("search", "Find (Ctrl+Shift+F)", () => toggleFind(true)), reader));
  const keys = h("div", { class: "term-keys", role: "toolbar", "aria-label": "Terminal keys" }, KEYS.map((key) =>
    h("button", { type: "button", "data-key": key, "aria-label": SIGNS[key] ? `Arrow ${key.toLowerCase()}` : null,
      "aria-pressed": key === "Ctrl" ? "false" : null, onpointerdown: (event) => event.preventDefault(),
      onclick: () => press(key) }, SIGNS[key] ?? key)));
  root.append(notice, bar, findBar, place,
    h("p", { class: "unseen", id: "term-hint" }, "Control Shift L leaves the terminal."), keys);

  const tell = (what, view, text, title) => {
    if (what === "open") refresh();
    if (what === "open") heard.add(view.id);
    if (what === "ended") refresh();
    if (what === "bell") ring(view, text, title);
    if (what === "copy") copy();
    if (what === "search") toggleFind(true);
    if (what === "leave") $("[aria-selected=true]", tabs)?.focus();
    if (what === "ctrl") $('[data-key="Ctrl"]', keys).setAttribute("aria-pressed", String(view.ctrl));
    if (what === "again") open({ run: view.run || "shell" }, view);
    drawing ??= requestAnimationFrame(drawTabs); // once, however often a program names its terminal
  };

  const labelOf = (view, index) => view.label || { agent: agentName(context.session.agent), shell: `Shell ${index + 1}` }[view.run]
    || view.title.slice(0, LABEL_CHARS);

  function drawTabs() {
    cancelAnimationFrame(drawing);
    drawing = undefined;
    if (gone) return;
    const focused = [...tabs.children].indexOf(document.activeElement);
    for (const tab of [...tabs.children]) views.some((view) => view.tab === tab) || tab.remove();
    views.forEach((view, index) => { // a click is lost when what is clicked is replaced before it ends
      view.tab ??= h("button", { type: "button", role: "tab", "aria-controls": "term-place",
        onclick: () => select(view), onkeydown: (event) => moveTab(event, views.indexOf(view)) });
      view.tab.className = `term-tab ${view.over ? "over" : ""}`;
      view.tab.ariaSelected = String(view === current);
      view.tab.tabIndex = view === current ? 0 : -1;
      redraw(view.tab, view.rang ? "● " : "", labelOf(view, index));
      putAt(tabs, index, view.tab);
    });
    tabs.hidden = closing.hidden = !current;
    const label = current ? `Close ${labelOf(current, views.indexOf(current))}` : "";
    closing.ariaLabel = closing.title = label;
    if (focused >= 0 && !tabs.contains(document.activeElement)) tabs.children[Math.min(focused, views.length - 1)]?.focus();
  }

  function moveTab(event, index) {
    if (event.key === "Delete") shut(views[index]);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    select(views[(index + step + views.length) % views.length], true);
    $("[aria-selected=true]", tabs).focus();
  }

  function select(view, quietly) {
    current = view;
    view.rang = false;
    drawTabs();
    view.show(place);
    if (quietly) $("[aria-selected=true]", tabs).focus();
  }

  async function open(what, instead) {
    libraries ??= load().catch(load).catch((error) => {
      libraries = null;
      throw new Error(`the terminal's libraries are missing: ${error.message}`);
    });
    const lib = await libraries;
    if (gone) return;
    const view = new View(lib, name, what, tell);
    if (instead) {
      views[views.indexOf(instead)] = view;
      instead.close();
    } else views.push(view);
    select(view);
  }

  async function shut(view) {
    const what = labelOf(view, views.indexOf(view));
    if (view.run !== "shell" && !view.over && !(await confirmed(`Close ${what}?`, "This ends it, here and wherever else it is open.", "Close"))) return;
    views.splice(views.indexOf(view), 1);
    view.close();
    if (view.id && !view.over) api.closeTerminal(name, view.id).catch(() => {}).then(refresh);
    say("Terminal closed");
    if (view === current) {
      current = views.at(-1) ?? null;
      if (current) select(current);
      else place.replaceChildren(h("p", { class: "dim blank" }, "No terminal is open."));
    }
    drawTabs();
  }

  function press(key) {
    if (!current) return;
    if (key === "Ctrl") {
      current.ctrl = !current.ctrl;
      tell("ctrl", current);
    } else current.key(key);
    current.focus();
  }

  async function copy() {
    const text = current?.term.getSelection();
    if (!text) return toast("Nothing is selected");
    try {
      await navigator.clipboard.writeText(text);
      toast("Copied");
    } catch {
      toast("The browser does not let this page copy", "error");
    }
    current.focus();
  }

  async function paste() {
    try {
      current?.term.paste(await navigator.clipboard.readText());
    } catch {
      toast("The browser does not let this page paste; press Ctrl+Shift+V", "error");
    }
    current?.focus();
  }

  function search(back) {
    if (!current || !find.value) return;
    const options = { decorations: { matchBackground: "#8a6100", activeMatchBackground: "#c8321e", matchOverviewRuler: "#8a6100", activeMatchColorOverviewRuler: "#c8321e" } };
    const hit = back ? current.search.findPrevious(find.value, options) : current.search.findNext(find.value, options);
    found.textContent = hit ? "" : "not found";
  }
  findBar.addEventListener("submit", (event) => {
    event.preventDefault();
    search(false);
  });
  findBar.addEventListener("keydown", (event) => event.key === "Escape" && toggleFind(false));

  function toggleFind(on) {
    findBar.hidden = !on;
    if (on) find.select();
    else {
      current?.search.clearDecorations();
      current?.focus();
    }
  }

  function setReader() {
    const on = reader.getAttribute("aria-pressed") !== "true";
    reader.setAttribute("aria-pressed", String(on));
    localStorage.setItem("screenReader", on ? "1" : "0");
    for (const view of views) view.term.options.screenReaderMode = on;
    say(`Screen reader mode is ${on ? "on" : "off"}`);
  }

  function ring(view, text, title) {
    if (away()) {
      note(name);
      notifyDesktop(title && title !== text ? `${name}: ${title}` : name, text, `${name}/${view.id}`,
        () => gone || select(view));
    }
    if (away() || view !== current) {
      view.rang = true;
      view.toast?.remove();
      view.toast = toast(`${name}: ${text}`);
    }
  }

  const changed = (session) => {
    context.session = session;
    const running = session.state === "running";
    redraw(notice, !running && stoppedNotice(context));
    bar.inert = !running;
    if (running && !views.length) starting ??= start().finally(() => (starting = null));
  };

  async function start() {
    try {
      const rows = await api.terminals(name);
      for (const row of rows.sort((a, b) => b.ended - a.ended)) await open(row); // an end that nobody has seen first
      if (!rows.some((row) => !row.ended) && !gone) await open({});
    } catch (error) {
      if (!gone) place.replaceChildren(h("div", { class: "pad" }, problem(error)));
    }
  }
  changed(context.session);

  return {
    changed,
    unmount() {
      gone = true;
      views.forEach((view) => view.close());
    },
  };
}
