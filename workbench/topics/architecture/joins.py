"""`find_joins`: the residual connections of a traced forward pass, where the norm stands in each, and what begins at zero.

A join adds two tensors of which one is a function of the other with a weight layer in it (an identity skip), or both
are functions of a third, one of them a single linear projection (a projection skip). Concatenation and multiplication
are no joins, nor are sums of equals, such as token and position embeddings. A recurrence that is written out step by step does look
like joins in time; one of torch's recurrent layers does not.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple

from workbench.topics.architecture.dataflow import Dataflow
from workbench.topics.architecture.operations import Operations, additions

__all__ = ["Join", "NormPlace", "Skip", "find_joins"]

NormPlace = Literal["branch", "after_add", "pre", "inside", "none"]
Skip = Literal["identity", "projection"]

TRIES = 64  # rule of thumb: common origins of two tensors that are looked at; the right one is nearly always among the last two


@dataclass(frozen=True, kw_only=True)
class Join:
    """One residual addition.

    Attributes:
        at: its place in the graph.
        module: the module that adds.
        skip: how the skip connection gets there.
        placement: of the norm: "branch" x + Norm(f(x)), "after_add" Norm(x + f(x)), "pre" x + f(Norm(x)), "inside" elsewhere in
            f, "none".
        norm: which one, None without.
        layers: weight layers on the longest way through the branch.
        last_weight: weights of the branch's last layer, as far as it has one.
        zero_parameters: parameters of zeros that end the branch.
        skip_rms: root mean square of what is added to.
        branch_rms: of what is added; 0 is a branch that begins at zero.
        sum_rms: of the sum.
    """

    at: int
    module: str
    skip: Skip
    placement: NormPlace
    norm: str | None
    layers: int
    last_weight: str | None
    zero_parameters: tuple[str, ...]
    skip_rms: float
    branch_rms: float
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
    found = [join for at in additions(flow) if not ops.is_recurrent(at) for join in [_find(flow, ops, at)] if join]
    carried = {ops.behind_norm(join.origin) for join in found if join.kind == "identity"}
    return [_described(flow, ops, join, carried=join.at in carried) for join in found]


def _find(flow: Dataflow, ops: Operations, at: int) -> _Found | None:
    """Look backwards from both summands for the tensor that both were made of."""
    one, other = flow.data(at)
    if len(flow.nodes[at].shape) == 0 or _is_error(flow, at):
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
            fewest[here] = min(fewest[i] for i in before) + ops.is_weight_layer(here)
            if ops.is_light(here) and light.issuperset(before):
                light.add(here)
    one, other = flow.data(at)
    for skip, branch in ((one, other), (other, one)):
        kind: Skip = "identity" if fewest[skip] == 0 else "projection"
        projected = fewest[skip] == 1 and skip in light and fewest[branch] > 1
        if (fewest[skip] == 0 and fewest[branch] > 0) or projected:
            return _Found(at, origin, skip, branch, kind, _between(flow, branch, frozenset(fewest)))
    return None


def _between(flow: Dataflow, branch: int, reached: frozenset[int]) -> frozenset[int]:
    """Return the nodes on the ways to `branch` among those that the origin reaches."""
    seen, todo = {branch}, [branch]
    while todo:
        for i in flow.data(todo.pop()):
            if i in reached and i not in seen:
                seen.add(i)
                todo.append(i)
    return frozenset(seen)


def _is_error(flow: Dataflow, at: int) -> bool:
    """Whether a difference is only squared, as the error of a reconstruction is, and goes no further."""
    if flow.nodes[at].op not in ("sub", "rsub"):
        return False
    users = {flow.nodes[i].op for i in flow.users.get(at, [])}
    return bool(users) and users <= {"pow", "square", "abs", "linalg_vector_norm"}


def _described(flow: Dataflow, ops: Operations, join: _Found, *, carried: bool) -> Join:
    last = ops.back(join.branch)
    region = sorted(join.region - {join.origin})
    inside = [at for at in region if ops.is_norm(at)]
    after = _norms_after(flow, ops, join.at)
    placement: NormPlace
    if after and carried:
        placement, norm = "after_add", after[0]
    elif ops.is_norm(last):
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
    depth = {join.origin: 0}
    for at in region:
        depth[at] = max((depth[i] for i in flow.data(at) if i in depth), default=0) + ops.is_weight_layer(at)
    sizes = dict(zip((*(i for i in flow.nodes[join.at].inputs if flow.nodes[i].kind == "data"), -1), flow.nodes[join.at].sizes, strict=True))  # fmt: skip
    return Join(
        at=join.at,
        module=flow.nodes[join.at].module,
        skip=join.kind,
        placement=placement,
        norm=None if norm < 0 else ops.norm_name(norm),
        layers=depth[join.branch],
        last_weight=layers[-1] if layers else None,
        zero_parameters=zeros,
        skip_rms=sizes[join.skip],
        branch_rms=sizes[join.branch],
        sum_rms=sizes[-1],
    )


def _begins_with_norm(flow: Dataflow, ops: Operations, join: _Found, region: list[int]) -> bool:
    """Whether every way into the branch's first weight layers leads through a norm."""
    bare = {join.origin}
    for at in region:
        if bare.isdisjoint(flow.data(at)) or ops.is_norm(at):
            continue
        if ops.is_weight_layer(at):
            return False
        bare.add(at)
    return True


def _norms_after(flow: Dataflow, ops: Operations, at: int) -> list[int]:
    """Return the norms that take a sum, where nothing else takes it."""
    found, todo = [], [at]
    while todo:
        here = todo.pop()
        for user in flow.users.get(here, []):
            if ops.is_norm(user):
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
        if ops.is_weight_layer(at):
            layers += ops.weights(at)
            continue
        for i in flow.data(at):
            if i in join.region and i != join.origin and i not in seen:
                seen.add(i)
                todo.append(i)
    return tuple(layers), tuple(zeros)
