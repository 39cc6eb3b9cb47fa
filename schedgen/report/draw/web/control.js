// Moving about: Ctrl and the wheel zoom, as does the wheel alone once only a part is seen; until then it scrolls the page.

function zoom(factor, x) {
  const time = T(Math.min(Math.max(x, box.left), box.right)), part = (time - view.from) / (view.to - view.from);
  const wide = Math.min(Math.max((view.to - view.from) * factor, span * 1e-6), span);
  view.from = time - part * wide;
  view.to = view.from + wide;
  limit();
  redraw();
}

function pan(x, y) {
  const by = x / box.scale;
  view.from += by;
  view.to += by;
  view.top += y;
  limit();
  redraw();
}

const GROWTH = 1.25;

function grow(factor) {
  view.row = Math.min(Math.max((view.row || box.fit) * factor, 0.45 * box.em), 14 * box.em);
  redraw();
}

function fit() {
  Object.assign(view, { from: 0, to: span, row: 0, top: 0 });
  redraw();
}

const pointers = new Map();
overlay.addEventListener("pointerdown", event => {
  overlay.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, point(event));
});
overlay.addEventListener("pointermove", event => {
  const was = pointers.get(event.pointerId), now = point(event);
  if (!was) return tell(event);
  if (pointers.size === 2) {  // two fingers
    const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
    zoom(Math.max(Math.abs(was.x - other.x), 8) / Math.max(Math.abs(now.x - other.x), 8), other.x);
  } else {
    pan(was.x - now.x, was.y - now.y);
    if (Math.hypot(was.x - now.x, was.y - now.y) > 0) { quiet(); overlay.classList.add("dragging"); }
  }
  pointers.set(event.pointerId, now);
});
for (const end of ["pointerup", "pointercancel"])
  overlay.addEventListener(end, event => { pointers.delete(event.pointerId); overlay.classList.remove("dragging"); });
overlay.addEventListener("pointerleave", quiet);
overlay.addEventListener("dblclick", fit);
let zoomed = -Infinity;  // when the wheel did last: what is left of a gesture that ends at all of the time must not scroll
overlay.addEventListener("wheel", event => {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const asked = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || sideways;
  if (whole() && !asked && event.timeStamp - zoomed > 300) return;
  event.preventDefault();
  zoomed = event.timeStamp;
  const unit = event.deltaMode ? 16 : 1, x = event.deltaX * unit, y = event.deltaY * unit;
  if (event.altKey) grow(Math.exp(-y * 0.002));
  else if (event.shiftKey) pan(x || y, 0);
  else if (sideways) pan(x, 0);
  else zoom(Math.exp(Math.min(Math.max(y * (event.ctrlKey ? 0.008 : 0.0016), -0.6), 0.6)), point(event).x);
  tell(event);
}, { passive: false });
document.addEventListener("keydown", event => {
  const middle = (box.left + box.right) / 2, step = 0.15 * (box.right - box.left), em = box.em;
  const arrows = {
    ...!whole() && { ArrowLeft: () => pan(-step, 0), ArrowRight: () => pan(step, 0) },
    ...box.content > box.height - box.axis && { ArrowUp: () => pan(0, -3 * em), ArrowDown: () => pan(0, 3 * em) },
  };
  const does = {
    ...!event.target.matches("input") && arrows,
    "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle),
    "[": () => grow(1 / GROWTH), "]": () => grow(GROWTH), 0: fit,
  }[event.key];
  if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  does();
});
addEventListener("resize", redraw);
