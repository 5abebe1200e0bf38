"""What it takes to run a study again: a commit and a patch that together give the tree back, without its secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from workbench.ledger.studies import list_studies
from workbench.record import repro
from workbench.record.read import StudyRecord
from workbench.record.repro import called_as, git_state, source_of


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
    (repository / "deep" / "umlaut.py").write_bytes(b"# coding: latin-1\n# \xfc\n")
    git(repository, "config", "color.ui", "always")
    git(repository, "config", "diff.noprefix", "true")
    again = rebuilt(repository, tmp_path / "again", state=git_state(repository / where))
    assert (again / "train.py").read_text() == "lr = 2\n"
    assert not (again / "deep" / "model.py").exists()
    assert (again / "new file é.py").read_text() == "x = 1\n"
    assert (again / "deep" / "umlaut.py").read_bytes() == b"# coding: latin-1\n# \xfc\n"


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


def test_secrets_stay_out_of_the_patch(repository: Path) -> None:
    assert git_state(repository) == (git(repository, "rev-parse", "HEAD"), b""), "a clean tree has an empty patch"
    for name in SECRETS:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("hunter2\n")
    (repository / "plain.py").write_text("plain\n")
    (repository / "prod.env").write_text("KEY=hunter2\n")  # tracked
    (repository / "train.py").write_text("lr = 2\n")
    patch = git_state(repository)[1]
    assert b"hunter2" not in patch
    assert b"plain.py" in patch
    assert b"lr = 2" in patch


def test_data_ignored_files_and_studies_stay_out(repository: Path) -> None:
    (repository / "ignored").mkdir()
    (repository / "ignored" / "x.py").write_text("ignored content\n")
    (repository / "large.py").write_text("1\n" * repro.MAX_UNTRACKED_BYTES)
    for name in ("data.csv", "service-account.json", "notes.txt", "netrc", "picture.png"):
        (repository / name).write_text("1\n")
    study = repository / "runs" / "one"
    (study / "trials" / "0").mkdir(parents=True)
    (study / "study.json").write_text("{}")
    (study / "trials" / "0" / "config.json").write_text("{}")
    (repository / "runs" / "ledger.db").write_text("index")
    commit, patch = git_state(repository)
    assert commit is not None
    assert patch == b""


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
    config = wb.TrainConfig(peak_lr=0.1, total_steps=20, batch_size=8, momentum=0.5, warmup_steps=2)
    said = source_of(config)
    assert said == "TrainConfig(peak_lr=0.1, total_steps=20, batch_size=8, momentum=0.5, warmup_steps=2)"
    assert eval(said, vars(wb) | {"TrainConfig": wb.TrainConfig}) == config
    for study in (wb.lr_sweep.Study(lrs=[0.1], steps=5), wb.batch_size.Study(), wb.warmup.Study(full_runs=2)):
        assert eval(source_of(study), {type(study).__name__: type(study)}) == study


MINE = """
import torch
from torch.utils.data import TensorDataset
import workbench as wb

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
workload = wb.regression(
    name="mine", build_model=lambda: torch.nn.Linear(3, 1), train_data=data, validation_data=data,
    config=wb.TrainConfig(peak_lr={lr}, total_steps=20, batch_size=8),
)
"""
TRAIN = """
import sys
import workbench as wb
wb.Trainer(device="cpu").run(wb.load_workload("mine.py:workload"), out="runs/" + sys.argv[1], note="by a script")
"""


def shell(line: str, folder: Path) -> None:
    """Run a line as a person would who has the virtual environment on."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_reproduction_command_reproduces_the_metric(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(MINE.format(lr=0.05))
    (here / "train.py").write_text(TRAIN)
    (here / ".gitignore").write_text("runs/\n")
    git(here, "init", "-q")
    git(here, "add", "-A")
    git(here, "commit", "-q", "-m", "first")
    (here / "mine.py").write_text(MINE.format(lr=0.1))  # an uncommitted change, without which the metric is another one
    (here / "new.py").write_text("x = 1\n")  # an untracked file, which the study's patch holds
    shell("python train.py by-script", here)
    (first,) = list_studies(here / "runs").to_dict("records")
    assert "git worktree add " in first["reproduce"]
    assert " apply - < " in first["reproduce"]
    clone = tmp_path / "elsewhere" / "clone"
    clone.parent.mkdir()
    git(tmp_path, "clone", "-q", str(here), str(clone))
    for place in (here, clone):
        shell(first["reproduce"], place)
        tree = place.parent / "again-by-script"
        (again,) = list_studies(tree / "runs").to_dict("records")
        assert (again["best_value"], again["trials"]) == (first["best_value"], first["trials"])
        losses = [StudyRecord(root / "runs" / "by-script").steps["loss"].tolist() for root in (here, tree)]
        assert losses[0] == losses[1]
        assert (tree / "new.py").read_text() == "x = 1\n"
    assert (here / "mine.py").read_text() == MINE.format(lr=0.1), "the tree of the study is as it was"
    other = tmp_path / "without-the-change"
    git(tmp_path, "clone", "-q", str(here), str(other))
    shell("python train.py by-script", other)
    assert list_studies(other / "runs")["best_value"].iloc[0] != first["best_value"]
