"""What holds for every figure: it returns Axes, draws where it is told, leaks nothing and survives poor input."""

from __future__ import annotations

import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench
from tests.helpers.evaluations import paused, predicted, with_offline
from tests.helpers.host_facts import job
from tests.helpers.records import diagnosis, empty, one_trial, study
from tests.helpers.server_facts import facts, served
from tests.helpers.simulated_batches import batches
from tests.helpers.simulated_input import pipeline
from tests.helpers.simulated_norms import row as norm_devices
from tests.helpers.simulated_norms import study as norm_study
from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.style import why_not_measured

PACKAGE = Path(workbench.__file__).parent
plots = SimpleNamespace(
    **{
        name: figure
        for path in [PACKAGE / "plots" / "loss.py", *PACKAGE.glob("topics/*/figures.py")]
        for name, figure in vars(
            import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        ).items()
        if name.startswith("plot_") and path.samefile(inspect.getsourcefile(figure) or "")
    }
)
"""Every figure by the name of its function."""

Draw = Callable[[Any, Diagnosis | None, Axes | None], Axes]

DEPTHS = [
    {"variant": variant, "depth": depth, "stable_lr": 0.1 / depth, "unstable_lr": 0.2 / depth, "censored": None}
    | {"best_lr": 0.1, "best_loss": 1.0, "identity_at_start": False}
    for variant in ("plain", "x + Norm(f(x))")
    for depth in (2, 6)
]
NORMS = norm_study({8: [0.6, 0.7], None: [0.5, 0.5]}, batch_norm_devices=[norm_devices(k) for k in (1, 2, 4)])
BATCHES = batches({16: 0.0125, 64: 0.1, 256: 0.4})
SAMPLED = {
    "evaluation_sample": {
        "examples": 100, "metric": "accuracy", "asked": {"smallest_difference": 0.1, "budget_s": 1.0},
        "timing": {"seconds_per_example": 1e-3, "start_s": 0.01, "batch_size": 32},
        "pair": {"values": [0.9, 0.92], "disagreement": 0.05, "difference_sd": 0.2},
        "classes": [{"class": 0, "total": 20, "correct": 18}, {"class": 1, "total": 80, "correct": 74}],
        "classes_before": [{"class": 0, "total": 20, "correct": 17}, {"class": 1, "total": 80, "correct": 74}],
    }
}  # fmt: skip
SWEPT = [{"variant": "x", "depth": 2, "initial_loss": 3.0, "losses": [[0.1, 1.0], [1.0, None]]}]
SERVED = served(facts(workers=1), facts(workers=3))
FIX = {"change": "workers", "value": 4, "predicted_s": 0.010, "before_s": 0.040, "after_s": 0.0125}
PIPELINE = {"input_pipeline": pipeline(fix=FIX)}
RECORD_FIGURES: dict[str, Draw] = {
    "plot_lr_sweep": lambda r, d, ax: plots.plot_lr_sweep(r, d, ax=ax),
    "plot_loop": lambda r, d, ax: plots.plot_loop(r, d, ax=ax),
    "plot_loss_curves": lambda r, d, ax: plots.plot_loss_curves(r, diagnosis=d, ax=ax),
    "plot_checkpoints": lambda r, d, ax: plots.plot_checkpoints(r, d, ax=ax),
    "plot_early_stopping": lambda r, d, ax: plots.plot_early_stopping(r, d, ax=ax),
    "plot_modification": lambda r, d, ax: plots.plot_modification(r, r, r, d, ax=ax),
    "plot_clipping": lambda r, d, ax: plots.plot_clipping(r, d, ax=ax),
    "plot_evaluation": lambda r, d, ax: plots.plot_evaluation(with_offline(r), d, ax=ax),
    "plot_grad_norm": lambda r, d, ax: plots.plot_grad_norm(r, d, ax=ax),
    "plot_grad_norm_histogram": lambda r, d, ax: plots.plot_grad_norm_histogram(r, d, ax=ax),
    "plot_periodicity": lambda r, d, ax: plots.plot_periodicity(r, d, ax=ax),
    "plot_probe": lambda r, d, ax: plots.plot_probe(r, d, ax=ax),
    "plot_confirm": lambda r, d, ax: plots.plot_confirm(r, d, ax=ax),
    "plot_proof": lambda r, d, ax: plots.plot_proof(r, d, ax=ax),
    "plot_optimizers": lambda r, d, ax: plots.plot_optimizers(r, d, ax=ax),
    "plot_trial_curves": lambda r, d, ax: plots.plot_trial_curves([(r, 1, "one"), (r, 3, "other")], ax=ax),
    "plot_warmup": lambda r, d, ax: plots.plot_warmup(r, d, ax=ax),
}
FIGURES: dict[str, Draw] = RECORD_FIGURES | {
    "plot_architecture": lambda r, d, ax: plots.plot_architecture(
        replace(r, facts={"architecture_depths": DEPTHS}), ax=ax
    ),
    "plot_sensitivity": lambda r, d, ax: plots.plot_sensitivity(
        replace(r, facts={"architecture_depths": SWEPT}), ax=ax
    ),
    "plot_evaluation_sample": lambda r, d, ax: plots.plot_evaluation_sample(replace(r, facts=SAMPLED), d, ax=ax),
    "plot_batch_norm": lambda r, d, ax: plots.plot_batch_norm(NORMS, ax=ax),
    "plot_batch_norm_devices": lambda r, d, ax: plots.plot_batch_norm_devices(NORMS, ax=ax),
    "plot_hosts": lambda r, d, ax: plots.plot_hosts(job(), d, ax=ax),
    "plot_shards": lambda r, d, ax: plots.plot_shards(job(), ax=ax),
    "plot_server_load": lambda r, d, ax: plots.plot_server_load(SERVED, d, ax=ax),
    "plot_staleness": lambda r, d, ax: plots.plot_staleness(SERVED, d, ax=ax),
    "plot_throughput": lambda r, d, ax: plots.plot_throughput(SERVED, ax=ax),
    "plot_batch_size": lambda r, d, ax: plots.plot_batch_size(BATCHES, ax=ax),
    "plot_input_pipeline": lambda r, d, ax: plots.plot_input_pipeline(replace(r, facts=PIPELINE), d, ax=ax),
    "plot_input_workers": lambda r, d, ax: plots.plot_input_workers(replace(r, facts=PIPELINE), d, ax=ax),
    "plot_predictions": lambda r, d, ax: plots.plot_predictions(predicted(), ax=ax),
    "plot_timed_evaluations": lambda r, d, ax: plots.plot_timed_evaluations(paused(), ax=ax),
    "plot_tuned_lr": lambda r, d, ax: plots.plot_tuned_lr(BATCHES, ax=ax),
    "plot_schedule": lambda r, d, ax: plots.plot_schedule(TrainConfig.from_dict(r.config), ax=ax),
}

every_figure = pytest.mark.parametrize("name", FIGURES)
every_record_figure = pytest.mark.parametrize("name", RECORD_FIGURES)


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def blank() -> Axes:
    return Figure().subplots()


def test_every_public_figure_is_held_to_this_contract() -> None:
    assert set(FIGURES) == set(vars(plots))


@every_figure
def test_docstring_says_what_is_seen_when_sick_and_names_its_clauses(name: str) -> None:
    doc = inspect.getdoc(getattr(plots, name)) or ""
    assert "Healthy:" in doc or name == "plot_confirm"
    assert "Sick:" in doc
    assert re.search(r"Source: [FPT]\d", doc)


@every_figure
def test_draws_into_the_given_axes_and_leaves_no_trace(name: str) -> None:
    ax, before, open_before = blank(), dict(mpl.rcParams), plt.get_fignums()
    assert FIGURES[name](study(), diagnosis(), ax) is ax
    assert ax.has_data()
    assert ax.get_title(loc="left")
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.get_legend() is not None
    assert why_not_measured(ax) is None
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == open_before
    assert isinstance(FIGURES[name](study(), diagnosis(), None), Axes)
    assert len(plt.get_fignums()) == len(open_before) + 1


@every_figure
def test_a_column_of_a_paper_has_small_letters_and_nothing_on_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, name, partial(getattr(plots, name), size="column"))
    found = diagnosis()
    best = replace(
        found["lr.best"], evidence={**found["lr.best"].evidence, "measured_lr": 0.04}
    )  # its legend is longer
    ax = FIGURES[name](study(), replace(found, findings=tuple(best if f.code == best.code else f for f in found)), None)
    figure = ax.get_figure(root=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / "figure.pdf")
    figure.draw_without_rendering()  # places are then in its own pixels, not in those of a PDF
    assert figure.get_figwidth() == 3.3
    assert ax.get_position().width > 0.45
    assert b"/Type3" not in (tmp_path / "figure.pdf").read_bytes(), "publishers refuse fonts of type 3"
    words = [ax.xaxis.label, ax.yaxis.label, *ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels()]
    assert all(5 < word.get_fontsize() <= 8 for word in words)
    legend, inside = ax.get_legend(), figure.bbox
    box = legend.get_window_extent()
    assert box.y1 < min(ax.bbox.y0, ax.xaxis.label.get_window_extent().y0 + 1)
    for part in (box, ax.xaxis.label.get_window_extent(), ax.yaxis.label.get_window_extent()):
        assert part.x0 >= -1
        assert part.y0 >= -1
        assert part.x1 <= inside.width + 1


@every_figure
def test_a_legend_is_below_the_axes_of_a_figure_that_makes_room(name: str) -> None:
    figure = Figure(figsize=(10, 8), layout="constrained")
    (ax, _), (under, _) = figure.subplots(2, 2)
    legend = FIGURES[name](study(), diagnosis(), ax).get_legend()
    figure.draw_without_rendering()
    if legend is not None:
        box = legend.get_window_extent()
        assert under.bbox.y1 < box.y0 < box.y1 < ax.bbox.y0
        assert box.x1 < figure.bbox.width


def test_another_size_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UsageError, match='"page" or "column", not "poster"|ax=...'):
        plots.plot_loop(study(), size="poster")


@every_record_figure
def test_empty_record_says_not_measured_and_why(name: str) -> None:
    ax = RECORD_FIGURES[name](empty(), None, blank())
    assert why_not_measured(ax)
    assert any("not measured" in text.get_text() for text in ax.texts)


@every_record_figure
@pytest.mark.parametrize("values", [[np.nan], [1.0, np.inf], [0.0] * 20, [-1.0] * 20])
@pytest.mark.parametrize("stage", ["lr_sweep", "probe"])
def test_survives_poor_curves_and_renders(name: str, values: list[float], stage: str) -> None:
    record = one_trial(np.array(values), stage=stage, total_steps=max(len(values), 1))
    ax = RECORD_FIGURES[name](record, None, blank())
    ax.get_figure(root=True).canvas.draw()
    assert ax.has_data() or why_not_measured(ax)


@every_record_figure
def test_says_not_measured_when_every_value_is_nan(name: str) -> None:
    record = study()
    record.steps[["loss", "grad_norm"]] = np.nan
    record.evals["value"] = np.nan
    ax = RECORD_FIGURES[name](record, None, blank())
    ax.get_figure(root=True).savefig(io.BytesIO())
    infeasible = sum(len(line.get_xdata()) for line in ax.lines if "diverged" in str(line.get_label()))
    assert why_not_measured(ax) or infeasible > 0
