// Text: instructions as they stand in the file, times, bytes, counts.

/** The name of the buffer in a row. */
function bufferName(scene, row) {
  const kind = kinds[scene.kind[row]], stage = scene.stage[row], piece = scene.piece[row];
  if (piece >= 0 && ["w", "dw"].includes(kind)) return `${kind}.${stage}/${piece}`;
  const parts = [scene.mb[row], piece].filter(part => part >= 0);
  const version = operands[scene.op[row]][0] === "FREE" && scene.operand[row] >= 0 ? `@${scene.operand[row]}` : "";
  return [kind, stage, ...parts].join(".") + version;
}

/** The instruction in a row, as it stands in the file: a shard and a version only where it has one. */
function instructionText(scene, row) {
  const [name, fields] = operands[scene.op[row]];
  const buf = `"${bufferName(scene, row)}"`;
  const named = { stage: scene.stage[row], mb: scene.mb[row], shard: scene.piece[row], buf };
  const values = fields.map(field => [field, field in named ? named[field] : scene.operand[row]]);
  const written = values.filter(([field, value]) => value >= 0 || !["shard", "version"].includes(field));
  return `{"op": "${name}"` + written.map(([field, value]) => `, "${field}": ${value}`).join("") + "}";
}

/** The line of a row in the file, in which each rank's list has two lines around it. */
const lineOf = (scene, row) => scene.line + row + 2 * scene.rank[row];

/** A time, with its unit if it is in seconds. */
function formatTime(value, seconds) {
  if (!seconds) return String(Number(value.toPrecision(Math.abs(value) < 1e5 ? 5 : 8)));
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, s]) => Math.abs(value) >= s) || ["µs", 1e-6];
  return `${Number((value / size).toPrecision(4))} ${unit}`;
}

function formatBytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= 1e4 && i < units.length - 1) { value /= 1e3; i++; }
  return `${Number(value.toPrecision(4))} ${units[i]}`;
}

const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const percent = x => `${(100 * x).toFixed(1)}%`;
const escapeHtml = text => text.replace(/[&<>]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
/** An amount of memory: bytes, if the costs have sizes, or a number of buffers or activations. */
const formatHeld = (value, measure) => measure === "bytes" && data.sized ? formatBytes(value) : String(value);
