"""Run by every Python of a program that is being diagnosed, before anything else: lets the observer begin once torch is there."""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads torch as it would be loaded anyway, and begins to observe when that is done."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        _begin()


def _begin() -> None:
    from workbench.programs.child import begin

    begin(os.environ["WORKBENCH_TRIAL"])


def _guard() -> None:
    """Guard the person's own files from now on, whatever the program imports first."""
    import json

    from workbench.programs.guard import begin

    try:
        with open(os.environ["WORKBENCH_TRIAL"], encoding="utf-8") as file:
            trial = json.load(file)
    except OSError:  # the study is gone: there is nobody to tell
        return
    begin(trial)


def _run_the_next() -> None:
    """Run the sitecustomize that this one hides."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
_run_the_next()
if os.environ.get("WORKBENCH_TRIAL"):
    _guard()
    if "torch" in sys.modules:  # a path file has imported it
        _begin()
    else:
        sys.meta_path.insert(0, _AfterTorch())
