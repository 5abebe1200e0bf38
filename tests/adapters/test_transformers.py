"""Hugging Face's own Trainer, with and without the callback: the same training to the bit, and a record of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.instruments.taps import TAPS

hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXAMPLES = 72


def make(folder: Path, callbacks: list[Any], *, error: BaseException | None = None, **options: Any) -> Any:
    class Seen(hf.Trainer):  # type: ignore[misc, name-defined]
        seen: tuple[float, ...] = ()

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if error is not None and self.state.global_step == 5:
                raise error
            loss = super().training_step(*args, **kwargs)
            self.seen += (loss.item(),)
            return loss

    torch.manual_seed(0)
    ids = torch.randint(0, 32, (EXAMPLES, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, max_position_embeddings=8, attention_dropout=0.1, **size))
    args = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_train_epochs": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "eval_strategy": "epoch", "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5,
    }  # fmt: skip
    return Seen(
        model, hf.TrainingArguments(**(args | options)), train_dataset=data, eval_dataset=data[:16], callbacks=callbacks,
        data_collator=hf.DefaultDataCollator(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 4}, {"bf16": True}, {"eval_on_start": True}],
    ids=["plain", "accumulation", "bf16", "evaluated-first"],
)
def test_a_training_is_recorded_and_not_changed(options: dict[str, Any], tmp_path: Path) -> None:
    """72 examples in batches of 8, four a window: the last window of an epoch is shorter, and rightly divided all the same."""
    alone = make(tmp_path / "a", [], **options)
    alone.train()
    callback = wb.callbacks.transformers(tmp_path / "run")
    trainer = make(tmp_path / "b", [callback], **options)
    trainer.train()
    assert trainer.seen == alone.seen
    assert all(
        torch.equal(a, b)
        for a, b in zip(alone.model.state_dict().values(), trainer.model.state_dict().values(), strict=True)
    )
    assert callback.run is not None
    record = callback.run.record
    told = [row for row in trainer.state.log_history if "grad_norm" in row]
    for name, theirs in (("loss", "loss"), ("grad_norm", "grad_norm")):
        assert record.steps[name].tolist() == pytest.approx([row[theirs] for row in told], rel=1e-3)
    assert record.steps["lr"].iloc[0] == 1e-3
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert record.evals["value"].tolist() == pytest.approx(evaluated)
    assert set(zip(record.evals["split"], record.evals["metric"], strict=True)) == {("validation", "loss")}
    assert record.config["total_steps"] == trainer.state.global_step == len(record.steps)
    found = callback.run.diagnose()
    assert [
        (f.code, f.summary)
        for f in found
        if f.status in ("warn", "fail") and not f.code.startswith(("stability", "clipping.aggressive"))
    ] == []


def test_evaluation_alone_records_nothing_and_an_exception_ends_the_record(tmp_path: Path) -> None:
    callback = wb.callbacks.transformers(tmp_path / "run")
    trainer = make(tmp_path / "a", [callback], error=ValueError("planted"))
    assert trainer.evaluate()["eval_loss"] > 0
    assert (callback.run, (tmp_path / "run").exists()) == (None, False)
    with pytest.raises(ValueError, match="planted"), callback:
        trainer.train()
    assert TAPS.listeners == []
    assert callback.run is not None
    assert len(callback.run.record.steps) == 5
    assert '"failed"' in (tmp_path / "run" / "trials" / "0" / "events.jsonl").read_text()


def test_a_resumed_training_records_what_is_left(tmp_path: Path) -> None:
    make(tmp_path / "a", [], save_strategy="epoch", num_train_epochs=2).train()
    callback = wb.callbacks.transformers(tmp_path / "run")
    make(tmp_path / "a", [callback]).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-9"))
    assert callback.run is not None
    assert len(callback.run.record.steps) == callback.run.record.config["total_steps"] == 9
