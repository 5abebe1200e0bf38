"""What a notebook's parameters cell declares, whether given values fit it, and a grid of many sets of values.

papermill passes on whatever it is given: an unknown name only logs a line, a value of the wrong type nothing at all.
The cell is read as Python here, so that names, types and some values are known before a kernel starts.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from workbench.config import Precision
from workbench.errors import UnknownNameError, UsageError, nearest

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
    """One line `name: type = default  # help` of a parameters cell, type and default as written."""

    name: str
    type: str
    default: str
    help: str = ""

    def accepts(self, value: Any) -> bool:
        """Tell whether `value` is of the declared type; a type that is not known here accepts everything."""
        return _fits(value, _annotation(self.type))

    def parse(self, text: str) -> Any:
        """Return the value that `text`, from a command line, stands for."""
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
    """Read the assignments in the code of a parameters cell; one that is not valid Python is a `UsageError`."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"the parameters cell is not valid Python, line {error.lineno}: {error.msg}.") from error
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT}
    found = []
    for node in tree.body:
        match node:
            case ast.AnnAssign(
                target=ast.Name(id=name), annotation=ast.Constant(value=str(kind)), value=ast.expr() as value
            ):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                kind = ast.unparse(annotation)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                default = _literal(value)
                kind = "Any" if default is None else type(default).__name__
            case _:
                continue
        text = comments.get(node.end_lineno or node.lineno, "")
        found.append(NotebookParameter(name=name, type=kind, default=ast.unparse(value), help=text))
    return tuple(found)


def check_parameters(declared: Iterable[NotebookParameter], given: Mapping[str, Any]) -> None:
    """Hold `given` against what the notebook declares."""
    known = {parameter.name: parameter for parameter in declared}
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, known)
        if not known[name].accepts(value):
            raise UsageError(known[name].mismatch(value))


def parse_parameters(declared: Iterable[NotebookParameter], texts: Iterable[str]) -> dict[str, Any]:
    """Read the `name=value` words of a command line."""
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


_DEVICE = re.compile(r"(auto|cpu|mps|cuda)(:\d+)?")


def check_values(declared: Iterable[NotebookParameter], given: Mapping[str, Any], *, cwd: Path) -> None:
    """Check the values of `workload`, `device` and `precision`, which their types admit and no study might take.

    A parameter of such a name whose default is none of the known values has another meaning, and is left alone.

    Raises:
        UnknownNameError: no such workload, file or module, or no such precision; the nearest is named.
        UsageError: no device has such a name; a `DeviceError`: this machine has none.
    """
    for parameter in declared:
        value, default = given.get(parameter.name), _literal(parameter.default)
        if isinstance(value, str) and isinstance(default, str):
            try:
                _check_value(parameter.name, default, cwd)
            except UsageError:
                continue
            _check_value(parameter.name, value, cwd)


def _check_value(name: str, value: str, cwd: Path) -> None:
    if name == "workload":
        _check_workload(value, cwd)
    if name == "device" and not _DEVICE.fullmatch(value):
        raise UsageError(
            f"parameter device={value!r} is not known. Allowed: auto, cpu, cuda, mps, or one of several, as cuda:1."
        )
    if name == "device" and value.startswith(("cuda", "mps")):
        from workbench.train.batches import resolve_device

        resolve_device(value)
    if name == "precision" and value not in ("", *get_args(Precision)):
        raise UnknownNameError(f"parameter precision={value!r} is not known.{nearest(value, get_args(Precision))}")


def _literal(written: str | ast.expr) -> Any:
    """Return the value of a literal, None of anything else."""
    try:
        return ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return None


def _check_workload(name: str, cwd: Path) -> None:
    from workbench.workloads.registry import find_file, list_workloads

    where, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in list_workloads():
            raise UnknownNameError(
                f"parameter workload={name!r}: there is no bundled workload of this name.{nearest(name, list_workloads())} "
                "Your own is named file.py:name or module:name."
            )
    elif where.endswith(".py"):
        if not find_file(where, cwd=cwd).is_file():
            raise UnknownNameError(f"parameter workload={name!r}: there is no file {where!r} in {str(cwd)!r}.")
        if not attribute:
            raise UnknownNameError(f"parameter workload={name!r}: write the workload's name behind the colon.")
    elif not _is_module(where.partition(".")[0], cwd):
        raise UnknownNameError(f"parameter workload={name!r}: there is no module {where!r}.")


def _is_module(module: str, cwd: Path) -> bool:
    return (cwd / module).exists() or (cwd / f"{module}.py").exists() or bool(module and find_spec(module))


_PAIRS = {"[": "]", "(": ")", "{": "}"}


def parse_sweeps(declared: Sequence[NotebookParameter], texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return the grid of all sweeps, the last one fastest: one dictionary of values a run.

    Args:
        texts: `name=v1,v2,...` each. Values are told apart by commas outside brackets and quotes. Those of a parameter that takes
            a list stand in brackets, `lrs=[0.1],[0.1,0.2]`: otherwise nobody knows whether two runs or one list of two are meant.

    Raises:
        UnknownNameError: a name that the notebook does not have.
        UsageError: no value, a value of another type, the same value or name twice, or a list without brackets.
    """
    known = {parameter.name: parameter for parameter in declared}
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if name not in known or not equals:
            parse_parameters(declared, [text])  # says what is wrong with it
        values: list[Any] = []
        for part in split_values(rest):
            if known[name].accepts([]) and not known[name].accepts("") and not part.startswith(("[", "(")):
                raise UsageError(
                    f"--sweep {text!r}: {name} takes a list, so each value stands in brackets: --sweep '{name}=[{part}],[...]'."
                )
            value = known[name].parse(part)
            if value in values:
                raise UsageError(f"--sweep {text!r}: {value!r} stands there twice; each value is one run.")
            values.append(value)
        if name in axes:
            raise UsageError(f"--sweep {name} is given twice: write all values in one, {name}=v1,v2,v3.")
        axes[name] = values
    return [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())] if axes else []


def split_values(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes; `[0.1],[0.2,0.3]` are two, `"a,b",c` as well."""
    parts, quote = [""], ""
    closing: list[str] = []
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and (closing or not parts[-1].strip()):
            quote = sign
        elif sign in _PAIRS:
            closing.append(_PAIRS[sign])
        elif closing and sign == closing[-1]:
            closing.pop()
        elif sign == "," and not closing:
            parts.append("")
            continue
        parts[-1] += sign
    return [part.strip() for part in parts]
