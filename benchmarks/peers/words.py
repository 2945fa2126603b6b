"""Prompts that are the same tokens whether a server is sent ids or text.

Owns:      the choice of tokens: lower-case words with their space before them. A tokenizer splits text at such
           spaces first, so that no token spans two of them.
Invariant: encode(as_text(ids)) == ids, checked for every word when the list is made.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.workloads import FIRST_ID, Workload

_WORD = re.compile("Ġ[a-z]{3,}")  # Ġ stands for the space in byte-level vocabularies


class Words:
    """The words of one model's tokenizer. ``decode`` and ``encode`` know nothing of special tokens."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        listed = sorted(token_id for word, token_id in vocabulary.items() if _WORD.fullmatch(word))
        self._ids = tuple(token_id for token_id in listed if self.encode(self.as_text([token_id])) == [token_id])
        if not self._ids:
            raise ValueError(f"{model}/tokenizer.json has no token that is a word with its space before it")

    @property
    def vocab_size(self) -> int:
        """What to draw a workload with, so that `of` finds a word for each of its ids."""
        return FIRST_ID + len(self._ids)

    def as_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def of(self, workload: Workload) -> Workload:
        """``workload``, drawn with `vocab_size`, with a word in the place of each id: what was shared stays shared."""
        return replace(
            workload,
            conversations=tuple(
                replace(
                    conversation,
                    turns=tuple(
                        replace(turn, token_ids=tuple(self._ids[token_id - FIRST_ID] for token_id in turn.token_ids))
                        for turn in conversation.turns
                    ),
                )
                for conversation in workload.conversations
            ),
        )
