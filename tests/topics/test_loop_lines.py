"""Which lines of a person's file a finding of a watched loop names, and which modules no line calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb


def line(function: Callable[..., object], words: str) -> str:
    """Return the number of the only line of a function that holds these words."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + k for k, text in enumerate(lines) if words in text)
    return f"{Path(__file__).name}:{number}"


class Net(nn.Module):
    """A head that is used and one that is not; probabilities where they are asked for."""

    def __init__(self, squash: str = "", *, call_spare: bool = False) -> None:
        super().__init__()
        self.body, self.drop, self.head, self.spare = (
            nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3), nn.Linear(8, 3),
        )  # fmt: skip
        self.squash, self.call_spare = squash, call_spare

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(F.relu(self.body(x)))
        if self.call_spare:
            self.spare(hidden)
        out = self.head(hidden)
        if self.squash == "function":
            out = F.softmax(out, dim=1)
        if self.squash == "method":
            out = out[:, None].softmax(2).squeeze(1)
        if self.squash == "module":
            out = nn.Softmax(dim=1)(out)
        return torch.sigmoid(out) if self.squash == "sigmoid" else out


def train(model: nn.Module, out: Path, loss: Callable[[Tensor], Tensor], *, evaluate: bool = False) -> wb.Diagnosis:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=out) as run:
        for k in range(30):
            if k == 3 and evaluate:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(4, 6))
            optimizer.zero_grad()
            loss(model(torch.randn(16, 6))).backward()
            optimizer.step()
    return run.diagnose()


def classes(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(16) % 3)


def labels(out: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, torch.ones(16, 3))


@pytest.mark.parametrize(
    ("squash", "words", "loss"),
    [
        ("function", "F.softmax(", classes),
        ("method", ".softmax(2)", classes),
        ("module", "nn.Softmax(", classes),
        ("sigmoid", "torch.sigmoid(", labels),
    ],
)
def test_a_second_softmax_is_told_with_its_own_line(
    squash: str, words: str, loss: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    found = train(Net(squash), tmp_path / "run", loss)["loss.double_softmax"]
    assert found.status == "fail"
    assert line(loss, "F.") in found.summary
    assert f"{'sigmoid' if squash == 'sigmoid' else 'softmax'} in " in found.summary
    assert line(Net.forward, words) in found.summary
    assert F.softmax.__module__ == "torch.nn.functional"
    assert not hasattr(F.softmax, "__wrapped__")


def test_an_evaluation_mode_that_stays_is_told_with_the_line_that_set_it(tmp_path: Path) -> None:
    found = train(Net(), tmp_path / "run", classes, evaluate=True)["loop.eval_mode_in_training"]
    assert found.status == "fail"
    assert f"model.eval() in tests/topics/{line(train, 'model.eval()')}" in found.summary


def test_modules_that_are_never_called_are_told_from_gradients_that_are_cut(tmp_path: Path) -> None:
    idle = train(Net(), tmp_path / "idle", classes)["loop.no_gradient"]
    cut = train(Net(call_spare=True), tmp_path / "cut", classes)["loop.no_gradient"]
    assert idle.status == "warn"
    assert "spare.weight, spare.bias" in idle.summary
    assert "never called" in idle.summary
    assert cut.status == "fail"
    assert "never called" not in cut.summary
