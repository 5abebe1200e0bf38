"""`diagnose_program`: the playbook for a command that trains, with no change to it (F1, F2, F3)."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from workbench.curves.clipping import clipped_runs
from workbench.curves.judged import judged
from workbench.curves.lr_search import EDGE_MARGIN
from workbench.curves.minimised import judged_without_loss, selects_by_loss
from workbench.curves.seed_comparison import by_faults
from workbench.curves.selection import ended_early, selected
from workbench.curves.trial_curves import RecordLike
from workbench.findings.answers import is_unproved
from workbench.findings.causes import causes_first
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.first_look import as_first_look
from workbench.playbook.plan import CLEAR_SEEDS, PROGRAM_RUNS, plan_program
from workbench.playbook.verdict import held_to_the_end, why_left_out, with_report
from workbench.programs.command import Command, check_command
from workbench.programs.on_ray import on_ray
from workbench.programs.session import ProgramSession, metric_of, open_program
from workbench.programs.trainer import ProgramTrainer, Repeatable
from workbench.progress import in_script, interruptible
from workbench.record.folder import write_json
from workbench.record.read import StudyRecord
from workbench.record.roles import Role
from workbench.studies.budget import Budget, BudgetSpent
from workbench.studies.session import executor_of
from workbench.topics.batch_norm.diagnose import diagnose_seen_batches
from workbench.topics.clipping.diagnose import clipped_values, diagnose_clipping, tried_only
from workbench.topics.clipping.study import ClippingStudy
from workbench.topics.input.diagnose import diagnose_input_share
from workbench.topics.loop.diagnose import diagnose_loop
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.own_lr import settled_by_proof
from workbench.topics.lr_sweep.study import LRSweep, TrialRequest, run_round
from workbench.topics.one_batch.diagnose import falls_without_end
from workbench.topics.optimizers.constants import diagnose_replaced, replaced
from workbench.topics.recommendation.diagnose import CHANGEABLE, config_of, cost_of, next_steps, recommend, screen
from workbench.topics.recommendation.study import Proof, constants_of, replace_suspects
from workbench.topics.schedule.diagnose import diagnose_schedule
from workbench.topics.stability.diagnose import diagnose_instability
from workbench.topics.stability.study import InstabilityStudy

_LEAST = 40
"""Updates of the probe at least (rule of thumb)."""
_CONFIRMED = 10.0
"""Times lr* up to which a training that is unstable needs no confirmation run (F1.13)."""
_EXACT, _ROUGH = 0.05, 0.6
"""Width of the bracket around `lr.unstable`: on minibatches another seed moves it by as much as the margin that a recommended lr keeps,
and two runs cut a factor of 4 so far (rule of thumb)."""
_HEAVY = 0.5
"""Share of the steps that the program's own clipping shortens from which it is run once more without (F4.12)."""
_STEP = 4.0
"""Factor by which the sweep climbs from the program's own lr, which somebody has chosen already: runs of full length, for a short one needs
the program's whole start and prefers larger lrs (rule of thumb)."""
_FINER = 2
"""Lrs near lr* that are tried besides the grid where every update sees all examples (rule of thumb: each costs a whole run of somebody's program)."""
_BLIND_DECADES = 3.7
"""How far from its own lr a program that learns nothing is tried, both ways together: a factor of 64 each (rule of thumb)."""
_BAD_START = ("lr.probabilistic", "stability.early", "stability.early_recovers", "lr.too_high", "lr.nothing_learns")
_MID = ("stability.mid", "stability.spike")
_OF_OPTIMIZER = ("loop.optimizer_mismatch", "loop.unowned_parameters")
"""Findings that are mended where the optimizer is built."""


def diagnose_program(
    words: Sequence[str],
    out: str | Path | None = None,
    *,
    folder: str | Path = ".",
    steps: int | None = None,
    metric: str | None = None,
    metric_mode: str | None = None,
    seeds: int = 3,
    seed_arg: str | None = None,
    redirect: Sequence[str] = (),
    copy: bool = False,
    jobs: int = 1,
    threads: int | None = None,
    timeout_s: float | None = None,
    budget: str | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
    name: str | None = None,
    note: str | None = None,
    command: str | None = None,
    progress: bool = False,
) -> Diagnosis:
    """Walk the playbook for a command that trains, such as `["python", "train.py"]`: verdict, evidence, and the lines to change.

    The command is run as it is, and again with learning rates times a factor, with a warmup, with its gradients clipped, under other
    seeds, and ended early: all at the boundary of its optimizer. Each run is in a folder of its own; no file of `folder` is overwritten.

    Args:
        words: the command.
        out: the study's folder; None is a new one under `runs/`.
        folder: where the command is run from.
        steps: updates after which every run is ended; None lets the program end by itself.
        metric: what runs are compared by: a pattern whose first group is the value in a line that the program prints, such as
            "val loss ([0-9.]+)", the name of a value that it gives to `wb.log`, or "train_loss". None is the validation loss where it
            logs one or prints it twice or more, else the training loss.
        metric_mode: "min" or "max"; None tells by the name.
        seeds: runs of the baseline and of a candidate that prove it, under seeds that had no part in choosing it; 1 proves nothing.
        seed_arg: the program's own argument for its seed, such as "--seed"; None moves the seeds that it sets by the trial's.
        redirect: files and folders that the program writes to; each run gets an empty one.
        copy: give each run a copy of the folder instead of links to its files.
        jobs: runs at a time; on a Ray cluster as many as there is room for.
        threads: of torch in each run; None leaves it to the program.
        timeout_s: that a run may take.
        budget: what it may cost, as for `workbench.diagnose`.
        executor: "ray" has the runs made on a Ray cluster, whose machines share `folder` under the same path.
        address: of the cluster; None is one on this machine.

    Raises:
        ClusterError: the cluster is not there, or has no room for a run.
        UsageError: the command does not exist, or would overwrite a file of `folder`.
        WorkbenchError: it fails by itself, or never steps a torch optimizer.
        StudyInterrupted: Ctrl-C; the same call goes on.
    """
    where = Path(folder).resolve()
    patterns, select, mode = metric_of(metric, metric_mode)
    given = Command(
        words=check_command(words, where), folder=where, redirect=tuple(redirect), copy=copy, seed_arg=seed_arg, patterns=patterns, timeout_s=timeout_s,
    )  # fmt: skip
    trainer = ProgramTrainer(jobs=jobs, threads=threads)
    options: dict[str, Any] = {"name": name, "note": note, "command": command, "progress": progress}
    options["budget"] = Budget.of(budget, seeds)
    options |= {"steps": steps, "metric": metric, "select": select, "mode": mode, "seeds": seeds}
    elsewhere = executor_of(executor, address)
    if progress:
        print(plan_program(options["budget"], seeds=seeds), file=sys.stderr)
    if elsewhere is None:
        return walk(given, trainer, out, **options)
    with on_ray(given, address) as there:
        return walk(there, replace(trainer, jobs=there.room(threads)), out, **options)


@interruptible()
def walk(
    given: Repeatable, trainer: ProgramTrainer, out: str | Path | None, *, seeds: int, progress: bool | None, **how: Any
) -> Diagnosis:
    """Walk the playbook for a training that is run as it is, and write verdict and report into its study's folder."""
    told = progress is None and in_script()
    with open_program(given, trainer, out, seeds=seeds, progress=progress or told, **how) as session:
        with suppress(BudgetSpent):
            _walk(session, seeds)
        session.keep_budget()
        if given.remark:
            session.facts(processes=given.remark)
        record = session.record
        diagnosis = judge_program(record)
        session.left_out(why_left_out(diagnosis))
        write_json(record.path / "diagnosis.json", diagnosis.to_dict())
    return with_report(record.path, diagnosis, told=told)


def _walk(session: ProgramSession, seeds: int) -> None:
    parts = [part.name for part in plan_program(session.budget, seeds=seeds).stages]
    session.plan(1.0 + PROGRAM_RUNS + 2.0 * (seeds if seeds > 1 else 0), parts)
    session.stage("baseline")
    session.trial(session.config, stage=Role.BASELINE)
    looked = diagnose_loop(session.record)
    if by_faults(looked) or any(f.status == "fail" for f in looked):
        return  # mend it first: no comparison of learning rates holds until then
    seeds = session.budget.seeds(seeds, session.run_s)
    session.plan_proof(seeds, fixes=False)
    with suppress(BudgetSpent):
        _search(session, proves=seeds > 1)
    session.budget.reserved = 0.0
    if seeds > 1:
        _prove_best(session, Proof(seeds=seeds, clear_seeds=CLEAR_SEEDS))
    if seeds > 1 and session.budget.ended:  # what no proof needed, or a clear one left
        session.budget.go_on()
        with suppress(BudgetSpent):
            _search(session, proves=True)
        if not any(session.record.trials["stage"] == Role.PROOF):
            _prove_best(session, Proof(seeds=seeds, clear_seeds=CLEAR_SEEDS))


def _search(session: ProgramSession, *, proves: bool) -> None:
    """Run what shows which learning rates, warmups and thresholds are better, and how far each is from instability."""
    config = session.config
    program: Any = session.workload
    if not program.minimised:
        if not selects_by_loss(session.record):  # else nothing tells which of two runs is the better one
            LRSweep(lrs=[ratio * config.peak_lr for ratio in (1 / _STEP, 1.0, _STEP)]).extend(session)
        return
    unstable = any(f.status == "fail" for f in diagnose_instability(session.record))
    if not callable(config.optimizer):  # a rule by a name of ours, whose constants are known
        session.collect("replaced", lambda: replace_suspects(session, constants_of(config.to_dict())))
    if not unstable and any((row["clip_frac"] or 0.0) >= _HEAVY for row in clipped_runs(session.record)):
        run_round(session, [TrialRequest(Role.REPLACED, config.replace(max_grad_norm=None))])
    if _costly(session.record):
        return  # a sweep with that constant ends far from any lr that is of use once it is mended
    sweep = LRSweep(
        refinements=0,
        full_batch_refinements=_FINER,
        lanes=2,
        start=(1 / _STEP if unstable else _STEP,),
        blind_decades=_BLIND_DECADES,
        tolerance=_EXACT if program.full_batch else _ROUGH,
        far_ratio=LRSweep.far_ratio if program.full_batch else _STEP,
        edge_margin=None if program.full_batch else EDGE_MARGIN,
    )
    session.stage("search", "learning rates")
    sweep.extend(session)
    swept = diagnose_lr_sweep(session.record)
    edge, star = swept["lr.unstable"].evidence.get("upper"), swept["lr.best"].value
    highest = float(session.record.trials["peak_lr"].max())
    seen = star is not None and (
        highest >= _STEP * star * (1 - 1e-9) or (edge or math.inf) <= _CONFIRMED * star
    )  # the sweep's own runs tell
    session.stage("search", "instability")
    InstabilityStudy(
        confirm_all=False,
        confirm_multiples=() if seen else (5.0, 10.0),
        fixes=(),
        sweep=sweep,
        probe_steps=max(_LEAST, config.total_steps // 4),
    ).extend(session)
    known = judge_program(session.record)
    if by_faults(known):
        return
    if proves and known["lr.too_high"].status in ("warn", "fail") and screen(session.record, known)["promising"]:
        return  # a smaller lr trains better: no warmup and no threshold has to hold the large one
    bad = any(known[code].status in ("warn", "fail") for code in _BAD_START if code in known)
    if bad and config.total_steps >= 10:
        run_round(session, [TrialRequest(Role.FIX, config.replace(warmup_steps=max(1, config.total_steps // 10)))])
    if bad or any(known[code].status in ("warn", "fail") for code in _MID if code in known):
        ClippingStudy(percentiles=(90.0, 50.0), halvings=0, peak_lr=config.peak_lr, tries=1, at_once=False).extend(
            session
        )


def _prove_best(session: ProgramSession, proof: Proof) -> None:
    """Prove the most promising candidate, if there is one and it can be paid for, after what tells how far it is from the edge."""
    for _ in range(2):
        known = judge_program(session.record)
        found = screen(session.record, known)
        if not found["promising"] or _costly(session.record) or by_faults(known):
            return
        changed = config_of(session.record, found["recommended"]["trials"][0])
        candidate = session.config.replace(**{name: changed[name] for name in CHANGEABLE})
        with suppress(BudgetSpent):
            if found["untried"]:
                run_round(session, [TrialRequest(Role.MARGIN, candidate.replace(peak_lr=1.5 * candidate.peak_lr))])
                continue
            session.stage("proof")
            proof.extend(session, candidate)
        return


def judge_program(record: StudyRecord) -> Diagnosis:
    """Return the diagnosis of a command's study that is on disk."""
    study = judged(record)
    found = (
        diagnose_loop(record)
        + diagnose_lr_sweep(study, far_ratio=EDGE_MARGIN)
        + diagnose_instability(study)
        + diagnose_schedule(study, restarts_planned=True)
    )
    endless = falls_without_end(study)
    found += Diagnosis.of(record, [endless] if endless is not None else [])
    found = judged_without_loss(record, found + diagnose_input_share(record) + diagnose_seen_batches(record))
    if "replaced" in record.facts:
        found += diagnose_replaced(study)
    if "clipping_lr" not in record.facts:
        found += _own_clipping(study)
    else:
        found += diagnose_clipping(study) if record.config["max_grad_norm"] is not None else tried_only(study)
    where = _built(record)
    lined = [
        replace(f, summary=f"{f.summary.removesuffix('.')}{where}.") if f.code in _OF_OPTIMIZER and f.status in ("warn", "fail") else f
        for f in found.findings
    ]  # fmt: skip
    found = replace(found, findings=as_first_look(record.facts, lined))
    recommendation = recommend(study, found)
    found = settled_by_proof(record, found, recommendation)
    found, recommendation = held_to_the_end(record, found, recommendation)
    costly = _costly(record)
    recommendation |= {
        "paste": lines_to_change(record, recommendation),
        "lines": bool(costly or recommendation["changed"]),
    }
    mend = "make the change under 'Lines to change', then diagnose again" if costly else by_faults(found)
    if mend and set(record.trials["stage"]) <= {Role.BASELINE, Role.REPLACED}:
        lines = {"first": mend} if costly else {"paste": f"none: {mend}", "lines": False}
        recommendation |= lines | {"reason": f"Nothing else was tried: {mend}."}
        untold = f"Not measured: {mend}."
        moot = [
            replace(f, summary=untold) if f.status == "not_measured" and f.code.startswith("lr.") else f for f in found
        ]
        found = replace(found, findings=tuple(moot))
    found = replace(
        found,
        findings=causes_first(found.findings),
        cost=cost_of(record) | {"processes": record.facts.get("processes", "")},
        recommendation=recommendation,
        path=record.path,
        command=record.command,
    )
    left = [step.line for step in next_steps(record, found) if not step.done and not step.tried]
    return replace(found, recommendation=recommendation | {"next": left})


def _own_clipping(record: RecordLike) -> Diagnosis:
    """Return what the program's own clipping takes from it, where it was run without and trains stably there; else there is nothing to hold it against."""
    own, rows, values = record.config, clipped_runs(record), clipped_values(record)
    if own["max_grad_norm"] is None and values is not None:
        return Diagnosis.of(record, [values])
    known = any(row["twin_lasting"] is False and row["max_grad_norm"] == own["max_grad_norm"] for row in rows)
    return Diagnosis.of(record, [diagnose_clipping(record)["clipping.aggressive"]] if known else [])


def _costly(record: RecordLike) -> list[str]:
    """Return the lines of the program that a run with something usual in their place has shown to cost what training learns."""
    costly, where = [each for rows in replaced(record).values() for each in rows if each.costs], _built(record)
    told = [f"{each.field}: {each.own:g} -> {each.usual:g}{where}" for each in costly]
    if record.config["max_grad_norm"] is not None and any(f.status in ("warn", "fail") for f in _own_clipping(record)):
        told.append(_clip_line(record, diagnose_clipping(record)["clipping.threshold"].value, ", or leave it out"))
    return told


def _built(record: RecordLike) -> str:
    """Return the lines in which the program builds its optimizers, in brackets."""
    built = [line for line in dict.fromkeys(record.facts["program"].get("built") or ()) if line]
    return f" ({', '.join(built)})" if built else ""


def _clip_line(record: RecordLike, limit: float | None, rest: str = "") -> str:
    """Return what becomes of the program's own clipping; without a limit it is left out."""
    line = record.facts["loop"]["order"]["lines"].get("clip")
    to = f"max_norm {record.config['max_grad_norm']:g} -> {limit:.3g}{rest}" if limit is not None else "leave it out"
    return f"clip_grad_norm_: {to}{f' ({line})' if line else ''}"


def lines_to_change(record: StudyRecord, recommendation: Mapping[str, Any]) -> str:
    """Return what to write into the program: its learning rates times a factor, a warmup, a clipping threshold; and what cannot be tried."""
    changes = {name: recommendation["config"][name] for name in recommendation["changed"]}
    lines = record.facts["loop"]["order"]["lines"]
    at = {token: f"  # {lines[token]}" if lines.get(token) else "" for token in ("step0", "backward")}
    if costly := _costly(record):
        return "\n".join(
            [*costly, "not tried: other learning rates, as the best one changes with that; diagnose again then"]
        )
    told = []
    own = float(record.config["peak_lr"])
    if "peak_lr" in changes:
        factor = float(changes["peak_lr"]) / own
        told.append(
            f"lr: {own:.4g} -> {float(changes['peak_lr']):.4g}, multiply every group's lr by {factor:.4g}{_built(record)}"
        )
    if "max_grad_norm" in changes and record.config["max_grad_norm"] is not None:
        told.append(_clip_line(record, changes["max_grad_norm"]))
    elif "max_grad_norm" in changes:
        told.append(
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {float(changes['max_grad_norm']):.4g}){at['backward']}, after backward"
        )
    if "warmup_steps" in changes:
        steps = int(changes["warmup_steps"])
        told.append(f"warmup: lr times min(1, step / {steps}) for the first {steps} steps{at['step0']}")
    kept = f"nothing yet: {recommendation['candidate']} looks better and is not proved" if is_unproved(recommendation) else "nothing: the program's own settings are the ones to keep"  # fmt: skip
    left = "not tried: batch size and architecture, which cannot be steered from outside"
    seen, compared = record.facts["program"], ""
    if seen.get("printed"):
        compared = f"compared by the training loss: --metric {shlex.quote(seen['printed'])} compares by the score that the program prints"
    elif seen.get("adopted"):
        compared = "compared by the validation loss that the program reports: --metric train_loss compares by the training loss"
    judged = record.facts["loop"].get("judged")
    remarks = [*([judged["said"]] if judged else []), *([compared] if compared else []), *_ended_early(record), left]
    return "\n".join([*(told or [kept]), *remarks])


def _ended_early(record: StudyRecord) -> list[str]:
    """Return how runs were compared that the program ended before they had made as many updates as its unchanged run."""
    rows = ended_early(record)
    if not len(rows):
        return []
    select, said = str(record.config["select"]), []
    for row in rows.itertuples():
        best = selected(record, [int(str(row.trial))])
        value = f", {best[select]:.4g} at step {best['best_step']}" if best else ""
        said.append(
            f"trial {row.trial} (lr {row.peak_lr:.3g}) after {row.steps_run:.0f} of {row.total_steps} updates{value}"
        )
    return [
        f"stopped early by the program itself, and compared by the best {select} until then: {'; '.join(said[:4])}{'; and others' if len(said) > 4 else ''}. "
        "lr.best and lr.unstable leave these runs out, as their loss after all updates is not known; without early stopping they would be included"
    ]
