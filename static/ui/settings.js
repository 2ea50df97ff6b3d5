// A session's settings: environment, network, autostart script, agent prompt command.

import { api } from "./api.js";
import { busy, confirmed, h, problem, say, toast } from "./dom.js";
import { icon } from "./icons.js";
import { field } from "./sessions.js";

/** Rows of names and values. */
function environment(env, edited) {
  const rows = h("div", { class: "env" });
  const row = (name = "", value = "") => {
    const key = h("input", { type: "text", value: name, placeholder: "NAME", "aria-label": "Name", class: "mono",
      autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
    const text = h("textarea", { rows: "1", value, placeholder: "value", "aria-label": `Value of ${name || "the variable"}`,
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
  const show = h("input", { type: "checkbox", onchange: () => rows.classList.toggle("shown", show.checked) });
  return {
    element: h("div", {}, rows, h("div", { class: "row" }, add, h("label", { class: "check" }, show, "Show values"))),
    read: () => Object.fromEntries([...rows.children].map((line) => [...line.querySelectorAll("input, textarea")])
      .map(([key, text]) => [key.value.trim(), text.value]).filter(([name, value]) => name || value)),
  };
}

/** The network rule as radio buttons; a rule that this page cannot make stays as it is. */
function networkChoice(current, effective, edited) {
  const values = ["", "open", "none"];
  const given = current == null ? "" : typeof current === "string" ? current : JSON.stringify(current);
  if (!values.includes(given)) values.push(given);
  const shown = typeof effective === "string" ? effective : JSON.stringify(effective);
  const labels = {
    "": `As configured (${shown})`, open: "Open: the engine's default network", none: "None: no network at all",
    host: "Host: the host's own network",
  };
  const name = `net-${Math.random().toString(36).slice(2, 8)}`;
  const choices = h("div", { class: "choices tall", role: "radiogroup", "aria-label": "Network", onchange: edited },
    values.map((value) => h("label", { class: "choice" },
      h("input", { type: "radio", name, value, checked: value === given }), h("span", {}, labels[value] ?? value))));
  return {
    element: choices,
    read() {
      const value = choices.querySelector("input:checked").value;
      return value === "" ? null : value.startsWith("{") ? JSON.parse(value) : value;
    },
  };
}

export function mount(root, context) {
  const { name } = context;
  const scroll = h("div", { class: "scroll" }, h("p", { class: "dim pad" }, "Loading…"));
  root.append(scroll);
  let gone = false;
  api.settings(name).then((data) => gone || draw(data)).catch((error) => gone || scroll.replaceChildren(problem(error)));

  function draw({ settings, effective, recreate }) {
    const state = h("span", { class: "hint", role: "status" });
    const save = h("button", { class: "primary", type: "submit" }, "Save");
    const edited = () => (state.textContent = "Not saved yet");
    const env = environment(settings.env, edited);
    const network = networkChoice(settings.network, effective.network, edited);
    const autostart = h("textarea", { rows: "4", class: "mono", value: settings.autostart ?? "", spellcheck: "false",
      placeholder: settings.autostart == null ? effective.autostart ?? "" : "" });
    const template = h("textarea", { rows: "3", class: "mono", value: settings.agentPromptCommand ?? "", spellcheck: "false",
      placeholder: effective.agentPromptCommand || "my-agent --ask {prompt}" });
    const errors = h("div", {});
    const form = h("form", { class: "page settings", oninput: edited },
      recreate.length ? recreateNotice(recreate) : null, errors,
      h("fieldset", {}, h("legend", {}, "Environment"),
        h("p", { class: "hint" }, "In force at the next command, prompt or terminal. Added to what is configured; kept on this machine only."),
        env.element),
      h("fieldset", {}, h("legend", {}, "Network"), network.element),
      field("Autostart script", autostart, "A shell script that runs whenever the container starts. Its output is in Command mode."),
      field("Agent prompt command", template, "What a prompt runs in the container. {prompt} becomes one word, whatever it contains. "
        + "Empty: the agent's own."),
      h("div", { class: "row end sticky" }, state, save));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      save.disabled = true;
      errors.replaceChildren();
      try {
        const answer = await api.saveSettings(name, {
          env: env.read(), network: network.read(), autostart: autostart.value || null,
          agentPromptCommand: template.value.trim() || null,
        });
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

  function recreateNotice(lines) {
    return h("div", { class: "callout warn" },
      h("div", {}, h("strong", {}, "Not in force until the container is created again:"),
        h("ul", {}, lines.map((line) => h("li", {}, line)))),
      h("button", { type: "button", onclick: (event) => busy(event.currentTarget, async () => {
        const text = "What was installed or written in the container outside of your directory goes, the agent's conversation too. "
          + "Settings and history stay.";
        if (!(await confirmed(`Create ${name} again?`, text, "Create again"))) return;
        await api.act(name, "recreate");
        toast(`${name} was created again`);
        await context.reload();
        draw(await api.settings(name));
      }) }, icon("again"), "Create again"));
  }

  return { unmount: () => (gone = true) };
}
