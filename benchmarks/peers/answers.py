"""Do all systems give the same greedy answers? Those that compute in fp32 must.

Owns:      the prompts, and what counts as the same: token ids where both tell them, else the text.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.client import Client, ClosedLoop
from benchmarks.peers.server import ServerFailed
from benchmarks.peers.words import Words
from benchmarks.workloads import Conversation, Turn, Workload

PROMPTS = (
    "The quick brown fox",
    "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
ANSWER_LEN = 24
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one system said to one prompt."""

    text: str
    token_ids: tuple[int, ...]  # () where it does not tell them

    def same(self, other: "Answer") -> bool:
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        return self.text == other.text


def ask(client: Client, words: Words) -> tuple[Answer, ...]:
    """Its answer to every prompt. Raises: ServerFailed if it does not answer."""
    conversations = tuple(
        Conversation(name=str(index), turns=(Turn(token_ids=tuple(words.encode(prompt)), max_new_tokens=ANSWER_LEN),))
        for index, prompt in enumerate(PROMPTS)
    )
    workload = Workload(name="answers", conversations=conversations)
    run = asyncio.run(client.run(workload, ClosedLoop(concurrency=1), max_s=LIMIT_S))
    if run.errors:
        raise ServerFailed(f"it does not answer: {next(iter(run.errors))}")
    return tuple(Answer(text=sample.text, token_ids=tuple(sample.token_ids)) for sample in run.samples)


def compare(answers: Mapping[str, Sequence[Answer]], exact: Sequence[str]) -> tuple[list[str], bool]:
    """Returns: a sentence for each system, and whether all of ``exact`` agree with the first of them."""
    known = [name for name in exact if name in answers]
    if not known or len(answers) < 2:
        return ["answers: there are no two systems to compare, one of them in fp32"], True
    reference, agreed = known[0], True
    found = []
    for name, given in answers.items():
        if name == reference:
            continue
        pairs = zip(given, answers[reference], strict=True)
        differing = [index for index, (one, other) in enumerate(pairs) if not one.same(other)]
        agreed = agreed and not (differing and name in exact)
        found.append(f"answers: {name} = {reference} on {len(given) - len(differing)} of {len(given)} prompts")
        found += [
            f"  {PROMPTS[index]!r}: {name} {given[index].text!r}, {reference} {answers[reference][index].text!r}"
            for index in differing
        ]
    return found, agreed
