// Zooming and panning. Ctrl and the wheel zoom; the wheel alone does so once only a part of the time is seen, and
// scrolls the page until then.

/** Show `factor` times as much time; the time at pixel `x` stays where it is. */
function zoom(factor, x) {
  const time = timeAt(Math.min(Math.max(x, box.left), box.right)), part = (time - view.from) / (view.to - view.from);
  const wide = Math.min(Math.max((view.to - view.from) * factor, span * 1e-6), span);
  view.from = time - part * wide;
  view.to = view.from + wide;
  limitView();
  redraw();
}

/** Move the view by pixels. */
function pan(x, y) {
  view.from += x / box.scale;
  view.to += x / box.scale;
  view.top += y;
  limitView();
  redraw();
}

const GROWTH = 1.25;  // of rows, by a key or a button

function growRows(factor) {
  view.row = Math.min(Math.max((view.row || box.fit) * factor, 0.45 * box.em), 14 * box.em);
  redraw();
}

function showAll() {
  Object.assign(view, { from: 0, to: span, row: 0, top: 0 });
  redraw();
}

const pointers = new Map();  // those that are down, and where they were last: fingers, or the mouse
overlay.addEventListener("pointerdown", event => {
  overlay.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, pointOf(event));
});
overlay.addEventListener("pointermove", event => {
  const before = pointers.get(event.pointerId), now = pointOf(event);
  if (!before) return showTip(event);
  if (pointers.size === 2) {  // two fingers
    const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
    zoom(Math.max(Math.abs(before.x - other.x), 8) / Math.max(Math.abs(now.x - other.x), 8), other.x);
  } else {
    pan(before.x - now.x, before.y - now.y);
    if (Math.hypot(before.x - now.x, before.y - now.y) > 0) { hideTip(); overlay.classList.add("dragging"); }
  }
  pointers.set(event.pointerId, now);
});
for (const end of ["pointerup", "pointercancel"])
  overlay.addEventListener(end, event => { pointers.delete(event.pointerId); overlay.classList.remove("dragging"); });
overlay.addEventListener("pointerleave", hideTip);
overlay.addEventListener("dblclick", showAll);
let lastZoom = -Infinity;  // when the wheel zoomed last: the rest of a gesture that ends at all must not scroll
overlay.addEventListener("wheel", event => {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const modified = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || sideways;
  if (allSeen() && !modified && event.timeStamp - lastZoom > 300) return;
  event.preventDefault();
  lastZoom = event.timeStamp;
  const unit = event.deltaMode ? 16 : 1, x = event.deltaX * unit, y = event.deltaY * unit;
  if (event.altKey) growRows(Math.exp(-y * 0.002));
  else if (event.shiftKey) pan(x || y, 0);
  else if (sideways) pan(x, 0);
  else zoom(Math.exp(Math.min(Math.max(y * (event.ctrlKey ? 0.008 : 0.0016), -0.6), 0.6)), pointOf(event).x);
  showTip(event);
}, { passive: false });
document.addEventListener("keydown", event => {
  const middle = (box.left + box.right) / 2, step = 0.15 * (box.right - box.left), em = box.em;
  const arrows = {
    ...!allSeen() && { ArrowLeft: () => pan(-step, 0), ArrowRight: () => pan(step, 0) },
    ...box.axis + box.content > box.height && { ArrowUp: () => pan(0, -3 * em), ArrowDown: () => pan(0, 3 * em) },
  };
  const action = {
    ...!event.target.matches("input") && arrows,
    "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle),
    "[": () => growRows(1 / GROWTH), "]": () => growRows(GROWTH), 0: showAll,
  }[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
addEventListener("resize", redraw);
