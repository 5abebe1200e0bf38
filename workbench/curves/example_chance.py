"""`example_chance`: how likely the examples of a validation set alone give a gain; seeds cannot tell, they share them (P3.4, P4.7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scipy import stats

from workbench.curves.trials import RecordLike

__all__ = ["MIN_EXAMPLES", "example_chance"]

MIN_EXAMPLES = 30


def example_chance(
    record: RecordLike, *, candidate: Sequence[int], gain: float, min_examples: int = MIN_EXAMPLES
) -> dict[str, Any] | None:
    """Return how often other examples of the same kind would give such a gain where nothing is gained.

    From the spread of the difference from example to example (Student's t, one-sided). It was measured on the selected
    checkpoints of the same seeds, perhaps on a part of the set; the gain is that of the whole set.

    Args:
        record: a study; its facts may hold "evaluation_sample", with the pair of models that were compared.
        candidate: trial numbers of the candidate.
        gain: mean of the baseline's selected metric minus the candidate's, or the other way round where more is better.
        min_examples: fewer do not show how far the difference spreads, for a loss has its rare, large values (rule of thumb).

    Returns:
        examples, enough (whether they are that many), se (of the gain), chance; None where these two models were not compared
        example by example, and where the set is the training set itself, which is no sample.
    """
    facts = record.facts.get("evaluation_sample") or {}
    pair = facts.get("pair") or {}
    compared = {other for _, other in pair.get("trials") or ()}
    sd = pair.get("difference_sd")
    if facts.get("is_train") or sd is None or not compared or not compared <= set(candidate):
        return None
    examples = int(facts["examples"])
    se = float(sd) / math.sqrt(examples)
    chance = float(stats.t.sf(gain / se, df=max(examples - 1, 1))) if se > 0 else float(gain <= 0)
    return {"examples": examples, "enough": examples >= min_examples, "se": se, "chance": chance}
