// A program's output as text with colours: SGR sequences become spans, a lone carriage return begins the line anew,
// every other control sequence goes.

import { h } from "./dom.js";

const SEQUENCE = /\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])/g;
const KEPT_CHARS = 200_000; // of what is shown; the server keeps all

export class OutputView {
  constructor() {
    this.element = h("pre", { class: "output", tabindex: "0" });
    this.rest = { stdout: "", stderr: "" };
    this.style = { stdout: "", stderr: "" };
    this.last = null; // the span at the end, with its stream and style
    this.chars = 0;
    this.cut = false;
    this.waiting = [];
    this.waitingChars = 0;
  }

  /** Add output of a stream: it is drawn once per frame, and what would be gone again at once is not drawn. */
  add(stream, text) {
    if (!this.waiting.length) requestAnimationFrame(() => this.flush());
    this.waiting.push([stream, text]);
    this.waitingChars += text.length;
    while (this.waitingChars - this.waiting[0][1].length > KEPT_CHARS) {
      this.waitingChars -= this.waiting.shift()[1].length;
      this.cut = true;
    }
  }

  flush() {
    const { element } = this;
    const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 30;
    for (const [stream, text] of this.waiting.splice(0)) this.parse(stream, text);
    this.waitingChars = 0;
    this.trim();
    if (atEnd) element.scrollTop = element.scrollHeight;
  }

  /** A sequence that is cut in two waits for its other half. */
  parse(stream, text) {
    text = (this.rest[stream] + text).replaceAll("\r\n", "\n");
    const open = /(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,200})?|\r)$/.exec(text);
    this.rest[stream] = open ? open[0] : "";
    if (open) text = text.slice(0, open.index);
    let at = 0;
    for (const found of text.matchAll(SEQUENCE)) {
      this.text(stream, text.slice(at, found.index));
      if (found[2] === "m") this.style[stream] = restyled(this.style[stream], found[1]);
      at = found.index + found[0].length;
    }
    this.text(stream, text.slice(at));
  }

  text(stream, text) {
    text = text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\x7f]/g, "");
    if (!text) return;
    const pieces = text.split("\r");
    this.append(stream, pieces[0]);
    for (const piece of pieces.slice(1)) {
      this.eraseLine();
      this.append(stream, piece);
    }
  }

  append(stream, text) {
    if (!text) return;
    this.chars += text.length;
    const key = `${stream} ${this.style[stream]}`.trim();
    if (this.last?.className !== key || this.last.textContent.length > 8192) {
      this.last = h("span", { class: key });
      this.element.append(this.last);
    }
    this.last.append(text);
  }

  eraseLine() {
    for (let node = this.element.lastChild; node; node = this.element.lastChild) {
      const text = node.textContent;
      const newline = text.lastIndexOf("\n");
      this.chars -= text.length - newline - 1;
      if (newline >= 0) {
        node.textContent = text.slice(0, newline + 1);
        break;
      }
      node.remove();
    }
    this.last = this.element.lastChild;
  }

  trim() {
    while (this.chars > KEPT_CHARS && this.element.firstChild !== this.last) {
      this.cut = true;
      this.chars -= this.element.firstChild.textContent.length;
      this.element.firstChild.remove();
    }
  }
}

/** The class list after an SGR sequence. */
function restyled(classes, parameters) {
  let set = new Set(classes.split(" ").filter(Boolean));
  const drop = (pattern) => (set = new Set([...set].filter((name) => !pattern.test(name))));
  const codes = parameters.split(/[;:]/).map(Number);
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) set.clear();
    else if (code === 1) set.add("bold");
    else if (code === 2) set.add("dim");
    else if (code === 3) set.add("italic");
    else if (code === 4) set.add("underline");
    else if (code === 22) drop(/^(bold|dim)$/);
    else if (code === 23) drop(/^italic$/);
    else if (code === 24) drop(/^underline$/);
    else if (code === 38 || code === 48) {
      const ground = code === 38 ? "fg" : "bg";
      drop(new RegExp(`^${ground}`));
      if (codes[i + 1] === 5 && codes[i + 2] < 16) set.add(`${ground}${codes[i + 2]}`);
      i += codes[i + 1] === 5 ? 2 : 4;
    } else if (code === 39) drop(/^fg/);
    else if (code === 49) drop(/^bg/);
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) {
      drop(/^fg/);
      set.add(`fg${code >= 90 ? code - 82 : code - 30}`);
    } else if ((code >= 40 && code <= 47) || (code >= 100 && code <= 107)) {
      drop(/^bg/);
      set.add(`bg${code >= 100 ? code - 92 : code - 40}`);
    }
  }
  return [...set].join(" ");
}
