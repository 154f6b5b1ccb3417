"use strict";
(() => {
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

  // -- charts

  const OKABE_ITO = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
  const ON_DARK = ["#FF8A3D", "#5AA9FF", "#2FC79A", "#E6A1C6", "#F0B93A", "#8FD0F5"];
  const paint = (place) => (isDark() ? ON_DARK : OKABE_ITO)[place % OKABE_ITO.length];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "cross", "x"];
  const CONFIG = { responsive: true, displayModeBar: false };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const charts = new Map();

  // Optuna's plots are made for white paper, like the figures: the style sheet inverts them on a dark page.
  const ON_PAPER = { "--text": "#1c2128", "--soft": "#57606a", "--card": "#ffffff", "--line": "#d5dae1" };

  function themed(layout, onPaper) {
    const ink = onPaper ? (name) => ON_PAPER[name] : colour;
    const axis = { gridcolor: ink("--line"), zerolinecolor: ink("--line"), automargin: true, fixedrange: true };
    const result = {
      dragmode: false,
      margin: { l: 50, r: 15, t: 10, b: 40 },
      ...layout,
      font: { color: ink("--text"), family: "system-ui, sans-serif", size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--soft"), font: { color: ink("--text") } },
    };
    const names = new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis/.test(name))]);
    for (const name of names) result[name] = { ...layout[name], ...axis };
    return result;
  }

  function render(element) {
    const { traces, layout } = charts.get(element)();
    Plotly.react(element, traces, themed(layout, element.dataset.tuning !== undefined), CONFIG);
    element.style.minHeight = 0; // room was kept for it only until now
  }

  function draw(element, build) {
    charts.set(element, build);
    render(element);
  }

  function redrawAll() {
    for (const element of charts.keys()) if (element.isConnected) render(element);
  }

  function chart(label, height) {
    return make("div", { class: "chart", role: "img", "aria-label": label, style: `height: ${height}px` });
  }

  // -- charts about all runs

  function resultChart(table, benchmark) {
    const shown = table.rows.filter((row) => row.cells[benchmark]).reverse();
    const cells = shown.map((row) => row.cells[benchmark]);
    const places = shown.map((_, place) => place);
    const names = shown.map((row) => row.method);
    const paper = cells.map((cell) => cell.paper?.accuracy ?? null);
    const traces = [{
      type: "scatter", mode: "markers", name: "ours", x: cells.map((cell) => cell.accuracy.mean), y: places, text: names,
      error_x: { type: "data", array: cells.map((cell) => cell.accuracy.std ?? 0), color: paint(1) },
      marker: { color: paint(1), size: 9 },
      customdata: cells.map((cell) => [cell.accuracy.std ?? 0, cell.forgetting.mean, cell.runs]),
      hovertemplate: "%{text}: A %{x:.2f} ± %{customdata[0]:.2f}, F %{customdata[1]:.2f}, %{customdata[2]} runs<extra></extra>",
    }];
    if (paper.some((value) => value !== null)) {
      traces.push({
        type: "scatter", mode: "markers", name: "paper", x: paper, y: places, text: names,
        marker: { color: paint(0), size: 10, symbol: "diamond-open", line: { width: 2 } },
        hovertemplate: "%{text} in the paper: A %{x:.2f}<extra></extra>",
      });
    }
    return {
      traces,
      layout: {
        height: 90 + 24 * names.length, showlegend: traces.length > 1, legend: { orientation: "h", y: 1, yanchor: "bottom" },
        margin: { l: 50, r: 15, t: traces.length > 1 ? 30 : 10, b: 40 },
        xaxis: { title: { text: "accuracy (%)" } }, yaxis: { tickvals: places, ticktext: names.map(short) },
      },
    };
  }

  function tuningChart(plot) {
    const { template, title, width, height, ...layout } = plot.layout ?? {};
    return { traces: plot.data, layout: { ...layout, height: 380, margin: { l: 50, r: 15, t: 30, b: 40 } } };
  }

  const whenSeen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      whenSeen.unobserve(target);
      const { table, benchmark, tuning, plot } = target.dataset;
      if (table !== undefined) draw(target, () => resultChart(tables[table], benchmark));
      else draw(target, () => tuningChart(structuredClone(embedded("tunings")[tuning][plot])));
    }
  }, { rootMargin: "300px" });
  for (const element of document.querySelectorAll("#content .chart")) whenSeen.observe(element);

  // -- the list of runs

  const COLUMNS = [
    ["Method", "method", ""], ["Benchmark", "benchmark", ""], ["Scenario", "scenario", ""],
    ["Configuration", "config", "number"], ["Seed", "seed", "number"], ["A", "accuracy", "number"],
    ["F", "forgetting", "number"], ["Steps", "steps", "number"], ["Training", "seconds", "number"],
  ];
  const PAGE = 100;
  const list = { cell: null, words: [], key: null, direction: 1, length: PAGE };
  const nameOf = (run) => `${run.method} on ${run.benchmark}, ${run.scenario}-incremental, configuration ${run.config}, seed ${run.seed}`;

  function matches(run) {
    const { cell, words } = list;
    if (cell && (run.scenario !== cell[0] || run.benchmark !== cell[1] || run.label !== cell[2])) return false;
    const text = nameOf(run).toLowerCase();
    return words.every((word) => text.includes(word));
  }

  function runRow(run) {
    const number = (text) => make("td", { class: "number" }, text);
    return make("tr", {},
      make("th", { scope: "row" }, make("a", { href: `#/run/${run.id}` }, ...labelled(run.method))),
      make("td", {}, run.benchmark), make("td", {}, run.scenario), number(run.config), number(run.seed),
      number(run.accuracy === null ? "unfinished" : fixed(run.accuracy)), number(signed(run.forgetting)),
      number(run.steps ?? "–"), number(duration(run.seconds)));
  }

  function showList() {
    const found = runs.filter(matches);
    const { key, direction } = list;
    if (key) found.sort((a, b) => (a[key] === null || b[key] === null ? 1 : direction) * compare(a[key], b[key]));
    byId("run-list").tBodies[0].replaceChildren(...found.slice(0, list.length).map(runRow));
    byId("found").textContent = `${found.length} of ${runs.length} runs${list.cell ? ` (${list.cell.join(", ")})` : ""}`;
    byId("everything").hidden = list.cell === null;
    byId("more").hidden = found.length <= list.length;
  }

  byId("run-list").tHead.rows[0].append(...COLUMNS.map(([text, , kind]) => sortHeader(text, kind)));
  byId("run-list").tHead.addEventListener("click", (event) => {
    const header = event.target.closest("th");
    if (!header) return;
    list.direction = turn(header);
    list.key = COLUMNS[header.cellIndex][1];
    showList();
  });
  byId("find").addEventListener("input", (event) => {
    list.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    list.length = PAGE;
    showList();
  });
  byId("more").addEventListener("click", () => {
    list.length += 5 * PAGE;
    showList();
  });

  // -- the page of a run

  let packed = null;

  async function details(id) {
    packed ??= embedded("details");
    const bytes = Uint8Array.from(atob(packed[id]), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  function timelineChart({ names, classes, timeline }) {
    const steps = Math.max(...timeline.map(([, last]) => last)) + 1;
    const memory = Math.min(...timeline.map(([, last]) => last)) + 1;
    const bars = timeline.map(([first, last]) => last + 1 - first);
    const traces = [{
      type: "bar", orientation: "h", y: names, x: bars, base: timeline.map(([first]) => first),
      marker: { color: names.map((_, task) => paint(task)) },
      customdata: timeline.map(([first, last], task) => [first, last, classes[task]]),
      hovertemplate: "%{y}: steps %{customdata[0]} to %{customdata[1]}, %{customdata[2]} classes<extra></extra>",
    }];
    if (memory < steps) {
      traces.push({
        type: "bar", orientation: "h", y: ["memory"], x: [steps - memory], base: [memory],
        marker: { color: "rgba(0,0,0,0)", line: { color: colour("--soft"), width: 1 }, pattern: { shape: "/", fgcolor: colour("--soft") } },
        hovertemplate: `memory: from step ${memory}<extra></extra>`,
      });
    }
    return {
      traces,
      layout: {
        height: 70 + 26 * (names.length + 1), showlegend: false, barmode: "overlay", bargap: 0.25,
        xaxis: { title: { text: "step" }, range: [0, steps] }, yaxis: { autorange: "reversed", type: "category" },
      },
    };
  }

  function matrixChart({ names, evaluations: { step, ended, accuracy } }) {
    const ends = step.map((_, place) => place).filter((place) => ended[place].length);
    const values = accuracy.map((task) => ends.map((place) => task[place]));
    return {
      traces: [{
        type: "heatmap", z: values, y: names, x: ends.map((place) => `${ended[place].join(", ")}<br>${step[place]}`),
        colorscale: "Cividis", zmin: 0, zmax: Math.max(...values.flat()), xgap: 2, ygap: 2, hoverongaps: false, colorbar: { title: { text: "%" }, thickness: 12 },
        customdata: values.map(() => ends.map((place) => [ended[place].join(", "), step[place]])),
        texttemplate: names.length <= 12 ? "%{z:.0f}" : "",
        hovertemplate: "%{y} when %{customdata[0]} ended (step %{customdata[1]}): %{z:.2f} %<extra></extra>",
      }],
      layout: {
        height: 110 + 30 * names.length,
        xaxis: { title: { text: "task that ended, and at which step" }, type: "category" },
        yaxis: { autorange: "reversed", type: "category" },
      },
    };
  }

  function accuracyChart({ names, evaluations: { step, accuracy } }) {
    return {
      traces: names.map((name, task) => ({
        type: "scatter", mode: "lines+markers", name, x: step, y: accuracy[task],
        line: { color: paint(task), dash: DASHES[Math.floor(task / OKABE_ITO.length) % DASHES.length] },
        marker: { symbol: SYMBOLS[task % SYMBOLS.length], size: 5 },
        hovertemplate: `${name}: %{y:.2f} %<extra></extra>`,
      })),
      layout: { height: 320, hovermode: "x unified", hoverdistance: -1, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "accuracy (%)" } } },
    };
  }

  const MEASURES = [
    ["condition_number", "Condition number κ", "log"],
    ["cosine", "Gradient conflicts (cosine)", "linear"],
    ["magnitude_similarity", "Gradient magnitude similarity", "linear"],
  ];

  function stabilityChart({ stability }, measure, type) {
    const curve = (when, name, place) => ({
      type: "scatter", mode: "lines", name, x: stability.step, y: stability[when][measure],
      line: { color: paint(place), dash: DASHES[place], width: 1.6 },
      hovertemplate: `${name}: %{y:.4~g}<extra></extra>`,
    });
    return {
      traces: [curve("before", "original", 1), curve("after", "adjusted", 0)],
      layout: {
        height: 260, hovermode: "x unified", hoverdistance: -1, margin: { l: 50, r: 15, t: 30, b: 40 },
        legend: { orientation: "h", y: 1, yanchor: "bottom" },
        xaxis: { title: { text: "step" } }, yaxis: { type },
      },
    };
  }

  function taskTable({ names, classes, timeline, tasks }) {
    const headings = ["Task", "Classes", "First step", "Last step", "A when it ended", "A at the end", "Change"];
    const row = (name, task) => {
      const { at_end: atEnd, final } = tasks?.[name] ?? { at_end: null, final: null };
      const change = atEnd === null || final === null ? null : final - atEnd;
      const cells = [classes[task], ...timeline[task], fixed(atEnd), fixed(final), signed(change)];
      const values = [classes[task], ...timeline[task], atEnd, final, change];
      return make("tr", {}, make("th", { scope: "row" }, name),
        ...cells.map((text, place) => make("td", { class: "number", "data-value": values[place] ?? "" }, text)));
    };
    return make("div", { class: "scroll", tabindex: 0 },
      make("table", { class: "sortable" },
        make("caption", { class: "hidden" }, "Tasks of this run"),
        make("thead", {}, make("tr", {}, ...headings.map((text, place) => sortHeader(text, place ? "number" : "")))),
        make("tbody", {}, ...names.map(row))));
  }

  function settingsTable(settings) {
    const row = ([name, value]) =>
      make("tr", {}, make("th", { scope: "row" }, make("code", {}, name)), make("td", { class: "wrap" }, value === null ? "–" : String(value)));
    return make("div", { class: "scroll", tabindex: 0 },
      make("table", { class: "sortable" },
        make("caption", { class: "hidden" }, "Settings of this run"),
        make("thead", {}, make("tr", {}, sortHeader("Setting"), sortHeader("Value"))),
        make("tbody", {}, ...Object.entries(settings).map(row))));
  }

  function facts(run, { environment, path, left_out: leftOut }) {
    const leftOutOf = Object.entries(leftOut ?? {}).map(([task, steps]) => `${task}: ${steps}`).join(", ");
    const entries = {
      Accuracy: run.accuracy === null ? "unfinished" : `${fixed(run.accuracy)} %`,
      Forgetting: run.forgetting === null ? "–" : `${signed(run.forgetting)} %`,
      Steps: run.steps ?? "–",
      ...(leftOutOf && { "Left out of steps (not finite)": leftOutOf }),
      Training: duration(run.seconds),
      Device: environment?.device ?? "–",
      Folder: path,
    };
    return make("dl", { class: "facts" },
      ...Object.entries(entries).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  }

  function others(title, found, text) {
    if (!found.length) return [];
    const items = found.slice(0, 60).map((run) => make("li", {}, make("a", { href: `#/run/${run.id}` }, text(run))));
    return [make("h3", {}, title), make("ul", { class: "others" }, ...items)];
  }

  function related(run) {
    const near = runs.filter((other) => other.id !== run.id && other.benchmark === run.benchmark && other.scenario === run.scenario);
    return make("section", {},
      make("h2", {}, "Other runs"),
      ...others("Of this method", near.filter((other) => other.label === run.label),
        (other) => `configuration ${other.config}, seed ${other.seed}`),
      ...others("Of other methods, same configuration and seed",
        near.filter((other) => other.label !== run.label && other.config === run.config && other.seed === run.seed),
        (other) => `${other.method} (${fixed(other.accuracy)} %)`));
  }

  const figure = (element, caption) => make("figure", {}, element, make("figcaption", {}, caption));

  async function showRun(id) {
    const run = runs[id];
    const found = await details(id);
    const page = byId("run");
    const cell = [run.scenario, run.benchmark, run.label].map(encodeURIComponent).join("/");
    page.replaceChildren(
      make("p", {}, make("a", { href: "#runs" }, "All runs"), " › ", make("a", { href: `#/runs/${cell}` }, `${run.method} on ${run.benchmark}`)),
      make("h1", {}, nameOf(run)),
      make("section", {}, facts(run, found)));
    document.title = `${nameOf(run)} – SPCL report`;
    const drawings = [];
    if (found.problem) page.append(make("section", {}, make("p", {}, found.problem)));
    if (found.names?.length) {
      const timeline = chart(`Timeline of ${found.names.length} tasks; the steps are in the table below`, 70 + 26 * (found.names.length + 1));
      const section = make("section", {}, make("h2", {}, "Tasks"),
        figure(timeline, "Which task trains when; the memory (hatched) starts when the first task has ended."), taskTable(found));
      drawings.push([timeline, () => timelineChart(found)]);
      page.append(section);
    }
    if (found.evaluations?.step.length) {
      const matrix = chart("Accuracy of every task whenever a task ended", 110 + 30 * found.names.length);
      const section = make("section", {}, make("h2", {}, "Accuracy"), figure(matrix, "Accuracy of every task seen whenever a task ended."));
      drawings.push([matrix, () => matrixChart(found)]);
      if (found.evaluations.ended.some((ended) => !ended.length)) {
        const lines = chart("Accuracy of every task over time", 320);
        section.append(figure(lines, "Accuracy of every task over time."));
        drawings.push([lines, () => accuracyChart(found)]);
      }
      page.append(section);
    }
    if (found.stability?.step.length) {
      const grid = make("div", { class: "charts" });
      for (const [measure, title, type] of MEASURES) {
        const element = chart(`${title} of the gradients, original and adjusted, over time`, 260);
        grid.append(figure(element, `${title}.`));
        drawings.push([element, () => stabilityChart(found, measure, type)]);
      }
      const shown = found.stability.step.length;
      const note = shown < found.stability.of ? ` ${shown} of ${found.stability.of} steps are shown.` : "";
      page.append(make("section", {}, make("h2", {}, "Stability"),
        make("p", {}, `The gradients of the tasks (and the memory) before and after the method adjusts them.${note}`), grid));
    }
    page.append(related(run), make("section", {}, make("h2", {}, "Settings"), settingsTable(found.settings)));
    byId("content").hidden = true;
    page.hidden = false;
    scrollTo(0, 0);
    page.focus({ preventScroll: true });
    for (const [element, build] of drawings) draw(element, build);
  }

  function leaveRun() {
    const page = byId("run");
    for (const element of page.querySelectorAll(".chart")) {
      Plotly.purge(element);
      charts.delete(element);
    }
    page.replaceChildren();
    page.hidden = true;
    byId("content").hidden = false;
    document.title = "SPCL report";
  }

  // -- where to go

  async function route() {
    const [, view, ...rest] = location.hash.split("/").map(decodeURIComponent);
    leaveRun();
    if (view === "run" && runs[rest[0]]) {
      await showRun(Number(rest[0]));
      return;
    }
    list.cell = view === "runs" && rest.length === 3 ? rest : null;
    list.length = PAGE;
    showList();
    const target = view ? byId("runs") : location.hash.length > 1 && byId(location.hash.slice(1));
    if (target) target.scrollIntoView();
  }

  // -- light and dark

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redrawAll();
  });
  prefersDark.addEventListener("change", redrawAll);

  addEventListener("hashchange", route);
  route();
})();
