"""A rank that moves is left alone however long it takes; one that stands still leaves its stack."""

from __future__ import annotations

import json
import time
from pathlib import Path

from workbench.topics.hosts.watch_state import State, Watchdog, stack_path, status_path

TIMEOUT_S = 1.0


def stood_still(folder: Path) -> bool:
    return stack_path(folder, 0).stat().st_size > 0


def test_progress_puts_the_time_out_off_and_standing_still_does_not(tmp_path: Path) -> None:
    state = State(tmp_path, rank=0)
    dog = Watchdog(state, TIMEOUT_S)
    try:
        until = time.monotonic() + 2.2 * TIMEOUT_S
        while time.monotonic() < until:
            state.tick("forward")
            time.sleep(0.02)
        assert not stood_still(tmp_path)
        state.step, state.phase = 7, "loading"
        until = time.monotonic() + 20 * TIMEOUT_S
        while not stood_still(tmp_path) and time.monotonic() < until:
            time.sleep(0.05)
        said = json.loads(status_path(tmp_path, 0).read_text())
        assert (said["step"], said["phase"], said["state"]) == (7, "loading", "running")
    finally:
        dog.close()
    assert "test_progress_puts_the_time_out_off" in stack_path(tmp_path, 0).read_text()
    assert json.loads(status_path(tmp_path, 0).read_text())["state"] == "finished"


def test_a_watch_that_was_ended_says_nothing_more(tmp_path: Path) -> None:
    dog = Watchdog(State(tmp_path, rank=3), 0.3)
    dog.close()
    dog.close()
    time.sleep(0.6)
    assert stack_path(tmp_path, 3).read_text() == ""
    assert json.loads(status_path(tmp_path, 3).read_text())["state"] == "finished"
