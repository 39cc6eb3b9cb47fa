// Data: columns, one entry a row of a schedule's lists, made into what is drawn; and words for it.

"use strict";
const $ = id => document.getElementById(id);
const read = JSON.parse($("scenes").textContent);
const { looks, paints, shares, shareWords, shareColours, transferColours, kinds, operands, causes } = read;
const show = { by: read.by, memory: read.memory, transfers: read.transfers, causes: true, order: read.order };
const INK = "#1c2430", SOFT = "#5b6675", TRACK = "#f3f5f8", HELD = read.held, GREY = read.grey;

async function columns() {
  const bytes = Uint8Array.from(atob($("columns").textContent), letter => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(plain).arrayBuffer();
  const types = { f8: Float64Array, i4: Int32Array, i1: Int8Array };
  let at = 0;
  for (const scene of read.scenes)
    for (const [name, type, length] of scene.columns) {  // the widest come first, so each is aligned
      scene[name] = new types[type](buffer, at, length);
      at += length * types[type].BYTES_PER_ELEMENT;
      at += -at & 7;
    }
}

function prepare(scene, number) {
  const { gap, length, bounds, op, look, early, late, first, taken, given, saved } = scene, rows = op.length;
  scene.number = number;
  scene.start = new Float64Array(rows);
  scene.end = new Float64Array(rows);
  scene.rank = new Int32Array(rows);
  scene.lanes = [];
  const after = { bytes: 0, activations: 0 };
  scene.most = { bytes: 0, activations: 0 };
  for (let rank = 0; rank < scene.workers; rank++) {
    const bars = [], waits = [], levels = { bytes: [[0, 0]], activations: [[0, 0]] };
    const peak = { bytes: 0, activations: 0 };
    let clock = 0;
    const turn = (measure, time, by) => {
      after[measure] += by;
      peak[measure] = Math.max(peak[measure], after[measure]);
      if (by) levels[measure].push([time, after[measure]]);
    };
    for (let row = bounds[rank]; row < bounds[rank + 1]; row++) {
      const start = clock + gap[row];
      if (first[row] > 0) waits.push([clock, clock + first[row], row, early[row]]);
      if (gap[row] > first[row]) waits.push([clock + first[row], start, row, late[row]]);
      clock = start + length[row];
      scene.start[row] = start;
      scene.end[row] = clock;
      scene.rank[row] = rank;
      if (length[row] > 0) bars.push([start, clock, row, look[row]]);
      turn("bytes", start, taken[row]);
      turn("activations", start, Math.max(saved[row], 0));
      turn("bytes", clock, -given[row]);
      turn("activations", clock, Math.min(saved[row], 0));
    }
    const cool = shares.indexOf("cool-down");
    if (clock < scene.makespan) waits.push([clock, scene.makespan, -1, cool]);
    for (const measure in peak) {
      scene.most[measure] = Math.max(scene.most[measure], peak[measure]);
      levels[measure].push([scene.makespan, after[measure]]);
    }
    scene.lanes.push({ scene, rank, peak, bars: spans(bars), waits: spans(waits),
      levels: { bytes: steps(levels.bytes), activations: steps(levels.activations) } });
  }
  scene.sends = scene.send.length;
}

function spans(list) {
  const n = list.length, s = { count: n, start: new Float64Array(n), end: new Float64Array(n), row: new Int32Array(n),
    kind: new Int8Array(n), sum: new Float64Array(n + 1) };
  list.forEach(([start, end, row, kind], i) => {
    s.start[i] = start; s.end[i] = end; s.row[i] = row; s.kind[i] = kind; s.sum[i + 1] = s.sum[i] + end - start;
  });
  return s;
}

function steps(list) {
  return { count: list.length, time: Float64Array.from(list, p => p[0]), value: Float64Array.from(list, p => p[1]) };
}

/** The first index from `low` on whose value is above `x`; values ascend. */
function above(values, x, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

// Words

function bufferName(scene, row) {
  const parts = [scene.stage[row], scene.mb[row], scene.via[row]].filter((part, i) => i === 0 || part >= 0);
  return [kinds[scene.kind[row]], ...parts].join(".");
}

/** An instruction, as it stands in the file. */
function instruction(scene, row) {
  const [name, fields] = operands[scene.op[row]];
  const values = { stage: scene.stage[row], mb: scene.mb[row], buf: `"${bufferName(scene, row)}"` };
  return `{"op": "${name}"` + fields.map(f => `, "${f}": ${f in values ? values[f] : scene.peer[row]}`).join("") + "}";
}

function lineOf(scene, row) { return scene.line + row + 2 * scene.rank[row]; }

function amount(value, seconds) {
  if (!seconds) return String(Number(value.toPrecision(Math.abs(value) < 1e5 ? 5 : 8)));
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, s]) => Math.abs(value) >= s) || ["µs", 1e-6];
  return `${Number((value / size).toPrecision(4))} ${unit}`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= 1e4 && i < units.length - 1) { value /= 1e3; i++; }
  return `${Number(value.toPrecision(4))} ${units[i]}`;
}

const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const percent = x => `${(100 * x).toFixed(1)}%`;
const escape = text => text.replace(/[&<>]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const held = (value, measure) => measure === "bytes" && read.sized ? bytes(value) : String(value);
