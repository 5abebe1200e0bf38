"""What is sent to a worker once: packed once, told apart, dropped and asked for again."""

from __future__ import annotations

import gc
import threading
from typing import Any

import cloudpickle
import pytest
import torch

from workbench.parameter_server.engines.sendable import KEPT, Kept, NotKept, SendOnce, Sent
from workbench.parameter_server.workers.closure import Closure

RATE = 1.0


def with_global() -> float:
    return RATE


class Counting:
    """Packs, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, thing: Any) -> bytes:
        self.count += 1
        content: bytes = cloudpickle.dumps(thing)
        return content


def test_a_function_is_packed_once() -> None:
    pack = Counting()
    sent = SendOnce(pack)
    data = torch.zeros(3)

    def function() -> Any:
        return data

    first = sent.packed(function)
    assert sent.packed(function) == first
    assert pack.count == 1
    kept = Kept()
    kept.add({first.number: first.content})
    assert torch.equal(kept.get(Sent(first.number))(), data)


def test_another_function_in_the_same_place_is_another() -> None:
    """Python gives the id of what was deleted to what comes next."""
    sent = SendOnce(Counting())
    numbers, ids = [], []
    for k in range(200):
        function = eval(f"lambda: {k}")
        numbers.append(sent.packed(function).number)
        ids.append(id(function))
        del function
    assert len(set(ids)) < 200, "no id came twice: the test shows nothing"
    assert len(set(numbers)) == 200
    gc.collect()
    assert not sent._entries, "nothing is kept of functions that are gone"


def test_what_a_function_took_along_may_be_replaced() -> None:
    """A rebinding is seen: of a free variable, of a global."""
    sent = SendOnce(Counting())
    rate = 0.1

    def with_local() -> float:
        return rate

    for function, rebind in ((with_local, "local"), (with_global, "global")):
        before = sent.packed(function)
        assert sent.packed(function) == before
        if rebind == "local":
            rate = 0.2
        else:
            globals()["RATE"] = 2.0
        after = sent.packed(function)
        assert after.number != before.number
        kept = Kept()
        kept.add({after.number: after.content})
        assert kept.get(Sent(after.number))() == (0.2 if rebind == "local" else 2.0)
    globals()["RATE"] = 1.0


def test_what_cannot_be_sent_is_refused_with_what_to_do() -> None:
    """Behaviour 20."""
    sent = SendOnce(Counting())
    lock = threading.Lock()

    def locks() -> Any:
        return lock

    with pytest.raises(TypeError, match=r"(?s)locks.* cannot be sent to a worker.*make what the function needs inside"):
        sent.check(Closure(locks))
    with pytest.raises(TypeError, match=r"argument of type lock cannot be sent.*create_per_worker_dataset"):
        sent.check(Closure(int, [{"x": (1, lock)}]))
    sent.check(Closure(int, [1, torch.zeros(2), {"a": ["b", None]}]))


def test_a_worker_drops_the_oldest_and_says_so() -> None:
    kept = Kept()
    for number in range(KEPT):
        kept.add({number: cloudpickle.dumps(number)})
    assert kept.get(Sent(0)) == 0
    kept.add({KEPT: cloudpickle.dumps(KEPT)})
    assert kept.get(Sent(0)) == 0, "it was used last"
    with pytest.raises(NotKept):
        kept.get(Sent(1))
