"""What the simulated users send and when: the simulator's clock, and requests of a trace or of a workload.

Owns:      the queue of events; which tokens a prompt and its answer consist of.
Invariant: time never runs back, and events that are due at one time happen in the order in which they were scheduled,
           so that a run is the same each time. Two prompts share a prefix of token ids exactly where the trace gives
           them the same blocks.

A trace in Mooncake's format names blocks of 512 tokens, not tokens. Block b stands here for 512 tokens of id b, so that
the production code hashes prompts of the real length, and equal chains of blocks give equal page keys. Which tokens
an answer had is not recorded: it gets an id of its own, takes up the pool, and is never a hit.
Source: Qin et al. 2024, "Mooncake" (arXiv:2407.00079), section 4 (the trace and its format).
"""

import heapq
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.workloads import Workload

Action = Callable[[], None]


class Events:
    """The queue of simulated events, and the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0

    def at(self, time_s: float, action: Action) -> None:
        """Do ``action`` at ``time_s``. Raises ValueError if that is in the past."""
        if time_s < self.now_s:
            raise ValueError(f"an event at {time_s} s was wanted, it is {self.now_s} s: schedule it for now or later")
        heapq.heappush(self._queue, (time_s, self._num_scheduled, action))
        self._num_scheduled += 1

    def after(self, delay_s: float, action: Action) -> None:
        """Do ``action`` in ``delay_s`` >= 0."""
        self.at(self.now_s + delay_s, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Do what is due until ``until()`` holds or nothing is left."""
        while self._queue and not until():
            self.now_s, _, action = heapq.heappop(self._queue)
            action()


Ids = npt.NDArray[np.int32]

BLOCK_TOKENS = 512  # of Mooncake's traces
PREFIX_TOKENS = (2_000, 8_000)  # of a burst, from and to


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimRequest:
    """One request of a simulated user."""

    number: int  # position in the list of requests
    arrival_s: float  # since the start, or since the request ``after`` ended
    after: int | None  # number of the request whose answer it waits for; None: for none
    input_len: int  # prompt tokens
    output_len: int  # tokens generated, the first included
    prompt: Ids  # [n] each stands for ``repeat`` equal tokens
    repeat: int
    answer: Ids  # [output_len], or [1] that stands for all of them
    tenant: str = ""  # which shares no cached prefix with another

    def token_ids(self) -> Ids:
        """Returns: [input_len + output_len] the prompt and its answer."""
        prompt = np.repeat(self.prompt, self.repeat)[: self.input_len]
        return np.concatenate([prompt, np.resize(self.answer, self.output_len)])


def read_trace(path: pathlib.Path, *, rate: float = 1.0, limit: int | None = None) -> list[SimRequest]:
    """Return the requests of a Mooncake trace, ``rate`` times as fast as recorded; the first ``limit`` of them.

    Raises: ValueError with the line that is not a request.
    """
    if rate <= 0:
        raise ValueError(f"rate = {rate}; it must be above 0 (1.0: as recorded)")
    blocks: dict[int, int] = {}  # the trace's id of a block -> ours, counted from 0
    requests: list[SimRequest] = []
    with path.open() as lines:
        for index, line in enumerate(lines):
            if limit is not None and index >= limit:
                break
            requests.append(_of_line(line, f"{path}, line {index + 1}", len(requests), rate, blocks))
    if not requests:
        raise ValueError(f"{path} holds no requests; a line is one JSON object with timestamp, input_length, ...")
    requests.sort(key=lambda request: request.arrival_s)
    return [replace(request, number=number) for number, request in enumerate(requests)]


def _of_line(line: str, where: str, number: int, rate: float, blocks: dict[int, int]) -> SimRequest:
    try:
        entry = json.loads(line)
        timestamp_ms, input_len = float(entry["timestamp"]), int(entry["input_length"])
        output_len = max(1, int(entry["output_length"]))
        ids = [blocks.setdefault(int(block), len(blocks)) for block in entry["hash_ids"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} is not a request: {error!r}; wanted timestamp (ms), input_length, output_length and hash_ids "
            f"(one for each {BLOCK_TOKENS} tokens)"
        ) from error
    if input_len < 1:
        raise ValueError(f"{where} has input_length {input_len}; a prompt has at least one token")
    own = -2 - number  # an id that no other request has; -1 stands for logits that are broken
    ids += [own] * (-(-input_len // BLOCK_TOKENS) - len(ids))  # a tail that the trace does not name is not shared
    return SimRequest(
        number=number,
        arrival_s=timestamp_ms / 1000 / rate,
        after=None,
        input_len=input_len,
        output_len=output_len,
        prompt=np.array(ids, dtype=np.int32),
        repeat=BLOCK_TOKENS,
        answer=np.array([own], dtype=np.int32),
    )


def of_workload(
    workload: Workload, *, requests_per_s: float, think_s: float, spread: float = 0.0, seed: int
) -> list[SimRequest]:
    """Return conversations that begin at random (Poisson) at ``requests_per_s`` over all turns. A next turn comes
    ``think_s`` after the last answer, ``spread`` of it more or less: else users fall in step.
    Answers are random ids, the same under every policy."""
    rng, thinks = Random(f"{seed}/{workload.name}/arrivals"), Random(f"{seed}/{workload.name}/thinks")
    conversations_per_s = requests_per_s * len(workload.conversations) / workload.num_requests
    requests: list[SimRequest] = []
    start_s = 0.0
    for conversation in workload.conversations:
        start_s += rng.expovariate(conversations_per_s)
        history: list[Ids] = []
        for turn_number, turn in enumerate(conversation.turns):
            answer = np.array(rng.choices(range(256, 2**31), k=turn.max_new_tokens), dtype=np.int32)
            history.append(np.array(turn.token_ids, dtype=np.int32))
            prompt = np.concatenate(history)
            pause_s = think_s * thinks.uniform(1 - spread, 1 + spread)
            requests.append(
                SimRequest(
                    number=len(requests),
                    arrival_s=pause_s if turn_number else start_s,
                    after=len(requests) - 1 if turn_number else None,
                    input_len=len(prompt),
                    output_len=turn.max_new_tokens,
                    prompt=prompt,
                    repeat=1,
                    answer=answer,
                )
            )
            history.append(answer)
    return requests


def bursts(
    num_bursts: int, *, size: int, question_len: int, output_len: int, requests_per_s: float, lead_s: float, seed: int
) -> list[SimRequest]:
    """Return bursts of ``size`` requests that come at once, with a prefix each and questions of their own. A request
    sends the prefix ``lead_s`` earlier, so that one replica holds it. Bursts come at random (Poisson)."""
    rng = Random(f"{seed}/bursts")
    requests: list[SimRequest] = []
    start_s = 0.0
    for _ in range(num_bursts):
        start_s += rng.expovariate(requests_per_s / (size + 1))
        prefix = rng.choices(range(256, 2**31), k=rng.randint(*PREFIX_TOKENS))
        for at_s in (start_s, *[start_s + lead_s] * size):
            question, answer = (rng.choices(range(256, 2**31), k=n) for n in (question_len, output_len))
            requests.append(
                SimRequest(
                    number=0,
                    arrival_s=at_s,
                    after=None,
                    input_len=len(prefix) + question_len,
                    output_len=output_len,
                    prompt=np.array(prefix + question, dtype=np.int32),
                    repeat=1,
                    answer=np.array(answer, dtype=np.int32),
                )
            )
    requests.sort(key=lambda request: request.arrival_s)
    return [replace(request, number=number) for number, request in enumerate(requests)]
