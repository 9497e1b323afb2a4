// One field a rank, and the matrix of bytes between ranks: both are grids on a canvas with a cursor.
"use strict";
function makeGrid(root, live, size, options) {
  // options: columns(), count(), colour(i), text(i), label(context, geometry)
  let geometry = null, chosen = -1;
  function build() {
    const columns = options.columns(root.clientWidth), count = options.count(), lines = Math.ceil(count / columns);
    const margin = options.margin || 0, cell = Math.max(2, Math.min(size, (root.clientWidth - margin - 4) / columns));
    const [canvas, c] = surface(root, Math.ceil(lines * cell) + margin + 2);
    geometry = { columns, count, cell, margin };
    for (let i = 0; i < count; i++) {
      const x = margin + (i % columns) * cell, y = margin + Math.floor(i / columns) * cell, gap = cell > 6 ? 1 : 0;
      c.fillStyle = options.colour(i);
      c.fillRect(x, y, cell - gap, cell - gap);
      if (options.mark && options.mark(i)) {
        c.fillStyle = themed("--critical");
        c.fillRect(x, y + (cell - gap) * 0.8, cell - gap, (cell - gap) * 0.2);
      }
      if (i === chosen) { c.lineWidth = 2.5; c.strokeStyle = themed("--accent"); c.strokeRect(x, y, cell - gap, cell - gap); }
    }
    if (options.label) options.label(c, geometry);
    canvas.addEventListener("mousemove", (event) => {
      const i = cellAt(event.offsetX, event.offsetY);
      showTip(i < 0 ? "" : options.text(i), event.clientX, event.clientY);
    });
    canvas.addEventListener("mouseleave", () => showTip(""));
    canvas.addEventListener("click", (event) => choose(cellAt(event.offsetX, event.offsetY), true));
  }
  function cellAt(x, y) {
    const { columns, count, cell, margin } = geometry, column = Math.floor((x - margin) / cell), line = Math.floor((y - margin) / cell);
    const i = line * columns + column;
    return column < 0 || column >= columns || line < 0 || i >= count ? -1 : i;
  }
  function choose(i, follow) {
    if (i < 0 || i >= geometry.count) return;
    chosen = i;
    live.textContent = options.text(i).replaceAll("\n", "; ");
    if (follow && options.follow) options.follow(i);
    build();
  }
  root.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -geometry.columns, ArrowDown: geometry.columns }[event.key];
    if (by !== undefined) { event.preventDefault(); choose(chosen < 0 ? 0 : chosen + by, false); }
    if (event.key === "Enter" && chosen >= 0) choose(chosen, true);
  });
  redraws.push(build);
  build();
  return { rebuild: build, count: () => geometry.count };
}

function makeHeatmap(timeline) {
  const ranks = unpack(content.ranks), parts = unpack(content.rank_parts), names = content.part_names, width = names.length;
  const slack = unpack(content.rank_slack), critical = unpack(content.rank_critical);
  const metrics = new Map();
  metrics.set("step time", (i) => { let sum = 0; for (let k = 0; k < width; k++) sum += parts[i * width + k]; return sum; });
  names.forEach((name, k) => metrics.set(name.replaceAll("_", " "), (i) => parts[i * width + k]));
  metrics.set("time on the critical path", (i) => critical[i]);
  if (slack.some((value) => value >= 0)) metrics.set("slack", (i) => Math.max(0, slack[i]));
  const cause = new Map(content.stragglers.map((s) => [s.rank, s.cause]));
  let values = [], low = 0, high = 1;
  const select = $("metric");
  for (const name of metrics.keys()) select.add(new Option(name));
  select.value = "compute";
  function measure() {
    const of = metrics.get(select.value);
    values = Array.from(ranks, (_, i) => of(i));
    low = Infinity; high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    $("heat-range").textContent = `dark ${formatNs(low)} to bright ${formatNs(high)}; marked below: on the critical path`;
  }
  measure();
  const grid = makeGrid($("heatmap"), $("heat-chosen"), 46, {
    columns: (wide) => {
      const n = ranks.length;
      return n <= 32 ? n : Math.min(n, 2 ** Math.round(Math.log2(Math.sqrt(n * wide / 420))));
    },
    count: () => ranks.length,
    colour: (i) => heatColour(high > low ? (values[i] - low) / (high - low) : 0.5),
    mark: (i) => critical[i] > 0,
    text: (i) => {
      const lines = [`rank ${ranks[i]}: ${select.value} ${formatNs(values[i])}`];
      const stage = content.rank_stage[i];
      if (stage !== null && stage !== undefined) lines.push(`stage ${stage}`);
      if (cause.has(ranks[i])) lines.push(`straggler: ${cause.get(ranks[i])}`);
      if (critical[i] > 0) lines.push(`${formatNs(critical[i])} on the critical path`);
      return lines.join("\n");
    },
    follow: (i) => timeline.showRank(ranks[i]),
  });
  select.addEventListener("change", () => { measure(); grid.rebuild(); });
  return grid;
}

function makeMatrix() {
  const bounds = content.matrix.bounds, values = unpack(content.matrix.values), n = bounds.length - 1;
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  if (!most) { $("matrix").textContent = "No traffic between ranks has a known size."; return null; }
  const who = (i) => (bounds[i + 1] - bounds[i] === 1 ? `rank ${bounds[i]}` : `ranks ${bounds[i]} to ${bounds[i + 1] - 1}`);
  return makeGrid($("matrix"), $("matrix-chosen"), n > 24 ? 12 : 28, {
    columns: () => n, count: () => n * n, margin: 26,
    // the logarithm: traffic spans many orders of magnitude
    colour: (i) => (values[i] > 0 ? heatColour(Math.log1p(values[i]) / Math.log1p(most)) : themed("--ground")),
    text: (i) => `${who(Math.floor(i / n))} to ${who(i % n)}: ${formatBytes(values[i])}`,
    label: (c, g) => {
      c.fillStyle = themed("--soft");
      c.font = "11px system-ui, sans-serif";
      const every = Math.max(1, Math.ceil(34 / g.cell));
      for (let i = 0; i < n; i += every) {
        c.fillText(String(bounds[i]), g.margin + i * g.cell, 16);
        c.fillText(String(bounds[i]), 0, g.margin + i * g.cell + 10);
      }
    },
  });
}
