// Charts of one run

function timelineChart({ names, classes, timeline }) {
  const steps = Math.max(...timeline.map(([, last]) => last)) + 1;
  const memory = Math.min(...timeline.map(([, last]) => last)) + 1;
  const bars = timeline.map(([first, last]) => last + 1 - first);
  const traces = [{
    type: "bar", orientation: "h", y: names, x: bars, base: timeline.map(([first]) => first),
    marker: { color: names.map((_, task) => paint(task)) },
    customdata: timeline.map(([first, last], task) => [first, last, classes[task] ? `, ${classes[task]} classes` : ""]),
    hovertemplate: "%{y}: steps %{customdata[0]} to %{customdata[1]}%{customdata[2]}<extra></extra>",
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
  const ends = step.map((_, index) => index).filter((index) => ended[index].length);
  const values = accuracy.map((task) => ends.map((index) => task[index]));
  return {
    traces: [{
      type: "heatmap", z: values, y: names, x: ends.map((index) => `${ended[index].join(", ")}<br>${step[index]}`),
      colorscale: "Cividis", zmin: 0, zmax: Math.max(...values.flat()), xgap: 2, ygap: 2, hoverongaps: false, colorbar: { title: { text: "%" }, thickness: 12 },
      customdata: values.map(() => ends.map((index) => [ended[index].join(", "), step[index]])),
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

function accuracyChart({ names, evaluations: { step, accuracy } }, measure) {
  return {
    traces: names.map((name, task) => ({
      type: "scatter", mode: "lines+markers", name, x: step, y: accuracy[task],
      line: { color: paint(task), dash: DASHES[Math.floor(task / OKABE_ITO.length) % DASHES.length] },
      marker: { symbol: SYMBOLS[task % SYMBOLS.length], size: 5 },
      hovertemplate: `${name}: %{y:.2f} %<extra></extra>`,
    })),
    layout: { height: 320, hovermode: "x unified", hoverdistance: -1, xaxis: { title: { text: "step" } }, yaxis: { title: { text: `${measure} (%)` } } },
  };
}

const MOST_LABELS = 20;
const confusionHeight = (table) => 130 + Math.min(14 * table.length, 400);

// Class-incremental, the columns are the classes of all tasks; many classes are named when pointed at only.
function classNames({ names, confusion, class_names: known, more }, task) {
  const taskOf = (name) => more?.task_of[name] ?? name;
  const first = names.filter((name, index) => names.findIndex((other) => taskOf(other) === taskOf(name)) === index);
  const of = (name) => known?.[name] ?? (confusion[name] ?? []).map((_, label) => String(label));
  const columns = confusion[task][0].length;
  return [of(task), columns === confusion[task].length ? of(task) : first.flatMap(of).slice(0, columns)];
}

function confusionChart(found, task) {
  const table = found.confusion[task];
  const [rows, columns] = classNames(found, task);
  const totals = table.map((row) => row.reduce((sum, count) => sum + count, 0));
  const axis = (names, title) => ({
    title: { text: title }, tickvals: names.map((_, index) => index),
    ticktext: names.map((name) => short(name)), showticklabels: names.length <= MOST_LABELS, ticks: "", automargin: true,
  });
  return {
    traces: [{
      type: "heatmap", z: table.map((row, label) => row.map((count) => (totals[label] ? (100 * count) / totals[label] : null))),
      colorscale: "Cividis", zmin: 0, zmax: 100, hoverongaps: false, colorbar: { title: { text: "%" }, thickness: 12 },
      customdata: table.map((row, label) => row.map((count, column) => [rows[label], columns[column], count, totals[label]])),
      text: table.map((row) => row.map((count) => count || "")), texttemplate: columns.length <= 10 ? "%{text}" : "",
      hovertemplate: "%{customdata[0]} as %{customdata[1]}: %{customdata[2]} of %{customdata[3]}<extra></extra>",
    }],
    layout: {
      height: confusionHeight(table), xaxis: axis(columns, "predicted"), yaxis: { ...axis(rows, ""), autorange: "reversed" },
    },
  };
}

const MEASURES = [
  ["condition_number", "Condition number κ", "log"],
  ["cosine", "Gradient conflicts (cosine)", "linear"],
  ["magnitude_similarity", "Gradient magnitude similarity", "linear"],
];

function stabilityChart({ stability }, measure, type) {
  const curve = (when, name, index) => ({
    type: "scatter", mode: "lines", name, x: stability.step, y: stability[when][measure],
    line: { color: paint(index), dash: DASHES[index], width: 1.6 },
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
