// Bars, step times and memory, with uPlot.
"use strict";
function makeBars(root) {
  const names = content.part_names, width = names.length, ranks = unpack(content.ranks), parts = unpack(content.rank_parts);
  const groups = Math.min(ranks.length, 128), labels = [], stacked = names.map(() => []);
  for (let g = 0; g < groups; g++) {
    const from = Math.floor(g * ranks.length / groups), to = Math.floor((g + 1) * ranks.length / groups);
    labels.push(to - from === 1 ? `rank ${ranks[from]}` : `ranks ${ranks[from]} to ${ranks[to - 1]}`);
    let sum = 0;
    for (let k = 0; k < width; k++) {
      let mean = 0;
      for (let i = from; i < to; i++) mean += parts[i * width + k];
      sum += mean / (to - from);
      stacked[k].push(sum);
    }
  }
  let chart = null;
  function build() {
    if (chart) chart.destroy();
    // the whole first, then less and less over it
    const order = names.map((_, k) => width - 1 - k);
    chart = new uPlot({
      width: root.clientWidth, height: 300, legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: { x: { time: false, range: [-0.6, groups - 0.4] }, y: { range: (u, low, high) => [0, high * 1.05] } },
      series: [{}, ...order.map((k) => ({
        fill: () => pattern(...PART_STYLES[names[k]]), stroke: themed("--panel"), width: 0.5, points: { show: false },
        paths: uPlot.paths.bars({ size: [0.86, 90] }),
      }))],
      axes: [
        axis({ values: (u, splits) => splits.map((s) => (Number.isInteger(s) && labels[s] ? labels[s].split(" to")[0] : "")),
          grid: { show: false }, incrs: [1, 2, 4, 8, 16, 32, 64], space: 80 }),
        axis({ size: 84, values: (u, splits) => splits.map(tickNs) }),
      ],
      hooks: { setCursor: [(u) => {
        const g = u.cursor.left >= 0 ? Math.round(u.posToVal(u.cursor.left, "x")) : -1, box = u.over.getBoundingClientRect();
        if (!labels[g]) { showTip(""); return; }
        const lines = [labels[g]], total = stacked[width - 1][g];
        names.forEach((name, k) => {
          const own = stacked[k][g] - (k ? stacked[k - 1][g] : 0);
          lines.push(`${name.replaceAll("_", " ")}: ${formatNs(own)} (${percent(own, total)})`);
        });
        showTip(lines.join("\n"), box.left + u.cursor.left, box.top + u.cursor.top);
      }], ready: [(u) => u.over.addEventListener("mouseleave", () => showTip(""))] },
    }, [labels.map((_, g) => g), ...order.map((k) => stacked[k])], root);
    legend($("bars-legend"), names.map((name) => [name.replaceAll("_", " "), ...PART_STYLES[name]]));
  }
  redraws.push(build);
  build();
}

const WHOLE = [1, 2, 5].flatMap((n) => [1, 10, 100, 1e3, 1e4, 1e5].map((k) => n * k)).sort((a, b) => a - b);
const DASHES = [[], [8, 4], [2, 4], [10, 3, 2, 3], [4, 2], [14, 5]];
function lines(root, list, x, curves, format, options = {}) {
  let chart = null;
  function build() {
    if (chart) chart.destroy();
    chart = new uPlot({
      width: root.clientWidth, height: 260, legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (u, low, high) => [options.zero ? 0 : Math.max(0, low - (high - low) * 0.3), high + Math.max((high - low) * 0.1, high * 0.02)] } },
      series: [{}, ...curves.map((curve, i) => ({
        stroke: COLOURS[i % 8], width: 2, dash: DASHES[i % DASHES.length], spanGaps: true,
        points: { show: x.length < 60, size: 6, fill: COLOURS[i % 8] },
        ...(options.steps ? { paths: uPlot.paths.stepped({ align: -1 }) } : {}),
      }))],
      axes: [axis({ values: (u, splits) => splits.map(options.tick || options.x || String), space: 80, ...(options.whole ? { incrs: WHOLE } : {}) }),
        axis({ size: 90, values: (u, splits) => splits.map(format === formatNs ? tickNs : format) })],
      hooks: { setCursor: [(u) => {
        const i = u.cursor.idx, box = u.over.getBoundingClientRect();
        if (i === null || i === undefined || u.cursor.left < 0) { showTip(""); return; }
        const texts = curves.flatMap((curve) => (curve.values[i] === null || curve.values[i] === undefined ? [] : [`${curve.name}: ${format(curve.values[i])}`]));
        showTip([(options.x || String)(x[i]), ...texts].join("\n"), box.left + u.cursor.left, box.top + u.cursor.top);
      }], ready: [(u) => u.over.addEventListener("mouseleave", () => showTip(""))] },
    }, [x, ...curves.map((curve) => curve.values)], root);
    if (list) legend(list, curves.map((curve, i) => [curve.text || curve.name, COLOURS[i % 8], ""]));
  }
  redraws.push(build);
  build();
}

function makeSteps(root) {
  const curves = [{ name: content.other ? "this trace" : "the job", values: content.step_times }];
  let x = content.steps.map((s, i) => (s === null ? i : s));
  if (content.other) {
    const all = [...new Set([...x, ...content.other.steps.map((s, i) => (s === null ? i : s))])].sort((a, b) => a - b);
    const spread = (trace) => all.map((s) => { const at = trace.steps.indexOf(s); return at < 0 ? null : trace.step_times[at]; });
    curves[0].values = spread(content);
    curves.push({ name: "real run", values: spread(content.other) });
    x = all;
  }
  lines(root, null, x, curves, formatNs, { x: (s) => `step ${s}`, whole: true });
}

function makeMemory(root) {
  const sources = [[content, ""], ...(content.other ? [[content.other, "real run, "]] : [])];
  const curves = sources.flatMap(([trace, prefix]) => trace.memory.map((m) => ({ m, prefix, times: unpack(m.times), values: unpack(m.values), base: 0 })));
  if (!curves.length) { root.textContent = "No memory was recorded."; return; }
  for (const [trace] of sources) {
    const own = curves.filter((curve) => trace.memory.includes(curve.m)), base = Math.min(...own.map((curve) => curve.times[0]));
    for (const curve of own) curve.base = base;
  }
  // one time axis for all curves
  const [x, ...columns] = uPlot.join(curves.map((curve) => [Array.from(curve.times, (t) => t - curve.base), Array.from(curve.values)]));
  lines(root, $("memory-legend"), x, curves.map((curve, i) => ({
    name: `${curve.prefix}rank ${curve.m.rank}`, values: columns[i],
    text: `${curve.prefix}rank ${curve.m.rank}: peak ${formatBytes(curve.m.peak_bytes)}${curve.m.phase ? `, ${curve.m.phase}` : ""}${curve.m.held.length ? `, ${counted(curve.m.held.length, "microbatch", "microbatches")} held` : ""}`,
  })), formatBytes, { steps: true, zero: true, x: formatNs, tick: tickNs });
}
