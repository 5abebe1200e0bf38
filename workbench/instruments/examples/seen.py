"""`Examples`: the first examples that a loop trains on, in their order and with their targets, and those that it evaluates on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.instruments.losses.ranges import end_of
from workbench.instruments.order import alone_of
from workbench.instruments.taps import TAPS

ROWS, KEPT, NUMBERS = 20_000, 2000, 4_000_000
"""Examples of either kind that are told apart by a digest, those that are kept, and numbers of their inputs at most (rules of thumb)."""
WIDTH, TARGETS = 4096, 64
"""Numbers of one example's inputs, and of its target, that are kept: of a picture every second place, or fewer (rules of thumb)."""
_ROWS, _NUMBERS, _FEWEST = 2048, 512, 4
"""Examples of one pass, and numbers of one example, that are digested; those of fewer are no content, but the number of a user, say (rules of thumb)."""
_CLEARLY = 4
"""Times as many numbers of an example as any other input has, from which on one stands for them all (rule of thumb)."""
_OUTPUTS, _WHOLE, _LOSSES = 256, 2**20, 200


class Source(NamedTuple):
    """Where a batch comes from: a loader, or the line that gives the model batches of that size; `epoch` is the number of the pass through it."""

    loader: int | None
    epoch: int
    update: int
    size: int
    line: str

    @property
    def place(self) -> tuple[Any, ...]:
        """What the batches of one split have in common."""
        return (self.loader, self.size if self.loader is None else 0, self.line)


@dataclass
class Batch:
    """What one forward pass was given; `inputs` and `target` where they are kept, a row for each example."""

    source: Source
    digests: Tensor | None
    inputs: Tensor | None
    several: bool  # whether the model takes others, none of which clearly holds most
    beside: bool = False  # whether it takes others at all
    measures: bool = True  # whether it is surely an evaluation, not a choice of the program's own
    stride: int = 1  # of the examples whose inputs are kept
    target: Tensor | None = None
    drawn: Tensor | None = field(default=None, repr=False)  # what the loader gave with it

    @property
    def answers(self) -> Tensor | None:
        """The target that the loss was given or, where no loss function of torch was seen, the other part of what was drawn."""
        found = self.drawn if self.target is None else self.target
        return None if found is None or self.inputs is None else found[:: self.stride][: len(self.inputs)]


class Examples:
    """Keeps a bounded sample of the inputs that a model is given in training and in evaluation, with the targets that loss functions are given for them.

    Inputs that come out of a network are none, tokens that it goes on with one by one among them; neither are targets where a network ran
    without gradient on as many rows just before, as a teacher does or a target network. Nothing waits for a device.
    """

    def __init__(self) -> None:
        self.trained: list[Batch] = []
        self.evaluated: list[Batch] = []
        self._kinds: set[type[nn.Module]] = set()
        self._rows, self._held, self._numbers = [0, 0], [0, 0], [0, 0]
        self._now: Batch | None = None  # the last pass, while its loss may come
        self._tokens: tuple[int, ...] | None = None  # shape of what the last pass without gradient was given
        self._generates = False
        self._first: dict[Any, int] = {}  # the update before the first evaluation of a place
        self._asked: set[int] = set()  # rows of passes without gradient whose outputs were not compared with anything
        self.sizes: tuple[Tensor, Tensor] | None = None  # first outputs and targets of a regression
        self.criterion: dict[str, Any] = {}  # the first outputs that are trained on, and their loss function
        self.spreads: list[tuple[int, Tensor, Tensor]] = []  # update, spread between examples, size of trained outputs
        self.losses: list[tuple[int, Tensor]] = []  # of evaluations, with the update
        self._loss: Any = None
        self._answered: tuple[weakref.ref[Tensor], str, int, Batch] | None = None
        self.alone: bool | None = None  # whether the loss function's value is what `backward` is called on

    @property
    def open(self) -> bool:
        """Whether more is to be seen of evaluations."""
        return self._rows[1] < ROWS

    def entered(
        self, module: nn.Module, given: Sequence[Tensor], batch: Sequence[Tensor], source: Source, *, trains: bool
    ) -> None:
        """Take in a forward pass of a whole model on these tensors; `batch` is what was drawn for it."""
        before, self._now, side = self._now, None, int(not trains)
        if self._generates_on(given, before, trains=trains):
            return
        if not given or not given[0].dim() or given[0].grad_fn is not None or self._rows[side] >= ROWS:
            return
        if trains:
            self._kinds.add(type(module))
        elif type(module) not in self._kinds:
            return
        size = len(given[0])
        if not trains:
            self._asked.add(size)
        found = self._batch(given, size, source, side)
        others = [part for part in batch if part.dim() and len(part) == size and part.shape != given[0].shape]
        if len(batch) == 2 and len(others) == 1 and batch[0] is not others[0]:
            found.drawn = _targets(others[0], size)
        self._now = found
        if trains:
            self.trained.append(found)
        else:
            found.measures = not module.training
            self.evaluated.append(found)
            if self._held[1] > KEPT or self._numbers[1] > NUMBERS:
                self._thin_out()
        self._rows[side] += min(size, _ROWS) if found.digests is None else len(found.digests)

    def _generates_on(self, given: Sequence[Tensor], before: Batch | None, *, trains: bool) -> bool:
        """Tell whether a pass goes on with the tokens of the one before, by one place or with the new one alone; then that one is no example either."""
        tokens = not trains and bool(given) and given[0].dim() == 2 and not given[0].is_floating_point()
        last, self._tokens = self._tokens, tuple(given[0].shape) if tokens else None
        if last is None or self._tokens == last:  # as long again where a model sees no more
            self._generates = self._generates and last is not None
            return self._generates
        self._generates = self._tokens in ((last[0], last[1] + 1), (last[0], 1))
        if self._generates and self.evaluated and self.evaluated[-1] is before:
            self.evaluated.pop()
        return self._generates

    def _batch(self, given: Sequence[Tensor], size: int, source: Source, side: int) -> Batch:
        try:
            told = digests(given)
        except (RuntimeError, TypeError):  # of tensors that are no plain ones
            told = torch.zeros(0)
        inputs = None
        first = self._first.setdefault(source.place, source.update) == source.update
        wanted = first if side else (self._held[0] < KEPT and self._numbers[0] < NUMBERS)
        rows = [part for part in given if part.dim() and len(part) == size]
        most = max(rows, key=Tensor.numel)
        clear = all(_CLEARLY * part.numel() <= most.numel() for part in rows if part is not most)
        main = most if clear else given[0]
        if wanted and type(main) is Tensor and main.layout is torch.strided and not main.is_complex():
            inputs = _inputs(main, KEPT - self._held[side] if side == 0 else KEPT)
            self._held[side] += len(inputs)
            self._numbers[side] += inputs.numel()
        return Batch(source, told if len(told) else None, inputs, several=not clear, beside=len(rows) > 1)

    def _thin_out(self) -> None:
        """Keep the inputs of every second example of evaluations, so that they stay spread over all."""
        odd = False
        for batch in self.evaluated:
            if batch.inputs is not None and len(batch.inputs) > 1:
                batch.inputs, batch.stride = batch.inputs[::2].clone(), 2 * batch.stride
            elif batch.inputs is not None:
                batch.inputs, odd = None if odd else batch.inputs, not odd
        self._held[1] = sum(len(b.inputs) for b in self.evaluated if b.inputs is not None)
        self._numbers[1] = sum(b.inputs.numel() for b in self.evaluated if b.inputs is not None)

    def drew(self) -> None:
        """Take in that a batch is drawn: passes without gradient that came before gave no targets for it."""
        self._asked.clear()
        self._tokens = None

    def compared(self, name: str, outputs: Any, target: Any, loss: Any, update: int) -> None:
        """Take in a call of a loss function, or of another that is no end of the pass: a dropout, a pair of hidden values."""
        if type(target) is not Tensor or target.requires_grad or not isinstance(outputs, Tensor):
            return
        regresses = name.endswith(("l1_loss", "mse_loss", "huber_loss")) and outputs.numel() == target.numel() > 0
        if outputs.requires_grad and regresses and not self.sizes and target.dim():
            self.sizes = outputs.detach()[:_OUTPUTS].clone(), target.detach()[:_OUTPUTS].clone()
        now, self._now = self._now, None
        if now is None:
            self._compared_again(name, outputs, target)
            return
        size = now.source.size
        if not outputs.requires_grad:
            self._asked.discard(size)
            now.measures = True
            if isinstance(loss, Tensor) and loss.numel() == 1 and len(self.losses) < _LOSSES:
                self.losses.append((update, loss.detach()))
        now.drawn = None
        if size not in self._asked and target.dim() and target.numel() % size == 0 and len(outputs) % size == 0:
            now.target = _targets(target, size)
        if outputs.requires_grad:
            self._asked.clear()
            self._loss = loss
            self._answered = (weakref.ref(outputs), name, target.data_ptr(), now)
            if not self.criterion and len(outputs) == len(target) > 0:
                rows = len(outputs) if outputs.numel() <= _WHOLE else _OUTPUTS
                some = {"outputs": outputs.detach()[:rows].clone(), "target": target.detach()[:rows].clone()}
                value = (
                    loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 and rows == len(outputs) else None
                )
                head, span = end_of(outputs, values=False, saved=not TAPS.hooked)
                self.criterion = {"name": name, "head": head, "span": span, "loss": value, **some}
            due = update >= 2 * self.spreads[-1][0] + 1 if self.spreads else bool(self.criterion)
            if due and len(outputs) > 1 and name == self.criterion["name"]:
                values = outputs.detach()[:_OUTPUTS].reshape(len(outputs[:_OUTPUTS]), -1).float()
                away = values - values.mean(0)
                self.spreads.append((update, away.square().mean().sqrt(), values.square().mean().sqrt()))

    def _compared_again(self, name: str, outputs: Tensor, target: Tensor) -> None:
        """Take in a second call on outputs: with other classes its inputs are mixed ones, as mixup and CutMix make them, and have no one target."""
        if self._answered is not None and not target.is_floating_point():
            known, before, place, batch = self._answered
            if known() is outputs and name == before and target.data_ptr() != place:
                batch.target = batch.drawn = None

    def trained_on(self, losses: Any) -> None:
        """Take in a backward pass."""
        root = alone_of(losses)
        if self._loss is not None and self.alone is not False:
            self.alone = isinstance(root, Tensor) and root.grad_fn is self._loss.grad_fn
        self._loss = None


def _inputs(given: Tensor, most: int) -> Tensor:
    """Return a copy of the inputs of some examples, evenly thinned out along the longest axes where one has too many numbers."""
    rows = given.detach()[:most]
    rows = rows[:, None] if rows.dim() == 1 else rows
    while rows[:1].numel() > WIDTH:
        axis = max(range(1, rows.dim()), key=lambda k: rows.shape[k])
        rows = rows[(slice(None),) * axis + (slice(None, None, 2),)]
    return rows.clone()


def _targets(given: Tensor, size: int) -> Tensor:
    return given.detach().reshape(size, -1)[:, :TARGETS].clone()


def digests(given: Sequence[Tensor]) -> Tensor:
    """Return one number for each example of a batch, of all tensors that have a row for each; 0 where all numbers of one are the same; none where an example has few numbers."""
    size = len(given[0]) if given and given[0].dim() else 0
    parts = []
    for part in (each for each in given if each.dim() and len(each) == size > 1 and not each.is_complex()):
        rows = part.detach()[:_ROWS].reshape(min(size, _ROWS), -1)
        rows = rows[:, :: max(-(-rows.shape[1] // _NUMBERS), 1)]
        parts.append((rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows).long())
    bits = torch.cat([part.to(parts[0].device) for part in parts], 1) if parts else torch.zeros(0, 0)
    if bits.shape[1] < _FEWEST:
        return torch.zeros(0)
    places = [torch.arange(part.shape[1], device=bits.device) + k * _NUMBERS + 1 for k, part in enumerate(parts)]
    odd = torch.cat(places) * -7046029254386353131  # wraps around
    return (bits * (odd ^ (odd >> 31)) * (bits != bits[:, :1]).any(1, keepdim=True)).sum(1)


def in_rows(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what a model is given, inputs before labels and numbers of one place, which `model(**batch)` may have first.

    Tokens that stand one after the other beside the places where examples begin, as `nn.EmbeddingBag` takes them, get a row for each example.
    """
    flat = len(given) > 1 and all(part.dim() == 1 and part.is_cpu and part.dtype == torch.int64 for part in given[:2])
    if not flat or not 1 < len(given[1]) < len(given[0]):
        return tuple(sorted(given, key=lambda part: part.dim() < 2))
    begins = [*given[1].tolist(), len(given[0])]
    if begins[0] or sorted(begins) != begins:
        return given
    return (nn.utils.rnn.pad_sequence(list(given[0].tensor_split(begins[1:-1])), batch_first=True), *given[2:])
