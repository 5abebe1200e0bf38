"""`recommend`: the config to train with, adopted only where its selected checkpoints beat the baseline's (F3.12)."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from workbench.config import TrainConfig, is_callable_name
from workbench.curves.clipping import clipped_runs
from workbench.curves.judged import failed_when_proved, judged_runs, trials_with
from workbench.curves.lr_search import EDGE_MARGIN
from workbench.curves.minimised import judged_without_loss, selects_by_loss, without_loss
from workbench.curves.seed_comparison import (
    LIMIT,
    by_examples,
    by_faults,
    by_metrics,
    by_printed,
    by_room,
    by_size,
    by_spread,
    by_values,
    example_chance,
    prove,
)
from workbench.curves.selection import compare_selected, ended_early, selected
from workbench.curves.trial_curves import RecordLike, equal, plain_cell
from workbench.findings.advice import ADAM, ADVICE
from workbench.findings.causes import causes_first, vetoes_tuning
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.first_look import FIRST_LOOK, length_of_runs
from workbench.record.roles import SHORT, Role
from workbench.topics.clipping.ladder import masks

REMEDIES = (Role.FIX, Role.WARMUP_FULL, Role.CLIPPING)
"""Stages whose trials change something against instability, at full length."""
REMEDY_FIELDS = {"warmup": "warmup_steps", "clipping": "max_grad_norm"}
"""Advice that a study can try -> the config field that it changes."""
_OWN_LR = ("lr.too_high", "lr.too_low")
CHANGEABLE = ("peak_lr", "warmup_steps", "total_steps", "max_grad_norm")  # what a candidate may change


def cost_of(record: RecordLike) -> dict[str, Any]:
    """Return steps, seconds and trials of a study, how many are shorter than a baseline run, its steps over one's, and what a budget did not pay for."""
    trials = record.trials
    if not len(trials):
        return {"steps": 0, "seconds": 0.0, "trials": 0, "baseline_runs": None}
    length = trials["steps_run"].where(trials["state"] != "stopped", trials["total_steps"])
    alone = length[trials["stage"] == Role.BASELINE].to_list()
    steps = int(trials["steps_run"].sum())
    look = record.facts.get(FIRST_LOOK) or {"whole": alone[0] if alone else None}
    runs = steps / look["whole"] if look["whole"] else None
    short = int((trials["total_steps"] < look["whole"]).sum()) if look["whole"] else 0
    spent = {
        "steps": steps,
        "seconds": float(trials["seconds"].sum()),
        "trials": len(trials),
        "short": short,
        "baseline_runs": runs,
    }
    return spent | ({"budget": record.facts["budget"]} if record.facts.get("budget") else {})


def recommend(record: RecordLike, diagnosis: Diagnosis, *, limit: float = LIMIT) -> dict[str, Any]:
    """Return config, changed, own (values before), paste, baseline, recommended, candidate, chosen, adopted, reason, refuted, proof and examples.

    The best candidate of `screen`, or the second best where that one is refused and both were proved, is adopted where it wins
    over seeds (`prove`), or, where no proof was planned ("proof_seeds" in the facts), where it is better by more than its noise, and where nothing speaks
    against it. What training with it gives, under the seed that chose it, is `chosen`. Where the comparison itself speaks against
    the candidate, and no fault elsewhere or a lack of runs, `refuted` is the reason, else "". A study of shorter trials than the
    workload's own says so, because short runs prefer larger learning rates.

    Args:
        record: a study; its facts may hold "own_config", the workload's config at its own length.
        diagnosis: of the study, with `lr.best`.
        limit: see `prove`, half of it for a second candidate that is proved as well (Bonferroni); over the examples twice as much is allowed (rule of thumb).
    """
    fields = record.config
    given: dict[str, Any] = dict(record.facts.get("own_config") or fields)
    own = given if fields["total_steps"] <= given["total_steps"] else dict(fields)  # longer runs were asked for
    comparison = screen(record, diagnosis)
    changes: dict[str, Any] = {}
    if comparison["candidate"] is not None:
        comparison = _decided(record, comparison, limit)
        if not comparison["adopted"]:
            other = screen(record, diagnosis, without={comparison["candidate"]})
            held = limit if comparison["proof"] is None else limit / 2
            second = _decided(record, other, held) if other["candidate"] is not None else other
            if second["adopted"] and second["proof"] is not None:
                comparison = second
        if comparison["adopted"]:
            changes = _changes(config_of(record, comparison["recommended"]["trials"][0]), fields, own)
    elif without_loss(record) and selects_by_loss(record):
        said = (
            record.facts.get("not_minimised") or "the loss is not to be minimised, and checkpoints are selected by it"
        )
        comparison["reason"] = (
            f"Not adopted: {said}; name the metric that counts{' (--metric)' if record.facts.get('not_minimised') else ' in select'}."
        )
    elif comparison["baseline"] and not without_loss(record):
        comparison["reason"] = f"Not adopted: {_no_candidate(record, diagnosis)}."
    if fields["total_steps"] < own["total_steps"]:
        comparison["reason"] += (
            f" Measured in {fields['total_steps']:,} steps where the workload trains {own['total_steps']:,}: the best lr of the "
            "whole run is likely lower."
        )
    if own is not given:
        comparison["reason"] += (
            f" Measured in {own['total_steps']:,} steps, as asked for; the workload's config has {given['total_steps']:,}."
        )
    before = {name: own[name] for name in sorted(changes)}
    return {
        "config": own | changes,
        "changed": sorted(changes),
        "own": before,
        "paste": _paste(given, {n: v for n, v in (own | changes).items() if v != given.get(n)}),
        **comparison,
    }


def _no_candidate(record: RecordLike, diagnosis: Diagnosis) -> str:
    """Return why nothing was held against the baseline."""
    own, best = record.config["peak_lr"], diagnosis["lr.best"].value
    if best is None:
        return f"{diagnosis['lr.best'].evidence.get('reason', 'no best learning rate is known')}, so there is nothing to recommend"
    wrong = next((diagnosis[c] for c in _OWN_LR if c in diagnosis and diagnosis[c].status in ("warn", "fail")), None)
    tried = "no other change that was tried trains stably with a margin"
    rest = tried if tried_remedies(record) else "nothing else was tried"
    if wrong is not None:
        clipped = clipped_runs(record) if "grad_norm" in record.steps else []
        if wrong.code == "lr.too_low" and _held_back(record, clipped):
            return f"nearly every step is clipped, so a larger lr would only make up for that: raise max_grad_norm first; {rest}"
        return f"no lr that is better than the baseline's {own:.4g} keeps a margin to the edge, and {rest}"
    if equal(best, own) and "lr.grid_edge" in diagnosis and diagnosis["lr.grid_edge"].status == "not_measured":
        return f"no other of the few lrs that were trained {length_of_runs(record.facts)} is better, and {rest}"
    ends = diagnosis["lr.grid_edge"].evidence if "lr.grid_edge" in diagnosis else {}
    compared = f" from {ends['lowest_lr']:.4g} to {ends['highest_lr']:.4g}" if "lowest_lr" in ends else ""
    return f"no other lr{compared} is better than the baseline's {own:.4g} by enough to matter, and {rest}"


def _decided(record: RecordLike, comparison: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Return a comparison with what follows for its candidate: chosen, proof, examples, adopted, reason, and results over the seeds."""
    select, chosen = str(record.config["select"]), comparison["recommended"]
    candidate = config_of(record, chosen["trials"][0])
    found: dict[str, Any] = {"chosen": {"trial": chosen["trials"][0], select: chosen[select]}}
    found["proof"] = proof = prove(record, baseline=record.config, candidate=candidate, limit=limit)
    said, verdict, why, gain = comparison["said"], "", comparison["why"], comparison["gain"]
    failed = proof is None and candidate["peak_lr"] >= failed_when_proved(record)
    if failed:
        why = "it learns nothing under a fresh seed"
    elif proof is None and comparison["promising"] and record.facts.get("proof_seeds", 1) > 1:
        why = why or "it was not trained under fresh seeds"
    doubt = comparison["doubt"] or (why if proof is None and comparison["promising"] and not failed else "")
    if proof is not None:
        before, after = (
            selected(record, trials_with(record, c, seeds=proof["seeds"])) for c in (record.config, candidate)
        )
        found |= {"baseline": before, "recommended": after}
        said, verdict = f"Candidate: {comparison['candidate']}. {proof['said']}", proof["verdict"]
        gain, why = min(arm["gain"] for arm in proof["arms"]), "" if proof["wins"] else verdict
        doubt = doubt or by_values(record, after["trials"])
        pair = (before["trials"], after["trials"])
        why = why or doubt or by_room(record, *pair) or by_size(gain, proof["learned"]) or by_spread(proof)
        why = why or by_metrics(record, *pair)
    examples = example_chance(record, candidate=found.get("recommended", chosen)["trials"], gain=gain)
    why = comparison["against"] or why
    refused = "" if why else by_examples(examples, 2 * limit)
    why = why or refused
    doubt = doubt or (refused if examples is not None and not examples["enough"] else "")
    return dict(comparison) | found | {
        "examples": None if examples is None else examples | {"refused": bool(refused)}, "adopted": not why,
        "refuted": "" if doubt else why,
        "reason": f"{said} Not adopted: {why}." if why else f"{said} Adopted: {verdict}." if proof else f"{said} Worth trying: not proven under fresh seeds.",
    }  # fmt: skip


def screen(
    record: RecordLike, diagnosis: Diagnosis, *, without: Collection[str] = (), margin: float = EDGE_MARGIN
) -> dict[str, Any]:
    """Compare the baseline with everything that trained stably: the best lr, and what was tried against instability.

    The baseline counts with all its seeds. A candidate's trials of a proof do not: they would pull the one that was chosen
    towards its mean, and another one, whose luck nobody tested, would take its place. A peak lr has to keep a distance from the
    edge: with the baseline's warmup and clipping, or more of both, that of the sweep; else what runs at larger lrs show.

    Returns:
        What `compare_selected` does for the candidates that are not named in `without`, and against: why the candidate is not worth
        a proof, or "", doubt: the same where that is no word against the candidate itself, and untried: the candidate has to be
        trained at `margin` times its lr, as nothing shows yet how far it is from the edge.
    """
    found, keeps = _candidates(record, diagnosis, margin)
    candidates = {name: numbers for name, numbers in found.items() if name not in without}
    compared = compare_selected(record, baseline=trials_with(record, record.config), candidates=candidates)
    if compared["candidate"] is None:
        return compared
    ours, theirs = compared["baseline"]["trials"], compared["recommended"]["trials"]
    doubt = by_faults(judged_without_loss(record, diagnosis)) or by_values(record, theirs)
    against = doubt or by_room(record, ours, theirs) or by_printed(record, ours, theirs)
    if not against and compared["promising"]:
        against = by_size(compared["gain"], compared["learned"])
    worth = compared["promising"] and not against
    untried = keeps.get(compared["candidate"], True) is None
    if untried and not against:
        doubt = against = f"not trained at {margin:g} times its lr, so how far it is from the edge is not known"
    return compared | {"promising": worth, "untried": untried, "against": against, "doubt": doubt}


def _candidates(
    record: RecordLike, diagnosis: Diagnosis, margin: float
) -> tuple[dict[str, list[int]], dict[str, bool | None]]:
    """Return the trials of each candidate but those of a proof, and whether it keeps its distance from the edge; None where unknown."""
    fields = record.config
    proved = set(record.trials["trial"][record.trials["stage"] == Role.PROOF]) if len(record.trials) else set()

    def trained(config: Mapping[str, Any]) -> list[int]:
        return [number for number in trials_with(record, config) if number not in proved]

    if without_loss(record):
        swept = record.trials["peak_lr"][record.trials["stage"] == Role.LR_SWEEP].astype(float)
        lrs = set() if selects_by_loss(record) else {lr for lr in swept if not equal(lr, fields["peak_lr"])}
        return {f"lr {lr:.4g}": trained(fields | {"peak_lr": lr}) for lr in sorted(lrs)}, {}
    edge = diagnosis["lr.unstable"].value if "lr.unstable" in diagnosis else None
    highest = math.inf if edge is None else edge / margin * (1 + 1e-9)
    candidates: dict[str, list[int]] = {}
    keeps: dict[str, bool | None] = {}
    clipped = clipped_runs(record) if "grad_norm" in record.steps else []
    lr = _best_lr(diagnosis, highest)
    raised = lr is not None and lr > fields["peak_lr"]
    if lr is not None and not equal(lr, fields["peak_lr"]) and not (raised and _held_back(record, clipped)):
        candidates[f"lr {lr:.4g}"] = trained(fields | {"peak_lr": lr})
    # by their best values, where no curve is as long as the others, or proved before the search went on
    for trial in [*(ended_early(record)["trial"] if len(record.trials) else ()), *sorted(proved)]:
        config = config_of(record, trial)
        changed = {name for name, value in fields.items() if not equal(config[name], value)}
        if (
            changed == {"peak_lr"}
            and (lr := config["peak_lr"]) <= highest
            and not (lr > fields["peak_lr"] and _held_back(record, clipped))
        ):
            candidates[f"lr {lr:.4g}"] = trained(config)
    own = plain_cell(fields["max_grad_norm"])
    disguised = _disguised(clipped, edge)
    runs = judged_runs(record, set(record.trials["stage"]) - SHORT) if len(record.trials) else []
    full = [run for run in runs if run["total_steps"] >= fields["total_steps"]]
    for run in full:
        config = config_of(record, run["trial"])
        cure = run["stage"] in REMEDIES or (own is not None and config == fields | {"max_grad_norm": None})
        if not cure or run["lasting"] or (run["trial"] in disguised and not equal(run["max_grad_norm"], own)):
            continue
        kept = (run["lr"] <= highest and _protects(run, fields)) or _tried_beyond(run, full, margin)
        if kept is not False and all(equal(config[n], v) for n, v in fields.items() if n not in CHANGEABLE):
            name = _named(run, own)
            candidates[name], keeps[name] = trained(config), kept
    return candidates, keeps


def _best_lr(diagnosis: Diagnosis, highest: float) -> float | None:
    """Return the lr that is better than the own one, at a distance from the edge; None where the own one is as good."""
    own = [diagnosis[code] for code in _OWN_LR if code in diagnosis]
    wrong = [f for f in own if f.status in ("warn", "fail")]
    if own and not wrong:
        return None
    best = diagnosis["lr.best"]
    lrs = [lr for lr in (*(f.evidence.get("better_lr") for f in wrong), best.value) if lr is not None]
    if not lrs or lrs[0] <= highest:
        return lrs[0] if lrs else None
    points = [p for p in best.evidence.get("points", ()) if p["lr"] <= highest and not p["unstable"]]
    return min(points, key=lambda p: float(p["loss"]))["lr"] if points else None


def _held_back(record: RecordLike, clipped: Sequence[Mapping[str, Any]], *, frac: float = 0.9) -> bool:
    """Whether the baseline clips nearly every step (rule of thumb): a larger lr would only make up for the threshold."""
    own = trials_with(record, record.config)
    return any(row["trial"] in own and (row["clip_frac"] or 0.0) >= frac for row in clipped)


def _protects(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a run warms up as long as another config at least, and clips at its threshold or below."""
    clips = math.inf if (own := plain_cell(other["max_grad_norm"])) is None else own * (1 + 1e-9)
    return run["warmup_steps"] >= other["warmup_steps"] and (run["max_grad_norm"] or math.inf) <= clips


def _tried_beyond(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], margin: float) -> bool | None:
    """Whether training is stable with a run's warmup and clipping, or less of them, at `margin` times its lr; None where unknown."""
    top = margin * run["lr"]
    if any(_protects(run, other) and other["lr"] >= top * (1 - 1e-6) and not other["lasting"] for other in runs):
        return True
    near = [other for other in runs if run["lr"] < other["lr"] <= top * (1 + 1e-6)]
    return False if any(_protects(other, run) and other["lasting"] for other in near) else None


def _disguised(clipped: Sequence[Mapping[str, Any]], edge: float | None, *, aggressive_frac: float = 0.5) -> set[int]:
    """Return the clipped runs that hide an lr which is too high, or are a smaller one in disguise (F4.11, F4.12)."""
    return {row["trial"] for row in clipped if masks(row, edge) or (row["clip_frac"] or 0.0) >= aggressive_frac}


def tried_remedies(record: RecordLike) -> set[str]:
    """Return the names in `REMEDY_FIELDS` that some trial of a study changed at full length."""
    if not len(record.trials):
        return set()
    rows = record.trials[record.trials["stage"].isin(REMEDIES)]
    return {
        name
        for name, field in REMEDY_FIELDS.items()
        if field in rows and any(not equal(plain_cell(value), record.config[field]) for value in rows[field])
    }


def config_of(record: RecordLike, trial: int) -> dict[str, Any]:
    """Return the config that a trial was trained with, as plain values, its seeds those of the baseline."""
    row = record.trials[record.trials["trial"] == trial].iloc[0]
    config = {name: plain_cell(row[name]) for name in record.config}
    for name, value in record.config.items():
        if isinstance(value, int) and not isinstance(value, bool) and isinstance(config[name], float):
            config[name] = int(config[name])  # pandas may hold whole numbers as floats
    return config | {name: record.config[name] for name in ("shared_seed", "per_host_seed")}


def _named(run: Mapping[str, Any], own_clip: float | None) -> str:
    said = [f"lr {run['lr']:.4g}"]
    if run["warmup_steps"]:
        said.append(f"warmup {run['warmup_steps']}")
    if run["max_grad_norm"] is not None:
        said.append(f"clipping at {run['max_grad_norm']:.3g}")
    elif own_clip is not None:
        said.append("no clipping")
    return ", ".join(said)


def _changes(candidate: Mapping[str, Any], fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a candidate changes, its warmup stretched to the workload's own length."""
    changes = {n: candidate[n] for n in CHANGEABLE if n != "total_steps" and not equal(candidate[n], fields[n])}
    if "warmup_steps" in changes:
        added = round((candidate["warmup_steps"] - fields["warmup_steps"]) * own["total_steps"] / fields["total_steps"])
        changes |= {"warmup_steps": own["warmup_steps"] + added, "total_steps": own["total_steps"] + added}
    return changes


def _paste(own: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    if any(is_callable_name(own[name]) for name in ("optimizer", "schedule")):
        shown = "".join(f"    {name}={value!r},\n" for name, value in changes.items())
        return f"workload.config.replace(\n{shown})" if changes else "workload.config"
    return TrainConfig.from_dict(dict(own)).paste(**changes)


class NextStep(NamedTuple):
    """One line of advice: the finding that gives it first, whether the recommended config does it already, and whether it was tried in vain."""

    line: str
    code: str
    done: bool
    tried: bool


def next_steps(record: RecordLike, diagnosis: Diagnosis) -> list[NextStep]:
    """Return the advice of what is not well and stands for itself, causes first (F2.9, F2.10)."""
    tried, found = tried_remedies(record), diagnosis.recommendation or {}
    changed = set(found.get("changed") or ())
    remedies = {str(ADVICE[name]): name for name in REMEDY_FIELDS}
    done = {str(ADVICE[name]) for name, field in REMEDY_FIELDS.items() if field in changed}
    adopted = bool(found.get("adopted"))
    if adopted and "peak_lr" in changed:
        done |= {
            line for code in _OWN_LR if code in diagnosis for line in diagnosis[code].advice if " peak_lr to " in line
        }
    if adopted and "peak_lr" in changed and float(found["config"]["peak_lr"]) < float(record.config["peak_lr"]):
        done.add(str(ADVICE["lower_lr"]))  # proven better, it is no last resort, but what was wrong
    adaptive = str(record.config.get("optimizer")) in ADAM
    held = found.get("candidate") is not None and not adopted  # it had the best learning rate, or a better config
    moot = bool(
        vetoes_tuning(diagnosis.findings)
    )  # what to measure of lrs next: another one is the best once the fault is mended
    steps: dict[str, NextStep] = {}
    for finding in causes_first(f for f in diagnosis.findings if f.status != "ok"):
        if moot and finding.status == "not_measured" and finding.code.startswith("lr."):
            continue
        in_vain = finding.code == "lr.too_low" and held
        for line in finding.advice:
            if adaptive and line == str(ADVICE["optimizer"]):
                continue
            shown = line if line in done or "program" not in record.facts else line.split(" Cost with wb.")[0]
            steps.setdefault(line, NextStep(shown, finding.code, line in done, in_vain or remedies.get(line) in tried))
    return list(steps.values())
