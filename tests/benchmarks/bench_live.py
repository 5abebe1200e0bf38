"""What looking on costs: in the kernel, as a share of the run and per message; in the page, per redraw of 64 lanes.

    python tests/benchmarks/bench_live.py [kernel|page]

The kernel's side runs in a real ipykernel, whose messages somebody takes. Time is counted where it is spent (every call of the
view, early rows included, and the sending) and as the thread's own time, because on a machine with other work neither a ratio
of runs nor a clock on the wall can tell a percent; the ratio is printed all the same.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from timing import machine, median, ratio, rounds

import workbench as wb

STEPS = {"digits_cnn": 1500, "digits_mlp x 16": 3000, "digits_mlp x 64": 1500}
COUNT = 3


def study(name: str, steps: int, out: Path) -> None:
    """Train one trial, or the lanes of a sweep."""
    stem, _, lanes = name.partition(" x ")
    workload = wb.load_workload(stem)
    if lanes:
        lrs = np.geomspace(1e-3, 1.0, int(lanes)).tolist()
        wb.lr_sweep.Study(lrs=lrs, steps=steps).run(workload, wb.Trainer(device="cpu", gradients="vmap"), out=out)
    else:
        config = workload.config.replace(total_steps=steps)
        wb.Trainer(device="cpu", gradients="loop").run(workload, config, out=out)


class Meter:
    """Seconds within the view's own calls, and of each message."""

    def __init__(self) -> None:
        self.inside, self.spent, self.seconds = 0, {}, 0.0  # type: ignore[var-annotated]
        self.messages: dict[str, list[float]] = {"delta": [], "all": []}

    def wrap(self, owner: Any, name: str) -> None:
        """Count the time within a method; calls within calls count once."""
        before = getattr(owner, name)

        def timed(*args: Any, **more: Any) -> Any:
            self.inside += 1
            begun = time.thread_time()
            try:
                return before(*args, **more)
            finally:
                self.inside -= 1
                if not self.inside:
                    seconds = time.thread_time() - begun
                    self.seconds += seconds
                    self.spent[name] = self.spent.get(name, 0.0) + seconds

        setattr(owner, name, timed)

    def wrap_messages(self, owner: Any) -> None:
        """Note how long the making and sending of each message takes."""
        before = owner._tick

        def timed(feed: Any, **more: Any) -> None:
            begun, number = time.thread_time(), feed._number
            whole = feed._shown is not None and (
                feed._shown.whole or bool(feed._again and feed._clock() >= feed._again[0])
            )
            before(feed, **more)
            if feed._number > number:
                self.messages["all" if whole else "delta"].append(1e3 * (time.thread_time() - begun))

        owner._tick = timed


def in_kernel() -> None:
    """Print one row per workload; runs within a kernel."""
    from workbench.train.lane import LaneLog
    from workbench.views.live import LiveFeed

    meter = Meter()
    meter.wrap_messages(LiveFeed)
    for name in ("on_study", "on_closed", "on_trial", "on_rows", "on_event"):
        meter.wrap(LiveFeed, name)
    meter.wrap(LaneLog, "show")
    for name, steps in STEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = Path(folder)

            def out(runs: Path = runs) -> Path:
                return runs / f"run-{len(list(runs.iterdir()))}"

            whole_s: list[float] = []

            def watched(
                name: str = name, steps: int = steps, out: Callable[[], Path] = out, whole_s: list[float] = whole_s
            ) -> None:
                begun = time.thread_time()
                with wb.live_view(summary=False, live=True):
                    study(name, steps, out())
                whole_s.append(time.thread_time() - begun)

            def alone(name: str = name, steps: int = steps, out: Callable[[], Path] = out) -> None:
                study(name, steps, out())

            watched()
            meter.seconds, meter.messages, meter.spent = 0.0, {"delta": [], "all": []}, {}
            whole_s.clear()
            seconds = rounds({"watched": watched, "alone": alone}, count=COUNT)
        share = 100 * meter.seconds / sum(whole_s)
        by = ", ".join(f"{name} {1e3 * s / len(whole_s):.1f}" for name, s in meter.spent.items())
        delta, whole = (sorted(meter.messages[kind]) or [0.0] for kind in ("delta", "all"))
        print(
            f"{name:<16} {median(seconds['alone']):5.1f} s alone, {len(delta) / len(whole_s):.0f} deltas a run; view {share:.2f} % of the run (ms: {by}); "
            f"delta median {statistics.median(delta):.2f} ms, 95 % below {delta[int(0.95 * (len(delta) - 1))]:.2f}, largest {delta[-1]:.2f}; "
            f"everything median {statistics.median(whole):.2f}, largest {whole[-1]:.2f}; "
            f"watched / alone {ratio(seconds['watched'], seconds['alone'])}",
            flush=True,
        )


def kernel() -> None:
    """Run `in_kernel` in a kernel of its own and print what it prints."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import torch; torch.set_num_threads(1); import bench_live; bench_live.in_kernel()"

        def show(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] in ("stream", "error"):
                print(content.get("text") or "\n".join(content["traceback"]), end="", flush=True)

        client.execute_interactive(code, timeout=1800, output_hook=show)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def page() -> None:
    """Print what a redraw of 64 lanes of 10,000 steps takes in headless Chromium, with and without the time to a new frame."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import CHROMIUM, FLAGS
    from tests.browser.live_page import feed, live_page

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for lanes in (16, 64):
            shown = live_page(browser)
            times = [
                feed(shown, lanes=lanes, steps=10_000, rows=(at, at + 100), whole=not at, lost=lanes // 12)["last_ms"]
                for at in range(0, 10_000, 100)
            ]
            frames = shown.evaluate(
                """async () => {
                  const times = [];
                  for (let i = 0; i < 30; i++) {
                    const begun = performance.now();
                    window.view.draw();
                    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
                    times.push(performance.now() - begun);
                  }
                  return times;
                }"""
            )
            print(
                f"{lanes} lanes, 10,000 steps in 100 deltas: redraw median {statistics.median(times):.1f} ms, "
                f"95 % below {sorted(times)[94]:.1f}, largest {max(times):.1f}; until the next frame is there median "
                f"{statistics.median(frames):.1f}, largest {max(frames):.1f}"
            )
            shown.close()
        browser.close()


if __name__ == "__main__":
    print(machine())
    for side in sys.argv[1:] or ("kernel", "page"):
        {"kernel": kernel, "page": page}[side]()
