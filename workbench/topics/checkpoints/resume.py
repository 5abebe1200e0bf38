"""What a checkpoint loses: `audit_resume` goes on from it in fresh objects (P4.2).

What is missing is found by putting back every part but one from a twin that was not stopped: where the traces part, that one is lost.
"""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.checkpoints.diagnose import resume_finding
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all

Parts = MutableMapping[str, Any]
FLOOR_FACTOR = 10.0  # A jump counts from this many times what two runs that were not stopped differ by (rule of thumb)
OWN_SEED, OTHER_SEED = 1, 2
"""Global random state before `build`: twins share it, a resumed run starts in a process of its own."""
PLAIN = (bool, int, float, str, type(None), Tensor)
RANDOM_STATE = "random state"


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
        check_integer(name, count, hint=": updates to make", error=UsageError)
    _check_takes("build", build, (), "build() -> parts")
    _check_takes("step", step, ("parts",), "step(parts) -> loss")
    _check_takes("save", save, ("parts",), "save(parts) -> checkpoint")
    _check_takes("load", load, ("parts", "checkpoint"), "load(parts, checkpoint)")

    def until_checkpoint() -> tuple[Parts, Any]:
        parts = _build_parts(build, OWN_SEED)
        for _ in range(steps):
            float(step(parts))
        return parts, save(parts)

    def resumed(restored: Collection[str]) -> Trace:
        """Go on from a checkpoint in fresh objects, after some parts were put back by hand from a run that got there."""
        twin, checkpoint = until_checkpoint()
        there = capture_rng()
        parts = _build_parts(build, OTHER_SEED)
        known = _restorable(parts)
        load(parts, checkpoint)
        for name in (name for name in known if name in restored):
            _restore(name, parts, twin)
        if RANDOM_STATE in restored:
            restore_rng(there)
        return _go_on(parts, step, after)

    with isolated_rng():
        whole, again = (_go_on(until_checkpoint()[0], step, after) for _ in range(2))
        facts = resume_facts(whole, again, resumed(()), steps)
        if facts["changed"]:
            names = _restorable(_build_parts(build, OWN_SEED))
            apart = partial(difference, whole, allowed=facts["allowed"])
            facts["outside"] = bool(apart(resumed(names))["changed"])
            for name in () if facts["outside"] else names:
                without = apart(resumed({*names} - {name}))
                facts["parts"].append({"part": name, "missing": bool(without["changed"]), "jump": without["loss"]})
            facts["missing"] = [row["part"] for row in facts["parts"] if row["missing"]]
    return Diagnosis(findings=(resume_finding(facts),))


def _check_takes(name: str, function: Any, given: tuple[str, ...], expected: str) -> None:
    """Check that a function can be called as it will be, before anything is trained."""
    if not callable(function):
        raise UsageError(f"{name}={function!r} must be a function: {expected}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some are written in C and say nothing
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UsageError(
            f"{name}{signature} cannot be called with ({', '.join(given)}): {error}. What is called is {expected}; a path "
            "or a device of your own goes inside, as in lambda parts: my_save(parts, path)."
        ) from None


class Trace(NamedTuple):
    """What a run leaves behind: its losses, and the values of every part at its end."""

    losses: list[float]
    end: dict[str, dict[str, Any]]


def resume_facts(whole: Trace, again: Trace, resumed: Trace, steps: int) -> dict[str, Any]:
    """Return the facts that `resume_finding` judges: of two runs that were not stopped, and one resumed after `steps`."""
    floor = difference(whole, again)
    allowed = FLOOR_FACTOR * floor["loss"] if floor["changed"] else None
    jump = difference(whole, resumed, allowed=allowed)
    return {
        "steps": steps, "after": len(whole.losses), "jump": jump["loss"], "floor": floor["loss"], "allowed": allowed,
        "changed": jump["changed"], "first_step": jump["first_step"], "missing": [], "outside": False, "parts": [],
        "losses": whole.losses, "losses_resumed": resumed.losses,
    }  # fmt: skip


def _build_parts(build: Callable[[], Parts], seed: int) -> Parts:
    seed_all(seed)
    parts = build()
    if not isinstance(parts, MutableMapping) or not parts:
        raise UsageError(
            f"build() returned {type(parts).__name__}, but must return a dict of what training is made of, such as "
            "{'model': model, 'optimizer': optimizer, 'batches': iter(loader)}."
        )
    return parts


def _go_on(parts: Parts, step: Callable[[Parts], float], after: int) -> Trace:
    losses, end = [float(step(parts)) for _ in range(after)], dict[str, Any]()
    for name, value in parts.items():
        if isinstance(value, nn.Module) or _has_state(value):
            end[name] = copy.deepcopy(dict(value.state_dict()))
        elif isinstance(value, PLAIN):
            end[name] = copy.deepcopy(value)
    return Trace(losses, end)


def _restorable(parts: Parts) -> list[str]:
    """Return what can be put back one by one: parameters and buffers of a module apart, and the global random state last."""
    found = []
    for name, value in parts.items():
        if isinstance(value, nn.Module):
            found += [f"{name} parameters"] + [f"{name} buffers"] * bool(_other_names(value))
        elif _has_state(value) or isinstance(value, (torch.Generator, *PLAIN, Iterator, DataLoader, Dataset, Sampler)):
            found.append(name)
    return [*found, RANDOM_STATE]


def _restore(part: str, into: Parts, twin: Parts) -> None:
    """Put back a part of `_restorable` from a twin, but for the random state."""
    name, _, kind = part.rpartition(" ")
    if part in into and not isinstance(into[part], nn.Module):
        value = into[part]
        if _has_state(value):
            value.load_state_dict(copy.deepcopy(twin[part].state_dict()))
        elif isinstance(value, torch.Generator):
            value.set_state(twin[part].get_state())
        else:
            into[part] = twin[part]
    elif part != RANDOM_STATE:
        others = _other_names(twin[name])
        wanted = {k: v for k, v in twin[name].state_dict().items() if (k not in others) == (kind == "parameters")}
        into[name].load_state_dict(copy.deepcopy({**into[name].state_dict(), **wanted}))


def difference(one: Trace, other: Trace, *, allowed: float | None = None) -> dict[str, Any]:
    """Return the largest difference of the losses of two traces, where it begins, and what ends otherwise.

    `allowed` is how far losses may lie apart where training does not repeat itself; then nothing else is compared. None asks for the same bits.
    """
    pairs = list(zip(one.losses, other.losses, strict=True))
    apart = [0.0 if same_values(a, b) else abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs]
    beyond = [k for k, d in enumerate(apart) if d > (allowed or 0.0)]
    changed = ["loss"] if beyond else []
    if allowed is None:
        changed += [name for name, values in one.end.items() if not same_values(values, other.end.get(name))]
    return {"loss": max(apart), "first_step": beyond[0] if beyond else None, "changed": changed}


def same_values(one: Any, other: Any) -> bool:
    """Tell whether two nested values are the same bit for bit; NaN is the same as NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_values(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_values, one, other))
    if type(one).__module__ in ("builtins", "numpy") and type(other) is type(one):
        return bool(one == other or (one != one and other != other))  # noqa: PLR0124  # NaN
    return not isinstance(one, Tensor) and not isinstance(other, Tensor)  # functions and objects: nothing to compare


def _has_state(value: Any) -> bool:
    """Tell whether a part keeps its state as optimizers and schedules do."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _other_names(model: nn.Module) -> set[str]:
    """Return the names in the state dict that are no parameters: batch-norm statistics and other buffers."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
