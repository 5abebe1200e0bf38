"""`require_token`: what the machines of a Ray cluster prove to each other that they belong together with."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from workbench.errors import ClusterError

__all__ = ["require_token"]

MODE = "RAY_AUTH_MODE"


def require_token(*, alone: bool) -> None:
    """Let Ray ask every process for a token, and see to it that this one has it.

    Whoever reaches a cluster without one runs any code there. Ray reads the token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
    ~/.ray/auth_token; who set RAY_AUTH_MODE has decided for themselves and is left alone.

    Args:
        alone: all of the cluster is on this machine: a token that is missing is made, in ~/.ray/auth_token, and one that is there becomes its
            owner's alone.

    Raises:
        ClusterError: there is none, and one that is made here would be unknown on the other machines or cannot be kept.
    """
    os.environ.setdefault(MODE, "token")
    from ray._private.authentication import authentication_token_setup as setup
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    Config.initialize("")  # it was read when Ray was imported
    try:
        if not alone:
            setup.ensure_token_if_auth_enabled(create_token_if_missing=False)
            return
        folder = Path.home() / ".ray"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock, mask = os.open(folder, os.O_RDONLY), os.umask(0o077)  # Ray would let everybody on this machine read it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two that begin at once would make two
            AuthenticationTokenLoader.instance().reset_cache()
            setup.ensure_token_if_auth_enabled(create_token_if_missing=True)
            token = folder / "auth_token"
            if token.exists() and token.stat().st_mode & 0o077:  # Ray by itself leaves it to everybody
                token.chmod(0o600)
        finally:
            os.umask(mask)
            os.close(lock)
    except AuthenticationError as error:
        raise ClusterError(
            "this machine has no token of the cluster, and without one anybody who reaches its port could run code here. Make one with "
            "`ray get-auth-token --generate`, copy it to every machine, and set RAY_AUTH_TOKEN_PATH to the file there. "
            "RAY_AUTH_MODE=disabled does without, in a network that you trust."
        ) from error
    except OSError as error:
        raise ClusterError(
            f"the cluster's token cannot be kept in ~/.ray ({error}): set HOME to a folder that can be written, or RAY_AUTH_TOKEN_PATH "
            "to a file that holds one."
        ) from error
