"""Does the periodic metric rank checkpoints as the offline one does, and not only because both fall? Spearman's correlation (P2.4)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from workbench.curves.selection import metric_sign
from workbench.curves.trial_curves import RecordLike
from workbench.findings.finding import Codes, Finding
from workbench.record.read import periodic_rows

CODES = Codes({"evaluation.bad_proxy": "P2.4"})
OVERLAP = 35 / 18
"""Points that count as one: residuals of white noise about the midpoints of their neighbours have the autocorrelations -2/3 and 1/6.

By Bartlett's formula the variance of a correlation of two such series is 1 + 2 (4/9 + 1/36) times that of independent points.
"""
Floats = NDArray[np.float64]


class RankCorrelation(NamedTuple):
    """Spearman's correlation with the ends of its interval; NaN where a series is constant, or nothing is left of it."""

    value: float
    low: float
    high: float
    points: int


def _with_interval(r: float, freedom: float, quantile: float, points: int) -> RankCorrelation:
    """Return a rank correlation with the interval of Fisher's z, standard error as by Bonett and Wright (2000)."""
    if not math.isfinite(r) or freedom <= 0:
        return RankCorrelation(r, math.nan, math.nan, points)
    z, half = math.atanh(float(np.clip(r, -1 + 1e-12, 1 - 1e-12))), float(stats.norm.ppf(quantile))
    half *= math.sqrt((1 + r**2 / 2) / freedom)
    return RankCorrelation(r, math.tanh(z - half), math.tanh(z + half), points)


def rank_correlation(one: Floats, other: Floats, *, confidence: float = 0.95) -> RankCorrelation:
    """Return Spearman's correlation of two series of shape (checkpoints,), non-finite pairs left out, with a two-sided interval."""
    kept = np.isfinite(one) & np.isfinite(other)
    a, b, n = one[kept], other[kept], int(kept.sum())
    known = n >= 4 and np.ptp(a) > 0 and np.ptp(b) > 0
    return _with_interval(float(stats.spearmanr(a, b).statistic) if known else math.nan, n - 3, 0.5 + confidence / 2, n)


def trend_free_correlation(
    steps: Floats, one: Floats, other: Floats, *, trials: Sequence[int] | None = None, confidence: float = 0.95
) -> RankCorrelation:
    """Correlate how far each point lies from the line through its neighbours in the same trial, the rank of the step held fixed.

    Any two curves that fall have a rank correlation near 1, whatever else they do. The distance from the neighbours' line is free of
    a straight trend, and holding the step fixed takes the curvature that both share. Two exponential falls with independent noise
    pass `low > 0` in 1 to 7 % of cases at 21 points, and in up to 13 % at 41, the most where noise and curvature are alike.

    All have the shape (checkpoints,); pairs that are not finite are left out. `low`, or `high`, is one-sidedly right with `confidence`.

    Source: Bartlett (1946) for the variance; Bonett and Wright (2000) for the interval of a rank correlation.
    """
    runs = np.zeros(len(steps)) if trials is None else np.asarray(trials)
    kept = np.isfinite(one) & np.isfinite(other)
    parts = [np.flatnonzero(kept & (runs == run)) for run in np.unique(runs)]
    parts = [part[np.argsort(steps[part])] for part in parts if len(part) > 2]
    points = sum(len(part) - 2 for part in parts)
    if points < 4:
        return RankCorrelation(math.nan, math.nan, math.nan, points)
    beside = [np.concatenate([_beside_neighbours(steps[p], values[p]) for p in parts]) for values in (one, other)]
    ranks = [stats.rankdata(v) for v in (*beside, np.concatenate([steps[part][1:-1] for part in parts]))]
    value = math.nan
    if min(np.ptp(rank) for rank in ranks) > 0:
        (_, both, first), (_, _, second), _ = np.corrcoef(ranks)
        left = (1 - first**2) * (1 - second**2)
        value = float((both - first * second) / math.sqrt(left)) if left > 1e-9 else math.nan
    return _with_interval(value, points / OVERLAP - 4, confidence, points)


def _beside_neighbours(steps: Floats, values: Floats) -> Floats:
    share = (steps[1:-1] - steps[:-2]) / (steps[2:] - steps[:-2])
    beside: Floats = values[1:-1] - ((1 - share) * values[:-2] + share * values[2:])
    noise = 1e-9 * (float(np.ptp(values)) or 1.0)  # of rounding, which would be ranked as well
    return np.where(np.abs(beside) < noise, 0.0, beside)


def paired_checkpoints(record: RecordLike, *, offline_split: str | None = None) -> pd.DataFrame:
    """Return trial, step, periodic and offline selected metric of every checkpoint that has both; `offline_split` None is the same split."""
    evals, keys, (split, metric) = record.evals, ["trial", "step"], str(record.config["select"]).split("/", 1)
    if evals.empty or "setting" not in evals:
        return pd.DataFrame(columns=[*keys, "periodic", "offline"])
    live = periodic_rows(evals[(evals["metric"] == metric) & (evals["split"] == split)])
    after = evals[
        (evals["setting"] == "offline") & (evals["split"] == (offline_split or split)) & (evals["metric"] == metric)
    ]
    columns = {"value_x": "periodic", "value_y": "offline"}
    pairs = live[[*keys, "value"]].merge(after[[*keys, "value"]], on=keys).rename(columns=columns)
    return pairs.drop_duplicates(keys).sort_values(keys, ignore_index=True)


def judge_proxy(
    record: RecordLike, *, offline_split: str | None, min_correlation: float, min_checkpoints: int, confidence: float,
    resolution: float,
) -> Finding:  # fmt: skip
    """Return `evaluation.bad_proxy`; the thresholds are those of `diagnose_evaluation`."""
    code, sign = "evaluation.bad_proxy", metric_sign(record)
    split, metric = str(record.config["select"]).split("/", 1)
    pairs, part = paired_checkpoints(record, offline_split=offline_split), _subset(record, split)
    proxy = f"{split}/{metric}" + (f" on {part['id']} ({part['size']} of {part['of']} examples)" if part else "")
    evidence: dict[str, Any] = {"proxy": proxy, "subset": part, "checkpoints": len(pairs)}
    known: dict[str, Any] = {"unit": "rank correlation", "threshold": min_correlation, "evidence": evidence}
    if pairs.empty and part is None and not record.evals.empty:
        said = f"Periodic evaluation uses the whole {split} split: there is no proxy."
        return CODES.finding(code, "ok", said, **known)
    if len(pairs) < min_checkpoints:
        said = f"{len(pairs)} checkpoints have both a periodic and an offline {metric}, {min_checkpoints} are needed"
        advice = ["Keep more checkpoints (keep_best), then call evaluate_offline."]
        return CODES.not_measured(code, said, advice=advice, **known)
    periodic, offline = (pairs[name].to_numpy(dtype=np.float64) for name in ("periodic", "offline"))
    found = rank_correlation(periodic, offline, confidence=confidence)
    if not math.isfinite(found.value):
        said = f"the periodic or the offline {metric} is constant, or not finite, over {len(pairs)} checkpoints"
        return CODES.not_measured(code, said, **known)
    best, chosen = (int(np.nanargmin(sign * values)) for values in (offline, periodic))
    steps = pairs["step"].to_numpy(dtype=np.float64)
    beside = trend_free_correlation(steps, periodic, offline, trials=pairs["trial"].tolist(), confidence=confidence)
    evidence |= {
        "low": found.low, "high": found.high, "confidence": confidence,
        "chosen_step": int(pairs["step"][chosen]), "best_step": int(pairs["step"][best]),
        "regret": float(sign * (offline[chosen] - offline[best])),
        "trend_free": beside.value, "trend_free_low": beside.low,
        "coarse_correlation": rank_correlation(_coarse(periodic, resolution), _coarse(offline, resolution)).value,
    }  # fmt: skip
    known["value"] = found.value
    shown = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
    said = f"Over {found.points} checkpoints {proxy} and the offline metric have the rank correlation {shown}"
    if found.value >= min_correlation and beside.low > 0:
        said = f"{said}, and {beside.value:.2f} (from {beside.low:.2f}) beside the trend that both follow."
        return CODES.finding(code, "ok", said, **known)
    if found.value >= min_correlation:
        left = f"{beside.value:.2f} is left of it, which {beside.points} points do not tell from noise"
        left = "nothing is left of it" if math.isnan(beside.value) else left
        return CODES.not_measured(
            code, f"o{said[1:]}, but any two curves that fall have: without the trend that both follow {left}", **known,
            advice=["Keep more checkpoints, and train until the metric levels off: only there does the proxy choose."],
        )  # fmt: skip
    small = resolution * float(np.ptp(offline[np.isfinite(offline)]))
    if evidence["coarse_correlation"] >= min_correlation and evidence["regret"] <= small:
        said = f"{said}; those that it orders otherwise differ by less than {small:.2g}."
        return CODES.finding(code, "ok", said, **known)
    if found.high >= min_correlation:
        said = f"o{said[1:]}, too few to tell it from {min_correlation:g}"
        return CODES.not_measured(code, said, advice=["Keep more checkpoints."], **known)
    regret = evidence["regret"]
    cost = f"; the checkpoint that it picks is {regret:.3g} worse offline than the best" if regret > 0 else ""
    return CODES.finding(
        code, "warn", f"{said}: it ranks other checkpoints first{cost}.", **known,
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
    row, of = named.iloc[-1], (record.facts.get("subset") or {}).get("of", "?")
    return {"id": str(row["subset"]), "size": int(row["num_examples"]), "of": of}
