"""Words to ids: the tutorial's vocabulary, and the examples of Keras's own documentation."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import UnknownNameError, UsageError
from workbench.parameter_server.data.string_lookup import StringLookup
from workbench.parameter_server.servers.layout import FixedShardsPartitioner, split_rows

WORDS = ("avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman")


def test_the_tables_of_the_tutorial() -> None:
    """T5.5: seven words and an unknown one are 8 ids, two labels are 2."""
    features, labels = StringLookup(WORDS), StringLookup(("yes", "no"), num_oov_indices=0)
    assert (len(features), len(labels)) == (8, 2)
    assert features(WORDS).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert features("superman").item() == 0
    assert StringLookup(list(WORDS)) == StringLookup(np.array(WORDS)) == features  # type: ignore[arg-type]
    assert labels(["no", "yes"]).tolist() == [1, 0]
    assert labels.decode([0, 1]) == ["yes", "no"]


def test_the_examples_of_keras() -> None:
    """Its documentation's known vocabulary."""
    data = [["a", "c", "d"], ["d", "z", "b"]]
    assert StringLookup(("a", "b", "c", "d"))(data).tolist() == [[1, 3, 4], [4, 0, 2]]


@pytest.mark.parametrize(("given", "shape"), [("hulk", ()), ([["hulk"] * 3] * 2, (2, 3)), ([], (0,))])
def test_ids_have_the_shape_of_the_words(given: Any, shape: tuple[int, ...]) -> None:
    found = StringLookup(WORDS)(given)
    assert (found.dtype, tuple(found.shape)) == (torch.int64, shape)
    if given and not isinstance(given, str):
        assert StringLookup(WORDS)(np.array(given)).tolist() == found.tolist()


def test_words_come_back() -> None:
    """T5.5: the inverse."""
    lookup = StringLookup(WORDS, num_oov_indices=2)
    words = [list(WORDS[:3]), list(WORDS[3:6])]
    assert lookup.decode(lookup(words)) == words
    assert lookup.decode(lookup("superman")) == "[UNK]"
    assert lookup.decode([0, 1, 2]) == ["[UNK]", "[UNK]", "avenger"]
    with pytest.raises(UsageError, match="id 9 is none of this lookup. Allowed: 0 to 8"):
        lookup.decode(torch.tensor([9]))


def test_an_unknown_word_without_an_id_is_named() -> None:
    """T5.5."""
    with pytest.raises(
        UnknownNameError, match=r"'maybe' is not in the vocabulary of 2 words \('yes', 'no'\).*num_oov_indices=1"
    ):
        StringLookup(("yes", "no"), num_oov_indices=0)([["yes"], ["maybe"]])


def test_unknown_words_share_their_ids_alike_in_every_process() -> None:
    """T14.7: copies of the table agree, because CRC-32 is the same everywhere; its check value is 0xCBF43926."""
    for buckets in (2, 3, 1000):
        assert StringLookup(WORDS, buckets)("123456789").item() == 0xCBF43926 % buckets
    counts = Counter(StringLookup(WORDS, num_oov_indices=3)([f"word{i}" for i in range(300)]).tolist())
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 50


def test_it_travels() -> None:
    """T5.4, T14.7, behaviour 88: by pickle to a worker, as JSON into an export, also when it was used before."""
    lookup = StringLookup(WORDS, num_oov_indices=2)
    assert lookup.table["avenger"] == lookup("avenger") == 2
    for copy in (pickle.loads(pickle.dumps(lookup)), StringLookup(**json.loads(json.dumps(asdict(lookup))))):
        assert (copy, copy.table) == (lookup, lookup.table)
        assert type(copy.table) is dict


def test_shuffling_spreads_the_frequent_words() -> None:
    """T13.4: on a Zipf vocabulary one shard serves most of the lookups before, and none does after."""
    words = tuple(f"word{i}" for i in range(2000))
    weights = 1 / np.arange(1, 2001) ** 0.7  # no single word outweighs a shard

    def largest_share(lookup: StringLookup) -> float:
        ids = lookup(words).numpy()
        shards = split_rows(FixedShardsPartitioner(4), (len(lookup),), torch.float32)
        loads = [weights[(ids >= first) & (ids < first + count)].sum() for first, count in shards]
        return float(max(loads) / weights.sum() * 4)

    lookup = StringLookup(words)
    shuffled = lookup.shuffled(0)
    assert largest_share(lookup) > 2.4
    assert largest_share(shuffled) < 1.2
    assert shuffled == lookup.shuffled(0) != lookup.shuffled(1)
    assert sorted(shuffled.vocabulary) == sorted(words)
    assert lookup.vocabulary == words


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocabulary": ()}, "one word at least"),
        ({"vocabulary": "abc"}, "must be a list of words"),
        ({"vocabulary": 3}, "must be a list of words"),
        ({"vocabulary": ("a", 3)}, r"words only, .*; \[3\] given"),
        ({"vocabulary": ("a", "b", "a")}, r"\['a'\] more than once"),
        ({"vocabulary": ("a", "[UNK]")}, r"none of them '\[UNK\]'; \['\[UNK\]'\] given"),
        ({"vocabulary": ("a",), "num_oov_indices": -1}, "num_oov_indices=-1 must be"),
        ({"vocabulary": ("a",), "num_oov_indices": True}, "num_oov_indices=True must be"),
    ],
)
def test_what_is_no_lookup(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StringLookup(**fields)


@pytest.mark.parametrize("given", [None, b"hulk", ["hulk", 3], [["hulk"], ["hulk", "hulk"]]])
def test_what_are_no_words(given: Any) -> None:
    with pytest.raises(UsageError, match="words must be a word, or lists of equal length"):
        StringLookup(WORDS)(given)
