"""What it takes to run a study again: a commit and a patch that together give the tree back, without its secrets."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.record import repro
from workbench.record.repro import called_as, git_state, source_of, versions


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "deep").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "deep" / "model.py").write_text("width = 8\n")
    (folder / "prod.env").write_text("KEY=old\n")
    (folder / ".gitignore").write_text("ignored/\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def rebuilt(repository: Path, folder: Path, *, state: tuple[str | None, bytes]) -> Path:
    """Clone, check out the commit, apply the patch: what the ledger's reproduction notes say."""
    commit, patch = state
    assert commit is not None
    git(repository.parent, "clone", "-q", str(repository), str(folder))
    git(folder, "checkout", "-q", commit)
    (folder.parent / "repro.patch").write_bytes(patch)
    git(folder, "apply", str(folder.parent / "repro.patch"))
    return folder


@pytest.mark.parametrize("where", [".", "deep"])
def test_commit_and_patch_give_the_tree_back(repository: Path, tmp_path: Path, where: str) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "deep" / "model.py").unlink()
    (repository / "new file é.py").write_text("x = 1\n")
    (repository / "deep" / "table.bin").write_bytes(bytes(range(256)))
    git(repository, "config", "color.ui", "always")
    git(repository, "config", "diff.noprefix", "true")
    again = rebuilt(repository, tmp_path / "again", state=git_state(repository / where))
    assert (again / "train.py").read_text() == "lr = 2\n"
    assert not (again / "deep" / "model.py").exists()
    assert (again / "new file é.py").read_text() == "x = 1\n"
    assert (again / "deep" / "table.bin").read_bytes() == bytes(range(256))


def test_a_clean_tree_has_an_empty_patch(repository: Path) -> None:
    assert git_state(repository) == (git(repository, "rev-parse", "HEAD"), b"")


SECRETS = [
    ".env",
    ".env.local",
    "id_rsa",
    "server.PEM",
    "api_token.txt",
    "deep/my-secrets.yaml",
    "credentials/aws",
    "Passwords",
]


@pytest.mark.parametrize("name", SECRETS)
def test_untracked_secrets_stay_out(repository: Path, name: str) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text("hunter2\n")
    (repository / "plain.py").write_text("plain\n")
    patch = git_state(repository)[1]
    assert b"hunter2" not in patch
    assert b"plain.py" in patch, "the patch itself must not be empty for this test to mean anything"


def test_changes_of_tracked_secrets_stay_out(repository: Path) -> None:
    (repository / "prod.env").write_text("KEY=hunter2\n")
    (repository / "train.py").write_text("lr = 2\n")
    patch = git_state(repository)[1]
    assert b"hunter2" not in patch
    assert b"lr = 2" in patch


def test_data_ignored_files_and_studies_stay_out(repository: Path) -> None:
    (repository / "ignored").mkdir()
    (repository / "ignored" / "x.py").write_text("ignored content\n")
    (repository / "data.csv").write_text("1\n" * repro.MAX_UNTRACKED_BYTES)
    study = repository / "runs" / "one"
    (study / "trials" / "0").mkdir(parents=True)
    (study / "study.json").write_text("{}")
    (study / "trials" / "0" / "config.json").write_text("{}")
    (repository / "runs" / "ledger.db").write_text("index")
    assert git_state(repository)[1] == b""


def test_outside_a_repository_there_is_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(tmp_path) == (None, b"")
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == (None, b"")


def test_versions_are_those_of_this_process() -> None:
    import numpy as np
    import torch

    found = versions()
    assert found["python"] == sys.version.split()[0]
    assert found["numpy"] == np.__version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/x/bin/workbench", "diagnose", "my file.py:w"], "workbench diagnose 'my file.py:w'"),
        (["/x/workbench/__main__.py", "list"], "workbench list"),
        (["/x/package/__main__.py", "-q"], "python -m package -q"),
        (["/x/pytest/__main__.py", "-q"], "(from a Python session or notebook)"),
        (["train.py", "--lr", "1"], "python train.py --lr 1"),
        (["/x/ipykernel_launcher.py", "-f", "k.json"], "(from a Python session or notebook)"),
        (["-c"], "(from a Python session or notebook)"),
        ([""], "(from a Python session or notebook)"),
    ],
)
def test_the_command_line_can_be_typed_again(monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert called_as() == said


def test_a_dataclass_is_written_without_its_defaults_and_made_again() -> None:
    import workbench as wb

    config = wb.TrainConfig(peak_lr=0.1, total_steps=20, batch_size=8, momentum=0.5, warmup_steps=2)
    said = source_of(config)
    assert said == "TrainConfig(peak_lr=0.1, total_steps=20, batch_size=8, momentum=0.5, warmup_steps=2)"
    assert eval(said, vars(wb) | {"TrainConfig": wb.TrainConfig}) == config
    for study in (wb.LRSweep(lrs=[0.1], steps=5), wb.BatchSizeStudy(), wb.WarmupStudy(full_runs=2)):
        assert eval(source_of(study), {type(study).__name__: type(study)}) == study


def test_no_quote_is_quoted_where_none_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    assert called_as("f('a', b=[1])") == """python -c 'import workbench as wb; f("a", b=[1])'"""
    for odd in ("""f("it's")""", r"f('a\nb')"):
        assert shlex.split(called_as(odd))[2] == f"import workbench as wb; {odd}"


def test_a_study_from_a_session_is_reproduced_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench as wb

    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    first = wb.LRSweep(lrs=[0.05, 0.1], steps=12).run(wb.load_workload("digits_mlp"), out=tmp_path / "a")
    words = shlex.split(str(first.command))
    assert words[:2] == ["python", "-c"]
    again = subprocess.run(
        [sys.executable, "-c", words[2].replace(str(tmp_path / "a"), str(tmp_path / "b"))], check=True, cwd=tmp_path
    )
    assert again.returncode == 0
    assert wb.open(tmp_path / "b").steps["loss"].tolist() == first.steps["loss"].tolist()
