// Charts of curves over time, and the time line of tasks

import { clock, colour, make, number, svg } from "./elements.js";

const HEIGHT = 190;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 24 };

// -- scales

const linear = (from, to, low, high) => (value) => low + ((value - from) / (to - from || 1)) * (high - low);

function timeTicks(from, to, room) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((each) => (to - from) / each <= room) ?? steps.at(-1) * Math.ceil((to - from) / (steps.at(-1) * room));
  const zone = new Date().getTimezoneOffset() * 60; // ticks at whole hours and days of the reader's clock
  const ticks = [];
  for (let time = Math.ceil((from - zone) / step) * step + zone; time <= to; time += step) ticks.push(time);
  return ticks;
}

function valueScale(values, { log, range, floor = 0 }) {
  if (range) return { low: range[0], high: range[1], ticks: [0, 25, 50, 75, 100], turn: (value) => value };
  if (log) {
    const turn = (value) => Math.log10(Math.max(value, floor, 1e-9));
    const logs = values.map(turn);
    let [low, high] = [Math.min(...logs), Math.max(...logs)];
    if (!logs.length) [low, high] = [0, 1];
    if (high - low < 0.5) [low, high] = [low - 0.25, high + 0.25];
    const ticks = [];
    for (let power = Math.floor(low) - 1; power <= Math.ceil(high); power += 1) {
      const parts = high - low > 4 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
      for (const part of parts) ticks.push(part * 10 ** power);
    }
    const shown = ticks.filter((tick) => tick >= floor && turn(tick) >= low && turn(tick) <= high);
    const every = Math.ceil(shown.length / 6);
    return { low, high, turn, ticks: shown.filter((_, index) => index % every === 0) };
  }
  const high = Math.max(...values, 1e-9);
  return { low: 0, high, ticks: [0, high / 2, high], turn: (value) => value };
}

// -- curves

function pathOf(points, x, y, gap) {
  let text = "";
  let before = -Infinity;
  for (const [time, value] of points) {
    const place = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    text += time - before > gap ? `M${place}h0` : `L${place}`; // a point alone is drawn as a dot
    before = time;
  }
  return text;
}

function timeAxis(area, from, to, x, width, height, bottom) {
  for (const time of timeTicks(from, to, Math.max(2, Math.floor(width / 95)))) {
    const middle = Math.min(Math.max(x(time), 28), width - 28);
    area.append(svg("text", { x: middle, y: height - 6, "text-anchor": "middle" }, clock(time, to - from)));
    area.append(svg("line", { class: "grid", x1: x(time), x2: x(time), y1: bottom, y2: bottom + 4 }));
  }
}

export function drawCurves(element, label, series, { from, to, interval, format = number, ...scaling }) {
  const width = element.clientWidth;
  const bottom = HEIGHT - MARGIN.bottom;
  const scale = valueScale(series.flatMap(({ points }) => points.map(([, value]) => value)), scaling);
  const x = linear(from, to, MARGIN.left, width - MARGIN.right);
  const rise = linear(scale.low, scale.high, bottom, MARGIN.top);
  const y = (value) => rise(scale.turn(value));
  const area = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": label });
  for (const tick of scale.ticks) {
    area.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }));
    area.append(svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  timeAxis(area, from, to, x, width, HEIGHT, bottom);
  for (const { points, stroke, dash, faded } of series) {
    const style = { class: faded ? "curve faded" : "curve", stroke, "stroke-dasharray": dash };
    area.append(svg("path", { ...style, d: pathOf(points, x, y, 10.5 * interval) }));
  }
  const line = svg("line", { class: "pointer", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  area.append(line);
  const readout = make("div", { class: "readout" }, latest(element, series, format, x, line, width));
  area.addEventListener("pointermove", (event) => {
    element.dataset.pointer = event.offsetX;
    readout.textContent = latest(element, series, format, x, line, width);
  });
  area.addEventListener("pointerleave", () => {
    delete element.dataset.pointer;
    readout.textContent = latest(element, series, format, x, line, width);
  });
  element.replaceChildren(area, readout);
}

// The values at the pointer, or the latest ones where there are few curves.
function latest(element, series, format, x, line, width) {
  const pointer = element.dataset.pointer;
  const shown = series.filter(({ faded, points }) => !faded && points.length);
  if (pointer === undefined) {
    line.setAttribute("visibility", "hidden");
    return shown.length > 8 ? "" : shown.map(({ name, points }) => `${name} ${format(points.at(-1)[1])}`).join(" · ");
  }
  const at = Math.min(Math.max(Number(pointer), MARGIN.left), width - MARGIN.right);
  for (const [name, value] of Object.entries({ x1: at, x2: at, visibility: "visible" })) line.setAttribute(name, value);
  const distance = ([time]) => Math.abs(x(time) - at);
  const near = shown.map(({ name, points }) => [name, points.reduce((a, b) => (distance(b) < distance(a) ? b : a))]);
  const there = near.filter(([, point]) => distance(point) < 12);
  const time = there.length ? `${clock(there[0][1][0])}: ` : "";
  return time + there.slice(0, 12).map(([name, [, value]]) => `${name} ${format(value)}`).join(" · ");
}

// -- the time line: a lane per task, darker where more samples came

const SHADES = 4; // one path for each keeps many tasks quick to draw

// Group the places of all rates above 0 by how they compare with the largest.
function shades(rates) {
  const most = Math.max(...rates);
  const groups = Array.from({ length: SHADES }, () => []);
  rates.forEach((rate, place) => rate && groups[Math.ceil(Math.sqrt(rate / most) * SHADES) - 1].push(place));
  return groups;
}

const SIGNS = { started: "▷", ended: "◼", failed: "✕", recovered: "↻" };

export function drawLanes(element, tasks, buckets, marks, { from, to, interval }) {
  const width = element.clientWidth;
  const lane = tasks.length > 24 ? 14 : 26;
  const left = Math.min(120, Math.max(56, width * 0.22));
  const height = tasks.length * lane + MARGIN.bottom + 4;
  const x = linear(from, to, left, width - MARGIN.right);
  const area = svg("svg", { width, height, role: "img", "aria-label": "When each task had samples" });
  const barWidth = (Math.max(1, x(from + interval) - x(from)) + 0.3).toFixed(1);
  tasks.forEach(({ name, index, faded }, row) => {
    const top = row * lane + 2;
    const group = svg("g", { class: faded ? "faded" : "" });
    const letters = Math.floor(left / 7.2) - 1;
    const short = name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
    group.append(svg("text", { class: "name", x: 0, y: top + lane / 2 + 4 }, short, svg("title", {}, name)));
    group.append(svg("line", { class: "grid", x1: left, x2: width - MARGIN.right, y1: top + lane - 3, y2: top + lane - 3 }));
    shades(buckets.map((bucket) => bucket.samples[name] ?? 0)).forEach((places, shade) => {
      const bars = places.map((place) => `M${x(buckets[place].start).toFixed(1)} ${top}h${barWidth}v${lane - 4}h-${barWidth}z`);
      group.append(svg("path", { d: bars.join(""), fill: colour(index), "fill-opacity": (shade + 1) / SHADES }));
    });
    area.append(group);
  });
  const rows = new Map(tasks.map(({ name }, row) => [name, row]));
  for (const { task, kind, time, text } of marks) {
    if (!rows.has(task) || !SIGNS[kind] || time < from) continue;
    const place = { class: "name", x: Math.min(x(time), width - 8), y: rows.get(task) * lane + lane / 2 + 6, "text-anchor": "middle" };
    area.append(svg("text", place, SIGNS[kind], svg("title", {}, `${clock(time)} ${task} ${kind}: ${text}`)));
  }
  timeAxis(area, from, to, x, width, height, height - MARGIN.bottom);
  element.replaceChildren(area);
}
