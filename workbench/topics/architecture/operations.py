"""What the operations of a traced forward pass are to an audit: weight layers, normalisations, and what changes nothing."""

from __future__ import annotations

import re
from functools import cached_property

from torch import nn

from workbench.topics.architecture.dataflow import Dataflow

__all__ = ["Operations", "additions"]

_PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "matmul", "linear", "convolution", "_convolution", "embedding",
    "_embedding_bag", "_embedding_bag_forward_only", "_trilinear", "mkldnn_rnn_layer", "_cudnn_rnn", "_scaled_mm",
})  # fmt: skip
_NORMS = frozenset({
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_batch_norm_with_update",
    "miopen_batch_norm", "_fused_rms_norm", "batch_norm_elemt",
})  # fmt: skip
_VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "clone",
    "contiguous", "alias", "detach", "_to_copy", "flatten", "unflatten", "native_dropout", "copy", "movedim", "lift_fresh",
    "slice", "select", "split", "split_with_sizes", "unsafe_split", "unbind", "constant_pad_nd", "as_strided", "roll",
})  # fmt: skip
_SCALES = frozenset({"mul", "div", "add", "sub", "neg"})
_POOLS = frozenset({
    "avg_pool2d", "avg_pool1d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool2d_with_indices", "mean",
    "upsample_nearest2d", "upsample_bilinear2d", "upsample_nearest1d", "upsample_linear1d", "pixel_shuffle",
})  # fmt: skip
_POINTWISE = frozenset(
    {"relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "hardtanh", "hardswish", "mish", "softplus"}
)
_ROOTS = frozenset(
    {"rsqrt", "sqrt", "reciprocal", "pow", "add", "clamp", "clamp_min", "maximum", "div", "mul", *_VIEWS}
)
_MOMENTS = frozenset({"mean", "sum", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"})
_NORM_CLASS = re.compile(r"norm(alization)?\d*[dD]?$", re.IGNORECASE)


class Operations:
    """Says of each node of a dataflow what it does; all are cheap to ask.

    Args:
        flow: the forward pass.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self._recurrent = {
            name for name, kind in flow.modules.items() if issubclass(kind, (nn.RNNBase, nn.RNNCellBase))
        }

    def is_weight_layer(self, at: int) -> bool:
        """A product of data with a matrix or kernel of parameters."""
        return at in self._weight_layers

    def weights(self, at: int) -> tuple[str, ...]:
        """Return the names of the matrices or kernels of a weight layer."""
        return self._weight_layers.get(at, ())

    def is_norm(self, at: int) -> bool:
        """A normalisation, or a part of one that is written out."""
        return at in self._norms

    def norm_name(self, at: int) -> str:
        """Return what a person would look for: the module, or the operation and the module that it is called in."""
        node = self.flow.nodes[at]
        if self._is_norm_module(node.module):
            return node.module
        op = node.op.removeprefix("native_") if node.op in _NORMS else "a norm written out"
        return f"{op} in {node.module or 'the model'}"

    def is_recurrent(self, at: int) -> bool:
        """Whether it runs inside a recurrent layer of torch, whose additions in time are no residual connections."""
        return self.flow.nodes[at].module in self._recurrent

    def passes(self, at: int) -> bool:
        """It moves, scales or shifts one data tensor: what begins at zero still does, what is normalised nearly so."""
        op = self.flow.nodes[at].op
        return (op in _VIEWS or op in _SCALES) and len(self.flow.data(at)) == 1

    def is_pointwise(self, at: int) -> bool:
        """An activation function."""
        return self.flow.nodes[at].op in _POINTWISE

    def is_light(self, at: int) -> bool:
        """What a skip connection may do on its way, without being a branch: project, normalise, pool, move or scale."""
        node = self.flow.nodes[at]
        return (
            self.passes(at)
            or self.is_norm(at)
            or node.op in _POOLS
            or (self.is_weight_layer(at) and len(self.flow.data(at)) == 1)
        )

    def back(self, at: int) -> int:
        """Return the first node, from `at` backwards, that does more than to move, scale, shift or gate what it gets."""
        while self.flow.nodes[at].op and not self.is_norm(at):
            ahead = self.flow.data(at)
            if self.passes(at):
                at = ahead[0]
            elif self.flow.nodes[at].op == "mul" and len(ahead) == 2 and self._gated(ahead) is not None:
                at = self._gated(ahead) or 0
            else:
                break
        return at

    def norm_before(self, at: int) -> int | None:
        """Return the norm that gives `at`, through activations too; None where it is not normalised."""
        at = self.back(at)
        while self.is_pointwise(at) and not self.is_norm(at):
            at = self.back(self.flow.data(at)[0])
        return at if self.is_norm(at) else None

    def behind_norm(self, at: int) -> int | None:
        """Return what was normalised to give `at`; None where it is not normalised."""
        norm = self.norm_before(at)
        while norm is not None and self.is_norm(norm):
            norm = min(self.flow.data(norm), default=None)
        return None if norm is None else self.back(norm)

    @cached_property
    def depth(self) -> list[int]:
        """Weight layers on the longest way from the batch to each node, that node included."""
        found: list[int] = []
        for at in range(len(self.flow.nodes)):
            before = max((found[i] for i in self.flow.data(at)), default=0)
            found.append(before + self.is_weight_layer(at))
        return found

    @cached_property
    def norms(self) -> list[str]:
        """Names of the normalisations that ran, in their order, each once."""
        return list(dict.fromkeys(self.norm_name(at) for at in sorted(self._norms)))

    @cached_property
    def _weight_layers(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        seen: set[str] = set()
        for at, node in enumerate(self.flow.nodes):
            if node.op not in _PRODUCTS or node.kind != "data":
                continue
            names = tuple(p.name for p in self.flow.parameters(at) if len(p.shape) > 1)
            if names and not (
                self.is_recurrent(at) and seen.issuperset(names)
            ):  # a recurrent layer is one, however long
                found[at] = names
                seen.update(names)
        return found

    @cached_property
    def _norms(self) -> set[int]:
        nodes = self.flow.nodes
        found = {at for at, node in enumerate(nodes) if node.op in _NORMS and node.kind == "data"}
        for at, node in enumerate(nodes):
            if node.kind == "data" and node.op and self._is_norm_module(node.module):
                found.add(at)
            elif node.kind == "data" and node.op in ("mul", "div") and at not in found:
                found |= self._written_out(at)
        return found

    @cached_property
    def _modules_with_layers(self) -> set[str]:
        inside: set[str] = set()
        for at in self._weight_layers:
            path = self.flow.nodes[at].module
            while path:
                inside.add(path)
                path = path.rpartition(".")[0]
        return inside

    def _is_norm_module(self, name: str) -> bool:
        kind = self.flow.modules.get(name)
        return kind is not None and bool(_NORM_CLASS.search(kind.__name__)) and name not in self._modules_with_layers

    def _written_out(self, at: int) -> set[int]:
        """Return the parts of x / sqrt(mean(x^2) + eps) and its kin, where `at` is the division; empty where it is none."""
        ahead = self.flow.data(at)
        for whole, other in ((a, b) for a in ahead for b in ahead if a != b):
            chain, rooted, moment = [at], False, other
            while self.flow.nodes[moment].op in _ROOTS and len(self.flow.data(moment)) == 1:
                rooted |= self.flow.nodes[moment].op in ("rsqrt", "sqrt", "pow")
                chain.append(moment)
                moment = self.flow.data(moment)[0]
            op = self.flow.nodes[moment].op
            if op not in _MOMENTS or not (rooted or op in ("std", "std_mean", "linalg_vector_norm", "norm")):
                continue
            chain.append(moment)
            origin = self.flow.data(moment)[0]
            if self.flow.nodes[origin].op in ("pow", "mul", "square", "abs") and len(self.flow.data(origin)) == 1:
                chain.append(origin)
                origin = self.flow.data(origin)[0]
            (one, parts), (two, others) = self._centred(whole), self._centred(origin)
            if one == two:
                return {*chain, *parts, *others}
        return set()

    def _centred(self, at: int) -> tuple[int, set[int]]:
        """Return what a mean was taken off, or what was cast, to give `at`, and the nodes that did so."""
        parts: set[int] = set()
        while True:
            node, ahead = self.flow.nodes[at], self.flow.data(at)
            means = [i for i in ahead if self.flow.nodes[i].op in _MOMENTS]
            if node.op == "sub" and len(ahead) == 2 and len(means) == 1:
                parts |= {at, means[0]}
                at = next(i for i in ahead if i != means[0])
            elif node.op in ("_to_copy", "view", "clone") and ahead:
                parts.add(at)
                at = ahead[0]
            else:
                return at, parts

    def _gated(self, ahead: list[int]) -> int | None:
        """Return which of two factors the other was made of, as in x * sigmoid(f(x)); None for neither."""
        early, late = sorted(ahead)
        seen, todo = {late}, [late]
        while todo:
            for i in self.flow.data(todo.pop()):
                if i == early:
                    return early
                if i > early and i not in seen:
                    seen.add(i)
                    todo.append(i)
        return None


def additions(flow: Dataflow) -> list[int]:
    """Return the nodes that add two different data tensors."""
    return [at for at, node in enumerate(flow.nodes) if node.sizes and len(flow.data(at)) == 2]
