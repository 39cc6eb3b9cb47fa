// Around the picture: title, switches, legend, tables of every worker's time. The last line starts the page.

/** A scene's latency, mean busy share and peak activations. */
function keyFigures({ latency, seconds, mean, most }) {
  const peak = plural(most.activations, "activation");
  return `latency ${formatTime(latency, seconds)}, busy ${percent(mean[0])}, peak ${peak}`;
}

/** Add a switch that sets show[name]; `options`: [value, words]. */
function addSwitch(name, label, options) {
  const set = document.createElement("fieldset");
  set.className = "choice";
  const radio = ([value, words]) => `<label><input type="radio" name="${name}" value="${value}"
    ${String(show[name]) === value ? "checked" : ""}><span>${words}</span></label>`;
  set.innerHTML = `<span>${label}</span><div>${options.map(radio).join("")}</div>`;
  set.addEventListener("change", event => {
    const value = event.target.value;
    show[name] = value === "true" ? true : value === "false" ? false : value;
    writeLegend();
    redraw();
  });
  $("controls").append(set);
}

function addButton(id, words, title, click) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", id, textContent: words, title });
  button.addEventListener("click", click);
  $("controls").append(button);
}

/** A small canvas with a colour, or several side by side, and a hatch. */
function swatch(colours, pattern, width = 1.5) {
  const ratio = devicePixelRatio || 1, canvas = document.createElement("canvas"), c = canvas.getContext("2d");
  const list = [].concat(colours), wide = width * box.em, tall = 0.85 * box.em;
  canvas.width = wide * ratio;
  canvas.height = tall * ratio;
  canvas.style.cssText = `width: ${wide}px; height: ${tall}px`;
  c.scale(ratio, ratio);
  list.forEach((colour, i) => {
    c.fillStyle = colour;
    c.fillRect(i * wide / list.length, 0, wide / list.length + 0.5, tall);
  });
  if (pattern) {
    c.fillStyle = hatch(pattern, ratio);
    c.fillRect(0, 0, wide, tall);
  }
  return canvas;
}

function writeTitle() {
  const figures = document.createElement("small"), several = scenes.length > 1;
  const listed = scenes.map(scene => `${several ? `${scene.name}: ` : ""}${keyFigures(scene)}`);
  figures.textContent = several && show.order === "schedule" ? "" : listed.join("; ");
  $("title").replaceChildren(data.title, figures);
}

function writeLegend() {
  writeTitle();
  const area = $("legend"), number = paints[show.by][0].length;
  const entry = (canvas, html, title = "") => {
    const span = document.createElement("span");
    span.innerHTML = html;
    span.title = title;
    span.prepend(canvas);
    area.append(span);
  };
  area.replaceChildren();
  looks.forEach((look, kind) => {
    if (scenes.some(scene => scene.looks.includes(kind)))
      entry(swatch(paints[show.by][kind][0], look.hatch), `<b>${look.letter}</b> ${look.words}`);
  });
  entry(swatch(paints[show.by][0], "", 6), `${show.by} 0 to ${number - 1}${show.by === "stage" ? "; numbers: microbatch" : ""}`);
  if (show.memory !== "off") entry(swatch(HELD), `${show.memory === "activations" ? "activations" : units()} held`);
  const rowsOf = scene => [...show.transfers ? scene.send : [], ...show.links && scene.linkRow || []];
  const sent = new Set(scenes.flatMap(scene => rowsOf(scene).map(row => scene.kind[row])));
  for (const kind of [...sent].sort()) entry(swatch(linkColours[kind], "", 1), `sends ${kinds[kind]}`);
  const lineBreak = document.createElement("span");
  lineBreak.className = "break";
  area.append(lineBreak);
  if (scenes.length > 1) {
    const label = document.createElement("span");
    label.textContent = `Time, ${scenes.map(scene => scene.name).join(" / ")}:`;
    area.append(label);
  }
  shares.forEach((name, i) => {
    const means = scenes.map(scene => percent(scene.mean[i]));
    if (isSpent(i)) entry(swatch(shareColours[i], "", 0.85), `${name} <b>${means.join(" / ")}</b>`, shareWords[i]);
  });
}

const isSpent = share => scenes.some(scene => scene.mean[share] > 0);
const units = () => data.sized ? "bytes" : "buffers";

function tableHtml(scene) {
  const row = (tag, cells) => `<tr>${cells.map(cell => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  const spent = list => list.filter((_, i) => isSpent(i));
  const body = (who, parts, peak) =>
    row("td", [who, ...spent(parts).map(percent), peak.activations, formatHeld(peak.bytes, "bytes")]);
  const head = row("th", ["worker", ...spent(shares), "peak<br>activations", `peak<br>${units()}`]);
  const rows = scene.lanes.map(({ rank, peak }) => body(rank, scene.shares[rank], peak)).join("");
  return `<h2>Time of every worker: ${escapeHtml(scene.name)}</h2><div class="wide"><table><thead>${head}</thead><tbody>${rows}</tbody>
    <tfoot>${body("all", scene.mean, scene.most)}</tfoot></table></div>`;
}

function writeTables() {
  const meanings = shares.map((name, i) => isSpent(i) ? `<dt>${name}</dt><dd>${shareWords[i]}</dd>` : "").join("");
  $("below").innerHTML = scenes.map(tableHtml).join("") + `<h2>Where time goes</h2><dl>${meanings}</dl>`;
}

async function main() {
  await unpackColumns();
  scenes.forEach(prepare);
  span = Math.max(...scenes.map(scene => scene.makespan)) || 1;
  overlay.setAttribute("aria-label", scenes.map(scene => `${scene.name}: ${keyFigures(scene)}`).join("; "));
  addSwitch("by", "Colour", [["microbatch", "Microbatch"], ["stage", "Stage"]]);
  const capital = word => word[0].toUpperCase() + word.slice(1);
  addSwitch("memory", "Memory", [["off", "Off"], ["activations", "Activations"], ["bytes", capital(units())]]);
  addSwitch("transfers", "Transfers", [["false", "Off"], ["true", "On"]]);
  if (scenes.some(scene => scene.links.length)) addSwitch("links", "Links", [["false", "Off"], ["true", "On"]]);
  addSwitch("causes", "Idle", [["false", "Plain"], ["true", "By cause"]]);
  if (scenes.length > 1) addSwitch("order", "Rows", [["schedule", "By schedule"], ["worker", "By worker"]]);
  addButton("lower", "Rows \u2212", "lower rows", () => growRows(1 / GROWTH));
  addButton("taller", "Rows +", "taller rows", () => growRows(GROWTH));
  addButton("fit", "Fit", "all of the time", showAll);
  view.to = span;
  layout();
  writeLegend();
  writeTables();
  draw();
  window.schedgen.ready = performance.now();
}

/** For tests and the console: the view, milliseconds of the last frame, where an instruction is on the screen. */
window.schedgen = {
  view, show, paints, scenes, frame: 0, frames: 0, ready: 0,
  where(number, row) {
    const scene = scenes[number], area = overlay.getBoundingClientRect(), lane = scene.laneOf[scene.rank[row]];
    const time = (scene.start[row] + scene.end[row]) / 2;
    return { x: area.left + xOf(time), y: area.top + barTop(lane) + barHeight(lane) / 2 };
  },
};
main();
