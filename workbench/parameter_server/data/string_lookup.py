"""`StringLookup`: words to ids by a plain table that travels to the workers, so that none asks the coordinator (T5.4, T14.7)."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.checks import check_integer
from workbench.errors import UnknownNameError, UsageError

UNKNOWN = "[UNK]"  # what `decode` gives for an unknown word's id


@dataclass(frozen=True)
class StringLookup:
    """A vocabulary and the ids of its words: first the unknown words, then the vocabulary in its order.

    Seven words and one id for unknown ones are ids 0 to 7; two labels without an unknown one are 0 and 1 (T5.5). Make
    it once, outside the dataset function, and use it inside (T5.4). It can be pickled, and holds no state that changes.

    Attributes:
        vocabulary: different words, one at least.
        num_oov_indices: ids for words that are not in the vocabulary. None of them is an error for 0; among more than
            one a word always has the same, by its CRC-32, in every process.

    Raises:
        UsageError: the vocabulary is empty, has a word twice or something that is no word.
    """

    vocabulary: tuple[str, ...]
    num_oov_indices: int = 1

    def __post_init__(self) -> None:
        """Check the vocabulary."""
        given: Any = self.vocabulary
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UsageError(f"vocabulary={given!r} must be a list of words.")
        object.__setattr__(self, "vocabulary", tuple(_as_lists(given)))
        odd = [word for word in self.vocabulary if not isinstance(word, str) or word == UNKNOWN]
        if odd or not self.vocabulary:
            raise UsageError(
                f"vocabulary must hold one word at least, and words only, none of them {UNKNOWN!r}; {odd[:5] or 'nothing'} given."
            )
        check_integer("num_oov_indices", self.num_oov_indices, low=0, error=UsageError)
        twice = [word for word, count in Counter(self.vocabulary).items() if count > 1]
        if twice:
            raise UsageError(f"vocabulary has {twice[:5]} more than once, and a word has one id. Keep each once.")

    def shuffled(self, seed: int) -> StringLookup:
        """Return the same words in a random order, so that the frequent ones do not share a shard (T13.4)."""
        return replace(self, vocabulary=tuple(random.Random(seed).sample(self.vocabulary, len(self.vocabulary))))

    def __len__(self) -> int:
        """Return the number of ids, which is the number of rows that an embedding needs."""
        return self.num_oov_indices + len(self.vocabulary)

    @cached_property
    def table(self) -> dict[str, int]:
        """Word to id; unknown words are not in it."""
        return {word: place for place, word in enumerate(self.vocabulary, self.num_oov_indices)}

    def __call__(self, words: Any) -> Tensor:
        """Return the ids, int64, in the shape in which the words were given: none for a word, (n,) for a list of n."""
        try:
            return torch.tensor(self._ids(_as_lists(words)), dtype=torch.int64)
        except (TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"words must be a word, or lists of equal length of them, not {str(words)[:80]!r} ({error})."
            ) from error

    def decode(self, ids: Any) -> Any:
        """Return the words of ids, in lists of their shape; raises `UsageError` where there is no such id."""
        values = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
        if isinstance(values, (list, tuple)):
            return [self.decode(value) for value in values]
        if not 0 <= values < len(self):
            raise UsageError(f"id {values!r} is none of this lookup. Allowed: 0 to {len(self) - 1}.")
        place = values - self.num_oov_indices
        return self.vocabulary[place] if place >= 0 else UNKNOWN

    def _ids(self, words: Any) -> Any:
        if not isinstance(words, str):
            return [self._ids(word) for word in words]
        found = self.table.get(words)
        if found is None and not self.num_oov_indices:
            some = ", ".join(map(repr, self.vocabulary[:5])) + ", ..." * (len(self.vocabulary) > 5)
            raise UnknownNameError(
                f"the word {words!r} is not in the vocabulary of {len(self.vocabulary)} words ({some}), and num_oov_indices=0 "
                "leaves no id for unknown ones. Add the word, or give num_oov_indices=1."
            )
        return zlib.crc32(words.encode()) % self.num_oov_indices if found is None else found


def _as_lists(words: Any) -> Any:
    return words.tolist() if isinstance(words, np.ndarray) else words
