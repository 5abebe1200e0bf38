"""Whether somebody looks at the page, and a picture for when nobody does."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["is_live", "still"]


def is_live(live: bool | None = None) -> bool:
    """Return whether a page is there that controls can be used on.

    Args:
        live: None asks the environment: `WORKBENCH_LIVE=0`, as papermill, nbval and make set it, means that nobody is looking.
    """
    return os.environ.get("WORKBENCH_LIVE") != "0" if live is None else live


def still(png: bytes, alt: str | None = None) -> Any:
    """Return a PNG as what a notebook shows and stores when it is the last line of a cell.

    Args:
        png: the picture.
        alt: what it shows, in words, for those who do not see it.
    """
    from IPython.display import Image

    return Image(data=png, format="png", alt=alt)  # type: ignore[no-untyped-call]
