// A field for a directory on the host, with a list of those that what was typed may go on with.

import { api } from "./api.js";
import { h } from "./dom.js";

/** Make a combobox of an input that is in the page; a chosen directory is gone into. */
export function completeDirectories(input) {
  const list = h("ul", {
    class: "options", id: "directories", role: "listbox", "aria-label": "Directories", hidden: true,
    onpointerdown: (event) => event.preventDefault(), // or the input loses the focus
  });
  let active = -1;
  let parent = ""; // of the directories in the list
  input.role = "combobox";
  input.ariaAutoComplete = "list";
  input.ariaExpanded = "false";
  input.setAttribute("aria-controls", list.id);
  input.after(h("div", { class: "under" }, list)); // the form below does not move when it goes

  function show(names) {
    list.replaceChildren(...names.map((name, index) =>
      h("li", { role: "option", id: `directory-${index}`, onclick: () => choose(index) }, name)));
    list.hidden = !names.length;
    input.ariaExpanded = String(!list.hidden);
    mark(-1);
  }

  function mark(index) {
    active = index;
    [...list.children].forEach((option, at) => (option.ariaSelected = String(at === active)));
    input.setAttribute("aria-activedescendant", list.children[active]?.id ?? "");
    list.children[active]?.scrollIntoView({ block: "nearest" });
  }

  async function ask() {
    const begun = input.value;
    const names = await api.directories(begun).catch(() => []);
    if (input.value !== begun || document.activeElement !== input) return;
    parent = begun.slice(0, begun.lastIndexOf("/") + 1);
    show(names);
  }

  function choose(index) {
    input.value = `${parent}${list.children[index].textContent}/`;
    show([]);
    return ask();
  }

  input.addEventListener("input", ask);
  input.addEventListener("blur", () => show([]));
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const chosen = event.key === "Enter" && active >= 0;
    if (event.isComposing || !(step || chosen || event.key === "Escape")) return;
    event.preventDefault();
    if (chosen) choose(active);
    else if (!step) show([]);
    else if (list.hidden) ask();
    else mark(Math.max(0, Math.min(list.children.length - 1, active + step)));
  });
}
