"""`Guard`: keeps a program that is being diagnosed from a person's own files. It is there before torch, so it imports little."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

_CACHES = {".cache", ".config", ".triton", ".nv", "__pycache__"}
"""Folders that libraries keep for themselves, as below a home directory."""
_COMPILED = "torchinductor_"
_TOUCHED: dict[str, tuple[tuple[int, int, str], ...]] = {
    "os.truncate": ((0, -1, "content"),), "os.setxattr": ((0, -1, "content"),), "os.removexattr": ((0, -1, "content"),),
    "os.chmod": ((0, 2, "content"),), "os.chown": ((0, 3, "content"),), "os.utime": ((0, 3, "entry"),),
    "os.remove": ((0, 1, "entry"),), "os.rmdir": ((0, 1, "entry"),), "shutil.rmtree": ((0, 1, "entry"),),
    "os.rename": ((0, 2, "entry"), (1, 3, "new")), "os.link": ((0, 2, "content"), (1, 3, "new")),
    "os.symlink": ((1, 2, "new"),), "os.mkdir": ((0, 2, "folder"),),
}  # fmt: skip
"""Audit event -> where among its arguments a path stands, and the folder that it is seen from, -1 for none; and whether what the path
leads to is changed, the entry itself changes or goes away, or it is a new one, a folder where nothing may be yet. A hard link lets its file be written by another name."""
_PRAGMA, _CHANGING = 19, (9, 18, 23)
"""Codes by which SQLite asks its authorizer: for a pragma; to delete, insert and update rows, of which its schema is made, too."""
_BEFORE_IT_IS_LOOKED_UP = ((18, "sqlite_master"), (18, "sqlite_temp_master"))
"""Asked before SQLite looks whether what `CREATE ... IF NOT EXISTS` names is there; where it is not, an update follows."""
_LIFTED = ("journal_mode", "query_only", "wal_checkpoint")
"""Pragmas that write a database which is only to be queried, or lift that."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_MADE = "made.jsonl"
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_BEGUN: list[Guard] = []


def begin(trial: Mapping[str, Any]) -> Guard:
    """Begin to guard this process, unless that is done already."""
    if not _BEGUN:
        _BEGUN.append(Guard(trial["guarded"], trial["scratch"], trial["folder"], trial["typed_in"]))
        _BEGUN[0].guard_open()
        if "_sqlite3" in sys.modules:
            _BEGUN[0]._guard_databases()
        sys.addaudithook(_BEGUN[0].heard)  # Python keeps it for good
        atexit.register(_BEGUN[0].settle, every=True)
    return _BEGUN[0]


class Guard:
    """Refuses to write, move or remove what is the person's own: it was there before, below `guarded`, and not in `scratch`."""

    def __init__(self, guarded: str, scratch: str, folder: str, seen_from: str) -> None:
        self._seen_from = os.path.realpath(seen_from)
        self._guarded, self._scratch, self._folder = (
            os.path.join(os.path.realpath(p), "") for p in (guarded, scratch, folder)
        )
        self._made: set[str] = set()
        self._placed = threading.local()
        self._before = frozenset(sys.modules)
        self._imports: list[str] = []
        self._set: dict[str, str | None] = {}  # variables of the environment, before anything was imported
        self._changed = ""  # the variable of the environment before whose change they were there
        self._databases = False  # whether SQLite is guarded
        self._due: dict[int, list[tuple[str, bool]]] = {}  # of each thread: what it is about to make, or to take away

    def guard_open(self) -> None:
        """Have `os.open` checked where its path is seen from an open folder, of which the interpreter does not tell."""
        original = os.open

        @functools.wraps(original)
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None:
                return original(path, flags, mode)
            self._check_open(_seen(path, dir_fd), None, flags)
            self._placed.now = True
            try:
                with self._unsettled():
                    return original(path, flags, mode, dir_fd=dir_fd)
            finally:
                self._placed.now = False

        os.open = opened
        os.supports_dir_fd.add(opened)

    @contextlib.contextmanager
    def writing(self, path: Any) -> Iterator[None]:
        """Refuse to write `path`, or note what the body makes there where the interpreter does not tell of it."""
        self.check(path)
        with self._unsettled():
            yield

    @contextlib.contextmanager
    def _unsettled(self) -> Iterator[None]:
        """Keep what this thread is about to make from being looked at until the body has made it."""
        before, self._placed.busy = getattr(self._placed, "busy", False), True
        try:
            yield
        finally:
            self._placed.busy = before
            self.settle()

    def settle(self, *, every: bool = False) -> None:
        """Note which file each entry is that this thread, or every one, has made since: another one under its name is not the program's."""
        if getattr(self._placed, "busy", False) and not every:
            return
        for thread in list(self._due) if every else [threading.get_ident()]:
            for path, made in self._due.pop(thread, ()):
                found = _identity(path)
                if made == (found is not None):
                    self._note(_MADE, [path, found])

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take in what the interpreter is about to do."""
        if self._due:
            self.settle()
        if event == "open":
            if not getattr(self._placed, "now", False):
                self._check_open(*arguments[:3])
            return
        if event in ("os.putenv", "os.unsetenv") and not self._imports and not _is_importing():
            self._hear_of_variable(*(*map(os.fsdecode, arguments), None)[:2])
        if event in ("import", "sqlite3.connect"):
            self._hear_of_database(event, arguments[0])
        if event not in _TOUCHED:
            return
        before, self._placed.busy = getattr(self._placed, "busy", False), True
        try:
            if event == "os.rename":
                self._take_along(_seen(arguments[0], arguments[2]), _seen(arguments[1], arguments[3]))
            for place, seen_from, kind in _TOUCHED[event]:
                path = _seen(arguments[place], arguments[seen_from] if 0 <= seen_from < len(arguments) else None)
                if kind == "content":
                    self.check(path)
                else:
                    self._check_entry(path, kind)
        finally:
            self._placed.busy = before

    def _hear_of_variable(self, name: str | None, value: str | None) -> None:
        new = [module for name, module in tuple(sys.modules.items()) if name not in self._before]
        if any("-packages" in (getattr(module, "__file__", None) or "") for module in new):
            self.note_imports(str(name))
        else:  # whatever is imported later finds it
            self._set[str(name)] = value

    def _hear_of_database(self, event: str, what: Any) -> None:
        if event == "import":
            if what == "_sqlite3" and not self._databases:
                self._guard_databases()
        elif (name := os.fsdecode(what)) not in ("", ":memory:"):
            name = name.partition("?")[0].removeprefix("file:") if name.startswith("file:") else name
            self._check_open(name, None, os.O_CREAT)

    def _guard_databases(self) -> None:
        """Have databases of the person's read alone: SQLite opens its files where Python does not hear of it."""
        self._databases = True
        import _sqlite3

        original, base, guard = _sqlite3.connect, _sqlite3.Connection, self

        class Connection(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                for _, _, path in base.execute(self, "PRAGMA database_list").fetchall():
                    if path and guard._made_there(os.path.realpath(path)) is False:
                        base.execute(self, "PRAGMA query_only = ON")
                        base.set_authorizer(self, functools.partial(guard._allow, os.path.realpath(path)))

        @functools.wraps(original)
        def connect(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **({"factory": Connection} if len(args) < 6 else {}) | kwargs)

        for module in (sys.modules[name] for name in ("_sqlite3", "sqlite3", "sqlite3.dbapi2") if name in sys.modules):
            vars(module).update(Connection=Connection, connect=connect)

    def _allow(self, real: str, action: int, what: str | None, value: str | None, *_: Any) -> int:
        """Answer SQLite while it compiles a statement for a database that is only to be read, and note one which it refuses later without saying why."""
        if action == _PRAGMA and (pragma := str(what).lower()) in _LIFTED and (value or pragma == "wal_checkpoint"):
            return 2  # it does nothing, without an error: many programs set the journal's mode before they read
        if action in _CHANGING and (action, what) not in _BEFORE_IT_IS_LOOKED_UP:
            self._note_refused(real)
        return 0  # nothing against it

    def note_imports(self, changed: str = "") -> None:
        """Note, once, what is imported by now: before the first optimizer is built, or the environment changes that later imports may read."""
        if not self._imports:
            self._imports, self._changed = list(sys.modules), changed

    def imported(self) -> dict[str, Any]:
        """Return the installed modules that were noted, each with its file and its place among all, in the order in which their imports ended; the variables set before; and why they cannot be imported beforehand, "" where they can."""
        from workbench.instruments.caller import shown

        modules = []
        for place, name in enumerate(self._imports):
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and spec.has_location and spec.name == name and shown(spec.origin) is None:
                modules.append((name, spec.origin, place))
        late = self._changed and "torch" not in self._imports
        return {
            "modules": modules,
            "set": self._set,
            "why": f"it sets {self._changed} before it imports torch" if late else "",
        }

    def _check_open(self, path: Any, mode: Any, flags: Any) -> None:
        writes, creates, exclusive = _writes(mode, flags)
        if not isinstance(path, (str, bytes, os.PathLike)) or (exclusive and os.path.lexists(path)):
            return  # that is a FileExistsError
        if writes or (creates and not os.path.lexists(path)):
            self.check(path)

    def check(self, path: Any) -> None:
        """Refuse to write what `path` leads to, through links."""
        if isinstance(path, (str, bytes, os.PathLike)):
            real = os.path.realpath(os.fsdecode(path))
            if not os.path.isdir(real):
                self._refuse(real, there=os.path.lexists(real))

    def _check_entry(self, path: Any, kind: str) -> None:
        """Refuse to remove or replace the entry `path`; where that is a link, the folder that it stands in is what counts."""
        if isinstance(path, (str, bytes, os.PathLike)):
            parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            real = os.path.join(os.path.realpath(parent), name)
            there = os.path.lexists(real)
            if not there if kind == "folder" else there or kind == "new":
                self._refuse(real, there=there, kind=kind)

    def _is_outside(self, real: str) -> bool:
        ours = os.path.join(real, "").startswith((self._scratch, self._folder))
        return ours or not real.startswith(self._guarded)

    def _refuse(self, real: str, *, there: bool, kind: str = "content") -> None:
        made = self._made_there(real, there=there)
        if made is None:
            return
        if not there:
            self._made.add(real)  # the program's own from here on
            self._note(_MADE, [real, None])
        if made or not there:
            if kind in ("entry", "new") or not there:
                self._due.setdefault(threading.get_ident(), []).append((real, kind != "entry"))
            return
        self._note_refused(real)
        raise PermissionError(
            f"{real} is yours: while a program is diagnosed nothing that was there before is written, moved or removed"
        )

    def _made_there(self, real: str, *, there: bool = True) -> bool | None:
        """Tell whether the program made what is there, None where nobody asks: outside of what is guarded, and in the caches of libraries."""
        if self._is_outside(real):
            return None
        made = self._is_made(real)
        parts = real[len(self._guarded) :].split(os.sep)
        if not made and (_CACHES.intersection(parts) or any(part.startswith(_COMPILED) for part in parts)):
            return None
        if there and not made:
            self._made |= set(_made(self._folder))  # by other processes of the program
            made = self._is_made(real)
        return made

    def _note_refused(self, real: str) -> None:
        if not os.path.exists(os.path.join(self._folder, "refused.json")):
            self._note("refused.json", {"path": os.path.relpath(real, self._seen_from), "line": _line()})

    def _take_along(self, source: Any, target: Any) -> None:
        """Note what a folder of the program's that is moved among the person's files brings along."""
        if not all(isinstance(path, (str, bytes, os.PathLike)) for path in (source, target)):
            return
        old, new = (os.path.abspath(os.fsdecode(path)) for path in (source, target))
        old, new = (
            os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in (old, new)
        )
        if self._is_outside(new) or os.path.islink(old):
            return
        known = None if self._is_outside(old) else _made(self._folder)
        for folder, folders, files in os.walk(old):
            for path in (os.path.join(folder, name) for name in (*folders, *files)):
                found = _identity(path)
                if known is None or (found is not None and known.get(path) == found):
                    self._note(_MADE, [new + path[len(old) :], found])

    def _is_made(self, real: str) -> bool:
        """Tell whether the program made this, or a folder that it lies in."""
        while len(real) >= len(self._guarded) and real not in self._made:
            real = os.path.dirname(real)
        return real in self._made

    def _note(self, name: str, value: Any) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.join(self._folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, (json.dumps(value) + "\n").encode())
            os.close(descriptor)


def take_back(folder: str) -> None:
    """Remove what a program that has ended made anew among the person's files, as its guard noted in `folder`; nothing else.

    A file is removed where it is the very one that was noted after it was made, a folder where it is empty by then: what others wrote
    meanwhile stays.
    """
    made = _made(folder)
    for path in sorted(made, reverse=True):  # what lies in a folder before the folder
        with contextlib.suppress(OSError):
            is_folder, same = stat.S_ISDIR(os.lstat(path).st_mode), made[path] == _identity(path)
            if is_folder and (same or made[path] is None):
                os.rmdir(path)
            elif same:
                os.remove(path)


def _made(folder: str) -> dict[str, list[int] | None]:
    """Return what was noted last of each path: which file it is, None where that is not known."""
    found: dict[str, list[int] | None] = {}
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, _MADE), encoding="utf-8") as file:
        for line in file:
            path, identity = json.loads(line)
            found[path] = identity
    return found


def _identity(path: str) -> list[int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return [status.st_dev, status.st_ino]


def _seen(path: Any, folder: Any) -> Any:
    """Return a path as seen from the open folder that it is relative to; None where that cannot be told."""
    if not isinstance(folder, int) or folder < 0 or not isinstance(path, (str, bytes, os.PathLike)):
        return path
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
    except OSError:  # no such descriptor, or not Linux
        return None


def _writes(mode: Any, flags: Any) -> tuple[bool, bool, bool]:
    """Return whether what is opened is written, made where it is not there, and made only where it is not there."""
    if isinstance(mode, str):
        return any(c in mode for c in "wax+"), any(c in mode for c in "wax"), "x" in mode
    given = flags if isinstance(flags, int) else 0
    creates = bool(given & os.O_CREAT)
    return bool(given & _WRITING), creates, creates and bool(given & os.O_EXCL)


def _line() -> str:
    from workbench.instruments.caller import own_line

    return own_line()


def _is_importing() -> bool:
    """Tell whether this call is made by an installed module that is being imported, rather than by the program."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "<module>" and (path.startswith(_STANDARD) or "-packages" in path):
            return True
        frame = frame.f_back
    return False
