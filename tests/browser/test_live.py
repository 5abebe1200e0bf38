"""The live view in a page: what is drawn, what hover, click and keys do, while a cell runs and afterwards."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.lab import Desk
from tests.browser.live_page import feed, live_page
from tests.browser.open_to_all import serious

pytestmark = pytest.mark.browser

SLOW = """
import torch, numpy as np, workbench as wb
torch.set_num_threads(1)
class Slow(wb.hooks.Hook):
    def on_step(self, step):
        import time
        time.sleep(0.01)
x = torch.randn(256, 5, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
workload = wb.regression(
    name="planes", build_model=lambda: torch.nn.Linear(5, 1), train_data=data, validation_data=data,
    config=wb.TrainConfig(peak_lr=0.01, total_steps=800, batch_size=16, schedule="cosine", warmup_steps=40),
)
"""
RUN = """
with wb.live_view(summary=False) as view:
    record = wb.lr_sweep.Study(lrs=np.logspace(-3, 0.5, 12).tolist(), steps=STEPS).run(
        workload, wb.Trainer(gradients="vmap", hooks=[Slow()]), out="runs/NAME")
print("ended", view.record.path)
"""
LANES = "() => Object.fromEntries(window.view.lanes.map((lane) => [lane.trial, lane.dim]))"


def colors(page: Page, box: str) -> int:
    """How many different colours the canvas in `box` has."""
    return int(
        page.evaluate(
            """(box) => {
              const canvas = document.querySelector(`${box} canvas`);
              const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
              const seen = new Set();
              for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 128) seen.add(data.slice(i, i + 3).join());
              return seen.size;
            }""",
            box,
        )
    )


@pytest.fixture
def alone(browser: Browser) -> Iterator[Page]:
    """A view in a page of its own with eight trials, two of them lost, and no complaint of the console."""
    page = live_page(browser)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    feed(page, lanes=8, steps=2000, rows=(0, 1200), whole=True, lost=2)
    yield page
    assert complaints == []
    page.close()


def at(page: Page, trial: int, step: int) -> tuple[float, float]:
    """Where in the page the loss of a trial is drawn."""
    x, y = page.evaluate(
        """([trial, step]) => {
          const chart = window.view.charts[0];
          const lane = chart.lanes.find((each) => each.trial === trial);
          const { points, n } = lane.points.loss;
          const box = chart.plot.over.getBoundingClientRect();
          return [box.left + chart.plot.valToPos(lane.xOf(step), "x"), box.top + chart.plot.valToPos(points.y[points.at(step, n)], "y")];
        }""",
        [trial, step],
    )
    return x, y


def test_each_chart_is_drawn_and_the_legend_names_each_trial(alone: Page) -> None:
    for box in (".wb-live-loss", ".wb-live-grad_norm", ".wb-live-lr"):
        assert colors(alone, box) > 20
    rows = alone.get_by_role("button", name="trial")
    expect(rows).to_have_count(8)
    expect(rows.nth(7)).to_have_accessible_name(re.compile("trial 7, sweep, lr 10, diverged, loss .* at step 999"))
    assert "8 trials: ▸ 6 running, ✕ 2 diverged" in alone.get_by_role("status").inner_text()


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_keys_isolate_and_release(alone: Page, key: str) -> None:
    row = alone.get_by_role("button", name="trial 5")
    row.focus()
    assert alone.evaluate("() => window.view.hovered") == 5
    alone.keyboard.press(key)
    expect(row).to_have_attribute("aria-pressed", "true")
    assert alone.evaluate(LANES)["5"] == ""
    assert alone.evaluate(LANES)["4"] == "hidden"
    alone.keyboard.press("Escape")
    expect(row).to_have_attribute("aria-pressed", "false")
    alone.keyboard.press(key)
    alone.get_by_role("button", name="Show all").click()
    expect(row).to_have_attribute("aria-pressed", "false")


def test_a_frozen_picture_stays_while_data_goes_on_arriving(alone: Page) -> None:
    freeze = alone.get_by_role("button", name="Freeze")
    freeze.click()
    expect(alone.locator(".wb-live-freeze")).to_have_attribute("aria-pressed", "true")
    alone.wait_for_function("() => !window.view.waiting")
    done = "() => window.view.charts[0].columns.get(0).done"
    before = alone.evaluate(done)
    feed(alone, lanes=8, steps=2000, rows=(1200, 1400), lost=2)
    alone.get_by_role("button", name="trial 1,").click()  # looking on is possible
    alone.wait_for_function("() => !window.view.waiting")
    assert alone.evaluate(done) == before == 1200
    assert alone.evaluate("() => window.view.store.points.get(0).loss.n") == 1400
    alone.get_by_role("button", name="go on").click()
    alone.wait_for_function(f"() => ({done})() === 1400")


COLUMNS = (
    "(kind) => { const c = window.view.charts[0][kind].get(0); return c ? [...c.low].filter((v) => v === v) : []; }"
)


def settled(page: Page) -> None:
    """Wait until the last redraw has been drawn."""
    page.wait_for_function("() => !window.view.waiting")


def set_slider(page: Page, value: float) -> None:
    page.get_by_role("slider", name="Smoothing").fill(str(value))
    settled(page)


def test_smoothing_is_the_debiased_moving_average_of_logarithms_over_faint_raw_curves(alone: Page) -> None:
    raw = alone.evaluate("() => [...window.view.store.points.get(0).loss.y.subarray(0, 1200)]")
    seen = alone.evaluate(COLUMNS, "columns")
    set_slider(alone, 0.9)
    keep, top, share, means = (
        0.9 ** (1000 / 2000),
        0.0,
        0.0,
        [],
    )  # the weight from one thousandth of 2000 steps to the next
    for value in raw:
        top, share = keep * top + (1 - keep) * math.log(value), keep * share + (1 - keep)
        means.append(math.exp(top / share))
    assert alone.evaluate("() => window.view.charts[0].smooth.get(0).max") == pytest.approx(max(means), rel=1e-5)
    assert alone.evaluate("() => window.view.charts[0].smooth.get(0).min") == pytest.approx(min(means), rel=1e-5)
    assert alone.evaluate(COLUMNS, "columns") == seen, "the raw curve stays as it was"
    slider = alone.get_by_role("slider", name="Smoothing")
    expect(slider).to_have_attribute("aria-valuetext", "0.90: about 19 steps")
    slider.focus()
    alone.keyboard.press("Home")
    settled(alone)
    expect(slider).to_have_attribute("aria-valuetext", "off")
    assert alone.evaluate(COLUMNS, "smooth") == []


def test_a_linear_scale_is_not_flattened_by_the_trials_that_diverge(alone: Page) -> None:
    scale = "() => { const c = window.view.charts[0]; return [c.plot.scales.y.distr, c.plot.scales.y.max]; }"
    peaks = sorted(alone.evaluate("() => [0, 1, 2, 3, 4, 5].map((t) => window.view.charts[0].columns.get(t).max)"))
    assert alone.evaluate(scale)[0] == 3
    alone.get_by_role("button", name="Log y").click()
    settled(alone)
    distr, top = alone.evaluate(scale)
    assert (distr, peaks[-1] < top < 2.2 * peaks[-1]) == (1, True)
    title = alone.locator(".wb-live-loss .u-title")
    expect(title).to_have_text("training loss · 2 off scale")
    height = title.evaluate("(title) => { title.style.width = '90px'; return title.clientHeight; }")
    assert height == 18, "a second line would cut the numbers of the x axis"
    expect(alone.get_by_role("button", name="Log y")).to_have_attribute("aria-pressed", "false")


def test_a_drag_zooms_all_charts_in_any_unit_of_x_and_a_double_click_gives_it_back(alone: Page) -> None:
    x = "() => window.view.charts.map((c) => [c.plot.scales.x.min, c.plot.scales.x.max].map(Math.round))"
    whole = alone.evaluate(x)
    assert whole == [[0, 2000]] * 3
    for unit, per in (("steps", 1), ("examples", 32), ("time", 0.25)):
        alone.get_by_role("combobox", name="x axis").select_option(unit)
        settled(alone)
        if unit == "time":  # it ends at the next power of two: how long the rest takes is not known
            assert alone.evaluate(x) == [[0, 512]] * 3
            whole = [[0, 2048]] * 3
        box = alone.evaluate("() => { const b = window.view.charts[0].plot.over.getBoundingClientRect(); return [b.left, b.top, b.width]; }")  # fmt: skip
        alone.mouse.move(box[0] + 0.25 * box[2], box[1] + 60)
        alone.mouse.down()
        alone.mouse.move(box[0] + 0.5 * box[2], box[1] + 80, steps=4)
        alone.mouse.up()
        settled(alone)
        (low, high), *others = alone.evaluate(x)
        assert (low / per, high / per) == pytest.approx((whole[0][1] / 4, whole[0][1] / 2), abs=5)
        assert others == [[low, high]] * 2
        assert set(alone.evaluate(LANES).values()) == {""}, "a drag is no click"
        points = alone.evaluate("([a, b]) => { const p = window.view.store.points.get(0).loss; return [...p.y.subarray(Math.ceil(a), Math.floor(b) + 1)]; }", [low / per, high / per])  # fmt: skip
        assert alone.evaluate("() => window.view.charts[0].columns.get(0).max") == pytest.approx(max(points))
        alone.mouse.dblclick(box[0] + 0.5 * box[2], box[1] + 5)
        settled(alone)
        assert alone.evaluate(x) == [[low * per for low in pair] for pair in whole]


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_keeps_people_out(browser: Browser, dark: bool) -> None:
    """With a trial isolated and the picture frozen, so that every control is there."""
    page = live_page(browser, dark=dark)
    page.evaluate("document.documentElement.lang = 'en'; document.title = 'live'")
    feed(page, lanes=4, steps=200, rows=(0, 200), whole=True, lost=1)
    page.get_by_role("button", name="trial 2,").click()
    page.get_by_role("button", name="Freeze").click()
    slider = page.get_by_role("slider", name="Smoothing")
    slider.fill("0.9")
    page.wait_for_function(
        "() => document.querySelector('.wb-live-tools input').getAttribute('aria-valuetext').includes('steps')"
    )
    assert serious(page, ".wb-live") == []
    page.close()


def test_an_axis_in_time_is_offered_where_each_trial_has_it(browser: Browser) -> None:
    page = live_page(browser)
    feed(page, lanes=2, steps=200, rows=(0, 100), whole=True)
    axis = page.get_by_role("combobox", name="x axis")
    assert axis.get_by_role("option").all_inner_texts() == ["steps", "examples", "time (s)"]
    axis.select_option("time")
    settled(page)
    page.mouse.move(*at(page, 1, 60))
    expect(page.locator(".wb-live-tip")).to_contain_text("training time15 s")
    feed(page, lanes=3, steps=200, rows=(100, 101), clocked=False)
    expect(axis).to_have_value("steps")
    expect(axis.locator("option[value=time]")).to_be_disabled()
    assert page.evaluate("() => window.view.charts[0].plot.scales.x.max") == 200
    page.close()


def test_an_empty_view_says_what_it_prepares(browser: Browser) -> None:
    page = live_page(browser)
    page.get_by_text("data and model are being loaded").wait_for()
    feed(page, lanes=2, steps=200, rows=(0, 0), whole=True)
    page.get_by_text("curves begin with their first recorded step").wait_for()
    feed(page, lanes=2, steps=200, rows=(0, 20))
    page.get_by_text("40 steps").wait_for()
    page.close()


def test_a_narrow_page_stacks_charts_and_controls(alone: Page) -> None:
    alone.set_viewport_size({"width": 560, "height": 1000})
    alone.evaluate("() => { document.getElementById('root').style.width = '540px'; }")
    heads = [".wb-live-tools label >> nth=0", ".wb-live-tools label >> nth=1", ".wb-live-save", ".wb-live-loss", ".wb-live-grad_norm", ".wb-live-lr"]  # fmt: skip
    boxes = [alone.locator(head).bounding_box() for head in heads]
    assert all(box and box["height"] > 15 and box["x"] + box["width"] <= 560 for box in boxes)
    tops = [box["y"] for box in boxes if box]
    assert tops == sorted(set(tops))


def test_the_curves_are_saved_as_they_are_drawn(alone: Page) -> None:
    set_slider(alone, 0.5)
    alone.get_by_role("button", name="trial 3,").click()
    settled(alone)
    saved = {}
    for kind in ("SVG", "PNG", "CSV"):
        with alone.expect_download() as waiting:
            alone.get_by_role("button", name=f"Download as {kind}").click()
        assert waiting.value.suggested_filename == f"sweep.{kind.lower()}"
        saved[kind] = Path(waiting.value.path()).read_bytes()
    drawn = [
        path.get("d") for path in ElementTree.fromstring(saved["SVG"]).iterfind(".//{*}path") if path.get("clip-path")
    ]
    assert len(drawn) == 5, "raw and smoothed; learning rates are no noise"
    assert all("L" in str(path) and "NaN" not in str(path) for path in drawn)
    assert saved["PNG"].startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(saved["CSV"].decode())))
    told = alone.evaluate("() => [...window.view.store.points.get(3).loss.y.subarray(0, 1200)]")
    assert [float(row["value"]) for row in rows if row["metric"] == "loss"] == told
    assert {row["trial"] for row in rows} == {"3"}


def test_a_study_is_seen_while_its_cell_runs(desk: Desk) -> None:
    desk.open(desk.lab.write("live.ipynb", [SLOW, RUN.replace("STEPS", "800").replace("NAME", "live")]))
    desk.run_all(wait=False)
    page = desk.page
    page.wait_for_function(
        "() => { const r = document.querySelector('.wb-live'); return r && r.wbLive.stats.redraws > 5 && (window.view = r.wbLive); }"
    )
    page.get_by_role("button", name="trial 3,").click()
    page.wait_for_function("() => window.view.lanes.every((lane) => (lane.trial === 3) === (lane.dim === ''))")
    page.keyboard.press("Escape")
    page.wait_for_function("() => window.view.lanes.every((lane) => lane.dim === '')")
    page.wait_for_function("() => (window.view.store.status.states.diverged || 0) > 0")
    page.wait_for_function("() => window.view.store.status.steps > 2000")
    assert colors(page, ".wb-live-loss") > 20
    page.mouse.move(*at(page, 2, 60))
    desk.screenshot("live")
    page.mouse.move(5, 5)
    first = page.evaluate("() => [...window.view.store.points.values()].map((p) => p.loss.x[0])")
    assert set(first) == {0}
    desk.wait_until_run()
    assert desk.errors() == []
    assert "ended" in str(desk.cells()[1]["outputs"])
    page.wait_for_function(
        "() => { const r = document.querySelectorAll('.wb-live'); return r.length === 1 && (window.view = r[0].wbLive).lanes.length === 12; }"
    )
    told = page.evaluate("() => window.view.store.status.steps")
    desk.save()
    desk.reload()
    desk.wait_for_kernel()
    page.get_by_text("ended runs/live").wait_for()
    page.get_by_text("Loading widget").wait_for(state="hidden")
    page.wait_for_function(
        "() => { const r = document.querySelector('.wb-live'); return r && (window.view = r.wbLive).stats.redraws > 0; }"
    )
    assert page.evaluate("() => window.view.store.status.steps") == told, "the curves stay without their kernel"
    page.locator(".wb-live").scroll_into_view_if_needed()
    page.mouse.move(*at(page, 2, 60))
    assert "of 800" in page.locator(".wb-live-tip").inner_text()
    assert serious(page, ".wb-live") == []
    desk.screenshot("live_reopened")
    assert page.get_by_text("Error displaying widget").count() == 0


def test_an_interrupted_cell_keeps_its_curves_and_its_rows(desk: Desk) -> None:
    desk.open(desk.lab.write("stop.ipynb", [SLOW, RUN.replace("STEPS", "100000").replace("NAME", "stop")]))
    desk.run_all(wait=False)
    desk.page.wait_for_function(
        "() => { const r = document.querySelector('.wb-live'); return r && r.wbLive.stats.redraws > 5; }"
    )
    desk.interrupt()
    desk.wait_until_run()
    assert "StudyInterrupted" in desk.errors()[0]
    expect(desk.page.locator(".wb-live")).to_have_count(1)
