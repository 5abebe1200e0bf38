"""The command line: exit codes, one-line errors, words of help, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.notebooks import write_notebook
from workbench import cli
from workbench.config import TrainConfig
from workbench.errors import RecordError, StudyInterrupted, UnknownNameError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding

CONFIG = TrainConfig(peak_lr=0.05, total_steps=100, batch_size=8, warmup_steps=10)


def diagnosis(status: str = "ok", **changes: Any) -> Diagnosis:
    finding = Finding(code="stability.early", status=status, summary="rises at step 3")
    known: dict[str, Any] = {
        "workload": "w",
        "path": Path("runs/w"),
        "recommendation": {"config": CONFIG.to_dict(), "changed": ["warmup_steps"], "paste": CONFIG.paste()},
    }
    return Diagnosis(findings=(finding,), **{**known, **changes})


@pytest.fixture
def playbook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """Put something else in the place of `workbench.playbook.diagnose.diagnose`; returns the calls it gets."""

    def replace(answer: Any) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def diagnose(workload: str, **options: Any) -> Any:
            calls.append({"workload": workload, **options})
            if isinstance(answer, BaseException):
                raise answer
            return answer

        module = types.ModuleType("workbench.playbook.diagnose")
        module.diagnose = diagnose  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "workbench.playbook.diagnose", module)
        return calls

    return replace


def test_diagnose_passes_every_option_on(playbook, capsys) -> None:
    calls = playbook(diagnosis())
    words = "diagnose mine.py:w --out o --steps 7 --study s --device cpu --fail-on fail --executor ray --address h:1 --budget 9x"
    assert cli.main([*words.split(), "--note", "why not"]) == 0
    assert cli.main(["diagnose", "w"]) == 0
    given, left = calls
    command = shlex.join(["workbench", *words.split(), "--note", "why not"])
    assert given == {
        "workload": "mine.py:w", "out": "o", "steps": 7, "study": "s", "note": "why not", "device": "cpu", "trainer": None,
        "executor": "ray", "address": "h:1", "proof_seeds": 3, "budget": "9x", "command": command, "progress": True,
    }  # fmt: skip
    assert left == given | {
        "workload": "w", "out": None, "steps": None, "study": None, "note": None, "device": "auto", "executor": "local", "budget": None,
        "address": None, "command": "workbench diagnose w",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "fail_on", "code"),
    [
        ("fail", None, 0), ("fail", "fail", 3), ("fail", "warn", 3), ("warn", "fail", 0), ("warn", "warn", 3),
        ("not_measured", "fail", 1), ("not_measured", "warn", 1), ("not_measured", None, 0), ("ok", "warn", 0),
    ],
)  # fmt: skip
def test_fail_on(playbook, status: str, fail_on: str | None, code: int) -> None:
    playbook(diagnosis(status))
    assert cli.main(["diagnose", "w", *(["--fail-on", fail_on] if fail_on else [])]) == code


ENDS = """
import torch
from torch import nn
import workbench as wb

def built(): exit({code})
def hooked():
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: exit({code}))
    return model
class Ends(torch.utils.data.TensorDataset):
    def __getitem__(self, i): exit({code})
def lost(outputs, batch): exit({code})
def loss(outputs, batch): return nn.functional.cross_entropy(outputs, batch[1], reduction="none")

x, y = torch.randn(16, 2), torch.zeros(16, dtype=torch.long)
given = {{"build_model": lambda: nn.Linear(2, 2), "train_data": torch.utils.data.TensorDataset(x, y), "loss": loss}}
w = wb.Workload(name="w", validation_data=torch.utils.data.TensorDataset(x, y), config=wb.TrainConfig(peak_lr=0.1, total_steps=4, batch_size=8),
                **given | {{{given}}})
{end}
"""


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(
    ("given", "end", "said"),
    [
        ("'build_model': built", "", "(in built)"), ("'build_model': hooked", "", "(in <lambda>)"),
        ("'train_data': Ends(x, y)", "", "(in __getitem__)"), ("'loss': lost", "", "(in lost)"),
        ("'train_data': Ends(x, y), 'num_workers': 1", "", "DataLoader worker"),
        ("", "exit({code})", "importing"), ("", "def w(): exit({code})", "(in w)"),
    ],
)  # fmt: skip
def test_a_program_that_ends_itself_has_reached_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, given: str, end: str, said: str
) -> None:
    """`exit(0)` in a person's code is not healthy, and `exit(3)` not a verdict."""
    (tmp_path / "ends.py").write_text(ENDS.format(code=code, given=given, end=end.format(code=code)))
    words = ["diagnose", f"{tmp_path / 'ends.py'}:w", "--out", str(tmp_path / "s"), "--fail-on", "fail"]
    assert cli.main(words) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UnknownNameError("workload 'x' is not known.\n Did you mean 'y'?"), 2, "workload 'x' is not known. Did you"),
        (RecordError("runs/w holds another study: choose --out"), 1, "holds another study"),
        (StudyInterrupted("stopped at step 12"), 130, "stopped at step 12"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 1, "division by zero (WORKBENCH_DEBUG=1 shows where)"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_an_error_is_one_line_and_a_code(
    playbook, capsys, monkeypatch, error: BaseException, code: int, said: str
) -> None:
    playbook(error)
    assert cli.main(["diagnose", "w"]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("workbench: ")
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    monkeypatch.setenv("WORKBENCH_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["diagnose", "w"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnose"], "WORKLOAD"),
        (["diagnose", "w", "--step", "3"], "--step"),
        (["diagnose", "w", "--steps", "many"], "--steps"),
        (["diagnose", "w", "--steps", "0"], "at least 1"),
        (["diagnose", "w", "--note", ""], "--note is empty"),
        (["diagnose", "w", "--note", "  "], "--note is empty"),
        (["diagnose", "w", "--fail-on", "ok"], "--fail-on"),
        (["dignose", "w"], "dignose"),
        ([], "workbench diagnose digits_cnn"),
    ],
)
def test_wrong_usage_is_2_and_runs_nothing(playbook, capsys, words: list[str], said: str) -> None:
    calls = playbook(diagnosis())
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize("words", [["diagnose", "--help"]])
def test_help_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\nfrom workbench.cli import main\n"
        f"code = main({words!r})\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'papermill', 'optuna', 'ipywidgets', 'ray', 'sklearn'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0", done.stderr


def test_list_shows_workloads_and_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert "digits_cnn" in out
    assert "none in ./notebooks" in out
    write_notebook(tmp_path / "notebooks" / "03_more.ipynb", text="# How many?")
    assert cli.main(["list"]) == 0
    assert cli.main(["describe", "more"]) == 0
    assert "03_more" in (out := capsys.readouterr().out)
    assert "How many?" in out


def test_lab_stays_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class Replaced(BaseException):
        """`execv` does not return."""

    def execv(_: str, words: list[str]) -> None:
        started.append(words)
        raise Replaced

    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", execv)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "mine")
    assert cli.main(["lab"]) == 2
    assert "notebooks/" in capsys.readouterr().err
    (tmp_path / "notebooks").mkdir()
    with pytest.raises(Replaced):
        cli.main(["lab", "--no-browser", "--port", "9000"])
    (words,) = started
    assert not any("default_url" in word for word in words)
    assert words[:3] == [sys.executable, "-m", "jupyterlab"]
    assert {"--ip=127.0.0.1", "--no-browser", "--port=9000", "--ServerApp.root_dir=."} <= set(words)
    ours, *theirs = os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert theirs == ["mine"]
    settings = json.loads((Path(ours) / "labconfig" / "default_setting_overrides.json").read_text())
    assert settings["@jupyterlab/docmanager-extension:plugin"]["defaultViewers"] == {"markdown": "Markdown Preview"}
    (tmp_path / "notebooks" / "00_quickstart.ipynb").touch()
    with pytest.raises(Replaced):
        cli.main(["lab"])
    assert "--LabApp.default_url=/lab/tree/my_notebooks/00_quickstart.ipynb" in started[-1]
    assert not any("token" in word.lower() for word in words), "the server makes its own, and prints it itself"


def test_diagnose_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    assert cli.main(["diagnose", "quadratic", "--steps", "20", "--out", "runs/q", "--note", "a look", "--open"]) == 0
    assert shown == [(tmp_path / "runs" / "q" / "report.html").as_uri()]
    out = capsys.readouterr().out
    assert "Diagnosis of quadratic" in out
    assert "wb.TrainConfig(" in out
    assert json.loads(Path("runs/q/study.json").read_text())["note"] == "a look"
    assert json.loads(Path("runs/q/diagnosis.json").read_text())["schema"] == 1
    for name in ("report.html", "diagnosis.json"):  # first a report that was lost, then a study that was interrupted
        Path("runs/q", name).unlink()
        Path("runs/q/report.html").unlink(missing_ok=True)
        assert cli.main(["report", "runs/q"]) == 0
        assert "stability.headroom" in Path("runs/q/report.html").read_text()
    assert cli.main(["report", "runs"]) == 2, "a folder without a study is a name that is not there"
    assert cli.main(["diagnose", "quadratic", "--steps", "30", "--out", "runs/q"]) == 1
    assert "another study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "give a WORKLOAD"),
        (["plan", "digits_mlp", "valley"], "one WORKLOAD is diagnosed at a time"),
        (["plan", "digits_mlp", "--steps", "0"], "--steps 0 must be at least 1"),
        (["plan", "--budget", "0.1x", "--", "python", "x.py"], "less than one run of the program"),
    ],
)
def test_a_plan_refuses_what_a_diagnosis_does(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
