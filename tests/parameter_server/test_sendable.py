"""What is sent to a worker once: packed once, told apart, packed again where it changed, dropped when it is gone."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import cloudpickle

from workbench.parameter_server.engines.ray_task import SendOnce

RATE = 1.0


def with_global() -> float:
    return RATE


class Sender:
    """Counts what is packed, and notes what is dropped."""

    def __init__(self) -> None:
        self.count = 0
        self.dropped: list[int] = []
        self.once = SendOnce(self.pack, self.dropped.append)

    def pack(self, thing: Any) -> bytes:
        self.count += 1
        content: bytes = cloudpickle.dumps(thing)
        return content


def test_another_function_in_the_same_place_is_another() -> None:
    """Python gives the id of what was deleted to what comes next."""
    sender = Sender()
    numbers, ids = [], []
    for k in range(200):
        function = eval(f"lambda: {k}")
        numbers.append(sender.once.packed(function).number)
        ids.append(id(function))
        del function
    assert len(set(ids)) < 200, "no id came twice: the test shows nothing"
    assert len(set(numbers)) == 200
    gc.collect()
    assert sorted(sender.dropped) == sorted(numbers), "workers keep nothing of functions that are gone"


def test_what_a_function_took_along_may_be_replaced() -> None:
    """A rebinding is seen: of a free variable, of a global; the old one is not kept."""
    sender, rate = Sender(), 0.1

    def with_local() -> float:
        return rate

    for function, rebind in ((with_local, "local"), (with_global, "global")):
        before = sender.once.packed(function)
        assert sender.once.packed(function) == before
        if rebind == "local":
            rate = 0.2
        else:
            globals()["RATE"] = 2.0
        after = sender.once.packed(function)
        assert after.number != before.number
        assert pickle.loads(after.content)() == (0.2 if rebind == "local" else 2.0)
        assert sender.dropped[-1] == before.number
    globals()["RATE"] = 1.0
