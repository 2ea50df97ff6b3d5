// AGENT mode: prompts, and what the agent does about them.

import { api, follow } from "./api.js";
import { drawn, h, problem, redraw, say, stickyScroll } from "./dom.js";
import { AgentStream } from "./events.js";
import { canBePrompted, dollars, duration, grouped } from "./format.js";
import { icon } from "./icons.js";
import { JobFoot, composer, stoppedNotice } from "./jobs.js";
import { render } from "./markdown.js";
import { agentName, refresh, store } from "./store.js";

const SHOWN_TURNS = 10;
const SHOWN_BYTES = 4_000_000; // of a turn that was there before; the rest can be fetched
const SHOWN_CHARS = 20_000; // of a tool's input or output, or of raw text
const SHOWN_BLOCKS = 2000; // of a turn; the ones before them go

const STATUS = { running: "running", ok: "done", failed: "failed" };

// --- Blocks ---

/** The text, or its end with a way to see all of it. */
function put(pre, text) {
  const more = pre.nextElementSibling;
  if (text.length <= SHOWN_CHARS) {
    pre.textContent = text;
    if (more?.classList.contains("more-text")) more.remove();
    return;
  }
  pre.textContent = `…${text.slice(-SHOWN_CHARS)}`;
  pre.whole = text;
  if (more?.classList.contains("more-text")) return;
  pre.after(h("button", { class: "quiet small more-text", type: "button", onclick: (event) => {
    pre.textContent = pre.whole;
    event.currentTarget.remove();
  } }, "Show all of it"));
}

/** What a tool was given: a command as it is, other fields by name. */
function inputParts(block) {
  const { input } = block;
  if (input == null) return [];
  const whole = JSON.stringify(input, null, 2);
  if (typeof input !== "object" || whole.length > SHOWN_CHARS) {
    const pre = h("pre", { tabindex: "0" });
    const box = h("div", {}, pre);
    put(pre, typeof input === "string" ? input : whole);
    return [box];
  }
  const entries = Object.entries(input).filter(([, value]) => value != null && value !== "");
  const command = input.command ?? input.cmd;
  if (typeof command === "string" && entries.every(([key, value]) => typeof value === "string"
      && ["command", "cmd", "description"].includes(key))) {
    return [input.description && h("p", { class: "dim" }, input.description), h("pre", { tabindex: "0" }, command)].filter(Boolean);
  }
  if (entries.length === 1 && typeof entries[0][1] === "string") return [h("pre", { tabindex: "0" }, entries[0][1])];
  return [h("dl", {}, entries.map(([key, value]) => [h("dt", {}, key),
    h("dd", {}, h("pre", { tabindex: "0" }, typeof value === "string" ? value : JSON.stringify(value, null, 2)))]))];
}

const VIEWS = {
  text: () => ({ element: h("div", { class: "md" }), update(block) { render(this.element, block.text); } }),
  thinking() {
    const body = h("div", { class: "md" });
    return {
      element: h("details", { class: "thinking" }, h("summary", {}, "Thinking"), body),
      update: (block) => render(body, block.text),
    };
  },
  note: () => ({
    element: h("p", {}),
    update(block) {
      this.element.className = `note ${block.tone}`;
      this.element.textContent = block.text;
    },
  }),
  raw(block, known) {
    const pre = h("pre", { tabindex: "0", class: block.stream });
    const first = known && block.stream === "stderr" ? h("summary", {}) : null; // an agent's small talk takes one line
    return {
      element: first ? h("details", { class: "raw" }, first, pre) : h("div", { class: "raw" }, pre),
      update() {
        if (first) first.textContent = block.text.split("\n").find((line) => line.trim()) ?? "stderr";
        put(pre, block.text);
      },
    };
  },
  tool() {
    const name = h("span", { class: "tool-name" });
    const title = h("span", { class: "tool-title mono" });
    const status = h("span", { class: "tool-status" });
    const input = h("div", { class: "tool-in" });
    const output = h("pre", { tabindex: "0" });
    const result = h("div", { class: "tool-out" }, h("h3", {}, "Output"), output);
    const element = h("details", { class: "tool" }, h("summary", {}, icon("tool"), name, title, status),
      h("div", { class: "tool-body" }, h("h3", {}, "Input"), input, result));
    return {
      element,
      update(block) {
        element.dataset.status = block.status;
        name.textContent = block.name;
        title.textContent = block.title;
        status.textContent = STATUS[block.status];
        redraw(input, inputParts(block));
        result.hidden = block.status === "running" && !block.output;
        put(output, block.output || "(nothing)");
      },
    };
  },
};

/** What a turn has cost. */
export function summaryText({ cost, tokens, turns, milliseconds }) {
  return [
    tokens.in || tokens.out ? `${grouped(tokens.in)} tokens in, ${grouped(tokens.out)} out` : null,
    tokens.cached ? `${grouped(tokens.cached)} cached` : null,
    cost ? dollars(cost) : null,
    turns > 1 ? `${turns} turns` : null,
    milliseconds ? `agent's time ${duration(milliseconds)}` : null,
  ].filter(Boolean).join(" · ");
}

// --- Turns ---

class Turn {
  constructor(job, context, again) {
    this.job = job;
    this.context = context;
    this.stop = new AbortController();
    this.blocks = h("div", { class: "blocks" });
    this.wait = h("p", { class: "working", hidden: job.state !== "running" }, h("span", { class: "pulse", "aria-hidden": "true" }), "Working…");
    this.foot = new JobFoot(job, { again: () => again(job.prompt), againLabel: "Ask again" });
    this.element = h("article", { class: "turn", "aria-label": "Prompt and reply" },
      h("div", { class: "ask" }, h("p", {}, job.prompt)), this.blocks, this.wait, this.foot.element);
    this.views = new Map();
    this.dirty = new Set();
    this.from = job.size > SHOWN_BYTES ? job.size - SHOWN_BYTES : 0;
    this.foot.output.hidden = !this.from;
    this.stream = new AgentStream((block) => this.changed(block), this.from > 0,
      store.agents.get(job.agent)?.events);
  }

  async load(fresh) {
    try {
      await follow(this.context.name, this.job.id, { from: this.from, signal: this.stop.signal,
        on: (event, data) => this.on(event, data) });
      if (fresh && !this.stop.signal.aborted) say("The agent has finished");
    } catch (error) {
      this.element.append(problem(error));
    }
  }

  on(event, data) {
    if (event === "stdout" || event === "stderr") {
      this.stream.feed(event, data);
      return;
    }
    this.job = data;
    if (event === "end") this.stream.end();
    if (event === "end" && data.exit !== 0) requestAnimationFrame(() => { // what was said may tell why
      for (const details of this.blocks.querySelectorAll("details.raw")) details.open = true;
    });
    this.foot.update(data);
    this.wait.hidden = data.state !== "running";
  }

  /** Draw changed blocks once per frame, however many events come. */
  changed(block) {
    if (!this.dirty.size) requestAnimationFrame(() => this.draw());
    this.dirty.add(block);
  }

  draw() {
    const dirty = [...this.dirty];
    this.dirty.clear();
    const last = dirty.filter((block) => block.kind !== "summary").slice(-SHOWN_BLOCKS);
    const summaries = dirty.filter((block) => block.kind === "summary");
    for (const block of [...last, ...summaries])
      drawn(() => this.drawBlock(block), (why) => this.undrawn(block, why));
    if (last.length + summaries.length < dirty.length) this.foot.output.hidden = false;
    for (const [old, { element }] of this.views) {
      if (this.views.size <= SHOWN_BLOCKS) break;
      this.views.delete(old);
      element.remove();
      this.foot.output.hidden = false;
    }
  }

  drawBlock(block) {
    if (block.kind === "summary") {
      this.element.classList.toggle("failed", block.failed === true);
      this.foot.facts.textContent = summaryText(block);
      return;
    }
    if (!this.views.has(block)) this.place(block, VIEWS[block.kind](block, this.stream.known));
    this.views.get(block).update(block);
    if (block.cut) this.foot.output.hidden = false;
  }

  /** Show why a block could not be drawn, and what it holds. */
  undrawn(block, why) {
    const pre = h("pre", { tabindex: "0" });
    this.place(block, {
      element: h("div", { class: "raw undrawn" }, h("p", { class: "note bad" }, why), pre),
      update: () => put(pre, JSON.stringify(block, null, 2)),
    });
    this.views.get(block).update();
  }

  place(block, view) {
    const before = this.views.get(block);
    this.views.set(block, view);
    if (before) before.element.replaceWith(view.element);
    else this.blocks.append(view.element);
  }

  end() {
    this.stop.abort();
    this.foot.end();
  }
}

// --- The screen ---

function setupNotice(context) {
  const { name } = context;
  return h("div", { class: "callout" },
    h("p", {}, h("strong", {}, "AGENT mode needs a command. "), context.session.agentPromptCommand
      ? "The agent prompt command of this session lacks " : "Set the agent prompt command of this session, with ",
      h("code", {}, "{prompt}"), " where the prompt goes."),
    h("a", { class: "button primary", href: `#/s/${encodeURIComponent(name)}/settings` }, "Open settings"));
}

export function mount(root, context) {
  const { name } = context;
  const notice = h("div", {});
  const log = h("div", { class: "turns" });
  const earlier = h("button", { class: "quiet earlier", type: "button", hidden: true }, "Show earlier prompts");
  const scroll = h("div", { class: "scroll", tabindex: "-1" }, earlier, log);
  const sticky = stickyScroll(scroll);
  sticky.watch(log);
  let turns = [];
  const past = [];
  const blank = h("div", { class: "blank" });

  const isNew = ({ id }) => !turns.some(({ job }) => job.id === id); // the list may come late
  const add = (job, fresh, first) => {
    const turn = new Turn(job, context, ask);
    if (first) log.prepend(turn.element);
    else log.append(turn.element);
    turns.push(turn);
    turn.load(fresh).then(update);
    return turn;
  };
  async function ask(prompt) {
    const job = await api.prompt(name, prompt);
    past.unshift(prompt);
    blank.remove();
    sticky.toEnd();
    if (isNew(job)) add(job, true).element.scrollIntoView({ block: "nearest" });
    update();
    refresh();
  }
  const who = context.session.agent ? agentName(context.session.agent) : "the agent";
  const box = composer({ key: `agent ${name}`, label: "Prompt", placeholder: "", action: "Send", send: ask, history: () => past,
    hint: "Enter sends it, Shift+Enter begins a new line" });
  root.append(notice, scroll, box.element);

  function update() {
    const { session } = context;
    const running = session.state === "running";
    const ready = canBePrompted(session);
    const working = turns.some((turn) => turn.job.state === "running");
    redraw(notice, !ready ? setupNotice(context) : !running && stoppedNotice(context));
    box.enable(running && ready && !working, working ? "The agent is working; stop it, or wait for its answer" : undefined);
    box.area.placeholder = ready ? `Ask ${who}` : "There is no agent prompt command yet";
  }
  const changed = (session) => {
    context.session = session;
    update();
  };
  update();
  if (matchMedia("(pointer: fine)").matches) box.area.focus();

  api.jobs(name, 200).then((jobs) => {
    const prompts = jobs.filter((job) => job.kind === "prompt" && isNew(job));
    past.push(...prompts.map((job) => job.prompt));
    for (const job of prompts.slice(0, SHOWN_TURNS)) add(job, job.state === "running", true);
    const rest = prompts.slice(SHOWN_TURNS);
    earlier.hidden = !rest.length;
    earlier.addEventListener("click", () => {
      for (const job of rest.splice(0, SHOWN_TURNS)) add(job, false, true);
      earlier.hidden = !rest.length;
    });
    if (!turns.length) {
      blank.append(h("h2", {}, `What should ${who} do?`),
        h("p", { class: "dim" }, `It works in ${context.session.workdir}. Later prompts go on with the same conversation, `
          + "and it goes on when you close this page."));
      log.append(blank);
    }
    sticky.toEnd();
    update();
  }).catch((error) => notice.append(problem(error)));

  return { changed, unmount() { turns.forEach((turn) => turn.end()); sticky.end(); } };
}
