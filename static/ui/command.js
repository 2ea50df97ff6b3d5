// Command mode: command lines in the container, with their output as it comes.

import { api, follow } from "./api.js";
import { OutputView } from "./ansi.js";
import { h, problem, redraw, say, stickyScroll } from "./dom.js";
import { outcome, size } from "./format.js";
import { JobFoot, composer, stoppedNotice } from "./jobs.js";
import { refresh } from "./store.js";

const SHOWN_JOBS = 20;
const SHOWN_BYTES = 200_000; // of an output that was there before; the rest can be fetched

class Entry {
  constructor(job, context, again) {
    this.job = job;
    this.view = new OutputView();
    this.view.element.setAttribute("aria-label", `Output of ${job.command}`);
    this.foot = new JobFoot(job, { again: () => again(job.command), againLabel: "Run again" });
    this.cut = h("p", { class: "hint", hidden: true });
    const kind = job.kind === "autostart" ? h("span", { class: "chip" }, "autostart") : null;
    this.element = h("article", { class: "job", "aria-label": `Command ${job.command}` },
      h("h2", { class: "line mono" }, h("span", { class: "prompt", "aria-hidden": "true" }, "$ "), job.command, kind),
      this.cut, this.view.element, this.foot.element);
    this.view.element.hidden = true;
    this.stop = new AbortController();
    this.context = context;
  }

  async load(fresh) {
    const from = this.job.size > SHOWN_BYTES ? this.job.size - SHOWN_BYTES : 0;
    if (from) this.tell(`The last ${size(SHOWN_BYTES)} of ${size(this.job.size)}.`);
    try {
      await follow(this.context.name, this.job.id, { from, signal: this.stop.signal, on: (event, data) => this.on(event, data) });
      if (fresh && !this.stop.signal.aborted) say(`The command has ended: ${outcome(this.job).text}`);
    } catch (error) {
      this.element.append(problem(error));
    }
  }

  tell(text) {
    this.cut.hidden = false;
    this.cut.textContent = text;
    this.foot.output.hidden = false;
  }

  on(event, data) {
    if (event === "job" || event === "end") {
      this.job = data;
      this.view.flush();
      this.foot.update(data);
      return;
    }
    this.view.element.hidden = false;
    this.view.add(event, data);
    if (this.view.cut) this.tell("The beginning is not shown any more.");
  }

  end() {
    this.stop.abort();
    this.foot.end();
  }
}

export function mount(root, context) {
  const { name } = context;
  const notice = h("div", {});
  const log = h("div", { class: "jobs" });
  const scroll = h("div", { class: "scroll", tabindex: "-1" }, log);
  const entries = [];
  const past = []; // command lines, newest first
  const sticky = stickyScroll(scroll);
  sticky.watch(log);

  const remember = (command) => {
    if (past[0] !== command) past.unshift(command);
  };
  const isNew = ({ id }) => !entries.some(({ job }) => job.id === id); // the list may come late
  const add = (job, fresh, first) => {
    const entry = new Entry(job, context, run);
    entries.push(entry);
    if (first) log.prepend(entry.element);
    else log.append(entry.element);
    return entry.load(fresh);
  };
  async function run(command) {
    const job = await api.command(name, command);
    remember(command);
    $empty.remove();
    sticky.toEnd();
    if (isNew(job)) add(job, true).then(refresh);
    refresh();
  }
  const box = composer({ key: `command ${name}`, label: "Command", placeholder: "Type a command", action: "Run", mono: true, send: run,
    history: () => past, hint: "Enter runs it, Shift+Enter begins a new line, ↑ brings back earlier ones" });
  const $empty = h("p", { class: "dim blank" }, "Nothing was run here yet.");
  root.append(notice, scroll, box.element);

  const changed = (session) => {
    context.session = session;
    const running = session.state === "running";
    redraw(notice, !running && stoppedNotice(context));
    box.enable(running);
  };
  changed(context.session);
  if (matchMedia("(pointer: fine)").matches) box.area.focus();

  api.jobs(name, 200).then((jobs) => {
    const shown = jobs.filter((job) => job.kind !== "prompt" && isNew(job)).slice(0, SHOWN_JOBS);
    if (!shown.length && !entries.length) log.append($empty);
    for (const job of shown) add(job, job.state === "running", true);
    const later = past.splice(0);
    for (const job of shown.reverse()) if (job.kind === "command") remember(job.command);
    later.reverse().forEach(remember);
    sticky.toEnd();
  }).catch((error) => notice.append(problem(error)));

  return { changed, unmount() { entries.forEach((entry) => entry.end()); sticky.end(); } };
}
