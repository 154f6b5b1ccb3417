// The page of a service: state that the events build up, drawn once a second

import { drawCurves, drawLanes } from "./charts.js";
import { byId, bytes, clock, colour, dashes, duration, make, number, onThemeChange, svg } from "./elements.js";
import { follow } from "./stream.js";

const MOST_EVENTS = 100;
const MOST_MARKS = 1000; // on the time line
const LEAST_SPAN = 20; // seconds on the time axis
const RECENT = 10; // seconds over which rates are counted
const MOST_OPEN = 8; // sources of a task that are listed before somebody asks for them

const state = { buckets: [], interval: 1, status: null, events: [], marks: [], order: new Map(), chosen: null, open: new Map() };

// -- what the events say

function update({ reset, interval, buckets, status, time }) {
  const first = buckets[0]?.start ?? Infinity;
  const kept = reset ? [] : state.buckets.filter(({ start }) => start < first);
  Object.assign(state, { buckets: [...kept, ...buckets], interval, status, time });
  for (const { name } of status.tasks) if (!state.order.has(name)) state.order.set(name, state.order.size);
  draw();
}

function note(name, event) {
  state.events.unshift([name, event]);
  state.events.length = Math.min(state.events.length, MOST_EVENTS);
  if (name === "task") state.marks = [...state.marks.slice(1 - MOST_MARKS), event];
}

function receive(name, data) {
  if (name === "update") update(data);
  else note(name, data);
}

// -- drawing

const isFaded = (name) => state.chosen !== null && state.chosen !== name;
const newest = (field, name) => state.buckets.findLast((bucket) => name in bucket[field])?.[field][name] ?? null;

function series(field, factor = 1) {
  return state.status.tasks.map(({ name }) => ({
    name,
    stroke: colour(state.order.get(name)),
    dash: dashes(state.order.get(name)),
    faded: isFaded(name),
    points: state.buckets.filter((bucket) => name in bucket[field]).map((bucket) => [bucket.start, factor * bucket[field][name]]),
  }));
}

const KAPPAS = { before: "var(--soft)", after: "var(--link)" };

function kappas() {
  return Object.entries(KAPPAS).map(([name, stroke]) => ({
    name, stroke, dash: "", faded: false,
    points: state.buckets.filter((bucket) => name in bucket.kappas).map((bucket) => [bucket.start, bucket.kappas[name]]),
  }));
}

function drawCharts() {
  const to = Math.max(state.time, (state.buckets.at(-1)?.start ?? 0) + state.interval);
  const from = Math.min(state.buckets[0]?.start ?? to, to - LEAST_SPAN);
  const axis = { from, to, interval: state.interval };
  const lanes = state.status.tasks.map(({ name }) => ({ name, index: state.order.get(name), faded: isFaded(name) }));
  drawLanes(byId("lanes"), lanes, state.buckets, state.marks, axis);
  drawCurves(byId("losses"), "Losses", series("losses"), { ...axis, log: true });
  drawCurves(byId("accuracies"), "Accuracies", series("accuracies", 100), { ...axis, range: [0, 100] });
  drawCurves(byId("kappas"), "Condition numbers", kappas(), { ...axis, log: true });
  drawCurves(byId("lags"), "Lags", series("lags"), { ...axis, log: true, floor: 0.1, format: duration });
}

function recentRate(count) {
  const begin = Math.max(state.time - Math.max(RECENT, 2 * state.interval), state.buckets[0]?.start ?? state.time);
  const recent = state.buckets.filter(({ start }) => start >= begin);
  const seconds = state.time - (recent[0]?.start ?? state.time);
  return seconds > 0 ? recent.reduce((sum, bucket) => sum + count(bucket), 0) / seconds : null;
}

function drawFacts() {
  const { status } = state;
  const all = ({ samples }) => Object.values(samples).reduce((sum, value) => sum + value, 0);
  const running = `${status.tasks.filter(({ state: each }) => each === "running").length} running of ${status.tasks.length}`;
  const tasks = byTask().length;
  const facts = {
    Steps: number(status.steps),
    Samples: number(status.samples),
    "Steps a second": number(recentRate(({ steps }) => steps)),
    "Samples a second": number(recentRate(all)),
    ...(tasks === status.tasks.length ? { Tasks: running } : { Tasks: number(tasks), Sources: running }),
    Memory: `${number(status.memory_samples)} (${bytes(status.memory_bytes)})`,
    Checkpoint: status.checkpoint_age === null ? "none yet" : `${duration(status.checkpoint_age)} ago`,
    Uptime: duration(status.uptime),
  };
  byId("facts").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function line(stroke, dash = "") {
  const style = { stroke, "stroke-width": 3, "stroke-dasharray": dash };
  return svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, ...style }));
}

function sample(name) {
  const index = state.order.get(name);
  return line(colour(index), dashes(index));
}

function drawLegend() {
  const legend = byId("legend");
  const names = state.status.tasks.map(({ name }) => name);
  const key = JSON.stringify([names, state.chosen, colour(0)]);
  if (legend.dataset.key === key) return; // a button that is replaced loses the focus
  legend.dataset.key = key;
  legend.replaceChildren(...names.map((name) => {
    const button = make("button", { type: "button", "aria-pressed": state.chosen === name }, sample(name), name);
    button.addEventListener("click", () => {
      state.chosen = state.chosen === name ? null : name;
      draw();
    });
    return make("li", {}, button);
  }));
}

// The sources of every task, tasks in the order in which they were seen.
function byTask() {
  const groups = new Map();
  for (const source of state.status.tasks) groups.set(source.task, [...(groups.get(source.task) ?? []), source]);
  return [...groups];
}

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const kindOf = ({ kind, classes }) => (kind === "classification" ? `${classes} classes` : kind ?? "–");
const sum = (sources, field) => sources.reduce((total, source) => total + source[field], 0);

function mean(field, sources) {
  const values = sources.map(({ name }) => newest(field, name)).filter((value) => value !== null);
  return values.length ? values.reduce((total, value) => total + value, 0) / values.length : null;
}

// A row of the table: of a source, or of all sources of a task.
function row(kind, name, says, sources, what) {
  const heads = [...document.querySelectorAll("#tasks thead th")].map((head) => head.textContent);
  const values = [
    ["wrap", says], ["", what], ["number", number(sum(sources, "samples"))],
    ["number", number(mean("losses", sources))], ["number", percent(mean("accuracies", sources))],
    ["number", duration(Math.max(...sources.map((source) => source.lag_seconds)))],
    ...["backlog", "skipped", "dead_letters", "late"].map((field) => ["number", number(sum(sources, field))]),
  ];
  return make("tr", { class: kind }, make("th", { scope: "row" }, ...name),
    ...values.map(([style, value], column) => make("td", { class: style, "data-head": heads[column + 1] }, value)));
}

function rowOf(source, kind) {
  const says = [source.state, ...(source.waits_for ? [`waits for ${source.waits_for}`] : [])].join("; ");
  const encoder = source.encoder === null ? "" : `encoder ${source.encoder.name ?? source.encoder}`;
  const what = kind ? encoder || "–" : [kindOf(source), encoder].filter(Boolean).join(", ");
  return row(kind, [sample(source.name), " ", source.name], says, [source], what);
}

function rowsOf([task, sources]) {
  if (sources.length === 1 && sources[0].name === task) return [rowOf(sources[0], "")];
  const isOpen = state.open.get(task) ?? sources.length <= MOST_OPEN;
  const button = make("button", { type: "button", "aria-expanded": isOpen, "data-task": task }, task);
  button.addEventListener("click", () => {
    state.open.set(task, !isOpen);
    drawTasks();
  });
  const counts = [...new Set(sources.map((source) => source.state))]
    .map((each) => `${sources.filter((source) => source.state === each).length} ${each}`).join(", ");
  const known = sources.find(({ kind }) => kind !== null) ?? sources[0];
  const group = row("group", [button], `${sources.length} source${sources.length === 1 ? "" : "s"}: ${counts}`, sources, kindOf(known));
  return [group, ...(isOpen ? sources.map((source) => rowOf(source, "member")) : [])];
}

function drawTasks() {
  const focused = document.activeElement?.dataset.task;
  byId("task-rows").replaceChildren(...byTask().flatMap(rowsOf));
  if (focused !== undefined) document.querySelector(`#task-rows [data-task="${CSS.escape(focused)}"]`)?.focus();
}

function described(name, event) {
  if (name === "task") return [`${event.task || "the service"} ${event.kind}${event.text ? `: ${event.text}` : ""}`, ["failed", "late", "refused"].includes(event.kind)];
  if (name === "dead-letter") return [`${event.task}: batch ${event.position} refused: ${event.reason}`, true];
  if (name === "save-failed") return [`no checkpoint could be saved after step ${number(event.step)}: ${event.reason}`, true];
  return [`checkpoint after step ${number(event.step)}: ${bytes(event.bytes)} in ${duration(event.seconds)}`, false];
}

function drawEvents() {
  byId("event-list").replaceChildren(...state.events.map(([name, event]) => {
    const [text, isBad] = described(name, event);
    return make("li", {}, make("time", {}, clock(event.time)), make("span", { class: isBad ? "text bad" : "text" }, text));
  }));
}

function draw() {
  if (!state.status) return;
  drawFacts();
  drawLegend();
  drawCharts();
  drawTasks();
  drawEvents();
}

// -- the connection

const KEY = "spcl-token";

function askToken() {
  const form = byId("login");
  byId("login-note").textContent = sessionStorage.getItem(KEY) ? "the service has another token" : "";
  form.hidden = false;
  byId("token").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("token").value);
      form.hidden = true;
      resolve();
    }, { once: true });
  });
}

byId("kappa-legend").replaceChildren(...Object.entries(KAPPAS).map(([name, stroke]) =>
  make("li", {}, line(stroke), ` ${name} the method`)));
onThemeChange(draw);
new ResizeObserver(draw).observe(byId("content"));
follow("events", {
  token: () => sessionStorage.getItem(KEY),
  askToken,
  onState: (name, text) => Object.assign(byId("connection"), { textContent: text }).setAttribute("data-state", name),
  onOpen: () => Object.assign(state, { buckets: [], events: [], marks: [] }),
  onMessage: receive,
});
