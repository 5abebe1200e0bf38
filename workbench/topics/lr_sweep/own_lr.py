"""Is the person's own learning rate too high or too low? Held against what the sweep trained, by validation first (F1.6, F2.9)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from workbench.curves.judged import failed_when_proved, trials_with
from workbench.curves.lr_search import EDGE_MARGIN, BestLR, UnstableBracket, below_edge
from workbench.curves.selection import metric_sign, selected, selected_rows, unlearned
from workbench.curves.sweep import LRPoint, SweepTable
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status

_WORSE = "worse by the metric that selects checkpoints"
_NEAR = "next to the unstable ones"
_NAMED = 3  # lrs of better results that a sentence names (rule of thumb)
OWN_LR_CODES = CODES = Codes({"lr.too_high": "F2.9", "lr.too_low": "F1.6"})


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The best of some other learning rates, held against the person's own."""

    lr: float
    select: str  # what selects checkpoints; "training loss" where the record has no evaluations of it
    # own, value: the metric with the person's lr and with this one, under the seeds that both were trained with
    own: float
    value: float
    gain: float  # how much better `value` is; below 0 where it is worse
    noise: float  # of this lr's metric from evaluation to evaluation
    # `gain` as a share of what this lr learned by this metric; infinite where the own lr has no finite value
    share: float
    lost: float  # how much higher the own training loss ends, as a share of what the sweep learned
    proved: bool  # whether it was trained under several seeds
    passed: Mapping[float, str]  # the other lrs -> why they are not the rival; the best by `select` first

    def shows(self, share: float, *, noise_sds: float = 2.0) -> bool:
        """Tell whether the own lr loses at least this share of what could be learned, and more than the noise."""
        return self.share >= share and self.gain > noise_sds * self.noise

    @property
    def words(self) -> str:
        """The two results."""
        return f"{self.select} {self.own:.4g} against {self.value:.4g}"

    @property
    def left_out(self) -> str:
        """Which lrs of better results are not the rival, and why; "" where there is none."""
        alike: dict[str, list[str]] = {}
        for lr, why in [(lr, why) for lr, why in self.passed.items() if why != _WORSE][:_NAMED]:
            alike.setdefault(why, []).append(f"{lr:.4g}")
        told = ", ".join(f"{' and '.join(lrs)} ({why})" for why, lrs in alike.items())
        return f"; better in one run, but not chosen: {told}" if told else ""

    @property
    def less(self) -> str:
        """How the own lr compares, in words; a share of all that can be learned, and more, is no number that helps."""
        return f"learns {100 * self.share:.0f} % less than" if self.share < 1 else "trains worse than"

    def little(self, alarm: float, share: float | None = None) -> str:
        """Which share of what training gains the own lr loses, or that it is noise; "" where it loses nothing, or enough for an alarm."""
        share = self.share if share is None else share
        if not 0 < share < alarm:
            return ""
        if not self.gain > 2 * self.noise:
            return f", within twice the noise of {self.noise:.2g}"
        return f", a difference of {100 * share:.2g} % of what training gains (alarm: {100 * alarm:g} %)"


def best_rival(
    record: RecordLike, table: SweepTable, own: LRPoint, indices: Sequence[int], near: Sequence[int]
) -> Rival | None:
    """Return the best of some points by the selected metric, twice its noise counted against it; None where there is none.

    Those `near` the edge are no rivals.
    """
    select, sign = str(record.config.get("select", "")), metric_sign(record)
    points, beside = ([table.points[index] for index in some] for some in (indices, near))
    found, passed = [], dict[float, str]()
    for point in (*points, *beside) if len(record.evals) and select else ():
        shared = set(own.seeds) & set(point.seeds)
        ours, theirs = (
            selected(record, [n for n, seed in zip(p.trials, p.seeds, strict=True) if seed in shared])
            for p in (own, point)
        )
        if theirs:
            found.append((sign * theirs[select] + 2 * theirs["noise"], point, ours.get(select), theirs))
    if rivals := [item for item in found if item[1] in points]:
        _, point, mine, theirs = min(rivals, key=lambda item: item[0])
        value, noise = theirs[select], theirs["noise"]
        gain, learned = math.inf, 0.0
        if mine is not None:
            gain, learned = sign * (mine - value), _start(record, table, point) - sign * value
        share = math.inf if mine is None else gain / learned if learned > 0 else 0.0
        mine = math.nan if mine is None else mine
        for _, p, _, other in sorted(found, key=lambda item: sign * item[3][select]):
            unsteady = f"{select} there varies by {other['noise']:.2g} from evaluation to evaluation"
            worse = sign * other[select] >= sign * value
            passed[p.lr] = _WORSE if worse else _NEAR if p in beside else unsteady
    else:  # no evaluation to go by: by the training loss
        finite = [point for point in points if np.isfinite(point.loss)]
        if not finite:
            return None
        point = min(finite, key=lambda p: p.loss)
        select, mine, value = "training loss", own.loss, point.loss
        gain, noise = mine - value, point.loss_se if np.isfinite(point.loss_se) else 0.0
        share = gain / max(table.level - value, 1e-300)
        passed = {p.lr: _NEAR if p.loss < value else _WORSE for p in beside}
    lost = (own.loss - point.loss) / table.progress
    return Rival(
        lr=point.lr,
        select=select,
        own=mine,
        value=value,
        gain=gain,
        noise=noise,
        share=share,
        lost=lost,
        passed=passed,
        proved=len(trials_with(record, record.config | {"peak_lr": point.lr})) > 1,
    )


def differ_by_metric(
    record: RecordLike,
    table: SweepTable,
    points: Sequence[LRPoint],
    own: float,
    *,
    noise_sds: float = 2.0,
    material_frac: float = 0.02,
) -> str:
    """Return which of several lrs, alike by training loss, is worst by the selected metric, and by how much; "" where they are alike in it.

    Args:
        own: the baseline's lr, told beside the worst and the best.
        noise_sds: of the better one's noise from evaluation to evaluation, by which the worst has to lie apart.
        material_frac: share of what the best learned that the worst has to lose (O1 calls differences of 2 % equal).
    """
    select, sign = str(record.config.get("select", "")), metric_sign(record)
    every = [(selected(record, p.trials), p) for p in points] if len(record.evals) and select else []
    found = [(sign * theirs[select], p, theirs) for theirs, p in every if theirs]
    if len(found) < 2:
        return ""
    (low, best, theirs), (high, worst, _) = (pick(found, key=lambda item: item[0]) for pick in (min, max))
    learned = _start(record, table, best) - low
    if high - low <= max(noise_sds * theirs["noise"], material_frac * learned):
        return ""
    names = ["yours" if math.isclose(p.lr, own, rel_tol=1e-9) else f"{p.lr:.4g}" for p in (worst, best)]
    differ = len({len(p.trials) for _, p, _ in found}) > 1

    def shown(value: float, p: LRPoint) -> str:
        seeds = f"mean of {len(p.trials)} seeds" if len(p.trials) > 1 else "one seed"
        return f"{sign * value:.4g}{f' ({seeds})' * differ}"

    mine = [
        f", yours {shown(value, p)}: {100 * (value - low) / learned:.2g} % of what training gains"
        for value, p, _ in found
        if "yours" not in names and math.isclose(p.lr, own, rel_tol=1e-9) and learned > 0
    ]
    return f". By {select} of the selected checkpoints {names[0]} is the {'worse of the two' if len(found) == 2 else 'worst of them'}, {shown(high, worst)}; {names[1]} has {shown(low, best)}{''.join(mine)}"


def _start(record: RecordLike, table: SweepTable, point: LRPoint) -> float:
    """Return the cost of knowing nothing: the metric before the first step, or chance where it is a loss.

    A script may evaluate first when much is learned already: then that of a constant output, as far as its examples tell it, and of the
    training loss where that began.
    """
    rows = selected_rows(record, point.trials[0]).sort_values("step")
    first = float(rows["value"].iloc[0])
    if rows["step"].iloc[0] > 0 and str(record.config["select"]).endswith("/loss"):
        if record.config["select"] == "train/loss":
            return table.level
        if table.chance is not None:
            return table.chance
    return unlearned(record, first, table.chance)


def own_lr_findings(
    record: RecordLike,
    table: SweepTable,
    best: BestLR,
    bracket: UnstableBracket | None,
    *,
    ratio: float,
    material_frac: float,
    little_frac: float,
) -> list[Finding]:
    """Return `lr.too_high` and `lr.too_low`; at most one of them is not ok.

    `ratio` is how far another lr has to lie from the own one to be another; `material_frac` and `little_frac` are the shares of
    what it learns that the own one has to lose, and that are a failure (rules of thumb).
    """
    baseline = record.config.get("peak_lr")
    if not isinstance(baseline, (int, float)):
        return [CODES.not_measured(code, "the baseline has no learning rate") for code in CODES]
    own = next((p for p in table.points if math.isclose(p.lr, baseline, rel_tol=1e-9)), None)
    if own is None:
        return _unheld(float(baseline), best, bracket, ratio)
    calm = [i for i, p in enumerate(table.points) if math.isfinite(p.loss) and not p.unstable]
    trained = [i for i in calm if not table.exploded(table.points[i])] or calm
    smaller = [i for i in trained if table.points[i].lr * ratio <= own.lr * (1 + 1e-9)]
    larger = [i for i in trained if table.points[i].lr >= ratio * own.lr * (1 - 1e-9)]
    below, above = below_edge(table, smaller), below_edge(table, larger)
    refuted = failed_when_proved(record)
    above = [i for i in above if table.points[i].lr * EDGE_MARGIN <= refuted] or above
    limits = (material_frac, little_frac)
    under, over = (
        best_rival(record, table, own, some, [i for i in every if i not in some])
        for every, some in ((smaller, below), (larger, above))
    )
    high = _too_high(own, best, bracket, under, limits)
    return [high, _too_low(own, best, over, limits, ratio, other=high)]


def _too_high(
    own: LRPoint, best: BestLR, bracket: UnstableBracket | None, rival: Rival | None, limits: tuple[float, float]
) -> Finding:
    edge, start = None if bracket is None else bracket.middle, f"The baseline's lr {own.lr:.4g}"
    evidence = _evidence(own, best, rival) | {"unstable_lr": edge, "own_unstable": own.unstable}
    found = partial(CODES.finding, "lr.too_high", unit="lr", evidence=evidence)
    use, advice = _use(rival, best, own, "Lower")
    if own.unstable:
        beyond = "" if edge is None else f" ({own.lr / edge:.3g} times lr.unstable = {edge:.4g})"
        value = None if rival is None else rival.lr
        return found("fail", f"{start} does not train stably{beyond}{use}.", advice=advice, value=value)
    if rival is None or not rival.shows(limits[0]):
        if rival is None:
            return found("ok", f"{start} trains stably; no smaller one was trained.")
        return found("ok", f"{start} is not too high: {rival.words} at lr {rival.lr:.4g}{rival.little(limits[0])}.")
    if rival.lost < 0:  # it fits the training data better: what it loses on validation is overfitting
        worse = f"no worse than lr {rival.lr:.4g}, and validation worse ({rival.words})"
        return found("ok", f"{start} fits the training data {worse}: it overfits earlier.")
    summary = f"{start} is too high: it {rival.less} lr {rival.lr:.4g} ({rival.words}){use}."
    status: Status = "fail" if rival.share >= limits[1] else "warn"
    return found(status, summary, value=rival.lr, threshold=limits[0], advice=advice)


def _too_low(
    own: LRPoint, best: BestLR, rival: Rival | None, limits: tuple[float, float], ratio: float, *, other: Finding
) -> Finding:
    value, evidence = best.lr / own.lr, _evidence(own, best, rival)
    unit = "lr* / baseline lr"
    found = partial(CODES.finding, "lr.too_low", value=value, unit=unit, threshold=ratio, evidence=evidence)
    start = f"The baseline's lr {own.lr:.4g}"
    if other.status != "ok" or value <= ratio * (1 + 1e-9) or rival is None:
        return found("ok", f"{start} {_distance(value, ratio)} the best lr tried, {best.lr:.4g}.")
    if not rival.shows(limits[0]) or rival.lost < limits[0]:
        as_well = "about as well as" if rival.gain > 0 else "no worse than"
        well = f"{start} does {as_well} the larger {rival.lr:.4g}: {rival.words}"
        return found("ok", f"{well}{rival.little(limits[0], min(rival.share, rival.lost))}{rival.left_out}.")
    use, advice = _use(rival, best, own, "Raise")
    status: Status = "fail" if min(rival.share, rival.lost) >= limits[1] else "warn"
    summary = f"{start} is too low: it {rival.less} lr {rival.lr:.4g} ({rival.words}){use}."
    return found(status, summary, value=rival.lr / own.lr, advice=advice)


def _unheld(baseline: float, best: BestLR, bracket: UnstableBracket | None, ratio: float) -> list[Finding]:
    """Return what the distance to lr* and to the edge says where the baseline's own lr was not trained."""
    times = best.lr / baseline
    summary = f"The baseline's lr {baseline:.4g}, which was not trained, {_distance(times, ratio)} the best lr, {best.lr:.4g}."
    high = bracket is not None and baseline >= bracket.upper
    low = times > ratio * (1 + 1e-9) and baseline < best.low
    return [
        CODES.finding(
            code, "warn" if wrong else "ok", summary, value=value, unit=unit,
            evidence={"baseline_lr": baseline, "lr_star": best.lr},
            advice=[f"{word} peak_lr to {best.lr:.4g}."] if wrong else [],
        )
        for code, wrong, word, value, unit in (
            ("lr.too_high", high, "Lower", best.lr, "lr"), ("lr.too_low", low, "Raise", times, "lr* / baseline lr"),
        )
    ]  # fmt: skip


def _evidence(own: LRPoint, best: BestLR, rival: Rival | None) -> dict[str, Any]:
    found: dict[str, Any] = {"baseline_lr": own.lr, "lr_star": best.lr, "low": best.low, "better_lr": None}
    if rival is None:
        return found
    return found | {
        "better_lr": rival.lr, "select": rival.select, "own": rival.own, "better": rival.value, "noise": rival.noise,
        "share": rival.share, "lost_frac": rival.lost,
    }  # fmt: skip


def _distance(value: float, ratio: float) -> str:
    if value > ratio * (1 + 1e-9):
        return f"is {f'{value:.3g}' if value < 1000 else 'more than 1,000'} times below"
    if value * ratio < 1 - 1e-9:
        return f"is {f'{1 / value:.3g}' if value > 1e-3 else 'more than 1,000'} times above"
    return "is not far from"


def _use(rival: Rival | None, best: BestLR, own: LRPoint, word: str) -> tuple[str, list[str]]:
    lr = rival.lr if rival is not None else best.lr
    if not (lr < own.lr if word == "Lower" else lr > own.lr):
        return "", []
    other = rival is not None and not math.isclose(lr, best.lr, rel_tol=1e-9)
    how = "lowest training loss" if best.lr == best.measured_lr else "best by training loss"
    why = f" ({how}: {best.lr:.4g})" if other else ""
    if other and rival is not None and (passed := rival.passed.get(best.lr)):
        why = f", not {best.lr:.4g} ({how}, but {passed})"
    if rival is None or not rival.proved:
        return f": try {lr:.4g}{why}", [f"Try peak_lr={lr:.4g}: one run speaks for it."]
    return f": use {lr:.4g}{why}", [f"{word} peak_lr to {lr:.4g}."]


def _adopted(recommendation: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a config that is adopted and proved, where that is another than the person's."""
    changed = recommendation.get("adopted") and recommendation.get("proof") and "peak_lr" in recommendation["changed"]
    return float(recommendation["config"]["peak_lr"]) if changed else None


def settled_by_proof(record: RecordLike, diagnosis: Diagnosis, recommendation: Mapping[str, Any]) -> Diagnosis:
    """Return the diagnosis without the alarm that the comparison of selected checkpoints does not bear out; one that it does names the lr that is adopted."""
    why, adopted = recommendation.get("refuted"), _adopted(recommendation)
    if not why and adopted is None:
        return diagnosis

    def settled(finding: Finding) -> Finding:
        known, named = finding.evidence, finding.evidence.get("better_lr")
        if finding.code not in CODES or finding.status not in ("warn", "fail") or named is None:
            return finding
        if adopted is not None:
            lower = finding.code == "lr.too_high"
            if math.isclose(adopted, named, rel_tol=1e-9) or (adopted < known["baseline_lr"]) is not lower:
                return finding
            select = recommendation["config"]["select"]
            before, after = (recommendation[which][select] for which in ("baseline", "recommended"))
            return replace(
                finding, evidence={**known, "better_lr": adopted}, advice=(f"{'Lower' if lower else 'Raise'} peak_lr to {adopted:.4g}.",),
                value=adopted if lower else adopted / known["baseline_lr"],
                summary=f"The baseline's lr {known['baseline_lr']:.4g} is {finding.code[3:].replace('_', ' ')}: under fresh seeds lr {adopted:.4g}, which is adopted, trains better ({select} {before:.4g} against {after:.4g}).",
            )  # fmt: skip
        tried = set(trials_with(record, record.config | {"peak_lr": named}))
        if known.get("own_unstable") or not tried.issuperset(recommendation["recommended"]["trials"]):
            return finding
        said = (
            f"The baseline's lr {known['baseline_lr']:.4g} is not {finding.code[3:].replace('_', ' ')}: lr {named:.4g} looks better "
            f"under one seed ({known['select']} {known['own']:.4g} against {known['better']:.4g}), but is not adopted: {why}."
        )
        return replace(finding, status="ok", summary=said, advice=())

    return replace(diagnosis, findings=tuple(map(settled, diagnosis.findings)))
