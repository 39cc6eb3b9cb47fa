// View: which times are seen, how high a row is, how far rows are scrolled, and where things lie in pixels.

const base = $("base"), overlay = $("overlay"), pen = base.getContext("2d"), marker = overlay.getContext("2d");
const view = { from: 0, to: 1, row: 0, top: 0 };  // times; pixels of a row (0: what fits), and scrolled
const TALLEST = 4096;  // pixels of the picture; rows that do not fit into it are scrolled inside it
let box = {}, lanes = [], span = 1;  // measures of the picture; its lanes, headings and spaces; the longest makespan

/** The lines of the picture, from top to bottom: all lanes of a scene together, or lanes of a rank together. */
function listLanes() {
  const list = [];
  if (scenes.length > 1 && show.order === "worker") {
    const ranks = Math.max(...scenes.map(scene => scene.workers));
    for (let rank = 0; rank < ranks; rank++) {
      for (const scene of scenes)
        if (scene.lanes[rank]) list.push({ ...scene.lanes[rank], label: String(rank), name: scene.name });
      if (rank + 1 < ranks) list.push({ space: 0.3 });
    }
    if (show.links)
      for (const { linkLanes, name } of scenes) list.push(...linkLanes.map(lane => ({ ...lane, label: `${name} ${lane.label}` })));
  } else
    scenes.forEach((scene, i) => {
      if (scenes.length > 1) list.push({ heading: scene, space: i ? 2.6 : 1.7 });
      scene.lanes.forEach((lane, rank) => list.push({ ...lane, label: String(rank), name: "" }));
      if (show.links) list.push(...scene.linkLanes.map(lane => ({ ...lane })));
    });
  return list;
}

/** Compute `box`, place the lanes, and size the canvases. */
function layout() {
  const em = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const byWorker = scenes.length > 1 && show.order === "worker";
  lanes = listLanes();
  const typeface = getComputedStyle(document.body).fontFamily;
  pen.font = `${em * 0.92}px ${typeface}`;
  const names = byWorker ? Math.max(...scenes.map(scene => pen.measureText(scene.name).width)) + 0.8 * em : 0;
  const width = $("stage").clientWidth;
  const margin = show.memory === "bytes" && data.sized ? 15 : 12.5;
  box = { em, width, axis: 3.3 * em, family: typeface };
  const labels = Math.max(...lanes.map(lane => lane.link ? pen.measureText(lane.label).width : 0)) + 0.9 * em;
  box.left = Math.round(Math.max(4 * em + names, labels));
  box.right = Math.round(width - margin * em);
  const part = lane => lane.link ? 0.5 : 1;  // of a row's height
  const rows = lanes.reduce((sum, lane) => sum + (lane.scene ? part(lane) : 0), 0);
  const spaces = lanes.reduce((sum, lane) => sum + (lane.space || 0) * em, 0);
  const room = Math.max(innerHeight - $("stage").offsetTop - 1.2 * em - box.axis, 12 * em);
  box.fit = Math.min(Math.max((room - spaces - 0.6 * em) / rows, 0.55 * em), 9 * em);
  const row = view.row || box.fit;
  let y = 0.3 * em;
  for (const lane of lanes) {
    lane.y = y;
    lane.height = lane.scene ? row * part(lane) : lane.space * em;
    y += lane.height;
  }
  box.content = y + 0.3 * em;
  box.height = Math.min(box.axis + box.content, Math.max(box.axis + room, TALLEST));
  $("stage").style.height = `${box.height}px`;
  sizeCanvases(width);
  scenes.forEach(scene => scene.laneOf = []);
  lanes.forEach(lane => { if (lane.levels) lane.scene.laneOf[lane.rank] = lane; });
  limitView();
}

function sizeCanvases(width) {
  const ratio = devicePixelRatio || 1;
  for (const canvas of [base, overlay])
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(box.height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(box.height * ratio);
    }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  marker.setTransform(ratio, 0, 0, ratio, 0, 0);
}

/** Keep the view inside the picture, and compute pixels a unit of time. */
function limitView() {
  const wide = Math.min(Math.max(view.to - view.from, span * 1e-6), span);
  view.from = Math.min(Math.max(view.from, 0), span - wide);
  view.to = view.from + wide;
  view.top = Math.min(Math.max(view.top, 0), Math.max(0, box.axis + box.content - box.height));
  box.scale = (box.right - box.left) / (view.to - view.from);
}

const allSeen = () => view.to - view.from >= span * (1 - 1e-9);  // whether all of the time is in the view
const xOf = time => box.left + (time - view.from) * box.scale;
const timeAt = x => view.from + (x - box.left) / box.scale;
const topOf = lane => box.axis + lane.y - view.top;
const barTop = lane => topOf(lane) + lane.height * 0.06;
/** Whether memory is below a lane's bars. */
const showsMemory = lane => lane.levels && show.memory !== "off" && lane.height > 1.3 * box.em;
const barHeight = lane => lane.height * (showsMemory(lane) ? 0.62 : 0.86);
const visible = lane => topOf(lane) < box.height && topOf(lane) + lane.height > box.axis;

let frameRequested = false;
function redraw() {
  if (frameRequested) return;
  frameRequested = true;
  requestAnimationFrame(() => { frameRequested = false; draw(); });
}
