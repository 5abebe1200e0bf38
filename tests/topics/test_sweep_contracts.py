"""What holds for every study of the sweeps and every verdict on one: codes, odd records, interruptions, and fields that make no sense."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.helpers.simulated_records import record, trial
from tests.helpers.workloads import small_workload
from workbench.record.json_values import dumps
from workbench.topics.batch_size.diagnose import CODES as BATCH_SIZE
from workbench.topics.clipping.diagnose import CODES as CLIPPING
from workbench.topics.comparison.diagnose import CODES as COMPARISON
from workbench.topics.lr_sweep.diagnose import CODES as LR
from workbench.topics.optimizers.constants import CODES as REPLACED
from workbench.topics.optimizers.constants import diagnose_replaced
from workbench.topics.optimizers.diagnose import CODES as OPTIMIZERS
from workbench.topics.recommendation.study import Proof
from workbench.topics.schedule.diagnose import CODES as SCHEDULE
from workbench.topics.stability.diagnose import CODES as STABILITY
from workbench.topics.warmup.diagnose import CODES as WARMUP
from workbench.train.hooks import Step
from workbench.workloads.analytic import quadratic, valley

LRS = (0.1, 0.2, 0.4)
ODD = {
    "empty": record([]),
    "one trial": record([trial(np.linspace(2, 1, 50), 0.1)]),
    "NaN": record([trial(np.full(30, np.nan), lr, seed=s) for lr in LRS for s in (0, 1)]),
    "constant": record([trial(np.full(30, 2.0), lr, seed=s) for lr in LRS for s in (0, 1)]),
    "two steps": record([trial([2.3, 2.2], lr, seed=s) for lr in LRS for s in (0, 1)]),
    "diverged": record(
        [trial([2.3, math.nan], lr, columns={"grad_norm": np.ones(2)}) for lr in LRS], max_grad_norm=1.0
    ),
}
OK = ("warmup.over_cap", "optimizers.rule_mismatch")  # of a baseline without them
LOST = {"stability.early": "fail", "stability.divergent": "fail", "stability.early_recovers": "ok", "clipping.nonfinite": "ok"}  # fmt: skip
STABLE = {code: "ok" for code in STABILITY if code != "stability.headroom" and not code.endswith("_logits")}
SAID: dict[str, dict[str, str]] = {
    "empty": {},
    "one trial": {"lr.nothing_learns": "ok", "clipping.nonfinite": "fail"} | STABLE | dict.fromkeys(SCHEDULE, "ok"),
    "NaN": LOST | dict.fromkeys(SCHEDULE, "ok"),
    "constant": {"clipping.nonfinite": "fail"} | dict.fromkeys(SCHEDULE, "ok"),
    "two steps": {code: "ok" for code in LR if code != "lr.unstable"}
    | {"lr.grid_edge": "warn", "clipping.nonfinite": "fail", "stability.headroom": "ok"},
    "diverged": LOST | {"clipping.aggressive": "ok"},
}
"""What is claimed of each beside `OK`; all else is not measured."""


def compared(one: Any) -> wb.Diagnosis:
    return wb.comparison.diagnose(one, one, one)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(("diagnose", "codes"), [
    (wb.lr_sweep.diagnose, LR), (wb.clipping.diagnose, CLIPPING), (wb.warmup.diagnose, WARMUP), (wb.optimizers.diagnose, OPTIMIZERS),
    (wb.stability.diagnose, STABILITY), (wb.batch_size.diagnose, BATCH_SIZE), (wb.schedule.diagnose, SCHEDULE),
    (diagnose_replaced, REPLACED), (compared, COMPARISON),
])  # fmt: skip
def test_every_code_is_there_once_and_claims_nothing_of_an_odd_record(
    diagnose: Callable[[Any], wb.Diagnosis], codes: Sequence[str], name: str
) -> None:
    found = diagnose(ODD[name])
    assert tuple(f.code for f in found) == tuple(codes)
    for finding in found:
        assert finding.clause
        claims = {} if diagnose in (diagnose_replaced, compared) else SAID[name] | dict.fromkeys(OK, "ok")
        assert finding.status == claims.get(finding.code, "not_measured"), finding
        assert bool(finding.advice) <= (finding.status != "ok")
    json.loads(dumps(found.to_dict()), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


class StopsAt(wb.hooks.Hook):
    """Presses Ctrl-C at the nth update that is made, counted over all trials."""

    def __init__(self, at: float) -> None:
        self.at, self.seen = at, 0

    def on_step(self, step: Step) -> None:
        before, self.seen = self.seen, self.seen + len(step.trials)
        if before < self.at <= self.seen:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("study", "workload"), [
    (wb.lr_sweep.Study(full_batch_refinements=4), quadratic(dimension=4, condition=4.0, total_steps=50, optimizer="nesterov")),
    (wb.clipping.Study(peak_lr=0.1), valley()),
    (wb.warmup.Study(unstable_base_learning_rate=2 / 201), valley(total_steps=400)),
    (wb.optimizers.Study(optimizers=("sgd", "adam"), seeds=2, lrs=(0.01, 0.1)), small_workload()),
    (wb.stability.Study(sweep=wb.lr_sweep.Study(lrs=(0.01, 0.1, 0.5)), probe_steps=20), small_workload()),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_an_interrupted_study_goes_on_and_ends_the_same(tmp_path: Path, study: Any, workload: Any) -> None:
    whole = study.run(workload, wb.Trainer(device="cpu"), out=tmp_path / "whole")
    total = int(whole.trials["steps_run"].sum())
    with pytest.raises(wb.errors.StudyInterrupted):
        study.run(workload, wb.Trainer(device="cpu", hooks=[StopsAt(0.5 * total)]), out=tmp_path / "s")
    rest = StopsAt(math.inf)
    again = study.run(workload, wb.Trainer(device="cpu", hooks=[rest]), out=tmp_path / "s")
    assert rest.seen < total, "what was trained is not trained again"
    columns = ["trial", "step", "loss", "lr", "grad_norm"]
    assert again.steps[columns].equals(whole.steps[columns])
    assert again.trials["stage"].equals(whole.trials["stage"])


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (wb.lr_sweep.Study, {"lrs": ()}, r"lrs=\[\] holds no learning rate"),
    (wb.lr_sweep.Study, {"lrs": (math.nan, math.inf, "a", True, -0.1)}, r"wrong: \[nan, inf, 'a', True, -0.1\]"),
    (wb.lr_sweep.Study, {"lrs": (1, 0.2, 1.0, 0.2)}, r"holds the same lr more than once: \[1\.0, 0\.2\].*ask for seeds="),
    (wb.lr_sweep.Study, {"seeds": True}, "seeds=True must be an integer of at least 1"),
    (wb.lr_sweep.Study, {"tolerance": 5}, "tolerance=5 must be between 0 and 1"),
    (wb.lr_sweep.Study, {"decades": 0}, "decades=0 must be above 0"),
    (wb.clipping.Study, {"peak_lr": math.inf}, "peak_lr=inf must be a finite number above 0"),
    (wb.clipping.Study, {"looser": 1.0}, r"looser=1\.0 must be a finite number above 1"),
    (wb.clipping.Study, {"percentiles": (90.0, 0.0)}, "each above 0 and at most 100"),
    (wb.clipping.Study, {"percentiles": (50.0, 50.0)}, "must decrease"),
    (wb.warmup.Study, {"multiples": (10.0, -5)}, r"multiples\[1\]=-5"),
    (wb.warmup.Study, {"warmup_steps": ()}, r"warmup_steps=\(\) must hold at least one"),
    (wb.warmup.Study, {"warmup_steps": (3,)}, "a trial of 9 steps, but 10 are needed to judge one: raise it to 4"),
    (wb.warmup.Study, {"full_runs": 1}, "full_runs=1 must be an integer of at least 2"),
    (wb.optimizers.Study, {"optimizers": ("adan",)}, "'adan' is not an update rule.*adam"),
    (wb.optimizers.Study, {"memory_factor": math.inf}, "memory_factor=inf must be a finite number above 1"),
    (wb.optimizers.Study, {"sweep": wb.lr_sweep.Study(steps=10)}, "give lrs=... and steps=... to the study"),
    (wb.optimizers.Study, {"lrs": {"adam": (0.1,)}, "optimizers": ("adam", "sgd")}, "no learning rates for sgd"),
    (wb.stability.Study, {"confirm_multiples": (5.0, math.nan)}, r"confirm_multiples\[1\]=nan"),
    (wb.stability.Study, {"fixes": ("warmup", "prayer")}, "may hold 'warmup' and 'clipping', not 'prayer'"),
    (wb.batch_size.Study, {"equal": "steps"}, "equal='steps' must name 'steps', 'examples' or both"),
    (wb.batch_size.Study, {"memories": [1.0]}, r"memories\[0\]=1.0 must be a finite number at least 0 and below 1"),
    (wb.comparison.Study, {"cap_frac": 1.5}, "cap_frac=1.5 must be above 0 and at most 1: 0.1 is a tenth"),
    (Proof, {"seeds": 0}, "seeds=0 must be an integer of at least 1; with 1 nothing is proved"),
]  # fmt: skip


@pytest.mark.parametrize(("study", "fields", "said"), REFUSED)
def test_a_field_that_makes_no_sense_is_refused(study: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(wb.errors.UsageError, match=said):
        study(**fields)
