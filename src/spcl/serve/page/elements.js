// Elements, theme, colours, numbers

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// -- theme

const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
export const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

export function onThemeChange(redraw) {
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  prefersDark.addEventListener("change", redraw);
}

// -- the look of the task with this number: six colours, then the same with dashes

const OKABE_ITO = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const ON_DARK = ["#FF8A3D", "#5AA9FF", "#2FC79A", "#E6A1C6", "#F0B93A", "#8FD0F5"];
const DASHES = ["", "7 4", "2 4", "9 3 2 3"];

export const colour = (index) => (isDark() ? ON_DARK : OKABE_ITO)[index % OKABE_ITO.length];
export const dashes = (index) => DASHES[Math.floor(index / OKABE_ITO.length) % DASHES.length];

// -- numbers and times

export const number = (value) =>
  value === null || value === undefined ? "–"
    : Number.isInteger(value) ? value.toLocaleString("en")
    : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en")
    : String(Number(value.toPrecision(3))).replace("-", "−");

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

export const bytes = (count) =>
  count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : count < 1e9 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e9).toFixed(2)} GB`;

const DAY = 86400;

export function clock(time, span = 0) {
  const date = new Date(time * 1000);
  const pad = (value) => String(value).padStart(2, "0");
  const minutes = `${pad(date.getHours())}:${pad(date.getMinutes())}`;
  if (span > 2 * DAY) return `${pad(date.getDate())}.${pad(date.getMonth() + 1)}. ${minutes}`;
  return span > 7200 ? minutes : `${minutes}:${pad(date.getSeconds())}`;
}
