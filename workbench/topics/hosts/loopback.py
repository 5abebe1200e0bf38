"""`LoopbackStore`, `python -m workbench.topics.hosts.loopback ...`: torchrun, and its meeting place, for this machine alone.

The store through which processes find each other listens on all interfaces of the machine, whatever address they are given. What is
rehearsed here concerns nobody else, so it is given a socket that is bound to the loopback interface.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["LoopbackStore", "main"]

LOOPBACK = "127.0.0.1"


class LoopbackStore(dist.TCPStore):  # type: ignore[name-defined, misc]
    """A `torch.distributed.TCPStore` whose server, where this process is the server, listens on the loopback interface only.

    Args:
        host_name: address of the server.
        port: of the server; 0 is a free one.
        world_size: processes that use it; None is any number.
        is_master: whether this process is the server.
        timeout: of its operations.
        **kwargs: the others of `TCPStore`.

    Raises:
        RuntimeError: the port is taken; this is what torch raises too.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(minutes=5),
        **kwargs: Any,
    ) -> None:
        if is_master:
            listening = socket.socket()
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((LOOPBACK, port))
            except OSError as error:
                listening.close()
                raise RuntimeError(f"port {port} cannot be used: {error.strerror}") from error
            port = listening.getsockname()[1]
            kwargs["master_listen_fd"] = listening.detach()
        super().__init__(host_name, port, world_size, is_master, timeout, **kwargs)


def main(words: list[str]) -> None:
    """Run torchrun with these arguments, its store on the loopback interface."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    for module in (static_tcp_rendezvous, c10d_rendezvous_backend):
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined]
    run.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
