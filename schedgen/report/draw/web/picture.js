// The picture: time axis, lanes with their bars, messages, and the margins on both sides.

let notes = [];  // what the picture leaves out

function draw() {
  notes = [];
  const began = performance.now();
  layout();
  const { left, right, width, height, axis } = box;
  pen.clearRect(0, 0, width, height);
  pen.save();
  clip(pen, 0, width);
  drawGrid();
  pen.save();
  clip(pen, left - 1, right - left + 2);
  const shown = lanes.filter(lane => lane.scene && visible(lane));
  for (const lane of shown) drawLane(lane);
  drawDense(shown.filter(lane => lane.dense));
  if (show.transfers) scenes.forEach(drawTransfers);
  pen.restore();
  for (const lane of lanes) if (visible(lane)) drawMargins(lane);
  pen.restore();
  if (axis + box.content > height) notes.push("some workers are hidden: drag to see them");
  drawAxis();
  overlay.style.touchAction = allSeen() ? "pan-y" : "none";
  drawPointer();
  window.schedgen.frame = performance.now() - began;
  window.schedgen.frames++;
}

/** Draw only below the axis, between x and x + width. */
function clip(context, x, width) {
  context.beginPath();
  context.rect(x, box.axis, width, box.height - box.axis);
  context.clip();
}

/** Round times in the view, as many as their labels have room for. */
function ticks() {
  const most = Math.max((box.right - box.left) / (6.5 * box.em), 1), rough = (view.to - view.from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(size => size >= rough);
  const times = [];
  for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to * (1 + 1e-12); k++) times.push(k * step);
  return times;
}

function drawGrid() {
  pen.strokeStyle = "#eceff3";
  pen.lineWidth = 1;
  pen.beginPath();
  for (const time of ticks()) {
    const x = Math.round(xOf(time)) + 0.5;
    pen.moveTo(x, box.axis);
    pen.lineTo(x, box.height);
  }
  pen.stroke();
}

function drawAxis() {
  const { em, axis, left, right } = box, below = axis - 0.75 * em, above = 1.05 * em;
  pen.font = `${0.88 * em}px ${box.family}`;
  pen.fillStyle = SOFT;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  const { seconds } = scenes[0];
  for (const time of ticks()) {
    const x = xOf(time), text = formatTime(time, seconds && time > 0), half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(x, left + half - 0.4 * em), right - half), below);
    pen.fillRect(Math.round(x), axis - 0.45 * em, 1, 0.35 * em);
  }
  pen.textAlign = "left";
  pen.fillText(seconds ? "time" : "time, in units of the costs", left - 0.4 * em, above);
  pen.fillText("worker", 0, below);
  pen.fillText("share of time", right + 0.9 * em, below);
  pen.textAlign = "right";
  pen.fillText("busy", right + 9.5 * em, below);
  if (show.memory !== "off") pen.fillText("peak", box.width, below);
  pen.fillStyle = INK;
  pen.fillText(notes.join("; "), right, above);
}

function drawLane(lane) {
  const y = barTop(lane), h = barHeight(lane);
  const first = Math.max(xOf(0), box.left), last = Math.min(xOf(lane.scene.makespan), box.right);
  if (last <= first) return;
  pen.fillStyle = TRACK;
  pen.fillRect(first, y, last - first, h);
  if (show.causes) drawWaits(lane, y, h);
  const { bars } = lane, count = firstAbove(bars.start, view.to) - firstAbove(bars.end, view.from);
  lane.dense = count > 300 && (last - first) / count < 5;
  if (!lane.dense) drawBars(lane, y, h);
  if (showsMemory(lane)) drawLevels(lane);
}

/** Left of a lane its worker, right of it shares of time and peak memory; or a scene's heading. */
function drawMargins(lane) {
  if (lane.heading) drawHeading(lane);
  if (!lane.scene) return;
  const { em, right, width } = box, { scene, rank } = lane;
  const middle = barTop(lane) + barHeight(lane) / 2, size = Math.min(0.92 * em, lane.height * 0.95);
  const small = lane.height < 0.8 * em, skip = small && !lane.link ? Math.ceil(0.9 * em / lane.height) : 1;
  pen.textBaseline = "middle";
  pen.font = `${small ? 0.8 * em : size}px ${box.family}`;
  if (lane.link ? lane.height > 0.6 * em : rank % skip === 0) {
    pen.fillStyle = INK;
    pen.textAlign = "right";
    pen.fillText(lane.name && scene.number ? "" : lane.label, lane.link ? box.left - 0.6 * em : 3.1 * em, middle);
    pen.fillStyle = SOFT;
    pen.textAlign = "left";
    pen.fillText(lane.name, 3.7 * em, middle);
  }
  if (lane.link) return;
  const x0 = right + 0.9 * em, wide = 5.2 * em, h = Math.min(barHeight(lane), 1.5 * em), y = middle - h / 2;
  let x = x0;
  scene.shares[rank].forEach((share, i) => {
    pen.fillStyle = shareColours[i];
    pen.fillRect(x, y, share * wide, h);
    x += share * wide;
  });
  if (rank % skip === 0) {
    pen.fillStyle = INK;
    pen.textAlign = "right";
    pen.fillText(percent(scene.shares[rank][0]), x0 + wide + 3.4 * em, middle);
    if (show.memory !== "off") {
      pen.fillStyle = SOFT;
      pen.fillText(formatHeld(lane.peak[show.memory], show.memory), width, middle);
    }
  }
}

function drawHeading(lane) {
  const { em } = box, scene = lane.heading, y = topOf(lane) + lane.height - 0.55 * em;
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  pen.fillStyle = INK;
  pen.font = `650 ${em}px ${box.family}`;
  pen.fillText(scene.name, 0, y);
  const x = pen.measureText(scene.name).width + em;
  pen.font = `${0.92 * em}px ${box.family}`;
  pen.fillStyle = SOFT;
  pen.fillText(keyFigures(scene), x, y);
}
