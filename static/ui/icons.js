// Line icons on a grid of 16 by 16, decoration only: what they mean is said in words beside them.

const PATHS = {
  plus: "M8 3v10M3 8h10",
  back: "M10 3 5 8l5 5",
  play: "M5 3.5v9l7-4.5z",
  stop: "M4.5 4.5h7v7h-7z",
  trash: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.500 8.5h6l.500-8.5",
  send: "M8 13V3M4 7l4-4 4 4",
  again: "M12.5 8a4.5 4.5 0 1 1-1.5-3.3M11.5 2v3h-3",
  copy: "M6 6h7v7H6zM10 6V3H3v7h3",
  paste: "M4 4h8v9H4zM6 4V2.5h4V4",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.5 10.5 13.5 13.5",
  bell: "M4 11V7.5a4 4 0 0 1 8 0V11l1 1.5H3zM7 14h2",
  close: "M4 4l8 8M12 4l-8 8",
  tool: "M4.5 5 7.5 8l-3 3M8.5 11.5h3.5",
  grid: "M3 3h4v4H3zM9 3h4v4H9zM3 9h4v4H3zM9 9h4v4H9z",
  out: "M6.5 3H3v10h3.5M7 8h6.5M11 5.5 13.5 8 11 10.5",
  eye: "M1.5 8S4 3.5 8 3.5 14.5 8 14.5 8 12 12.5 8 12.5 1.5 8 1.5 8zM8 9.5a1.5 1.5 0 1 0 0-3 1.5 1.5 0 0 0 0 3z",
  down: "M8 3v7M4.5 7 8 10.5 11.5 7M3 13h10",
};
const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
