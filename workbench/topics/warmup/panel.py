"""`warmup_panel`: the shape of a warmup on two sliders, against the trace of the nearest one that was run (F3)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.config import TrainConfig
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, Control, Slider, controls_panel, needs, nothing
from workbench.plots.frames import field_of
from workbench.plots.render import Draw
from workbench.schedules import cap_steps, prepend_warmup
from workbench.topics.clipping.figures import plot_grad_norm
from workbench.topics.lr_sweep.figures import plot_loss_curves
from workbench.topics.schedule.figures import mark_warmup, plot_schedule
from workbench.topics.warmup.diagnose import diagnose_warmup

ALT = "The learning rate at each step with a warmup, beside the trace of the nearest trial that was run."


class _Tried(NamedTuple):
    """One warmup that a study trained: its lr and steps, its longest run, whether that has the full budget, and trained stably."""

    lr: float
    steps: int
    trial: int
    full: bool
    passes: bool | None

    @property
    def words(self) -> str:
        how = {True: "trains", False: "does not train", None: "cannot be judged"}[self.passes]
        kind = "run of the full budget" if self.full else "short trial"
        return f"trial {self.trial}, {self.steps:,} steps to lr {self.lr:.4g}, a {kind} that {how}"


def _tried(diagnosis: Diagnosis) -> list[_Tried]:
    """Return every warmup that `diagnose_warmup` found tried, by learning rate and length."""
    rounds: Sequence[Mapping[str, Any]] = diagnosis["warmup.shortest"].evidence.get("rounds") or ()
    tried = []
    for lr, one in ((float(row["lr"]), one) for row in rounds for one in row["lengths"]):
        full = one.get("full_trial") is not None
        trial = one.get("full_trial" if full else "short_trial")
        if trial is not None:
            passes = one["short"] if one["full"] is None else one["full"]
            tried.append(_Tried(lr, int(one["steps"]), int(trial), full, passes))
    return sorted(tried, key=lambda one: (one.lr, one.steps))


def _words(steps: int, lr: float, total: int, limits: tuple[int, int], unstable_lr: float | None) -> str:
    """Hold a warmup against the limits of F3, in steps of the baseline before a warmup is prepended (O4)."""
    (lengthen_from, cap), share = limits, steps / total
    where = f"at most 5 % ({lengthen_from:,} steps, F3.14) and below the cap of 10 % ({cap:,}, F3.10)"
    if steps > cap:
        where = f"above the cap of 10 %, {cap:,} steps (F3.10)"
    elif steps > lengthen_from:
        plan = f"so plan {total + steps:,} steps (F3.14); below the cap of 10 %, {cap:,}"
        where = f"above 5 %, {lengthen_from:,} steps, {plan}"
    words = f"{steps:,} steps of warmup are {share:.1%} of the baseline's {total:,}: {where}. "
    if not unstable_lr:
        return words
    return (
        words + f"lr {lr:.4g} is {lr / unstable_lr:.3g} x the one that is unstable without warmup ({unstable_lr:.4g}). "
    )


def warmup_panel(record: RecordLike, diagnosis: Diagnosis | None = None, *, live: bool | None = None) -> Any:
    """Return a schedule below sliders for warmup steps and peak lr: what it asks of the run, and what the nearest trial did.

    The diagnosis is of `diagnose_warmup`, or made from the record; the sliders start at the shortest warmup that trains. `live` None asks
    the environment, see `controls_panel`.

    Source: F3.4 and F3.6 (what is tried), F3.10 (at most 10 % of the baseline's steps), F3.14 (above 5 % the run may have to grow).
    """
    needs("warmup_panel", record, "steps", "trials", "config", "facts")
    found = diagnosis if diagnosis is not None and "warmup.shortest" in diagnosis else None
    if found is None and "loss" in record.steps:
        found = diagnose_warmup(record)
    tried = [] if found is None else _tried(found)
    if found is None or not tried:
        why = "the record has no finished trial of a warmup. Run wb.warmup.Study().run(workload, out=...)."
        return nothing("warmup_panel", why, alt=ALT, live=live)
    baseline, shortest = TrainConfig.from_dict(record.config), found["warmup.shortest"]
    total, unstable = baseline.total_steps, shortest.evidence.get("unstable_lr")
    lengthen_from, cap = limits = cap_steps(total, 0.05), cap_steps(total, 0.1)
    longest = max(2 * cap, *(one.steps for one in tried), 1)
    lrs = sorted({one.lr for one in tried} | {float(baseline.peak_lr)})

    def answer(steps: int, lr: float, trace: str) -> Answer:
        far = lambda one: (round(abs(math.log(one.lr / lr)), 9), abs(one.steps - steps), not one.full)  # noqa: E731
        nearest = min(tried, key=far)
        warmed = int(field_of(record, nearest.trial, "warmup_steps") or 0)
        config = prepend_warmup(baseline.replace(peak_lr=lr), steps)
        marks = [(lengthen_from, "5 % of the baseline's steps"), (cap, "10 %, the cap")]
        shape: Draw = lambda ax: plot_schedule(  # noqa: E731 - an answer holds functions
            config, baseline=baseline, limits=marks, last_step=total + longest, ax=ax
        )
        traces: dict[str, Draw] = {
            "loss": lambda ax: mark_warmup(plot_loss_curves(record, trials=[nearest.trial], ax=ax), warmed),
            "gradient norm": lambda ax: mark_warmup(plot_grad_norm(record, trial=nearest.trial, ax=ax), warmed),
        }
        words = f"{_words(steps, lr, total, limits, unstable)}Nearest that was run: {nearest.words}."
        return Answer(words, [shape, traces[trace]])

    start = int(shortest.value) if shortest.value is not None else cap
    at = min(lrs, key=lambda each: abs(each - float(shortest.evidence.get("lr") or tried[-1].lr)))
    names = [(name, name) for name in ("loss", "gradient norm")]
    controls: dict[str, Control] = {
        "steps": Slider(label="warmup steps", low=0, high=longest, start=min(start, longest)),
        "lr": Choice(label="peak lr", options=[(f"{each:.4g}", each) for each in lrs], start=at),
        "trace": Choice(label="trace", options=names, start="loss", slides=False),
    }
    return controls_panel("warmup_panel", answer, controls, alt=ALT, live=live)
