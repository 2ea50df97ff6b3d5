// The Network screen: what a session with an allowlist may reach, and what it tries to reach, as it happens.

import { api } from "./api.js";
import { busy, drawn, h, pointed, problem, putAt, redraw, say } from "./dom.js";
import { ago, named } from "./format.js";
import { icon } from "./icons.js";
import { stoppedNotice } from "./jobs.js";
import { refresh, store } from "./store.js";

const SHOWN_HOSTS = 200; // the ones asked for last; what came before them goes
const DRAW_MILLISECONDS = 200;
const ANNOUNCE_MILLISECONDS = 4000;
const HIDDEN_MILLISECONDS = 20_000;
const RETRY_MILLISECONDS = 5000;

const KINDS = {
  open: "This session's network is open: it reaches the internet, your local network, and what listens on this machine "
    + "beyond loopback.",
  none: "This session has no network: it reaches nothing but itself.",
  host: "This session shares the network of its host: it reaches all that the host reaches, and what listens on the "
    + "host's loopback too.",
};

const OTHERS = "*"; // the hosts for which a line of their own was not kept

const bracketed = (host) => (host.includes(":") ? `[${host}]` : host);
const ruleFor = (host, port) => bracketed(host) + ([443, 80].includes(port) ? "" : `:${port}`);

const BEYOND_RULES = ["rules", "host", "tls"]; // kinds of refusal that no further rule takes back

// Kinds of refusal of the broker, and the rule of what it lets through: no host's rule changes these.
const BROKER_KINDS = ["key", "path", "budget", "turn", "upstream"];
const BROKER_RULE = "keys";
const isBrokers = ({ host, rule, kind }) => BROKER_KINDS.includes(kind)
  || (rule === BROKER_RULE && host !== BROKER_RULE);

/** The rule that lets a refused host through, "" where there is none, or another has to go first. */
function remedy({ host, port, rule, kind, address }) {
  if (host === OTHERS || BEYOND_RULES.includes(kind)) return "";
  if (rule) return rule.startsWith("*.") ? "" : rule; // a rule denies it: turn that one round
  return ruleFor(address ?? host, port); // the address is what lacks a rule, where there is one
}

/** A host and port, with what was decided about it. */
class Row {
  constructor(name, decision, change) {
    this.name = name;
    this.counts = { allow: 0, deny: 0 };
    this.counted = {}; // when the last one was decided that a count from the proxy has in it
    const { host, port } = decision;
    this.brokers = isBrokers(decision);
    this.label = host === OTHERS ? "other hosts" : `${bracketed(host)}:${port}`;
    if (this.brokers) this.label += " with its key";
    this.change = change;
    this.last = decision;
    this.take(decision);
  }

  build() {
    this.chip = h("span", { class: "chip" });
    this.facts = h("span", { class: "dim" });
    this.why = h("p", { class: "why" });
    this.button = h("button", { class: "small", type: "button", onclick: (event) => {
      if (event.detail > 1) return; // the second half of a double click would take the first one back
      busy(this.button, async () => {
        const verdict = this.verdict === "deny" ? "allow" : "deny";
        await this.change({ [verdict]: this.rule() });
        this.changed = verdict;
        this.draw();
      }).then(() => event.detail || this.button.focus());
    } });
    const settings = `#/s/${encodeURIComponent(this.name)}/settings`;
    this.budget = h("a", { class: "button small", href: settings }, "Budget");
    this.element = h("li", {}, h("div", { class: "what" },
      h("h3", { class: "mono" }, this.label),
      h("p", { class: "facts" }, this.chip, this.facts), this.why),
      this.budget, this.button);
  }

  take(decision) {
    if (decision.time >= this.last.time) this.last = decision;
    this.when = ""; // in words; that is dear
    this.changed = ""; // by a click here, since the last decision
    const { verdict, time, count } = decision;
    if (count) [this.counts[verdict], this.counted[verdict]] = [count, time];
    else if (!(time <= this.counted[verdict])) this.counts[verdict] += 1;
  }

  get count() {
    return this.counts.allow + this.counts.deny;
  }

  get refused() {
    return this.counts.deny;
  }

  get verdict() {
    return this.changed || this.last.verdict;
  }

  rule() {
    if (this.brokers) return "";
    if (this.verdict === "deny" && !this.changed) return remedy(this.last);
    return this.last.host === OTHERS ? "" : ruleFor(this.last.host, this.last.port);
  }

  draw() {
    if (!this.element) this.build();
    const { verdict, rule, reason, time } = this.last;
    const denied = this.verdict === "deny";
    put(this.chip, named({ allow: "allowed", deny: "refused" }, verdict));
    const tone = verdict === "deny" ? "bad" : verdict === "allow" ? "good" : "off";
    this.chip.className = `chip ${tone}`;
    put(this.facts, this.count === 1 ? `once, ${ago(time)}` : [`${this.count} times`,
      this.refused && this.refused < this.count && `refused ${this.refused}`, `last ${ago(time)}`].filter(Boolean).join(", "));
    this.facts.title = this.when ||= new Date(time).toLocaleString();
    put(this.why, this.changed ? `${denied ? "Refused" : "Allowed"} from the next connection on`
      : verdict === "deny" ? [reason, rule].filter(Boolean).join(": ")
        : this.brokers ? "by the broker, which has the key" : `by the rule ${rule}`);
    this.budget.hidden = this.last.kind !== "budget";
    put(this.button, denied ? "Allow" : "Deny");
    this.button.title = `${denied ? "Allow" : "Deny"} ${this.rule()}`;
    this.button.setAttribute("aria-label", `${denied ? "Allow" : "Deny"} ${this.label}`);
    this.button.hidden = !this.rule();
    this.element.className = `decision ${denied ? "denied" : ""}`;
  }

  undrawn(why) {
    this.element ??= h("li", {});
    this.element.className = "decision undrawn";
    this.element.replaceChildren(h("h3", { class: "mono" }, this.label),
      h("p", { class: "why" }, why));
  }
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The rules in force, and the field for one more. */
function ruleEditor({ change, remove }) {
  const lists = h("div", { class: "rules" });
  const errors = h("div", {});
  const input = h("input", { type: "text", class: "mono", placeholder: "api.example.com", "aria-label": "Host to allow",
    autocomplete: "off", autocapitalize: "off", spellcheck: "false", enterkeyhint: "done" });
  const submit = h("button", { class: "primary", type: "submit" }, "Allow");
  const form = h("form", { class: "row nowrap" }, input, submit);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!input.value.trim() || submit.disabled) return;
    submit.disabled = true;
    errors.replaceChildren();
    try {
      await change({ allow: input.value.trim() });
      input.value = "";
    } catch (error) {
      errors.replaceChildren(problem(error));
    } finally {
      submit.disabled = false;
      input.focus();
    }
  });

  const item = (key, rule) => h("li", {}, h("span", { class: "mono" }, rule),
    h("button", { class: "quiet", type: "button", "aria-label": `Remove ${rule}`, onclick: (event) => {
      const index = [...lists.querySelectorAll("button")].indexOf(event.currentTarget);
      busy(event.currentTarget, async () => {
        await remove(key, rule);
        ([...lists.querySelectorAll("button")][index] ?? input).focus();
      });
    } }, icon("close")));
  const list = (key, label, rules) => h("div", { class: key }, h("h3", {}, label),
    rules.length ? h("ul", { "aria-label": label }, rules.map((rule) => item(key, rule)))
      : h("p", { class: "dim" }, "No host yet: everything is refused."));
  return {
    element: h("section", { class: "card" }, h("h2", {}, "Rules"), lists, form, errors, h("p", { class: "hint" },
      h("code", {}, "host"), " (ports 443 and 80), ", h("code", {}, "host:port"), " or ", h("code", {}, "*.host"),
      ". In force for the next connection.")),
    draw: ({ allow, deny = [] }) => redraw(lists, list("allow", "Allowed", allow),
      deny.length ? list("deny", "Denied, even where allowed", deny) : ""),
    failed: (error) => errors.replaceChildren(problem(error)),
  };
}

/** Says what was refused, once for each host and together when there are many. */
function announcer() {
  let waiting = [];
  let timer;
  return {
    add(label) {
      waiting.push(label);
      timer ??= setTimeout(() => {
        say(waiting.length > 1 ? `${waiting.length} hosts were refused, ${waiting.at(-1)} among them` : `${waiting[0]} was refused`);
        waiting = [];
        timer = undefined;
      }, ANNOUNCE_MILLISECONDS);
    },
    end: () => clearTimeout(timer),
  };
}

/** What was decided, newest first, followed as long as there is a proxy and somebody looks. */
function decisionList(name, { change, live }) {
  const rows = new Map(); // by host and port, the one asked for last at the end
  const list = h("ul", { class: "decisions" });
  const none = h("p", { class: "dim" }, "Nothing was asked for yet.");
  const only = h("input", { type: "checkbox", onchange: () => draw() });
  const announce = announcer();
  const opened = Date.now(); // what is older is not announced
  let [stream, latest, floor] = [null, "", ""];
  let [drawing, hiding, retrying] = [];

  function take(decision) {
    if (floor && decision.time <= floor) return; // it was here before the connection broke
    if (decision.time > latest) latest = decision.time;
    const key = `${decision.host} ${decision.port} ${isBrokers(decision)}`;
    const row = rows.get(key);
    const known = row?.last.verdict === "deny";
    row?.take(decision);
    rows.delete(key);
    rows.set(key, row ?? new Row(name, decision, change));
    if (decision.verdict === "deny" && !known && Date.parse(decision.time) > opened) announce.add(rows.get(key).label);
    for (const [old, { element }] of rows) {
      if (rows.size <= SHOWN_HOSTS) break;
      rows.delete(old);
      element?.remove();
    }
    drawing ??= setTimeout(draw, DRAW_MILLISECONDS);
  }

  function draw() {
    clearTimeout(drawing);
    drawing = undefined;
    const held = pointed(list) || list.querySelector(":focus-visible"); // nor under the keyboard
    [...rows.values()].reverse().forEach((row, index) => {
      drawn(() => row.draw(), (why) => row.undrawn(why));
      row.element.hidden = only.checked && row.verdict !== "deny";
      if (held) row.element.isConnected || list.append(row.element);
      else putAt(list, index, row.element);
    });
    none.hidden = rows.size > 0;
  }

  function listen() {
    clearTimeout(retrying);
    if (stream || document.hidden) return;
    stream = new EventSource(api.decisionsAddress(name));
    stream.addEventListener("open", () => (floor = latest));
    stream.addEventListener("decision", ({ data }) => take(api.decision(data)));
    stream.addEventListener("error", () => { // it ends with the proxy; otherwise the browser connects again
      if (live() && stream.readyState !== EventSource.CLOSED) return;
      hush();
      if (live()) retrying = setTimeout(listen, RETRY_MILLISECONDS);
    });
  }

  function hush() {
    clearTimeout(retrying);
    stream?.close();
    stream = null;
  }

  const look = () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(hush, HIDDEN_MILLISECONDS);
    else if (live()) listen();
  };
  document.addEventListener("visibilitychange", look);
  list.addEventListener("pointerleave", draw);
  list.addEventListener("focusout", () => setTimeout(draw));
  store.addEventListener("change", draw); // how long ago
  return {
    element: h("section", {}, h("div", { class: "row" }, h("h2", {}, "Asked for"),
      h("label", { class: "check" }, only, "Refused only")), none, list),
    listen,
    end() {
      hush();
      announce.end();
      clearTimeout(drawing);
      clearTimeout(hiding);
      document.removeEventListener("visibilitychange", look);
      store.removeEventListener("change", draw);
    },
  };
}

function cutNotice(name) {
  return h("div", { class: "callout bad", role: "alert" },
    h("p", {}, h("strong", {}, "The network is cut."), " The proxy that lets the allowed hosts through does not run, so nothing "
      + "gets through. It comes back with its rules at the next ", h("code", {}, "sandbox run"), ", when a rule changes, or now."),
    h("button", { class: "primary", type: "button", onclick: (event) => busy(event.currentTarget, async () => {
      const { settings } = await api.settings(name);
      await api.saveSettings(name, { network: settings.network }); // as it is: putting it in force starts the proxy
      await refresh();
    }) }, icon("again"), "Connect again"));
}

function mountOther(root, context) {
  const { name, session: { network, keys } } = context;
  const live = () => context.session.state === "running";
  const decisions = keys === "hidden" && decisionList(name, { live });
  root.append(h("div", { class: "scroll" }, h("div", { class: "network" },
    h("p", {}, Object.hasOwn(KINDS, network) ? KINDS[network]
      : `This session's network is ${network}.`),
    h("p", {}, "With an allowlist it reaches the hosts that you name and nothing else, and this page shows what it asks for. "
      + "Choose one in the ", h("a", { href: `#/s/${encodeURIComponent(name)}/settings` }, "settings"),
      ": the container has to be created again for it."),
    decisions && [h("p", {}, "Of what goes to models with its hidden keys, this is what the broker "
      + "has let through and refused."),
      decisions.element])));
  if (!decisions) return {};
  decisions.listen();
  return { changed: decisions.listen, unmount: decisions.end };
}

function mountList(root, context) {
  const { name } = context;
  const notice = h("div", {});
  let gone = false;

  const state = () => store.find(name)?.network;
  const live = () => context.session.state === "running" && state() === "allow";
  const told = (answer) => gone || editor.draw(answer);
  const change = async (rules) => {
    told(await api.changeNetwork(name, rules));
    say(Object.entries(rules).map(([key, rule]) => `${rule} ${key === "allow" ? "is allowed" : "is denied"}`).join());
    context.reload().catch(() => {}); // the header counts them, and a cut network comes back
  };
  const remove = async (key, rule) => {
    const rules = await api.network(name);
    const network = { ...rules, [key]: (rules[key] ?? []).filter((other) => other !== rule) };
    await api.saveSettings(name, { network });
    told(network);
    say(`${rule} was removed`);
    context.reload().catch(() => {});
  };
  const editor = ruleEditor({ change, remove });
  const decisions = decisionList(name, { change, live });
  const load = () => document.hidden || gone || api.network(name).then(told).catch((error) => gone || editor.failed(error));
  root.append(notice, h("div", { class: "scroll" }, h("div", { class: "network" }, editor.element, decisions.element)));

  const changed = () => {
    redraw(notice, context.session.state !== "running" ? stoppedNotice(context) : state() === "cut" && cutNotice(name));
    load();
    if (live()) decisions.listen();
  };
  changed();
  if (!store.sessions) refresh().then(() => gone || changed());
  decisions.listen(); // where it is cut, for what was asked for before
  document.addEventListener("visibilitychange", load); // rules that were changed elsewhere
  return { changed, unmount() {
    gone = true;
    document.removeEventListener("visibilitychange", load);
    decisions.end();
  } };
}

export function mount(root, context) {
  let kind, view;
  const changed = (session) => {
    context.session = session;
    const now = typeof session.network === "object" ? "list" : session.network;
    if (now === kind) return view.changed?.();
    view?.unmount?.();
    root.replaceChildren();
    kind = now;
    view = (kind === "list" ? mountList : mountOther)(root, context);
  };
  changed(context.session);
  return { changed, unmount: () => view.unmount?.() };
}
