"""Values that a parameter's type admits and that no study would take: found before a kernel starts.

Looked at are parameters named `workload`, `device` and `precision`, where the notebook's own default is one of the known values:
a parameter of that name with another meaning is left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from workbench.config import Precision
from workbench.errors import UnknownNameError, UsageError, nearest
from workbench.notebook.parameters import NotebookParameter

__all__ = ["check_values"]

_DEVICE = re.compile(r"(auto|cpu|mps|cuda)(:\d+)?")


def check_values(declared: Iterable[NotebookParameter], given: Mapping[str, Any], *, cwd: Path) -> None:
    """Check the values of `workload`, `device` and `precision`, as far as that goes without training.

    Args:
        declared: the notebook's parameters.
        given: values by name, of the declared types.
        cwd: folder that the notebook runs in, where the file of a workload is looked up.

    Raises:
        UnknownNameError: no such workload, file or module, or no such precision; the nearest is named.
        UsageError: no device has such a name.
    """
    checks = {"workload": _workload, "device": _device, "precision": _precision}
    for parameter in declared:
        value, check = given.get(parameter.name), checks.get(parameter.name)
        if check is None or not isinstance(value, str):
            continue
        default = _literal(parameter.default)
        if isinstance(default, str) and _passes(check, default, cwd):
            check(value, cwd)


def _passes(check: Any, value: str, cwd: Path) -> bool:
    try:
        check(value, cwd)
    except UsageError:
        return False
    return True


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _workload(name: str, cwd: Path) -> None:
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
    elif not _findable(where.partition(".")[0], cwd):
        raise UnknownNameError(f"parameter workload={name!r}: there is no module {where!r}.")


def _findable(module: str, cwd: Path) -> bool:
    return (cwd / module).exists() or (cwd / f"{module}.py").exists() or bool(module and find_spec(module))


def _device(name: str, cwd: Path) -> None:  # noqa: ARG001
    if not _DEVICE.fullmatch(name):
        raise UsageError(
            f"parameter device={name!r} is not known. Allowed: auto, cpu, cuda, mps, or one of several, as cuda:1."
        )


def _precision(name: str, cwd: Path) -> None:  # noqa: ARG001
    if name not in ("", *get_args(Precision)):
        raise UnknownNameError(f"parameter precision={name!r} is not known.{nearest(name, get_args(Precision))}")
