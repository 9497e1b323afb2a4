// Fills the page. Errors of one part do not stop the others.
"use strict";
document.documentElement.dataset.ready = "no";
function attempt(what, work) {
  try { return work(); } catch (error) { console.error(what, error); return null; }
}
function tile(value, text) {
  const made = document.createElement("div"), big = document.createElement("b"), small = document.createElement("span");
  made.className = "tile";
  big.textContent = value;
  small.textContent = text;
  made.append(big, small);
  return made;
}
attempt("summary", () => {
  $("title").textContent = content.file;
  const shown = content.timeline.ranks.length, roles = content.num_roles ? `, ${counted(content.num_roles, "role")}` : "";
  $("facts").textContent = `${content.kind} graph, ${content.num_ranks} of ${counted(content.world_size, "rank")}${roles}, ${counted(content.num_units, "unit")}`
    + (shown < content.num_ranks ? `; ${shown} ranks are drawn over time, all in the heat map` : "");
  const tiles = [tile(formatNs(content.job_step_ns), "mean step of the job"), tile(formatNs(content.step_ns), "mean step, over ranks")];
  for (const name of content.part_names) tiles.push(tile(percent(content.parts[name], content.step_ns), name.replaceAll("_", " ")));
  if (content.overlap !== null) tiles.push(tile(percent(content.overlap, 1), "of communication hidden"));
  if (content.critical_ns) tiles.push(tile(formatNs(content.critical_ns), "critical path, all steps"));
  const causes = [...new Set(content.stragglers.filter((s) => s.cause !== "upstream").map((s) => s.cause))];
  tiles.push(tile(String(content.stragglers.filter((s) => s.cause !== "upstream").length), `stragglers${causes.length ? `: ${causes.join(", ")}` : ""}`));
  $("tiles").replaceChildren(...tiles);
  $("notes").replaceChildren(...content.notes.map((note) => { const item = document.createElement("li"); item.textContent = note; return item; }));
  const step = content.timeline.step;
  $("h-pipeline").textContent = step === null ? "Ranks and time" : `Ranks and time, step ${step}`;
});
attempt("comparison", () => {
  if (!content.other) return;
  $("comparison").hidden = false;
  $("sentence").textContent = `Real: ${content.other.file} (${content.other.kind}). Against it ${content.explanation.sentence.replace("the second", "this trace")}.`;
  const row = ([name, real, own]) => [name.replaceAll("_", " "), formatNs(real), formatNs(own), `${own >= real ? "+" : ""}${formatNs(own - real)}`, real ? `${(100 * (own - real) / real).toFixed(1)} %` : "-"];
  const head = ["", "real", "this trace", "difference", "of real"];
  $("difference").replaceChildren(
    table("Mean step, part by part", head, [...content.explanation.rows.map(row), row(["step", content.other.step_ns, content.step_ns]), row(content.explanation.job_step)]),
    table("Units, a step and rank", head, content.explanation.units.map(row)));
});
const timeline = attempt("timeline", () => makeTimeline($("timeline")));
attempt("heat map", () => makeHeatmap(timeline || { showRank() {} }));
attempt("bars", () => makeBars($("bars")));
attempt("steps", () => makeSteps($("steps")));
attempt("memory", () => makeMemory($("memory-chart")));
attempt("matrix", () => makeMatrix());
attempt("worth", () => {
  const parts = [];
  for (const [trace, name] of [[content, content.other ? "This trace" : ""], ...(content.other ? [[content.other, "Real run"]] : [])]) {
    const text = document.createElement("p");
    text.textContent = `${name ? `${name}, ` : ""}${trace.kind}: ${trace.worth}`;
    parts.push(text);
    const rows = Object.entries(trace.metadata);
    if (rows.length) parts.push(table(name ? `${name}: what the file says of itself` : "What the file says of itself", ["", ""], rows));
  }
  $("worth-text").replaceChildren(...parts);
});
attempt("tables", () => $("tables").replaceChildren(...content.tables.map((t) => table(t.title, t.header, t.rows))));
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  $("theme").setAttribute("aria-pressed", String(!dark));
  redrawAll();
});
$("print").addEventListener("click", () => print());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redrawAll, 120); });
// paper is light and narrow: what is drawn must be, too
let before = null;
addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  document.body.style.width = "690px";
  redrawAll();
});
addEventListener("afterprint", () => {
  if (before) document.documentElement.dataset.theme = before; else delete document.documentElement.dataset.theme;
  document.body.style.width = "";
  redrawAll();
});
document.documentElement.dataset.ready = "yes";
