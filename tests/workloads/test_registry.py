import sys
from pathlib import Path

import pytest

from workbench.errors import UnknownNameError, UsageError, WorkloadError
from workbench.workloads.base import Workload
from workbench.workloads.registry import find_file, load_workload

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workbench.config import TrainConfig
from workbench.workloads.losses import regression

DATA = TensorDataset(torch.zeros(4, 3), torch.zeros(4, 1))

def make():
    return regression(
        name="mine", build_model=lambda: nn.Linear(3, 1), train_data=DATA, validation_data=DATA,
        config=TrainConfig(peak_lr=0.1, total_steps=10, batch_size=2),
    )

workload = make()
number = 3

def broken():
    raise KeyError("no data folder")

def needs(path):
    return workload

def nothing():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_workload.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("attribute", ["workload", "make"])
@pytest.mark.parametrize("source", ["own_workload.py", "./own_workload.py", "absolute"])
def test_a_file(folder: Path, source: str, attribute: str) -> None:
    path = str(folder / "own_workload.py") if source == "absolute" else source
    workload = load_workload(f"{path}:{attribute}")
    assert isinstance(workload, Workload)
    assert workload.name == "mine"


def test_a_file_that_was_edited_is_read_again(folder: Path) -> None:
    assert load_workload("own_workload.py:workload").name == "mine"
    (folder / "own_workload.py").write_text(GOOD.replace('"mine"', '"mine after the edit"'))
    assert load_workload("own_workload.py:workload").name == "mine after the edit"


def test_siblings_can_be_imported_and_the_path_is_put_back(folder: Path) -> None:
    (folder / "sibling_of_workload.py").write_text("NAME = 'from the sibling'\n")
    (folder / "late_sibling_of_workload.py").write_text("SUFFIX = ', late'\n")
    (folder / "own_workload.py").write_text(
        GOOD + "\nfrom sibling_of_workload import NAME\n"
        "def named():\n    from late_sibling_of_workload import SUFFIX\n    return workload.replace(name=NAME + SUFFIX)\n"
    )
    before = list(sys.path)
    assert load_workload(f"{folder}/own_workload.py:named").name == "from the sibling, late"
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits_cn", "'digits_cn' is not known. Did you mean 'digits_cnn'"),
        (":workload", "not complete"),
        ("own_workload.py:", "not complete.*path/to/file.py:attribute"),
        ("own_worklaod.py:workload", "no file 'own_worklaod.py'.*Did you mean 'own_workload.py'"),
        ("nowhere/own.py:workload", "no file 'nowhere/own.py'.*has no .py files"),
        ("no_such_package.module:workload", "no module 'no_such_package'"),
        ("workbench.workloads.no_such:workload", "no module 'workbench.workloads.no_such'"),
        ("own_workload.py:worklaod", "no attribute 'worklaod'. Did you mean 'workload'.*make"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_name_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(UnknownNameError, match=said):
        load_workload(name)


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("number", "own_workload.py:number is int, but must be a Workload"),
        ("nothing", r"own_workload.py:nothing\(\) returned NoneType"),
        ("broken", "called without arguments.*KeyError: 'no data folder'"),
        ("needs", "called without arguments.*TypeError.*path"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_attribute_of_the_wrong_kind(attribute: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        load_workload(f"own_workload.py:{attribute}")


@pytest.mark.parametrize(
    ("code", "said", "cause"),
    [
        (
            "raise ValueError('first line\\nlast line')",
            "failed at failing_workload.py:1: ValueError: last line",
            ValueError,
        ),
        (
            "import workbench as wb\nwb.TrainConfig(peak_lr=0, total_steps=1, batch_size=1)",
            "failed at failing_workload.py:2: peak_lr=0 must",
            UsageError,
        ),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'", ModuleNotFoundError),
        ("def f(:", "failed with SyntaxError", SyntaxError),
        ("import sys; sys.exit(2)", "failed at failing_workload.py:1: SystemExit: 2", SystemExit),
        ("from workbench.errors import nothing_like_it", "failed at failing_workload.py:1: ImportError", ImportError),
    ],
)
@pytest.mark.parametrize("source", ["failing_workload.py", "failing_workload"])
def test_a_module_that_raises(folder: Path, source: str, code: str, said: str, cause: type[BaseException]) -> None:
    (folder / "failing_workload.py").write_text(code)
    with pytest.raises(WorkloadError, match=said) as caught:
        load_workload(f"{source}:workload")
    assert isinstance(caught.value.__cause__, cause)
    script = cause is SystemExit and source.endswith(".py")
    assert ("workbench diagnose -- python failing_workload.py" in str(caught.value)) is script
    assert "_workload_failing_workload" not in sys.modules


def test_a_file_is_found_from_the_project_and_from_its_notebooks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook runs in notebooks/ in JupyterLab, and in the project's folder as a batch job."""
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / "beside.py").write_text(GOOD)
    (folder / "notebooks" / "own_workload.py").write_text("workload = 1")
    assert load_workload("own_workload.py:workload").name == "mine", "the current folder comes first"
    assert load_workload("beside.py:workload").name == "mine"
    assert load_workload("notebooks/beside.py:workload").name == "mine"
    monkeypatch.chdir(folder / "notebooks")
    assert load_workload("beside.py:workload").name == "mine"
    assert find_file("nowhere.py") == Path("nowhere.py")
    assert find_file("beside.py", cwd=folder) == folder / "notebooks" / "beside.py"
