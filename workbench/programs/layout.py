"""`lay_out`: a folder in which a program finds everything where it is used to, and overwrites nothing of it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence, Set
from pathlib import Path

from workbench.errors import UsageError

MAX_LINKS = 2000
"""Entries of a working directory that are linked one by one; folders that hold more are linked as a whole (rule of thumb)."""
MAX_COPIED, MAX_COPIES = 1_000_000, 64_000_000
"""Bytes of a file up to which a program gets a copy of it, which it may write to, and of all copies (rules of thumb: code and notes are
smaller, data is not)."""
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules", "runs"}
FIRST_RUN = ".first-"
"""How the name of the folder of a study's first run begins, before there is a study."""
_ABOVE, _BESIDE = 4, 500
"""Folders above the working directory in which a repository's root is looked for, and entries of one up to which it is linked (rules of thumb)."""


def top_of(folder: Path) -> Path:
    """Return the outermost folder that a program's relative paths may reach: the repository's root, else the folder above.

    Programs read "../data" and write "../runs"; the home directory and the root of the file system are no such folder.
    """
    near = [folder, *folder.parents[:_ABOVE]]
    root = next((place for place in near if (place / ".git").exists()), folder.parent)
    outside = {Path.home(), Path(folder.anchor)}
    return folder if outside & {root, *_between(folder, root)} or _crowded(folder, root) else root


def outermost(place: Path, top: Path) -> Path:
    """Return where `lay_out` puts the twin of `top_of(folder)`."""
    return place / (top.name or "top")


def lay_out(folder: Path, place: Path, *, redirect: Sequence[str] = (), copy: bool = False) -> Path:
    """Make a twin of `folder` below `place` and return where it lies: folders of its own with copies of small files and links to large ones, or a copy.

    What stands beside the folder, up to `top_of`, is there as well in the same way, so that "../data" is there.

    Args:
        redirect: files and folders, as seen from `folder`, that are empty in the twin.
    """
    top = top_of(folder)
    inside = folder.relative_to(top)
    redirected = {os.path.normpath(name) for name in redirect}
    away = next((name for name in redirected if os.path.isabs(name)), None)
    if away is not None:
        raise UsageError(f"--redirect {away} is absolute: give it as seen from {folder}, such as 'out'.")
    outer = outermost(place, top)
    twin = outer / inside
    without = {str(path) for path in (place, *place.parents[:2])} | {os.path.normpath(folder / n) for n in redirected}
    without |= {str(path) for path in place.parents if (path / "study.json").exists()}  # it is being written to
    twin.parent.mkdir(parents=True, exist_ok=True)
    left = [MAX_LINKS, MAX_COPIES]
    if copy:

        def ignore(where: str, names: list[str]) -> set[str]:
            paths = {n: os.path.join(where, n) for n in names}
            return {n for n, path in paths.items() if n in _SKIPPED or path in without or _of_a_study(path)}

        shutil.copytree(folder, twin, symlinks=True, ignore=ignore)
    else:
        _link(folder, twin, without, left, skipped=_SKIPPED)
    above, beside = top, outer
    for part in inside.parts:  # after the folder itself, which comes first where there is not room for all
        _link(above, beside, without, left, skipped={part, *_SKIPPED})
        above, beside = above / part, beside / part
    for name in redirected:
        target = twin / name
        if (folder / name).is_file() or (target.is_symlink() and target.is_file()):
            target.unlink(missing_ok=True)
        else:
            if target.is_symlink():
                target.unlink()
            target.mkdir(parents=True, exist_ok=True)
    return twin


def _between(folder: Path, root: Path) -> list[Path]:
    return [place for place in folder.parents if place == root or root in place.parents]


def _crowded(folder: Path, root: Path) -> bool:
    return any(len(os.listdir(place)) > _BESIDE for place in _between(folder, root))


def _link(source: Path, target: Path, without: Set[str], left: list[int], *, skipped: Set[str] = frozenset()) -> None:
    """Fill `target` with what is in `source`, but for the paths `without` and the names `skipped`; `left` is of links and of bytes."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        with os.scandir(source) as found:
            entries = sorted(found, key=lambda e: e.name)
    except FileNotFoundError:  # gone meanwhile, as with another study beside this one
        return
    for entry in entries:
        path = os.path.abspath(entry.path)
        if path in without or entry.name in skipped:
            continue
        left[0] -= 1
        if entry.is_dir(follow_symlinks=False) and _count(path) <= left[0] and not _of_a_study(path):
            _link(Path(path), target / entry.name, without, left)
        elif not _copied(entry, target / entry.name, left):
            (target / entry.name).symlink_to(path)


def _of_a_study(path: str) -> bool:
    """Tell whether a folder is a study's, or its first run's: another study's runs hold twins of what stands beside them, this one included."""
    return os.path.exists(os.path.join(path, "study.json")) or os.path.basename(path).startswith(FIRST_RUN)


def _count(path: str) -> float:
    try:
        return len(os.listdir(path))
    except OSError:  # not ours to read, or gone
        return math.inf


def _copied(entry: os.DirEntry[str], target: Path, left: list[int]) -> bool:
    """Copy a small file, so that nothing that writes to it, Python or not, reaches the person's own."""
    try:
        size = entry.stat(follow_symlinks=False).st_size
        if not entry.is_file(follow_symlinks=False) or size > min(MAX_COPIED, left[1]):
            return False
        shutil.copy2(entry.path, target)
    except OSError:  # not ours to read, or gone meanwhile
        target.unlink(missing_ok=True)
        return False
    left[1] -= size
    return True
