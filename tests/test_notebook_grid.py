"""Grids and files of parameters: the runs they stand for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import UnknownNameError, UsageError
from workbench.notebook.parameters import parse_sweeps, read_parameters, read_rows, split_values

DECLARED = read_parameters(
    "steps: int = 1\nlr: float = 0.1\nname: str = 'a'\nlrs: list[float] = [0.1]\nfast: bool = True\nwarm: int | None = None\n"
    "mode: 'Literal[\"min\", \"max\"]' = 'min'\nany = None"
)


def test_a_grid_is_every_combination_the_last_one_fastest() -> None:
    assert parse_sweeps(DECLARED, ["steps=1,2", "name=x,y"]) == [
        {"steps": 1, "name": "x"}, {"steps": 1, "name": "y"}, {"steps": 2, "name": "x"}, {"steps": 2, "name": "y"}
    ]  # fmt: skip
    assert parse_sweeps(DECLARED, []) == []


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.1,1e-3,1", [0.1, 1e-3, 1]),
        ("fast=true,False", [True, False]),
        ("warm=none,10", [None, 10]),
        ('name="a,b",c', ["a,b", "c"]),
        ("name=it's,so", ["it's", "so"]),
        ("lrs=[0.1],[0.1, 0.2],[]", [[0.1], [0.1, 0.2], []]),
        ("mode=min,max", ["min", "max"]),
    ],
)
def test_values_are_of_the_declared_type(text: str, values: list[object]) -> None:
    assert [next(iter(row.values())) for row in parse_sweeps(DECLARED, [text])] == values


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["lrs=0.1,0.2"], r"stands in brackets: --sweep 'lrs=\[0.1\]"),
        (["steps=1,two"], "steps='two' must be of type int"),
        (["steps=1,,2"], "steps='' must be of type int"),
        (["steps=1,1"], "1 stands there twice"),
        (["steps=1", "steps=2"], "given twice"),
        (["step=1"], "Did you mean 'steps'"),
        (["steps"], "name=value"),
        (["mode=min,mid"], "mode='mid' must be of type Literal"),
    ],
)
def test_what_is_wrong_is_named(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_sweeps(DECLARED, texts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a,b", ["a", "b"]), ("", [""]), ("[1,2],(3,4)", ["[1,2]", "(3,4)"]), ("{'a,': [1,2]},b", ["{'a,': [1,2]}", "b"])],
)
def test_commas_inside_brackets_and_quotes_separate_nothing(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_a_file_holds_one_run_a_row(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text('\ufeffsteps,name,lrs\n5,"x, y","[0.1, 0.2]"\n,z,\n\n')
    assert read_rows(DECLARED, tmp_path / "r.csv") == [{"steps": 5, "name": "x, y", "lrs": [0.1, 0.2]}, {"name": "z"}]
    (tmp_path / "r.json").write_text('[{"steps": 5, "lrs": [0.1]}, {}]')
    assert read_rows(DECLARED, tmp_path / "r.json") == [{"steps": 5, "lrs": [0.1]}, {}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.txt", "", "must end in .json or .csv"),
        ("r.json", "{", "r.json: is not valid JSON"),
        ("r.json", '{"steps": 1}', "list of objects"),
        ("r.json", "[]", "holds no row"),
        ("r.json", '[{}, {"steps": "1"}]', "row 2: parameter steps='1' must be of type int"),
        ("r.csv", "steps\n", "holds no row"),
        ("r.csv", "stps\n1\n", "r.csv: row 1: .*Did you mean 'steps'"),
        ("r.csv", "steps,lrs\n1,0.1,0.2\n", "row 1: 3 cells under 2 names"),
        ("r.csv", "steps\n1\nx\n", "row 2: parameter steps='x'"),
    ],
)
def test_a_file_that_is_wrong_says_where(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said):
        read_rows(DECLARED, tmp_path / name)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_rows(DECLARED, tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_rows(DECLARED, tmp_path / "b.csv")
    (tmp_path / "u.json").write_text('[{"stps": 1}]')
    with pytest.raises(UnknownNameError, match="row 1"):
        read_rows(DECLARED, tmp_path / "u.json")
