// What the pointer is on, in words and marked in the picture.

/** The lane, and: a bar's or a wait's number in it, a message's number and its scene, or its share of time. */
function find(x, y) {
  const lane = lanes.find(one => one.scene && y >= topOf(one) && y < topOf(one) + one.height), time = T(x);
  if (!lane || x < box.left || y < box.axis) return null;
  if (x > box.right) return { lane, share: true };
  if (show.transfers) {
    const k = nearest(x, y);
    if (k) return { lane, time, ...k };
  }
  if (time > lane.scene.makespan) return null;
  const near = 2 / box.scale;
  for (const [list, name] of [[lane.bars, "bar"], [lane.waits, "wait"]]) {
    const i = above(list.start, time) - 1;
    if (i >= 0 && list.end[i] > time) return { lane, time, [name]: i };
  }
  const i = above(lane.bars.end, time - near);  // thinner than a pixel
  return i < lane.bars.count && lane.bars.start[i] < time + near ? { lane, time, bar: i } : null;
}

function nearest(x, y) {
  let best = 4, found = null;
  for (const scene of read.scenes)
    for (let k = 0; k < scene.sends; k++) {
      const row = scene.send[k], x0 = X(scene.start[row]), x1 = X(scene.arrival[k]);
      if (Math.max(x0, x1) < x - best || Math.min(x0, x1) > x + best) continue;
      const from = scene.rank[row], to = scene.peer[row];
      const y0 = edgeOf(scene, from, to), y1 = edgeOf(scene, to, from), dx = x1 - x0, dy = y1 - y0;
      const along = Math.min(Math.max(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy || 1), 0), 1);
      const off = Math.hypot(x - x0 - along * dx, y - y0 - along * dy);
      if (off < best) { best = off; found = { scene, message: k }; }
    }
  return found;
}

function place(scene, row) {
  return `<b>${escape(scene.file)}</b>, line <b>${lineOf(scene, row)}</b>, worker ${scene.rank[row]}`;
}

function waited(scene, row) {
  const { gap, first, awaited, cause } = scene, say = value => amount(value, scene.seconds), sender = awaited[row];
  let what = cause[row] < 0 ? "" : ` for ${causes[cause[row]]}`;
  if (sender >= 0 && cause[row] < 4)
    what = ` for ${bufferName(scene, sender)} of worker ${scene.rank[sender]} (line ${lineOf(scene, sender)})`;
  const parts = [[scene.early[row], first[row]], [scene.late[row], gap[row] - first[row]]].filter(part => part[1] > 0);
  const shared = parts.map(([which, length]) => `${shares[which]} ${say(length)}`).join(", ");
  return `waits ${say(gap[row])} from ${say(scene.start[row] - gap[row])}${what}: ${shared}`;
}

function holds(lane, time) {
  const at = measure => {
    const levels = lane.levels[measure];
    return levels.value[Math.max(above(levels.time, time) - 1, 0)];
  };
  const all = read.sized ? bytes(at("bytes")) : count(at("bytes"), "buffer");
  return `holds ${count(at("activations"), "activation")}, ${all}`;
}

const code = (scene, row) => `<code>${escape(instruction(scene, row))}</code>`;
const line = words => `<div>${words}</div>`;

function words({ lane, time, bar, wait, message, share, scene: from }) {
  const scene = from || lane.scene, say = value => amount(value, scene.seconds);
  if (share) {
    const list = scene.shares[lane.rank].map((part, i) => part > 0 && `${shares[i]} <b>${percent(part)}</b>`);
    return line(`worker <b>${lane.rank}</b>: ${list.filter(Boolean).join(", ")}`);
  }
  if (message !== undefined) {
    const send = scene.send[message], receive = scene.receiver[message];
    return code(scene, send) + line(`${place(scene, send)}, at ${say(scene.start[send])}`)
      + code(scene, receive) + line(`${place(scene, receive)}, there at ${say(scene.arrival[message])}`);
  }
  if (bar !== undefined) {
    const row = lane.bars.row[bar], start = scene.start[row], end = scene.end[row];
    const when = `${say(start)} to ${say(end)}, takes <b>${say(end - start)}</b>`;
    return code(scene, row) + line(place(scene, row)) + line(`${when}; ${holds(lane, Math.max(time, start))}`)
      + (scene.gap[row] > 0 ? line(waited(scene, row)) : "");
  }
  const row = lane.waits.row[wait], kind = lane.waits.kind[wait];
  const length = say(lane.waits.end[wait] - lane.waits.start[wait]);
  if (row < 0) return line(`worker ${lane.rank}: <b>${shares[kind]}</b>, ${length}; all its instructions are done`);
  return code(scene, row) + line(place(scene, row)) + line(waited(scene, row))
    + line(`here: <b>${shares[kind]}</b>, ${shareWords[kind]}; ${holds(lane, time)}`);
}

function drawSeen() {
  marker.clearRect(0, 0, box.width, box.height);
  if (!seen) return;
  const at = find(seen.x, seen.y);
  if (!at || at.share) return;
  marker.save();
  marker.beginPath();
  marker.rect(box.left - 1, box.axis, box.right - box.left + 2, box.height - box.axis);
  marker.clip();
  const { lane } = at, scene = at.scene || lane.scene, x = X(at.time);
  marker.fillStyle = "#1c243033";
  marker.fillRect(Math.round(x), box.axis, 1, box.height);
  if (at.message !== undefined) arrows(marker, scene, [at.message], 2);
  const list = at.bar !== undefined ? lane.bars : lane.waits, i = at.bar ?? at.wait;
  if (i !== undefined) {
    const a = Math.max(X(list.start[i]), box.left), b = Math.min(X(list.end[i]), box.right);
    if (at.bar !== undefined) arrows(marker, scene, around(scene, list.row[i]), 1.5);
    else if (list.row[i] >= 0) arrows(marker, scene, messages(scene, row => row === scene.awaited[list.row[i]]), 1.5);
    marker.strokeStyle = INK;
    marker.lineWidth = 1.5;
    marker.strokeRect(a, barTop(lane), Math.max(b - a, 1), barHeight(lane));
  }
  marker.restore();
}

/** The messages a job uses, and those that carry on what it computed. */
function around(scene, job) {
  const [name] = operands[scene.op[job]], kind = kinds.indexOf(name === "FWD" ? "x" : "g"), rank = scene.rank[job];
  return messages(scene, (row, user) => user === job
    || row > job && scene.rank[row] === rank && scene.kind[row] === kind && scene.mb[row] === scene.mb[job]
    && (kind === 1 ? scene.stage[row] === scene.stage[job] : scene.stage[row] < scene.stage[job])
    && maker(scene, row, name) === job);
}

/** The last job of a kind on this microbatch before a SEND. */
function maker(scene, send, name) {
  for (let row = send; row >= scene.bounds[scene.rank[send]]; row--)
    if (scene.mb[row] === scene.mb[send] && operands[scene.op[row]][0] === name) return row;
  return -1;
}

function point(event) {
  const area = overlay.getBoundingClientRect();
  return { x: event.clientX - area.left, y: event.clientY - area.top };
}

function tell(event) {
  seen = point(event);
  const at = find(seen.x, seen.y), tip = $("tip");
  drawSeen();
  tip.style.visibility = at ? "visible" : "hidden";
  if (!at) return;
  tip.innerHTML = words(at);
  const area = tip.getBoundingClientRect(), gap = 16;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + gap, innerWidth - area.width - 8))}px`;
  const below = event.clientY + gap + area.height < innerHeight;
  tip.style.top = `${below ? event.clientY + gap : Math.max(8, event.clientY - gap - area.height)}px`;
}

function quiet() { seen = null; $("tip").style.visibility = "hidden"; drawSeen(); }
