"""A plane of links: all servers at once, in the caller's order, and what happens where one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.links.link import LinkedPlane, Pulled, Take, handed
from workbench.parameter_server.links.plasma import PlasmaLink
from workbench.parameter_server.servers.plane import Grad, Place, whole
from workbench.parameter_server.servers.server import Push, extent, laid_out, lay, taken
from workbench.ray.cluster import NotYet

A, B, C = Place(1, "a"), Place(0, "b"), Place(1, "c")


class FakeLink:
    """Notes what it is asked, in a diary that all links share."""

    name = "fake"
    why = "a test"

    def __init__(self, server: int, diary: list[str]) -> None:
        self.server, self.diary = server, diary
        self.broken = self.dead = False

    def gone(self) -> bool:
        return self.dead

    def _ending(self, what: str, result: Any) -> Callable[[], Any]:
        self.diary.append(f"begin {what} {self.server}")

        def end() -> Any:
            self.diary.append(f"end {what} {self.server}")
            if self.broken:
                raise UnavailableError("ps", self.server)
            return result

        return end

    def pull(self, blocks: Sequence[str]) -> Callable[[], Pulled]:
        return self._ending("pull", [(torch.full((2,), float(ord(block))), ord(block)) for block in blocks])

    def pull_into(self, blocks: Sequence[str], take: Take) -> Callable[[], list[int]]:
        return handed(self.pull(blocks), take)

    def push(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], list[int]]:
        return self._ending(
            "push", [int(whole(grad).sum()) + push.pulled for grad, push in zip(grads, pushes, strict=True)]
        )

    def push_pull(self, blocks: Sequence[str], grads: Sequence[Grad], pushes: Sequence[Push]) -> Callable[[], Pulled]:
        return self.pull(blocks)

    def pull_rows(self, block: str, rows: Tensor, width: int) -> Tensor:
        return rows[:, None].expand(-1, width)

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.server, method, arguments

    def close(self) -> None:
        self.diary.append(f"close {self.server}")


@pytest.fixture
def diary() -> list[str]:
    return []


@pytest.fixture
def made(diary: list[str]) -> list[FakeLink]:
    return []


@pytest.fixture
def plane(diary: list[str], made: list[FakeLink]) -> LinkedPlane:
    def connect(server: int) -> FakeLink:
        made.append(FakeLink(server, diary))
        return made[-1]

    return LinkedPlane(2, connect)


def test_all_servers_work_at_once_and_answers_keep_their_order(plane: LinkedPlane, diary: list[str]) -> None:
    assert [version for _, version in plane.pull([A, B, C])] == [ord("a"), ord("b"), ord("c")]
    assert diary == ["begin pull 0", "begin pull 1", "end pull 0", "end pull 1"]
    grads = [torch.ones(1), [torch.ones(2), torch.ones(3)], torch.ones(7)]
    assert plane.push([A, B, C], grads, [Push(10), Push(20), Push(30)]) == [11, 25, 37]


def test_values_are_handed_out_by_the_number_of_their_place(plane: LinkedPlane) -> None:
    found: dict[int, float] = {}
    versions = plane.pull_into([A, B, C], lambda k, values: found.update({k: float(values[0])}))
    assert found == {0: ord("a"), 1: ord("b"), 2: ord("c")}
    assert versions == [ord("a"), ord("b"), ord("c")]


def test_where_one_fails_the_others_come_to_their_end(
    plane: LinkedPlane, made: list[FakeLink], diary: list[str]
) -> None:
    """A link that failed is closed and made again the next time."""
    plane.connect()
    made[0].broken = True
    with pytest.raises(UnavailableError, match="ps 0"):
        plane.pull([A, B])
    assert diary == ["begin pull 0", "begin pull 1", "end pull 0", "close 0", "end pull 1"]
    plane.pull([A, B])
    assert [link.server for link in made] == [0, 1, 0]


def test_a_server_that_is_known_to_be_dead_is_not_asked(
    plane: LinkedPlane, made: list[FakeLink], diary: list[str]
) -> None:
    plane.connect()
    made[1].dead = True
    with pytest.raises(UnavailableError, match="ps 1"):
        plane.ask(1, "names")
    assert diary == ["close 1"]
    assert plane.ask(1, "names")[0] == 1, "by a new link"
    assert plane.ask(0, "names") == (0, "names", ())


def test_a_server_that_was_started_anew_is_connected_anew(plane: LinkedPlane, made: list[FakeLink]) -> None:
    plane.pull([A, B])
    plane.forget(1)
    plane.pull([A, B])
    assert [link.server for link in made] == [0, 1, 1]


class Waiting:
    """A cluster that answers a call when it has been asked so often, or never."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.limits = answers, []

    def call(self, *_: Any, **__: Any) -> str:
        return "call"

    def answer(self, call: str, timeout_s: float | None = None) -> Any:
        self.limits.append(timeout_s)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_call_is_not_waited_for_when_its_server_is_seen_to_be_dead() -> None:
    """T10.2: Ray may take seconds to tell."""
    looks = iter([False, True])
    slow: Any = Waiting([NotYet()] * 9)
    link = PlasmaLink(slow, None, 3, "")
    link.watch(lambda: next(looks))
    with pytest.raises(UnavailableError, match="ps 3"):
        link.begin("pull")()
    assert len(slow.answers) == 7


def test_an_answer_is_waited_for_as_long_as_its_server_lives() -> None:
    alive: Any = Waiting([NotYet(), NotYet(), "answer"])
    link = PlasmaLink(alive, None, 0, "")
    link.watch(lambda: False)
    assert link.begin("pull")() == "answer"
    unseen: Any = Waiting(["answer"])
    assert PlasmaLink(unseen, None, 0, "").begin("pull")() == "answer"
    assert unseen.limits == [None], "where nobody sees it, Ray tells"


def test_a_time_out_that_the_server_itself_had_is_no_waiting() -> None:
    fails: Any = Waiting([TimeoutError("of the method")])
    link = PlasmaLink(fails, None, 0, "")
    link.watch(lambda: False)
    with pytest.raises(TimeoutError, match="of the method"):
        link.begin("join_pair")()


def test_the_plane_names_its_ways(plane: LinkedPlane, made: list[FakeLink]) -> None:
    assert (plane.name, plane.why) == ("none yet", "no server was needed yet")
    plane.connect()
    made[1].name, made[1].why = "other", "another test"
    assert plane.name == "fake+other"
    assert plane.why == "a test; another test"


def test_tensors_lie_side_by_side() -> None:
    pieces = [torch.arange(3.0), torch.arange(2.0)]
    tensors: list[Grad] = [
        torch.arange(5, dtype=torch.int64),
        pieces,
        torch.zeros(0),
        torch.ones(1, dtype=torch.bfloat16),
    ]
    lying, size = lay([extent(each) for each in tensors])
    assert [begin % 64 for begin, _, _ in lying] == [0, 0, 0, 0]
    content = torch.empty(size, dtype=torch.uint8)
    laid_out(tensors, lying, content)
    for found, given in zip(taken(content, lying), tensors, strict=True):
        assert torch.equal(found, whole(given))
