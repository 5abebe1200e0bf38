"""From a name to a `Workload`: bundled ones, `package.module:attribute`, `path/to/file.py:attribute`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from workbench.errors import UnknownNameError, WorkbenchError, WorkloadError, callers_frames, nearest
from workbench.progress import finished_first, interruptible
from workbench.record.repro import source_of
from workbench.workloads.base import Workload

_FILE_MODULE = "_workload_"

_BUNDLED = {
    "digits_mlp": ("sklearn_data", "64-32-32-10 ReLU network on 8x8 digits, batch 64"),
    "digits_cnn": ("sklearn_data", "two convolutions with batch norm on 8x8 digits, batch 64"),
    "digits_resnet": ("sklearn_data", "wide residual network on 8x8 digits, the baseline of F1.3"),
    "digits_resnet_stride1": (
        "sklearn_data",
        "the same with one block's stride changed from 2 to 1, the modification of F1.3",
    ),
    "deep_residual": ("sklearn_data", "12 residual blocks without a norm on 8x8 digits, batch 64"),
    "source_text": ("source_text", "byte-level transformer on the source of Python's standard library"),
    "source_text_post_norm": (
        "source_text",
        "12 layers of it with the norms after the additions: early unstable with Adam unless the lr warms up",
    ),
    "source_lm": (
        "source_text",
        "a language model of 0.3 million parameters on the same bytes, trained as large ones are; more by its options",
    ),
    "breast_cancer": ("sklearn_data", "30-32-2 network on an imbalanced table of 569 rows"),
    "quadratic": ("analytic", "quadratic with known curvature: the largest stable lr is exact"),
    "catapult": ("analytic", "two-layer linear network whose early instability and recovery are known"),
    "valley": ("analytic", "steep at the start, flat at the end: how short a warmup may be is known"),
}


def list_workloads() -> dict[str, str]:
    """Return the bundled workloads: name -> description in one line."""
    return {name: description for name, (_, description) in _BUNDLED.items()}


@interruptible()
def load_workload(name: str) -> Workload:
    """Return the workload that `name` stands for.

    Args:
        name: a bundled name (`list_workloads`), `package.module:attribute` or `path/to/file.py:attribute`. It
            names a `Workload`, or a function that makes one when called with nothing.

    Raises:
        UnknownNameError: no such workload, module, file or attribute; the nearest name is suggested.
        WorkloadError: the module or the function raised, with that error as the cause, or gave something else.
    """

    def made(value: Any, full: str) -> Workload:
        called = ""
        if callable(value):
            value, called = _called(value, full, "a Workload"), "() returned"
        if not isinstance(value, Workload):
            raise WorkloadError(
                f"{full}{called or ' is'} {type(value).__name__}, but must be a Workload or a function without arguments "
                "that returns one."
            )
        return value.replace(source=name)

    found: Workload = _find(name, made)
    return found


def load_named(name: str, *, what: str, call: bool = True, anew: bool = True) -> Any:
    """Return whatever a name stands for: `load_workload` for things that are no workloads.

    Args:
        what: is wanted, for messages, such as "a loader".
        call: a function is called with nothing, and its result returned.
        anew: a file that has been imported already is imported again, as it may have changed.
    """
    from torch.utils.data import DataLoader

    def made(value: Any, full: str) -> Any:
        given = isinstance(value, Workload) or hasattr(value, "__iter__") or inspect.isgeneratorfunction(value)
        if call and callable(value) and not given:
            value = _called(value, full, what)
        return value.replace(source=name) if isinstance(value, Workload) else value

    return _find(name, made, anew=anew, others=(DataLoader,))


def find_file(source: str, *, cwd: Path | None = None) -> Path:
    """Return the path of a workload's file, from the folder `cwd` or from `notebooks/`; where it is in neither, the path as given."""
    given, here = Path(source), Path() if cwd is None else cwd
    around = [here, here / "notebooks", *([here / ".."] if here.resolve().name == "notebooks" else [])]
    return next((path for path in (folder / given for folder in around) if path.is_file()), here / given)


def _find(name: str, made: Callable[[Any, str], Any], *, anew: bool = True, others: tuple[type, ...] = ()) -> Any:
    """Return what `made` makes of the attribute that a name stands for, while its folder can be imported from."""
    alone = name.endswith(".py") and ":" not in name
    if ":" not in name and not alone:
        if name not in _BUNDLED:
            raise UnknownNameError(f"workload {name!r} is not known.{nearest(name, _BUNDLED)}{_how_to_name()}")
        name = f"workbench.workloads.{_BUNDLED[name][0]}:{name}"
    source, _, attribute = (name, "", "") if alone else name.rpartition(":")
    if not alone and (not source or not attribute):
        raise UnknownNameError(f"workload {name!r} is not complete.{_how_to_name()}")
    is_file = source.endswith(".py")
    path = find_file(source)
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if (
        alone and path.is_file() and "workbench" not in path.read_text(errors="replace")
    ):  # importing a script would train it, here
        raise UnknownNameError(
            f"{source} does not mention workbench, so it holds no workload. To diagnose it as a script: workbench diagnose -- python {source}"
        )
    sys.path.insert(0, folder)
    try:
        module = _import_file(path, anew=anew) if is_file else _import_module(source)
        if alone:
            attribute = _only(module, source, others)
        if not hasattr(module, attribute):
            there = [key for key, value in vars(module).items() if _may_be_asked_for(key, value, module, others)]
            hint = (
                nearest(attribute, there) if there else " It holds no workload, and no function that could return one."
            )
            raise UnknownNameError(f"{source} has no attribute {attribute!r}.{hint}")
        return made(getattr(module, attribute), f"{source}:{attribute}" if alone else name)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _only(module: ModuleType, source: str, others: tuple[type, ...]) -> str:
    """Return the name of the one workload, or of what else is asked for, that a file holds; of the one function where it holds none."""
    there = [key for key, value in vars(module).items() if _may_be_asked_for(key, value, module, others)]
    objects = [key for key in there if not isinstance(getattr(module, key), FunctionType)]
    found = objects or there
    if len(found) != 1:
        holds = (
            f"holds {', '.join(found)}: say which, as in {source}:{found[0]}"
            if found
            else "holds no workload, and no function that could return one"
        )
        raise UnknownNameError(f"{source} {holds}.")
    return found[0]


def call_on(workload: object, expression: str) -> str | None:
    """Return a Python expression with `{workload}` replaced by how that workload is loaded, its config written out.

    None where no text can stand for it: it was built in place, or its config holds a function of the user's own.
    """
    source, config = getattr(workload, "source", None), getattr(workload, "config", None)
    if source is None or config is None or config.has_callables:
        return None
    return expression.replace("{workload}", f"wb.load_workload({source!r}).replace(config={source_of(config)})")


def file_modules() -> list[ModuleType]:
    """Return the modules that `load_workload` imported from files, which no other process can import by their names."""
    return [module for name, module in sys.modules.items() if name.startswith(_FILE_MODULE)]


def _how_to_name() -> str:
    return " Your own is path/to/file.py:attribute or package.module:attribute."


def _import_module(source: str) -> ModuleType:
    try:
        with finished_first() if source.startswith("workbench.") else nullcontext():
            return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and (source == error.name or source.startswith(f"{error.name}.")):
            raise UnknownNameError(
                f"there is no module {error.name!r} to take a workload from, neither installed nor in this folder. "
                "A file is named with its ending: path/to/file.py:attribute."
            ) from error
        raise _import_failed(source, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(source, error) from error


def _import_file(path: Path, *, anew: bool) -> ModuleType:
    if not path.is_file():
        there = sorted(p.name for p in path.resolve().parent.glob("*.py"))
        hint = nearest(path.name, there) if there else " That folder has no .py files."
        raise UnknownNameError(f"there is no file {str(path)!r} to take a workload from.{hint}")
    spec = importlib.util.spec_from_file_location(f"{_FILE_MODULE}{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UnknownNameError(f"{str(path)!r} cannot be imported as a Python module.")
    there_already = sys.modules.get(spec.name)
    if not anew and there_already is not None and there_already.__file__ == spec.origin:
        return there_already
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _import_failed(str(path), error) from error
    return module


def _import_failed(source: str, error: BaseException) -> WorkloadError:
    if frames := callers_frames(error):
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        said = str(error) if isinstance(error, WorkbenchError) else _last_line(error)
        if isinstance(error, SystemExit) and source.endswith(".py"):
            said += f". A script, which trains by itself, is run as it is: workbench diagnose -- python {source}"
        return WorkloadError(f"importing {source} failed at {at}: {said.rstrip('.')}{'.' * (said[-1:] != '?')}")
    return WorkloadError(
        f"importing {source} failed with {_last_line(error).rstrip('.')}. Run it alone to see where: python "
        f"{source if source.endswith('.py') else '-c ' + repr(f'import {source}')}."
    )


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _may_be_asked_for(name: str, value: Any, module: ModuleType, others: tuple[type, ...]) -> bool:
    own_function = isinstance(value, FunctionType) and value.__module__ == module.__name__
    return not name.startswith("_") and (own_function or isinstance(value, (Workload, *others)))


def _called(value: Callable[[], Any], name: str, what: str) -> Any:
    try:
        return value()
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{name} is called without arguments to get {what}, and raised {_last_line(error)}."
        ) from error
