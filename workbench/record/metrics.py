"""The one vocabulary of per-step metrics: name, unit, and the moment of measurement.

Row k of `.steps` shows the state that update k starts from, and the lr that it is made with.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import UnknownNameError, nearest

__all__ = ["METRICS", "Metric", "check_metric"]


@dataclass(frozen=True)
class Metric:
    """One column of `.steps`: its unit and what it measures when."""

    unit: str
    moment: str


METRICS: dict[str, Metric] = {
    "loss": Metric("loss", "weighted mean of the per-example training loss of batch k, before update k"),
    "loss_se": Metric("loss", "standard error of that mean, from the spread within the batch"),
    "lr": Metric("lr", "learning rate that update k uses"),
    "grad_norm": Metric("loss / parameter", "global L2 norm of the gradient before clipping, every step (F1.9, F4.7)"),
    "clipped": Metric("0 or 1", "whether the clipping rule shortened the gradient (F4.6)"),
    "update_norm": Metric("parameter", "L2 norm of update k, lr included; on a cadence"),
    "param_norm": Metric("parameter", "L2 norm of all trained parameters before update k; on a cadence"),
    "data_wait_s": Metric("s", "time that the loop waited for batch k"),
    "step_time_s": Metric("s", "host time from one step to the next, evaluation left out"),
    "update_ratio": Metric("1", "per parameter tensor: norm of update k / norm of the tensor before it; on a cadence"),
    "staleness_steps": Metric(
        "updates", "updates of other workers between reading the parameters and applying update k"
    ),
    "worker": Metric("index", "which worker made update k"),
    "pull_s": Metric("s", "time to read the parameters from the servers"),
    "compute_s": Metric("s", "time for forward and backward pass on the worker"),
    "push_s": Metric("s", "time until every server had applied the gradient"),
    "server_bytes": Metric(
        "bytes", "per server: sent and received for an update, mean since it was asked last; on a cadence"
    ),
    "server_requests": Metric(
        "requests", "per server: answered for an update, mean since it was asked last; on a cadence"
    ),
    "activation_rms": Metric("1", "per module: root mean square of its output; on a cadence"),
    "activation_zero_frac": Metric("1", "per module: share of outputs that are exactly 0; on a cadence"),
}
"""Names of `.steps`; a per-tensor or per-module metric is `name/where`. A hook of the user's own writes `user/name`."""


def check_metric(name: str) -> None:
    """Raise `UnknownNameError` unless `name`, or its part before the first slash, is in `METRICS` or is `user`."""
    if name.split("/", 1)[0] not in (*METRICS, "user"):
        raise UnknownNameError(
            f"{name!r} is no metric.{nearest(name, METRICS)} Write measurements of your own as 'user/{name}'."
        )
