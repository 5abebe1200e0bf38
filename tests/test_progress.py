"""Progress where nobody looks at a terminal: a line for each part, with the share that is done and the time that is left."""

from __future__ import annotations

import io
import re
import sys

import pytest

from workbench.progress import ProgressBar, progress_bar


def test_a_log_gets_one_line_a_part_with_share_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 110.0, 330.0])
    monkeypatch.setattr("workbench.progress.time.monotonic", lambda: next(clock))
    bar = ProgressBar(label="wine")
    bar.expect(1000)
    bar.status("1 of 2: baseline")
    bar.advance(250)
    bar.status("2 of 2: learning rates")
    bar.status("2 of 2: learning rates")
    bar.advance(250)
    bar.status("done soon")
    bar.advance(600)
    bar.status("longer than thought")
    assert capsys.readouterr().err.splitlines() == [
        "wine: 1 of 2: baseline", "wine: 2 of 2: learning rates (25%, about 30 s left)",
        "wine: done soon (50%, about 4 min left)", "wine: longer than thought",
    ]  # fmt: skip


def test_a_bar_grows_where_more_is_trained_than_was_expected() -> None:
    from tqdm import tqdm

    with tqdm(file=io.StringIO()) as made:
        bar = ProgressBar(made)
        bar.expect(10)
        bar.advance(4)
        assert (made.n, made.total) == (4, 10)
        bar.advance(8)
        assert (made.n, made.total) == (12, 12)


def test_nothing_is_said_where_nothing_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_LIVE", "1")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for show in (False, True):
        with progress_bar(None, "x", show=show) as bar:
            bar.status("begins")
    assert re.findall(r".+", capsys.readouterr().err) == ["x: begins"]
