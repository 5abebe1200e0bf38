"""What holds for every test: no page is looking, one thread, no window, and Ctrl-C reaches whoever it is sent to."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Before NumPy or torch start their thread pools; kernels and subprocesses inherit these.
os.environ["WORKBENCH_LIVE"] = "0"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
os.environ["WORKBENCH_RUNS"] = "runs"  # beside the test or the notebook, not in the folder of whoever runs them
os.environ.pop("WORKBENCH_DEBUG", None)
os.environ["WORKBENCH_CACHE"] = tempfile.mkdtemp(prefix="workbench-tests-")  # what this machine remembers is not theirs

# A shell that starts a job in the background lets it ignore SIGINT, and all that the job starts inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave thousands of tests and all that they import out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_to_disk() -> Iterator[None]:
    """Studies by the hundred: what is durable, and of which commit, is tested where it is asked for."""
    from workbench.record import repro

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(repro, "git_state", lambda _: (None, b""))
        yield


@pytest.fixture(autouse=True)
def no_watch_stops_recording(request: pytest.FixtureRequest) -> Iterator[None]:
    """Watching never ends a training, so that a fault of ours passes silently: it fails the test, unless that is marked `stops_recording`."""
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("workbench.topics.loop.collect")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    stopped = [message for message in told if "stopped recording" in message]
    assert not stopped or request.node.get_closest_marker("stops_recording"), stopped


@pytest.fixture(autouse=True)
def no_figure_stays_open() -> Iterator[None]:
    """Figures of one test do not count towards the 20 of which matplotlib warns in another."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Reports without pictures, where findings are looked at alone: to draw them takes half of a small diagnosis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.report.write.FIGURES", ())
        yield
