"""A stop reaches whoever trains: from Ctrl-C in the main thread, from the program in any."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from workbench.train.interrupt import ask_to_stop, catch_interrupt


def test_ctrl_c_is_a_request_once_and_an_error_twice() -> None:
    with catch_interrupt() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_program_asks_in_every_thread_and_only_those_that_listen() -> None:
    listening, asked = threading.Barrier(2), threading.Event()
    seen: list[bool] = []

    def train() -> None:
        with catch_interrupt() as stop:
            listening.wait(10)
            asked.wait(10)
            seen.append(stop.requested)
        with catch_interrupt() as later:
            seen.append(later.requested)

    thread = threading.Thread(target=train)
    thread.start()
    with catch_interrupt() as stop:
        listening.wait(10)
        ask_to_stop()
        asked.set()
        thread.join(10)
        assert stop.requested
    assert seen == [True, False]
