"""What the simulated users send and when: the simulator's clock, and requests of a trace or of a workload.

Owns:      the queue of events; which tokens a prompt and its answer consist of.
Invariant: time never runs back, and events that are due at one time happen in the order in which they were scheduled,
           so that a run is the same each time. Two prompts share a prefix of token ids exactly where the trace gives
           them the same blocks; copies of a request share nothing with each other.

A trace in Mooncake's format names blocks of 512 tokens, not tokens. Block b stands here for 512 tokens of id b, so that
the production code hashes prompts of the real length, and equal chains of blocks give equal page keys. Which tokens
an answer had is not recorded: it gets an id of its own, takes up the pool, and is never a hit.
Source: Qin et al. 2024, "Mooncake" (arXiv:2407.00079), section 4 (the trace and its format).
"""

import heapq
import json
import pathlib
from collections.abc import Callable, Sequence
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
COPIES_SPREAD_S = 60.0  # copies of a trace start this far apart at most: long against a burst, short against the trace


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
    adapter: str = ""  # that it needs; neither does one

    @property
    def namespace(self) -> str:
        """What its pages are named under."""
        return self.adapter + self.tenant

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
    own = -(number + 1)  # an id that no other request has
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


def of_workload(workload: Workload, *, requests_per_s: float, think_s: float, seed: int) -> list[SimRequest]:
    """Return conversations that begin at random (Poisson) at ``requests_per_s`` over all turns; a next turn comes
    ``think_s`` after the answer to the last, or its own pause. Answers are random ids, the same under every policy."""
    rng = Random(f"{seed}/{workload.name}/arrivals")
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
            pause_s = think_s if turn.pause_s is None else turn.pause_s
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


def jittered(requests: Sequence[SimRequest], most_s: float, *, seed: int) -> list[SimRequest]:
    """Delay each request that waits for no answer by up to ``most_s``, at random: a trace's grain smoothed."""
    rng = Random(f"{seed}/jitter")
    return [replace(r, arrival_s=r.arrival_s + rng.uniform(0.0, most_s)) if r.after is None else r for r in requests]


def copies(requests: Sequence[SimRequest], num: int) -> list[SimRequest]:
    """Return ``num`` groups of users that do the same a little later each, and share no token: the load for
    ``num`` times the replicas."""
    if num < 1:
        raise ValueError(f"{num} copies were wanted; one is the load as it is")
    if num == 1:
        return list(requests)
    low = min(int(min(r.prompt.min(), r.answer.min())) for r in requests)
    high = max(int(max(r.prompt.max(), r.answer.max())) for r in requests)
    span = high - low + 1
    if high + (num - 1) * span >= 2**31:
        raise ValueError(f"{num} copies of {span} token ids do not fit into 31 bits; take at most {2**31 // span}")
    result: list[SimRequest] = []
    for copy in range(num):
        shift = np.int32(copy * span)
        late_s = copy * COPIES_SPREAD_S / num
        base = len(result)
        result += [
            replace(
                r,
                number=base + r.number,
                arrival_s=r.arrival_s + (late_s if r.after is None else 0.0),
                after=None if r.after is None else base + r.after,
                prompt=r.prompt + shift,
                answer=r.answer + shift,
            )
            for r in requests
        ]
    return result
