"""What to do about waiting for data: advice that fits the cause, the dataset, and what the change that was tried has shown (P1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.topics.input.cause import Cause
from workbench.topics.input.model import shares_out, storable

__all__ = ["next_steps"]

_WORKERS, _CACHE = "workers", "cache"
_STORE = (_CACHE, "Do what is the same in every epoch once, offline, and store the result: workbench.cache_dataset.")
_SPREAD = (_WORKERS, "Spread it over worker processes, up to the number of processors.")
_KEEP = (_CACHE, "Store the items ready-made on this machine: workbench.cache_dataset.")
_COPY = ("", "Copy the data next to the training process, or store many examples in one file.")
_HIDE = (
    _WORKERS,
    "Read from further processes at once (num_workers), which hides latency and takes no processor.",
)
_NEXT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "latency": (_HIDE, _COPY, _KEEP),
    "preprocessing": (_STORE, _SPREAD),
    "collate": (
        ("", "{collate}"),
        (_WORKERS, "Worker processes do the collating, too (num_workers)."),
    ),
    "mixed": (
        (_WORKERS, "Make batches in worker processes (num_workers): they take over all of it."),
        _STORE,
    ),
    "sync": (
        ("no_sync", "Fetch the loss every hundred steps, not every step, so that loading runs ahead of the device."),
    ),
    "worker_restart": (
        ("persistent", "Set persistent_workers=True: workers then stay from one epoch to the next."),
        ("in_process", "Load without workers (num_workers=0) where an epoch is shorter than they take to start."),
    ),
    "too_few_workers": ((_WORKERS, "Raise num_workers to where throughput stops growing."),),
    "hand_over": (
        (
            "in_process",
            "Load without workers (num_workers=0) where making a batch takes less time than handing it over.",
        ),
        (
            "less",
            "Hand over less: drop what the step never reads, send small types (uint8 images) and convert them on the device.",
        ),
        ("", "Look at what else runs on this machine: workers that are ready wait for a processor, too."),
    ),
    "unused_features": (
        ("drop", "Drop what the step never reads in the dataset's __getitem__, before it is collated."),
    ),
    "unknown": (("", "{unknown}"),),
}
_LARGE_BYTES = 1e5
"""Of a batch, from which handing it over takes longer for its size (rule of thumb: copying as much takes some tens of microseconds)."""
_DEFAULT_COLLATE = (
    "Let the dataset return whole batches (__getitems__): torch's own collate function stacks item by item."
)
_OWN_COLLATE = (
    "Look into {}: make the batch in one call, stack arrays instead of looping over examples, and leave the rest to the "
    "dataset or the device."
)
_UNTAKEN = "Load through a torch DataLoader to have its parts told apart, or profile one batch by hand."
_ELSEWHERE = (
    "Look at the sampler, and profile next(iter(loader)) by hand: items and collating are less than half of the wait."
)
_SHARE = (
    "With more than one worker let each read its own part (torch.utils.data.get_worker_info), or each example comes once from "
    "every worker. {}"
)
_NOT_SHARED = "This stream is not shared out so far, so no gain is said of more workers."
_NOT_COUNTED = (
    "Whether this stream is shared out could not be counted in the time there was, so no gain is said of more workers."
)
_RANDOM = "Items differ from one reading to the next and cannot be stored as they are: store what comes before what is random."
_DO_OTHERWISE = "Profile one batch by hand, and look at what else runs on this machine: what was tried did not help."


def next_steps(facts: Mapping[str, Any], cause: Cause, *, helped: bool | None) -> tuple[str, ...]:
    """Return what to do, what was shown to help first; what was tried and did not help is left out.

    Args:
        facts: of `audit_input`.
        cause: of the waiting.
        helped: whether the change that was tried did; None where none was.
    """
    lines = list(_NEXT[cause.name])
    if not storable(facts) and any(change == _CACHE for change, _ in lines):
        lines = [line for line in lines if line[0] != _CACHE]
        if not facts["loader"].get("stream"):
            lines.append(("", _RANDOM))
    if sum(facts["batch_bytes"].values()) < _LARGE_BYTES:
        lines = [line for line in lines if line[0] != "less"]
    tried = None if helped is None else facts["fix"]["change"]
    if helped is False:
        lines = [line for line in lines if line[0] != tried]
    lines.sort(key=lambda line: line[0] != tried)  # stable: the rest stays in order
    said = [_filled(text, facts) for _, text in lines]
    if any(change == _WORKERS for change, _ in lines) and facts["loader"].get("stream") and not shares_out(facts):
        said.insert(0, _SHARE.format(_NOT_COUNTED if shares_out(facts) is None else _NOT_SHARED))
    return tuple(said) or (_DO_OTHERWISE,)


def _filled(text: str, facts: Mapping[str, Any]) -> str:
    collate = facts["loader"].get("collate", "default")
    how = _DEFAULT_COLLATE if collate == "default" else _OWN_COLLATE.format(collate)
    return text.format(collate=how, unknown=_UNTAKEN if facts["loader"].get("dataset") is None else _ELSEWHERE)
