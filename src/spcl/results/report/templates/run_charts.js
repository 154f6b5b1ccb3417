// Charts of one run

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
