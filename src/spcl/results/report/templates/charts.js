// Charts: drawing, theme, and those about all runs

const OKABE_ITO = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const ON_DARK = ["#FF8A3D", "#5AA9FF", "#2FC79A", "#E6A1C6", "#F0B93A", "#8FD0F5"];
const paint = (index) => (isDark() ? ON_DARK : OKABE_ITO)[index % OKABE_ITO.length];
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
  element.style.height = `${layout.height}px`; // Plotly takes another height from an element without one when resized
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
  const positions = shown.map((_, index) => index);
  const names = shown.map((row) => row.method);
  const deviation = (std) => (std === null ? "" : ` ± ${fixed(std)}`);
  const paper = cells.map((cell) => cell.paper?.accuracy ?? null);
  const traces = [{
    type: "scatter", mode: "markers", name: "ours", x: cells.map((cell) => cell.accuracy.mean), y: positions, text: names,
    error_x: { type: "data", array: cells.map((cell) => cell.accuracy.std ?? NaN), color: paint(1) },
    marker: { color: paint(1), size: 9 },
    customdata: cells.map((cell) => [deviation(cell.accuracy.std), cell.forgetting.mean, cell.runs]),
    hovertemplate: "%{text}: A %{x:.2f}%{customdata[0]}, F %{customdata[1]:.2f}, %{customdata[2]} runs<extra></extra>",
  }];
  if (paper.some((value) => value !== null)) {
    traces.push({
      type: "scatter", mode: "markers", name: "paper", x: paper, y: positions, text: names,
      marker: { color: paint(0), size: 10, symbol: "diamond-open", line: { width: 2 } },
      hovertemplate: "%{text} in the paper: A %{x:.2f}<extra></extra>",
    });
  }
  return {
    traces,
    layout: {
      height: 90 + 24 * names.length, showlegend: traces.length > 1, legend: { orientation: "h", y: 1, yanchor: "bottom" },
      margin: { l: 50, r: 15, t: traces.length > 1 ? 30 : 10, b: 40 },
      xaxis: { title: { text: `${table.measure} (%)` } }, yaxis: { tickvals: positions, ticktext: names.map(short) },
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
