"""What a checkpoint loses: `audit_resume` goes on from it in fresh objects, `audit_checkpoint` reads it without running anything (P4.2).

What is missing is found by putting back every part but one from a twin that was not stopped: where the traces part, that one is lost.
In a file the state of a part is found by its names and shapes; one entry serves one part only, as averaged weights are not the model's.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, Dataset, Sampler

from workbench.checks import check_integer
from workbench.errors import CheckpointError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.checkpoints.diagnose import checkpoint_finding, resume_finding
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all

Parts = MutableMapping[str, Any]
FLOOR_FACTOR = 10.0
"""A jump counts from this many times what two runs that were not stopped differ by (rule of thumb)."""
OWN_SEED, OTHER_SEED = 1, 2
"""Global random state before `build`: twins share it, a resumed run starts in a process of its own."""
WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put in front of the names of a model."""
SHOWN = 5
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
            names, apart = (
                _restorable(_build_parts(build, OWN_SEED)),
                partial(difference, whole, allowed=facts["allowed"]),
            )
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


def audit_checkpoint(checkpoint: Mapping[str, Any] | str | Path, parts: Mapping[str, Any]) -> Diagnosis:
    """Tell what a checkpoint of your own does not hold: the optimizer, the schedule, batch-norm statistics, averages, random state.

    Nothing is run. That your code also puts back what is there, and where it was in the data, only `audit_resume` can see.

    Args:
        checkpoint: what you give to `torch.save`, or the path of such a file, or of a .safetensors file.
        parts: the objects that it was saved from, under any names, as they are at that moment: {"model": model, "optimizer":
            optimizer, "scheduler": scheduler, ...}; a generator and plain counters as well.

    Returns:
        A diagnosis with the one code `checkpoints.resume_jump`: "fail" names what is missing, "warn" what has other values than the
        object or whether random state alone is missing. Its evidence says under which key each part was found.

    Raises:
        UsageError: there are no parts, or none of them has a state.
        CheckpointError: the file cannot be read, or holds objects that reading would have to run.

    Source: P4.2 (what a run needs to go on).
    """
    if not isinstance(parts, Mapping) or not any(_can_be_lost(value) for value in parts.values()):
        raise UsageError(
            f"parts={str(parts)[:60]} must be a dict of what training is made of, such as {{'model': model, 'optimizer': optimizer}}."
        )
    found = checkpoint if isinstance(checkpoint, Mapping) else _load_file(Path(checkpoint))
    entries = list(_entries(found, ""))
    options = [(n, v, sorted(_matches(v, entries, n))) for n, v in parts.items() if _can_be_lost(v)]
    options.sort(key=lambda one: one[2][0] if one[2] else _Match(2**62, True, 0, ""))  # who fits best chooses first
    taken: set[str] = set()
    rows = []
    for name, value, matches in options:
        match = next((m for m in matches if not taken & (m.taken or {m.where})), None)
        if match is not None and not isinstance(value, (int, float)):
            taken |= match.taken or {match.where}
        rows += _part_rows(name, value, match)
    rng = torch.get_rng_state()
    modules = [m for v in parts.values() if isinstance(v, nn.Module) for m in v.modules()]
    facts = {
        "parts": sorted(rows, key=lambda row: row["part"]), "random_state": any(_same_form(rng, value) for _, value in entries),
        "draws": any(isinstance(m, _DropoutNd) and m.p > 0 for m in modules),
    }  # fmt: skip
    return Diagnosis(findings=(checkpoint_finding(facts),))


class _Match(NamedTuple):
    """An entry of the checkpoint that may be the state of a part; the least of several fits best."""

    gone: int
    other_values: bool
    renamed: int
    where: str
    names: tuple[str, ...] = ()
    taken: frozenset[str] = frozenset()


def _load_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path} without running what is in it ({str(error).splitlines()[0][:160]}). If you trust it, pass its content: "
            "wb.checkpoints.audit(torch.load(path, weights_only=False), parts)."
        ) from error


def _part_rows(name: str, value: Any, match: _Match | None) -> list[dict[str, Any]]:
    """Return one row for each part as `audit_resume` names them: parameters and buffers of a model apart."""
    row = {"where": match.where if match else None, "other_values": bool(match and match.other_values)}
    if not isinstance(value, nn.Module):
        return [{"part": name, "missing": match is None, "names": [], **row}]
    others = _other_names(value)
    rows = []
    for kind, names in (("parameters", set(value.state_dict()) - others), ("buffers", others)):
        gone = sorted(names if match is None else names & set(match.names))
        if names:
            rows.append({"part": f"{name} {kind}", "missing": bool(gone), "names": gone[:SHOWN], **row})
    return rows


def _can_be_lost(value: Any) -> bool:
    if isinstance(value, torch.optim.Optimizer):  # plain SGD at its first lr is made anew as it was
        held = value.state_dict()
        moved = any(group["lr"] != group.get("initial_lr", group["lr"]) for group in held["param_groups"])
        return moved or any(held["state"].values())
    if isinstance(value, nn.Module) or _has_state(value):
        return bool(value.state_dict())
    return isinstance(value, (torch.Generator, int, float)) and not isinstance(value, bool)


def _entries(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield everything in a checkpoint with its place, from the outside in."""
    yield where, node
    if isinstance(node, nn.Module) or (_has_state(node) and not isinstance(node, Tensor)):
        yield from _entries(dict(node.state_dict()), where)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _entries(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, (list, tuple)):
        for key, value in enumerate(node):
            yield from _entries(value, f"{where}[{key}]")


def _matches(value: Any, entries: list[tuple[str, Any]], name: str) -> Iterator[_Match]:
    if isinstance(value, nn.Module):
        state = dict(value.state_dict())
        for where, node in entries:
            if isinstance(node, Mapping):
                yield from _matches_by_name(state, node, where)
    elif isinstance(value, (int, float)):
        for where, node in entries:
            called = where.rpartition(".")[2] == name
            at_top = not {".", "["} & set(where)  # a small number is somewhere in every optimizer
            if isinstance(node, (int, float)) and not isinstance(node, bool) and (called or (at_top and node == value)):
                yield _Match(int(not called), node != value, 0, where)
    else:
        own = value.get_state() if isinstance(value, torch.Generator) else dict(value.state_dict())
        for where, node in entries:
            if _same_form(own, node):
                there = node if isinstance(own, Tensor) else {key: node[key] for key in own}
                yield _Match(0, not same_values(own, there), 0, where)


def _matches_by_name(state: Mapping[str, Any], node: Mapping[Any, Any], where: str) -> Iterator[_Match]:
    """Yield how tensors of a model lie in an entry, under their names or with something in front of all of them."""
    theirs = {str(key): value for key, value in node.items() if isinstance(value, Tensor)}
    for front in {key[: -len(own)] for own in state for key in theirs if key.endswith(own)}:
        there = [own for own in state if _same_form(state[own], theirs.get(front + own))]
        if there:
            other = any(not same_values(state[own].detach().cpu(), theirs[front + own].detach().cpu()) for own in there)
            gone = tuple(sorted(set(state) - set(there)))
            renamed = 0 if not front else 1 if front in WRAPPERS else 2
            place = f"{where}{'.' * bool(where)}{front}*" if front else where
            yield _Match(len(gone), other, renamed, place, gone, frozenset(f"{where}.{front}{own}" for own in there))


def _same_form(one: Any, other: Any) -> bool:
    """Whether a value of a checkpoint has the form of another: names, lengths, shapes."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        return one.shape == other.shape and one.is_floating_point() == other.is_floating_point()
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(key in other and _same_form(v, other[key]) for key, v in one.items())
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(_same_form, one, other))
    return not isinstance(other, (Mapping, list, tuple))
