// The picture: axis, bars, why workers wait, what they hold, and the margins on both sides.

const hatches = {};
function hatch(kind, ratio) {
  if (hatches[kind]) return hatches[kind];
  const size = Math.round(6 * ratio), tile = new OffscreenCanvas(size, size), c = tile.getContext("2d");
  c.strokeStyle = c.fillStyle = "#1c2430";
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
  return hatches[kind] = pattern;
}

function paint(scene, row, kind) {
  if (kind < 0) return GREY;
  const index = show.by === "microbatch" ? scene.mb[row] : scene.stage[row];
  return paints[show.by][kind][Math.max(index, 0)];
}

let notes = [];  // what the picture leaves out

function draw() {
  notes = [];
  const began = performance.now();
  layout();
  const { em, left, right, width, height, axis } = box;
  pen.clearRect(0, 0, width, height);
  pen.save();
  pen.beginPath();
  pen.rect(0, axis, width, height - axis);
  pen.clip();
  grid(axis, height);
  pen.save();
  pen.beginPath();
  pen.rect(left - 1, axis, right - left + 2, height - axis);
  pen.clip();
  const shown = lanes.filter(lane => lane.scene && visible(lane));
  for (const lane of shown) drawLane(lane);
  drawDense(shown.filter(lane => lane.dense));
  if (show.transfers) read.scenes.forEach(drawTransfers);
  pen.restore();
  for (const lane of lanes) if (visible(lane)) drawMargins(lane);
  pen.restore();
  if (box.content > box.height - box.axis) notes.push("some workers are hidden: drag to see them");
  drawAxis();
  overlay.style.touchAction = whole() ? "pan-y" : "none";
  drawSeen();
  window.schedgen.frame = performance.now() - began;
  window.schedgen.frames++;
}

function ticks() {
  const most = Math.max((box.right - box.left) / (6.5 * box.em), 1), rough = (view.to - view.from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(one => one >= rough);
  const found = [];
  for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to * (1 + 1e-12); k++) found.push(k * step);
  return found;
}

function grid(from, to) {
  pen.strokeStyle = "#eceff3";
  pen.lineWidth = 1;
  pen.beginPath();
  for (const time of ticks()) { const x = Math.round(X(time)) + 0.5; pen.moveTo(x, from); pen.lineTo(x, to); }
  pen.stroke();
}

function drawAxis() {
  const { em, axis, left, right } = box;
  pen.font = `${0.88 * em}px ${family()}`;
  pen.fillStyle = SOFT;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  const seconds = read.scenes[0].seconds;
  for (const time of ticks()) {
    const x = X(time), words = amount(time, seconds && time > 0), half = pen.measureText(words).width / 2;
    pen.fillText(words, Math.min(Math.max(x, left + half - 0.4 * em), right - half), axis - 0.75 * em);
    pen.fillRect(Math.round(x), axis - 0.45 * em, 1, 0.35 * em);
  }
  pen.textAlign = "left";
  pen.fillText(seconds ? "time" : "time, in units of the costs", left - 0.4 * em, 1.05 * em);
  pen.fillText("worker", 0, axis - 0.75 * em);
  pen.fillText("share of time", right + 0.9 * em, axis - 0.75 * em);
  pen.textAlign = "right";
  pen.fillText("busy", right + 9.5 * em, axis - 0.75 * em);
  if (show.memory !== "off") pen.fillText("peak", box.width, axis - 0.75 * em);
  pen.fillStyle = INK;
  pen.fillText(notes.join("; "), right, 1.05 * em);
}

function drawLane(lane) {
  const { scene } = lane, y = barTop(lane), h = barHeight(lane);
  const first = Math.max(X(0), box.left), last = Math.min(X(scene.makespan), box.right);
  if (last <= first) return;
  pen.fillStyle = TRACK;
  pen.fillRect(first, y, last - first, h);
  if (show.causes) drawWaits(lane, y, h);
  const { bars } = lane, from = above(bars.end, view.from), count = above(bars.start, view.to) - from;
  lane.dense = count > 300 && (last - first) / count < 5;
  if (!lane.dense) drawBars(lane, y, h);
  if (strip(lane)) drawLevels(lane);
}

const sheet = document.createElement("canvas");  // a row of pixels for each lane in which bars are narrow

/** Lanes whose bars are about as wide as pixels: each pixel has the mean of the colours that fall into it. */
function drawDense(dense) {
  const ratio = devicePixelRatio || 1, wide = Math.round((box.right - box.left) * ratio);
  if (!dense.length || wide < 1) return;
  if (sheet.width !== wide || sheet.height !== dense.length) { sheet.width = wide; sheet.height = dense.length; }
  const c = sheet.getContext("2d"), image = c.createImageData(wide, dense.length), mixed = new Float32Array(4 * wide);
  dense.forEach(({ scene, bars }, k) => {
    mixed.fill(0);
    const by = show.by === "microbatch" ? scene.mb : scene.stage, scale = box.scale * ratio;
    for (let i = above(bars.end, view.from); i < bars.count && bars.start[i] < view.to; i++) {
      const a = Math.max((bars.start[i] - view.from) * scale, 0), b = Math.min((bars.end[i] - view.from) * scale, wide);
      const kind = bars.kind[i], colour = kind < 0 ? grey : mixes[show.by][kind];
      const at = kind < 0 ? 0 : 3 * Math.max(by[bars.row[i]], 0);
      for (let p = Math.floor(a); p < b; p++) {
        const part = Math.min(b, p + 1) - Math.max(a, p);
        mixed[4 * p] += part * colour[at];
        mixed[4 * p + 1] += part * colour[at + 1];
        mixed[4 * p + 2] += part * colour[at + 2];
        mixed[4 * p + 3] += part;
      }
    }
    for (let p = 0, to = 4 * k * wide; p < 4 * wide; p += 4, to += 4) {
      const part = mixed[p + 3];
      if (part < 0.004) continue;
      for (let channel = 0; channel < 3; channel++) image.data[to + channel] = mixed[p + channel] / part;
      image.data[to + 3] = 255 * part;
    }
  });
  c.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  dense.forEach((lane, k) => {
    pen.drawImage(sheet, 0, k, wide, 1, box.left, barTop(lane), box.right - box.left, barHeight(lane));
  });
}

const mix = colours => Float32Array.from(colours.flatMap(one => [1, 3, 5].map(at => parseInt(one.slice(at, at + 2), 16))));
const grey = mix([GREY]), mixes = { microbatch: paints.microbatch.map(mix), stage: paints.stage.map(mix) };

function drawWaits({ waits }, y, h) {
  const tall = Math.max(h * 0.2, 2), at = y + (h - tall) / 2;
  for (let i = above(waits.end, view.from); i < waits.count && waits.start[i] < view.to; i++) {
    const x0 = Math.max(X(waits.start[i]), box.left), x1 = Math.min(X(waits.end[i]), box.right);
    if (x1 - x0 < 0.4) continue;
    pen.fillStyle = shareColours[waits.kind[i]];
    pen.fillRect(x0, at, x1 - x0, tall);
  }
}

function drawBars({ scene, bars }, y, h) {
  const { em } = box, size = Math.min(0.86 * em, h * 0.62), labels = h > 0.85 * em;
  const ratio = devicePixelRatio || 1;
  if (labels) {
    pen.font = `${size}px ${family()}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
  }
  const digit = labels ? pen.measureText("0").width : 0;
  for (let i = above(bars.end, view.from); i < bars.count && bars.start[i] < view.to; i++) {
    const x0 = X(bars.start[i]), x1 = X(bars.end[i]), kind = bars.kind[i], row = bars.row[i];
    if (x1 - x0 < 0.3) continue;  // among wider ones: nothing to see
    const wide = x1 - x0, gap = wide > 6 ? 0.5 : 0;
    const a = Math.max(x0 + gap, box.left - 4), b = Math.min(x1 - gap, box.right + 4);
    pen.fillStyle = paint(scene, row, kind);
    const tall = kind < 0 ? h * 0.4 : h, at = y + (h - tall) / 2;
    if (wide > 14 && h > 14) {
      pen.beginPath();
      pen.roundRect(a, at, b - a, tall, 2.5);
      pen.fill();
    } else pen.fillRect(a, at, b - a, tall);
    if (kind < 0) continue;
    if (looks[kind].hatch && wide > 5 && h > 7) {
      pen.fillStyle = hatch(looks[kind].hatch, ratio);
      pen.fillRect(a, y, b - a, h);
    }
    if (!labels || wide < 1.6 * digit) continue;
    const { letter } = looks[kind], number = scene.mb[row] < 0 ? "" : String(scene.mb[row]);
    const s0 = Math.max(a, box.left), s1 = Math.min(b, box.right);
    const fits = [letter + number, number].find(text => (text.length + 0.6) * digit < s1 - s0);
    pen.fillStyle = looks[kind].ink;
    if (fits) pen.fillText(fits, (s0 + s1) / 2, y + h / 2 + size * 0.06);
  }
}

function drawLevels(lane) {
  const measure = show.memory, { time, value, count } = lane.levels[measure];
  const most = Math.max(...read.scenes.map(scene => scene.most[measure]), 1);
  const foot = topOf(lane) + lane.height * 0.97, tall = lane.height * 0.24;
  let i = Math.max(above(time, view.from) - 1, 0), level = value[i], pixel = -1, high = 0;
  const end = Math.min(X(lane.scene.makespan), box.right + 1);
  pen.fillStyle = HELD;
  pen.beginPath();
  pen.moveTo(Math.max(X(time[i]), box.left - 1), foot);
  pen.lineTo(Math.max(X(time[i]), box.left - 1), foot - tall * level / most);
  for (i++; i < count && time[i] <= view.to; i++) {
    const x = X(time[i]);
    if ((x | 0) === pixel) {  // the most within a pixel is what it shows
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

function drawMargins(lane) {
  const { em, right, width } = box;
  if (lane.heading) {
    const one = lane.heading;
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    pen.fillStyle = INK;
    pen.font = `650 ${em}px ${family()}`;
    const y = topOf(lane) + lane.height - 0.55 * em, name = one.name;
    pen.fillText(name, 0, y);
    const x = pen.measureText(name).width + em;
    pen.font = `${0.92 * em}px ${family()}`;
    pen.fillStyle = SOFT;
    pen.fillText(facts(one), x, y);
    return;
  }
  if (!lane.scene) return;
  const middle = barTop(lane) + barHeight(lane) / 2, size = Math.min(0.92 * em, lane.height * 0.95);
  const small = lane.height < 0.8 * em, skip = small ? Math.ceil(0.9 * em / lane.height) : 1;
  pen.textBaseline = "middle";
  pen.font = `${small ? 0.8 * em : size}px ${family()}`;
  if (lane.rank % skip === 0) {
    pen.fillStyle = INK;
    pen.textAlign = "right";
    pen.fillText(lane.name && lane.scene.number ? "" : lane.label, 3.1 * em, middle);
    pen.fillStyle = SOFT;
    pen.textAlign = "left";
    pen.fillText(lane.name, 3.7 * em, middle);
  }
  const x0 = right + 0.9 * em, wide = 5.2 * em, h = Math.min(barHeight(lane), 1.5 * em), y = middle - h / 2;
  let x = x0;
  lane.scene.shares[lane.rank].forEach((share, which) => {
    pen.fillStyle = shareColours[which];
    pen.fillRect(x, y, share * wide, h);
    x += share * wide;
  });
  if (lane.rank % skip === 0) {
    pen.fillStyle = INK;
    pen.textAlign = "right";
    pen.fillText(percent(lane.scene.shares[lane.rank][0]), x0 + wide + 3.4 * em, middle);
    if (show.memory !== "off") {
      pen.fillStyle = SOFT;
      pen.fillText(held(lane.peak[show.memory], show.memory), width, middle);
    }
  }
}
