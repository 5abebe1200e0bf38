"""Resume audit: a run that goes on from a checkpoint in fresh objects, held against its twin that was never stopped (P4.2).

What is missing from a checkpoint is found by hand: every part of the training is put back from the twin but one. Where the
traces part without that one, the checkpoint, or the code that loads it, has lost it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.checkpoints.diagnose_resume import resume_finding
from workbench.topics.checkpoints.resume_parts import Part, parts_of, same_values, snapshot
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all

__all__ = ["Trace", "audit_resume", "difference"]

Parts = MutableMapping[str, Any]
FLOOR_FACTOR = 10.0
"""A jump counts from this many times what two runs that were not stopped differ by (rule of thumb)."""
OWN_SEED, OTHER_SEED = 1, 2
"""Global random state before `build`: twins share it, a resumed run starts in a process of its own."""


def audit_resume(
    build: Callable[[], Parts],
    step: Callable[[Parts], float],
    save: Callable[[Parts], Any],
    load: Callable[[Parts, Any], None],
    *,
    steps: int = 8,
    after: int = 8,
) -> Diagnosis:
    """Find out what your checkpoints miss: save, load into fresh objects, go on, and compare with the run that was not stopped.

    Some parts are seen only when they matter: with fewer `after` steps than a schedule takes to change the lr, or in the first
    epoch, where the order of the data is the same again, nothing is to be seen. Choose `steps` beyond the first epoch where you can.

    Args:
        build: makes everything anew, as your script does when it starts: a dict of model, optimizer, scheduler, iterator over the
            data, averaged weights, counters, under any names. `step` has to take them from there, because they are exchanged.
        step: makes one update with the parts, and returns its loss.
        save: your own; returns the checkpoint or the path of one.
        load: your own; puts a checkpoint into parts that are fresh.
        steps: updates before the checkpoint.
        after: updates after it, which are compared.

    Returns:
        A diagnosis with the one code `checkpoints.resume_jump`: "fail" names what is missing, "not_measured" says that two runs
        that were not stopped differ about as much. Its evidence holds the losses of both runs, and what each part did.

    Raises:
        UsageError: a function takes other arguments, `build` returns no dict, or a count is below 1.

    Source: P4.2 (a resumed run is bitwise the one that was not stopped).
    """
    for name, count in (("steps", steps), ("after", after)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"{name}={count!r} must be an integer of at least 1: updates to make.")
    _check_takes("build", build, ())
    _check_takes("step", step, ("parts",))
    _check_takes("save", save, ("parts",))
    _check_takes("load", load, ("parts", "checkpoint"))
    with isolated_rng():
        facts = _Audit(build, step, save, load, steps, after).run()
    return Diagnosis(findings=(resume_finding(facts),))


_EXPECTED = {
    "build": "build() -> parts",
    "step": "step(parts) -> loss",
    "save": "save(parts) -> checkpoint",
    "load": "load(parts, checkpoint)",
}


def _check_takes(name: str, function: Any, given: tuple[str, ...]) -> None:
    """Check that a function can be called as it will be, before anything is trained."""
    if not callable(function):
        raise UsageError(f"{name}={function!r} must be a function: {_EXPECTED[name]}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some are written in C and say nothing
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UsageError(
            f"{name}{signature} cannot be called with ({', '.join(given)}): {error}. What is called is {_EXPECTED[name]}; a path "
            "or a device of your own goes inside, as in lambda parts: my_save(parts, path)."
        ) from None


@dataclass(frozen=True)
class Trace:
    """What a run leaves behind: its losses, and the values of every part at its end."""

    losses: list[float]
    end: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Audit:
    build: Callable[[], Parts]
    step: Callable[[Parts], float]
    save: Callable[[Parts], Any]
    load: Callable[[Parts, Any], None]
    steps: int
    after: int

    def run(self) -> dict[str, Any]:
        """Return the facts that `resume_finding` judges."""
        whole, again, resumed = self._whole(), self._whole(), self._resumed(restored=())
        floor = difference(whole, again)
        allowed = FLOOR_FACTOR * floor["loss"] if floor["changed"] else None
        jump = difference(whole, resumed, allowed=allowed)
        facts: dict[str, Any] = {
            "steps": self.steps, "after": self.after, "jump": jump["loss"], "floor": floor["loss"], "allowed": allowed,
            "changed": jump["changed"], "first_step": jump["first_step"], "missing": [], "outside": False, "parts": [],
            "losses": whole.losses, "losses_resumed": resumed.losses,
        }  # fmt: skip
        if not jump["changed"]:
            return facts
        names = [part.name for part in self._fresh(OWN_SEED)[1]]
        facts["outside"] = bool(difference(whole, self._resumed(restored=set(names)), allowed=allowed)["changed"])
        if not facts["outside"]:
            for name in names:
                without = difference(whole, self._resumed(restored=set(names) - {name}), allowed=allowed)
                facts["parts"].append({"part": name, "missing": bool(without["changed"]), "jump": without["loss"]})
            facts["missing"] = [row["part"] for row in facts["parts"] if row["missing"]]
        return facts

    def _fresh(self, seed: int) -> tuple[Parts, list[Part]]:
        seed_all(seed)
        parts = self.build()
        if not isinstance(parts, MutableMapping) or not parts:
            raise UsageError(
                f"build() returned {type(parts).__name__}, but must return a dict of what training is made of, such as "
                "{'model': model, 'optimizer': optimizer, 'batches': iter(loader)}."
            )
        return parts, parts_of(parts)

    def _until_checkpoint(self) -> tuple[Parts, Any]:
        parts, _ = self._fresh(OWN_SEED)
        for _ in range(self.steps):
            float(self.step(parts))
        return parts, self.save(parts)

    def _whole(self) -> Trace:
        parts, _ = self._until_checkpoint()
        return self._go_on(parts)

    def _resumed(self, *, restored: Collection[str]) -> Trace:
        """Go on from a checkpoint in fresh objects, after some parts were put back by hand from a run that got there."""
        twin, checkpoint = self._until_checkpoint()
        there = capture_rng()
        parts, known = self._fresh(OTHER_SEED)
        self.load(parts, checkpoint)
        for part in known:
            if part.name in restored:
                part.restore(parts, twin)
        if "random state" in restored:
            restore_rng(there)
        return self._go_on(parts)

    def _go_on(self, parts: Parts) -> Trace:
        losses = [float(self.step(parts)) for _ in range(self.after)]
        return Trace(losses, snapshot(parts))


def difference(one: Trace, other: Trace, *, allowed: float | None = None) -> dict[str, Any]:
    """Return the largest difference of the losses, where it begins, and what ends otherwise.

    Args:
        one: a trace.
        other: another.
        allowed: how far losses may lie apart where training does not repeat itself; then nothing else is compared. None asks for
            the same bits.
    """
    pairs = list(zip(one.losses, other.losses, strict=True))
    apart = [0.0 if same_values(a, b) else abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs]
    beyond = [k for k, d in enumerate(apart) if d > (allowed or 0.0)]
    changed = ["loss"] if beyond else []
    if allowed is None:
        changed += [name for name, values in one.end.items() if not same_values(values, other.end.get(name))]
    return {"loss": max(apart), "first_step": beyond[0] if beyond else None, "changed": changed}
