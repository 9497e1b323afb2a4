// The pipeline chart: rows of ranks over time, drawn on a uPlot chart, which brings axes and zooming.
"use strict";
function makeTimeline(root) {
  const traces = [content, content.other].filter(Boolean).map((trace) => {
    const t = trace.timeline, columns = {};
    for (const name of ["offsets", "start", "duration", "klass", "unit", "slack", "flags", "count", "lane"]) columns[name] = unpack(t[name]);
    return { ...t, ...columns, texts: t.classes.map(className), place: new Map(t.ranks.map((rank, i) => [rank, i])) };
  });
  const length = Math.max(...traces.map((t) => t.length_ns), 1);
  let rows = [], chart = null, view = null, found = null, foundAt = -1, chosen = null, overlay = traces.length > 1;

  function layRows() {
    rows = [];
    for (const rank of traces[0].ranks) {
      rows.push({ rank, trace: 0, index: traces[0].place.get(rank) });
      if (overlay && traces[1].place.has(rank)) rows.push({ rank, trace: 1, index: traces[1].place.get(rank) });
    }
  }
  function className(k) {
    const words = [k.kind === "collective" ? k.op : k.kind];
    if (k.phase) words.push(k.phase);
    if (k.microbatch !== undefined) words.push(`microbatch ${k.microbatch}`);
    if (k.stage !== undefined) words.push(`stage ${k.stage}`);
    if (k.chunk !== undefined) words.push(`chunk ${k.chunk}`);
    if (k.group) words.push(`in ${k.group} (${counted(k.members, "rank")})`);
    return words.join(", ");
  }
  function fill(k) {
    if (k.kind === "wait") return [themed("--wait"), "dots", themed("--ink"), ""];
    if (k.kind !== "compute") return [k.kind === "collective" ? "#d55e00" : "#8c6bb1", "", "#fff", k.op || k.kind];
    const striped = k.phase === "backward" ? "stripes" : "";
    if (k.microbatch !== undefined) {
      const at = k.microbatch % COLOURS.length;
      return [COLOURS[at], striped, TEXT_ON[at], `${(k.phase || "").charAt(0).toUpperCase()}${k.microbatch}`];
    }
    const at = { forward: 0, backward: 1, optimizer: 2 }[k.phase];
    return at === undefined ? ["#8a939b", striped, "#000", ""] : [COLOURS[at], striped, TEXT_ON[at], k.phase];
  }
  function facts(row, i) {
    const t = traces[row.trace], lines = [`rank ${row.rank}${traces.length > 1 ? (row.trace ? ", real run" : ", this trace") : ""}: ${t.texts[t.klass[i]]}`];
    lines.push(t.count[i] > 1 ? `${t.count[i]} units, too short to show one by one; the longest is unit ${t.unit[i]}` : `unit ${t.unit[i]}`);
    lines.push(`${formatNs(t.duration[i])}, from ${formatNs(t.start[i])} after the start of the step`);
    if (t.flags[i] & 1) lines.push("on the critical path");
    else if (t.slack[i] >= 0) lines.push(`slack ${formatNs(t.slack[i])}`);
    return lines.join("\n");
  }

  function draw(u) {
    const c = u.ctx, { left, top, width, height } = u.bbox;
    const only = $("critical-only").checked;
    c.save();
    c.beginPath();
    c.rect(left, top, width, height);
    c.clip();
    const x0 = u.scales.x.min, perNs = width / (u.scales.x.max - x0);
    const y0 = u.scales.y.min, perRow = height / (u.scales.y.max - y0);
    const styles = traces.map((t) => t.classes.map(fill));
    for (let r = Math.max(0, Math.floor(y0)); r < Math.min(rows.length, Math.ceil(u.scales.y.max)); r++) {
      const row = rows[r], t = traces[row.trace], pad = perRow > 8 ? 1.5 : 0;
      const y = top + (r - y0) * perRow + pad, h = Math.max(1, perRow - 2 * pad);
      let drawn = [-1, -1];
      for (let i = t.offsets[row.index]; i < t.offsets[row.index + 1]; i++) {
        const a = left + (t.start[i] - x0) * perNs, b = a + t.duration[i] * perNs, lane = t.lane[i], critical = t.flags[i] & 1;
        if (b < left || a > left + width) continue;
        if (b < drawn[lane] + 0.4 && !critical && !found) continue;
        drawn[lane] = b;
        const [colour, kind, ink, label] = styles[row.trace][t.klass[i]];
        const sy = lane ? y + h * 0.72 : y, sh = lane ? h * 0.28 : h * 0.7, w = Math.max(b - a, 0.6);
        const hit = found ? found.has(row.trace, i) : true;
        const alpha = (only && !critical) || !hit ? 0.14 : 1;
        c.globalAlpha = alpha;
        c.fillStyle = pattern(colour, kind);
        c.fillRect(a, sy, w, sh);
        if (critical) {
          c.fillStyle = themed("--critical");
          const edge = Math.max(1, Math.min(3, sh * 0.22));
          c.fillRect(a, sy + sh - edge, w, edge);
          if (w > 6) { c.lineWidth = 1; c.strokeStyle = themed("--critical"); c.strokeRect(a + 0.5, sy + 0.5, w - 1, sh - 1); }
        } else if (w > 5 && sh > 5) { c.lineWidth = 0.6; c.strokeStyle = themed("--ground"); c.strokeRect(a, sy, w, sh); }
        if (label && sh > 9 * devicePixelRatio && w > 9 * devicePixelRatio * Math.max(2, label.length * 0.75)) {
          c.fillStyle = ink;
          c.font = `${Math.min(12 * devicePixelRatio, sh * 0.8)}px system-ui, sans-serif`;
          c.textBaseline = "middle";
          c.textAlign = "left";
          const size = c.measureText(label).width + 6;
          if (kind) { c.globalAlpha = 0.85 * alpha; c.fillStyle = colour; c.fillRect(Math.max(a, left) + 1, sy + sh * 0.12, size, sh * 0.76); c.globalAlpha = alpha; c.fillStyle = ink; }
          c.fillText(label, Math.max(a, left) + 4, sy + sh / 2);
        }
        if (chosen && chosen.row === r && chosen.i === i) {
          c.globalAlpha = 1; c.lineWidth = 3; c.strokeStyle = themed("--accent"); c.strokeRect(a - 1, sy - 1, w + 2, sh + 2);
        }
      }
    }
    c.restore();
  }

  function at(u, x, y) {
    const r = Math.floor(u.posToVal(y, "y")), time = u.posToVal(x, "x"), row = rows[r];
    if (!row) return null;
    const t = traces[row.trace], inRow = u.posToVal(y, "y") - r, lane = inRow > 0.72 ? 1 : 0;
    const slop = (u.scales.x.max - u.scales.x.min) / Math.max(1, u.over.clientWidth) * 2;
    let best = -1;
    for (let i = t.offsets[row.index]; i < t.offsets[row.index + 1]; i++) {
      if (t.lane[i] !== lane || t.start[i] - slop > time || t.start[i] + t.duration[i] + slop < time) continue;
      if (best < 0 || t.duration[i] < t.duration[best]) best = i;
    }
    return best < 0 ? null : { row: r, i: best };
  }
  function choose(next) {
    chosen = next;
    $("chosen").textContent = next ? facts(rows[next.row], next.i).replaceAll("\n", "; ") : "";
    if (chart) chart.redraw(false, true);
  }

  function build() {
    layRows();
    if (chart) { view = view && { ...view }; chart.destroy(); }
    const height = Math.max(220, Math.min(820, rows.length * (rows.length > 16 ? 26 : 34) + 60));
    const labels = (u, splits) => splits.map((s) => {
      const row = rows[Math.floor(s)];
      return row && s % 1 ? `${row.trace ? "real" : "rank"} ${row.rank}` : "";
    });
    chart = new uPlot({
      width: root.clientWidth, height, legend: { show: false }, pxAlign: false,
      cursor: { drag: { x: true, y: true, uni: 40 }, points: { show: false }, y: false },
      scales: { x: { time: false, range: (u, a, b) => [a, b] }, y: { dir: -1, range: (u, a, b) => [a, b] } },
      series: [{}, { paths: () => null, points: { show: false } }],
      axes: [
        axis({ values: (u, splits) => splits.map(tickNs), space: 90 }),
        axis({ size: 76, grid: { show: false }, gap: 4, values: labels,
          splits: (u, i, low, high) => {
            const every = Math.max(1, Math.ceil((high - low) / Math.max(1, u.bbox.height / devicePixelRatio / 16))), ticks = [];
            for (let r = Math.ceil((low - 0.5) / every) * every; r < high; r += every) if (r >= 0) ticks.push(r + 0.5);
            return ticks;
          } }),
      ],
      hooks: {
        draw: [draw],
        setScale: [(u) => { view = { x: [u.scales.x.min, u.scales.x.max], y: [u.scales.y.min, u.scales.y.max] }; }],
        setCursor: [(u) => {
          const hit = u.cursor.left >= 0 ? at(u, u.cursor.left, u.cursor.top) : null, box = u.over.getBoundingClientRect();
          showTip(hit && facts(rows[hit.row], hit.i), box.left + u.cursor.left, box.top + u.cursor.top);
        }],
        ready: [(u) => {
          u.over.addEventListener("click", () => { const hit = at(u, u.cursor.left, u.cursor.top); if (hit) choose(hit); });
          u.over.addEventListener("dblclick", reset);
          u.over.addEventListener("mouseleave", () => showTip(""));
          u.over.addEventListener("wheel", (event) => {
            if (!event.ctrlKey && !event.shiftKey && document.activeElement !== root) return;
            event.preventDefault();
            zoom(event.deltaY < 0 ? 0.7 : 1 / 0.7, u.posToVal(event.offsetX, "x"));
          }, { passive: false });
        }],
      },
    }, [[0, length], [0, rows.length]], root);
    show(view ? view.x : [0, length], view && view.y[1] <= rows.length ? view.y : [0, rows.length]);
  }
  function show(x, y) {
    chart.batch(() => {
      chart.setScale("x", { min: x[0], max: x[1] });
      chart.setScale("y", { min: y[0], max: y[1] });
    });
  }
  function reset() { show([0, length], [0, rows.length]); }
  function zoom(factor, around) {
    const { min, max } = chart.scales.x, centre = around === undefined ? (min + max) / 2 : around;
    let a = centre - (centre - min) * factor, b = centre + (max - centre) * factor;
    if (b - a < 20) return;
    if (b - a > length) { a = 0; b = length; }
    chart.setScale("x", { min: Math.max(0, a), max: Math.min(length, b) });
  }
  function pan(share) {
    const { min, max } = chart.scales.x, by = Math.max(-min, Math.min((max - min) * share, length - max));
    chart.setScale("x", { min: min + by, max: max + by });
  }
  function panRows(by) {
    const { min, max } = chart.scales.y;
    if (min + by >= 0 && max + by <= rows.length) chart.setScale("y", { min: min + by, max: max + by });
    const r = chosen ? Math.max(0, Math.min(rows.length - 1, chosen.row + by)) : 0;
    step(r, 0);
  }
  function step(r, by) {
    const row = rows[r], t = traces[row.trace], from = t.offsets[row.index], to = t.offsets[row.index + 1];
    if (to === from) return;
    let i = chosen && chosen.row === r ? chosen.i + by : from;
    i = Math.max(from, Math.min(to - 1, i));
    goTo({ row: r, i });
  }
  function goTo(hit) {
    const t = traces[rows[hit.row].trace], { min, max } = chart.scales.x, width = max - min;
    const middle = t.start[hit.i] + t.duration[hit.i] / 2;
    if (middle < min || middle > max) {
      const a = Math.max(0, Math.min(length - width, middle - width / 2));
      chart.setScale("x", { min: a, max: a + width });
    }
    const y = chart.scales.y;
    if (hit.row < y.min || hit.row + 1 > y.max) {
      const tall = y.max - y.min, a = Math.max(0, Math.min(rows.length - tall, hit.row - tall / 2));
      chart.setScale("y", { min: a, max: a + tall });
    }
    choose(hit);
  }
  // rank:3 mb:2 stage:1 unit:17 and words: all of them must fit
  function find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    foundAt = -1;
    if (!words.length) { found = null; $("find-count").textContent = ""; chart.redraw(false, true); return; }
    const keys = { mb: "microbatch", microbatch: "microbatch", stage: "stage", chunk: "chunk" };
    const hits = [], sets = traces.map(() => new Set());
    const fits = traces.map((t) => t.classes.map((k, n) => words.every((word) => {
      const [key, value] = word.split(":");
      if (value === undefined) return t.texts[n].toLowerCase().includes(word);
      return key in keys ? String(k[keys[key]]) === value : key === "rank" || key === "unit";
    })));
    rows.forEach((row, r) => {
      if (!words.every((word) => !word.startsWith("rank:") || word === `rank:${row.rank}`)) return;
      const t = traces[row.trace];
      for (let i = t.offsets[row.index]; i < t.offsets[row.index + 1]; i++) {
        if (!fits[row.trace][t.klass[i]]) continue;
        if (!words.every((word) => !word.startsWith("unit:") || word === `unit:${t.unit[i]}`)) continue;
        hits.push({ row: r, i });
        sets[row.trace].add(i);
      }
    });
    found = { hits, has: (trace, i) => sets[trace].has(i) };
    $("find-count").textContent = hits.length ? `${hits.length} found` : "nothing found";
    chart.redraw(false, true);
  }
  function next() {
    if (!found || !found.hits.length) return;
    foundAt = (foundAt + 1) % found.hits.length;
    goTo(found.hits[foundAt]);
    $("find-count").textContent = `${foundAt + 1} of ${found.hits.length}`;
  }

  $("find").addEventListener("input", (event) => find(event.target.value));
  $("find").addEventListener("keydown", (event) => { if (event.key === "Enter") next(); });
  $("find-next").addEventListener("click", next);
  $("critical-only").addEventListener("change", () => chart.redraw(false, true));
  $("zoom-in").addEventListener("click", () => zoom(0.6));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  $("zoom-reset").addEventListener("click", reset);
  if (traces.length > 1) {
    $("overlay-label").hidden = false;
    $("overlay").addEventListener("change", (event) => { overlay = event.target.checked; view = null; choose(null); build(); });
  }
  root.addEventListener("keydown", (event) => {
    const act = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => panRows(-1), ArrowDown: () => panRows(1),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: reset,
      n: () => step(chosen ? chosen.row : 0, 1), p: () => step(chosen ? chosen.row : 0, -1),
      c: () => $("critical-only").click(), Escape: () => choose(null),
    }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  });
  redraws.push(build);
  build();
  const kinds = new Set(traces[0].classes.map((k) => k.kind));
  const entries = [];
  const micro = [...new Set(traces[0].classes.filter((k) => k.microbatch !== undefined).map((k) => k.microbatch))].sort((a, b) => a - b);
  const legendOf = () => {
    entries.length = 0;
    for (const m of micro.slice(0, 8)) entries.push([`microbatch ${m}`, COLOURS[m % 8], ""]);
    if (micro.length) entries.push(["backward: striped", "#8a939b", "stripes"]);
    else for (const [phase, n] of [["forward", 0], ["backward", 1], ["optimizer", 2]]) entries.push([phase, COLOURS[n], n === 1 ? "stripes" : ""]);
    if (kinds.has("wait")) entries.push(["waiting", themed("--wait"), "dots"]);
    if (kinds.has("collective")) entries.push(["collective (below)", "#d55e00", ""]);
    if (kinds.has("send") || kinds.has("recv")) entries.push(["message (below)", "#8c6bb1", ""]);
    entries.push(["outlined: critical path", themed("--critical"), ""]);
    legend($("timeline-legend"), entries);
  };
  redraws.push(legendOf);
  legendOf();
  return { rows: () => rows.length, view: () => view, find, next, reset, showRank(rank) {
    const r = rows.findIndex((row) => row.rank === rank);
    if (r >= 0) step(r, 0);
    return r >= 0;
  } };
}
