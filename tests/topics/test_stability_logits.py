"""Attention logits that grow and output logits that drift: planted columns, and a trained model with its cure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.helpers.simulated_records import record, trial
from workbench.curves.minimised import judged_without_loss
from workbench.workloads.source_text import source_lm

TOTAL = 400
LOSS = 0.8 + 1.5 * np.exp(-np.arange(TOTAL) / 30)
LOOKS = np.arange(TOTAL) % 50 == 0
CODES = {"attention_logit": "stability.attention_logits", "output_log_z": "stability.output_logits"}


def seen(name, values, *, lr=0.1, **more):
    """A run with what was seen at its looks."""
    column = np.full(TOTAL, np.nan)
    column[LOOKS] = values
    return trial(LOSS, lr, stage="baseline", columns={name: column} | more)


def judged(*trials, **kwargs):
    return wb.stability.diagnose(record(list(trials), total_steps=TOTAL, peak_lr=0.1, **kwargs))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize(("end", "status"), [(30.0, "ok"), (300.0, "warn"), (3e4, "fail"), (np.inf, "fail")])
@pytest.mark.parametrize("sign", [1, -1])
def test_growth_to_the_end_is_found_by_its_size(name: str, end: float, status: str, sign: int) -> None:
    finding = judged(seen(name, sign * np.r_[np.linspace(1.0, 10.0, 7), end]))[CODES[name]]
    assert (finding.status, finding.value, finding.step) == (status, end, 350)
    assert bool(finding.advice) is (status != "ok")


@pytest.mark.parametrize("name", CODES)
def test_what_comes_back_before_the_middle_is_no_growth(name: str) -> None:
    finding = judged(seen(name, [1, 5000, 300, 40, 20, 20, 20, 20]))[CODES[name]]
    assert (finding.status, finding.value) == ("ok", 20.0)


def test_only_the_own_config_is_judged_and_the_layer_is_named() -> None:
    """A run at ten times the learning rate is evidence."""
    layers = {f"attention_logit/h.{i}.attn": np.where(LOOKS, 100.0 * i, np.nan) for i in range(3)}
    own, far = seen("attention_logit", np.full(8, 9.0)), seen("attention_logit", np.full(8, 5e4), lr=1.0)
    finding = judged(own, far)["stability.attention_logits"]
    assert finding.status == "ok"
    assert finding.evidence["others"] == {"value": 5e4, "lr": 1.0}
    early = np.full(TOTAL, np.nan)
    early[[0, 50, 350]] = 1.0, 900.0, 1.0  # large before the middle only
    layers["attention_logit/early"] = early
    sick = judged(seen("attention_logit", np.full(8, 200.0), **layers))["stability.attention_logits"]
    assert "h.2.attn" in sick.summary
    assert sick.evidence["layers"]["h.1.attn"] == 100.0


def test_what_was_not_looked_at_is_not_taken_for_healthy() -> None:
    once = np.r_[3.0, np.full(7, np.nan)]
    tokens = [{"trial": 0, "step": 0, "split": "validation", "setting": "periodic", "metric": "token_accuracy", "value": 0.1}]  # fmt: skip
    plain = trial(LOSS, 0.1, stage="baseline")
    for given, expected in (
        (judged(seen("attention_logit", once)), "not_measured"),
        (judged(plain, evals=tokens), "not_measured"),
        (judged(plain, facts={"loop": {"logits": {"looks": 0}}}), "not_measured"),
        (judged(plain, facts={"loop": {"logits": {"looks": 1}}}), "ok"),
        (judged(seen("output_log_z", np.full(8, 5.0))), "not_measured"),  # called by a name of its own
        *(
            (
                judged(
                    seen("output_log_z", np.full(8, 5.0)),
                    facts={"architecture": {"softmaxes": count}},
                    evals=[tokens[0] | {"metric": "accuracy"}],
                ),
                status,
            )
            for count, status in ((1, "not_measured"), (0, "ok"))
        ),
        (judged(plain), "not_measured"),
        (judged(plain, evals=[tokens[0] | {"metric": "accuracy"}]), "ok"),
    ):
        finding = given["stability.attention_logits"]
        assert finding.status == expected
        assert finding.summary.startswith("Does not apply" if expected == "ok" else "Not measured")


@pytest.mark.parametrize(("qk_norm", "status"), [(False, "fail"), (True, "ok")])
def test_a_high_lr_makes_attention_logits_grow_and_qk_norm_bounds_them(
    tmp_path: Path, qk_norm: bool, status: str
) -> None:
    """Wortsman et al. 2023, section 3.1.1, at 0.1M parameters; what is read from disk says what was recorded."""
    workload = source_lm(width=64, total_steps=200, peak_lr=0.3, qk_norm=qk_norm)
    record = wb.Trainer().run(workload, out=tmp_path / "run")
    found = wb.stability.diagnose(record)["stability.attention_logits"]
    assert found.status == status
    again = wb.stability.diagnose(wb.open(tmp_path / "run"))["stability.attention_logits"]
    assert json.dumps(again.to_dict()) == json.dumps(found.to_dict())


def test_logits_are_judged_where_the_loss_need_not_fall() -> None:
    held = record(
        [seen("attention_logit", np.full(8, 300.0))], total_steps=TOTAL, peak_lr=0.1, facts={"minimised": False}
    )
    found = judged_without_loss(held, wb.stability.diagnose(held))
    assert (found["stability.attention_logits"].status, found["stability.headroom"].value) == ("warn", None)
