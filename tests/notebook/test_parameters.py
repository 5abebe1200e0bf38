"""A parameters cell: names, types, values held against them; grids of values, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.errors import UsageError
from workbench.notebook.parameters import NotebookParameter, check_values, parse_sweeps, read_parameters


def parameter(kind: str) -> NotebookParameter:
    return NotebookParameter(name="x", type=kind, default="1")


FITS = [
    ("int", [0, -3], [1.0, True, "1", None, [1]]),
    ("float", [0.5, 2, float("inf")], [True, "0.5", None]),
    ("str", ["", "a"], [1, None, ["a"]]),
    ("bool", [True, False], [0, 1, "true"]),
    ("list[float]", [[], [1, 0.5], (1.0,)], [0.5, ["a"], [True], "0.1"]),
    ("dict[str, int]", [{"a": 1}], [[("a", 1)], "a"]),
    ("float | None", [None, 1], ["none", [None]]),
    ("Union[int, str]", [1, "a"], [1.5, None]),
    ("Literal['a', 'b']", ["a", "b"], ["c", 1, None]),
    ("MyType", [1, None, "a"], []),
]


@pytest.mark.parametrize(("kind", "good", "bad"), FITS)
def test_values_against_types(kind: str, good: list[Any], bad: list[Any]) -> None:
    assert [v for v in good if not parameter(kind).accepts(v)] == []
    assert [v for v in bad if parameter(kind).accepts(v)] == []


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "200", 200),
        ("float", "1e-3", 0.001),
        ("str", "true", "true"),
        ("str", "", ""),
        ("bool", "true", True),
        ("list[float]", "0.1,0.2", [0.1, 0.2]),
        ("list[float]", "0.1", [0.1]),
        ("list[str]", "sgd,adam", ["sgd", "adam"]),
        ("float | None", "none", None),
        ("Any", "__import__('os').getpid()", "__import__('os').getpid()"),
    ],
)
def test_words_of_a_command_line(kind: str, text: str, value: Any) -> None:
    found = parameter(kind).parse(text)
    assert (type(found), found) == (type(value), value)


MANY = read_parameters(
    "steps: int = 1\nlr: float = 0.1\nname: str = 'a'\nlrs: list[float] = [0.1]\nfast: bool = True\nwarm: int | None = None\n"
    "mode: 'Literal[\"min\", \"max\"]' = 'min'\nany = None"
)


def test_a_grid_is_every_combination_the_last_one_fastest() -> None:
    assert parse_sweeps(MANY, ["steps=1,2", "name=x,y"]) == [
        {"steps": 1, "name": "x"}, {"steps": 1, "name": "y"}, {"steps": 2, "name": "x"}, {"steps": 2, "name": "y"}
    ]  # fmt: skip
    assert parse_sweeps(MANY, []) == []


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.1,1e-3,1", [0.1, 1e-3, 1]),
        ("fast=true,False", [True, False]),
        ("warm=none,10", [None, 10]),
        ('name="a,b",c', ["a,b", "c"]),
        ("name=it's,so", ["it's", "so"]),
        ("any={'a,': [1,2]},(3,4)", [{"a,": [1, 2]}, [3, 4]]),
        ("lrs=[0.1],[0.1, 0.2],[]", [[0.1], [0.1, 0.2], []]),
        ("mode=min,max", ["min", "max"]),
    ],
)
def test_values_are_of_the_declared_type(text: str, values: list[object]) -> None:
    assert [next(iter(row.values())) for row in parse_sweeps(MANY, [text])] == values


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["lrs=0.1,0.2"], r"stands in brackets: --sweep 'lrs=\[0.1\]"),
        (["steps=1,two"], "steps='two' must be of type int"),
        (["steps=1,1"], "1 stands there twice"),
        (["steps=1", "steps=2"], "given twice"),
        (["step=1"], "Did you mean 'steps'"),
        (["steps"], "name=value"),
        (["mode=min,mid"], "mode='mid' must be of type Literal"),
    ],
)
def test_what_is_wrong_is_named(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_sweeps(MANY, texts)


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
        ("precision", "fp16", "Allowed: bfloat16, float16, float32, float64"),
    ],
)
def test_a_value_that_no_study_would_take_is_refused(name: str, value: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    with pytest.raises(UsageError, match=said):
        check_values(DECLARED, {name: value}, cwd=tmp_path)
