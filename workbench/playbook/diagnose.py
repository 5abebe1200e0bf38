"""`diagnose`: the walk through the playbook, from the first look at the data to a config to paste (design of F1, F2)."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.config import TrainConfig
from workbench.curves.clipping import fixed_step
from workbench.curves.judged import failed_when_proved, judged
from workbench.curves.lr_search import EDGE_MARGIN, unstable_bracket
from workbench.curves.minimised import selects_by_loss
from workbench.curves.seed_comparison import by_faults
from workbench.errors import WorkloadError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.first_look import FIRST_LOOK
from workbench.playbook.plan import SEARCH_RUNS, plan_diagnosis
from workbench.playbook.verdict import diagnose_record, why_left_out, with_report
from workbench.progress import in_script, interruptible
from workbench.record.folder import read_json, write_json
from workbench.record.roles import Role
from workbench.schedules import cap_steps, prepend_warmup
from workbench.studies.budget import Budget, BudgetSpent
from workbench.studies.session import Session, open_session
from workbench.topics.architecture.study import collect_architecture
from workbench.topics.batch_norm.collect import collect_batch_norm
from workbench.topics.batch_size.collect import collect_noise_scale
from workbench.topics.clipping.study import ClippingStudy
from workbench.topics.data.collect import collect_data
from workbench.topics.evaluation.check import collect_own_evaluation
from workbench.topics.evaluation.collect import collect_validation_set, compares_others
from workbench.topics.evaluation.collect_generalisation import collect_generalisation
from workbench.topics.evaluation.offline import evaluate_checkpoints
from workbench.topics.lr_sweep.study import LRSweep, TrialRequest, run_round
from workbench.topics.one_batch.collect import collect_one_batch
from workbench.topics.one_batch.collect_preflight import collect_preflight
from workbench.topics.one_batch.diagnose_preflight import diagnose_preflight, misnumbered
from workbench.topics.one_batch.parameters import collect_parameters
from workbench.topics.recommendation.diagnose import CHANGEABLE, config_of, recommend, screen
from workbench.topics.recommendation.study import Proof, collect_replaced
from workbench.topics.stability.replay import collect_replay
from workbench.topics.stability.study import InstabilityStudy
from workbench.topics.warmup.study import WarmupStudy
from workbench.train.batches import resolve_device
from workbench.train.trainer import AnyTrainer, Trainer
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_workload
from workbench.workloads.registry import call_on, load_workload
from workbench.workloads.subsets import subset_of

_AFFORDABLE = InstabilityStudy(confirm_all=False, fixes=("warmup",))
_WARMUP = WarmupStudy(full_runs=2)
_CLIPPING = ClippingStudy(percentiles=(90.0, 50.0), halvings=0)
_GRID = (0.25, 0.5, 2.0, 4.0)
"""Learning rates over the own one that are compared where no loss says which way to search (rule of thumb)."""
_BAD_START = (
    "init.loss", "lr.probabilistic", "stability.early", "stability.early_recovers", "lr.too_high", "lr.nothing_learns",
)  # fmt: skip
"""Codes of a training that does not get going as it could."""
_MID = ("stability.mid", "stability.spike")
_ROUGH = 0.5
"""Width of the bracket around `lr.unstable` before anything else is tried: a fix at 1.5 times its middle lies beyond it (rule of thumb)."""
_MARGINS = 3
"""Candidates that are trained beyond their lr to see how far they are from the edge, at most (rule of thumb)."""


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """The studies of one diagnosis, in the playbook's order."""

    sweep: LRSweep
    instability: InstabilityStudy
    proof: Proof

    def run(self, session: Session, parts: Sequence[str]) -> None:
        session.plan(1.0 + SEARCH_RUNS + 2.0 * self.proof.seeds, parts)
        session.stage("before training")
        if "preflight" not in session.record.facts:
            session.facts(preflight=collect_preflight(session.workload, session.config, session.device))
        session.collect("parameters", lambda: collect_parameters(session.workload, session.config, session.device))
        session.collect("architecture", lambda: collect_architecture(session.workload, session.config, session.device))
        session.collect("data", lambda: collect_data(session.workload, device=session.device))
        if session.budget.look:
            session.facts(**{FIRST_LOOK: {"steps": session.config.total_steps, "whole": session.budget.whole}})
        session.facts(own_config=session.workload.config.to_dict())
        if diagnose_preflight(session.record)["data.nonfinite"].status == "fail":
            return
        if misnumbered(session.record.facts["preflight"]) or session.record.facts["preflight"].get("nonfinite_loss"):
            return
        session.collect("one_batch", lambda: collect_one_batch(session.workload, session.config, session.device))
        session.collect("evaluation", lambda: collect_own_evaluation(session.workload, session.device))
        session.stage("baseline")
        baseline = session.trial(session.config, stage=Role.BASELINE)
        _evaluate_whole(session, baseline.number)
        session.collect("generalisation", lambda: collect_generalisation(session))
        collect_noise_scale(session, checkpoints=1)
        session.collect("batch_norm", lambda: collect_batch_norm(session))
        whole = [session.config.replace(peak_lr=session.config.peak_lr * ratio) for ratio in _GRID]
        scarce = not session.budget.look and not session.pays(whole)  # the runs of a first look are short ones
        paid = replace(
            self,
            sweep=replace(self.sweep, scarce=scarce),
            proof=replace(self.proof, seeds=session.budget.seeds(self.proof.seeds, session.run_s)),
        )
        session.plan_proof(paid.proof.seeds, fixes=bool(self.instability.fixes))
        session.budget.proof = frozenset(trial.config for trial in paid.proof.baselines(session.config))
        with suppress(BudgetSpent):
            paid.search(session)
        found = paid.compare(session)
        if session.budget.ended:  # what no proof needed is left
            proved = any(session.record.trials["stage"] == Role.PROOF)
            session.budget.go_on()
            with suppress(BudgetSpent):
                paid.search(session, again=True)
            found = found if proved else paid.compare(session)
            with suppress(BudgetSpent):
                run_round(session, paid.proof.baselines(session.config))  # their spread is what losses are judged by
                self.narrow(session)
        anew = compares_others(session.record, found)
        session.collect("evaluation_sample", lambda: collect_validation_set(session, found), anew=anew)
        session.keep_budget()

    def search(self, session: Session, *, again: bool = False) -> None:
        """Run what shows which learning rates, warmups and thresholds are better, and how far each is from instability.

        `again` is with what was kept for a proof: what tells most comes first, and the last digits after the comparison.
        """
        if session.workload.minimised:
            collect_replaced(session)
        asks = not self.sweep.scarce or fixed_step(session.record, tried=False)  # a whole run, where few are left
        fixed = session.workload.minimised and asks and _fixed_step(session)
        session.stage("search", "learning rates")
        if session.workload.minimised and not fixed:
            few = min(self.sweep.refinements, self.sweep.full_batch_refinements)
            extra = partial(self._extra_trials, session.config)
            replace(self.sweep, full_batch_refinements=few).extend(session, extra_trials=extra, full_tolerance=_ROUGH)
        elif not session.workload.minimised and not selects_by_loss(session.record):
            own = session.config.peak_lr
            replace(self.sweep, lrs=self.sweep.lrs or [own * ratio for ratio in _GRID]).extend(session)
        open_end = _open_end(session)
        if not again:
            run_round(session, self.proof.baselines(session.config))
        session.stage("search", "instability")
        if session.workload.minimised and not fixed:
            self.instability.extend(session)
        collect_replay(session)
        known = diagnose_record(session.record)
        if session.workload.minimised and not by_faults(known):
            _cure(session, known)
        if open_end and not again:
            self.narrow(session)

    def narrow(self, session: Session) -> None:
        """Run what the last digits of lr* and of the edge take: they change a verdict least."""
        if session.workload.minimised and not fixed_step(session.record):
            session.stage("search", "finer learning rates")
            self.sweep.extend(session)

    def compare(self, session: Session) -> Mapping[str, Any]:
        """Hold the most promising candidate, and where it is refused the next one, against the baseline; return what `screen` says."""
        known = diagnose_record(session.record)
        session.budget.reserved = 0.0
        found, candidate = _candidate(session, known)
        with suppress(BudgetSpent):
            if candidate is not None:
                session.stage("proof")
                self.proof.extend(session, candidate)
                failed = failed_when_proved(session.record) < math.inf
                known = diagnose_record(session.record) if failed else known
                if (failed or _any_wrong(known, _BAD_START)) and not recommend(session.record, known)["adopted"]:
                    _, second = _candidate(session, known, without={found["candidate"]})
                    if second is not None:
                        self.proof.extend(session, second)
        return found

    def _extra_trials(self, config: TrainConfig, lr: float) -> list[TrialRequest]:
        """Return what is needed later in any case, to be trained beside the first full-length runs of the sweep."""
        return [*self.instability.extra_trials(config, lr), *self.proof.baselines(config)]


def _open_end(session: Session) -> bool:
    """Tell whether the sweep has more digits to find: lr* of full batches, or a bracketed edge."""
    table = judged(session.record).sweep()
    return table.noise_free or unstable_bracket(table) is not None


def _fixed_step(session: Session) -> bool:
    """Train the baseline without its clipping where that clips, and tell whether its lr only sets the length of every step."""
    if session.config.max_grad_norm is None:
        return False
    run_round(session, [TrialRequest(Role.LR_SWEEP, session.config.replace(max_grad_norm=None))])
    return fixed_step(session.record)


def _evaluate_whole(session: Session, number: int) -> None:
    """Evaluate the checkpoints of a trial on the whole validation split where a part stands in for it while it trains (P2.4)."""
    part = subset_of(session.workload.validation_data)
    if part is None or not session.record.trial(number).checkpoints:
        return
    session.facts(subset=part.describe())
    evaluate_checkpoints(session.workload, session.writer, [number], splits=["validation"], device=str(session.device))


def _cure(session: Session, known: Diagnosis) -> None:
    """Try what the signs call for (F2.10).

    A warmup study where the best lr sits at an edge that costs something. Where training starts badly, a warmup and clipping at the
    baseline's own lr, instead of a smaller one. Clipping where the loss rises later. A baseline that clips is held against itself
    without.
    """
    if known["lr.at_edge"].evidence.get("harmful") is True:
        _WARMUP.extend(session)
    config, star = session.config, known["lr.best"]
    bad = _any_wrong(known, _BAD_START)
    longest = cap_steps(config.total_steps, _WARMUP.cap_frac)
    if bad and longest:
        run_round(session, [TrialRequest(Role.FIX, prepend_warmup(config, longest))])
    if bad or config.max_grad_norm is not None:  # does clipping cure, or hide that the lr is too high (F4.10, F4.11)?
        stable = star.evidence.get("measured_lr") if config.max_grad_norm is None else None
        tries = 1 if bad else _CLIPPING.tries
        replace(_CLIPPING, peak_lr=config.peak_lr, reference_lr=stable, tries=tries).extend(session)
    elif known["lr.unstable"].value is not None and _any_wrong(known, _MID):
        _CLIPPING.extend(session)


def _any_wrong(diagnosis: Diagnosis, codes: Sequence[str]) -> bool:
    return any(diagnosis[code].status in ("warn", "fail") for code in codes)


def _candidate(
    session: Session, known: Diagnosis, *, without: Collection[str] = ()
) -> tuple[Mapping[str, Any], TrainConfig | None]:
    """Return what `screen` says, and the config that looks better than the baseline, if there is one."""
    for _ in range(_MARGINS):
        found = screen(session.record, known, without=without)
        if not found["promising"]:
            break
        changed = config_of(session.record, found["recommended"]["trials"][0])
        config = session.config.replace(**{name: changed[name] for name in CHANGEABLE})
        if not found["untried"]:
            return found, config
        try:
            run_round(session, [TrialRequest(Role.MARGIN, config.replace(peak_lr=EDGE_MARGIN * config.peak_lr))])
        except BudgetSpent:
            break
    return found, None


@interruptible()
def diagnose(
    workload: Workload | str,
    out: str | Path | None = None,
    *,
    steps: int | None = None,
    study: str | None = None,
    note: str | None = None,
    device: str = "auto",
    trainer: AnyTrainer | None = None,
    executor: str = "local",
    address: str | None = None,
    sweep: LRSweep | None = None,
    instability: InstabilityStudy | None = None,
    proof_seeds: int = 3,
    budget: str | None = None,
    command: str | None = None,
    progress: bool | None = None,
) -> Diagnosis:
    """Walk the playbook for a workload: verdict, evidence, and a recommended config, in one folder.

    Pre-flight, baseline, learning-rate sweep, instability (probe, confirmation and fix runs); what the signs call for: the
    shortest warmup where a warmup lets a larger lr train better, clipping where the loss rises later; then baseline and
    candidates are held against each other by their selected checkpoints, and the best candidate again over seeds (F3.12,
    P4.7). The same call on the same folder goes on where one was interrupted, and answers from disk when all is there.

    Args:
        workload: a `Workload`, or a name for `load_workload`.
        out: the study's folder; None is the one under `runs/` in which this very study was interrupted, or a new one.
        steps: length of a full trial; None is the baseline's.
        study: name of the study; None is the folder's.
        note: a short description (P5.4).
        device: where to train; ignored when `trainer` is given.
        trainer: None is the local `Trainer`.
        executor: where trials run: "local" is this process, "ray" a cluster, at `address`.
        address: None takes the cluster that this process has joined, or starts one for as long as the diagnosis runs.
        sweep: how to sweep; None is `LRSweep(refinements=0)`: lr* to a factor of 2 on minibatches, for its price.
        instability: how to look for instability; None is `InstabilityStudy` at the price of a few baseline runs: one
            confirmation run where it answers, and warmup as the one fix.
        proof_seeds: trials of the baseline and of a candidate that looks better, under seeds that had no part in choosing it,
            before it is recommended; with 1 the pair of runs that chose it decides.
        budget: what it may cost: baseline runs, as "6x", time, as "45m", "2h", or "none"; None is 10x with the proof of three seeds, 6x
            without one. Less than one run, or a time that does not pay for one, is a first look in shorter runs. A proof under
            fresh seeds is planned from 8 runs on. The same call on the same folder with more goes on from there.
        command: what reproduces this; None is this process's command line.
        progress: show a bar, or a line a stage where standard error is no terminal. None shows it in a script, with the report's path at the end.

    Returns:
        The diagnosis; `diagnosis.json` and `report.html` are in its `path`.
    """
    workload = load_workload(workload) if isinstance(workload, str) else workload
    check_workload(workload)
    walk = _Walk(sweep=sweep or LRSweep(refinements=0), instability=instability or _AFFORDABLE, proof=Proof(seeds=proof_seeds))  # fmt: skip
    limit = Budget.of(budget, proof_seeds)
    resolve_device((trainer or Trainer(device=device)).device)
    begun = _first_look_in(out) if limit.seconds < math.inf or limit.runs < 1 else None
    timed = begun is None and limit.seconds < math.inf
    priced = partial(plan_diagnosis, workload, budget=limit, steps=steps, proof_seeds=proof_seeds, begun=begun, trainer=Trainer(device=device))  # fmt: skip
    try:
        plan = priced(timed=timed)
    except WorkloadError:  # which the pre-flight makes a finding of, where it can
        plan = priced(timed=False)
    told = progress is None and in_script()
    if progress or told:
        print(plan, file=sys.stderr)
    seeds = None if proof_seeds == 3 else proof_seeds
    about = f"budget {budget}, diagnosis of {workload.name}" if budget else None
    given = {"sweep": sweep, "instability": instability, "proof_seeds": seeds, "trainer": trainer, "budget": budget}
    more = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
    call = call_on(workload, f"wb.diagnose({{workload}}, {out and str(out)!r}, steps={steps!r}{more})")
    if plan.steps < plan.whole:
        runs = limit.runs * plan.whole / plan.steps
        steps, limit = plan.steps, replace(limit, runs=runs, look=True, whole=plan.whole)
    with open_session(
        workload, stem="diagnosis", settings=asdict(walk), steps=steps, trainer=trainer or Trainer(device=device),
        executor=executor, address=address, out=out, name=study, note=note or about, command=command, progress=progress or told,
        budget=limit, call=None if trainer is not None and trainer.hooks else call,
    ) as session:  # fmt: skip
        walk.run(session, [part.name for part in plan.stages])
        record = session.record
        diagnosis = diagnose_record(record)
        session.left_out(why_left_out(diagnosis))
        write_json(record.path / "diagnosis.json", diagnosis.to_dict())
    return with_report(record.path, diagnosis, told=told)


def _first_look_in(out: str | Path | None) -> int | None:
    """Return the updates of the runs of a first look that is in this folder already: a time is not measured anew to go on with it."""
    if out is None or not (Path(out) / "study.json").exists():
        return None
    look = read_json(Path(out) / "study.json")["facts"].get(FIRST_LOOK)
    return None if look is None else int(look["steps"])
