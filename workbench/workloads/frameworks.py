"""Models of frameworks that train by hooks: what of them this trainer does not call is told once, by name."""

import logging

from torch import nn

_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric")
_told: set[type] = set()


def uncalled_hooks(model: nn.Module) -> list[str]:
    """Return the names of Lightning's hooks that the class of a model defines, in order; none for any other model."""
    kinds = type(model).__mro__
    own = next(
        (k for k in kinds if k.__name__ == "LightningModule" and k.__module__.split(".")[0] in _FRAMEWORKS), None
    )
    if own is None:
        return []
    names = [name for kind in kinds[: kinds.index(own)] for name in vars(kind)]
    hooks = [n for n in names if n[0] != "_" and callable(getattr(own, n, None)) and not hasattr(nn.Module, n)]
    return list(dict.fromkeys(hooks))


def tell_uncalled(model: nn.Module) -> None:
    """Log once a class which of its hooks this trainer does not call."""
    kind = type(model)
    if kind in _told or not (hooks := uncalled_hooks(model)):
        return
    _told.add(kind)
    logging.getLogger(__name__).warning(
        "%s is a LightningModule, and Lightning does not train here: %s %s not called. What they do goes into forward, loss, metrics, "
        "optimizer and schedule; forward=lambda model, batch: model.training_step(batch, 0) with loss=lambda outputs, batch: outputs takes "
        "a step as it is. Or keep your Trainer and give it wb.callbacks.lightning().",
        kind.__name__, ", ".join(hooks), "is" if len(hooks) == 1 else "are",
    )  # fmt: skip
