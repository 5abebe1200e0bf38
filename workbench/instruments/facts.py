"""`LoopFacts`: what a loop does beside its numbers, as JSON values that `topics/loop` judges."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.batches import Batches, Draws
from workbench.instruments.caller import own_line
from workbench.instruments.conversions import CRITERIA, DIFFERENCE, Conversions
from workbench.instruments.examples.pairs import Pairs
from workbench.instruments.examples.seen import Examples, Source, in_rows
from workbench.instruments.examples.stored import Stored
from workbench.instruments.examples.tokens import Tokens
from workbench.instruments.examples.told import told
from workbench.instruments.losses.answers import Answers, Others
from workbench.instruments.losses.attention import WINDOW, Attention
from workbench.instruments.losses.classes import Classes, Recall
from workbench.instruments.losses.criteria import Criteria
from workbench.instruments.losses.graphs import Graphs, behind_weights
from workbench.instruments.losses.logits import Logits
from workbench.instruments.losses.pending import identities
from workbench.instruments.losses.surrogates import MOST_NODES, Surrogates
from workbench.instruments.losses.units import Units
from workbench.instruments.losses.written import Reproduced, Written
from workbench.instruments.modes import Modes
from workbench.instruments.order import Order
from workbench.instruments.parameters import Parameters
from workbench.instruments.surroundings import Loaders, Schedulers, first_tensor, tensors
from workbench.instruments.taps import TAPS
from workbench.instruments.workers import Workers

EVERY = 50
MEMORY_EVERY = 10
"""Updates between two looks at the process's memory, twenty times as many after the window."""


class LoopFacts:
    """Collects facts of a loop; `to_dict` gives them at any time."""

    def __init__(self, models: Sequence[nn.Module], attention: Attention) -> None:
        self.attention = attention
        self.order, self.modes, self.parameters = Order(), Modes(models), Parameters()
        self.schedulers, self.loaders, self.criteria, self.graphs = Schedulers(), Loaders(), Criteria(), Graphs()
        self.batches, self.workers, self.conversions, self.answers = Batches(), Workers(), Conversions(), Answers()
        self.examples, self.surrogates, self.logits, self.units = Examples(), Surrogates(), Logits(), Units()
        self.stored, self.pairs, self.tokens = Stored(), Pairs(), Tokens()
        self.judged = True  # whether the examples are looked into at the end
        self.classes, self.recall, self.written, self.others = Classes(), Recall(), Written(), Others()
        self.survival, self.reproduced = self.parameters.survival, Reproduced()
        self.updates, self.ended, self.given = 0, False, 0
        self.strangers: dict[str, dict[str, Any]] = {}  # steps of optimizers that are not observed
        self._kinds = weakref.WeakKeyDictionary[Optimizer, str]()
        self._mine: set[int] = set()  # parameters of those that are
        self.near = True  # whether everything is looked at
        self._nears = 0
        self._drawn: Any = None  # since the last update
        self._called = False  # whether a loss function of torch was seen to be called since the last backward pass
        self._next_look: dict[int, int] = {}  # at the parameters of each optimizer
        self._memory: list[tuple[int, int]] = []
        self._next_memory = MEMORY_EVERY

    def token(self, name: str) -> None:
        """Take in that a call was made."""
        self.order.add(name, line=self.near)

    def drew(self, loader: Any, draws: Draws, batch: Any, examples: list[Any] | None) -> None:  # noqa: D102
        self._drawn = batch if self.near or self.examples.open else None
        if self.attention.awake:
            self.order.add("draw", line=False)
        self.loaders.drew(loader)
        if self.modes.passes:
            self.modes.drew()
        self.examples.drew()
        self.pairs.drew()
        self.batches.drew(draws, examples)

    def loader_begins(self, loader: Any, states: Tensor | None) -> None:  # noqa: D102
        self.loaders.begins(loader)
        self.workers.begins(loader, states)
        self.stored.begins(loader)

    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: D102
        if self.near:
            self.modes.statistics.entered(module, args)
        self.modes.weight = self.attention.weight if self.attention.awake else 0
        kind = self.modes.entered(module, args, self.loaders.last)
        if kind is not None:
            self.order.add(kind, line=self.near)
        if kind == "forward":
            if self.attention.awake:
                self.logits.begin(module, args, self.updates)
            first = first_tensor(args)
            self.batches.fed(first)
            self.reproduced.given = first
            if self.near:
                self.loaders.fed(first if first is not None else tuple(tensors(self._drawn)))  # model(**batch)
        elif kind == "evaluate":
            self.batches.evaluated()
        sampled = (kind == "evaluate" and self.examples.open) or (kind is not None and self.near)
        if sampled or (kind is not None and self.attention.awake):
            drawn = self.loaders.last if self.loaders.drawn() else None  # since the last backward pass
            given, epoch = in_rows(tuple(tensors(args))), self.loaders.row(drawn).get("number", 0)
            if self.judged and drawn is not None:
                self.pairs.entered(given, epoch, self.updates, trains=kind == "forward")
        if sampled:
            batch = tuple(tensors(self._drawn)) if drawn is not None else ()
            given = given or batch
            size = len(given[0]) if given and given[0].dim() else 0
            line = own_line() if kind == "evaluate" else ""
            source = Source(drawn, epoch, self.updates, size, line)
            self.examples.entered(module, given, batch, source, trains=kind == "forward")

    def compared(self, name: str, inputs: Any, target: Any, loss: Any) -> None:  # noqa: D102
        if not torch.is_grad_enabled() and name in ("dropout", *CRITERIA):
            (self.modes.dropped if name == "dropout" else self.modes.measured)()
        if name == "eval":
            self.modes.switched(target)
        elif name in ("seed", "manual_seed"):
            self.loaders.seeded(self.updates)
        elif self.near and name == "multinomial":
            self.surrogates.drew(target)
        elif self.near and name == DIFFERENCE and inputs.shape == target.shape:
            self.written.differs(inputs, target, loss)
        elif self.near:
            self.criteria.compared(name, inputs, target, loss)
            if name == "kl_div":  # whose targets are another model's
                return
            self._called = self._called or (name in CRITERIA and torch.is_grad_enabled())
            self.examples.compared(name, inputs, target, loss, self.updates)
            self.answers.compared(name, inputs, target)
            if name in CRITERIA:
                self.others.compared(inputs, self.loaders.row(self.loaders.last))
        elif self.examples.open and name in CRITERIA and not torch.is_grad_enabled():
            self.examples.compared(name, inputs, target, None, self.updates)  # an evaluation may come late

    def backward_begins(self, losses: Any, touched: Iterable[int], *, retained: bool) -> set[int] | None:
        """Take in a backward pass, and return the parameters that its losses depend on, None where that was not looked up."""
        self.logits.end()
        self.passed_backward()
        if self.attention.awake:
            self.modes.backward(self.attention.weight)
            if not TAPS.hooked:  # what a graph saves may be handed out by code of the program's own
                head = behind_weights(losses, most=MOST_NODES)
                self.surrogates.trained(losses, head, self.updates, near=self.near)
                self.classes.trained(head)
                self.reproduced.trained(head, self.updates)
                if self.near:
                    self.others.trained(head, self.loaders.row(self.loaders.last))
                written = self.written.compared(losses)
                self.recall.trained(written, self.updates)
                self.pairs.trained(written, self.updates)
                if self.near and written is not None and not self._called:
                    self.examples.compared(*written, self.updates)
                    self.answers.compared(*written[:3])
                    self.others.compared(written[1], self.loaders.row(self.loaders.last))
            self.surrogates.drawn.clear()
            self._called = False
        self.order.backward(losses, touched=touched, near=self.near)
        if self.near:
            self.criteria.trained(losses)
            self.examples.trained_on(losses)
            if not TAPS.hooked:
                self.units.trained(losses, self.updates, self.modes.roots)
        if not self.near and not (retained and self.updates < WINDOW):  # growing ones are seen in all that are kept
            return None
        leaves = self.graphs.backward(losses, retained=retained, update=self.updates)
        if not TAPS.hooked:
            self.tokens.asked(self.graphs.lookups)
        self.graphs.lookups = []
        return leaves

    def backward_ends(self) -> None:  # noqa: D102
        self.token("backward")
        self.tokens.backward_ends()

    def passed_backward(self) -> None:
        """Take in that a backward pass is made: all that is wanted of those that are passed over."""
        if self.modes.passes:
            self.modes.end_of_run(self.loaders.drawn())
        self.loaders.trained()
        self.batches.backward()
        self.order.backwards += 1

    def passed(self, updates: int, optimizer: Optimizer, *, unnoted: int, backwards: int, open_passes: int) -> None:
        """Take in updates that were passed over: how many of them drew nothing, and how many backward passes were not told, some of them in an open one."""
        self.batches.skip(unnoted, backwards, open_passes)
        self.order.pass_over(backwards, open_passes)
        self.updated(updates, optimizer)

    def zeroed(self, number: int | None) -> None:  # noqa: D102
        if self.attention.awake:
            self.order.add("zero" if number is None else f"zero{number}", line=self.near)

    def clipped(self, kind: str, limit: float) -> None:  # noqa: D102
        self.order.clipped(kind, limit, line=self.near)

    def scheduled(self, scheduler: Any, updates: int, metric: Any) -> None:  # noqa: D102
        if self.schedulers.stepped(scheduler, updates, metric, skipped=self.order.scaled):
            self.order.add("schedule", line=self.near)

    def step_begins(self, number: int, optimizer: Optimizer, *, altered: bool = False) -> None:  # noqa: D102
        empty = False
        due = self.attention.awake and self.updates >= self._next_look.get(number, 0)
        if self.near or due or number not in self.order:
            self._next_look[number] = (self.updates // EVERY + 1) * EVERY
            empty = self.parameters.look(number, optimizer, self.graphs.leaves.values())
        if number == 0:
            self.batches.step_begins(optimizer)
        self.order.step(number, empty=empty, line=self.near, altered=altered)

    def stepped_elsewhere(self, optimizer: Optimizer, observed: Iterable[Optimizer]) -> None:
        """Take in that an optimizer steps that is not observed, on the "same" parameters as those that are, or on "others"."""
        if optimizer not in self._kinds:
            self._mine = self._mine or set().union(*map(identities, observed))
            kind = "others" if identities(optimizer).isdisjoint(self._mine) else "same"
            self._kinds[optimizer] = kind
            self.parameters.elsewhere(optimizer)
            if kind not in self.strangers:
                self.strangers[kind] = {"line": own_line(), "steps": 0, "in_a_row": 0, "after": 0, "began": 0}
        row = self.strangers[self._kinds[optimizer]]
        if row["after"] != self.updates:
            row |= {"after": self.updates, "began": row["steps"]}
        row["steps"] += 1
        row["in_a_row"] = max(row["in_a_row"], row["steps"] - row["began"])

    def step_ends(self, number: int) -> None:  # noqa: D102
        self.order.stepped(number)
        if number == 0:
            self._drawn = None
            if self.near:
                self._nears += 1
                self.loaders.stepped(self.updates)
            self.batches.stepped(whole=self.attention.awake or self.attention.roused)

    def loads(self, module: nn.Module, state: Any, optimizer: Optimizer | None) -> None:  # noqa: D102
        self.survival.loads(module, state, optimizer, chosen=self.modes.passes > 0)

    def moved(self, updates: Sequence[tuple[str, Tensor]], swallowed: Tensor | None) -> None:  # noqa: D102
        self.parameters.moved(updates, swallowed)

    def updated(self, updates: int, optimizer: Optimizer) -> None:  # noqa: D102
        self.updates, self.near = updates, updates < WINDOW and self.attention.awake
        if updates >= WINDOW and not self.criteria.settled:
            self.criteria.settle()
            self.modes.settle({id(p) for group in optimizer.param_groups for p in group["params"]})
        if updates >= self._next_memory and (used := resident_bytes()) is not None:
            every = MEMORY_EVERY if updates < WINDOW else 20 * MEMORY_EVERY
            self._next_memory = (updates // every + 1) * every
            self._memory.append((updates, used))
            if len(self._memory) > 2000:
                del self._memory[1::2]

    def names(self) -> dict[int, str]:
        """Return the id of each known parameter and its name in its model."""
        return self.modes.names()

    def to_dict(self) -> dict[str, Any]:
        """Return everything seen so far, as JSON values; a fact that cannot be read is as if nothing had been seen of it, and named in `lost`."""
        found: dict[str, Any] = {}
        lost = []
        for name, read in _FACTS.items():
            try:
                found[name] = read(self)
            except Exception:  # of ours: the other facts stand
                found[name] = read(LoopFacts([], self.attention))
                lost.append(name)
        return found | ({"lost": lost} if lost else {})


_FACTS: dict[str, Callable[[LoopFacts], Any]] = {
    "updates": lambda facts: facts.updates,
    "attention": lambda facts: facts.attention.to_dict(),
    "near_updates": lambda facts: facts._nears,
    "ended": lambda facts: facts.ended,
    "optimizers_given": lambda facts: facts.given,
    "strangers": lambda facts: facts.strangers,
    "reached": lambda facts: not facts.graphs.leaves or not facts._mine.isdisjoint(facts.graphs.leaves),
    "order": lambda facts: facts.order.to_dict(),
    "modes": lambda facts: facts.modes.to_dict(facts.loaders, facts.loaders.drawn()),
    "parameters": lambda facts: facts.parameters.to_dict(facts.modes),
    "schedulers": lambda facts: facts.schedulers.to_dict(),
    "loaders": lambda facts: facts.loaders.to_dict(),
    "criteria": lambda facts: facts.criteria.to_dict(),
    "dropped": lambda facts: facts.criteria.dropped,
    "floor": lambda facts: facts.criteria.floor(),
    "data": lambda facts: told(facts.examples if facts.judged else Examples(), facts.loaders),
    "pairs": lambda facts: facts.pairs.to_dict(),
    "tokens": lambda facts: facts.tokens.to_dict(facts.names()),
    "stored": lambda facts: facts.stored.to_dict(facts.loaders.trained_on(), facts.loaders.width),
    "surrogates": lambda facts: facts.surrogates.to_dict(),
    "reproduced": lambda facts: facts.reproduced.to_dict(),
    "classes": lambda facts: facts.classes.to_dict(),
    "recall": lambda facts: facts.recall.to_dict(facts.updates),
    "answers": lambda facts: facts.answers.to_dict(),
    "others": lambda facts: facts.others.to_dict(),
    "logits": lambda facts: facts.logits.to_dict(),
    "units": lambda facts: facts.units.to_dict(),
    "workers": lambda facts: facts.workers.to_dict(facts.loaders.is_trained_on, facts.loaders.line),
    "conversions": lambda facts: facts.conversions.to_dict(),
    "batches": lambda facts: facts.batches.to_dict(),
    "graphs": lambda facts: facts.graphs.to_dict(),
    "memory": lambda facts: [list(pair) for pair in facts._memory],
}


def resident_bytes() -> int | None:
    """Return the memory that this process holds, None where the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
