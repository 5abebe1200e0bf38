"""The study of a workload: its own loader and step, in a folder; healthy ones are called healthy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_net, small_workload, squared
from workbench.errors import ConfigError
from workbench.record.read import StudyRecord, open_record
from workbench.topics.input.diagnose import CODES
from workbench.train.rng import capture_rng

QUICK: dict[str, Any] = {"steps": 40, "seconds": 1.0, "max_workers": 1}


class Masked(torch.utils.data.Dataset[Any]):
    """Items with a feature that only a metric reads, and one that nothing reads."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(0, 1, 3) + index / 48
        return {"x": x.double(), "y": x.sum().double(), "shown": torch.ones(1), "mask": torch.ones(200)}


def masked() -> wb.Workload:
    return small_workload(
        train_data=Masked(), validation_data=Masked(), forward=lambda model, batch: model(batch["x"]),
        loss=lambda outputs, batch: squared(outputs, (None, batch["y"])),
        metrics={"shown": lambda outputs, batch: batch["shown"].double().squeeze(-1)},
    )  # fmt: skip


def test_a_workload_in_memory_is_healthy_and_the_folder_holds_all(tmp_path: Path) -> None:
    before = capture_rng()
    record = wb.InputPipelineStudy(**QUICK).run(small_workload(), out=tmp_path / "s")
    after = capture_rng()
    assert all(torch.equal(before[name], after[name]) for name in before)
    diagnosis = wb.diagnose_input_pipeline(record)
    assert [f.code for f in diagnosis] == list(CODES)
    assert {f.status for f in diagnosis} == {"ok"}
    assert record.trials["stage"].tolist() == ["input_pipeline"]
    trace = json.loads((tmp_path / "s" / "trace.json").read_text())
    assert trace["traceEvents"]
    again = open_record(tmp_path / "s")
    assert isinstance(again, StudyRecord)
    assert again.facts["input_pipeline"]["trace"]["path"] == "trace.json"
    assert wb.InputPipelineStudy(**QUICK).run(small_workload(), out=tmp_path / "s").facts == again.facts


def test_a_planted_latency_is_found_in_a_workload(tmp_path: Path) -> None:
    workload = small_workload()
    slow = workload.replace(train_data=wb.Delayed(workload.train_data, 0.002))
    diagnosis = wb.diagnose_input_pipeline(wb.InputPipelineStudy(**QUICK).run(slow, out=tmp_path / "s"))
    bound = diagnosis["input.bound"]
    assert (bound.status, bound.evidence["cause"]) == ("warn", "latency")
    assert "Delayed.__getitem__" in bound.summary


def test_what_a_metric_reads_is_used_and_what_nothing_reads_is_named(tmp_path: Path) -> None:
    record = wb.InputPipelineStudy(**{**QUICK, "max_workers": 0}).run(masked(), out=tmp_path / "s")
    finding = wb.diagnose_input_pipeline(record)["input.unused_features"]
    assert finding.status == "warn"
    assert finding.evidence["unread"] == {"mask": 8 * 200 * 4}
    assert finding.evidence["read"] == ["shown", "x", "y"]


@pytest.mark.parametrize("name", ["digits_mlp", "quadratic"])
def test_bundled_workloads_raise_no_alarm(name: str, tmp_path: Path) -> None:
    study = wb.InputPipelineStudy(steps=30, seconds=1.0, max_workers=1, trace=False)
    diagnosis = wb.diagnose_input_pipeline(study.run(wb.load_workload(name), out=tmp_path / "s"))
    assert {f.status for f in diagnosis} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "words"), [({"steps": 1}, "steps=1"), ({"seconds": 0.0}, "seconds=0.0"), ({"max_workers": -1}, "max_workers=-1")]
)  # fmt: skip
def test_bad_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wb.InputPipelineStudy(**changes)


def test_an_iterable_workload_is_read(tmp_path: Path) -> None:
    class Rows(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 32

        def __iter__(self) -> Any:
            yield from zip(torch.randn(32, 3).double(), torch.zeros(32).double(), strict=True)

    held = TensorDataset(torch.zeros(8, 3).double(), torch.zeros(8).double())
    workload = small_workload(train_data=Rows(), validation_data=held, build_model=small_net)
    record = wb.InputPipelineStudy(**{**QUICK, "trace": False}).run(workload, out=tmp_path / "s")
    found = wb.diagnose_input_pipeline(record)
    assert found["input.example_count"].status == "ok"
    assert found["data.worker_rng"].status == "not_measured"
