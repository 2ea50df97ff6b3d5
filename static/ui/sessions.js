// The list of sessions, with live state, and the form that makes a new one.

import { api } from "./api.js";
import { completeDirectories } from "./directory.js";
import { $, drawn, h, problem, putAt, redraw, toast } from "./dom.js";
import { ago, count, outcome, tailOf, working } from "./format.js";
import { icon } from "./icons.js";
import { networkChoice } from "./network.js";
import { notifyButton, unseen } from "./news.js";
import { agentName, profiles, refresh, store } from "./store.js";

const FILTER_FROM = 8; // sessions from which on there is a filter

/** What a session is doing, as { text, tone }. */
export function activity(row) {
  const jobs = working(row);
  const parts = [jobs && count(jobs, "job"), row.terminals && count(row.terminals, "terminal")].filter(Boolean);
  if (row.network === "cut") return { text: ["network cut", ...parts].join(", "), tone: "bad" };
  if (jobs) return { text: `${parts.join(", ")} running`, tone: "run" };
  if (row.state !== "running") return { text: row.state, tone: "off" };
  const { last } = row;
  const ended = last && last.kind !== "autostart" ? outcome(last) : null;
  if (ended?.tone === "bad") return { text: `${ended.text}, ${ago(last.ended ?? last.started)}`, tone: "bad" };
  if (parts.length) return { text: `${parts.join(", ")} open`, tone: "good" };
  return { text: last ? `idle, last used ${ago(last.ended ?? last.started)}` : "idle", tone: "good" };
}

export function mountList(root, { place }) {
  const list = h("ul", { class: "sessions" });
  const note = h("div", { class: "pad" });
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter sessions", hidden: true,
    oninput: () => draw() });
  root.append(
    h("div", { class: "side-head" },
      h("a", { class: "brand", href: "#/" }, h("span", { class: "mark", "aria-hidden": "true" }, icon("tool")), "sandbox"),
      h("div", { class: "row nowrap" }, notifyButton(),
        h("a", { class: "button primary small", href: "#/new" }, icon("plus"), "New"))),
    h("div", { class: "side-filter" }, filter), note, list,
    h("div", { class: "side-foot" },
      h("a", { class: "button quiet", href: "/preview" }, icon("grid"), "Mission control"),
      h("a", { class: "button quiet", href: "#/usage" }, "Usage"),
      h("button", { class: "quiet", type: "button", onclick: logOut }, icon("out"), "Log out")));

  const cards = new Map();
  function draw() {
    const { sessions, error } = store;
    redraw(note, error && error.code !== "offline" && problem(error));
    if (!sessions) return;
    filter.hidden = sessions.length < FILTER_FROM;
    const wanted = filter.hidden ? "" : filter.value.trim().toLowerCase();
    const shown = sessions.filter((row) => `${row.name} ${row.agent} ${row.directory}`.toLowerCase().includes(wanted));
    const { name } = place();
    for (const gone of [...cards.keys()].filter((key) => !shown.some((row) => row.name === key))) {
      cards.get(gone).remove();
      cards.delete(gone);
    }
    shown.forEach((row, index) => {
      if (!cards.has(row.name)) cards.set(row.name, card(row.name));
      const item = cards.get(row.name);
      drawn(() => fill(item, row, row.name === name),
        (why) => ($(".doing", item).textContent = why));
      putAt(list, index, item);
    });
  }
  store.addEventListener("change", draw);
  unseen.addEventListener("change", draw);
  window.addEventListener("hashchange", draw);
}

function card(name) {
  return h("li", {}, h("a", { href: `#/s/${encodeURIComponent(name)}/agent` },
    h("span", { class: "dot" }), h("span", { class: "name" }, name),
    h("span", { class: "where dim" }), h("span", { class: "doing" })));
}

/** Set only what differs, so that a screen reader or a selection is left in peace. */
function fill(item, row, current) {
  const link = item.firstChild;
  const { text, tone } = activity(row);
  const put = (selector, value) => {
    const element = $(selector, link);
    if (element.textContent !== value) element.textContent = value;
  };
  put(".where", [row.agent && agentName(row.agent), row.directory && tailOf(row.directory),
    row.network === "allow" && "allowlist"].filter(Boolean).join(" · "));
  put(".doing", text);
  $(".doing", link).className = `doing ${tone}`;
  $(".dot", link).className = `dot ${tone}`;
  link.title = row.directory ?? "";
  link.classList.toggle("news", unseen.sessions.has(row.name));
  current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
}

async function logOut() {
  try {
    await api.logout();
    location.assign("/auth/login");
  } catch (error) {
    toast(error.message, "error");
  }
}

// --- The form ---

export function field(label, input, hint) {
  const id = input.id || `f-${Math.random().toString(36).slice(2, 8)}`;
  input.id = id;
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  return h("div", { class: "field" }, h("label", { for: id }, label), input,
    hint && h("p", { class: "hint", id: `${id}-hint` }, hint));
}

export function mountForm(root, { created }) {
  let gone = false;
  const errors = h("div", {});
  const text = (props) => h("input", { type: "text", autocomplete: "off", autocapitalize: "off", spellcheck: "false", ...props });
  const name = text({ placeholder: "made from the directory's name" });
  const directory = text({ placeholder: "/home/me/project", required: true });
  const profile = h("select", {}, h("option", { value: "" }, "none"));
  const image = text({ placeholder: "as configured" });
  const network = networkChoice();
  const agents = h("div", { class: "choices", role: "radiogroup", "aria-label": "Agent" });
  const submit = h("button", { class: "primary", type: "submit" }, "Create session");
  const form = h("form", { class: "page", novalidate: true },
    h("div", { class: "page-head" }, h("a", { class: "button quiet back", href: "#/", "aria-label": "All sessions" }, icon("back")),
      h("h1", {}, "New session")),
    errors,
    h("fieldset", {}, h("legend", {}, "Agent"), agents),
    field("Directory on the host", directory, "The agent sees this directory, at the same path, and of the rest of the host only what is configured."),
    field("Name", name),
    field("Run profile", profile, "What the form leaves open comes from here, then from the global configuration."),
    h("fieldset", {}, h("legend", {}, "Network"), network.element),
    h("details", { class: "more" }, h("summary", {}, "More"),
      field("Image version", image, "For example 1.0-common.")),
    h("div", { class: "row end" }, h("a", { class: "button quiet", href: "#/" }, "Cancel"), submit));

  function drawAgents() {
    const choice = (value, label, checked) => h("label", { class: "choice" },
      h("input", { type: "radio", name: "agent", value, checked }), h("span", {}, label));
    const names = [...store.agents.keys()];
    if (names.join() === offered) return;
    offered = names.join();
    agents.replaceChildren(
      ...names.map((agent, index) => choice(agent, agentName(agent), index === 0)),
      choice("", "No agent", false));
  }
  let offered = "";
  drawAgents();

  let known = [];
  profile.addEventListener("change", () => {
    const chosen = known.find((entry) => entry.name === profile.value);
    if (chosen?.directory && !directory.value) directory.value = chosen.directory;
    const none = $('input[value=""]', agents);
    none.nextSibling.textContent = chosen?.agent ? `The profile's: ${agentName(chosen.agent)}` : "No agent";
    if (chosen?.agent) none.checked = true;
  });
  profiles().then((data) => {
    if (gone) return;
    known = data.profiles;
    profile.append(...known.map((entry) => h("option", { value: entry.name, disabled: Boolean(entry.error) },
      entry.error ? `${entry.name} (${entry.error})` : entry.name)));
    drawAgents();
    if (data.directory && !directory.value) directory.value = data.directory;
  }).catch((error) => gone || errors.replaceChildren(problem(error)));

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const what = {
      agent: new FormData(form).get("agent"), directory: directory.value.trim(), name: name.value.trim(),
      profile: profile.value, image: image.value.trim(), network: network.read(),
    };
    for (const [key, value] of Object.entries(what)) if (!value) delete what[key];
    submit.disabled = true;
    submit.textContent = "Creating…";
    errors.replaceChildren();
    try {
      const made = await api.create(what);
      await refresh();
      if (!gone) created(made);
    } catch (error) {
      errors.replaceChildren(problem(error));
      errors.scrollIntoView({ block: "nearest" });
    } finally {
      submit.disabled = false;
      submit.textContent = "Create session";
    }
  });
  root.replaceChildren(form);
  completeDirectories(directory);
  directory.focus();
  return () => (gone = true);
}
