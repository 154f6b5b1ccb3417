// Navigation and theme

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
