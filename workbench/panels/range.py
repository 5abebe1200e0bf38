"""`Range`: a slider over named values, which says to a screen reader what it shows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import anywidget
import traitlets

_HERE = Path(__file__).parent


class Range(anywidget.AnyWidget):
    """A slider over `values`, each called by its text; `value` is where it stands, and takes any of them."""

    _esm = (_HERE / "range.js").read_text(encoding="utf-8")
    _css = (_HERE / "range.css").read_text(encoding="utf-8")

    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)
    value = traitlets.Any()

    def __init__(self, label: str, options: Sequence[tuple[str, Hashable]], start: Hashable) -> None:
        self.values = [value for _, value in options]
        super().__init__(label=label, texts=[text for text, _ in options], index=self.values.index(start), value=start)

    @traitlets.validate("value")
    def _known(self, proposal: dict[str, Hashable]) -> Hashable:
        if proposal["value"] not in self.values:
            raise traitlets.TraitError(f"{self.label} is one of {', '.join(self.texts)}, not {proposal['value']!r}.")
        return proposal["value"]

    @traitlets.observe("value")
    def _moved(self, change: dict[str, Hashable]) -> None:
        self.index = self.values.index(change["new"])

    @traitlets.observe("index")
    def _slid(self, change: dict[str, int]) -> None:
        self.value = self.values[min(max(change["new"], 0), len(self.values) - 1)]
