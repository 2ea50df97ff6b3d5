// Markdown into elements. The libraries come with the first text; without them it is shown as it is.

import { redraw } from "./dom.js";

const MARKDOWN_CHARS = 200_000; // what is longer is shown as it is

let ready; // a promise of the renderer

const TAGS = ["a", "b", "blockquote", "br", "code", "del", "details", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
  "kbd", "li", "ol", "p", "pre", "s", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"];

async function load() {
  const [{ Marked }, { default: purify }] = await Promise.all([
    import("./vendor/marked.esm.js"), import("./vendor/purify.es.mjs")]);
  const marked = new Marked({
    gfm: true,
    breaks: true,
    renderer: {
      image: ({ href, text }) => `<a href="${attribute(href)}">${attribute(text || href)}</a>`, // nothing is fetched
      html: ({ text }) => attribute(text), // as it came: not even the parser gets to see an attribute like onerror
      checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    },
  });
  purify.addHook("afterSanitizeAttributes", (node) => {
    if (node.tagName !== "A") return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  });
  return (text) => purify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "align", "start", "open"], ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true,
  });
}

// A mark in a line, and what is shown for it. Where a first group matches code nothing is a mark.
const MARKS = [
  [/^\s*(?:>\s?)+/, ""],
  [/^(\s*)[-*+] \[ \] /, "$1☐ "],
  [/^(\s*)[-*+] \[x\] /i, "$1☑ "],
  [/^(\s*)[-*+] /, "$1• "],
  [/^\s*#{1,6}\s+(?=\S)(.*?)\s*#*$/, "$1"],
  [/^\s*\|(.*?)\|?\s*$/, (_, cells) => cells.split(/\s*(?<!\\)\|\s*/).join(" · ").trim()],
  [/(`+[^`]+`+)|!?\[([^\]]*)\]\([^)]*\)/g, "$1$2"],
  [/(`+[^`]+`+)|<(https?:[^>\s]*)>/g, "$1$2"],
  [/(`+[^`]+`+)|(?<![\w\\])(\*\*|__|~~)(?=\S)(.*?\S)\2(?!\w)/g, "$1$3"],
  [/(`+[^`]+`+)|(?<![\w\\*_])([*_])(?=[^\s*_])(.*?[^\s\\])\2(?!\w)/g, "$1$3"],
  [/(`+[^`]+`+)|\\([!-/:-@[-`{-~])/g, "$1$2"],
  [/`+([^`]+)`+/g, "$1"],
];
// A line below a table's head, below a title, or by itself.
const RULE = /^[\s|:]*-[\s|:-]*$|^\s*(?:(?:[*_]\s*){3,}|=+\s*)$/;

/** Lines of Markdown, none of them long, without their marks. */
export function plain(lines) {
  let code = false;
  return lines.flatMap((line) => {
    if (/^\s*(```|~~~)/.test(line)) {
      code = !code;
      return [];
    }
    if (code) return [line];
    if (RULE.test(line)) return [];
    return [MARKS.reduce((text, [mark, shown]) => text.replace(mark, shown), line)];
  }).filter((line, index, all) => line.trim() || all[index - 1]?.trim());
}

const attribute = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** What a renderer makes of a text; null where it fails, as at deep nesting, or shows nothing. */
function attempt(markdown, text) {
  try {
    const formatted = markdown?.(text);
    return formatted?.textContent.trim() ? formatted : null;
  } catch {
    return null;
  }
}

/** Show text in an element; called again while the text grows. */
export function render(element, text) {
  element.source = text;
  if (element.rendering) return;
  element.rendering = true;
  ready ??= load().catch(load).catch(() => null);
  ready.then(async (markdown) => {
    await new Promise((done) => setTimeout(done, element.childNodes.length ? 60 : 0)); // not for every letter
    element.rendering = false;
    const formatted = element.source.length <= MARKDOWN_CHARS && attempt(markdown, element.source);
    element.classList.toggle("plain", !formatted);
    const scrolled = formatted ? formatted.querySelectorAll("pre, table") : [];
    for (const part of scrolled) part.tabIndex = 0; // by keyboard
    redraw(element, formatted ? [...formatted.childNodes] : element.source);
  });
}
