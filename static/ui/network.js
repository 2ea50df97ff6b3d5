// The network rule of a session: "open", "none", "host", or { allow: [host…], deny: [host…] }; null is what is configured.

import { h } from "./dom.js";
import { count, named } from "./format.js";

const KINDS = {
  open: "Open: the engine's default network",
  none: "None: no network at all",
  host: "Host: the host's own network",
  list: "Allow list: these hosts and no others",
};

const kindOf = (rule) => (rule && typeof rule === "object" ? "list" : rule ?? "");
const lines = (area) => area.value.split(/\s+/).filter(Boolean);

/** A rule in a few words. */
export function networkText(rule) {
  const words = { open: "open", none: "no network", host: "the host's network" };
  if (kindOf(rule) !== "list") return named(words, String(rule));
  return `${count(rule.allow?.length ?? 0, "allowed host")}`;
}

/** The choice between the kinds, and the hosts of a list; `read()` gives the rule. */
export function networkChoice(current, configured) {
  const given = kindOf(current);
  const rule = given === "list" ? current : kindOf(configured) === "list" ? configured : {};
  const name = `net-${Math.random().toString(36).slice(2, 8)}`;
  const choice = (value, label) => h("label", { class: "choice" },
    h("input", { type: "radio", name, value, checked: value === given }), h("span", {}, label));
  const area = (label, key, placeholder) => h("textarea", { rows: "4", class: "mono", spellcheck: "false", autocapitalize: "off",
    "aria-label": label, placeholder, value: (rule[key] ?? []).join("\n") });
  const allow = area("Allowed hosts", "allow", "api.example.com\n*.example.org:443");
  const deny = area("Denied hosts", "deny", "secret.example.org");
  const column = (label, hosts) => h("div", { class: "field" }, h("span", { class: "label" }, label), hosts);
  const lists = h("div", { class: "hosts" }, column("Allowed", allow), column("Of these denied", deny),
    h("p", { class: "hint" }, "One a line: ", h("code", {}, "host"), ", ", h("code", {}, "host:port"), " or ", h("code", {}, "*.host"), "."));
  const kinds = Object.entries(KINDS).filter(([kind]) => kind !== "host" || given === "host");
  const choices = h("div", { class: "choices tall", role: "radiogroup", "aria-label": "Network", onchange: () => show() },
    choice("", configured ? `As configured (${networkText(configured)})` : "As configured"),
    kinds.map(([kind, label]) => choice(kind, label)), lists);
  const chosen = () => choices.querySelector("input:checked").value;
  const show = () => (lists.hidden = chosen() !== "list");
  show();
  return {
    element: choices,
    read() {
      if (chosen() !== "list") return chosen() || null;
      return { allow: lines(allow), ...(deny.value.trim() ? { deny: lines(deny) } : {}) };
    },
  };
}
