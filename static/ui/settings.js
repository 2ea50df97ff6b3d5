// A session's settings: environment, network, autostart script, agent prompt command.

import { api } from "./api.js";
import { $, busy, confirmed, h, problem, say, toast } from "./dom.js";
import { inUse } from "./format.js";
import { icon } from "./icons.js";
import { keysSection } from "./keys.js";
import { networkChoice } from "./network.js";
import { field } from "./sessions.js";
import { store } from "./store.js";

/** Rows of names and values. */
function environment(env, edited) {
  const rows = h("div", { class: "env" });
  const row = (name = "", value = "") => {
    const hidden = value === null; // it is given to no page, and stays where no other is typed
    const key = h("input", { type: "text", value: name, placeholder: "NAME", "aria-label": "Name", class: "mono",
      readonly: hidden, autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
    const text = h("textarea", { rows: "1", value: value ?? "", "data-hidden": hidden,
      placeholder: hidden ? "hidden; type another value" : "value",
      "aria-label": `Value of ${name || "the variable"}`,
      class: "mono secret", autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
    const line = h("div", { class: "env-row" }, key, text,
      h("button", { class: "quiet", type: "button", "aria-label": `Remove ${name || "this variable"}`, onclick: () => {
        const next = line.nextElementSibling ?? line.previousElementSibling;
        line.remove();
        edited();
        (next?.querySelector("input") ?? add).focus();
      } }, icon("close")));
    rows.append(line);
    return key;
  };
  Object.entries(env ?? {}).forEach(([name, value]) => row(name, value));
  const add = h("button", { class: "quiet", type: "button", onclick: () => row().focus() }, icon("plus"), "Add variable");
  const show = h("input", { type: "checkbox", onchange: () => rows.classList.toggle("shown", show.checked),
    oninput: (event) => event.stopPropagation() }); // it changes no setting
  return {
    element: h("div", {}, rows, h("div", { class: "row" }, add, h("label", { class: "check" }, show, "Show values"))),
    read: () => Object.fromEntries([...rows.children]
      .map((line) => [...line.querySelectorAll("input, textarea")])
      .map(([key, text]) => [key.value.trim(), text.value || ("hidden" in text.dataset ? null : "")])
      .filter(([name, value]) => name || value)),
  };
}

// What was changed and not saved, by session: it is there again when one comes back to the page.
const drafts = new Map();
window.addEventListener("beforeunload", (event) => drafts.size && event.preventDefault());
store.addEventListener("change", () => {
  for (const name of drafts.keys()) if (store.sessions && !store.find(name)) drafts.delete(name);
});

export function mount(root, context) {
  const { name } = context;
  const scroll = h("div", { class: "scroll" }, h("p", { class: "dim pad" }, "Loading…"));
  root.append(scroll);
  let gone = false;
  const keys = context.session.keys === "hidden" ? keysSection(name) : null;
  const load = async () => {
    const [data] = await Promise.all([api.settings(name), keys?.look()]);
    if (!gone) draw(data, drafts.get(name));
  };
  load().catch((error) => gone || scroll.replaceChildren(problem(error)));

  function draw({ settings: saved, configured, recreate }, draft) {
    const settings = { ...saved, ...draft };
    const state = h("span", { class: "hint", role: "status" }, draft ? "Not saved yet" : "");
    const discard = h("button", { class: "quiet", type: "button", hidden: !draft, onclick: () => {
      drafts.delete(name);
      draw({ settings: saved, configured, recreate });
      $("input, textarea, button", scroll).focus();
    } }, "Discard changes");
    const save = h("button", { class: "primary", type: "submit" }, "Save");
    const read = () => ({ env: env.read(), network: network.read(), autostart: autostart.value || null,
      agentPromptCommand: template.value.trim() || null });
    const edited = () => {
      drafts.set(name, read());
      state.textContent = "Not saved yet";
      discard.hidden = false;
    };
    const env = environment(settings.env, edited);
    const network = networkChoice(settings.network, configured.network);
    const autostart = h("textarea", { rows: "4", class: "mono", value: settings.autostart ?? "", spellcheck: "false",
      placeholder: configured.autostart ?? "" });
    const template = h("textarea", { rows: "3", class: "mono", value: settings.agentPromptCommand ?? "", spellcheck: "false",
      placeholder: configured.agentPromptCommand || "my-agent --ask {prompt}" });
    const errors = h("div", {});
    const form = h("form", { class: "page settings", oninput: edited },
      recreate.length ? recreateNotice(recreate) : null, errors,
      h("fieldset", {}, h("legend", {}, "Environment"),
        h("p", { class: "hint" }, "In force at the next command, prompt or terminal. Added to what is configured; kept on this machine only."),
        env.element),
      keys?.elements,
      h("fieldset", {}, h("legend", {}, "Network"),
        h("p", { class: "hint" }, "The hosts of a list are in force at once. Another kind of network needs a new container: "
          + "when it is saved, this page says so and can make it."),
        network.element),
      field("Autostart script", autostart,
        "A shell script that runs whenever the container starts. Its output is in Command mode "
        + "where these pages started the container, and else in /tmp/autostart.log inside."),
      field("Agent prompt command", template, "What a prompt runs in the container. {prompt} becomes one word, whatever it contains. "
        + "Empty: the agent's own."),
      anotherName(),
      h("div", { class: "row end sticky" }, state, discard, save));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      save.disabled = true;
      errors.replaceChildren();
      try {
        const answer = await api.saveSettings(name, read());
        drafts.delete(name);
        await keys?.look();
        if (gone) return;
        draw(answer);
        toast("Settings saved");
        say("Settings saved");
        context.reload().catch(() => {});
      } catch (error) {
        errors.replaceChildren(problem(error));
        errors.scrollIntoView({ block: "center" });
      } finally {
        save.disabled = false;
      }
    });
    scroll.replaceChildren(form);
  }

  /** One row: another name for this session, or for a duplicate of it. */
  function anotherName() {
    const input = h("input", { type: "text", value: name, "aria-label": "Another name", class: "mono", autocomplete: "off",
      autocapitalize: "off", spellcheck: "false", oninput: (event) => event.stopPropagation(), // it changes no setting
      onkeydown: (event) => event.key === "Enter" && event.preventDefault() });
    const button = (label, action, done) => h("button", { type: "button", onclick: (event) => busy(event.currentTarget, async () => {
      const wanted = input.value.trim() === name && action === "duplicate" ? {} : { name: input.value.trim() };
      const made = await api.act(name, action, wanted);
      if (action === "rename") drafts.delete(name);
      toast(`${name} ${done} ${made.name}`);
      location.hash = `#/s/${encodeURIComponent(made.name)}/settings`;
    }) }, label);
    return h("fieldset", {}, h("legend", {}, "Another name"),
      h("p", { class: "hint" }, "Rename: what runs goes on. Duplicate: a new session on the same directory, with a copy of the "
        + "agent's conversations; without a name of its own it is given one."),
      h("div", { class: "row" }, input, button("Rename", "rename", "is now"), button("Duplicate", "duplicate", "was copied to")));
  }

  function recreateNotice(lines) {
    return h("div", { class: "callout warn" },
      h("div", {}, h("strong", {}, "Not in force until the container is created again:"),
        h("ul", {}, lines.map((line) => h("li", {}, line)))),
      h("button", { type: "button", onclick: (event) => busy(event.currentTarget, async () => {
        const users = await api.users(name);
        const text = "What runs in it ends, and what was installed in the container goes. "
          + "The agent's conversations, settings and history stay." + inUse(users);
        if (!(await confirmed(`Create ${name} again?`, text, "Create again"))) return;
        await api.act(name, "recreate");
        toast(`${name} was created again`);
        await context.reload();
        await load();
      }) }, icon("again"), "Create again"));
  }

  return { unmount: () => (gone = true) };
}
