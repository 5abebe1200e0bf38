"""Real ranks, real collectives: each planted bug flips its own verdict alone (P7.1)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from workbench.errors import UnknownNameError
from workbench.topics.hosts.diagnose import AREAS
from workbench.topics.hosts.planted import BUGS
from workbench.topics.hosts.study import self_test_hosts

EXPECTED = {
    "healthy": ("", None),
    "init_seed": ("init_seed", "RNG"),
    "data_seed": ("data_seed", "RNG"),
    "overlap": ("sharding", "sharding"),
    "incomplete": ("sharding", "sharding"),
    "no_set_epoch": ("set_epoch", "RNG"),
    "logs": ("writers", "logging"),
    "checkpoints": ("checkpoint_writers", "checkpointing"),
    "buffers": ("buffers", "evaluation"),
    "padded": ("evaluation", "evaluation"),
    "own_part": ("evaluation", "evaluation"),
    "clip": ("clip", None),
    "slow": ("straggler", None),
    "raw_module": ("not_wrapped", None),
}
"""Bug: the one code that is not ok, and the one area."""
QUICK = [name for name in EXPECTED if name != "slow"]


def check(table: pd.DataFrame, names: list[str], *, but: str = "") -> None:
    found = table.set_index("bug")
    assert list(found.index) == names
    for bug in names:
        code, area = EXPECTED[bug]
        codes = {c for c in found.loc[bug, "codes"].split(", ") if c and (c != but or c == code)}
        assert codes == ({code} if code else set()), (bug, codes)
        sick = {name for name in AREAS if found.loc[bug, name] != "ok"}
        assert sick == ({area} if area else set()), (bug, sick)


def test_every_bug_that_can_be_planted_is_expected_somewhere() -> None:
    assert {"healthy", *BUGS} == set(EXPECTED)


def test_each_bug_flips_its_own_verdict_alone_on_two_hosts(tmp_path: Path) -> None:
    """How long a host is busy on a machine that others use as well is chance: stragglers are judged where one is planted."""
    check(self_test_hosts(out=tmp_path / "study"), list(EXPECTED), but="straggler")


@pytest.mark.slow
def test_and_on_four(tmp_path: Path) -> None:
    check(self_test_hosts(hosts=4, out=tmp_path / "study"), list(EXPECTED), but="straggler")


def test_an_unknown_bug_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'clip'"):
        self_test_hosts(["clipp"], out=tmp_path / "study")
    assert not (tmp_path / "study").exists()
