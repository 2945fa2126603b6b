"""The bytes between a replica and a router: what a frame is, and how token deltas and reports travel in one.

Owns:      the framing and the encoding (cache_frames.py has that of cache events). JSON, not pickle: bytes from a
           socket never become code.
Never:     opens a socket (channel_server.py, channel_client.py).
Invariant: ``decode_deltas(encode_deltas(x)) == x``; a frame longer than MAX_FRAME_BYTES is an error, not an allocation.

    frame = length (4 bytes, little endian, of the payload) | kind (1 byte) | payload
    HELLO   replica -> router, first: {"token", "replica_id"}
    DELTAS  replica -> router, one per engine step: the deltas of every request that this router has there
    REPORT  replica -> router, every report period: its EngineStats and its health
    EVENTS  replica -> router, before a report: what entered and left its prefix cache since the last
    SNAPSHOT  replica -> router, when asked: everything in its prefix cache
"""

import dataclasses
import enum
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from kvtransfer.types import TransferStats
from replicas.types import (
    EngineStats,
    Finish,
    FinishReason,
    HandOffReport,
    PoolStats,
    StageTimes,
    TokenDelta,
    TokenLogprob,
    Usage,
)

HEADER = struct.Struct("<IB")
MAX_FRAME_BYTES = 64 << 20


class FrameKind(enum.IntEnum):
    HELLO = 1
    DELTAS = 2
    REPORT = 3
    EVENTS = 4
    SNAPSHOT = 5


_KINDS = frozenset(FrameKind)
_HAND_OFF = [field.name for field in dataclasses.fields(HandOffReport)]
_STAGES = [field.name for field in dataclasses.fields(StageTimes)]


class BadFrame(ValueError):
    """The peer does not speak this protocol; the connection is to be closed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who connects, and the application's secret."""

    token: str
    replica_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The last that a replica said of itself."""

    stats: EngineStats
    error: str | None  # why it is unhealthy, else None
    num_open: int  # requests it has accepted and not ended
    age_s: float = 0.0  # how old ``stats`` was when this was sent: a step in progress can be long
    step_age_s: float = 0.0  # how long the step in progress had been running then; 0: none was


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


class FrameReader:
    """Cuts a byte stream into frames of at most ``max_bytes``, which may be changed between two frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """The frames that ``data`` completes. Raises: BadFrame for an unknown kind or an absurd length."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            length, kind = HEADER.unpack_from(self._buffer, start)
            if length > self.max_bytes:
                raise BadFrame(f"a frame of {length} bytes is announced; at most {self.max_bytes} are allowed")
            if kind not in _KINDS:
                raise BadFrame(f"frame kind {kind} is unknown; known: {[k.name for k in FrameKind]}")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            yield FrameKind(kind), bytes(self._buffer[start + HEADER.size : end])
            start = end
        del self._buffer[:start]


def encode_hello(hello: Hello) -> bytes:
    return encode_frame(FrameKind.HELLO, json.dumps(dataclasses.asdict(hello)).encode())


def decode_hello(payload: bytes) -> Hello:
    """Raises: BadFrame."""
    raw = _parse(payload)
    if not isinstance(raw, dict) or not {"token", "replica_id"} <= raw.keys():
        raise BadFrame("a HELLO frame needs token and replica_id")
    return Hello(token=str(raw["token"]), replica_id=str(raw["replica_id"]))


def encode_report(report: ReplicaReport) -> bytes:
    return encode_frame(FrameKind.REPORT, json.dumps(dataclasses.asdict(report)).encode())


def decode_report(payload: bytes) -> ReplicaReport:
    """Raises: BadFrame."""
    raw = _parse(payload)
    try:
        stats = dict(raw["stats"])
        pool = PoolStats(**stats.pop("pool"))
        transfer = stats.pop("transfer")
        engine = EngineStats(
            pool=pool, transfer=None if transfer is None else TransferStats(**transfer), **stats
        )
        return ReplicaReport(
            stats=engine,
            error=raw["error"],
            num_open=raw["num_open"],
            age_s=float(raw["age_s"]),
            step_age_s=float(raw["step_age_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadFrame(f"a REPORT frame of another version: {error}") from error


def encode_deltas(deltas: Sequence[TokenDelta]) -> bytes:
    rows = [_delta_to_row(delta) for delta in deltas]
    return encode_frame(FrameKind.DELTAS, json.dumps(rows, separators=(",", ":")).encode())


def decode_deltas(payload: bytes) -> list[TokenDelta]:
    """Raises: BadFrame."""
    try:
        return [_row_to_delta(row) for row in _parse(payload)]
    except (TypeError, ValueError, IndexError) as error:
        raise BadFrame(f"a DELTAS frame of another version: {error}") from error


def _parse(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError as error:
        raise BadFrame(f"a frame's payload is not JSON: {error}") from error


def _delta_to_row(delta: TokenDelta) -> list[Any]:
    finish, usage = delta.finish, delta.usage
    return [
        delta.rid,
        delta.index,
        delta.token_ids,
        delta.text,
        [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.num_retractions],
        None if finish is None else _finish_to_row(finish),
        [_logprob_to_row(logprob) for logprob in delta.logprobs],
        [_logprob_to_row(logprob) for logprob in delta.prompt_logprobs],
        None if delta.hand_off is None else dataclasses.astuple(delta.hand_off),
        None if delta.stages is None else _stages_to_row(delta.stages),
    ]


def _row_to_delta(row: list[Any]) -> TokenDelta:
    rid, index, token_ids, text, usage, finish, logprobs, prompt_logprobs, hand_off, stages = row
    prompt, completion, cached, retractions = usage
    return TokenDelta(
        rid=rid,
        index=index,
        token_ids=tuple(token_ids),
        text=text,
        usage=Usage(
            prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, num_retractions=retractions
        ),
        finish=None if finish is None else _row_to_finish(*finish),
        logprobs=tuple(_row_to_logprob(*logprob) for logprob in logprobs),
        prompt_logprobs=tuple(_row_to_logprob(*logprob) for logprob in prompt_logprobs),
        hand_off=None if hand_off is None else HandOffReport(**dict(zip(_HAND_OFF, hand_off, strict=True))),
        stages=None if stages is None else _row_to_stages(*stages),
    )


def _stages_to_row(stages: StageTimes) -> list[float]:
    return [stages.queue_s, stages.prefill_s, stages.transfer_s, stages.decode_s]


def _row_to_stages(queue_s: float, prefill_s: float, transfer_s: float, decode_s: float) -> StageTimes:
    return StageTimes(queue_s=queue_s, prefill_s=prefill_s, transfer_s=transfer_s, decode_s=decode_s)


def _finish_to_row(finish: Finish) -> list[Any]:
    return [finish.reason.value, finish.matched, finish.message, finish.http_status, finish.retry_as]


def _row_to_finish(
    reason: str,
    matched: int | str | None,
    message: str | None,
    http_status: int,
    retry_as: Literal["overloaded", "engine_dead"] | None,
) -> Finish:
    return Finish(
        reason=FinishReason(reason), matched=matched, message=message, http_status=http_status, retry_as=retry_as
    )


def _logprob_to_row(logprob: TokenLogprob) -> list[Any]:
    return [logprob.token_id, logprob.logprob, logprob.top, logprob.rank]


def _row_to_logprob(token_id: int, logprob: float | None, top: list[list[Any]], rank: int | None) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, top=tuple((t, value) for t, value in top), rank=rank)
