"""Checkpoint audit: what a file or a dict of your own leaves out, told without running anything (P4.2).

The state of every part of a training is looked for in the checkpoint by its names and shapes, under whatever key it is kept. One
and the same entry serves one part only: averaged weights are not the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from workbench.errors import CheckpointError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.checkpoints.diagnose_resume import checkpoint_finding
from workbench.topics.checkpoints.resume_parts import has_state, other_names, same_values

__all__ = ["audit_checkpoint"]

WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put in front of the names of a model."""
SHOWN = 5


class _Match(NamedTuple):
    """An entry of the checkpoint that may be the state of a part; the least of several fits best."""

    gone: int
    other_values: bool
    renamed: int
    where: str
    names: tuple[str, ...] = ()
    taken: frozenset[str] = frozenset()


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
    if not isinstance(parts, Mapping) or not any(_known(value) for value in parts.values()):
        raise UsageError(
            f"parts={str(parts)[:60]} must be a dict of what training is made of, such as {{'model': model, 'optimizer': optimizer}}."
        )
    found = checkpoint if isinstance(checkpoint, Mapping) else _read(Path(checkpoint))
    return Diagnosis(findings=(checkpoint_finding(_facts(found, parts)),))


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path} without running what is in it ({str(error).splitlines()[0][:160]}). If you trust it, pass its content: "
            "audit_checkpoint(torch.load(path, weights_only=False), parts)."
        ) from error


def _facts(checkpoint: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    entries = list(_entries(checkpoint, ""))
    options = [(name, value, sorted(_matches(value, entries, name))) for name, value in parts.items() if _known(value)]
    options.sort(key=lambda one: one[2][0] if one[2] else _Match(2**62, True, 0, ""))  # who fits best chooses first
    taken: set[str] = set()
    rows = []
    for name, value, matches in options:
        match = next((m for m in matches if not taken & (m.taken or {m.where})), None)
        if match is not None and not isinstance(value, (int, float)):
            taken |= match.taken or {match.where}
        rows += _rows(name, value, match)
    rng = torch.get_rng_state()
    kept = any(_alike(rng, value) for _, value in entries)
    draws = any(
        isinstance(m, _DropoutNd) and m.p > 0 for v in parts.values() if isinstance(v, nn.Module) for m in v.modules()
    )
    return {"parts": sorted(rows, key=lambda row: row["part"]), "random_state": kept, "draws": draws}


def _rows(name: str, value: Any, match: _Match | None) -> list[dict[str, Any]]:
    """Return one row for each part as `audit_resume` names them: parameters and buffers of a model apart."""
    row = {"where": match.where if match else None, "other_values": bool(match and match.other_values)}
    if not isinstance(value, nn.Module):
        return [{"part": name, "missing": match is None, "names": [], **row}]
    others = other_names(value)
    rows = []
    for kind, names in (("parameters", set(value.state_dict()) - others), ("buffers", others)):
        gone = sorted(names if match is None else names & set(match.names))
        if names:
            rows.append({"part": f"{name} {kind}", "missing": bool(gone), "names": gone[:SHOWN], **row})
    return rows


def _known(value: Any) -> bool:
    """Whether a part has a state that could be lost."""
    if isinstance(value, torch.optim.Optimizer):
        held = value.state_dict()
        moved = any(group["lr"] != group.get("initial_lr", group["lr"]) for group in held["param_groups"])
        return moved or any(held["state"].values())  # plain SGD at its first lr is made anew as it was
    if isinstance(value, nn.Module) or has_state(value):
        return bool(value.state_dict())
    return isinstance(value, (torch.Generator, int, float)) and not isinstance(value, bool)


def _entries(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield everything in a checkpoint with its place, from the outside in."""
    yield where, node
    if isinstance(node, nn.Module) or (has_state(node) and not isinstance(node, Tensor)):
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
                yield from _named(state, node, where)
    elif isinstance(value, torch.Generator):
        for where, node in entries:
            if _alike(value.get_state(), node):
                yield _Match(0, not same_values(value.get_state(), node), 0, where)
    elif isinstance(value, (int, float)):
        for where, node in entries:
            called = where.rpartition(".")[2] == name
            at_top = not {".", "["} & set(where)  # a small number is somewhere in every optimizer
            if isinstance(node, (int, float)) and not isinstance(node, bool) and (called or (at_top and node == value)):
                yield _Match(int(not called), node != value, 0, where)
    else:
        state = dict(value.state_dict())
        for where, node in entries:
            if isinstance(node, Mapping) and _alike(state, node):
                yield _Match(0, not same_values(state, {key: node[key] for key in state}), 0, where)


def _named(state: Mapping[str, Any], node: Mapping[Any, Any], where: str) -> Iterator[_Match]:
    """Yield how tensors of a model lie in an entry, under their names or with something in front of all of them."""
    theirs = {str(key): value for key, value in node.items() if isinstance(value, Tensor)}
    for front in {key[: -len(own)] for own in state for key in theirs if key.endswith(own)}:
        there = [own for own in state if _alike(state[own], theirs.get(front + own))]
        if there:
            other = any(not same_values(state[own].detach().cpu(), theirs[front + own].detach().cpu()) for own in there)
            gone = tuple(sorted(set(state) - set(there)))
            renamed = 0 if not front else 1 if front in WRAPPERS else 2
            place = f"{where}{'.' * bool(where)}{front}*" if front else where
            yield _Match(len(gone), other, renamed, place, gone, frozenset(f"{where}.{front}{own}" for own in there))


def _alike(one: Any, other: Any) -> bool:
    """Whether a value of a checkpoint has the form of another: names, lengths, shapes."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        return one.shape == other.shape and one.is_floating_point() == other.is_floating_point()
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(
            key in other and _alike(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(_alike, one, other))
    return not isinstance(other, (Mapping, list, tuple))
