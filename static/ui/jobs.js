// What the screens that run jobs share: the box at the bottom, the footer of a job, and what is said of a stopped session.

import { api } from "./api.js";
import { autoGrow, busy, h, toast } from "./dom.js";
import { changesAddress, changesText, lasted, outcome } from "./format.js";
import { icon } from "./icons.js";

const drafts = new Map(); // what was typed and not sent, by box

/** The box `key` that a command or a prompt is typed into. `send(text)` resolves when it was taken. */
export function composer({ key, label, placeholder, hint, action, send, history, mono }) {
  const area = h("textarea", { rows: "1", placeholder, "aria-label": label, class: mono ? "mono" : null, value: drafts.get(key) ?? "",
    oninput: () => drafts.set(key, area.value),
    autocapitalize: mono ? "off" : null, autocomplete: "off", spellcheck: mono ? "false" : null, enterkeyhint: "send" });
  const button = h("button", { class: "primary send", type: "submit", "aria-label": action }, icon("send"));
  const note = h("p", { class: "hint" }, hint);
  const form = h("form", { class: "composer" }, h("div", { class: "composer-row" }, area, button), note);
  const fit = autoGrow(area);
  requestAnimationFrame(fit);
  let back = 0; // how far back in the history

  const recall = (step) => {
    const entries = history?.() ?? [];
    back = Math.max(0, Math.min(entries.length, back + step));
    area.value = back ? entries[back - 1] : "";
    fit();
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = area.value;
    if (!text.trim() || button.disabled) return;
    button.disabled = true;
    try {
      await send(text);
      drafts.delete(key);
      area.value = "";
      back = 0;
      fit();
    } catch (error) {
      toast([error.message, error.hint].filter(Boolean).join(" — "), "error");
    } finally {
      button.disabled = area.disabled;
      area.focus();
    }
  });
  area.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && !event.altKey) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "ArrowUp" && history && !area.value.slice(0, area.selectionStart).includes("\n")) {
      event.preventDefault();
      recall(1);
    } else if (event.key === "ArrowDown" && history && back && !area.value.slice(area.selectionEnd).includes("\n")) {
      event.preventDefault();
      recall(-1);
    }
  });
  return {
    element: form, area,
    set(text) { area.value = text; fit(); area.focus(); },
    enable(on, why = hint) { area.disabled = button.disabled = !on; note.textContent = why; },
  };
}

/** The state of a job, its duration (running on while it runs) and what can be done with it. */
export class JobFoot {
  constructor(job, { again, againLabel }) {
    this.job = job;
    this.chip = h("span", { class: "chip" });
    this.time = h("span", { class: "dim" });
    this.facts = h("span", { class: "dim facts" });
    this.why = h("span", { class: "bad-text" });
    this.cancel = h("button", { class: "quiet small", type: "button", onclick: () => this.stop() }, icon("stop"), "Stop");
    this.again = h("button", { class: "quiet small", type: "button", onclick: (e) => busy(e.currentTarget, again) },
      icon("again"), againLabel);
    this.output = h("a", { class: "button quiet small", download: `${job.id}.txt`, hidden: true,
      href: api.outputAddress(job.session, job.id) }, icon("down"), "Whole output");
    this.changes = h("a", { class: "button quiet small", hidden: true });
    // Where Stop was there is text when the job has ended: a late press on it runs nothing again.
    this.element = h("footer", { class: "job-foot" }, this.cancel, this.chip, this.time, this.facts,
      this.why, h("span", { class: "grow" }), this.changes, this.output, this.again);
    this.clock = setInterval(() => this.job.state === "running" && this.draw(), 1000);
    this.draw();
  }

  update(job) {
    this.job = job;
    if (job.state !== "running") clearInterval(this.clock);
    this.draw();
  }

  draw() {
    const { text, tone } = outcome(this.job);
    const running = this.job.state === "running";
    this.chip.textContent = this.stopping && running ? "stopping" : text;
    this.chip.className = `chip ${tone}`;
    this.time.textContent = lasted(this.job);
    this.time.title = new Date(this.job.started).toLocaleString();
    this.why.textContent = this.job.error ?? "";
    const { changes } = this.job;
    this.changes.hidden = !changes;
    if (changes) {
      this.changes.href = changesAddress(this.job.session, changes.turn);
      this.changes.textContent = changesText(changes) || "Nothing changed";
    }
    this.cancel.hidden = !running;
    this.again.hidden = running;
  }

  stop() {
    this.stopping = true;
    this.draw();
    return busy(this.cancel, () => api.cancel(this.job.session, this.job.id));
  }

  end() {
    clearInterval(this.clock);
  }
}

/** What stands over the screens of a session that does not run. */
export function stoppedNotice(context) {
  const { name } = context;
  if (context.session.state === "broken") {
    return h("div", { class: "callout" }, h("p", {}, h("strong", {}, `${name} is broken.`),
      " The labels of this container are not those of a whole session. It can only be removed."));
  }
  return h("div", { class: "callout" },
    h("p", {}, h("strong", {}, `${name} is ${context.session.state}.`), " Start it to go on; nothing of it was lost."),
    h("button", { class: "primary", type: "button", onclick: (event) => busy(event.currentTarget, async () => {
      await api.act(name, "start");
      await context.reload();
    }) }, icon("play"), "Start"));
}
