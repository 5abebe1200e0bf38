"""What a watched loop's own examples tell of its data: a fault planted in them is the only alarm, and what only looks like one is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import workbench as wb

CENTRES = 2 * torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def clusters(count: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (count,), generator=random)
    return CENTRES[y] + torch.randn(count, 8, generator=random), y


def numbers(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] + x[:, 1:2].sin()


def series(count: int, seed: int) -> tuple[Tensor, Tensor]:
    times = torch.arange(count + 8.0) + 1000 * seed
    values = (times / 9).sin() + 0.1 * torch.randn(count + 8, generator=torch.Generator().manual_seed(seed))
    return values.unfold(0, 8, 1)[:count], values[8:, None]


def as_they_are(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def by_target(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(y.flatten(), stable=True)
    return x[order], y[order]


class Balanced(Sampler[list[int]]):
    """Batches of five examples each of four classes, class by class."""

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(30):
            own = [torch.nonzero(self.y == k).flatten() for k in torch.randperm(5)[:4]]
            yield [int(i) for rows in own for i in rows[torch.randperm(len(rows))[:5]]]


def shuffled(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), 20, shuffle=True)


def in_order(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), 20)


def by_hand(x: Tensor, y: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(x.split(20), y.split(20), strict=True))


Prepared = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A training: what it is made on, how both splits are prepared, in which order, what ends the model, and the codes of its alarms."""

    alarms: set[str] = field(default_factory=set)
    data: Callable[[int, int], tuple[Tensor, Tensor]] = clusters
    train: Prepared = as_they_are
    held: Prepared = as_they_are
    batches: Callable[[Tensor, Tensor], object] = shuffled
    head: nn.Module = field(default_factory=nn.Identity)


def missing(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.where(torch.arange(len(x))[:, None] % 50 > 0, torch.nan), y


def copied(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    other, others = clusters(200, 1)
    return torch.cat([x[40:], other[:40]]), torch.cat([y[40:], others[:40]])


CASES = {
    "sorted by class": Case({"data.unshuffled"}, train=by_target, batches=in_order),
    "sorted by class, by hand": Case({"data.unshuffled"}, train=by_target, batches=by_hand),
    "sorted by target": Case({"data.unshuffled"}, data=numbers, train=by_target, batches=in_order),
    "validation in other units": Case({"data.train_validation_shift"}, held=lambda x, y: (10 * x, y)),
    "validation not centred": Case({"data.train_validation_shift"}, data=numbers, held=lambda x, y: (x + 5, y)),
    "validation numbered otherwise": Case({"data.label_shift"}, held=lambda x, y: (x, (y + 1) % 5)),
    "targets shuffled": Case({"data.no_signal"}, train=lambda x, y: (x, y[torch.randperm(len(y))])),
    "targets shuffled, numbers": Case({"data.no_signal"}, data=numbers, train=lambda x, y: (x, y[torch.randperm(len(y))])),
    "labels flipped": Case({"data.labels"}, train=lambda x, y: (x, y.where(torch.rand(len(y)) > 0.4, torch.randint_like(y, 5)))),
    "outputs above 0": Case({"loss.output_range"}, data=numbers, head=nn.ReLU()),
    "missing values": Case({"data.nonfinite"}, train=missing),
    "trained on what is held out": Case({"data.leakage"}, train=copied),
    "shuffled": Case(),
    "in an order that says nothing": Case(batches=in_order),
    "by hand": Case(batches=by_hand, data=numbers),
    "validation sorted": Case(held=by_target),
    "noise in training": Case(train=lambda x, y: (x + 0.5 * torch.randn_like(x), y)),
    "a series in its order": Case(data=series, batches=in_order),
    "batches of a few classes": Case(batches=lambda x, y: DataLoader(TensorDataset(x, y), batch_sampler=Balanced(y))),
    "outputs that reach": Case(data=lambda n, seed: (numbers(n, seed)[0], numbers(n, seed)[1].sigmoid()), head=nn.Sigmoid()),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_is_wrong_with_the_data_of_a_loop_is_its_only_alarm(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = CASES[kind]
    (x, y), (other, others) = case.train(*case.data(600, 0)), case.held(*case.data(200, 1))
    name = "mse_loss" if y.is_floating_point() else "cross_entropy"
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1 if y.is_floating_point() else 5), case.head
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for _ in range(3):
            model.train()
            for inputs, targets in case.batches(x, y):  # type: ignore[attr-defined]
                optimizer.zero_grad()
                getattr(F, name)(model(inputs), targets).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for inputs, targets in DataLoader(TensorDataset(other, others), 100):
                    getattr(F, name)(model(inputs), targets)
    found = run.diagnose()
    judged = [f for f in found if f.code.startswith("data.") or f.code == "loss.output_range"]
    assert {f.code for f in judged if f.status in ("warn", "fail") and f.follows_from is None} == case.alarms, found
    assert len(judged) == 13


def test_one_example_at_a_time_is_kept_within_bounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an agent acts: thousands of passes of one example each without gradient, between updates."""
    (x, y), model = numbers(4000, 0), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for inputs, targets in zip(x.split(100), y.split(100), strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            with torch.no_grad():
                for one in inputs:
                    model(one[None])
    assert not caplog.records
    assert run.diagnose()["data.nonfinite"].status == "ok"


def test_the_first_evaluation_is_kept_whole_however_many_follow(tmp_path: Path) -> None:
    (x, y), model = numbers(600, 0), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for inputs, targets in zip(x[100:].split(10), y[100:].split(10), strict=True):
            optimizer.zero_grad()
            F.mse_loss(model.train()(inputs), targets).backward()
            optimizer.step()
            with torch.no_grad():
                F.mse_loss(model.eval()(x[:100]), y[:100])
    assert run.record.facts["loop"]["data"]["examples"] == {"train": 500, "validation": 100}


@pytest.mark.parametrize("ordered", [True, False])
def test_tokens_beside_the_places_where_examples_begin_are_examples(ordered: bool, tmp_path: Path) -> None:
    """As `nn.EmbeddingBag` takes them."""
    torch.manual_seed(0)
    targets = torch.randint(4, (400,)).sort().values
    texts = [torch.randint(1, 40, (int(torch.randint(5, 20, ())),)) + 40 * int(y) for y in targets]
    order = torch.arange(400) if ordered else torch.randperm(400)
    bag, head = nn.EmbeddingBag(200, 16), nn.Linear(16, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = bag, head

        def forward(self, tokens: Tensor, begins: Tensor) -> Tensor:
            return self.head(self.bag(tokens, begins))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for rows in order.split(20):
            some = [texts[i] for i in rows]
            begins = torch.tensor([0, *map(len, some[:-1])]).cumsum(0)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.cat(some), begins), targets[rows]).backward()
            optimizer.step()
    found = {f.code: f.status for f in run.diagnose() if f.code.startswith("data.")}
    assert run.record.facts["loop"]["data"]["examples"]["train"] == 400
    assert found["data.unshuffled"] == ("fail" if ordered else "ok")
    assert found["data.no_signal"] == "ok"


class Labelled(nn.Module):
    """As models of a library that take their labels and return the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 8), nn.Linear(8, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        vectors = self.words(tokens)
        return F.cross_entropy(self.head(vectors if tokens.dim() == 1 else vectors.mean(1)), labels)


@pytest.mark.parametrize("first", ["labels", "tokens"])
@pytest.mark.parametrize("shape", [(400, 12), (400,)])
def test_labels_before_the_inputs_and_inputs_of_one_number_hide_nothing(
    first: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """`model(**batch)` has them in the order of the table; a user, an item or the last letter is one number."""
    torch.manual_seed(0)
    tokens = torch.randint(40, shape)
    data = {"labels": (tokens.reshape(400, -1)[:, 0] < 20).long(), "tokens": tokens}
    if first == "tokens":
        data = dict(reversed(data.items()))
    rows = [{name: part[i] for name, part in data.items()} for i in range(400)]
    model = Labelled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for batch in DataLoader(rows, 20, shuffle=True):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
    facts = run.record.facts["loop"]
    assert "lost" not in facts
    assert facts["data"]["examples"]["train"] == 400
    if len(shape) > 1:
        assert len(facts["data"]["classes"]) == 2
    assert [f.code for f in run.diagnose() if f.status in ("warn", "fail")] == []


class Writes(nn.Module):
    """A small language model, and how people have one write: token by token, each time on all that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed, self.head = nn.Embedding(10, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixed(self.words(tokens))[0])

    @torch.no_grad()
    def write(self, tokens: Tensor, more: int) -> Tensor:
        for _ in range(more):
            tokens = torch.cat([tokens, self(tokens[:, -8:])[:, -1].argmax(1, keepdim=True)], 1)
        return tokens


@pytest.mark.parametrize("alarms", [set(), {"data.train_validation_shift"}])
def test_what_a_language_model_writes_is_no_validation_data(alarms: set[str], tmp_path: Path) -> None:
    """It is asked to go on with the first letters of sequences that end otherwise than they begin."""
    torch.manual_seed(0)
    tokens = torch.cat([torch.randint(0, 4, (1200, 4)), torch.randint(5, 10, (1200, 6))], 1)
    held = 9 - tokens[1000:] % 2 if alarms else tokens[1000:]
    model = Writes()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for (rows,) in DataLoader(TensorDataset(tokens[:1000]), 25, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
        model.eval()
        for (rows,) in DataLoader(TensorDataset(held), 50):
            if alarms:
                with torch.no_grad():
                    F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            model.write(rows[:, :4], more=6)
    found = [f.code for f in run.diagnose() if f.code.startswith("data.") and f.status in ("warn", "fail")]
    assert set(found) == alarms
    assert run.record.facts["loop"]["data"]["examples"]["validation"] == 200 * len(alarms)


def test_one_example_an_update_has_no_outputs_to_compare(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (x, y), model = numbers(100, 0), nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for inputs, target in zip(x.split(1), y.split(1), strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), target).backward()
            optimizer.step()
    assert [f.code for f in run.diagnose() if f.status in ("warn", "fail")] == []


def tokens(targets: Callable[[Tensor], Tensor], out: Path, **options: float) -> wb.Finding:
    """Watch a language model of a chain of 24 letters, the first of them the most common, and return what is said of what it learns."""
    torch.manual_seed(0)
    chain = (torch.rand(40_000).square() * 24).long()
    chain[1::2] = (chain[::2] * 5 + 1) % 24  # every second letter follows from the one before
    model = nn.Sequential(nn.Embedding(24, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=out) as run:
        for _ in range(80):
            at = torch.randint(len(chain) - 33, (16, 1)) + torch.arange(33)
            x, y = chain[at[:, :-1]], targets(chain[at[:, 1:]])
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), **options).backward()
            optimizer.step()
    return run.diagnose()["lr.nothing_learns"]


def test_a_language_model_that_learns_no_more_than_how_common_tokens_are_has_learned_nothing(tmp_path: Path) -> None:
    found = tokens(lambda y: y.flatten()[torch.randperm(y.numel())].view_as(y), tmp_path / "shuffled")
    assert found.status == "warn", found
    assert "constant output" in found.summary
    for number, options in enumerate(({}, {"label_smoothing": 0.1})):
        assert tokens(lambda y: y, tmp_path / str(number), **options).status == "ok"


@pytest.mark.parametrize(("share", "status"), [(0.15, "not_measured"), (0.0, "warn"), (2.0, "ok")])
def test_a_loss_a_little_below_chance_whose_noise_hides_what_is_learned_is_no_alarm(
    share: float, status: str, tmp_path: Path
) -> None:
    """Of the targets' variance the inputs tell 2 %, nothing, and 80 %."""
    torch.manual_seed(3)
    x = torch.randn(4000, 5)
    y = share * x[:, :1] + torch.randn(4000, 1)
    y = y if share else y[:200].repeat(20, 1)
    x = x if share else torch.zeros(4000, 5)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    nn.init.constant_(model[2].bias, 2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(5):
            for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
    found = run.diagnose()["lr.nothing_learns"]
    assert found.status == status, found


def fitted(batches: Iterable[tuple[Tensor, Tensor]], outputs: int, out: Path) -> wb.Diagnosis:
    """Watch a linear model that is trained on these batches."""
    torch.manual_seed(0)
    model = nn.Linear(8, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=out) as run:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return run.diagnose()


@pytest.mark.parametrize(("size", "status"), [(1.0, "ok"), (300.0, "warn")])
def test_targets_of_a_second_loss_are_judged_by_their_size(size: float, status: str, tmp_path: Path) -> None:
    (x, y), model = clusters(400, 1), nn.Linear(8, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for inputs, targets in shuffled(x, y):
            kinds, boxes = model(inputs).split([5, 4], 1)
            optimizer.zero_grad()
            (F.cross_entropy(kinds, targets) + F.mse_loss(boxes, size * inputs[:, :4])).backward()
            optimizer.step()
    assert run.diagnose()["data.scale"].status == status


def logged(name: str, values: list[float], out: Path) -> wb.Finding:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=out) as run:
        for value in values:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            run.log(**{name: value})
    return run.diagnose()["loss.metric_disagrees"]


@pytest.mark.parametrize(("later", "status"), [(0.39, "warn"), (0.45, "ok"), (0.8, "ok")])
@pytest.mark.parametrize("name", ["val_auc", "c_index"])
def test_a_score_of_pairs_below_chance_is_told(name: str, later: float, status: str, tmp_path: Path) -> None:
    finding = logged(name, [0.5, 0.5, 0.5, *[later] * 5], tmp_path / "run")
    assert (finding.status, finding.value) == (status, pytest.approx(later) if status == "warn" else None)


@pytest.mark.parametrize(
    ("name", "later", "status"),
    [
        ("ndcg", 0.03, "warn"),
        ("ndcg", 0.06, "ok"),
        ("top1_error", 0.03, "ok"),
        ("domain_acc", 0.03, "ok"),
        ("val/disc_accuracy", 0.03, "ok"),
    ],
)
def test_a_score_that_training_makes_worse_is_told(name: str, later: float, status: str, tmp_path: Path) -> None:
    finding = logged(name, [0.07, 0.05, 0.05, *[later] * 5], tmp_path / "run")
    assert (finding.status, finding.value) == (status, pytest.approx(later / 0.07) if status == "warn" else None)


@pytest.mark.parametrize(("cut", "outputs", "status", "words"), [
    (False, 5, "ok", "not wrong at random"), (False, 7, "ok", "outputs 5 to 6 of the model have few or none"),
    (True, 5, "warn", "none of the first 400 training examples is of class 0"),
])  # fmt: skip
def test_an_output_whose_class_no_example_has_is_told_and_those_beyond_the_last_class_do_no_harm(
    cut: bool, outputs: int, status: str, words: str, tmp_path: Path
) -> None:
    x, y = clusters(400, 1)
    found = fitted(shuffled(x, y.clamp(min=1) if cut else y), outputs, tmp_path / "run")["data.labels"]
    assert found.status == status
    assert words in found.summary


def test_labels_that_no_simple_model_was_fitted_to_are_not_said_to_be_right(tmp_path: Path) -> None:
    model, (x, y) = nn.Bilinear(8, 8, 5), clusters(400, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for rows in torch.randperm(400).split(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows], x[rows].flip(1)), y[rows]).backward()
            optimizer.step()
    assert run.diagnose()["data.labels"].summary == "Does not apply: the model takes several inputs."


def test_a_class_that_comes_later_is_no_missing_one(tmp_path: Path) -> None:
    x, y = by_target(*clusters(800, 1))
    first = torch.cat([torch.nonzero(y == k).flatten()[:100] for k in range(4)])  # as far as a sorted set was read
    found = fitted(in_order(x[first], y[first]), 5, tmp_path / "run")
    assert found["data.unshuffled"].status == "fail"
    labels = found["data.labels"]
    assert (labels.status, "class 4 is not among" in labels.summary) == ("not_measured", True), labels.summary


@pytest.mark.parametrize(("batches", "shuffle", "status"), [(3, False, "fail"), (3, True, "ok"), (20, False, "ok")])
def test_passes_that_end_early_in_the_same_order_are_told(batches: int, shuffle: bool, status: str, tmp_path: Path) -> None:  # fmt: skip
    loader = DataLoader(TensorDataset(*clusters(400, 1)), batch_size=20, shuffle=shuffle)
    passes = itertools.chain.from_iterable(itertools.islice(loader, batches) for _ in range(60 // batches))
    found = fitted(passes, 5, tmp_path / "run")["loop.repeated_batch"]
    assert found.status == status, found.summary
    assert status == "ok" or "ends after 3 of its 20 batches" in found.summary


@pytest.mark.parametrize("again", [False, True])
def test_a_generator_that_is_seeded_before_each_batch_is_no_full_batch_training(again: bool, tmp_path: Path) -> None:
    x, y = clusters(400, 1)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(60):
            if again:
                torch.manual_seed(1)
            rows = torch.randint(400, (20,)) if again else torch.arange(400)
            yield x[rows], y[rows]

    found = fitted(batches(), 5, tmp_path / "run")["loop.repeated_batch"]
    assert found.status == ("fail" if again else "ok")
    assert not again or "test_loop_data.py" in found.summary
