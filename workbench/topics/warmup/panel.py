"""`warmup_panel`: the shape of a warmup on two sliders, against the trace of the nearest one that was run (F3)."""

from __future__ import annotations

from typing import Any

from workbench.config import TrainConfig
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, Control, Slider, controls_panel, needs, nothing
from workbench.plots.frames import field_of
from workbench.plots.render import Draw
from workbench.schedules import prepend_warmup
from workbench.topics.clipping.grad_norm_figures import plot_grad_norm
from workbench.topics.lr_sweep.figures import plot_loss_curves
from workbench.topics.schedule.figures import mark_warmup, plot_schedule
from workbench.topics.warmup.choice import tried_warmups, warmup_choice
from workbench.topics.warmup.diagnose import diagnose_warmup

__all__ = ["warmup_panel"]

ALT = "The learning rate at each step with a warmup, beside the trace of the nearest trial that was run."


def warmup_panel(record: RecordLike, diagnosis: Diagnosis | None = None, *, live: bool | None = None) -> Any:
    """Return a schedule below sliders for warmup steps and peak lr: what it asks of the run, and what the nearest trial did.

    Args:
        record: of a `WarmupStudy`.
        diagnosis: of `diagnose_warmup`; made from the record without it. The sliders start at the shortest warmup that trains.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        See `controls_panel`.

    Source: F3.4 and F3.6 (what is tried), F3.10 (at most 10 % of the baseline's steps), F3.14 (above 5 % the run may have to grow).
    """
    needs("warmup_panel", record, "steps", "trials", "config", "facts")
    said = diagnosis if diagnosis is not None and "warmup.shortest" in diagnosis else None
    if said is None and "loss" in record.steps:
        said = diagnose_warmup(record)
    tried = [] if said is None else tried_warmups(said)
    if said is None or not tried:
        why = "the record has no finished trial of a warmup. Run wb.WarmupStudy().run(workload, out=...)."
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
