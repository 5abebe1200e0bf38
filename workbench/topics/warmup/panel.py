"""`warmup_panel`: the shape of a warmup on two sliders, against the trace of the nearest one that was run (F3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.config import TrainConfig
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, Control, Slider, controls_panel, needs, nothing
from workbench.plots.frames import field_of
from workbench.plots.render import Draw
from workbench.schedules import prepend_warmup
from workbench.topics.clipping.figures import plot_grad_norm
from workbench.topics.lr_sweep.figures import plot_loss_curves
from workbench.topics.schedule.figures import mark_warmup, plot_schedule
from workbench.topics.warmup.diagnose import diagnose_warmup
from workbench.topics.warmup.search import cap_steps

ALT = "The learning rate at each step with a warmup, beside the trace of the nearest trial that was run."


@dataclass(frozen=True, kw_only=True)
class TriedWarmup:
    """One warmup that a study trained.

    Attributes:
        trial: number of its longest run.
        steps, lr: of the ramp that was prepended, and at its top.
        full: a run of the full budget; else the short trial of F3.7.
        passes: it trained stably; None where that could not be judged.
    """

    trial: int
    steps: int
    lr: float
    full: bool
    passes: bool | None


@dataclass(frozen=True, kw_only=True)
class WarmupChoice:
    """A warmup that somebody looks at. Shares are shares of the baseline's steps, before a warmup is prepended (O4).

    Attributes:
        steps, lr: of the ramp that is prepended, and at its top.
        total_steps: of the baseline.
        lengthen_from: more steps than this, and the run may have to grow (F3.14).
        cap: no more steps than this (F3.10).
        unstable_lr: learning rate that is unstable without a warmup; None where unknown.
        nearest: trial with the nearest learning rate, and the nearest length at that; None where nothing was tried.
    """

    steps: int
    lr: float
    total_steps: int
    lengthen_from: int
    cap: int
    unstable_lr: float | None
    nearest: TriedWarmup | None

    @property
    def share(self) -> float:
        """The warmup over the baseline's steps."""
        return self.steps / self.total_steps

    @property
    def words(self) -> str:
        """All of it in a few sentences."""
        where = f"at most 5 % ({self.lengthen_from:,} steps, F3.14) and below the cap of 10 % ({self.cap:,}, F3.10)"
        if self.steps > self.cap:
            where = f"above the cap of 10 %, {self.cap:,} steps (F3.10)"
        elif self.steps > self.lengthen_from:
            plan = f"so plan {self.total_steps + self.steps:,} steps (F3.14); below the cap of 10 %, {self.cap:,}"
            where = f"above 5 %, {self.lengthen_from:,} steps, {plan}"
        said = f"{self.steps:,} steps of warmup are {self.share:.1%} of the baseline's {self.total_steps:,}: {where}. "
        if self.unstable_lr:
            said += f"lr {self.lr:.4g} is {self.lr / self.unstable_lr:.3g} x the one that is unstable without warmup ({self.unstable_lr:.4g}). "
        if self.nearest is None:
            return said + "No trial of a warmup was run."
        one = self.nearest
        how = {True: "trains", False: "does not train", None: "cannot be judged"}[one.passes]
        kind = "run of the full budget" if one.full else "short trial"
        return f"{said}Nearest that was run: trial {one.trial}, {one.steps:,} steps to lr {one.lr:.4g}, a {kind} that {how}."


def tried_warmups(diagnosis: Diagnosis) -> list[TriedWarmup]:
    """Return every warmup that `diagnose_warmup` found tried, with its longest run, by learning rate and length."""
    found = diagnosis["warmup.shortest"].evidence if "warmup.shortest" in diagnosis else {}
    rounds: Sequence[Mapping[str, Any]] = found.get("rounds") or ()
    tried = []
    for lr, one in ((float(row["lr"]), one) for row in rounds for one in row["lengths"]):
        full = one.get("full_trial") is not None
        trial = one.get("full_trial" if full else "short_trial")
        if trial is not None:
            passes = one["short"] if one["full"] is None else one["full"]
            tried.append(TriedWarmup(trial=int(trial), steps=int(one["steps"]), lr=lr, full=full, passes=passes))
    return sorted(tried, key=lambda one: (one.lr, one.steps))


def warmup_choice(
    record: RecordLike,
    diagnosis: Diagnosis,
    *,
    steps: int,
    lr: float,
    cap_frac: float = 0.1,
    lengthen_frac: float = 0.05,
) -> WarmupChoice:
    """Hold a warmup against the limits of F3 and against what was tried.

    `cap_frac` is the largest share of the baseline's steps that a warmup may take (F3.10); above `lengthen_frac`
    the run may have to grow (F3.14).
    """
    total = int(record.config["total_steps"])
    unstable = diagnosis["warmup.shortest"].evidence.get("unstable_lr") if "warmup.shortest" in diagnosis else None
    return WarmupChoice(
        steps=steps,
        lr=lr,
        total_steps=total,
        lengthen_from=cap_steps(total, lengthen_frac),
        cap=cap_steps(total, cap_frac),
        unstable_lr=float(unstable) if unstable else None,
        nearest=min(
            tried_warmups(diagnosis),
            key=lambda one: (round(abs(math.log(one.lr / lr)), 9), abs(one.steps - steps), not one.full),
            default=None,
        ),
    )


def warmup_panel(record: RecordLike, diagnosis: Diagnosis | None = None, *, live: bool | None = None) -> Any:
    """Return a schedule below sliders for warmup steps and peak lr: what it asks of the run, and what the nearest trial did.

    The diagnosis is of `diagnose_warmup`, or made from the record; the sliders start at the shortest warmup that trains. `live` None asks
    the environment: `WORKBENCH_LIVE=0` means that nobody is looking. See `controls_panel` for what it returns.

    Source: F3.4 and F3.6 (what is tried), F3.10 (at most 10 % of the baseline's steps), F3.14 (above 5 % the run may have to grow).
    """
    needs("warmup_panel", record, "steps", "trials", "config", "facts")
    said = diagnosis if diagnosis is not None and "warmup.shortest" in diagnosis else None
    if said is None and "loss" in record.steps:
        said = diagnose_warmup(record)
    tried = [] if said is None else tried_warmups(said)
    if said is None or not tried:
        why = "the record has no finished trial of a warmup. Run wb.warmup.Study().run(workload, out=...)."
        return nothing("warmup_panel", why, alt=ALT, live=live)
    lrs = sorted({one.lr for one in tried} | {float(record.config["peak_lr"])})
    shortest = said["warmup.shortest"]
    lr = min(lrs, key=lambda each: abs(each - float(shortest.evidence.get("lr") or tried[-1].lr)))
    limits = warmup_choice(record, said, steps=0, lr=lr)
    longest = max(2 * limits.cap, *(one.steps for one in tried), 1)
    start = int(shortest.value) if shortest.value is not None else limits.cap
    baseline = TrainConfig.from_dict(record.config)

    def answer(steps: int, lr: float, trace: str) -> Answer:
        choice = warmup_choice(record, said, steps=steps, lr=lr)
        config = prepend_warmup(baseline.replace(peak_lr=lr), steps)
        marks = [(choice.lengthen_from, "5 % of the baseline's steps"), (choice.cap, "10 %, the cap")]
        shape: Draw = lambda ax: plot_schedule(  # noqa: E731 - an answer holds functions
            config, baseline=baseline, limits=marks, last_step=baseline.total_steps + longest, ax=ax
        )
        assert choice.nearest is not None
        trial = choice.nearest.trial
        warmed = int(field_of(record, trial, "warmup_steps") or 0)
        traces: dict[str, Draw] = {
            "loss": lambda ax: mark_warmup(plot_loss_curves(record, trials=[trial], ax=ax), warmed),
            "gradient norm": lambda ax: mark_warmup(plot_grad_norm(record, trial=trial, ax=ax), warmed),
        }
        return Answer(choice.words, [shape, traces[trace]])

    controls: dict[str, Control] = {
        "steps": Slider(label="warmup steps", low=0, high=longest, start=min(start, longest)),
        "lr": Choice(label="peak lr", options=[(f"{each:.4g}", each) for each in lrs], start=lr),
        "trace": Choice(
            label="trace", options=[(name, name) for name in ("loss", "gradient norm")], start="loss", slides=False
        ),
    }
    return controls_panel("warmup_panel", answer, controls, alt=ALT, live=live)
