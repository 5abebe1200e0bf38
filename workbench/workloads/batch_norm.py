"""Batch norm with statistics from a set number of examples (P6.4 to P6.6), and the norms that take its place (P6.1)."""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from workbench.checks import check_integer
from workbench.errors import ConfigError, UnknownNameError, UsageError, nearest

Layer = TypeVar("Layer", bound=nn.Module)
Norm = Literal["layer", "group"]
USUAL = "; 64 is a usual number"
INPUT_DIMS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}


class GhostBatchNorm(_BatchNorm):
    """Batch norm with statistics from at most `stat_examples` examples of a batch, drawn anew each time.

    Parameters, buffers and their names are those of `torch.nn.BatchNorm1d`, `2d` and `3d`, so that checkpoints fit both ways.
    In training every example is normalised with the mean and the biased variance of the subsample; gradients flow through
    the statistics into the subsample alone, and the running statistics take its mean and unbiased variance, once a batch.
    In evaluation the running statistics normalise; a layer without them takes the first examples, so that nothing is drawn.

    Args:
        num_features: channels.
        stat_examples: examples in a statistic, at most; a batch that has no more is normalised as a whole.
        eps, momentum, affine, track_running_stats: as in torch.
        input_dims: numbers of dimensions that the input may have; () is any from 2 on.

    Raises:
        ConfigError: `stat_examples` is below 1.

    Source: P6.4, P6.6; ghost batch norm is Hoffer et al. 2017 (arXiv:1705.08741).
    """

    def __init__(
        self,
        num_features: int,
        stat_examples: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        input_dims: tuple[int, ...] = (),
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.stat_examples, self.input_dims = check_integer("stat_examples", stat_examples, hint=USUAL), input_dims

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised batch, shape (examples, channels, ...)."""
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        if not by_batch or len(input) <= self.stat_examples:
            return super().forward(input)
        values = self.stat_examples * input[0, 0].numel()
        if values < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {self.stat_examples} statistic example(s)"
            )
        first: Tensor | slice = slice(self.stat_examples)  # an evaluation draws nothing
        sample = input[drawn_examples(len(input), self.stat_examples, input.device) if self.training else first]
        wide = torch.float32 if input.dtype in (torch.bfloat16, torch.float16) else input.dtype
        var, mean = torch.var_mean(sample.to(wide), dim=[0, *range(2, input.dim())], correction=0)
        if self.training and self.running_mean is not None:
            track(self, mean.detach(), var.detach() * (values / (values - 1)))
        return normalise(self, input, mean, var)

    def _check_input_dim(self, input: Tensor) -> None:
        allowed = self.input_dims
        if input.dim() < 2 or (allowed and input.dim() not in allowed):
            raise ValueError(
                f"expected {' or '.join(map(str, allowed)) or 'at least 2'}D input (got {input.dim()}D input)"
            )

    def extra_repr(self) -> str:
        """Return what the printed model says of the layer."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, stat_examples={self.stat_examples}"


def drawn_examples(examples: int, wanted: int, device: torch.device) -> Tensor:
    """Return the places of `wanted` examples, each as likely as any other, in whatever order the batch comes."""
    return torch.rand(examples, device=device).argsort()[:wanted]


def track(layer: _BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    """Let a layer's running statistics take one batch's mean and unbiased variance, each shape (channels,)."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1 / layer.num_batches_tracked if layer.momentum is None else layer.momentum
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.add_(share * (new.to(running.dtype) - running))


def normalise(layer: _BatchNorm, input: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return the input normalised with the given statistics, each shape (channels,), through which gradients flow."""
    shape = (1, -1, *(1 for _ in range(2, input.dim())))
    scale = torch.rsqrt(var + layer.eps)
    centred = input - mean.view(shape)
    if not layer.affine:
        return (centred * scale.view(shape)).to(input.dtype)
    scale = scale * layer.weight
    return torch.addcmul(layer.bias.to(scale.dtype).view(shape), centred, scale.view(shape)).to(input.dtype)


def batch_norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norm layers of a model by name, torch's, ours and the synchronised ones."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for name, layer in found.items():
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ConfigError(
                f"batch norm layer {name!r} ({type(layer).__name__}) does not know its channels yet: pass one batch through the "
                "model first."
            )
    return found


def remember_updates(model: nn.Module, micro_batches: int) -> None:
    """Let running statistics forget in an update of several forward passes what one pass would have them forget.

    A momentum m becomes 1 - (1 - m)^(1 / micro_batches); an average of all batches (momentum None) is one already. Left as it is, a
    batch in 8 pieces would have running statistics of the last few updates alone, and warm ones 8 times as early.

    The model is changed in place.
    """
    for layer in batch_norm_layers(model).values() if micro_batches > 1 else ():
        if layer.momentum is not None:
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / micro_batches)


def plain_name(name: str) -> str:
    """Return the name of a layer or tensor without what DistributedDataParallel and torch.compile put into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def ghost_batch_norm(model: nn.Module, stat_examples: int) -> nn.Module:
    """Return the model with every batch norm layer taking its statistics from at most `stat_examples` examples.

    Layers are exchanged within the model, which is returned unless it is a batch norm layer itself; their parameters and
    buffers stay the same objects, so an optimizer that has them keeps working.

    Raises:
        ConfigError: the number is below 1, the model has no batch norm, or a layer has a `forward` of its own.

    Source: P6.5, P6.6.
    """
    check_integer("stat_examples", stat_examples, hint=USUAL)
    if not batch_norm_layers(model):
        raise ConfigError(
            f"bn_stat_examples={stat_examples}: {type(model).__name__} has no batch norm layer that it could apply to. Leave "
            "it at None."
        )

    def ghost(layer: _BatchNorm) -> nn.Module:
        if isinstance(layer, GhostBatchNorm):
            layer.stat_examples = stat_examples
            return layer
        if type(layer).forward is not _BatchNorm.forward:
            raise ConfigError(
                f"bn_stat_examples={stat_examples}: {type(layer).__name__} has a forward of its own, which decides which "
                "examples its statistics come from. Leave bn_stat_examples at None, or use nn.BatchNorm1d, 2d or 3d."
            )
        dims = next((d for kind, d in INPUT_DIMS.items() if isinstance(layer, kind)), ())
        return like(layer, GhostBatchNorm, stat_examples=stat_examples, input_dims=dims)

    return swap_batch_norm(model, ghost)


def like(layer: _BatchNorm, kind: type[Layer], **attributes: object) -> Layer:
    """Return a layer of another kind with the same parameters, buffers, hooks and settings."""
    new = kind.__new__(kind)
    vars(new).update(vars(layer))
    vars(new).update(attributes)
    return new


def swap_batch_norm(model: nn.Module, make: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """Return the model with every batch norm layer exchanged for what `make` returns; a layer in two places stays one."""
    layers = batch_norm_layers(model)
    for name, layer in layers.items():
        if not type(layer).forward.__module__.startswith(("torch.nn.modules.", "workbench.")):
            raise ConfigError(
                f"{type(layer).__name__} has a forward of its own (layer {name!r}), and what it does beside batch norm would be "
                "lost. Build the model with nn.BatchNorm1d, 2d or 3d and the rest as modules of their own."
            )
    made = {id(layer): make(layer) for layer in layers.values()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return made.get(id(model), model)


def replace_batch_norm(model: nn.Module, norm: Norm, *, max_groups: int = 32, channels_per_group: int = 4) -> nn.Module:
    """Return the model with every batch norm layer replaced by one that normalises each example by itself.

        model = wb.batch_norm.replace(model, "layer")

    "layer" normalises over all channels and places of an example, which is group norm with one group; "group" over groups of
    channels: 8 of 32 channels, 6 of 24, 4 of 16. Channels that cannot be divided so, such as 17 or fewer than 8, make a single
    group, which is layer norm. Scale and shift stay the same parameters, so an optimizer that has them keeps working; running statistics go.

    Args:
        model: changed in place; the returned one differs where it is a batch norm layer itself.
        norm: "layer" or "group".
        max_groups: the number of groups is the largest up to this that divides the channels (32 is what Wu and He 2018,
            arXiv:1803.08494, use).
        channels_per_group: that it has to leave in each: a group of one channel is instance norm (4 is a rule of thumb).

    Raises:
        UnknownNameError: `norm` is neither.
        UsageError: the model has no batch norm, or `max_groups` or `channels_per_group` is below 1.
        ConfigError: a layer has a `forward` of its own.

    Source: P6.1.
    """
    if norm not in ("layer", "group"):
        raise UnknownNameError(f"norm={norm!r} is not known.{nearest(norm, ('layer', 'group'))}")
    for name, given in (("max_groups", max_groups), ("channels_per_group", channels_per_group)):
        check_integer(name, given, error=UsageError)
    if not batch_norm_layers(model):
        raise UsageError(f"{type(model).__name__} has no batch norm layer to replace.")

    def replaced(layer: _BatchNorm) -> nn.Module:
        channels = layer.num_features
        most = 1 if norm == "layer" else min(channels // channels_per_group, max_groups)
        groups = next((g for g in range(most, 0, -1) if channels % g == 0), 1)
        new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)

    return swap_batch_norm(model, replaced)
