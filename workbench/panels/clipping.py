"""`clipping_panel`: both pictures of the gradient norm, with the percentile of the threshold on a slider (F4.8, F4.9)."""

from __future__ import annotations

from typing import Any

from workbench.diagnostics.base import Diagnosis
from workbench.diagnostics.trials import RecordLike
from workbench.panels.base import is_live, still
from workbench.plots.grad_norm import plot_grad_norm, plot_grad_norm_histogram
from workbench.plots.render import png

__all__ = ["clipping_panel", "clipping_picture"]


def clipping_picture(
    record: RecordLike, diagnosis: Diagnosis | None = None, *, trial: int | None = None, percentile: float = 90.0
) -> bytes:
    """Return the norm at each step and its histogram, with the threshold at a percentile, as one PNG.

    Args:
        record: a study or a single trial.
        diagnosis: says which trial is meant where `trial` is None, as in `plot_grad_norm`.
        trial: whose norms; None is the one that `clipping.threshold` was measured on, else as in `plot_grad_norm`.
        percentile: of the trial's own norms in its steady stretch.
    """
    if trial is None and diagnosis is not None and "clipping.threshold" in diagnosis:
        trial = diagnosis["clipping.threshold"].evidence.get("trial")
    return png(
        [
            lambda ax: plot_grad_norm(record, diagnosis, trial=trial, percentile=percentile, ax=ax),
            lambda ax: plot_grad_norm_histogram(record, diagnosis, trial=trial, percentile=percentile, ax=ax),
        ]
    )


def clipping_panel(
    record: RecordLike,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    percentile: float = 90.0,
    live: bool | None = None,
) -> Any:
    """Return both pictures above a slider for the percentile; a picture alone where nobody can move one.

    Args:
        record: a study or a single trial.
        diagnosis: see `clipping_picture`.
        trial: see `clipping_picture`.
        percentile: where the slider starts (F4.9).
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        An `ipywidgets.VBox`, or an `IPython.display.Image`; a notebook shows either when it is the last line of a cell.
    """
    picture = clipping_picture(record, diagnosis, trial=trial, percentile=percentile)
    if not is_live(live):
        return still(picture)
    import ipywidgets  # type: ignore[import-untyped]

    shown = ipywidgets.Image(value=picture, format="png")
    slider = ipywidgets.FloatSlider(
        value=percentile, min=1.0, max=100.0, step=1.0, description="percentile", continuous_update=False
    )

    def redraw(change: dict[str, Any]) -> None:
        shown.value = clipping_picture(record, diagnosis, trial=trial, percentile=change["new"])

    slider.observe(redraw, names="value")
    return ipywidgets.VBox([slider, shown])
