"""Values of the right type that no study would take; and names that mean something else are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import UsageError
from workbench.notebook.parameters import check_values, read_parameters

DECLARED = read_parameters('workload: str = "quadratic"\ndevice: str = "cpu"\nprecision: str = ""')


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("workload", "quadratc", "Did you mean 'quadratic'"),
        ("workload", "", "no bundled workload"),
        ("workload", "mine.py:w", "no file 'mine.py'"),
        ("workload", "there.py:", "behind the colon"),
        ("workload", "no_such_module_here:w", "no module 'no_such_module_here'"),
        ("device", "gpu", "Allowed: auto, cpu, cuda"),
        ("device", "cuda:x", "Allowed: auto, cpu, cuda"),
        ("precision", "float16", "Allowed: bfloat16, float32, float64"),
    ],
)
def test_it_is_refused(name: str, value: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    with pytest.raises(UsageError, match=said):
        check_values(DECLARED, {name: value}, cwd=tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"workload": "digits_cnn"},
        {"workload": "there.py:w"},
        {"workload": "there:w"},
        {"workload": "json:loads"},
        {"device": "cuda:1"},
        {"device": "auto"},
        {"precision": "bfloat16"},
        {"precision": ""},
        {},
    ],
)
def test_it_is_let_through(given: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    check_values(DECLARED, given, cwd=tmp_path)


def test_a_name_with_another_meaning_is_left_alone(tmp_path: Path) -> None:
    declared = read_parameters('workload: str = "heavy"\ndevice: str = "a phone"\nprecision: int = 3')
    check_values(declared, {"workload": "light", "device": "a tablet", "precision": 4}, cwd=tmp_path)
