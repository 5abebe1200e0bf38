"""`CallRunner`: runs the calls of one step one after the other, or spread over threads that stay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["CallRunner"]

Task = Callable[[], None]


class CallRunner:
    """Runs independent tasks; with several threads each operation keeps to one core, which the tasks share out.

    Args:
        threads: tasks at a time, the caller's thread included. While there are several, torch's own number of threads is
            1 in this process; `close` puts it back.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._before = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1:
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(threads - 1, "lanes", initializer=lambda: torch.set_num_threads(1))

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks without recording gradients; after an error no further task begins, and it is raised at the end."""
        left = deque(tasks)
        helpers = min(self.threads, len(tasks)) - 1
        if self._pool is None or helpers < 1:
            _work(left)
            return
        running = [self._pool.submit(_work, left) for _ in range(helpers)]
        try:
            _work(left)
        finally:
            errors = [future.exception() for future in running]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Let the threads end, and put torch's number of threads back."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            torch.set_num_threads(self._before)


def _work(left: deque[Task]) -> None:
    with torch.no_grad():
        while True:
            try:
                task = left.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException:
                left.clear()
                raise
