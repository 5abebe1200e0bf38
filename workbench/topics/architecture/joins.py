"""`find_joins`: the residual connections of a traced forward pass, where the norm stands in each, and what begins at zero.

A join adds two tensors of which one is a function of the other with a weight layer in it (an identity skip), or both
are functions of a third, one of them a single linear projection (a projection skip). Concatenation and multiplication
are no joins, nor are sums of equals, such as token and position embeddings. A recurrence that is written out step by step does look
like joins in time; one of torch's recurrent layers does not.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import nn

from workbench.topics.architecture.dataflow import Dataflow

NormPlace = Literal["branch", "after_add", "pre", "inside", "none"]
Skip = Literal["identity", "projection"]

TRIES = 64  # rule of thumb: common origins of two tensors that are looked at; the right one is nearly always among the last two
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
_ERRORS = frozenset({"pow", "square", "abs", "linalg_vector_norm"})
_NORM_CLASS = re.compile(r"norm(alization)?\d*[dD]?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Join:
    """One residual addition."""

    at: int  # its place in the graph
    module: str  # that adds
    skip: Skip  # how the skip connection gets there
    placement: NormPlace  # "branch" x + Norm(f(x)), "after_add" Norm(x + f(x)), "pre" x + f(Norm(x)), "inside" elsewhere in f, "none"
    norm: str | None  # which one
    layers: int  # weight layers on the longest way through the branch
    last_weight: str | None  # of the branch's last layer, as far as it has one
    zero_parameters: tuple[str, ...]  # parameters of zeros that end the branch
    skip_rms: float  # root mean square of what is added to
    branch_rms: float  # of what is added; 0 is a branch that begins at zero
    sum_rms: float


class _Found(NamedTuple):
    at: int
    origin: int
    skip: int
    branch: int
    kind: Skip
    region: frozenset[int]


def find_joins(flow: Dataflow) -> list[Join]:
    """Return the residual additions in the order in which they ran."""
    ops = Operations(flow)
    added = [at for at, node in enumerate(flow.nodes) if node.sizes and len(flow.data(at)) == 2]
    found = [join for at in added if not ops.is_recurrent(at) and (join := _find(flow, ops, at))]
    carried = {ops.behind_norm(join.origin) for join in found if join.kind == "identity"}
    return [_described(flow, ops, join, carried=join.at in carried) for join in found]


def _find(flow: Dataflow, ops: Operations, at: int) -> _Found | None:
    """Look backwards from both summands for the tensor that both were made of."""
    one, other = flow.data(at)
    users = {flow.nodes[i].op for i in flow.users.get(at, [])}
    error = flow.nodes[at].op in ("sub", "rsub") and users and users <= _ERRORS  # a difference that is only squared
    if len(flow.nodes[at].shape) == 0 or error:
        return None
    marks, ahead = {one: 1, other: 2}, [-one, -other]
    heapq.heapify(ahead)
    tries = 0
    while ahead and tries < TRIES:
        here = -heapq.heappop(ahead)
        if marks[here] == 3:
            tries += 1
            found = _at_origin(flow, ops, at, here, marks)
            if found is not None or not ahead:  # with nothing left, all ways lead through this one
                return found
        for i in flow.data(here):
            if i not in marks:
                heapq.heappush(ahead, -i)
            marks[i] = marks.get(i, 0) | marks[here]
    return None


def _at_origin(flow: Dataflow, ops: Operations, at: int, origin: int, marks: dict[int, int]) -> _Found | None:
    fewest, light = {origin: 0}, {origin}
    for here in sorted(i for i in marks if i > origin):
        before = [i for i in flow.data(here) if i in fewest]
        if before:
            fewest[here] = min(fewest[i] for i in before) + (here in ops.weight_layers)
            if ops.is_light(here) and light.issuperset(before):
                light.add(here)
    one, other = flow.data(at)
    for skip, branch in ((one, other), (other, one)):
        kind: Skip = "identity" if fewest[skip] == 0 else "projection"
        projected = fewest[skip] == 1 and skip in light and fewest[branch] > 1
        if (fewest[skip] == 0 and fewest[branch] > 0) or projected:
            region, todo = {branch}, [branch]  # the nodes on the ways from the origin to the branch
            while todo:
                ahead = [i for i in flow.data(todo.pop()) if i in fewest and i not in region]
                region.update(ahead)
                todo += ahead
            return _Found(at, origin, skip, branch, kind, frozenset(region))
    return None


def _described(flow: Dataflow, ops: Operations, join: _Found, *, carried: bool) -> Join:
    last = ops.back(join.branch)
    region = sorted(join.region - {join.origin})
    inside = [at for at in region if at in ops.normed]
    after = _norms_after(flow, ops, join.at)
    placement: NormPlace
    if after and carried:
        placement, norm = "after_add", after[0]
    elif last in ops.normed:
        placement, norm = "branch", last
    elif inside and _begins_with_norm(flow, ops, join, region):
        placement, norm = "pre", inside[0]
    elif after:
        placement, norm = "after_add", after[0]
    elif join.kind == "projection" and (before := ops.norm_before(join.origin)) is not None:
        placement, norm = "pre", before  # one norm for branch and projection
    else:
        placement, norm = ("inside", inside[0]) if inside else ("none", -1)
    layers, zeros = _end_of_branch(flow, ops, join)
    node = flow.nodes[join.at]
    sizes = dict(zip((*(i for i in node.inputs if flow.nodes[i].kind == "data"), -1), node.sizes, strict=True))
    return Join(
        at=join.at, module=node.module, skip=join.kind, placement=placement, norm=None if norm < 0 else ops.norm_name(norm),
        layers=ops.depth(region)[join.branch], last_weight=layers[-1] if layers else None, zero_parameters=zeros,
        skip_rms=sizes[join.skip], branch_rms=sizes[join.branch], sum_rms=sizes[-1],
    )  # fmt: skip


def _begins_with_norm(flow: Dataflow, ops: Operations, join: _Found, region: list[int]) -> bool:
    """Whether every way into the branch's first weight layers leads through a norm."""
    bare = {join.origin}
    for at in region:
        if bare.isdisjoint(flow.data(at)) or at in ops.normed:
            continue
        if at in ops.weight_layers:
            return False
        bare.add(at)
    return True


def _norms_after(flow: Dataflow, ops: Operations, at: int) -> list[int]:
    """Return the norms that take a sum, where nothing else takes it."""
    found, todo = [], [at]
    while todo:
        here = todo.pop()
        for user in flow.users.get(here, []):
            if user in ops.normed:
                found.append(user)
            elif ops.passes(user):
                todo.append(user)
            else:
                return []
    return sorted(found)


def _end_of_branch(flow: Dataflow, ops: Operations, join: _Found) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the weights of the branch's last layers, and which parameters from there on hold nothing but zeros."""
    layers: list[str] = []
    zeros: dict[str, None] = {}
    seen, todo = {join.branch}, [join.branch]
    while todo:
        at = todo.pop()
        node = flow.nodes[at]
        without = ("bias", "self") if node.op in ("addmm", "baddbmm", "addbmm", "addmv") else ("bias",)
        if node.op not in ("add", "sub"):
            zeros |= dict.fromkeys(p.name for p in flow.parameters(at, without=without) if p.zero)
        if at in ops.weight_layers:
            layers += ops.weight_layers[at]
            continue
        for i in flow.data(at):
            if i in join.region and i != join.origin and i not in seen:
                seen.add(i)
                todo.append(i)
    return tuple(layers), tuple(zeros)


class Operations:
    """Says of each node of a dataflow what it does; all are cheap to ask."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        recurrent = (nn.RNNBase, nn.RNNCellBase)
        self._recurrent = {name for name, kind in flow.modules.items() if issubclass(kind, recurrent)}

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

    def is_light(self, at: int) -> bool:
        """What a skip connection may do on its way, without being a branch: project, normalise, pool, move or scale."""
        projects = (at in self.weight_layers) and len(self.flow.data(at)) == 1
        return self.passes(at) or at in self.normed or self.flow.nodes[at].op in _POOLS or projects

    def back(self, at: int) -> int:
        """Return the first node, from `at` backwards, that does more than to move, scale, shift or gate what it gets."""
        while self.flow.nodes[at].op and at not in self.normed:
            ahead = self.flow.data(at)
            if self.passes(at):
                at = ahead[0]
            elif self.flow.nodes[at].op == "mul" and len(ahead) == 2 and (gated := self._gated(ahead)) is not None:
                at = gated
            else:
                break
        return at

    def norm_before(self, at: int) -> int | None:
        """Return the norm that gives `at`, through activations too; None where it is not normalised."""
        at = self.back(at)
        while self.flow.nodes[at].op in _POINTWISE and at not in self.normed:
            at = self.back(self.flow.data(at)[0])
        return at if at in self.normed else None

    def behind_norm(self, at: int) -> int | None:
        """Return what was normalised to give `at`; None where it is not normalised."""
        norm = self.norm_before(at)
        while norm is not None and norm in self.normed:
            norm = min(self.flow.data(norm), default=None)
        return None if norm is None else self.back(norm)

    def depth(self, places: Iterable[int]) -> dict[int, int]:
        """Return the weight layers on the longest way through `places`, in order, to each of them, that one included."""
        found: dict[int, int] = {}
        for at in places:
            before = max((found[i] for i in self.flow.data(at) if i in found), default=0)
            found[at] = before + (at in self.weight_layers)
        return found

    @cached_property
    def norms(self) -> list[str]:
        """Names of the normalisations that ran, in their order, each once."""
        return list(dict.fromkeys(self.norm_name(at) for at in sorted(self.normed)))

    @cached_property
    def weight_layers(self) -> dict[int, tuple[str, ...]]:
        """The products of data with matrices or kernels of parameters, with the names of these."""
        found: dict[int, tuple[str, ...]] = {}
        seen: set[str] = set()
        for at, node in enumerate(self.flow.nodes):
            if node.op not in _PRODUCTS or node.kind != "data":
                continue
            names = tuple(p.name for p in self.flow.parameters(at) if len(p.shape) > 1)
            known = self.is_recurrent(at) and seen.issuperset(names)  # a recurrent layer is one, however long
            if names and not known:
                found[at] = names
                seen.update(names)
        return found

    @cached_property
    def normed(self) -> set[int]:
        """The normalisations, and the parts of those that are written out."""
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
        for at in self.weight_layers:
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
