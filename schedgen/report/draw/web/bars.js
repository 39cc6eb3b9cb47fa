// One lane: its bars, why its worker waits, and what it holds.

const patterns = {};
/** The canvas pattern of a hatch, "/", "\\" or "."; `ratio`: device pixels a pixel. */
function hatch(kind, ratio) {
  if (patterns[kind]) return patterns[kind];
  const size = Math.round(6 * ratio), tile = new OffscreenCanvas(size, size), c = tile.getContext("2d");
  c.strokeStyle = c.fillStyle = INK;
  c.globalAlpha = 0.26;
  c.lineWidth = ratio;
  c.beginPath();
  for (const shift of [-size, 0, size])
    if (kind === "/") { c.moveTo(shift, size); c.lineTo(shift + size, 0); }
    else if (kind === "\\") { c.moveTo(shift, 0); c.lineTo(shift + size, size); }
  c.stroke();
  if (kind === ".")
    for (const at of [1.5, 4.5]) { c.beginPath(); c.arc(at * ratio, at * ratio, 0.8 * ratio, 0, 7); c.fill(); }
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return patterns[kind] = pattern;
}

/** The colour of a bar; `kind`: its look, -1 for instructions that do not compute. */
function paint(scene, row, kind) {
  if (kind < 0) return GREY;
  const index = show.by === "microbatch" ? scene.mb[row] : scene.stage[row];
  return paints[show.by][kind][Math.max(index, 0)];
}

const sheet = document.createElement("canvas");  // a row of pixels for each dense lane
const channels = list => Float32Array.from(list.flatMap(c => [1, 3, 5].map(at => parseInt(c.slice(at, at + 2), 16))));
const greyChannels = channels([GREY]);
const linkColours = kinds.map(kind => transferColours[kind] || GREY);
const linkChannels = linkColours.map(colour => channels([colour]));
const paintChannels = { microbatch: paints.microbatch.map(channels), stage: paints.stage.map(channels) };

/** Lanes whose bars are about as wide as pixels: each pixel has the mean of the colours that fall into it. */
function drawDense(dense) {
  const ratio = devicePixelRatio || 1, wide = Math.round((box.right - box.left) * ratio);
  if (!dense.length || wide < 1) return;
  if (sheet.width !== wide || sheet.height !== dense.length) { sheet.width = wide; sheet.height = dense.length; }
  const c = sheet.getContext("2d"), image = c.createImageData(wide, dense.length), sums = new Float32Array(4 * wide);
  dense.forEach((lane, k) => {
    sums.fill(0);
    addColours(lane, sums, wide, box.scale * ratio);
    for (let p = 0, to = 4 * k * wide; p < 4 * wide; p += 4, to += 4) {
      const covered = sums[p + 3];
      if (covered < 0.004) continue;
      for (let channel = 0; channel < 3; channel++) image.data[to + channel] = sums[p + channel] / covered;
      image.data[to + 3] = 255 * covered;
    }
  });
  c.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  dense.forEach((lane, k) => {
    pen.drawImage(sheet, 0, k, wide, 1, box.left, barTop(lane), box.right - box.left, barHeight(lane));
  });
}

/** Add to every pixel's red, green, blue and coverage what falls into it; `scale`: pixels a unit of time. */
function addColours({ scene, bars, link }, sums, wide, scale) {
  const by = show.by === "microbatch" ? scene.mb : scene.stage;
  for (let i = firstAbove(bars.end, view.from); i < bars.count && bars.start[i] < view.to; i++) {
    const a = Math.max((bars.start[i] - view.from) * scale, 0), b = Math.min((bars.end[i] - view.from) * scale, wide);
    const kind = bars.kind[i], paintsOf = link ? linkChannels : paintChannels[show.by];
    const colour = kind < 0 ? greyChannels : paintsOf[kind];
    const at = kind < 0 || link ? 0 : 3 * Math.max(by[bars.row[i]], 0);
    for (let p = Math.floor(a); p < b; p++) {
      const part = Math.min(b, p + 1) - Math.max(a, p);
      sums[4 * p] += part * colour[at];
      sums[4 * p + 1] += part * colour[at + 1];
      sums[4 * p + 2] += part * colour[at + 2];
      sums[4 * p + 3] += part;
    }
  }
}

function drawWaits({ waits }, y, h) {
  const tall = Math.max(h * 0.2, 2), top = y + (h - tall) / 2;
  for (let i = firstAbove(waits.end, view.from); i < waits.count && waits.start[i] < view.to; i++) {
    const x0 = Math.max(xOf(waits.start[i]), box.left), x1 = Math.min(xOf(waits.end[i]), box.right);
    if (x1 - x0 < 0.4) continue;
    pen.fillStyle = shareColours[waits.kind[i]];
    pen.fillRect(x0, top, x1 - x0, tall);
  }
}

function drawBars({ scene, bars, link }, y, h) {
  const { em } = box, size = Math.min(0.86 * em, h * 0.62), labels = h > 0.85 * em;
  const ratio = devicePixelRatio || 1;
  if (labels) {
    pen.font = `${size}px ${box.family}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
  }
  const digit = labels ? pen.measureText("0").width : 0;
  for (let i = firstAbove(bars.end, view.from); i < bars.count && bars.start[i] < view.to; i++) {
    const x0 = xOf(bars.start[i]), x1 = xOf(bars.end[i]), kind = bars.kind[i], row = bars.row[i];
    if (x1 - x0 < 0.3) continue;  // too narrow to be seen among wider ones
    const wide = x1 - x0, gap = wide > 6 ? 0.5 : 0;
    const a = Math.max(x0 + gap, box.left - 4), b = Math.min(x1 - gap, box.right + 4);
    pen.fillStyle = link ? linkColours[kind] : paint(scene, row, kind);
    const tall = kind < 0 ? h * 0.4 : h, top = y + (h - tall) / 2;
    if (wide > 14 && h > 14) {
      pen.beginPath();
      pen.roundRect(a, top, b - a, tall, 2.5);
      pen.fill();
    } else pen.fillRect(a, top, b - a, tall);
    if (kind < 0 || link) continue;
    if (looks[kind].hatch && wide > 5 && h > 7) {
      pen.fillStyle = hatch(looks[kind].hatch, ratio);
      pen.fillRect(a, y, b - a, h);
    }
    if (!labels || wide < 1.6 * digit) continue;
    const { letter } = looks[kind], number = scene.mb[row] < 0 ? "" : String(scene.mb[row]);
    const s0 = Math.max(a, box.left), s1 = Math.min(b, box.right);  // the part that is seen
    const label = [letter + number, number].find(text => (text.length + 0.6) * digit < s1 - s0);
    pen.fillStyle = looks[kind].ink;
    if (label) pen.fillText(label, (s0 + s1) / 2, y + h / 2 + size * 0.06);
  }
}

/** Memory over time, below the bars; the worker that holds most fills the strip. */
function drawLevels(lane) {
  const measure = show.memory, { time, value, count } = lane.levels[measure];
  const most = Math.max(...scenes.map(scene => scene.most[measure]), 1);
  const foot = topOf(lane) + lane.height * 0.97, tall = lane.height * 0.24;
  let i = Math.max(firstAbove(time, view.from) - 1, 0), level = value[i], pixel = -1, high = 0;
  const end = Math.min(xOf(lane.scene.makespan), box.right + 1);
  pen.fillStyle = HELD;
  pen.beginPath();
  pen.moveTo(Math.max(xOf(time[i]), box.left - 1), foot);
  pen.lineTo(Math.max(xOf(time[i]), box.left - 1), foot - tall * level / most);
  for (i++; i < count && time[i] <= view.to; i++) {
    const x = xOf(time[i]);
    if ((x | 0) === pixel) {  // a pixel shows the most that falls into it
      if (value[i] > high) { high = value[i]; pen.lineTo(x, foot - tall * high / most); }
      level = value[i];
      continue;
    }
    pixel = x | 0;
    pen.lineTo(x, foot - tall * level / most);
    high = level = value[i];
    pen.lineTo(x, foot - tall * level / most);
  }
  pen.lineTo(end, foot - tall * level / most);
  pen.lineTo(end, foot);
  pen.fill();
}
