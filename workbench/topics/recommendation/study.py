"""Trials that a recommendation needs: the proof of a candidate over seeds (P4.7, F3.12), and the baseline with usual settings.

`collect_replaced` trains the baseline once more for each setting of it that is far from usual (`topics/optimizers/replaced.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.curves.clipping import PLAIN
from workbench.curves.judged import failed_when_proved, judged
from workbench.curves.seed_comparison import prove, worth_more_seeds
from workbench.curves.trial_curves import TrialCurve
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded
from workbench.train.gradients import needs_gradient
from workbench.train.own.torch_optimizer import build_optimizer, trained_parameters
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Trains baseline and candidate with the same fresh seeds; what was trained before is not trained again.

    Attributes:
        seeds: for each arm, behind the baseline's own, under which the candidate was chosen. A candidate that lengthens the
            run is held against a third arm, the baseline at its length.
        more_seeds: trained behind them where the candidate gained in the mean and the spread still leaves it to chance.
        clear_seeds: after so many the proof ends where the candidate wins at `clear` already, or gains in none; None never looks.
            This look adopts at most a share `clear` of what is no better, on top of the other two.
        clear: largest p of that look (rule of thumb).
    """

    seeds: int = 3
    more_seeds: int = 2
    clear_seeds: int | None = None
    clear: float = 0.01

    def __post_init__(self) -> None:
        """Check the number of seeds."""
        check_integer("seeds", self.seeds, hint="; with 1 nothing is proved")
        check_integer("more_seeds", self.more_seeds, low=0, hint="; 0 never trains more")

    def baselines(self, config: TrainConfig) -> list[TrialRequest]:
        """Return the baseline under each fresh seed: whether they agree says how much a single run can tell."""
        return [TrialRequest(Role.BASELINE, each) for each in (_fresh(config, self.seeds) if self.seeds > 1 else ())]

    def extend(self, session: Session, candidate: TrainConfig) -> None:
        """Run the arms inside a study that is already open, the candidate under the baseline's seeds."""
        if self.seeds < 2:
            return
        arms = [session.config, candidate]
        if candidate.total_steps > session.config.total_steps:
            arms.append(session.config.replace(total_steps=candidate.total_steps))
        if candidate.peak_lr > session.config.peak_lr:
            _train(session, arms, 1)
            if candidate.peak_lr >= failed_when_proved(session.record):
                return
        if self.clear_seeds is not None and 2 <= self.clear_seeds < self.seeds:
            _train(session, arms, self.clear_seeds)
            look = prove(
                session.record, baseline=session.config.to_dict(), candidate=candidate.to_dict(), limit=self.clear
            )
            if look is not None and (look["wins"] or any(max(arm["gains"]) <= 0 for arm in look["arms"])):
                return
        _train(session, arms, self.seeds)
        first = prove(session.record, baseline=session.config.to_dict(), candidate=candidate.to_dict())
        if worth_more_seeds(first):
            _train(session, arms, self.seeds + self.more_seeds)


def _train(session: Session, arms: list[TrainConfig], seeds: int) -> None:
    pairs = zip(
        *(_fresh(arm, seeds) for arm in arms), strict=True
    )  # seed by seed: what a budget pays for can be compared
    run_round(session, [TrialRequest(Role.PROOF, config) for each in pairs for config in each])


def _fresh(config: TrainConfig, seeds: int) -> list[TrainConfig]:
    return seeded(config, config.peak_lr, seeds + 1)[1:]


_RULES = {
    "sgd": (), "momentum": ("momentum",), "nesterov": ("momentum",), "rmsprop": ("momentum", "rho", "eps"),
    "adam": ("beta1", "beta2", "eps"), "nadam": ("beta1", "beta2", "eps"), "adamw": ("beta1", "beta2", "eps"),
}  # fmt: skip
DECOUPLED = "decoupled"
USUAL = {"momentum": 0.9, "beta1": 0.9, "beta2": 0.999, "rho": 0.9, "eps": 1e-8}
"""What `torch.optim` takes, momentum and rho apart (`TrainConfig`)."""
_LIMITS = {"beta2": (0.5, 0.9995), "rho": (0.5, 0.995), "eps": (1e-12, 1e-4)}
"""Inside these a constant is usual (rule of thumb)."""


class Suspect(NamedTuple):
    """A setting to replace: the finding that is about it, the field of the config or of an optimizer's groups, and its values."""

    code: str
    field: str
    own: float
    usual: float


def constants_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the constants that a rule by name uses, by the names of `TrainConfig`, and `DECOUPLED`, 1 or 0."""
    rule = str(config["optimizer"])
    used = {name: float(config[name]) for name in (*_RULES.get(rule, ()), "weight_decay")}
    return used | {DECOUPLED: float(rule == "adamw")}


def suspects(
    curve: TrialCurve,
    constants: Mapping[str, float],
    *,
    noise_scale: float | None = None,
    memory_frac: float = 0.1,
    decay_total: float = 0.1,
    decay_force: float = 0.05,
    cap_frac: float = 0.1,
    tiny_batch: int = 4,
    below_noise: float = 16.0,
) -> list[Suspect]:
    """Return the settings that may cost a run something.

    Args:
        constants: of its optimizer, see `constants_of`.
        noise_scale: of its gradients, in examples.
        memory_frac: a first moment over more than this share of the steps comes late (rule of thumb).
        decay_total: decay that adds up to less over the run hardly shrinks a weight (rule of thumb: by a tenth).
        decay_force: decay that is this share of the gradient, or where it is decoupled of the update, steers (rule of thumb); the
            median over the run counts.
        cap_frac: share of the steps that a warmup may take (F3.10).
        tiny_batch: batches up to this size may drown in their noise (rule of thumb),
        below_noise: where they are this many times smaller than the noise scale (rule of thumb).
    """
    memory, momenta = memory_frac * curve.total_steps, {n: constants.get(n, 0.0) for n in ("momentum", "beta1")}
    unusual = [name for name, value in momenta.items() if value > 0.95 and 1 / (1 - value) > memory]
    unusual += [n for n, (low, high) in _LIMITS.items() if n in constants and not low <= constants[n] <= high]
    found = [Suspect("optimizers.constants", name, constants[name], USUAL[name]) for name in unusual]
    if _steers(curve, constants, decay_total, decay_force):
        found.append(Suspect("optimizers.weight_decay_shrinks", "weight_decay", constants["weight_decay"], 0.0))
    warmup, most = int(curve.config["warmup_steps"]), int(cap_frac * curve.total_steps)
    if warmup > most:
        found.append(Suspect("warmup.over_cap", "warmup_steps", warmup, most))
    batch = int(curve.config["batch_size"])
    if noise_scale is not None and batch <= tiny_batch and noise_scale >= below_noise * batch:
        found.append(Suspect("batch_size.noise_scale", "batch_size", batch, 8 * batch))
    return found


def _steers(curve: TrialCurve, constants: Mapping[str, float], total: float, force: float) -> bool:
    """Return whether weight decay adds up to something, and pulls about as hard as the loss does."""
    decay = constants.get("weight_decay", 0.0)
    steps, adaptive = curve.steps, "eps" in constants
    if not decay or not {"param_norm", "update_norm"} <= set(steps.columns):
        return False
    lr, weights, update, gradient = (
        steps[name].to_numpy(dtype=np.float64) for name in ("lr", "param_norm", "update_norm", "grad_norm")
    )
    decoupled = bool(constants.get(DECOUPLED))
    longer = 1.0 if adaptive else 1.0 / (1.0 - constants.get("momentum", 0.0))
    if (decoupled or not adaptive) and float(np.nansum(lr)) * decay * longer < total:
        return False  # coupled decay of an adaptive rule is as long as any gradient: no such sum
    with np.errstate(all="ignore"):
        share = decay * lr * weights / update if decoupled else decay * weights / gradient
    known = share[~np.isnan(share)]
    return bool(known.size and np.median(known) >= force)


_NAMES: dict[str, tuple[str, int | None]] = {
    "momentum": ("momentum", None), "rho": ("alpha", None), "beta1": ("betas", 0), "beta2": ("betas", 1), "eps": ("eps", None),
    "weight_decay": ("weight_decay", None),
}  # fmt: skip
"""Field of `TrainConfig` -> its name in a parameter group of `torch.optim`, and the place in it."""


def collect_replaced(session: Session) -> None:
    """Train the baseline again for each suspect setting, and store which trials to compare."""
    session.collect("replaced", lambda: _replaced(session))


def _replaced(session: Session) -> dict[str, Any]:
    needs_gradient(session.workload)
    config = session.config
    constants = {} if callable(config.optimizer) else constants_of(config.to_dict())
    if callable(config.optimizer):
        with isolated_rng():
            model = build_model(session.workload, config, session.device)
            constants = torch_constants(build_optimizer(config, model, trained_parameters(model)))
    return replace_suspects(session, constants)


def replace_suspects(session: Session, constants: Mapping[str, float]) -> dict[str, Any]:
    """Train the baseline again for each setting that may cost it something, and return what `diagnose_replaced` reads."""
    config = session.config
    baseline = session.trial(config, stage=Role.BASELINE).number
    record = session.record
    curve = next((c for c in judged(record).curves if c.trial == baseline), None)
    scales = [float(row["value"]) for row in record.facts.get("noise_scale") or () if row["value"] is not None]
    found = [] if curve is None else suspects(curve, constants, noise_scale=max(scales, default=None))
    trials = run_round(session, [TrialRequest(Role.REPLACED, _with(config, suspect)) for suspect in found])
    rows = [s._asdict() | {"baseline": baseline, "trial": t.number} for s, t in zip(found, trials, strict=True)]
    return {"constants": constants, "rows": rows}


def torch_constants(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return what an optimizer's parameter groups hold, the largest where they differ, by the names of `TrainConfig`."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        for name, (key, place) in _NAMES.items():
            value: Any = group.get(key)
            value = value[place] if place is not None and isinstance(value, (tuple, list)) else value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[name] = max(float(value), found.get(name, 0.0))
    if found.get("momentum") == 0.0:
        del found["momentum"]
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        g.get("decoupled_weight_decay") for g in optimizer.param_groups
    )
    return found | {DECOUPLED: float(decoupled), PLAIN: float(isinstance(optimizer, torch.optim.SGD))}


def _with(config: TrainConfig, suspect: Suspect) -> TrainConfig:
    """Return the baseline with the usual value."""
    if callable(config.optimizer) and suspect.field in _NAMES:
        return config.replace(optimizer=partial(_changed, config.optimizer, suspect.field, suspect.usual))
    kind = int if isinstance(getattr(config, suspect.field), int) else float
    change: dict[str, Any] = {suspect.field: kind(suspect.usual)}
    if suspect.field == "batch_size":
        change["eval_batch_size"] = None
    return config.replace(**change)


def _changed(factory: Callable[..., Any], field: str, value: float, model: nn.Module, lr: float) -> Any:
    """Return a person's optimizer with one constant of every group replaced."""
    own = TrainConfig(peak_lr=lr, total_steps=1, batch_size=1, optimizer=factory)
    optimizer = build_optimizer(own, model, trained_parameters(model))
    key, place = _NAMES[field]
    for group in optimizer.param_groups:
        if place is not None and key in group:
            group[key] = tuple(value if i == place else each for i, each in enumerate(group[key]))
        elif key in group:
            group[key] = value
    return optimizer
