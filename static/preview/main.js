// Mission control: every session as a tile with what its agent does now, its state, and a box to answer it.
// The modules of the main UI do the talking with the service; they lie beside this one, under /ui/.

const ui = import.meta.url.replace("/preview/", "/ui/").replace(/[^/]*$/, "");
const [{ api, link }, { $, drawn, h, pointed, putAt, say, toast },
  { ago, changesAddress, changesText, lasted, tailOf, usageText, working },
  { agentName, refresh, startPolling, store }, { AgentStream }, { plain }, { setTitle, startNews }] =
  await Promise.all(["api.js", "dom.js", "format.js", "store.js", "events.js", "markdown.js", "news.js"]
    .map((name) => import(ui + name).catch(() => import(ui + name))));

const TAIL_BYTES = 16384; // an event of a few letters may take 300
const SHOWN_LINES = 40;
const LINE_CHARS = 400;
const STATES = { working: "Working", waiting: "Waiting for you", failed: "Failed", idle: "Idle" };
const NEEDY = ["failed", "waiting"];
const SEEN = "preview-seen"; // the jobs whose end was acknowledged, by session

const seen = new Map(Object.entries(JSON.parse(localStorage.getItem(SEEN) ?? "{}")));
let shown = ""; // the state that is shown alone, or ""
const tiles = new Map();
const root = $("#tiles");
const busyGrid = h("div", { class: "grid" });
const restGrid = h("div", { class: "grid rest" });
const rest = h("section", { hidden: true }, h("h2", {}, "Not at work"), restGrid);

function acknowledge(row) {
  if (!row.last) return;
  seen.set(row.name, row.last.id);
  for (const name of seen.keys()) if (!store.find(name)) seen.delete(name);
  localStorage.setItem(SEEN, JSON.stringify(Object.fromEntries(seen)));
}

/** What an agent does: working, waiting for an answer, failed, or idle (also when its end was acknowledged). */
function stateOf(row) {
  const { last } = row;
  if (working(row)) return "working";
  if (row.state !== "running" || !last || last.kind === "autostart" || last.state === "cancelled") return "idle";
  if (seen.get(row.name) === last.id) return "idle";
  if (last.state === "lost" || last.exit !== 0) return "failed";
  return last.kind === "prompt" ? "waiting" : "idle";
}

/** The end of a job's output as lines { kind, text }: an agent's events as what they mean, other output as it is. */
function linesOf(job) {
  if (!job) return [];
  const blocks = [];
  const stream = new AgentStream((block, isNew) => isNew && blocks.push(block),
    job.size > TAIL_BYTES, store.agents.get(job.agent)?.events);
  stream.feed("stdout", job.tail ?? "");
  if (job.state !== "running") stream.end();
  // All of it may be one line, of which the beginning is missing.
  if (!blocks.length && !stream.known) blocks.push({ kind: "raw", text: job.tail ?? "" });
  const lines = blocks.flatMap(blockLines).slice(-SHOWN_LINES);
  for (const line of lines) {
    if (stream.known && line.text.startsWith("{")) line.kind += " unread"; // takes one line
  }
  return lines.some(({ text }) => text.trim()) ? lines : [];
}

function blockLines(block) {
  switch (block.kind) {
    case "tool":
      return [{ kind: `tool ${block.status}`, text: `${block.name} ${block.title}`.trim() }];
    case "text":
      return plain(shortLines(block.text)).map((text) => ({ kind: "text", text }));
    case "raw":
      return shortLines(block.text).map((text) => ({ kind: "raw",
        text: text.replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "") }));
    case "note":
      return block.tone === "bad" ? [{ kind: "bad", text: block.text }] : [];
  }
  return [];
}

const shortLines = (text) => text.split("\n").map((line) => line.slice(0, LINE_CHARS));

// --- Tiles ---

class Tile {
  constructor(name) {
    this.name = name;
    const id = `tile-${Math.random().toString(36).slice(2, 9)}`;
    this.state = h("span", { class: "state" });
    this.cut = h("a", { class: "cut", href: `/#/s/${encodeURIComponent(name)}/network`, hidden: true }, "Network cut");
    this.about = h("p", { class: "about" });
    this.changes = h("a", { class: "changes", hidden: true });
    const usage = `/#/s/${encodeURIComponent(name)}/usage`;
    this.used = h("a", { class: "used", href: usage, hidden: true });
    this.asked = h("p", { class: "asked" });
    this.tail = h("div", { class: "tail", tabindex: "0", role: "log", "aria-live": "off", "aria-label": `What ${name} does` });
    this.box = h("textarea", { rows: "1", "aria-label": `Prompt for ${name}`, enterkeyhint: "send" });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", onclick: () => this.cancel() }, "Stop");
    this.done = h("button", { type: "button", title: "Nothing to answer: show it as idle", onclick: () => {
      acknowledge(store.find(this.name));
      draw();
      this.box.focus();
    } }, "Dismiss");
    this.start = h("button", { type: "button", onclick: () => this.act("start") }, "Start");
    this.setUp = h("p", { class: "set-up" }, "It cannot be prompted: it has no agent prompt command. ",
      h("a", { href: `/#/s/${encodeURIComponent(name)}/settings`, "aria-label": `Set one for ${name}` }, "Set one"));
    // Where Stop was there is the box when the turn has ended: a late press on it does nothing else.
    this.form = h("form", {}, this.setUp, this.stop, this.box, this.send, this.done, this.start);
    this.element = h("article", { class: "tile", "aria-labelledby": id },
      h("header", {}, h("h2", { id }, h("a", { href: `/#/s/${encodeURIComponent(name)}/agent` }, name)), this.cut, this.state),
      this.about, this.asked, h("p", { class: "facts" }, this.changes, this.used), this.tail,
      this.form);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.prompt();
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.form.requestSubmit();
      }
      if (event.key === "Escape") this.box.blur();
    });
    this.box.addEventListener("input", () => this.grow());
  }

  grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight + 2, 140)}px`;
  }

  async prompt() {
    const text = this.box.value;
    if (!text.trim() || this.send.disabled) return;
    this.send.disabled = true;
    try {
      await api.prompt(this.name, text);
      this.box.value = "";
      this.grow();
      say(`Sent to ${this.name}`);
      await refresh();
    } catch (error) {
      toast(`${this.name}: ${[error.message, error.hint].filter(Boolean).join(" — ")}`, "error");
    } finally {
      this.send.disabled = false;
    }
  }

  async cancel() {
    const { last } = store.find(this.name);
    try {
      await api.cancel(this.name, last.id);
      await refresh();
    } catch (error) {
      toast(`${this.name}: ${error.message}`, "error");
    }
  }

  async act(action) {
    try {
      await api.act(this.name, action);
      await refresh();
    } catch (error) {
      toast(`${this.name}: ${error.message}`, "error");
    }
  }

  update(row, held) {
    const state = stateOf(row);
    const { last } = row;
    const running = row.state === "running";
    this.element.dataset.state = state;
    put(this.state, STATES[state]);
    put(this.about, [row.agent ? agentName(row.agent) : "no agent", row.directory && tailOf(row.directory),
      row.network === "allow" && "allowlist",
      !running ? row.state : last?.state === "running" ? lasted(last) : last ? ago(last.ended ?? last.started) : null]
      .filter(Boolean).join(" · "));
    this.about.title = row.directory;
    this.cut.hidden = row.network !== "cut";
    put(this.asked, last ? (last.prompt ?? `$ ${last.command}`) : "");
    this.asked.title = this.asked.textContent;
    const text = changesText(last?.changes);
    this.changes.hidden = !text;
    this.changes.classList.toggle("bad", last?.changes?.risky > 0);
    if (text) this.changes.href = changesAddress(this.name, last.changes.turn);
    put(this.changes, text);
    const used = store.usage.get(row.name);
    this.used.hidden = !used;
    const spent = used?.left && Object.values(used.left).includes(0);
    this.used.classList.toggle("bad", Boolean(used?.error || spent));
    put(this.used, used ? used.error || usageText(used) + (spent ? ": the budget is spent" : "") : "");
    drawn(() => this.drawTail(row), (why) => this.undrawn(row, why));
    this.box.placeholder = state === "waiting" ? "Answer…" : running ? "Prompt…" : `${row.state}`;
    this.setUp.hidden = row.agentMode || !running;
    this.box.hidden = running && !row.agentMode;
    this.box.disabled = !running;
    this.send.hidden = !running || !row.agentMode || state === "working";
    this.stop.hidden = last?.state !== "running";
    this.done.hidden = !NEEDY.includes(state);
    this.start.hidden = running;
    if (!held) this.element.hidden = Boolean(shown) && shown !== state;
    return state;
  }

  drawTail(row) {
    const { last } = row;
    const key = last ? `${last.id} ${last.size} ${last.state}` : "";
    if (key === this.drawn) return;
    this.drawn = key;
    const lines = linesOf(last);
    if (last?.error) lines.push({ kind: "bad", text: last.error });
    else if (last && last.state !== "running" && last.exit) lines.push({ kind: "bad", text: `ended with status ${last.exit}` });
    const atEnd = this.tail.scrollHeight - this.tail.scrollTop - this.tail.clientHeight < 30;
    this.tail.replaceChildren(...(lines.length ? lines.map(({ kind, text }) => h("p", { class: kind }, text))
      : [h("p", { class: "nothing" }, !last ? "not prompted yet"
        : last.state !== "running" ? "no output" : last.size ? "at work…" : "nothing yet")]));
    if (atEnd) this.tail.scrollTop = this.tail.scrollHeight;
  }

  /** Show why the tile could not be drawn, and the end of the output as it came. */
  undrawn(row, why) {
    this.tail.replaceChildren(h("p", { class: "bad undrawn" }, why),
      h("p", { class: "raw" }, (row.last?.tail ?? "").slice(-LINE_CHARS)));
    return "failed";
  }
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- The page ---

let before = new Map();

/** Draw what there is; where that was not asked for on this page, no tile moves under the mouse. */
function draw(event) {
  const { sessions, error } = store;
  if (!sessions) {
    root.replaceChildren(h("p", { class: "empty" }, error ? error.message : "Loading…"));
    return;
  }
  if (!busyGrid.isConnected) root.replaceChildren(busyGrid, rest);
  $(".empty", busyGrid)?.remove();
  const held = Boolean(event) && pointed(root);
  for (const [name, { element }] of tiles) {
    element.inert = !sessions.some((row) => row.name === name);
    if (!element.inert || held) continue;
    element.remove();
    tiles.delete(name);
  }
  const states = new Map();
  const placed = new Map([[busyGrid, 0], [restGrid, 0]]);
  for (const row of sessions) {
    if (!tiles.has(row.name)) tiles.set(row.name, new Tile(row.name));
    const tile = tiles.get(row.name);
    const works = Boolean(row.last && row.state === "running");
    if (held) {
      if (!tile.element.parentNode) restGrid.append(tile.element);
    } else {
      tile.element.classList.toggle("compact", !works);
      const focused = tile.element.contains(document.activeElement) && tile.element.parentNode; // it stays while one types there
      const grid = focused || (works ? busyGrid : restGrid);
      const index = placed.get(grid);
      placed.set(grid, index + 1);
      if (!focused) putAt(grid, index, tile.element);
    }
    states.set(row.name, drawn(() => tile.update(row, held), (why) => tile.undrawn(row, why)));
  }
  rest.hidden = ![...restGrid.children].some((tile) => !tile.hidden);
  drawCounts([...states.values()]);
  const news = [...states].filter(([name, state]) => NEEDY.includes(state) && before.get(name) === "working");
  if (news.length) say(news.map(([name, state]) => `${name}: ${STATES[state]}`).join(". "));
  before = states;
  if (!sessions.length) busyGrid.replaceChildren(h("p", { class: "empty" }, "No session yet. ", h("a", { href: "/#/new" }, "Make one")));
}

function drawCounts(states) {
  const counts = $("#counts");
  if (!counts.children.length) {
    counts.append(...["", ...Object.keys(STATES)].map((state) => h("button", { type: "button", "data-state": state, onclick: () => {
      shown = shown === state ? "" : state;
      draw();
    } })));
  }
  for (const button of counts.children) {
    const { state } = button.dataset;
    const number = state ? states.filter((other) => other === state).length : states.length;
    put(button, `${state ? STATES[state] : "All"} ${number}`);
    button.setAttribute("aria-pressed", String(shown === state));
    button.classList.toggle("none", !number);
  }
  const needy = states.filter((state) => NEEDY.includes(state)).length;
  setTitle("Mission control — sandbox", needy);
  $("#next").disabled = !needy;
}

function toNext() {
  const order = [...tiles.values()].filter((tile) => NEEDY.includes(tile.element.dataset.state) && !tile.element.hidden);
  const at = order.findIndex((tile) => tile.element.contains(document.activeElement));
  const next = order[(at + 1) % order.length];
  if (!next) return;
  next.element.scrollIntoView({ block: "nearest" });
  next.box.focus();
}

$("#next").addEventListener("click", toNext);
document.addEventListener("keydown", (event) => {
  if (event.key === "n" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("textarea, input")) {
    event.preventDefault();
    toNext();
  }
});
$("#logout").addEventListener("click", async () => {
  try {
    await api.logout();
    location.assign("/preview/auth/login");
  } catch (error) {
    toast(error.message, "error");
  }
});
function drawBanner() {
  const { error } = store;
  const trouble = !link.up ? "The server does not answer. Trying again… The agents go on."
    : error && [error.message, error.hint].filter(Boolean).join(" — ");
  const banner = $("#banner");
  banner.hidden = !trouble;
  put(banner, trouble || "");
}

link.addEventListener("change", drawBanner);
store.addEventListener("change", drawBanner);
store.addEventListener("change", draw);
startPolling(TAIL_BYTES);
startNews();
