"""Diagnose the cases, one process each, and keep what was found: `python -m tests.zoo`."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from tests.zoo.cases import CASES, Case

ROOT = Path(__file__).parents[2]
CPU_S = 240
"""Processor seconds that a case may take; one that takes more has crashed."""
_CONTEXT = multiprocessing.get_context("fork")


def tree() -> str:
    """Return the hash of the package's source: what the results belong to."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "workbench").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def diagnosed(case: Case, budget: str | None = None) -> dict[str, Any]:
    """Return what the workbench says of a case with its default settings, or at a budget; a crash is a result."""
    torch.set_num_threads(1)
    out = Path(tempfile.mkdtemp(prefix="zoo-"))
    start = time.process_time()
    said: dict[str, Any] = {"case": case.name, "half": case.half, "accepts": case.accepts, "area": case.area}
    try:
        diagnosis = wb.diagnose(case.named().workload(), out / "study", budget=budget)
    except BaseException as error:
        said |= {"crash": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:], "findings": []}
    else:
        found = json.loads((out / "study" / "diagnosis.json").read_text())
        advice = (found["recommendation"] or {}).get("next") or []
        said |= {
            "verdict": diagnosis.verdict, "findings": printed(found["findings"]), "cost": found["cost"],
            "adopted": (found["recommendation"] or {}).get("adopted"), "advice": advice[:3],
            "config": _plain((found["recommendation"] or {}).get("config") or {}),
            "changed": (found["recommendation"] or {}).get("changed") or [],
            "advice_code": next((f["code"] for f in found["findings"] if advice and advice[0] in f["advice"]), None),
        }  # fmt: skip
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {**said, "cpu_s": time.process_time() - start}


def printed(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is not ok in the terminal's order; what follows from another finding stands last."""
    kept = sorted((f for f in findings if f["status"] != "ok"), key=lambda f: bool(f["follows_from"]))
    return [{key: f.get(key) for key in ("code", "status", "summary", "value", "follows_from")} for f in kept]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not (isinstance(value, str) and ":" in value)}


def _write(case: Case, path: Path, budget: str | None) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 10))
    os.chdir(tempfile.gettempdir())
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    _keep(path, diagnosed(case, budget))


def _keep(path: Path, said: Mapping[str, Any]) -> None:
    path.with_suffix(".part").write_text(json.dumps(said, indent=1))
    path.with_suffix(".part").rename(path)


def run(
    cases: Sequence[Case], folder: Path, *, workers: int, wall_s: float = 1800.0, budget: str | None = None
) -> None:
    """Diagnose the cases that `folder` has no result of, `workers` at a time, a fresh process each."""
    folder.mkdir(parents=True, exist_ok=True)
    for heavy in (
        "workbench.playbook.diagnose",
        "workbench.report.write",
        "workbench.ledger.studies",
        "sklearn.datasets",
    ):
        importlib.import_module(heavy)  # once, and not in every process
    waiting = [case for case in cases if not place(folder, case).exists()]
    waiting.sort(key=lambda case: hashlib.sha256(case.name.encode()).digest()[1:])  # a part of them is a fair sample
    running: dict[str, tuple[Any, Case, float]] = {}
    total, begun = len(waiting), time.time()
    while waiting or running:
        while waiting and len(running) < workers:
            case = waiting.pop(0)
            process = _CONTEXT.Process(target=_write, args=(case, place(folder, case), budget))
            process.start()
            running[case.name] = (process, case, time.time())
        time.sleep(0.1)
        for name, (process, case, since) in list(running.items()):
            if process.is_alive() and time.time() - since < wall_s:
                continue
            process.kill()
            process.join()
            del running[name]
            if not place(folder, case).exists():
                why = "over its time" if process.exitcode in (-9, -24) else f"exit code {process.exitcode}"
                said = {"case": name, "half": case.half, "accepts": case.accepts, "area": case.area, "findings": []}
                _keep(place(folder, case), {**said, "crash": f"the process ended: {why}", "cpu_s": CPU_S})
            done = total - len(waiting) - len(running)
            print(f"{done}/{total} {name} ({(time.time() - begun) / 60:.1f} min)", flush=True)


def place(folder: Path, case: Case) -> Path:
    """Return the file of a case's result."""
    return folder / f"{case.name.replace('/', '--')}.json"


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results that a folder holds of cases that there are."""
    kept = (place(folder, case) for case in CASES.values())
    return [json.loads(path.read_text()) for path in kept if path.exists()]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and score."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--half", choices=("tune", "scored", "all"), default="all")
    parser.add_argument("--kind", choices=("faults", "controls", "pairs", "all"), default="all")
    parser.add_argument("--only", default="*", help="a pattern of case names")
    parser.add_argument("--out", type=Path, default=None, help="default: build/zoo/<hash of the package>")
    parser.add_argument("--budget", help="what each diagnosis may cost, as `workbench diagnose` takes it")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fresh", action="store_true", help="diagnose again what is there")
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md and the README's table")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "zoo-peers", help="what tests.zoo.peers kept")
    given = parser.parse_args(argv)
    folder = given.out or ROOT / "build" / "zoo" / "-".join(filter(None, (tree(), given.budget)))
    cases = [
        case for case in CASES.values()
        if given.half in ("all", case.half) and given.kind in ("all", case.kind) and fnmatch.fnmatch(case.name, given.only)
    ]  # fmt: skip
    if given.fresh:
        for case in cases:
            place(folder, case).unlink(missing_ok=True)
    run(cases, folder, workers=given.workers, budget=given.budget)
    from tests.zoo.report import report, write
    from tests.zoo.retrain import retrain
    from tests.zoo.score import peers

    names = {case.name for case in cases}
    told = [said for said in results(folder) if said["case"] in names]
    trained = retrain(told, folder.with_suffix(".retrained.json"), workers=given.workers)
    others = peers(given.peers)
    print(report(told, trained, others))
    if given.write:
        write(told, trained, ROOT, others, planned=len(cases))
