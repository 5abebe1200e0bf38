"""Scripts as people write them: nothing is said of them where they are right, and one bug flips its own verdict alone (P7.1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ordinary_scripts import SCRIPTS, facts_of
from workbench.topics.hosts.diagnose import diagnose_hosts
from workbench.topics.hosts.launch import launch
from workbench.topics.hosts.study import read_hosts

UNSEEN = {"straggler", "evaluation", "set_epoch"}
"""What a short training without an evaluation, or with a sampler that has no epochs, does not show; stragglers are chance here."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    launch(["-m", "tests.helpers.ordinary_scripts", str(folder)], hosts=2, folder=folder / "job", timeout_s=120)
    return folder


def alarms(folder: Path) -> tuple[dict[str, str], str]:
    """Every verdict that is not ok, but for what such a script does not show."""
    found = diagnose_hosts(read_hosts(folder))
    names = {f.code.removeprefix("hosts."): f.status for f in found if f.status != "ok"}
    unseen = {n for n, s in names.items() if n == "straggler" or (n in UNSEEN and s == "not_measured")}
    return {n: s for n, s in names.items() if n not in unseen}, repr(found)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_right_script_raises_no_alarm(trained: Path, name: str) -> None:
    found, said = alarms(facts_of(trained, name, False))
    assert found == {}, said


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_bug_flips_one_verdict_alone(trained: Path, name: str) -> None:
    found, said = alarms(facts_of(trained, name, True))
    assert list(found) == [SCRIPTS[name][1]], said
    assert found[SCRIPTS[name][1]] in ("warn", "fail")


def test_what_is_evaluated_and_what_is_streamed_is_measured(trained: Path) -> None:
    for name, code in (
        ("averaged copy", "evaluation"),
        ("windows", "evaluation"),
        ("stream", "sharding"),
        ("phases", "init_seed"),
    ):
        assert diagnose_hosts(read_hosts(facts_of(trained, name, False)))[f"hosts.{code}"].status == "ok", name
