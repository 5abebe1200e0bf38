"""What a notebook's parameters cell declares, and whether a given value fits it.

papermill passes on whatever it is given: an unknown name only logs a line, a value of the wrong type nothing at all.
The cell is read as Python here, so that the names and types are known before a kernel starts.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import UnknownNameError, UsageError, nearest

__all__ = ["NotebookParameter", "check_parameters", "parse_parameters", "read_parameters"]

_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "list": (list, tuple),
    "tuple": (list, tuple),
    "dict": (dict,),
    "None": (type(None),),
}
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, kw_only=True)
class NotebookParameter:
    """One line `name: type = default  # help` of a parameters cell.

    Attributes:
        name: what `-p name=value` sets.
        type: the annotation as written; the default's own type where there is none.
        default: the default as written.
        help: the comment behind it.
    """

    name: str
    type: str
    default: str
    help: str = ""

    def accepts(self, value: Any) -> bool:
        """Tell whether `value` is of the declared type; a type that is not known here accepts everything."""
        return _fits(value, _annotation(self.type))

    def parse(self, text: str) -> Any:
        """Return the value that `text`, from a command line, stands for.

        Raises:
            UsageError: nothing of the declared type can be read from it.
        """
        readings: list[Any] = []
        if text.lower() in _WORDS:
            readings.append(_WORDS[text.lower()])
        for source in (text, f"[{text}]"):
            try:
                readings.append(ast.literal_eval(source))
            except (ValueError, SyntaxError, MemoryError):
                continue
        readings += [text, text.split(",")]
        for value in readings:
            if self.accepts(value):
                return list(value) if isinstance(value, tuple) else value
        raise UsageError(self.mismatch(text))

    def mismatch(self, value: Any) -> str:
        """Say that `value` is not of the declared type, and what would be."""
        return f"parameter {self.name}={value!r} must be of type {self.type}, for example {self.name}={self.default}."


def read_parameters(source: str) -> tuple[NotebookParameter, ...]:
    """Read the assignments of a parameters cell.

    Args:
        source: the cell's code.

    Raises:
        UsageError: the cell is not valid Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"the parameters cell is not valid Python, line {error.lineno}: {error.msg}.") from error
    comments = _comments(source)
    found = []
    for node in tree.body:
        name, annotation, value = _assignment(node)
        if name is None or value is None:
            continue
        kind = _written(annotation) if annotation is not None else _type_of(value)
        text = comments.get(node.end_lineno or node.lineno, "")
        found.append(NotebookParameter(name=name, type=kind, default=ast.unparse(value), help=text))
    return tuple(found)


def check_parameters(declared: Iterable[NotebookParameter], given: Mapping[str, Any]) -> None:
    """Hold `given` against what the notebook declares.

    Raises:
        UnknownNameError: a name that the notebook does not have; the nearest one is named.
        UsageError: a value of another type.
    """
    known = {parameter.name: parameter for parameter in declared}
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, known)
        if not known[name].accepts(value):
            raise UsageError(known[name].mismatch(value))


def parse_parameters(declared: Iterable[NotebookParameter], texts: Iterable[str]) -> dict[str, Any]:
    """Read the `name=value` words of a command line.

    Raises:
        UnknownNameError: a name that the notebook does not have.
        UsageError: a word without "=", a name given twice, or a value of another type.
    """
    known = {parameter.name: parameter for parameter in declared}
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"parameter {text!r} must be written name=value, for example -p steps=200.")
        if name in values:
            raise UsageError(f"parameter {name!r} is given twice: leave one out.")
        if name not in known:
            raise _unknown(name, known)
        values[name] = known[name].parse(value)
    return values


def _unknown(name: str, known: Mapping[str, NotebookParameter]) -> UnknownNameError:
    if not known:
        return UnknownNameError(f"the notebook has no parameter {name!r}: it has no parameters at all. Leave it out.")
    return UnknownNameError(f"the notebook has no parameter {name!r}.{nearest(name, known)}")


def _assignment(node: ast.stmt) -> tuple[str | None, ast.expr | None, ast.expr | None]:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
            return name, annotation, value
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, None, value
    return None, None, None


def _written(annotation: ast.expr) -> str:
    quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return str(annotation.value) if quoted else ast.unparse(annotation)  # type: ignore[attr-defined]


def _type_of(value: ast.expr) -> str:
    try:
        default = ast.literal_eval(value)
    except ValueError:
        return "Any"
    return "Any" if default is None else type(default).__name__


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT}


def _annotation(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return ast.Name(id="Any")


def _fits(value: Any, annotation: ast.expr) -> bool:
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return _fits(value, _annotation(text))
        case ast.Name(id=name):
            return _fits_name(value, name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(value, left) or _fits(value, right)
        case ast.Subscript(value=ast.Name(id=outer), slice=inner):
            return _fits_subscript(value, outer.lower(), inner)
    return True


def _fits_name(value: Any, name: str) -> bool:
    if name not in _SCALARS:
        return True
    if isinstance(value, bool) and name != "bool":
        return False
    return isinstance(value, _SCALARS[name])


def _fits_subscript(value: Any, outer: str, inner: ast.expr) -> bool:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if outer == "optional":
        return value is None or _fits(value, inner)
    if outer == "union":
        return any(_fits(value, part) for part in parts)
    if outer == "literal":
        return value in [part.value for part in parts if isinstance(part, ast.Constant)]
    if outer in {"list", "sequence"}:
        return isinstance(value, (list, tuple)) and all(_fits(item, inner) for item in value)
    return _fits_name(value, outer)
