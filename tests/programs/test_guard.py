"""A program that is diagnosed may try what it likes: afterwards the person's folder is what it was, byte for byte, its listing included."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import textwrap
from pathlib import Path

import pytest

from workbench.programs import layout
from workbench.programs.command import Command, Outcome, check_command, run_command

TRIAL = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "stop_after": None, "seed": 0}
PRELUDE = """
import os, pathlib, shutil, sqlite3, sys
def changed(path, does, **how):
    connection = how.pop('by', sqlite3.connect)(path, **how)
    try:
        assert connection.execute('SELECT x FROM t').fetchall() == [(1,)], 'it may be read'
        connection.execute(does)
        connection.commit()
    except sqlite3.OperationalError as error:
        raise PermissionError(str(error))
    finally:
        connection.close()
data = os.path.realpath("../data")
big, inside, there = data + "/big.bin", data + "/inside", os.getcwd()
fd = os.open("../data", os.O_RDONLY)
below = os.open("../data/inside", os.O_RDONLY)
"""
REFUSED = {
    "open": "open(big, 'r+')",
    "append": "open('../data/big.bin', 'ab')",
    "pathlib": "pathlib.Path('../data/big.bin').write_text('x')",
    "os.open": "os.open('../data/big.bin', os.O_WRONLY)",
    "read only and emptied": "os.open(big, os.O_RDONLY | os.O_TRUNC)",
    "os.open from a folder": "os.open('big.bin', os.O_WRONLY, dir_fd=fd)",
    "os.open from a folder, emptied": "os.open('one.txt', os.O_RDWR | os.O_TRUNC, dir_fd=below)",
    "truncate": "os.truncate('../data/big.bin', 0)",
    "rename": "os.rename(big, 'mine')",
    "rename from a folder": "os.rename('big.bin', 'mine', src_dir_fd=fd)",
    "rename within a folder": "os.rename('one.txt', 'two.txt', src_dir_fd=below, dst_dir_fd=below)",
    "replace": "(open('mine', 'w').close(), os.replace('mine', big))",
    "replace into a folder": "(open('mine', 'w').close(), os.replace('mine', 'big.bin', dst_dir_fd=fd))",
    "replace an empty folder": "(os.mkdir('new'), os.rename('new', data + '/empty'))",
    "remove": "os.remove(big)",
    "unlink from a folder": "os.unlink('big.bin', dir_fd=fd)",
    "rmdir": "os.rmdir(data + '/empty')",
    "rmdir from a folder": "os.rmdir('empty', dir_fd=fd)",
    "rmtree": "shutil.rmtree(inside)",
    "rmtree from a folder": "shutil.rmtree('inside', dir_fd=fd)",
    "hard link": "os.link(big, 'mine')",
    "hard link through a link": "os.link('../data/big.bin', 'mine')",
    "hard link from a folder": "os.link('big.bin', 'mine', src_dir_fd=fd)",
    "hard link over": "(open('mine', 'w').close(), os.link('mine', big))",
    "symbolic link over": "os.symlink('nowhere', big)",
    "write through a link of its own": "(os.symlink(big, 'mine'), open('mine', 'w'))",
    "chmod": "os.chmod('../data/big.bin', 0o777)",
    "utime": "os.utime(big)",
    "move": "shutil.move(big, 'mine')",
    "a row of a database": "changed('../data/big.db', 'INSERT INTO t VALUES (2)')",
    "a row of a database by its URI": "changed('file:' + data + '/big.db?mode=rw', 'DELETE FROM t', uri=True)",
    "a table of a database": "changed(pathlib.Path('../data/big.db'), 'DROP TABLE t')",
    "a row of a database without connect": "changed(data + '/big.db', 'UPDATE t SET x = 2', by=sqlite3.Connection)",
    "a new table of a database": "changed(data + '/big.db', 'CREATE TABLE IF NOT EXISTS u (x)')",
    "a row of a database that it would open for writing": "(connection := sqlite3.Connection(data + '/big.db')).execute('PRAGMA query_only = OFF'), changed(data + '/big.db', 'DELETE FROM t', by=lambda path: connection)",
    "copy over": "(open('mine', 'w').close(), shutil.copyfile('mine', big))",
}
TAKEN_BACK = {
    "a new file": "open('../data/new.txt', 'w').write('x')",
    "a new file from a folder": "os.write(os.open('new.txt', os.O_CREAT | os.O_WRONLY, dir_fd=fd), b'x')",
    "a new file that is only created": "os.close(os.open('../data/new.lock', os.O_CREAT | os.O_RDONLY))",
    "a new database": "(sqlite3.connect('../data/new.db').executescript('CREATE TABLE t (x); INSERT INTO t VALUES (1)'), changed(data + '/new.db', 'INSERT INTO t VALUES (2)'))",
    "a new folder": "(os.makedirs('../data/new/deep'), open('../data/new/deep/er.txt', 'w').write('x'), os.remove('../data/new/deep/er.txt'), open('../data/new/other', 'w'))",
    "a new folder from a folder": "os.mkdir('new', dir_fd=fd)",
    "a new file of its own": "(open('../data/new.txt', 'x').write('x'), os.remove('../data/new.txt'), open('../data/new.txt', 'x'))",
    "a new file from torch": "(__import__('torch').save({}, data + '/new.pt'), __import__('torch').save({}, data + '/new.pt'))",
    "a new file written over and over": "[(open(data + '/.tmp', 'w').write('x'), os.replace(data + '/.tmp', data + '/new.txt')) for _ in range(3)]",
    "a new folder that is renamed": "(os.makedirs(data + '/tmp/in'), open(data + '/tmp/in/x', 'w').write('x'), os.rename(data + '/tmp', data + '/kept'))",
    "moved in": "(os.mkdir('made'), open('made/x', 'w').write('x'), shutil.move('made', data))",
    "a new symbolic link": "os.symlink(big, data + '/link')",
    "a new symbolic link from a folder": "os.symlink('/nowhere', 'link', dir_fd=fd)",
    "a new hard link": "(open('mine', 'w').close(), os.link('mine', data + '/link'))",
    "a copy of a whole folder": "shutil.copytree(inside, data + '/copy')",
    "moved about": "(open(data + '/a', 'w').close(), os.rename(data + '/a', data + '/b'), os.replace(data + '/b', data + '/c'))",
    "of a child": "(open(data + '/new.txt', 'w').close(), os.spawnl(os.P_WAIT, sys.executable, 'python', '-c', f'open({data!r} + chr(47) + chr(110) + \"ew.txt\", \"a\").write(\"x\")') == 0 or sys.exit('child refused'))",
}


def content(place: Path) -> dict[str, object]:
    """Return everything that a folder has: names, kinds, modes, times of change, and bytes."""
    found: dict[str, object] = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        held = path.read_bytes() if path.is_file() else None
        times = status.st_mtime_ns if path.is_file() else None  # a folder's changes as entries come and go
        found[str(path.relative_to(place))] = (status.st_mode, status.st_nlink, times, held, os.path.islink(path))
    return found


def tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: dict[str, str]
) -> tuple[Outcome, dict[str, object], dict[str, object]]:
    """Run a script that tries each; return how it went, and the person's folder before and after."""
    mine, data = tmp_path / "mine", tmp_path / "data"
    (data / "inside").mkdir(parents=True)
    (data / "empty").mkdir()
    mine.mkdir()
    (data / "big.bin").write_bytes(bytes(range(256)) * 40)
    (data / "inside" / "one.txt").write_text("one")
    with contextlib.closing(sqlite3.connect(data / "big.db")) as connection:
        connection.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1)")
    for name in "abcdefgh":
        (data / f"{name}.txt").write_text(name)
    lines = [
        f"\nos.chdir(there); shutil.rmtree('mine', True) if os.path.isdir('mine') else os.path.lexists('mine') and os.remove('mine')\ntry:\n    {does}\n    print('DONE', {what!r})\nexcept PermissionError:\n    print('REFUSED', {what!r})"
        for what, does in tries.items()
    ]
    (mine / "train.py").write_text(textwrap.dedent(PRELUDE) + "".join(lines))
    monkeypatch.setattr(layout, "MAX_LINKS", 6)  # the folder beside is over the limit, and linked as a whole
    before = content(tmp_path / "data"), content(tmp_path / "mine")
    command = Command(words=check_command(["python", "train.py"], mine), folder=mine)
    outcome = run_command(command, tmp_path / "scratch", TRIAL, threads=1)
    return outcome, dict(zip(("data", "mine"), before, strict=True)), {"data": content(data), "mine": content(mine)}


def test_nothing_of_the_persons_own_is_written_whichever_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, before, after = tried(tmp_path, monkeypatch, REFUSED)
    said = [line for line in outcome.tail.splitlines() if line.startswith(("DONE", "REFUSED"))]
    assert said == [f"REFUSED {name}" for name in REFUSED], outcome.tail
    assert after == before


BY = {"connect": "", "Connection": ", by=sqlite3.Connection"}


@pytest.mark.parametrize("by", BY)
def test_a_database_of_the_persons_is_opened_as_loggers_do_and_nothing_of_that_is_written_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    statements = ("PRAGMA journal_mode=WAL", "PRAGMA main.Journal_Mode(wal)", "PRAGMA synchronous=NORMAL", "PRAGMA foreign_keys=ON",
                  "PRAGMA wal_checkpoint", "CREATE TABLE IF NOT EXISTS t (x)", "ATTACH ':memory:' AS own")  # fmt: skip
    tries = {statement: f"changed(data + '/big.db', {statement!r}{BY[by]})" for statement in statements}
    outcome, before, after = tried(tmp_path, monkeypatch, tries)
    assert outcome.tail.splitlines() == [f"DONE {statement}" for statement in statements], outcome.tail
    assert after == before
    assert outcome.refused is None


@pytest.mark.parametrize("what", TAKEN_BACK)
def test_what_a_program_makes_anew_beside_its_folder_is_there_while_it_runs_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    outcome, before, after = tried(tmp_path, monkeypatch, {what: TAKEN_BACK[what]})
    assert outcome.tail.splitlines() == [f"DONE {what}"]
    assert after == before


OTHERS = "subprocess.run(['sh', '-c', {!r}], cwd=data, check=True, env={{}})"
STAYS = {
    "in a folder that the program made": (
        "(os.makedirs(data + '/made/deep', exist_ok=True), open(data + '/made/own.pt', 'w').write('x'), " + OTHERS.format("echo theirs > made/other.pt") + ")",
        {"made", "made/other.pt"},
    ),
    "in a folder that the program moved": (
        "(os.mkdir(data + '/made'), open(data + '/made/own.pt', 'w').write('x'), " + OTHERS.format("echo theirs > made/other.pt") + ", os.rename(data + '/made', data + '/kept'))",
        {"kept", "kept/other.pt"},
    ),
    "under a name that the program has used": (
        "(open(data + '/last.pt', 'w').write('x'), " + OTHERS.format("echo theirs > new; mv new last.pt") + ")",
        {"last.pt"},
    ),
    "under a name that the program has given up": (
        "(open(data + '/lock', 'w').close(), os.remove(data + '/lock'), " + OTHERS.format("echo theirs > lock") + ")",
        {"lock"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", STAYS)
def test_what_others_write_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    does, stays = STAYS[where]
    outcome, before, after = tried(tmp_path, monkeypatch, {where: f"import subprocess; {does}"})
    assert outcome.tail.splitlines() == [f"DONE {where}"], outcome.tail
    assert isinstance(before["data"], dict)
    assert isinstance(after["data"], dict)
    assert after["data"].keys() - before["data"].keys() == stays
    assert [(tmp_path / "data" / name).read_text() for name in stays if "made" != name != "kept"] == ["theirs\n"]


def test_a_file_made_only_where_it_is_not_there_is_refused_by_the_system_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = {
        "open": "try: open(big, 'x')\n    except FileExistsError: pass",
        "os.open": "try: os.open(big, os.O_CREAT | os.O_EXCL | os.O_WRONLY)\n    except FileExistsError: pass",
    }
    outcome, before, after = tried(tmp_path, monkeypatch, does)
    assert outcome.tail.splitlines() == [f"DONE {name}" for name in does], outcome.tail
    assert after == before


@pytest.mark.parametrize("copy", [False, True])
def test_the_runs_of_a_study_beside_it_are_not_laid_out_again(tmp_path: Path, copy: bool) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (other / "results" / "study", other / "results" / ".first-1", mine / "results" / "study"):
        (folder / "run" / "mine").mkdir(parents=True)
        (folder / "run" / "mine" / "train.py").write_text("1")
    for folder in (mine, other):
        (folder / "results" / "study" / "study.json").write_text("{}")
        (folder / "results" / "own.txt").write_text("own")
    twin = layout.lay_out(mine, tmp_path / "place", copy=copy)
    real = {str(p.relative_to(twin.parent)) for p in twin.parent.rglob("*") if p.is_file() and not p.is_symlink()}
    assert real == {"mine/results/own.txt", "other/results/own.txt"}


def test_what_vanishes_while_a_folder_is_laid_out_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "parts" / "old").mkdir(parents=True)
    (tmp_path / "mine" / "train.py").write_text("1")
    monkeypatch.setattr(layout, "_count", lambda path: (shutil.rmtree(path), 0)[1])
    twin = layout.lay_out(tmp_path / "mine", tmp_path / "place")
    assert (twin / "train.py").read_text() == "1"
