"""Does the periodic metric rank checkpoints as the offline one does, and not only because both fall? Spearman's correlation (P2.4)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Finding
from workbench.record.read import periodic_rows
from workbench.topics.evaluation.common_trend import trend_free_correlation

__all__ = ["RankCorrelation", "judge_proxy", "paired_checkpoints", "rank_correlation"]

Floats = NDArray[np.float64]


class RankCorrelation(NamedTuple):
    """Spearman's correlation with the ends of its interval; NaN where a series is constant."""

    value: float
    low: float
    high: float
    checkpoints: int


def rank_correlation(one: Floats, other: Floats, *, confidence: float = 0.95) -> RankCorrelation:
    """Return Spearman's correlation of two series, non-finite pairs left out.

    The interval is that of Fisher's z with the standard error sqrt((1 + r^2 / 2) / (n - 3)) of Bonett and Wright (2000). It
    takes the pairs for independent; checkpoints of one run follow a common trend, so it is rather too narrow.

    Args:
        one: shape (checkpoints,).
        other: same shape.
        confidence: of the interval.
    """
    kept = np.isfinite(one) & np.isfinite(other)
    a, b, n = one[kept], other[kept], int(kept.sum())
    if n < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return RankCorrelation(math.nan, math.nan, math.nan, n)
    r = float(stats.spearmanr(a, b).statistic)
    inside = float(np.clip(r, -1 + 1e-12, 1 - 1e-12))
    half = float(stats.norm.ppf(0.5 + confidence / 2)) * math.sqrt((1 + r * r / 2) / (n - 3))
    z = math.atanh(inside)
    return RankCorrelation(r, math.tanh(z - half), math.tanh(z + half), n)


def paired_checkpoints(
    record: RecordLike, *, metric: str, split: str, offline_split: str | None = None
) -> pd.DataFrame:
    """Return trial, step, periodic and offline value of every checkpoint that has both.

    Args:
        record: a study.
        metric: name of the metric.
        split: of the periodic rows.
        offline_split: of the offline rows; None is the same.
    """
    evals = record.evals
    empty = pd.DataFrame(columns=["trial", "step", "periodic", "offline"])
    if evals.empty or "setting" not in evals:
        return empty
    keys = ["trial", "step"]
    of_metric = evals[evals["metric"] == metric]
    live = periodic_rows(of_metric[of_metric["split"] == split])
    after = of_metric[(of_metric["setting"] == "offline") & (of_metric["split"] == (offline_split or split))]
    joined = live[[*keys, "value"]].merge(after[[*keys, "value"]], on=keys, suffixes=("_live", "_after"))
    named = joined.rename(columns={"value_live": "periodic", "value_after": "offline"})
    return named.drop_duplicates(keys).sort_values(keys, ignore_index=True) if len(named) else empty


def judge_proxy(
    record: RecordLike,
    *,
    offline_split: str | None,
    min_correlation: float,
    min_checkpoints: int,
    confidence: float,
    resolution: float,
) -> Finding:
    """Return `evaluation.bad_proxy`; the thresholds are those of `diagnose_evaluation`."""
    split, metric = str(record.config["select"]).split("/", 1)
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    pairs = paired_checkpoints(record, metric=metric, split=split, offline_split=offline_split)
    part = _subset(record, split)
    proxy = f"{split}/{metric}" + (f" on {part['id']} ({part['size']} of {part['of']} examples)" if part else "")
    evidence: dict[str, Any] = {"proxy": proxy, "subset": part, "checkpoints": len(pairs)}
    if pairs.empty and part is None and not record.evals.empty:
        return _finding(
            "ok",
            f"Periodic evaluation uses the whole {split} split: nothing stands in for it.",
            evidence,
            min_correlation,
        )
    if len(pairs) < min_checkpoints:
        said = f"Not measured: {len(pairs)} checkpoints have both a periodic and an offline {metric}, {min_checkpoints} are needed."
        return _finding(
            "not_measured",
            said,
            evidence,
            min_correlation,
            advice=["Keep more checkpoints (keep_best), then call evaluate_offline."],
        )
    periodic, offline = (pairs[name].to_numpy(dtype=np.float64) for name in ("periodic", "offline"))
    found = rank_correlation(periodic, offline, confidence=confidence)
    if not math.isfinite(found.value):
        said = f"Not measured: the periodic or the offline {metric} is constant, or not finite, over {len(pairs)} checkpoints."
        return _finding("not_measured", said, evidence, min_correlation)
    best = int(np.nanargmin(sign * offline))
    chosen = int(np.nanargmin(sign * periodic))
    late = len(pairs) // 2
    evidence |= {
        "low": found.low, "high": found.high, "confidence": confidence,
        "late_correlation": rank_correlation(periodic[late:], offline[late:]).value,
        "chosen_step": int(pairs["step"][chosen]), "best_step": int(pairs["step"][best]),
        "regret": float(sign * (offline[chosen] - offline[best])),
    }  # fmt: skip
    beside = trend_free_correlation(
        pairs["step"].to_numpy(dtype=np.float64),
        periodic,
        offline,
        trials=pairs["trial"].tolist(),
        confidence=confidence,
    )
    evidence |= {"trend_free": beside.value, "trend_free_low": beside.low}
    shown = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
    evidence["coarse_correlation"] = rank_correlation(_coarse(periodic, resolution), _coarse(offline, resolution)).value
    said = f"Over {found.checkpoints} checkpoints {proxy} and the offline metric have the rank correlation {shown}"
    if found.value >= min_correlation and beside.low > 0:
        said = f"{said}, and {beside.value:.2f} (from {beside.low:.2f}) beside the trend that both follow"
        return _finding("ok", f"{said}.", evidence, min_correlation, value=found.value)
    if found.value >= min_correlation:
        left = (
            "nothing is left of it" if math.isnan(beside.value)
            else f"{beside.value:.2f} is left of it, which may be chance with {beside.points} points"
        )  # fmt: skip
        return _finding(
            "not_measured",
            f"Not measured: {said[0].lower()}{said[1:]}, but any two curves that fall have: without the trend that both follow {left}.",
            evidence,
            min_correlation,
            value=found.value,
            advice=["Keep more checkpoints, and train until the metric levels off: only there does the proxy choose."],
        )
    small = resolution * float(np.ptp(offline[np.isfinite(offline)]))
    if evidence["coarse_correlation"] >= min_correlation and evidence["regret"] <= small:
        return _finding(
            "ok",
            f"{said}; those that it orders otherwise differ by less than {small:.2g}.",
            evidence,
            min_correlation,
            value=found.value,
        )
    if found.high >= min_correlation:
        said = f"Not measured: {said[0].lower()}{said[1:]}, too few to tell it from {min_correlation:g}."
        return _finding(
            "not_measured", said, evidence, min_correlation, value=found.value, advice=["Keep more checkpoints."]
        )
    cost = (
        f"; the checkpoint that it picks is {evidence['regret']:.3g} worse offline than the best"
        if evidence["regret"] > 0
        else ""
    )
    return _finding(
        "warn", f"{said}: it ranks other checkpoints first{cost}.", evidence, min_correlation, value=found.value,
        advice=["Evaluate on more examples, drawn at random from the whole split.", "Select by the metric that counts offline."],
    )  # fmt: skip


def _coarse(values: Floats, resolution: float) -> Floats:
    """Return the values in units of a share of their range: what differs by less is mostly a tie."""
    finite = values[np.isfinite(values)]
    coarse: Floats = np.round((values - finite.min()) / (resolution * (float(np.ptp(finite)) or 1.0)))
    return coarse


def _subset(record: RecordLike, split: str) -> dict[str, Any] | None:
    """Return what is known of the subset that periodic rows of a split name; None where they are of the whole split."""
    evals = record.evals
    if evals.empty or "subset" not in evals:
        return None
    live = periodic_rows(evals[evals["split"] == split])
    named = live[live["subset"].fillna("") != ""]
    if named.empty:
        return None
    row = named.iloc[-1]
    known = (record.facts.get("subset") or {}) if isinstance(record.facts, dict) else {}
    return {"id": str(row["subset"]), "size": int(row["num_examples"]), "of": known.get("of", "?")}


def _finding(status: Any, summary: str, evidence: dict[str, Any], threshold: float, **more: Any) -> Finding:
    return Finding(
        code="evaluation.bad_proxy", status=status, summary=summary, unit="rank correlation", threshold=threshold,
        evidence=evidence, clause="P2.4", **more,
    )  # fmt: skip
