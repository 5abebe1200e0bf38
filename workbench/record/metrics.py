"""The one vocabulary of per-step metrics: name, unit, and the moment of measurement.

Row k of `.steps` shows the state that update k starts from, and the lr that it is made with.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import UnknownNameError, nearest

METRICS: dict[str, tuple[str, str]] = {
    "loss": ("loss", "weighted mean of the per-example training loss of batch k, before update k"),
    "loss_se": ("loss", "standard error of that mean, from the spread within the batch"),
    "lr": ("lr", "learning rate that update k uses"),
    "grad_norm": ("loss / parameter", "global L2 norm of the gradient before clipping, every step (F1.9, F4.7)"),
    "looked": ("0 or 1", "whether the gradient norm of a watched update was measured"),
    "clipped": ("0 or 1", "whether the clipping rule shortened the gradient (F4.6)"),
    "loss_scale": ("1", "what the loss of float16 is multiplied by for the gradient of step k"),
    "skipped": ("0 or 1", "whether the scaled gradient overflowed, so that step k made no update"),
    "update_norm": ("parameter", "L2 norm of update k, lr included; on a cadence"),
    "param_norm": ("parameter", "L2 norm of all trained parameters before update k; on a cadence"),
    "data_wait_s": ("s", "time that the loop waited for batch k"),
    "step_time_s": ("s", "host time from one step to the next, evaluation left out"),
    "update_ratio": ("1", "per parameter tensor: norm of update k / norm of the tensor before it; on a cadence"),
    "attention_logit": (
        "1",
        "largest logit of attention, of all layers and per layer: of a query and a key, scaled, before the softmax; on a cadence",
    ),
    "output_log_z": (
        "nats",
        "log Z, the logarithm of the output softmax's denominator, mean over tokens; on a cadence",
    ),
    "output_logit": ("1", "largest |output logit| of a language model; on a cadence"),
    "staleness_steps": ("updates", "updates of other workers between reading the parameters and applying update k"),
    "worker": ("index", "which worker made update k"),
    "pull_s": ("s", "time to read the parameters from the servers"),
    "compute_s": ("s", "time for forward and backward pass on the worker"),
    "push_s": ("s", "time until every server had applied the gradient"),
    "server_bytes": (
        "bytes",
        "per server: sent and received for an update, mean since it was asked last; on a cadence",
    ),
    "server_requests": ("requests", "per server: answered for an update, mean since it was asked last; on a cadence"),
}
"""Names of `.steps` -> unit, and what is measured when; a per-tensor or per-module metric is `name/where`. A hook of the user's own writes `user/name`."""


_LARGER = re.compile(
    r"accuracy|concordance|c_?index|(^|_)(acc|auc|auroc|bleu|correct|f1|iou|kappa|map|mcc|mrr|ndcg|precision|psnr|r2|recall|return|reward|score|ssim)(_|$|\d)|(^|_)top_?(k|\d+)"
)


_RANKS = re.compile(r"(^|_)(auc|auroc|roc)(_|$|\d)|c_?index|concordance")


def ranks(name: str) -> bool:
    """Tell by its name whether a metric is the share of pairs that are in the right order, 0.5 by chance (rule of thumb)."""
    return bool(_RANKS.search(name.lower())) and "pr_" not in name.lower()


def larger_is_better(name: str) -> bool:
    """Tell by its name whether an evaluated metric is one that nobody wants small, as "top1_acc" and unlike "iou_loss" (rule of thumb)."""
    return bool(_LARGER.search(name.lower())) and not name.lower().endswith(("loss", "err", "error"))


def passed_over(steps: Any) -> NDArray[np.bool_]:
    """Return which rows of a frame of `.steps` are updates that were not looked at: what they lack is not measured, and no fault."""
    if "looked" not in steps:
        return np.zeros(len(steps), dtype=bool)
    return np.asarray(steps["looked"].to_numpy(dtype=np.float64, na_value=np.nan) == 0)


def check_metric(name: str) -> None:
    """Raise `UnknownNameError` unless `name`, or its part before the first slash, is in `METRICS` or is `user`."""
    if name.split("/", 1)[0] not in (*METRICS, "user"):
        raise UnknownNameError(
            f"{name!r} is not a metric.{nearest(name, METRICS)} Write measurements of your own as 'user/{name}'."
        )
