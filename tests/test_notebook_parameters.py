"""Names, types, defaults and help of a parameters cell; values held against them."""

from __future__ import annotations

from typing import Any

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from workbench.errors import UnknownNameError, UsageError
from workbench.notebook.parameters import NotebookParameter, check_parameters, parse_parameters, read_parameters

KERNEL = {"name": "python3", "language": "python", "display_name": "Python 3"}


def parameter(kind: str) -> NotebookParameter:
    return NotebookParameter(name="x", type=kind, default="1")


def test_plain_cells_are_read_as_papermill_reads_them(tmp_path) -> None:
    source = (
        "steps: int = 200  # updates of a trial\n\n# a comment\nname: str = 'digits_cnn'  # which\n"
        "lrs: list[float] = [0.1, 0.2]  # tried\nfast = True\n"
    )
    cell = new_code_cell(source, metadata={"tags": ["parameters"]})
    nbformat.write(
        new_notebook(cells=[cell], metadata={"kernelspec": KERNEL}),
        tmp_path / "n.ipynb",
    )
    theirs = papermill.inspect_notebook(tmp_path / "n.ipynb")
    ours = {p.name: p for p in read_parameters(source)}
    assert list(ours) == list(theirs) == ["steps", "name", "lrs", "fast"]
    for name, p in ours.items():
        assert (p.default, p.help) == (theirs[name]["default"], theirs[name]["help"])
        assert p.type == theirs[name]["inferred_type_name"] or name == "fast"
    assert ours["fast"].type == "bool"


def test_what_papermill_cannot_read_is_read() -> None:
    source = "lr: float | None = None  # lr=None: found\nnote: 'str' = 'a=b'  # why = because\nmany: list[int] = [\n    1,\n]  # more"
    assert [(p.name, p.type, p.default, p.help) for p in read_parameters(source)] == [
        ("lr", "float | None", "None", "lr=None: found"),
        ("note", "str", "'a=b'", "why = because"),
        ("many", "list[int]", "[1]", "more"),
    ]


def test_what_is_no_parameter_is_left_out() -> None:
    assert read_parameters("import os\nx: int\nprint(1)\na.b = 3\nc, d = 1, 2\n") == ()
    with pytest.raises(UsageError, match="line 1"):
        read_parameters("x: int = = 3")


FITS = [
    ("int", [0, -3], [1.0, True, "1", None, [1]]),
    ("float", [0.5, 2, float("inf")], [True, "0.5", None]),
    ("str", ["", "a"], [1, None, ["a"]]),
    ("bool", [True, False], [0, 1, "true"]),
    ("list[float]", [[], [1, 0.5], (1.0,)], [0.5, ["a"], [True], "0.1"]),
    ("list[list[int]]", [[[1], []]], [[1]]),
    ("dict[str, int]", [{"a": 1}], [[("a", 1)], "a"]),
    ("float | None", [None, 1], ["none", [None]]),
    ("Optional[int]", [None, 1], [1.5]),
    ("Union[int, str]", [1, "a"], [1.5, None]),
    ("Literal['a', 'b']", ["a", "b"], ["c", 1, None]),
    ("MyType", [1, None, "a"], []),
    ("Any", [1, None, "a"], []),
]


@pytest.mark.parametrize(("kind", "good", "bad"), FITS)
def test_values_against_types(kind: str, good: list[Any], bad: list[Any]) -> None:
    assert [v for v in good if not parameter(kind).accepts(v)] == []
    assert [v for v in bad if parameter(kind).accepts(v)] == []


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "200", 200),
        ("int", "-3", -3),
        ("float", "1e-3", 0.001),
        ("float", "2", 2),
        ("str", "200", "200"),
        ("str", "true", "true"),
        ("str", "a,b", "a,b"),
        ("str", "", ""),
        ("bool", "true", True),
        ("bool", "False", False),
        ("list[float]", "[0.1, 0.2]", [0.1, 0.2]),
        ("list[float]", "0.1,0.2", [0.1, 0.2]),
        ("list[float]", "0.1", [0.1]),
        ("list[float]", "[]", []),
        ("list[str]", "sgd,adam", ["sgd", "adam"]),
        ("float | None", "none", None),
        ("float | None", "0.1", 0.1),
        ("dict[str, int]", "{'a': 1}", {"a": 1}),
    ],
)
def test_words_of_a_command_line(kind: str, text: str, value: Any) -> None:
    found = parameter(kind).parse(text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(("kind", "text"), [("int", "1.5"), ("int", "ten"), ("bool", "1"), ("list[float]", "a,b")])
def test_words_that_do_not_fit(kind: str, text: str) -> None:
    with pytest.raises(UsageError, match="must be of type"):
        parameter(kind).parse(text)


def test_code_in_a_word_is_not_run() -> None:
    assert parameter("Any").parse("__import__('os').getpid()") == "__import__('os').getpid()"


def test_check_and_parse_name_what_is_unknown() -> None:
    declared = read_parameters("steps: int = 1")
    check_parameters(declared, {"steps": 3})
    assert parse_parameters(declared, ["steps=3"]) == {"steps": 3}
    for call in (lambda: check_parameters(declared, {"step": 3}), lambda: parse_parameters(declared, ["step=3"])):
        with pytest.raises(UnknownNameError, match="Did you mean 'steps'"):
            call()
    for words in (["steps"], ["=3"], ["steps=1", "steps=2"]):
        with pytest.raises(UsageError):
            parse_parameters(declared, words)
