"""What it takes to run a study again: versions, commit, uncommitted changes, command (P5.7)."""

from __future__ import annotations

import fnmatch
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["called_as", "git_state", "versions"]

_PACKAGES = ("workbench", "torch", "numpy", "pandas", "scipy", "scikit-learn")
_SECRET = ("*.env", ".env*", "*.pem", "*.key", "*secret*", "*credential*", "*token*", "*password*", "id_rsa*")
MAX_UNTRACKED_BYTES = 200_000


def versions() -> dict[str, str]:
    """Return the versions of Python and of what a result depends on, without importing any of it."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def called_as() -> str:
    """Return the command line of this process; `python` stands for the interpreter."""
    program = Path(sys.argv[0] or "python").name
    if program in ("ipykernel_launcher.py", "-c", "python", ""):
        return "(from a Python session or notebook)"
    start = ["workbench"] if program in ("workbench", "__main__.py") else ["python", sys.argv[0]]
    return shlex.join([*start, *sys.argv[1:]])


def git_state(folder: Path) -> tuple[str | None, bytes]:
    """Return (commit, patch) of the repository that `folder` is in; (None, b"") outside one.

    The patch holds the uncommitted changes and small untracked files; files whose names suggest a secret are left out.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, b""
    hidden = [f":(exclude,glob)**/{pattern}" for pattern in _SECRET]
    patch = _git(folder, "diff", "--binary", "HEAD", "--", ".", *hidden) or b""
    for line in (_git(folder, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0"):
        path = folder / line.decode("utf-8", "replace")
        name = path.name.lower()
        secret = any(fnmatch.fnmatch(name, pattern) for pattern in _SECRET)
        if line and not secret and path.is_file() and path.stat().st_size <= MAX_UNTRACKED_BYTES:
            patch += (
                _git(folder, "diff", "--binary", "--no-index", "--", "/dev/null", str(path.relative_to(folder))) or b""
            )
    return commit.decode().strip(), patch


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
