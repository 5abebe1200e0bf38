"""Clipping, and the update rules by name, each for K lanes at once.

Lanes may differ in every optimizer constant and in the rule itself; constants that they share stay plain numbers, others become
tensors (lanes, 1). Two forms are kept where the playbook's FAQ and `torch.optim` differ (F7): "playbook" is written as the source
writes it, "torch" is the arithmetic of `torch.optim` 2.x with its defaults. A rule writes into memory that is there already: for 32
lanes of 26,122 float32 parameters on one core adam takes 0.8 ms that way, and 4.8 ms with fresh tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.config import TrainConfig

Number = float | NDArray[np.float64]
"""A number that all lanes share, or one for each, shape (lanes, 1); arithmetic on it is in double precision."""
HostLr = Sequence[float] | NDArray[np.float64] | None  # the lr of each lane as a number of the host


def global_norm(grad: Tensor) -> Tensor:
    """Return the L2 norm of each lane's whole gradient: (lanes, parameters) -> (lanes,) (F1.9)."""
    norm: Tensor = torch.linalg.vector_norm(grad, dim=1)
    return norm


def clip_by_norm(
    grad: Tensor, norm: Tensor, max_grad_norm: float | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (clipped gradient, whether it was clipped) by the rule g' = threshold * g / |g| where |g| > threshold.

    A non-finite norm is left as it is, so that it shows in the record. `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm.

    Args:
        grad: shape (lanes, parameters).
        norm: its unclipped norm, shape (lanes,), which is the one that the trainer records (F4.7).
        max_grad_norm: threshold, a number or shape (lanes,); infinite is off.
        out: takes the clipped gradient; it may be `grad`.
    """
    clipped = (norm > max_grad_norm) & (norm < math.inf)
    scale = torch.where(clipped, norm.reciprocal() * max_grad_norm, 1.0)
    return torch.mul(grad, scale.unsqueeze(1), out=out), clipped


def clip_thresholds(configs: Sequence[TrainConfig], like: Tensor) -> Tensor | None:
    """Return the threshold of each lane, shape (lanes,), infinite where a lane does not clip; None where none does."""
    if all(config.max_grad_norm is None for config in configs):
        return None
    values = [math.inf if config.max_grad_norm is None else config.max_grad_norm for config in configs]
    return torch.tensor(values, dtype=like.dtype, device=like.device)


class Memory(NamedTuple):
    """What a rule writes to: its state, the update (lanes, parameters), and room of that shape where it needs some."""

    state: dict[str, Tensor]
    out: Tensor
    scratch: Tensor


class Constants:
    """Optimizer constants of the lanes; a factor of the step is computed from them as a `Number`, then cast."""

    def __init__(self, configs: Sequence[TrainConfig], like: Tensor) -> None:
        self._dtype, self._device = like.dtype, like.device

        def number(name: str) -> Number:
            values = [float(getattr(config, name)) for config in configs]
            return values[0] if len(set(values)) == 1 else np.array(values, dtype=np.float64)[:, None]

        self.momentum, self.rho = number("momentum"), number("rho")
        self.beta1, self.beta2 = number("beta1"), number("beta2")
        self.eps, self.weight_decay = number("eps"), number("weight_decay")

    def cast(self, number: Number) -> float | Tensor:
        """Return a number as it is, and one for each lane as a tensor of the parameters' type on their device."""
        if isinstance(number, float):
            return number
        return torch.from_numpy(number).to(self._dtype).to(self._device, non_blocking=True)


@dataclass(frozen=True)
class Rule:
    """One update rule: the initial value of each state tensor, and the step."""

    initial: Mapping[str, float]
    update: Callable[[Memory, Tensor, Tensor, int, Constants], Tensor]
    scratch: bool = True


def _sgd(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    return torch.mul(lr, g, out=to.out)


def _momentum(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = to.state["v"].mul_(c.cast(c.momentum)).add_(g)
    return torch.mul(lr, v, out=to.out)


def _nesterov(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    gamma = c.cast(c.momentum)
    v = to.state["v"].mul_(gamma).add_(g)
    return torch.mul(lr, torch.mul(v, gamma, out=to.scratch).add_(g), out=to.out)


def _rmsprop_playbook(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = to.state["v"].lerp_(torch.mul(g, g, out=to.scratch), c.cast(1 - c.rho))
    root = torch.add(v, c.cast(c.eps), out=to.scratch).sqrt_()
    step = torch.mul(lr, g, out=to.out).div_(root)
    return to.out.copy_(to.state["m"].mul_(c.cast(c.momentum)).add_(step))


def _rmsprop_torch(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:  # noqa: ARG001
    v = to.state["v"].lerp_(torch.mul(g, g, out=to.scratch), c.cast(1 - c.rho))
    root = torch.sqrt(v, out=to.scratch).add_(c.cast(c.eps))
    m = to.state["m"].mul_(c.cast(c.momentum)).add_(torch.div(g, root, out=to.out))
    return torch.mul(lr, m, out=to.out)


def _moments(to: Memory, g: Tensor, c: Constants) -> tuple[Tensor, Tensor]:
    m = to.state["m"].lerp_(g, c.cast(1 - c.beta1))
    v = to.state["v"].lerp_(torch.mul(g, g, out=to.scratch), c.cast(1 - c.beta2))
    return m, v


def _root_playbook(to: Memory, v: Tensor, c: Constants) -> Tensor:
    return torch.sqrt(v, out=to.scratch).add_(c.cast(c.eps))


def _root_torch(to: Memory, v: Tensor, t: int, c: Constants) -> Tensor:
    return torch.sqrt(v, out=to.scratch).div_(c.cast((1 - c.beta2**t) ** 0.5)).add_(c.cast(c.eps))


def _bias(t: int, c: Constants) -> float | Tensor:
    return c.cast((1 - c.beta2**t) ** 0.5 / (1 - c.beta1**t))


def _adam_playbook(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(to, g, c)
    return torch.mul(lr * _bias(t, c), m, out=to.out).div_(_root_playbook(to, v, c))


def _adam_torch(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(to, g, c)
    return torch.mul(lr / c.cast(1 - c.beta1**t), m, out=to.out).div_(_root_torch(to, v, t, c))


def _nadam_playbook(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants) -> Tensor:
    m, v = _moments(to, g, c)
    ahead = torch.mul(m, c.cast(c.beta1), out=to.scratch)
    step = torch.mul(g, c.cast(1 - c.beta1), out=to.out).add_(ahead)
    return step.mul_(lr * _bias(t, c)).div_(_root_playbook(to, v, c))


def _nadam_torch(to: Memory, g: Tensor, lr: Tensor, t: int, c: Constants, *, psi: float = 4e-3) -> Tensor:
    m, v = _moments(to, g, c)
    mu, mu_next = (c.beta1 * (1 - 0.5 * 0.96 ** (k * psi)) for k in (t, t + 1))
    product = to.state["mu_product"].mul_(c.cast(mu))
    ahead = torch.mul(m, c.cast(mu_next) / (1 - product * c.cast(mu_next)), out=to.scratch)
    step = torch.mul(g, c.cast(1 - mu) / (1 - product), out=to.out).add_(ahead)
    return step.mul_(lr).div_(_root_torch(to, v, t, c))


_ZERO_MV = {"m": 0.0, "v": 0.0}
RULES: dict[tuple[str, str], Rule] = {
    ("sgd", "playbook"): Rule({}, _sgd, scratch=False),
    ("momentum", "playbook"): Rule({"v": 0.0}, _momentum, scratch=False),
    ("nesterov", "playbook"): Rule({"v": 0.0}, _nesterov),
    ("rmsprop", "playbook"): Rule({"v": 1.0, "m": 0.0}, _rmsprop_playbook),
    ("rmsprop", "torch"): Rule(_ZERO_MV, _rmsprop_torch),
    ("adam", "playbook"): Rule(_ZERO_MV, _adam_playbook),
    ("adam", "torch"): Rule(_ZERO_MV, _adam_torch),
    ("nadam", "playbook"): Rule(_ZERO_MV, _nadam_playbook),
    ("nadam", "torch"): Rule(_ZERO_MV | {"mu_product": 1.0}, _nadam_torch),
    ("adamw", "playbook"): Rule(_ZERO_MV, _adam_playbook),
    ("adamw", "torch"): Rule(_ZERO_MV, _adam_torch),
}
"""(optimizer, form) -> rule; sgd, momentum and nesterov are the same in both forms (F7.1 to F7.3)."""
