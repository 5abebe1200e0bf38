"""What it takes to run a study again: versions, commit, uncommitted changes, command (P5.7)."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.lazy import public_spelling

_PACKAGES = {"workbench": "training-workbench"} | {
    name: name for name in ("torch", "numpy", "pandas", "scipy", "scikit-learn")
}
"""Name in a record -> name of the distribution."""
_SECRET = ("*.env", ".env*", "*.pem", "*.key", "*secret*", "*credential*", "*token*", "*password*", "id_rsa*")
_CODE = (
    *(f"*.{end}" for end in ["py", "pyi", "pyx", "pxd", "c", "cc", "cpp", "cu", "cuh", "h", "hpp", "rs", "go", "js", "mjs", "ts", "css", "html", "j2", "sh", "toml", "cfg", "ini", "yaml", "yml"]),
    "Makefile", "Dockerfile", "requirements*.txt", "constraints*.txt",
)  # fmt: skip
"""What a patch may hold: code and what configures it; data, notes, pictures and notebooks are not needed to train again."""
_DIFF = ("diff", "--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_CLASS = re.compile(r"\b(?<![.'\"])([A-Z]\w+)\(")
MAX_UNTRACKED_BYTES = 200_000  # rule of thumb: code is smaller than this, data is not
MAX_UNTRACKED = 500  # rule of thumb: more new files than this are no change to the code


def versions() -> dict[str, str]:
    """Return the versions of Python and of what a result depends on, without importing any of it."""
    found = {"python": sys.version.split()[0]}
    for package, distribution in _PACKAGES.items():
        try:
            found[package] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def called_as(call: str | None = None) -> str:
    """Return the command line of this process; `python` stands for the interpreter.

    Args:
        call: a Python expression over `wb` and public classes by the names of their definitions, for a session or a notebook, which have no command line of their own.
    """
    path = Path(sys.argv[0] or "python")
    program = path.parent.name if path.name == "__main__.py" else path.name
    if program in ("ipykernel_launcher.py", "-c", "-m", "python", "pytest", ""):
        if call is None:
            return "(from a Python session or notebook)"
        code = f"import workbench as wb; {_CLASS.sub(lambda m: f'{public_spelling().get(m[1], m[1])}(', call)}"
        if not set(code) & set('"\\'):  # no quote has to be quoted then, and the line stays one that can be read
            code = code.replace("'", '"')
        return shlex.join(["python", "-c", code])
    module = ["python", "-m", program] if path.name == "__main__.py" else ["python", sys.argv[0]]
    start = ["workbench"] if program == "workbench" else module
    return shlex.join([*start, *sys.argv[1:]])


def source_of(instance: Any) -> str:
    """Return the call that makes a dataclass again, without the fields that have their default."""
    given = []
    for field in fields(instance):
        value = getattr(instance, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and (default is MISSING or type(value) is not type(default) or value != default):
            given.append(f"{field.name}={value!r}")
    return f"{type(instance).__name__}({', '.join(given)})"


def git_state(folder: Path) -> tuple[str | None, bytes]:
    """Return (commit, patch) of the repository that `folder` is in; (None, b"") outside one.

    The patch holds the uncommitted changes of code and its configuration in the whole repository, small untracked files
    included; studies and whatever has a name that suggests a secret are left out.
    """
    commit, top = _git(folder, "rev-parse", "HEAD"), _git(folder, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None, b""
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    hidden = [f":(exclude,glob,icase)**/{form}" for pattern in _SECRET for form in (pattern, f"{pattern}/**")]
    patch = _git(root, *_DIFF, "HEAD", "--", *(f":(glob)**/{form}" for form in _CODE), *hidden) or b""
    listed = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")
    wanted = [name for line in listed if line and _belongs(root, name := os.fsdecode(line))]
    for name in wanted[:MAX_UNTRACKED]:
        patch += _git(root, *_DIFF, "--no-index", "--", "/dev/null", name) or b""
    return commit.decode().strip(), patch


def git_folder(folder: Path) -> str:
    """Return where `folder` lies in its repository, as `studies/vision/`: "" at the top and outside a repository."""
    return os.fsdecode((_git(folder, "rev-parse", "--show-prefix") or b"").rstrip(b"\n"))


def _belongs(root: Path, name: str) -> bool:
    """Tell whether an untracked file is part of the code: by its name, small, no secret, not a study's own."""
    path = root / name
    secret = any(fnmatch.fnmatch(part.lower(), pattern) for part in Path(name).parts for pattern in _SECRET)
    code = any(fnmatch.fnmatchcase(path.name, form) for form in _CODE)
    if secret or not code or not path.is_file() or path.stat().st_size > MAX_UNTRACKED_BYTES:
        return False
    folders = [root.joinpath(*Path(name).parts[:depth]) for depth in range(1, len(Path(name).parts))]
    return not any((above / "study.json").exists() for above in folders)


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    differs = "--no-index" in arguments and done.returncode == 1
    return done.stdout if done.returncode == 0 or differs else None
