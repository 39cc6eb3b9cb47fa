// What the pointer is on, in words and marked in the picture.

let pointer = null;  // where it is on the picture

/** What lies at a point: its lane, with a bar's or a wait's index in it, a message's number and scene, or its share. */
function hit(x, y) {
  const lane = lanes.find(line => line.scene && y >= topOf(line) && y < topOf(line) + line.height), time = timeAt(x);
  if (!lane || x < box.left || y < box.axis) return null;
  if (x > box.right) return lane.link ? null : { lane, share: true };
  if (show.transfers) {
    const nearest = nearestMessage(x, y);
    if (nearest) return { lane, time, ...nearest };
  }
  if (time > lane.scene.makespan) return null;
  const near = 2 / box.scale;
  for (const [list, name] of [[lane.bars, "bar"], [lane.waits, "wait"]]) {
    const i = firstAbove(list.start, time) - 1;
    if (i >= 0 && list.end[i] > time) return { lane, time, [name]: i };
  }
  const i = firstAbove(lane.bars.end, time - near);  // a bar thinner than a pixel
  return i < lane.bars.count && lane.bars.start[i] < time + near ? { lane, time, bar: i } : null;
}

function nearestMessage(x, y) {
  let distance = 4, nearest = null;
  for (const scene of scenes)
    for (let k = 0; k < scene.sends; k++) {
      const row = scene.send[k], x0 = xOf(scene.start[row]), x1 = xOf(scene.arrival[k]);
      if (Math.max(x0, x1) < x - distance || Math.min(x0, x1) > x + distance) continue;
      const from = scene.rank[row], to = scene.operand[row];
      const y0 = edgeOf(scene, from, to), y1 = edgeOf(scene, to, from), dx = x1 - x0, dy = y1 - y0;
      const along = Math.min(Math.max(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy || 1), 0), 1);
      const off = Math.hypot(x - x0 - along * dx, y - y0 - along * dy);
      if (off < distance) { distance = off; nearest = { scene, message: k }; }
    }
  return nearest;
}

function position(scene, row) {
  return `<b>${escapeHtml(scene.file)}</b>, line <b>${lineOf(scene, row)}</b>, worker ${scene.rank[row]}`;
}

/** How long a row waits, for what, and which shares of time that is. */
function waitText(scene, row) {
  const { gap, first, awaited, cause } = scene, say = value => formatTime(value, scene.seconds), sender = awaited[row];
  let what = cause[row] < 0 ? "" : ` for ${causes[cause[row]]}`;
  if (sender >= 0 && cause[row] < causes.indexOf("send"))  // the causes before are kinds of messages
    what = ` for ${bufferName(scene, sender)} of worker ${scene.rank[sender]} (line ${lineOf(scene, sender)})`;
  const parts = [[scene.early[row], first[row]], [scene.late[row], gap[row] - first[row]]].filter(part => part[1] > 0);
  const listed = parts.map(([share, length]) => `${shares[share]} ${say(length)}`).join(", ");
  return `waits ${say(gap[row])} from ${say(scene.start[row] - gap[row])}${what}: ${listed}`;
}

function heldText(lane, time) {
  const at = measure => {
    const levels = lane.levels[measure];
    return levels.value[Math.max(firstAbove(levels.time, time) - 1, 0)];
  };
  const all = data.sized ? formatBytes(at("bytes")) : plural(at("bytes"), "buffer");
  return `holds ${plural(at("activations"), "activation")}, ${all}`;
}

const codeHtml = (scene, row) => `<code>${escapeHtml(instructionText(scene, row))}</code>`;
const lineHtml = html => `<div>${html}</div>`;

/** The tip's HTML for what `hit` returns. */
function tipHtml({ lane, time, bar, wait, message, share, scene: sender }) {
  const scene = sender || lane.scene, say = value => formatTime(value, scene.seconds);
  if (share) {
    const list = scene.shares[lane.rank].map((part, i) => part > 0 && `${shares[i]} <b>${percent(part)}</b>`);
    return lineHtml(`worker <b>${lane.rank}</b>: ${list.filter(Boolean).join(", ")}`);
  }
  if (message !== undefined) {
    const send = scene.send[message], receive = scene.receiver[message];
    return codeHtml(scene, send) + lineHtml(`${position(scene, send)}, at ${say(scene.start[send])}`)
      + codeHtml(scene, receive) + lineHtml(`${position(scene, receive)}, there at ${say(scene.arrival[message])}`);
  }
  if (lane.link) {
    const row = lane.bars.row[bar], start = lane.bars.start[bar], end = lane.bars.end[bar];
    return codeHtml(scene, row) + lineHtml(position(scene, row))
      + lineHtml(`occupies ${escapeHtml(lane.label)} from ${say(start)} to ${say(end)}, for <b>${say(end - start)}</b>`);
  }
  if (bar !== undefined) {
    const row = lane.bars.row[bar], start = scene.start[row], end = scene.end[row];
    const when = `${say(start)} to ${say(end)}, takes <b>${say(end - start)}</b>`;
    return codeHtml(scene, row) + lineHtml(position(scene, row))
      + lineHtml(`${when}; ${heldText(lane, Math.max(time, start))}`)
      + (scene.gap[row] > 0 ? lineHtml(waitText(scene, row)) : "");
  }
  const row = lane.waits.row[wait], kind = lane.waits.kind[wait];
  const length = say(lane.waits.end[wait] - lane.waits.start[wait]);
  if (row < 0) return lineHtml(`worker ${lane.rank}: <b>${shares[kind]}</b>, ${length}; all its instructions are done`);
  return codeHtml(scene, row) + lineHtml(position(scene, row)) + lineHtml(waitText(scene, row))
    + lineHtml(`here: <b>${shares[kind]}</b>, ${shareWords[kind]}; ${heldText(lane, time)}`);
}

/** Mark the time, the bar or wait, and the messages under the pointer. */
function drawPointer() {
  marker.clearRect(0, 0, box.width, box.height);
  if (!pointer) return;
  const target = hit(pointer.x, pointer.y);
  if (!target || target.share) return;
  marker.save();
  clip(marker, box.left - 1, box.right - box.left + 2);
  const { lane } = target, scene = target.scene || lane.scene;
  marker.fillStyle = "#1c243033";
  marker.fillRect(Math.round(xOf(target.time)), box.axis, 1, box.height);
  if (target.message !== undefined) drawArrows(marker, scene, [target.message], 2);
  const list = target.bar !== undefined ? lane.bars : lane.waits, i = target.bar ?? target.wait;
  if (i !== undefined) {
    const a = Math.max(xOf(list.start[i]), box.left), b = Math.min(xOf(list.end[i]), box.right), job = list.row[i];
    const messages = lane.link ? messagesWhere(scene, row => row === job)
      : target.bar !== undefined ? messagesOf(scene, job)
      : job >= 0 ? messagesWhere(scene, row => row === scene.awaited[job]) : [];
    drawArrows(marker, scene, messages, 1.5);
    marker.strokeStyle = INK;
    marker.lineWidth = 1.5;
    marker.strokeRect(a, barTop(lane), Math.max(b - a, 1), barHeight(lane));
  }
  marker.restore();
}

/** The messages a job uses, and those that carry on what it computed. */
function messagesOf(scene, job) {
  const [name] = operands[scene.op[job]], forward = name === "FWD", kind = kinds.indexOf(forward ? "x" : "g");
  const rank = scene.rank[job];
  return messagesWhere(scene, (row, user) => user === job
    || row > job && scene.rank[row] === rank && scene.kind[row] === kind && scene.mb[row] === scene.mb[job]
    && (forward ? scene.stage[row] === scene.stage[job] : scene.stage[row] < scene.stage[job])
    && jobBefore(scene, row, name) === job);
}

/** The last job of an opcode on this microbatch before a SEND. */
function jobBefore(scene, send, name) {
  for (let row = send; row >= scene.bounds[scene.rank[send]]; row--)
    if (scene.mb[row] === scene.mb[send] && operands[scene.op[row]][0] === name) return row;
  return -1;
}

function pointOf(event) {
  const area = overlay.getBoundingClientRect();
  return { x: event.clientX - area.left, y: event.clientY - area.top };
}

/** Show the tip for what the pointer is on, beside it. */
function showTip(event) {
  pointer = pointOf(event);
  const target = hit(pointer.x, pointer.y), tip = $("tip");
  drawPointer();
  tip.style.visibility = target ? "visible" : "hidden";
  if (!target) return;
  tip.innerHTML = tipHtml(target);
  const area = tip.getBoundingClientRect(), gap = 16;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + gap, innerWidth - area.width - 8))}px`;
  const below = event.clientY + gap + area.height < innerHeight;
  tip.style.top = `${below ? event.clientY + gap : Math.max(8, event.clientY - gap - area.height)}px`;
}

function hideTip() { pointer = null; $("tip").style.visibility = "hidden"; drawPointer(); }
