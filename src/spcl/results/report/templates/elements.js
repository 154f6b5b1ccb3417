// Data of the page, elements, sortable tables

const byId = (id) => document.getElementById(id);
const embedded = (id) => JSON.parse(byId(id).textContent);
const { rows: columns, tables } = embedded("data");
const runs = columns.label.map((_, id) =>
  Object.fromEntries([["id", id], ...Object.entries(columns).map(([name, values]) => [name, values[id]])]));

// -- making elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const fixed = (value) => (value === null ? "–" : value.toFixed(2).replace("-", "−"));
const signed = (value) => (value > 0 ? "+" : "") + fixed(value);
const labelled = (text) => {
  const [name, ...variant] = text.split(" ");
  return variant.length ? [name, " ", make("span", { class: "variant" }, variant.join(" "))] : [name];
};
const capitalised = (text) => text[0].toUpperCase() + text.slice(1);
const short = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);
const duration = (seconds) =>
  seconds === null ? "–" : seconds < 120 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;

// -- sorting tables

const sortHeader = (text, kind = "") =>
  make("th", { scope: "col", class: kind }, make("button", { type: "button", class: "sort" }, text));

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === "") return 1;
  if (b === null || b === "") return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function turn(header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  return descending ? -1 : 1;
}

function cellValue(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable button.sort");
  if (!button) return;
  const header = button.closest("th");
  const body = header.closest("table").tBodies[0];
  const direction = turn(header);
  const known = (value) => value !== "";
  const order = [...body.rows].map((row) => [cellValue(row, header.cellIndex), row]);
  order.sort(([a], [b]) => (known(a) && known(b) ? direction : 1) * compare(a, b));
  body.append(...order.map(([, row]) => row));
});
