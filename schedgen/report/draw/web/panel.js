// What surrounds the picture: title, switches, legend, a table of every worker's time. At the end all is started.

function facts({ latency, seconds, mean, most }) {
  const peak = count(most.activations, "activation");
  return `latency ${amount(latency, seconds)}, busy ${percent(mean[0])}, peak ${peak}`;
}

function choice(name, label, options) {
  const set = document.createElement("fieldset");
  set.className = "choice";
  const one = ([value, words]) => `<label><input type="radio" name="${name}" value="${value}"
    ${String(show[name]) === value ? "checked" : ""}><span>${words}</span></label>`;
  set.innerHTML = `<span>${label}</span><div>${options.map(one).join("")}</div>`;
  set.addEventListener("change", event => {
    const value = event.target.value;
    show[name] = value === "true" ? true : value === "false" ? false : value;
    legend();
    redraw();
  });
  $("controls").append(set);
}

function button(id, words, title, click) {
  const one = document.createElement("button");
  Object.assign(one, { type: "button", id, textContent: words, title });
  one.addEventListener("click", click);
  $("controls").append(one);
}

/** A small canvas with a colour, or several side by side, and a hatching. */
function swatch(colours, pattern, width = 1.5) {
  const ratio = devicePixelRatio || 1, canvas = document.createElement("canvas"), c = canvas.getContext("2d");
  const list = [].concat(colours), wide = width * box.em, tall = 0.85 * box.em;
  canvas.width = wide * ratio;
  canvas.height = tall * ratio;
  canvas.style.cssText = `width: ${wide}px; height: ${tall}px`;
  c.scale(ratio, ratio);
  list.forEach((one, i) => {
    c.fillStyle = one;
    c.fillRect(i * wide / list.length, 0, wide / list.length + 0.5, tall);
  });
  if (pattern) {
    c.fillStyle = hatch(pattern, ratio);
    c.fillRect(0, 0, wide, tall);
  }
  return canvas;
}

function heading() {
  const more = document.createElement("small"), many = read.scenes.length > 1;
  const listed = read.scenes.map(scene => `${many ? `${scene.name}: ` : ""}${facts(scene)}`);
  more.textContent = many && show.order === "schedule" ? "" : listed.join("; ");
  $("title").replaceChildren(read.title, more);
}

function legend() {
  heading();
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
    if (read.scenes.some(scene => scene.looks.includes(kind)))
      entry(swatch(paints[show.by][kind][0], look.hatch), `<b>${look.letter}</b> ${look.words}`);
  });
  entry(swatch(paints[show.by][0], "", 6), `${show.by} 0 to ${number - 1}${show.by === "stage" ? "; numbers: microbatch" : ""}`);
  if (show.memory !== "off") entry(swatch(HELD), `${show.memory === "activations" ? "activations" : units()} held`);
  if (show.transfers) {
    const sent = new Set(read.scenes.flatMap(scene => Array.from(scene.send, row => scene.kind[row])));
    for (const kind of [...sent].sort()) entry(swatch(transferColours[kinds[kind]], "", 1), `sends ${kinds[kind]}`);
  }
  const row = document.createElement("span");
  row.className = "break";
  area.append(row);
  if (read.scenes.length > 1) {
    const whose = document.createElement("span");
    whose.textContent = `Time, ${read.scenes.map(scene => scene.name).join(" / ")}:`;
    area.append(whose);
  }
  shares.forEach((name, i) => {
    const each = read.scenes.map(scene => percent(scene.mean[i]));
    if (used(i)) entry(swatch(shareColours[i], "", 0.85), `${name} <b>${each.join(" / ")}</b>`, shareWords[i]);
  });
}

const used = share => read.scenes.some(scene => scene.mean[share] > 0);
const units = () => read.sized ? "bytes" : "buffers";

function table(scene) {
  const row = (tag, cells) => `<tr>${cells.map(cell => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  const only = list => list.filter((_, i) => used(i));
  const body = (who, parts, peak) =>
    row("td", [who, ...only(parts).map(percent), peak.activations, held(peak.bytes, "bytes")]);
  const head = row("th", ["worker", ...only(shares), "peak<br>activations", `peak<br>${units()}`]);
  const rows = scene.lanes.map(({ rank, peak }) => body(rank, scene.shares[rank], peak)).join("");
  return `<h2>Time of every worker: ${escape(scene.name)}</h2><div class="wide"><table><thead>${head}</thead><tbody>${rows}</tbody>
    <tfoot>${body("all", scene.mean, scene.most)}</tfoot></table></div>`;
}

function below() {
  const meanings = shares.map((name, i) => used(i) ? `<dt>${name}</dt><dd>${shareWords[i]}</dd>` : "").join("");
  $("below").innerHTML = read.scenes.map(table).join("") + `<h2>Where time goes</h2><dl>${meanings}</dl>`;
}

async function main() {
  await columns();
  read.scenes.forEach(prepare);
  span = Math.max(...read.scenes.map(scene => scene.makespan)) || 1;
  const many = read.scenes.length > 1;
  overlay.setAttribute("aria-label", read.scenes.map(scene => `${scene.name}: ${facts(scene)}`).join("; "));
  choice("by", "Colour", [["microbatch", "Microbatch"], ["stage", "Stage"]]);
  const capital = word => word[0].toUpperCase() + word.slice(1);
  choice("memory", "Memory", [["off", "Off"], ["activations", "Activations"], ["bytes", capital(units())]]);
  choice("transfers", "Transfers", [["false", "Off"], ["true", "On"]]);
  choice("causes", "Idle", [["false", "Plain"], ["true", "By cause"]]);
  if (many) choice("order", "Rows", [["schedule", "By schedule"], ["worker", "By worker"]]);
  button("lower", "Rows \u2212", "lower rows", () => grow(1 / GROWTH));
  button("taller", "Rows +", "taller rows", () => grow(GROWTH));
  button("fit", "Fit", "all of the time", fit);
  view.to = span;
  layout();
  legend();
  below();
  draw();
  window.schedgen.ready = performance.now();
}

/** For tests and the console: what is seen, milliseconds of the last frame, where an instruction is on the screen. */
window.schedgen = {
  view, show, paints, scenes: read.scenes, frame: 0, frames: 0, ready: 0,
  where(number, row) {
    const scene = read.scenes[number], area = overlay.getBoundingClientRect(), lane = scene.y[scene.rank[row]];
    const time = (scene.start[row] + scene.end[row]) / 2;
    return { x: area.left + X(time), y: area.top + barTop(lane) + barHeight(lane) / 2 };
  },
};
main();
