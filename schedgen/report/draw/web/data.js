// Data: the scenes that page.py wrote, and their columns, of one entry a row of a program, made into what is drawn.

"use strict";
const $ = id => document.getElementById(id);
const data = JSON.parse($("scenes").textContent), { scenes } = data;
const { looks, paints, shares, shareWords, shareColours, transferColours, kinds, operands, causes } = data;
/** The state of the page's switches. */
const show = { by: data.by, memory: data.memory, transfers: data.transfers, order: data.order, causes: true, links: true };
const INK = "#1c2430", SOFT = "#5b6675", TRACK = "#f3f5f8", HELD = data.held, GREY = data.grey;

/** Unpack the columns of all scenes. */
async function unpackColumns() {
  const packed = Uint8Array.from(atob($("columns").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const types = { f8: Float64Array, i4: Int32Array, i1: Int8Array };
  let offset = 0;
  for (const scene of scenes)
    for (const [name, type, length] of scene.columns) {  // the widest come first, so each is aligned
      scene[name] = new types[type](buffer, offset, length);
      offset += length * types[type].BYTES_PER_ELEMENT;
      offset += -offset & 7;
    }
}

/** Compute start, end and rank of every row, and the scene's lanes: bars, waits and memory of each worker. */
function prepare(scene, number) {
  const { gap, length, bounds, op, look, early, late, first, taken, given, saved } = scene, rows = op.length;
  const coolDown = shares.indexOf("cool-down");
  scene.number = number;
  scene.start = new Float64Array(rows);
  scene.end = new Float64Array(rows);
  scene.rank = new Int32Array(rows);
  scene.lanes = [];
  scene.most = { bytes: 0, activations: 0 };
  const held = { bytes: 0, activations: 0 };
  for (let rank = 0; rank < scene.workers; rank++) {
    const bars = [], waits = [], levels = { bytes: [[0, 0]], activations: [[0, 0]] };
    const peak = { bytes: 0, activations: 0 };
    let clock = 0;
    const change = (measure, time, amount) => {
      held[measure] += amount;
      peak[measure] = Math.max(peak[measure], held[measure]);
      if (amount) levels[measure].push([time, held[measure]]);
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
      change("bytes", start, taken[row]);
      change("activations", start, Math.max(saved[row], 0));
      change("bytes", clock, -given[row]);
      change("activations", clock, Math.min(saved[row], 0));
    }
    if (clock < scene.makespan) waits.push([clock, scene.makespan, -1, coolDown]);
    for (const measure in peak) {
      scene.most[measure] = Math.max(scene.most[measure], peak[measure]);
      levels[measure].push([scene.makespan, held[measure]]);
    }
    scene.lanes.push({ scene, rank, peak, bars: spanColumns(bars), waits: spanColumns(waits),
      levels: { bytes: levelColumns(levels.bytes), activations: levelColumns(levels.activations) } });
  }
  scene.sends = scene.send.length;
  const uses = scene.links.map(() => []);
  scene.link?.forEach((link, k) => {
    const row = scene.linkRow[k];
    uses[link].push([scene.linkStart[k], scene.linkStart[k] + scene.linkLength[k], row, scene.kind[row]]);
  });
  scene.linkLanes = scene.links.map((label, k) =>
    ({ scene, link: true, label, name: "", bars: spanColumns(uses[k]), waits: spanColumns([]) }));
}

/** Columns of a list of [start, end, row, kind]; kind is an index of `looks`, `shares` (waits) or `kinds` (links). */
function spanColumns(list) {
  const column = (type, k) => type.from(list, entry => entry[k]);
  return { count: list.length, start: column(Float64Array, 0), end: column(Float64Array, 1), row: column(Int32Array, 2),
    kind: column(Int8Array, 3) };
}

/** Columns of a list of [time, value from then on]. */
function levelColumns(list) {
  const column = k => Float64Array.from(list, entry => entry[k]);
  return { count: list.length, time: column(0), value: column(1) };
}

/** The index of the first of ascending values that is above `x`. */
function firstAbove(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}
