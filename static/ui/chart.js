// What was used by day, in bars, and the same as a table: the bars are for the eye, a screen reader
// has the table also while it is not shown.

import { h, redraw } from "./dom.js";
import { count, dollars, grouped } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const [LEAST_DAYS, MOST_DAYS] = [14, 30];
const SERIES = 6; // with a colour of their own, of which the last is for all others
const SHOWN_ROWS = 200;
const OTHERS = "others";
const UNITS = { usd: ["Dollars", dollars], tokens: ["Tokens", grouped] };
const DAY_MILLISECONDS = 86_400_000;

/** The last days up to today, in UTC as the rows, as many as these need. */
function daysOf(rows) {
  const last = Date.parse(new Date().toISOString().slice(0, 10));
  const known = rows.map(({ day }) => Date.parse(day)).filter((day) => day <= last);
  const wanted = Math.floor((last - Math.min(...known, last)) / DAY_MILLISECONDS) + 1;
  const number = Math.min(MOST_DAYS, Math.max(LEAST_DAYS, wanted));
  return Array.from({ length: number }, (_, at) =>
    new Date(last - (number - 1 - at) * DAY_MILLISECONDS).toISOString().slice(0, 10));
}

/** The names with a colour of their own: those that used the most. */
function seriesOf(rows) {
  const totals = new Map();
  for (const { name, tokens } of rows) totals.set(name, (totals.get(name) ?? 0) + tokens);
  const names = [...totals.keys()].sort((one, other) => totals.get(other) - totals.get(one));
  return names.length <= SERIES ? names : [...names.slice(0, SERIES - 1), OTHERS];
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The bars of each day, one series upon the other; a row that has no such value has no bar. */
function barsOf(rows, days, series, unit) {
  const own = (name) => (series.includes(name) ? name : OTHERS);
  const sums = days.map((day) => series.map((name) => rows
    .filter((row) => row.day === day && own(row.name) === name)
    .reduce((sum, row) => sum + (row[unit] ?? 0), 0)));
  const most = Math.max(...sums.map((column) => column.reduce((sum, value) => sum + value, 0)), 0);
  const bars = sums.flatMap((column, at) => {
    let top = 100;
    return column.flatMap((value, number) => {
      if (!value) return [];
      const height = (value / most) * 100;
      top -= height;
      return [svg("rect", { x: at + 0.12, y: top, width: 0.76, height, class: `series-${number}` },
        svg("title", {}, `${days[at]}, ${series[number]}: ${UNITS[unit][1](value)}`))];
    });
  });
  return { bars, most };
}

function tableOf(rows, by) {
  const sorted = rows.toSorted((one, other) => (one.day < other.day ? 1 : one.day > other.day ? -1
    : other.tokens - one.tokens));
  const heads = ["Day", by[0].toUpperCase() + by.slice(1), "Tokens", "Cached", "Dollars"];
  const price = ({ usd, unpriced }) => (usd === undefined ? "no price known"
    : `${unpriced ? "at least " : ""}${dollars(usd)}`);
  const line = (row) => h("tr", {}, h("th", { scope: "row" }, row.day),
    [row.name, grouped(row.tokens), grouped(row.cached), price(row)].map((text) =>
      h("td", {}, text)));
  return h("table", {}, h("caption", {}, `What was used by day and ${by}`),
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, sorted.slice(0, SHOWN_ROWS).map(line)),
    sorted.length > SHOWN_ROWS && h("tfoot", {}, h("tr", {}, h("td", { colspan: "5" },
      `${count(sorted.length - SHOWN_ROWS, "row")} of earlier days are not shown.`))));
}

/** A chart by day and `by`: update() takes rows of { day, name } with their sums. */
export function chart(by) {
  let [rows, unit, pressed] = [[], "usd", false];
  const button = (key) => h("button", { class: "small", type: "button", onclick: () => {
    [unit, pressed] = [key, true];
    draw();
  } }, UNITS[key][0]);
  const units = { usd: button("usd"), tokens: button("tokens") };
  const plot = h("div", { class: "plot" });
  const table = h("div", { class: "usage-table unseen", tabindex: "-1" });
  const shown = h("button", { class: "quiet small", type: "button", onclick: () => {
    const hides = table.classList.toggle("unseen");
    shown.ariaExpanded = String(!hides);
    table.tabIndex = hides ? -1 : 0; // it may scroll
  }, "aria-expanded": "false" }, "As a table");
  function draw() {
    if (!pressed) unit = rows.some(({ usd }) => usd) ? "usd" : "tokens";
    for (const [key, element] of Object.entries(units)) element.ariaPressed = String(key === unit);
    const [[label, text], days, series] = [UNITS[unit], daysOf(rows), seriesOf(rows)];
    const { bars, most } = barsOf(rows, days, series, unit);
    const box = { viewBox: `0 0 ${days.length} 100`, preserveAspectRatio: "none" };
    redraw(plot,
      h("p", { class: "hint" }, `${label} by day and ${by}, at most ${text(most)} a day`),
      svg("svg", { ...box, "aria-hidden": "true" }, ...bars),
      h("p", { class: "hint ends" }, h("span", {}, days[0]), h("span", {}, days.at(-1))),
      h("ul", { class: "legend", "aria-hidden": "true" }, series.map((name, number) =>
        h("li", {}, h("span", { class: `swatch series-${number}` }), name))));
    redraw(table, tableOf(rows, by));
  }
  return {
    element: h("div", { class: "card usage-chart" }, h("div", { class: "row" },
      h("div", { class: "row", role: "group", "aria-label": "Show" }, units.usd, units.tokens),
      h("span", { class: "grow" }), shown), plot, table),
    update(given) {
      rows = given;
      draw();
    },
  };
}
