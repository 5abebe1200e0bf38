"""The page's side of the live view in a page of its own, fed from the page: no kernel, no JupyterLab."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Browser, Page

from workbench.views.curves import CurvesWidget

__all__ = ["feed", "live_page"]

_START = """async ([source, still]) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const told = [];
  window.asked = [];
  const model = {
    get: (name) => ({ still })[name],
    on: (_, listener) => told.push(listener),
    send: (content) => window.asked.push(content.kind),
  };
  const widget = module.default();
  widget.initialize({ model });
  widget.render({ model, el: document.getElementById("root") });
  window.tell = (content, arrays) => {
    for (const listener of told) listener(content, arrays.map((a) => new DataView(a.buffer, a.byteOffset, a.byteLength)));
  };
  window.view = document.querySelector(".wb-live").wbLive;
  window.number = 0;
}"""

# lanes whose losses fall the faster the larger their lr, noisy, four steps a second; the last ones are lost half-way
_FEED = """([lanes, from, to, steps, whole, lost, clocked]) => {
  const rows = to - from;
  const step = new Int32Array(lanes * rows);
  const [loss, norm, lr, seconds] = [0, 1, 2, 3].map(() => new Float32Array(lanes * rows));
  let seed = 1 + from;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const trials = [];
  const counts = [];
  let at = 0;
  for (let lane = 0; lane < lanes; lane++) {
    const rate = 10 ** (-4 + (5 * lane) / Math.max(1, lanes - 1));
    const end = lane >= lanes - lost ? Math.min(to, steps / 2) : to;
    const n = Math.max(0, end - from);
    for (let k = 0; k < n; k++, at++) {
      step[at] = from + k;
      const fall = lane >= lanes - lost ? Math.exp(((from + k) / steps) * 12) : 1 / (1 + rate * (from + k));
      loss[at] = 2.3 * fall * (0.6 + 0.8 * random());
      seconds[at] = clocked ? (from + k) / 4 : NaN;
      norm[at] = 0.1 + 3 * random() ** 4;
      lr[at] = rate * Math.min(1, (from + k + 1) / (steps / 10)) * (0.55 + 0.45 * Math.cos((Math.PI * (from + k)) / steps));
    }
    counts.push([lane, n]);
    const state = lane >= lanes - lost && to >= steps / 2 ? "diverged" : "running";
    trials.push({ trial: lane, stage: "sweep", lr: rate, steps, clip: 2, examples: 32, note: "", state });
  }
  const states = { running: lanes - lost };
  if (lost) states[to >= steps / 2 ? "diverged" : "running"] = to >= steps / 2 ? lost : lanes;
  const parts = [{ metrics: ["loss", "grad_norm", "lr", "seconds"], rows: counts }];
  const status = { stage: "sweep", plan: "sweep", steps: lanes * to, rate: 20000, states };
  window.tell(
    { kind: whole ? "all" : "delta", number: window.number++, name: "sweep", workload: "digits_mlp", trials, parts, status },
    [step, loss, norm, lr, seconds].map((a) => a.subarray(0, at)),
  );
}"""


def live_page(browser: Browser, *, width: int = 1100, still: bool = False, dark: bool = False) -> Page:
    """Open a page with one empty view; `view` is it, `tell` takes messages, `asked` holds what it asked for."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    colors = {"layout-color0": "#111111", "layout-color1": "#111111", "layout-color2": "#424242"} | {
        "ui-font-color1": "#ffffff", "ui-font-color2": "#bdbdbd", "border-color1": "#616161", "border-color2": "#424242",
    }  # fmt: skip
    style = ";".join(f"--jp-{name}: {value}" for name, value in colors.items()) if dark else ""
    page.set_content(
        f"<style>{CurvesWidget._css}</style><body style='{style}; background: var(--jp-layout-color0, white)'>"
        f"<div id=root style='width: {width}px'></div>"
    )
    page.evaluate(_START, [str(CurvesWidget._esm), still])
    return page


def feed(
    page: Page,
    *,
    lanes: int,
    steps: int,
    rows: tuple[int, int],
    whole: bool = False,
    lost: int = 0,
    clocked: bool = True,
) -> dict[str, Any]:
    """Tell the page of rows from one step to another of `lanes` trials and return how long the redraw took, in ms."""
    page.evaluate(_FEED, [lanes, rows[0], rows[1], steps, whole, lost, clocked])
    page.wait_for_function("() => !window.view.waiting")
    found: dict[str, Any] = json.loads(page.evaluate("() => JSON.stringify(window.view.stats)"))
    return found
