// The list of runs

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
