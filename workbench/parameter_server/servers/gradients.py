"""`with_gradients`: the parameters whose gradients a push sends, after looking whether there is anything to send."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from workbench.errors import UsageError

__all__ = ["with_gradients"]


def with_gradients(module: nn.Module, placed: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the placed parameters of a module by name, with their gradients, sparse ones made dense.

    Args:
        module: after its backward pass.
        placed: names of the parameters that are on servers.

    Raises:
        UsageError: no parameter has a gradient, or one has that is on no server.
    """
    named = dict(module.named_parameters())
    elsewhere = [key for key, parameter in named.items() if key not in placed and parameter.grad is not None]
    if elsewhere:
        raise UsageError(
            f"{', '.join(elsewhere[:3])} got a gradient, and needed none when the module was placed, so that it is on no server. Place "
            "the module with requires_grad as it is to be trained; place what is thawed later anew."
        )
    held = {key: parameter for key, parameter in named.items() if key in placed}
    if all(parameter.grad is None for parameter in held.values()):
        raise UsageError(
            "No parameter has a gradient, so there is nothing to send. Call loss.backward() inside of `with placed.step() as module`, on "
            "what that module computed, and no zero_grad() after it: the servers make the update. To leave an update out, use pull and push."
        )
    for parameter in held.values():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()
    return held
