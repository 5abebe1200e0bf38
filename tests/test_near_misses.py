"""What is typed almost right is answered with what is right, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from workbench.cli import main
from workbench.errors import UnknownNameError, UsageError

ENOUGH = {"peak_lr": 0.1, "total_steps": 10, "batch_size": 4}


@pytest.mark.parametrize(
    ("given", "meant"),
    [("lr", "peak_lr"), ("epochs", "total_steps"), ("wd", "weight_decay"), ("lr_scheduler", "schedule"), ("grad_clip", "max_grad_norm"),
     ("peek_lr", "'peak_lr'")],
)  # fmt: skip
def test_a_config_knows_what_others_call_its_fields(given: str, meant: str) -> None:
    for make in (
        lambda: wb.TrainConfig(**ENOUGH, **{given: 1}),
        lambda: wb.TrainConfig(**ENOUGH).replace(**{given: 1}),
    ):
        with pytest.raises(UnknownNameError, match=rf"has no field '{given}'. Did you mean {meant}"):
            make()


def test_a_workload_names_the_field_that_is_near() -> None:
    with pytest.raises(
        UnknownNameError, match=r"Workload has no field 'validation_dat'. Did you mean 'validation_data'"
    ):
        wb.Workload(name="mine", validation_dat=[])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("LrSweep", "wb.lr_sweep.Study"), ("plot_lrsweep", "wb.lr_sweep.plot"), ("Traner", "Trainer"), ("diagnos", "diagnose")],
)  # fmt: skip
def test_the_package_names_what_is_near(given: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"no '{given}'; did you mean {meant}\?"):
        getattr(wb, given)
    with pytest.raises(AttributeError, match=r"dir\(\) of it lists"):
        getattr(wb, "xqz")  # noqa: B009


def test_a_path_in_the_place_of_a_record_says_what_opens_it() -> None:
    for topic, function in (("lr_sweep", "diagnose"), ("data", "diagnose"), ("ps", "plot")):
        with pytest.raises(UsageError, match=rf"wb\.{topic}\.{function}\(wb\.open\('runs/a'\)\)"):
            getattr(getattr(wb, topic), function)("runs/a")
    with pytest.raises(UsageError, match=r"wb\.judge\(wb\.read_log\('a\.csv'\)\)"):
        wb.judge("a.csv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnos", "digits_mlp"], "'diagnos' is not a command. Did you mean 'diagnose'?"),
        (
            ["report", "runs/nope"],
            "there is no folder runs/nope. Did you mean 'note'? There are: a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 and 1 more.",
        ),
        (["diagnose", "--", "python", "row.py"], "Did you mean 'rows.py'? There are: rows.py."),
        (["studies", "nodir"], "there is no folder nodir"),
        (["judge", "no.csv"], "there is no no.csv"),
        (["input", "rows.py:rows"], "rows.py:rows is a Tensor, which is no workload, DataLoader or dataset"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_right(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text("import torch\nrows = torch.zeros(3, 2)\n")
    for name in ("note", *(f"a{number}" for number in range(10))):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "study.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert [p for p in sorted(tmp_path.iterdir()) if p.name != "__pycache__"] == before


def test_a_device_is_looked_for_before_the_first_cell_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "lr_sweep", "-p", "device=cuda:99", "--out", str(tmp_path / "out")]) == 2
    assert "device='cuda:99' was asked for" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_stands_for_the_one_workload_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make = "import workbench as wb\nmine = wb.load_workload('quadratic')\ndef helper(): return 3\n"
    Path("one.py").write_text(make)
    assert wb.load_workload("one.py").source == "one.py"
    Path("two.py").write_text(f"{make}other = mine\n")
    with pytest.raises(UnknownNameError, match=r"two.py holds mine, other: say which, as in two.py:mine"):
        wb.load_workload("two.py")
    Path("none.py").write_text("x = 1\n")
    with pytest.raises(UnknownNameError, match="none.py does not mention workbench, so it holds no workload"):
        wb.load_workload("none.py")


@pytest.mark.parametrize(("words", "said"), [
    ("diagnose digits_cnn --budgt 3x", "workbench diagnose: '--budgt' is not an option. Did you mean '--budget'"),
    ("studies a b", "workbench studies: 'b' is not expected here."),
    ("diagnose digits_cnn --budget -1x", "workbench: --budget -1x is not known. Give baseline runs or time"),
    ("diagnose digits_cnn --budget", "workbench diagnose: --budget needs a value. workbench diagnose --help shows"),
    ("plan digits_cnn --steps abc", "workbench plan: --steps takes an integer, not 'abc'."),
])  # fmt: skip
def test_an_option_of_a_command_has_near_names(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err
