// The page of one run

let packed = null;

async function details(id) {
  packed ??= embedded("details");
  const bytes = Uint8Array.from(atob(packed[id]), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const isOfSources = ({ more }) => Object.keys(more?.task_of ?? {}).length > 0;

// Sources that share a task are listed with it, and below them those that were never trained.
function taskTable(found) {
  const { names, classes, timeline, tasks, more } = found;
  const shares = isOfSources(found);
  const before = [["Before training", more?.prequential], ["First batch", more?.first]]
    .filter(([, scores]) => Object.keys(scores ?? {}).length);
  const headings = [
    ...(shares ? ["Source", "Task"] : ["Task"]), "Classes", "First step", "Last step", "A when it ended", "A at the end", "Change",
    ...before.map(([title]) => title),
  ];
  const row = (name, task) => {
    const { at_end: atEnd, final, metric } = tasks?.[name] ?? { at_end: null, final: more?.unseen[name] ?? null };
    const change = atEnd === null || final === null ? null : final - atEnd;
    const counts = [classes[task] || null, ...(timeline[task] ?? [null, null])];
    const scores = before.map(([, known]) => known[name] ?? null);
    const cells = [...counts.map((count) => count ?? "–"), fixed(atEnd), fixed(final), signed(change), ...scores.map(fixed)];
    const values = [...counts, atEnd, final, change, ...scores];
    return make("tr", {}, make("th", { scope: "row" }, metric ? `${name} (${metric})` : name),
      ...(shares ? [make("td", {}, more.task_of[name])] : []),
      ...cells.map((text, index) => make("td", { class: "number", "data-value": values[index] ?? "" }, text)));
  };
  return make("div", { class: "scroll", tabindex: 0 },
    make("table", { class: "sortable" },
      make("caption", { class: "hidden" }, `${shares ? "Sources" : "Tasks"} of this run`),
      make("thead", {}, make("tr", {}, ...headings.map((text, index) => sortHeader(text, index > shares ? "number" : "")))),
      make("tbody", {}, ...[...names, ...Object.keys(more?.unseen ?? {})].map(row))));
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

function facts(run, { environment, path, left_out: skipped, more }) {
  const skippedSteps = Object.entries(skipped ?? {}).map(([task, steps]) => `${task}: ${steps}`).join(", ");
  const entries = {
    [capitalised(run.measure)]: run.accuracy === null ? "unfinished" : `${fixed(run.accuracy)} %`,
    Forgetting: run.forgetting === null ? "–" : `${signed(run.forgetting)} %`,
    ...Object.fromEntries(Object.entries(more?.measures ?? {}).map(([title, value]) => [capitalised(title), `${fixed(value)} %`])),
    Steps: run.steps ?? "–",
    ...(skippedSteps && { "Skipped steps (not finite)": skippedSteps }),
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

// Each section is returned with the charts to draw in it once it is on the page: pairs of element and function.

function tasksSection(found) {
  const noun = isOfSources(found) ? "source" : "task";
  const title = make("h2", {}, `${capitalised(noun)}s`);
  if (!found.timeline.length) return [make("section", {}, title, taskTable(found)), []];
  const timeline = chart(`Timeline of ${found.names.length} ${noun}s; the steps are in the table below`, 70 + 26 * (found.names.length + 1));
  const section = make("section", {}, title,
    figure(timeline, `Which ${noun} trains when; the memory (hatched) starts when the first ${noun} has ended.`), taskTable(found));
  return [section, [[timeline, () => timelineChart(found)]]];
}

function accuracySection(found, measure) {
  const title = capitalised(measure);
  const matrix = chart(`${title} of every task whenever a task ended`, 110 + 30 * found.names.length);
  const section = make("section", {}, make("h2", {}, title), figure(matrix, `${title} of every task seen whenever a task ended.`));
  const drawings = [[matrix, () => matrixChart(found)]];
  if (found.evaluations.ended.some((ended) => !ended.length)) {
    const lines = chart(`${title} of every task over time`, 320);
    section.append(figure(lines, `${title} of every task over time.`));
    drawings.push([lines, () => accuracyChart(found, measure)]);
  }
  return [section, drawings];
}

function stabilitySection(found) {
  const grid = make("div", { class: "charts" });
  const drawings = MEASURES.map(([measure, title, type]) => {
    const element = chart(`${title} of the gradients, original and adjusted, over time`, 260);
    grid.append(figure(element, `${title}.`));
    return [element, () => stabilityChart(found, measure, type)];
  });
  const shown = found.stability.step.length;
  const note = shown < found.stability.of ? ` ${shown} of ${found.stability.of} steps are shown.` : "";
  const section = make("section", {}, make("h2", {}, "Stability"),
    make("p", {}, `The gradients of the tasks (and the memory) before and after the method adjusts them.${note}`), grid);
  return [section, drawings];
}

function confusionSection(found) {
  const grid = make("div", { class: "charts" });
  const drawings = Object.entries(found.confusion).map(([task, table]) => {
    const element = chart(`Confusion of the classes of ${task}`, confusionHeight(table));
    grid.append(figure(element, `${task}.`));
    return [element, () => confusionChart(found, task)];
  });
  const section = make("section", {}, make("h2", {}, "Confusion"),
    make("p", {}, "How often, at the end, the classes of a task (rows) were predicted as each class (columns)."), grid);
  return [section, drawings];
}

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
  if (found.problem) page.append(make("section", {}, make("p", {}, found.problem)));
  const sections = [
    ...(found.names?.length ? [tasksSection(found)] : []),
    ...(found.evaluations?.step.length ? [accuracySection(found, run.measure)] : []),
    ...(found.stability?.step.length ? [stabilitySection(found)] : []),
    ...(Object.keys(found.confusion ?? {}).length ? [confusionSection(found)] : []),
  ];
  page.append(...sections.map(([section]) => section));
  page.append(related(run), make("section", {}, make("h2", {}, "Settings"), settingsTable(found.settings)));
  byId("content").hidden = true;
  page.hidden = false;
  scrollTo(0, 0);
  page.focus({ preventScroll: true });
  for (const [, drawings] of sections) for (const [element, build] of drawings) draw(element, build);
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
