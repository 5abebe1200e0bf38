"""`diagnose_loop`: faults that live in a training loop, from the facts that `wb.watch` or `workbench diagnose -- ...` collects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, named
from workbench.topics.loop.diagnose_data import DATA_CODES, data_findings
from workbench.topics.loop.diagnose_loss import LOSS_CODES, loss_findings
from workbench.topics.loop.diagnose_order import ORDER_CODES, order_findings
from workbench.topics.loop.diagnose_schedule import SCHEDULE_CODES, schedule_findings
from workbench.topics.loop.diagnose_update import UPDATE_CODES, not_evaluated, restored, unchanged, updates_lost
from workbench.topics.loop.known import at, facts_of, rows_of, where_known
from workbench.topics.one_batch.diagnose_layers import MOST_DROPPED, frozen

OWN_CODES = Codes({
    "loop.no_gradient": "F1.1", **UPDATE_CODES, "loop.unowned_parameters": "F1.1", "loop.optimizer_mismatch": "F1.1",
    "loop.eval_mode_in_training": "F1.1", "loop.train_mode_in_eval": "F1.1", "loop.repeated_batch": "P2.9", "loop.memory_creep": "F1.1",
    "loop.retained_graph": "F1.1", "loop.no_grad_mode": "F1.1", "loop.decayed_norms": "F7.7", "loop.frozen_random": "F1.1",
})  # fmt: skip
CODES = Codes({**ORDER_CODES, **SCHEDULE_CODES, **OWN_CODES, **DATA_CODES, **LOSS_CODES})
_OF_PARAMETERS = ("loop.no_gradient", "loop.no_grad_mode", "loop.unowned_parameters", "loop.no_update", "loop.optimizer_mismatch")  # fmt: skip
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def diagnose_loop(
    record: RecordLike,
    *,
    least_updates: int = 5,
    eval_share: float = 0.1,
    repeated_share: float = 0.5,
    creep_share: float = 0.2,
    creep_bytes: float = 32e6,
    creep_graphs: int = 5,
    graph_growth: float = 1.5,
    decay_total: float = 0.1,
    floor_share: float = 0.01,
    conversion_share: float = 0.1,
    least_lr: float = 0.1,
    frozen_frac: float = 0.05,
    most_dropped: float = MOST_DROPPED,
) -> Diagnosis:
    """Judge what was seen of a loop.

    Args:
        record: a study whose facts hold "loop".
        least_updates: below which nothing is said of what repeats (rule of thumb).
        eval_share: share of the backward passes that may be made in evaluation mode (rule of thumb: a first check of a model).
        repeated_share: share of updates in a row that may see the very same examples (rule of thumb).
        creep_share: growth of the process's memory over the later half of the updates, as a share of its size, that is steady and
            still no alarm (rule of thumb).
        creep_bytes: the same in bytes (rule of thumb); both have to be passed.
        creep_graphs: graphs of past losses that may be held at once, besides those of two updates (rule of thumb: lists of a few terms).
        graph_growth: times its first size to which a graph that is kept may grow (rule of thumb).
        decay_total: shrinking of norms and biases by decoupled weight decay, over the run, that is no alarm (rule of thumb: a tenth).
        floor_share: constant part of the loss, or passes in which it lies at a bound, as a share of the loss or of the passes (rule of thumb).
        conversion_share: share of the time of an update that conversions of one line may take that could be left out (rule of thumb).
        least_lr: share of the largest learning rate that an update has to have for its parameters to be judged by it (rule of thumb).
        frozen_frac: share of a model's parameters that may be frozen as they were drawn, as random features (rule of thumb).
        most_dropped: see `MOST_DROPPED`.

    Returns:
        Each code of `CODES` once, with the line of the person's own file where one is to blame.
    """
    facts = record.facts.get("loop")
    if not facts:
        reason = "the loop was not watched; wb.watch does that"
        return Diagnosis.of(record, [CODES.not_measured(code, reason) for code in CODES])
    if not facts["order"]["backwards"]:
        reason = "no backward pass was seen: the loss is not made by torch, or the loop did not run"
        return Diagnosis.of(record, [_no_backward(facts) or CODES.not_measured(code, reason) if code == "loop.no_gradient" else CODES.not_measured(code, reason) for code in CODES])  # fmt: skip
    facts = facts_of(facts)
    judges: list[tuple[Iterable[str], Callable[[], Finding | Iterable[Finding]]]] = [
        (ORDER_CODES, lambda: order_findings(facts, least_updates=least_updates)),
        (SCHEDULE_CODES, lambda: schedule_findings(facts)),
        (
            _OF_PARAMETERS,
            lambda: _parameters(facts["parameters"], facts["updates"], least_lr, not_evaluated(record, facts)),
        ),
        (["loop.restores_nothing"], lambda: restored(facts["parameters"]["kept"])),
        (["loop.eval_mode_in_training"], lambda: _eval_mode(facts, eval_share)),
        (["loop.train_mode_in_eval"], lambda: _train_mode(facts)),
        (["loop.repeated_batch"], lambda: _repeated(facts, repeated_share, least_updates)),
        (["loop.memory_creep"], lambda: _creep(facts, creep_share, creep_bytes, creep_graphs)),
        (["loop.decayed_norms"], lambda: _decayed(record, facts["parameters"], decay_total)),
        (
            ["loop.frozen_random"],
            lambda: frozen(facts["parameters"]["asleep"], max(facts["parameters"]["numbers"], 1), frozen_frac),
        ),
        (["loop.retained_graph"], lambda: _retained(facts, graph_growth)),
    ]
    findings = [
        *(finding for codes, judge in judges for finding in where_known(CODES, codes, judge)),
        *data_findings(record, facts, conversion_share=conversion_share, least_updates=least_updates),
        *loss_findings(record, facts, floor_share=floor_share, most_dropped=most_dropped),
    ]
    if lost := facts.get("lost"):
        reason = f"{', '.join(lost)} could not be determined for this loop, an error in this package"
        findings = [CODES.not_measured(f.code, reason) if f.status == "ok" else f for f in findings]
    order = list(CODES)
    return Diagnosis.of(record, sorted(findings, key=lambda f: order.index(f.code)))


def _no_backward(facts: Facts) -> Finding | None:
    """Return a failure where an optimizer steps and no parameter ever has a gradient; None where some have, as of gradients set by hand."""
    steps, held = facts["updates"], facts["parameters"]
    if not steps or not held["owned"] or held["with_gradient"]:
        return None
    return OWN_CODES.finding(
        "loop.no_gradient", "fail", f"{steps:,} steps of the optimizer and no backward pass{at(facts['order']['lines'], 'step0')}: no parameter has a gradient, and nothing is trained.",
        value=float(steps), unit="steps", advice=["Call loss.backward() before optimizer.step()."],
    )  # fmt: skip


def _of(names: list[str], code: str) -> Say:
    return partial(OWN_CODES.finding, code, value=float(len(names)), unit="parameters", evidence={"names": names})


def _parameters(facts: Facts, updates: int, least_lr: float, unseen: Finding | None) -> list[Finding]:
    silent, unowned, still = facts["without_gradient"], facts["unowned"], unchanged(facts)
    none = facts["owned"] > 0 and facts["with_gradient"] == 0
    if not facts["looks"]:
        return [OWN_CODES.not_measured(code, "no update was made") for code in _OF_PARAMETERS]
    say = _of(silent, "loop.no_gradient")
    if none:
        gradient = say("fail", "No parameter of the optimizer ever gets a gradient.", advice=[
            "Build the optimizer from the parameters of the model that the loss is computed with, after the model is on its device and wrapped.",
        ])  # fmt: skip
    elif silent:
        looks = f"{facts['looks']} updates"
        if facts["looks"] < updates:
            looks = f"the {facts['looks']:,} of {updates:,} updates that were looked at"
        idle = len(facts["uncalled"]) == len(silent)
        many, call = (
            f"{len(silent)} of {facts['owned']} parameters of the optimizers",
            "; their modules are never called there" * idle,
        )
        gradient = say(
            "fail" if len(silent) * 4 > facts["owned"] and not idle else "warn", f"{named(silent)} never get a gradient in {looks}, {many}{call}.",
            advice=["Call them in forward, or delete them."] if idle else
            ["Look for detach(), .data, torch.no_grad(), argmax or a module whose output is not used between them and the loss; freeze them with requires_grad_(False) where it is meant."],
        )  # fmt: skip
    else:
        gradient = say("ok", "Every trained parameter gets a gradient.")
    say = _of(unowned, "loop.unowned_parameters")
    if not facts["named"]:
        owned = OWN_CODES.not_measured(
            "loop.unowned_parameters", "no model was seen whose parameters the optimizer has"
        )
    elif unowned:
        outside = facts["unowned_in_model"] < len(unowned)
        owned = say("fail" if outside else "warn", f"{named(unowned)} get gradients and belong to no optimizer: they stay as they are.", advice=[
            "Modules in plain Python lists belong to no model: use nn.ModuleList. A network that only makes targets, as a teacher, belongs under torch.no_grad()." if outside else
            "Give all of model.parameters() to the optimizer; where they are frozen on purpose, requires_grad_(False) says so and saves their gradients.",
        ])  # fmt: skip
    else:
        owned = say("ok", "Every parameter that gets a gradient belongs to an optimizer.")
    update = unseen or updates_lost(facts, still, least_lr, none=none)
    strange = facts["strangers_without_gradient"]
    say = partial(OWN_CODES.finding, "loop.optimizer_mismatch", value=float(strange), unit="parameters")
    if not facts["named"]:
        match = OWN_CODES.not_measured("loop.optimizer_mismatch", "no model was seen that trains")
    elif strange:
        match = say("fail", f"{strange} of the optimizer's {facts['owned']} parameters belong to no model that runs, and get no gradient.", advice=[
            "The optimizer was built from another model: build it again after the model was replaced, copied, reset or loaded.",
        ])  # fmt: skip
    else:
        match = say("ok", "The optimizer has the parameters of the model that trains.")
    return [gradient, _no_grad_mode(facts), owned, update, match]


def _no_grad_mode(facts: Facts) -> Finding:
    names = facts["without_grad_mode"]
    say = _of(names, "loop.no_grad_mode")
    if not names:
        return say("ok", "No part of the model that should train runs without gradients alone.")
    return say(
        "fail", f"{named(names)} never train: what they belong to runs within torch.no_grad() or inference_mode() alone{at(facts, 'without_grad_mode_line')}.",
        advice=["Leave no_grad() out around what should train; where it is meant to be frozen, requires_grad_(False) says so."],
    )  # fmt: skip


def _eval_mode(facts: Facts, share: float) -> Finding:
    models = [m for m in facts["modes"]["models"] if m["trained"]]
    wrong = [m for m in models if m["trained_in_eval"] > max(share * m["trained"], 1)]
    say: Say = partial(OWN_CODES.finding, "loop.eval_mode_in_training", evidence={"models": models})
    if not models:
        return OWN_CODES.not_measured("loop.eval_mode_in_training", "no forward pass of the model was seen")
    if not any(m["depends_on_mode"] for m in models):
        return say("ok", "Does not apply: no dropout and no batch norm was seen in a model that trains.")
    if not wrong:
        return say("ok", "Updates are made in training mode.")
    worst = max(wrong, key=lambda m: m["trained_in_eval"] / m["trained"])
    part = worst["trained_in_eval"] / worst["trained"]
    return say(
        "fail", f"{worst['model']} is in evaluation mode in {'about ' * (part < 1)}{part:.0%} of its backward passes{at(worst['lines'], 'eval', also={'model.eval()': 'switched'})}, which changes "
        f"the outputs of {named(worst['depends_on_mode'])}.",
        value=part, unit="share of backward passes", threshold=share, advice=["Call model.train() at the start of every epoch, after every evaluation."],
    )  # fmt: skip


def _train_mode(facts: Facts) -> Finding:
    seen = [m for m in facts["modes"]["models"] if m["runs_in_train"]]
    models = [m for m in seen if m["trained"]]
    say: Say = partial(OWN_CODES.finding, "loop.train_mode_in_eval", evidence={"models": models})
    if not facts["modes"]["entered"]:
        return OWN_CODES.not_measured("loop.train_mode_in_eval", "no forward pass of the model was seen")
    if not any(m["runs"] for m in facts["modes"]["models"]):
        return say("ok", "Does not apply: no evaluation, a pass without gradient between updates, was seen.")
    apart = [m for m in seen if m["runs_in_train_apart"]]  # copies that average the weights, too
    # else part of the updates, as those of a teacher
    few = [m for m in models if 0 < m["runs_in_train_no_loader"] * 2 < facts["updates"]]
    wrong = apart or few or [m for m in models if m.get("runs_in_train_again")]
    if not wrong:
        none = "No evaluation on other data than the updates' was seen to drop units, or to take the statistics of its batch."
        return say("ok", none)
    worst = wrong[0]
    if "train" not in worst["lines"]:
        return say(
            "fail" if apart else "warn", f"F.dropout drops units in {worst['runs_in_train']} of {worst['runs']} evaluations{at(worst['lines'], 'dropout')}: what is measured is another model each time.",
            value=float(worst["runs_in_train"]), unit="evaluations", advice=["Pass training=self.training to F.dropout, or use nn.Dropout."],
        )  # fmt: skip
    return say(
        "fail" if apart else "warn", f"{worst['model']} is in training mode in {worst['runs_in_train']} of {worst['runs']} evaluations"
        f"{at(worst['lines'], 'train')}, which changes the outputs of {named(worst['depends_on_mode'])}.",
        value=float(worst["runs_in_train"]), unit="evaluations", advice=["Call model.eval() before every evaluation, and model.train() after it."],
    )  # fmt: skip


def _repeated(facts: Facts, share: float, least: int) -> Finding:
    found = facts["loaders"]
    evidence = {k: found[k] for k in ("compared", "same", "distinct", "loaders", "seeded")}
    say: Say = partial(OWN_CODES.finding, "loop.repeated_batch", evidence=evidence)
    if found["compared"] < least:
        few = f"it takes {least} updates on dense inputs, and the run has {found['compared']}"
        return OWN_CODES.not_measured("loop.repeated_batch", few)
    for row in found["loaders"]:
        each, passes = row["trained"] / max(row["begun"], 1), row["begun"]
        if (
            not row["shuffled"]
            and row["trained"]
            and passes > 2
            and found["distinct"] <= each <= share * (row["batches"] or 0)
            and found["compared"] >= 2 * each
        ):
            return say(
                "fail", f"Each of {passes:,} passes over the loader{at({'begun': row['line']}, 'begun')} ends after {each:.3g} of its {row['batches']:,} batches, and its order is always the same: the examples behind are never trained on.",
                value=each / row["batches"], unit="share of batches", threshold=share, advice=["Leave out the break, or the islice, that ends the pass; and give shuffle=True to the loader."],
            )  # fmt: skip
    part = found["same"] / found["compared"]
    longer = [row for row in found["loaders"] if (row["batches"] or 2) > 1 and row["trained"]]
    if part <= share:
        return say("ok", "Successive updates see different examples.", value=part)
    line, seeds = next(iter(found["seeded"]), ("", 0))
    if not longer and seeds > share * found["compared"]:
        return say(
            "fail", f"{part:.0%} of the updates see the very same examples as the one before: a generator is seeded anew before each{at({'seed': line}, 'seed')}.",
            value=part, unit="share of updates", threshold=share, advice=["Seed the generators once, before the loop."],
        )  # fmt: skip
    if not longer:
        none = "Updates see the same examples as the one before, and no loader has others: full-batch training."
        return say("ok", none, value=part)
    line = at({"begun": longer[0]["line"]}, "begun")
    again = longer[0]["begun"] * 2 > facts["updates"]
    alike = not again and longer[0]["drawn"] * 2 > facts["updates"]
    kept = "every batch of the loader holds the same ones" if alike else "the batch is drawn once, outside of the loop"
    why = "the loader is restarted for every update and gives its first batch" if again else kept
    return say(
        "fail", f"{part:.0%} of the updates see the very same examples as the one before: {why}{line}.", value=part, unit="share of updates", threshold=share,
        advice=["Look at what the dataset returns for two indices, and at the order of its sampler." if alike else
                "Iterate over the loader, `for batch in loader`, instead of next(iter(loader)) or a batch kept from before."],
    )  # fmt: skip


def _creep(facts: Facts, share: float, least: float, least_graphs: int) -> Finding:
    memory, graphs, updates = facts["memory"], facts["graphs"], max(facts["updates"], 1)
    passes = facts["order"]["backwards"] / updates
    if graphs["held"] >= least_graphs + 2 * passes:
        return OWN_CODES.finding(
            "loop.memory_creep", "fail" if graphs["held"] * 4 >= graphs["marked"] else "warn", f"The graphs of {graphs['held']} of {graphs['marked']} losses are held at once{at(facts['order']['lines'], 'backward')}: "
            "memory grows with every update.", value=graphs["held"] / updates, unit="graphs per update", evidence={"graphs": dict(graphs)},
            advice=["Add up loss.item() or loss.detach(), not loss, which keeps the graph of every step; the same for lists of outputs, and states that are carried on."],
        )  # fmt: skip
    if len(memory) < 8:
        few = f"Of {graphs['marked']} losses at most {graphs['held']} graphs are held at once."
        short = "the run is too short, or the system does not say how much memory a process has"
        known = OWN_CODES.finding("loop.memory_creep", "ok", few, evidence={"graphs": dict(graphs)})
        return known if graphs["marked"] else OWN_CODES.not_measured("loop.memory_creep", short)
    later = [(step, size) for step, size in memory if 2 * step >= memory[-1][0]]  # looks become rarer
    steps, sizes = [float(s) for s, _ in later], [float(b) for _, b in later]
    grown = sizes[-1] - sizes[0]
    rising = sum(b > a for a, b in itertools.pairwise(sizes)) / max(len(sizes) - 1, 1)
    per_update = grown / max(steps[-1] - steps[0], 1.0)
    evidence = {"memory": memory[:: max(len(memory) // 50, 1)]}
    say: Say = partial(
        OWN_CODES.finding, "loop.memory_creep", value=per_update, unit="bytes per update", evidence=evidence
    )
    if rising < 0.8 or grown < least or grown < share * sizes[0]:
        return say("ok", "Memory does not grow with the updates.")
    return say(
        "fail", f"The process grows by {per_update / 1e3:,.0f} kB an update, from {sizes[0] / 1e9:.2f} to {sizes[-1] / 1e9:.2f} GB in the later half of the run.",
        advice=["Look for lists that collect tensors, and for caches without an end."],
    )  # fmt: skip


def _retained(facts: Facts, growth: float) -> Finding:
    graphs, sizes = facts["graphs"], [nodes for _, nodes in facts["graphs"]["sizes"]]
    grown = sizes[-1] / sizes[0] if len(sizes) > 1 else 1.0
    say: Say = partial(
        OWN_CODES.finding, "loop.retained_graph", value=grown, unit="times the first graph", threshold=growth, evidence={"graphs": dict(graphs)}
    )  # fmt: skip
    where = at(facts["order"]["lines"], "backward")
    if grown > growth and sizes == sorted(sizes) and graphs["earlier_updates"] > 1:  # else of longer inputs
        return say(
            "fail", f"Backward passes keep their graph{where}, which grows from update to update, to {grown:.3g} times its nodes: each pass goes through all updates before it.",
            advice=["Detach what is carried from one update to the next, such as hidden = hidden.detach(), and leave retain_graph=True out."],
        )  # fmt: skip
    if graphs["passes"] and graphs["retained"] == graphs["passes"]:
        return say(
            "warn", f"Every backward pass keeps its graph{where}: its memory is held until the next loss takes its place.",
            advice=["Leave retain_graph=True out: the last backward pass through a graph does not need it."],
        )  # fmt: skip
    return say("ok", "Graphs are freed by their last backward pass, as far as they were seen.")


def _decayed(record: RecordLike, facts: Facts, limit: float) -> Finding:
    steps = rows_of(record)
    lrs = steps["lr"].dropna().tolist() if "lr" in steps else list[float]()
    groups = [
        g | {"name": o["name"], "decoupled": o["decoupled"]} for o in facts["optimizers"].values() for g in o["groups"]
    ]
    decayed = [g for g in groups if (g["weight_decay"] or 0.0) > 0 and g["vectors"] and g["vectors"] < g["parameters"]]
    total = max((float(sum(lrs)) * g["weight_decay"] for g in decayed if g["decoupled"]), default=0.0)
    say: Say = partial(OWN_CODES.finding, "loop.decayed_norms", "ok", value=total, unit="sum of lr times weight decay", threshold=limit)  # fmt: skip
    if not decayed:
        return say("Biases and the scales of norms are not decayed.")
    if total <= limit:
        return say("Weight decay takes biases and the scales of norms along, and shrinks them by little in this run.")
    count = sum(g["vectors"] for g in decayed)
    return say(
        f"Decoupled weight decay pulls {count} biases and scales of norms to zero too, by a factor of e^{total:.2g} over the run; "
        "it is usual to leave them out, in a group of their own with weight_decay=0. Nothing measured says that it costs anything.",
    )  # fmt: skip
