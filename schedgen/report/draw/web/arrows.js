// Messages, as arrows.

/** The numbers of a scene's messages for which wanted(row of the SEND, row of the first user, number) holds. */
function messagesWhere(scene, wanted) {
  const numbers = [];
  for (let k = 0; k < scene.sends; k++) if (wanted(scene.send[k], scene.user[k], k)) numbers.push(k);
  return numbers;
}

/** Where an arrow touches a worker's bars: at the edge that is nearer to the other worker's. */
function edgeOf(scene, rank, other) {
  const lane = scene.laneOf[rank];
  return barTop(lane) + (lane.y < scene.laneOf[other].y ? barHeight(lane) : 0);
}

/** Draw messages from where SENDs start to where they arrive; one stroke for each kind. */
function drawArrows(c, scene, numbers, width) {
  const byKind = {};
  for (const k of numbers) {
    const row = scene.send[k], x0 = xOf(scene.start[row]), x1 = xOf(scene.arrival[k]);
    if (x1 < box.left || x0 > box.right) continue;
    const from = scene.rank[row], to = scene.operand[row];
    (byKind[scene.kind[row]] ||= []).push([x0, edgeOf(scene, from, to), x1, edgeOf(scene, to, from)]);
  }
  for (const kind in byKind) {
    const lines = byKind[kind];
    c.strokeStyle = c.fillStyle = linkColours[kind]; // grey for what is lent
    c.globalAlpha = lines.length > 3000 ? 0.25 : lines.length > 600 ? 0.55 : 0.9;
    c.lineWidth = width;
    c.beginPath();
    for (const [x0, y0, x1, y1] of lines) { c.moveTo(x0, y0); c.lineTo(x1, y1); }
    c.stroke();
    if (lines.length > 3000) continue;
    c.beginPath();
    for (const [x0, y0, x1, y1] of lines) {
      const angle = Math.atan2(y1 - y0, x1 - x0), size = 2.5 + 2 * width;
      c.moveTo(x1, y1);
      c.lineTo(x1 - size * Math.cos(angle - 0.45), y1 - size * Math.sin(angle - 0.45));
      c.lineTo(x1 - size * Math.cos(angle + 0.45), y1 - size * Math.sin(angle + 0.45));
    }
    c.fill();
  }
  c.globalAlpha = 1;
}

const MOST_ARROWS = 4000;

/** Draw all messages in the view or, where they are too many, those of every n-th microbatch. */
function drawTransfers(scene) {
  const inView = messagesWhere(scene, (row, _, k) => scene.arrival[k] >= view.from && scene.start[row] <= view.to);
  const every = Math.ceil(inView.length / MOST_ARROWS);
  drawArrows(pen, scene, every > 1 ? inView.filter(k => scene.mb[scene.send[k]] % every <= 0) : inView, 1);
  if (every > 1) notes.push(`messages of 1 microbatch in ${every}: zoom in to see all`);
}
