"""`CurvesWidget`: loss, gradient norm and lr of many trials on a page; what one does with them happens in the page alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

__all__ = ["CurvesWidget"]

_HERE = Path(__file__).parent
_VENDOR = _HERE / "vendor"


def _text(*paths: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


class CurvesWidget(anywidget.AnyWidget):
    """The page's side is `live.js`; it is told by messages, and asks for all of them when it is drawn anew.

    Args:
        still: whether nothing will come but what is asked for.
    """

    still = traitlets.Bool(False).tag(sync=True)

    _esm = _text(_VENDOR / "uPlot.iife.min.js", _HERE / "live.js")
    _css = _text(_VENDOR / "uPlot.min.css", _HERE / "live.css")

    def __init__(self, *, still: bool = False) -> None:
        super().__init__(still=still)
        if hasattr(self.comm, "_reply_subshell_for"):  # ipykernel 7.4 would let the page wait until the cell has ended
            self.comm._reply_subshell_for = None

    def when_asked(self, everything: Callable[[], object]) -> None:
        """Call `everything` when a page asks for all that there is."""
        self.on_msg(lambda _widget, content, _buffers: everything() if content.get("kind") == "all" else None)

    def tell(self, content: dict[str, Any], buffers: list[Any]) -> None:
        """Send one message to the page."""
        self.send(content, buffers)

    def __repr__(self) -> str:
        """Return what is shown where there is no page."""
        return "CurvesWidget()"
