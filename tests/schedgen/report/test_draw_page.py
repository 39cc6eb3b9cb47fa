"""draw -o .html: what is in the page is what is simulated, and a browser shows it, hovers, zooms and pans."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from schedgen.checker import checked
from schedgen.report.draw.colours import LOOKS
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.simulator.timeline import SHARES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
NODE = shutil.which("node")
TRACES = Path(__file__).parents[3] / "traces"
CONTROL = 2  # of CDP's modifiers


def unpacked(text):
    """The page's numbers, and each scene's columns by name."""
    numbers = json.loads(re.search(r'<script id="scenes"[^>]*>(.*?)</script>', text, flags=re.S)[1])
    packed = re.search(r'<script id="columns"[^>]*>(.*?)</script>', text, flags=re.S)[1]
    data, at, scenes = gzip.decompress(base64.b64decode(packed)), 0, []
    for scene in numbers["scenes"]:
        columns = {}
        for name, kind, length in scene["columns"]:
            columns[name] = np.frombuffer(data, f"<{kind}", length, at)
            at += columns[name].nbytes
            at += -at % 8
        scenes.append(columns)
    assert at == len(data)
    return numbers, scenes


@pytest.fixture
def schedules(golden, tmp_path):
    for name in ("1f1b", "gpipe", "zb-h1", "fslpp"):
        (tmp_path / f"{name}.json").write_text(golden[name])
    return tmp_path


@pytest.fixture
def page(run, schedules):
    def page(*arguments):
        file = schedules / "page.html"
        assert run("draw", *arguments, "-o", file).code == 0
        return file.read_text()

    return page


@pytest.mark.parametrize("scheme", ["1f1b", "zb-h1", "fslpp"])
def test_the_page_has_the_simulation_s_times(page, schedules, scheme):
    program = checked(str(schedules / f"{scheme}.json"))
    numbers, (columns,) = unpacked(page(schedules / f"{scheme}.json"))
    run = simulate(program, program.header.cost)
    for rank in range(program.header.workers):
        rows = slice(program.bounds[rank], program.bounds[rank + 1])
        ends = np.cumsum(columns["gap"][rows] + columns["length"][rows])
        assert np.allclose(ends, run.end[rows])
    for name in ("op", "kind", "stage", "mb", "piece", "operand"):
        assert (columns[name] == getattr(program.rows, name)).all()
    (scene,) = numbers["scenes"]
    assert np.allclose(np.sum(scene["shares"], axis=1), 1, atol=1e-5) and len(scene["shares"][0]) == len(SHARES)
    lines = (schedules / f"{scheme}.json").read_text().splitlines()
    for row in range(len(program)):
        at = scene["line"] + row + 2 * int(program.rows.rank[row])
        assert lines[at - 1].strip().rstrip(",") == str(program.instruction(row))


def test_the_page_has_what_occupies_each_link(page, schedules):
    numbers, (columns,) = unpacked(page(schedules / "fslpp.json", "--beta", "0.5", "--links"))
    program = checked(str(schedules / "fslpp.json"))
    used = simulate(program, program.header.cost, Machine(beta=0.5)).link_use()
    assert numbers["scenes"][0]["links"] == used.names and used.names[0] == "0 out"
    for name, column in zip(("link", "linkRow", "linkStart", "linkLength"), used[1:], strict=True):
        assert columns[name].tolist() == column.tolist()
    assert unpacked(page(schedules / "fslpp.json"))[0]["scenes"][0]["links"] == []


@pytest.mark.skipif(not NODE, reason="no node on PATH")
@pytest.mark.parametrize("scheme", ["1f1b-tensor", "1f1b-tied", "fsdp-sharded", "pipedream", "zb-v"])
def test_the_page_writes_every_instruction_as_the_file_does(page, scheme):
    numbers, (columns,) = unpacked(page(TRACES / f"{scheme}.json"))
    program = checked(str(TRACES / f"{scheme}.json"))
    scene = {name: columns[name].tolist() for name in ("op", "kind", "stage", "mb", "piece", "operand")}
    script = f"const kinds = {json.dumps(numbers['kinds'])}, operands = {json.dumps(numbers['operands'])};"
    script += (resources.files("schedgen.report.draw") / "web/format.js").read_text()
    script += (
        f"const scene = {json.dumps(scene)}; scene.op.forEach((_, row) => console.log(instructionText(scene, row)))"
    )
    said = subprocess.run([NODE], input=script, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(program.instruction(row)) for row in range(len(program))]


def test_the_page_needs_no_network_and_is_closed_properly(page, schedules):
    text = page(schedules / "1f1b.json")
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text) and "http" not in text.replace("http-equiv", "")
    assert "{{" not in text and text.count("</script>") == 3


def test_a_name_from_the_file_cannot_leave_the_page_s_data(run, schedules, page):
    file = schedules / "1f1b.json"
    named = file.read_text().replace('"name": "1f1b"', '"name": "</script><b>"')
    file.write_text(named)
    assert run("seal", file).code == 0
    text = page(file)
    assert "</script><b>" not in text and text.count("</script>") == 3
    numbers, _ = unpacked(text)
    assert numbers["title"].startswith("</script><b>: 4 workers")


# In a browser


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("no Chromium with its chromedriver on PATH")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Shown:
    """A page in the browser, as large as asked for."""

    def __init__(self, browser, file, width, height):
        self.browser = browser
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
        browser.get(file.as_uri())
        self.until("window.schedgen && schedgen.ready > 0")

    def ask(self, expression):
        return self.browser.execute_script(f"return {expression}")

    def until(self, expression):
        limit = time.monotonic() + 60
        while not self.ask(expression):
            assert time.monotonic() < limit, f"never: {expression}"
            time.sleep(0.02)

    def mouse(self, kind, x, y, **more):
        event = {"type": kind, "x": x, "y": y, "button": "none", **more}
        self.browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def hover(self, scene, row):
        place = self.ask(f"schedgen.where({scene}, {row})")
        self.mouse("mouseMoved", place["x"], place["y"])
        self.until("getComputedStyle(document.getElementById('tip')).visibility === 'visible'")
        return self.ask("document.getElementById('tip').innerText")

    def switch(self, name, value):
        self.browser.execute_script(f"document.querySelector('[name={name}][value={value}]').click()")

    def view(self):
        return self.ask("[schedgen.view.from, schedgen.view.to]")

    def moved(self, before):
        self.until(f"schedgen.view.from !== {before[0]} || schedgen.view.to !== {before[1]}")
        return self.view()

    def complaints(self):
        return self.browser.get_log("browser")


@pytest.fixture(params=[(1280, 720), (2560, 1440)], ids=["1280x720", "2560x1440"])
def show(request, browser):
    return lambda file: Shown(browser, file, *request.param)


def test_a_browser_shows_hovers_zooms_and_pans(page, schedules, show, tmp_path):
    page(schedules / "1f1b.json")
    shown = show(schedules / "page.html")
    program = checked(str(schedules / "1f1b.json"))
    lines = (schedules / "1f1b.json").read_text().splitlines()
    jobs = [row for row in range(len(program)) if program.rows.mb[row] >= 0 and program.rows.kind[row] == 0]
    for row in jobs[:: len(jobs) // 6]:
        said = shown.hover(0, row)
        assert str(program.instruction(row)) in said
        line = int(re.search(r"1f1b\.json, line (\d+), worker (\d+)", said)[1])
        assert lines[line - 1].strip().rstrip(",") == str(program.instruction(row))
    everything = shown.view()
    assert everything == [0, 33]
    place = shown.ask(f"schedgen.where(0, {jobs[20]})")
    shown.mouse("mouseWheel", place["x"], place["y"], deltaX=0, deltaY=-600, modifiers=CONTROL)
    near = shown.moved(everything)
    assert near[0] > 0 and near[1] < 33
    assert shown.ask(f"schedgen.where(0, {jobs[20]})")["x"] == pytest.approx(place["x"], abs=2)  # stays under it
    shown.mouse("mousePressed", place["x"], place["y"], button="left", buttons=1, clickCount=1)
    shown.mouse("mouseMoved", place["x"] - 100, place["y"], button="left", buttons=1)
    shown.mouse("mouseReleased", place["x"] - 100, place["y"], button="left", clickCount=1)
    aside = shown.moved(near)
    assert aside[1] - aside[0] == pytest.approx(near[1] - near[0]) and aside[0] > near[0]
    shown.browser.execute_script("document.getElementById('fit').click()")
    shown.until("schedgen.view.from === 0 && schedgen.view.to === 33")
    assert shown.browser.save_screenshot(str(tmp_path / "page.png"))
    assert colours_of(shown) >= 16 and not shown.complaints()


def colours_of(shown):
    """How many of the jobs' colours the canvas shows."""
    script = """
      const { width, height } = document.getElementById('base');
      const data = document.getElementById('base').getContext('2d').getImageData(0, 0, width, height).data;
      const seen = new Set(), paints = new Set(schedgen.paints[schedgen.show.by].flat());
      for (let i = 0; i < data.length; i += 4)
        seen.add('#' + [0, 1, 2].map(k => data[i + k].toString(16).padStart(2, '0')).join(''));
      return [...paints].filter(one => seen.has(one)).length;"""
    return shown.browser.execute_script(script)


def test_switches_change_the_picture(page, schedules, show):
    page(schedules / "gpipe.json", schedules / "zb-h1.json", "--alpha", "0.2")
    shown = show(schedules / "page.html")
    for name, value in (
        ("by", "stage"),
        ("memory", "bytes"),
        ("transfers", "true"),
        ("causes", "false"),
        ("order", "worker"),
    ):
        frames = shown.ask("schedgen.frames")
        before = shown.ask("document.getElementById('base').toDataURL()")
        shown.switch(name, value)
        shown.until(f"schedgen.frames > {frames}")
        assert shown.ask("document.getElementById('base').toDataURL()") != before, name
    legend = shown.ask("document.getElementById('legend').innerText")
    assert "stage 0 to 3" in legend and "sends x" in legend
    for look in LOOKS[:4]:
        assert look.words in legend
    assert not shown.complaints()


@pytest.mark.parametrize("show", [(1280, 720)], indirect=True, ids=["1280x720"])
def test_a_large_schedule_is_shown_and_found_under_the_pointer(run, page, schedules, show):
    file = schedules / "large.json"
    assert run("compile", "1f1b", "--stages", 64, "--microbatches", 256, "-o", file).code == 0
    text = page(file)
    assert len(text) < 2_000_000
    shown = show(schedules / "page.html")
    program = checked(str(file))
    jobs = np.flatnonzero((program.rows.mb >= 0) & (program.rows.kind == 0))
    row = int(jobs[len(jobs) // 2])
    shown.switch("transfers", "true")
    for _ in range(12):
        place, before = shown.ask(f"schedgen.where(0, {row})"), shown.view()
        shown.mouse("mouseWheel", place["x"], place["y"], deltaX=0, deltaY=-400, modifiers=CONTROL)
        shown.moved(before)
    shown.switch("transfers", "false")
    assert str(program.instruction(row)) in shown.hover(0, row)
    assert not shown.complaints()
