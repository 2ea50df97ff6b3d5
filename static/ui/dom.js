// Making and finding elements. No text ever becomes HTML here: see markdown.js for the one place where it does.

/** Make an element: `props` are attributes, properties that begin with "on" listeners; false and null are left out. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

/** Put children in place of those that look different; a click on the others is not lost. */
export function redraw(element, ...children) {
  const fresh = [...h("div", {}, children).childNodes];
  while (element.childNodes.length > fresh.length) element.lastChild.remove();
  fresh.forEach((child, index) => {
    const shown = element.childNodes[index];
    if (!shown) element.append(child);
    else if (!shown.isEqualNode(child)) shown.replaceWith(child);
  });
}

let hovers = false; // a finger that is gone leaves its :hover behind
document.addEventListener("pointerover", ({ pointerType }) => (hovers = pointerType !== "touch"));

/** Whether the mouse is about to press something in an element: nothing may move under it then. */
export const pointed = (element) => hovers && Boolean($(":is(a, button):hover", element));

/** Have a child at its index; one that is there already keeps the focus and a click amid it. */
export function putAt(list, index, child) {
  if (list.children[index] !== child) list.insertBefore(child, list.children[index] ?? null);
}

let said;

/** Tell a screen reader. */
export function say(text) {
  clearTimeout(said);
  const status = $("#said");
  status.textContent = "";
  said = setTimeout(() => (status.textContent = text), 50);
}

/** A short message over the page that goes by itself. */
export function toast(text, kind = "info") {
  const box = h("div", { class: `toast ${kind}`, role: kind === "error" ? "alert" : "status" }, text);
  $("#toasts").append(box);
  setTimeout(() => box.remove(), kind === "error" ? 8000 : 4000);
  return box;
}

/** Draw one thing of several; where it fails, `instead(text)` says so, and the others go on. */
export function drawn(draw, instead) {
  try {
    return draw();
  } catch (error) {
    return instead(`This could not be shown: ${error.message}`);
  }
}

/** What went wrong, as the server has put it, with what can be done about it. */
export function problem(error) {
  return h("div", { class: "problem", role: "alert" },
    h("strong", {}, error.message), error.hint && h("span", {}, error.hint));
}

/** Run an action of a button, once at a time, and show what goes wrong. */
export async function busy(button, action) {
  button.disabled = true;
  try {
    await action();
  } catch (error) {
    toast([error.message, error.hint].filter(Boolean).join(" — "), "error");
  } finally {
    button.disabled = false;
  }
}

/** Ask before something is lost; the text may be an element. */
export function confirmed(title, text, action) {
  const dialog = h("dialog", { class: "confirm", "aria-labelledby": "confirm-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "confirm-title" }, title), typeof text === "string" ? h("p", {}, text) : text,
      h("div", { class: "row end" },
        h("button", { value: "no", class: "quiet" }, "Cancel"),
        h("button", { value: "yes", class: "danger" }, action))));
  document.body.append(dialog);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(dialog.returnValue === "yes");
  }));
}

/** Keeps a scrolling element at its end while the reader is there. */
export function stickyScroll(element) {
  let stuck = true;
  let last = 0;
  element.addEventListener("scroll", () => {
    const top = element.scrollTop;
    const atEnd = element.scrollHeight - top - element.clientHeight < 40;
    if (atEnd || top < last - 2) stuck = atEnd; // only a reader scrolls up; growth just leaves the end below
    last = top;
  }, { passive: true });
  const follow = () => stuck && (element.scrollTop = element.scrollHeight);
  const observer = new ResizeObserver(follow);
  observer.observe(element);
  return {
    follow,
    watch: (child) => observer.observe(child),
    toEnd() { stuck = true; follow(); },
    end: () => observer.disconnect(),
  };
}

/** A textarea that grows with what is typed. */
export function autoGrow(area, most = 240) {
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, most)}px`;
  };
  area.addEventListener("input", fit);
  return fit;
}
