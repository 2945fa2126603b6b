"""A prompt computed by one process and answered by another, beside one engine; and the transfer of its pages.

SmolLM2-135M, one compute thread each; K/V goes over NIXL by CMA, then by tcp, with and without digests. Rounds are
alternated: the pair with digests, the pair without, the first pair's prefill engine alone. Every prompt has its own
salt, so that no cache helps. Two processes of one host share a clock.

Two figures count. From the order to send the last pages, at the end of the last chunk's forward, to the second token,
which is the first that the decode side makes itself: less the step that made it and less what the sender's posts of
those pages took, which over CMA is the copy, that is what handing over costs. Over tcp a post returns before its bytes
have gone, so that there is no such figure. The decode engine was idle before that step, which is often longer than the
later ones: the same figure with the median of those is given too. And the time to the first token, by two and by one.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import harness, transfer
from benchmarks.engine_process import EngineProcess, ProcessSettings
from benchmarks.harness import Part, Row, Table
from kvtransfer.ports.agent import NixlAgent
from kvtransfer.rooms.kv_transfer import KvTransfer
from kvtransfer.rooms.receiver import KVReceiver
from kvtransfer.types import PdTicket, Verify
from replicas.disagg.decode_role import DecodeRole
from replicas.engine.ranks import Ranks
from replicas.types import FinishReason, GenerateRequest, HandOff, PdLeg, SamplingParams

SECTION = "a hand-off between two processes over {transport}, {dtype} K/V, {model}"
PAGE, CHUNK = 16, 512  # tokens; a prompt of 1,024 has two chunks
NUM_NEW = 12
POOL_PROMPTS = 2  # of the longest, that the pool holds
WARM_ROUNDS = 3  # connect, compile, and touch all of the pool: the first write to fresh memory takes ten times as long
MODES = {"verified": Verify.ALL, "no digests": Verify.OFF}
ALONE = "one engine"
TARGET = "< 5 ms"

_rooms = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of one request, in seconds."""

    first_token: float  # from submit
    decode_step: float  # median of those after the second token
    hand_over: float = 0.0  # from the order to send the last pages to the second token
    posts: float = 0.0  # of it, in the sender's posts
    to_post: float = 0.0  # from the order to the first post: the transfer thread wakes, the first digests are made
    to_verified: float = 0.0  # from the end of the last post until the receiver's transfer thread has verified all
    to_engine: float = 0.0  # from then until its engine thread takes them
    to_step: float = 0.0  # from then until its first decode step
    own_step: float = 0.0  # that step: of an engine that was idle before, over K/V that it has not read yet

    def rest(self, step_s: float) -> float:
        """Return what handing over took, if the decode step took ``step_s``."""
        return self.hand_over - step_s - self.posts


def engine_rows(options: argparse.Namespace) -> list[Row]:
    """Measure over CMA and over tcp."""
    lengths, rounds = ((256,), options.rounds or 3) if options.quick else ((256, 1024), options.rounds or 9)
    transports = ("cma", "tcp")
    return [row for each in transports for row in _measure_transport(options.model, each, lengths, rounds)]


def _measure_transport(model: str, transport: str, lengths: tuple[int, ...], rounds: int) -> list[Row]:
    section = SECTION.format(transport=transport.upper(), dtype="fp32", model=model.rpartition("/")[2])
    rng = np.random.default_rng(0)
    with _pairs(model, transport, max(lengths)) as pairs:
        rows = []
        for pair in pairs.values():
            for _ in range(WARM_ROUNDS):
                pair.hand_over(rng.integers(1000, 30_000, max(lengths)))
        for length in lengths:
            taken: dict[str, list[Times]] = {name: [] for name in (*MODES, ALONE)}
            for _ in range(rounds):
                for name, pair in pairs.items():
                    taken[name].append(pair.hand_over(rng.integers(1000, 30_000, length)))
                taken[ALONE].append(pairs["verified"].alone(rng.integers(1000, 30_000, length)))
            rows += _rows(section, length, taken, takes_off_posts=transport == "cma")
    return rows


class _Pair:
    """A prefill and a decode engine."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        self._prefill, self._decode = prefill, decode

    def alone(self, prompt: np.ndarray) -> Times:
        """Answer by the prefill engine alone."""
        request = _request(prompt)
        started = time.monotonic()
        self._prefill.submit(request)
        told = self._prefill.finish_timed(request.rid)
        self._prefill.probed()
        return Times(first_token=told[0][0] - started, decode_step=_step([at for at, _ in told]))

    def hand_over(self, prompt: np.ndarray) -> Times:
        """Compute the prompt on one engine and answer on the other. Raises: RuntimeError if that fails."""
        request = _request(prompt)
        ticket = PdTicket(room=next(_rooms), generation=0, prefill=self._prefill.address)
        started = time.monotonic()
        self._prefill.submit(replace(request, hand_off=HandOff(leg=PdLeg.PREFILL, ticket=ticket)))
        self._decode.submit(replace(request, hand_off=HandOff(leg=PdLeg.DECODE, ticket=ticket)))
        told = self._decode.finish_timed(request.rid)
        ended = self._prefill.finish(request.rid)[-1].finish
        report = told[0][1].hand_off
        if ended is None or ended.reason is not FinishReason.HANDED_OFF or report is None or not report.transferred:
            raise RuntimeError(f"the hand-off failed: {ended}, {report}; nothing can be measured")
        sent, received = self._prefill.probed(), self._decode.probed()
        (ordered,) = sent["send_last"]
        (taken,) = received["on_received"]
        posted = [(start, end) for start, end in sent["write"] if start >= ordered[0]]
        arrived = max(start for start, _ in received["verified"] if start <= taken[0])
        step = next(times for times in received["execute"] if times[0] > taken[0])
        at = [when for when, _ in told]
        return Times(
            first_token=at[0] - started,
            decode_step=_step(at),
            hand_over=at[1] - ordered[0],
            posts=sum(end - start for start, end in posted),
            to_post=posted[0][0] - ordered[0],
            to_verified=arrived - posted[-1][1],
            to_engine=taken[0] - arrived,
            to_step=step[0] - taken[0],
            own_step=step[1] - step[0],
        )


def _request(prompt: np.ndarray) -> GenerateRequest:
    rid = f"bench-{next(_rooms)}"
    sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=prompt.astype(np.int32), sampling=sampling, cache_salt=rid)


def _step(at: list[float]) -> float:
    """Return the median step, from the times of all tokens."""
    return statistics.median(after - before for before, after in itertools.pairwise(at[1:]))


@contextmanager
def _pairs(model: str, transport: str, longest: int) -> Iterator[dict[str, _Pair]]:
    """Start a pair for each mode."""
    with ExitStack() as stack:

        def start(verify: Verify) -> EngineProcess:
            settings = ProcessSettings(
                model=model, page=PAGE, chunk=CHUNK, transport=transport, verify=verify, probe=watch,
                context_len=longest + 2 * NUM_NEW, pool_tokens=POOL_PROMPTS * (longest + 2 * PAGE),
            )  # fmt: skip
            return stack.enter_context(closing(EngineProcess(settings)))

        yield {name: _Pair(start(verify), start(verify)) for name, verify in MODES.items()}


def watch() -> Callable[[], object]:
    """Note in an engine's process when some calls begin and end. Returns: what gives these times, and forgets them."""
    seen: dict[str, list[tuple[float, float]]] = {}

    def time_calls(owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return call(*args, **kwargs)
            finally:
                seen.setdefault(name, []).append((started, time.monotonic()))

        setattr(owner, method, timed)

    time_calls(KvTransfer, "send_last", "send_last")
    time_calls(NixlAgent, "write", "write")
    time_calls(KVReceiver, "_complete", "verified")
    time_calls(DecodeRole, "on_received", "on_received")
    time_calls(Ranks, "launch", "execute")

    def take() -> dict[str, list[tuple[float, float]]]:
        taken = dict(seen)
        seen.clear()
        return taken

    return take


def _rows(section: str, length: int, taken: dict[str, list[Times]], *, takes_off_posts: bool) -> list[Row]:
    table = Table(section)

    def add(name: str, values: list[float], **more: Any) -> None:
        table.add(f"{length:,} tokens, {name}", [1e3 * value for value in values], "ms", **more)

    num_pages = -(-(length - (length - 1) // CHUNK * CHUNK) // PAGE)
    for mode in MODES:
        times = taken[mode]
        add(f"{mode}: last chunk to the first own token", [one.hand_over for one in times])
        add("  of it the step that makes it", [one.own_step for one in times])
        add(f"  of it posts of {num_pages} pages", [one.posts for one in times])
        if takes_off_posts:
            rest = [one.rest(one.own_step) for one in times]
            add("  the rest: what handing over costs", rest, target=TARGET)
            add("  the rest, with a later step", [one.rest(one.decode_step) for one in times])
        add("    order to first post", [one.to_post for one in times])
        add("    last post to all verified at the receiver", [one.to_verified for one in times])
        add("    from there to its engine", [one.to_engine for one in times])
        add("    from there to its first step", [one.to_step for one in times])
        add("  a later decode step", [one.decode_step for one in times])
    alone = statistics.median(one.first_token for one in taken[ALONE])
    for mode in MODES:
        through = [one.first_token for one in taken[mode]]
        note = f"{1e3 * (statistics.median(through) - alone):+.1f} ms"
        add(f"time to first token, two engines, {mode}", through, note=f"{note} beside one engine")
    add(f"time to first token, {ALONE}", [one.first_token for one in taken[ALONE]])
    return table.rows


PARTS = {
    "transfer": Part(about="KV pages between two processes, beside a plain copy", measure=transfer.rows),
    "engines": Part(about="a hand-off between two engines over CMA and tcp", measure=engine_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("hand_off", __doc__, PARTS, argv)
