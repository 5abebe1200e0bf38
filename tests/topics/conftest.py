"""These tests train hundreds of trials: what makes a run durable is tested elsewhere and left out here."""

from __future__ import annotations

import os

import pytest

from workbench.record import repro


@pytest.fixture(autouse=True)
def quick_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(repro, "git_state", lambda _: (None, b""))
