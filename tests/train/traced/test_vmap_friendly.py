"""What stands in for a loss gives its numbers and its gradient, and passes on what it does not know."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.train.lanes.step import ClassLosses

G = torch.Generator().manual_seed(6)
TARGETS = torch.tensor([0, 3, -100, 2, 1])
FORMS: dict[str, dict[str, Any]] = {
    "none": {"reduction": "none"},
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 3, "reduction": "none"},
    "weighted": {"weight": torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)},
    "smoothed": {"label_smoothing": 0.1},
}


def both(function: Any, x: Tensor, *args: Any, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return value and gradient without and with what stands in."""
    found = []
    for friendly in (False, True):
        leaf = x.clone().requires_grad_()
        if friendly:
            with ClassLosses():
                out = function(leaf, *args, **kwargs)
        else:
            out = function(leaf, *args, **kwargs)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_classes(function: Any, shape: tuple[int, ...], form: str) -> None:
    if function is F.nll_loss and form == "smoothed":
        return  # it does not smooth
    x = torch.randn(shape, generator=G, dtype=torch.float64)
    targets = TARGETS if form != "ignored" else TARGETS.clamp(min=0)
    targets = targets if len(shape) == 2 else targets.unsqueeze(1).expand(5, 3)
    plain, ours = both(function, x, targets, **FORMS[form])
    torch.testing.assert_close(ours, plain, rtol=1e-13, atol=1e-13)


def test_probabilities_and_single_examples_pass_through() -> None:
    x = torch.randn(5, 4, generator=G, dtype=torch.float64)
    torch.testing.assert_close(*both(F.cross_entropy, x, x.softmax(1)), rtol=0, atol=0)
    torch.testing.assert_close(*both(F.cross_entropy, x[0], torch.tensor(2)), rtol=0, atol=0)


def test_a_class_that_is_not_there_is_still_an_error() -> None:
    with ClassLosses(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_other_functions_pass_through() -> None:
    x = torch.randn(5, 4, generator=G)
    with ClassLosses():
        assert torch.equal(F.gelu(x), F.gelu(x).clone())
        assert torch.equal(x.exp() + 1, torch.exp(x).add(1))


def test_vmap_needs_no_symbolic_algebra() -> None:
    """The reason that it exists: half a second at the first traced step."""
    code = (
        "import sys, torch\n"
        "from torch.nn import functional as F\n"
        "from workbench.train.lanes.step import ClassLosses\n"
        "with ClassLosses():\n"
        "    torch.func.vmap(lambda x: F.cross_entropy(x, torch.tensor([0, 1]), reduction='none'))(torch.zeros(3, 2, 4))\n"
        "assert 'sympy' not in sys.modules, 'sympy was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
