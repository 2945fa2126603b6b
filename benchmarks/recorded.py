"""What a recording of a router tells (docs/capacity.md): its requests as load for the simulator and for a real fleet.

Owns:      the reading of a recording's lines; which tokens stand for a page that is known by its hash alone.
Invariant: two prompts share a prefix of tokens exactly as far as their hashes agree, answers included: a prompt that
           repeats an earlier answer has the pages of that answer.

A request whose prompt repeats an earlier answer follows it: it comes as long after the end of that answer as it did,
whenever that is. All others come when they came. What is not known is assumed: a request that was refused would have
had an answer of the median length; of several choices, the request counts as one of their mean length.
"""

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from benchmarks.sim_load import SimRequest
from benchmarks.workloads import FIRST_ID

HASH = 8  # characters of a page's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request of a recording."""

    number: int
    arrival_s: float  # since the first
    after: int | None = None  # number of the request whose answer it repeats
    gap_s: float = 0.0  # from the end of that one to this one's arrival
    input_len: int
    output_len: int  # at least 1; what was not answered has the median
    blocks: tuple[str, ...]  # of prompt and answer
    told: Mapping[str, Any]  # its line

    @property
    def ended_s(self) -> float:
        return self.arrival_s + float(self.told["total_s"])

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token, where it was answered to its end."""
        known: float | None = self.told.get("ttft_s")
        return known if self.told["outcome"] == "ok" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The lines of one router."""

    facts: Mapping[str, Any]  # its first line
    replicas: Mapping[str, Mapping[str, Any]]  # what each told of itself
    requests: tuple[Seen, ...]  # in order of arrival
    num_lost: int

    @property
    def page_size(self) -> int:
        return int(self.facts["page_size"])

    @property
    def ttfts_s(self) -> list[float]:
        return [each.ttft_s for each in self.requests if each.ttft_s is not None]


def is_recording(path: pathlib.Path) -> bool:
    """Return whether ``path`` is a recording, and no trace in Mooncake's format."""
    with path.open() as lines:
        return '"recording"' in next(lines, "")


def read(path: pathlib.Path, *, limit: int | None = None) -> Recording:
    """Read a recording; the first ``limit`` requests of it. Raises: ValueError that names the line that is none of its
    kind."""
    facts: Mapping[str, Any] = {}
    replicas: dict[str, Mapping[str, Any]] = {}
    told: list[Mapping[str, Any]] = []
    num_lost = 0
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                if "recording" in entry:
                    facts = entry
                elif "lost" in entry:
                    num_lost += entry["lost"]
                elif "blocks" not in entry:
                    replicas[entry["replica"]] = entry
                else:
                    told.append({**entry, "time_s": float(entry["time_s"]), "prompt": int(entry["prompt"])})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}, is not of a recording: {error!r}") from error
    if not facts or not told:
        raise ValueError(f"{path} holds no requests; a recording is what router.record writes")
    told = sorted(told, key=lambda each: each["time_s"])[:limit]
    median_len = round(statistics.median([_answer_len(each) for each in told if each["outcome"] == "ok"] or [1]))
    return Recording(
        facts=facts,
        replicas=replicas,
        requests=_chained(
            [_seen(number, each, told[0]["time_s"], median_len) for number, each in enumerate(told)],
            page_size=int(facts["page_size"]),
        ),
        num_lost=num_lost,
    )


def _chained(requests: Sequence[Seen], *, page_size: int) -> tuple[Seen, ...]:
    """Find for each request the last one that had ended and whose answer it repeats."""
    last: dict[str, Seen] = {}  # by the last page of an answer
    chained = []
    for seen in requests:
        pages = seen.blocks[: seen.input_len // page_size]
        asked = [last[block] for block in pages if block in last and last[block].ended_s <= seen.arrival_s]
        if asked:
            seen = replace(seen, after=asked[-1].number, gap_s=seen.arrival_s - asked[-1].ended_s)
        chained.append(seen)
        if len(seen.blocks) > seen.input_len // page_size:
            last[seen.blocks[-1]] = seen
    return tuple(chained)


def _answer_len(told: Mapping[str, Any]) -> int:
    return max(1, round(float(told.get("output", 0)) / float(told["n"])))


def _seen(number: int, told: Mapping[str, Any], begin_s: float, median_len: int) -> Seen:
    text = told["blocks"]
    unanswered = told["outcome"] != "ok" and not told.get("output")
    return Seen(
        number=number,
        arrival_s=told["time_s"] - begin_s,
        input_len=told["prompt"],
        output_len=max(1, min(median_len, told["max_tokens"])) if unanswered else _answer_len(told),
        blocks=tuple(text[at : at + HASH] for at in range(0, len(text), HASH)),
        told=told,
    )


def sim_requests(recording: Recording, *, rate: float) -> list[SimRequest]:
    """Return the requests for the simulator, conversations ``rate`` times as fast: a token id for each page."""
    ids: dict[str, int] = {}
    size = recording.page_size
    requests = []
    for seen in recording.requests:
        own = -2 - seen.number  # an id that no other request has; -1 stands for logits that are broken
        total_len = seen.input_len + seen.output_len
        pages = [ids.setdefault(block, len(ids)) for block in seen.blocks]
        pages += [own] * (-(-total_len // size) - len(pages))
        answer = np.repeat(np.array(pages, dtype=np.int32), size)[seen.input_len : total_len]
        requests.append(
            SimRequest(
                number=seen.number,
                arrival_s=seen.arrival_s / rate if seen.after is None else seen.gap_s,
                after=seen.after,
                input_len=seen.input_len,
                output_len=seen.output_len,
                prompt=np.array(pages[: -(-seen.input_len // size)], dtype=np.int32),
                repeat=size,
                answer=answer,
            )
        )
    return requests


@dataclass(slots=True, kw_only=True)
class Prompts:
    """The prompts of a replay on a real fleet: random tokens for each hash, and an answer's own once it has come."""

    page_size: int
    vocab_size: int
    _pages: dict[str, Sequence[int]] = field(default_factory=dict)  # of answers

    def of(self, seen: Seen) -> list[int]:
        """Return the prompt; its last tokens, which fill no page, are its own."""
        token_ids: list[int] = []
        for block in seen.blocks[: seen.input_len // self.page_size]:
            token_ids += self._pages.get(block) or self._random(block, self.page_size)
        return token_ids + self._random(f"rest of {seen.number}", seen.input_len - len(token_ids))

    def answered(self, seen: Seen, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Note which tokens the pages have that begin in the prompt's rest or in the answer."""
        token_ids, size = [*prompt, *answer], self.page_size
        for at in range(len(prompt) // size, min(len(seen.blocks), len(token_ids) // size)):
            self._pages.setdefault(seen.blocks[at], token_ids[at * size : (at + 1) * size])

    def _random(self, seed: str, num: int) -> list[int]:
        return Random(seed).choices(range(FIRST_ID, self.vocab_size), k=num)
