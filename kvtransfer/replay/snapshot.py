"""A request in the middle of its answer, as one value and one file from which another process can continue it.

Owns:      `ReplaySnapshot` and its file format.
Never:     knows an engine (replicas/replay/replay.py takes and restores snapshots), or unpickles anything.
Invariant: a file is written whole or not at all; what is read is what was written, or `BadSnapshot` says why not.
Thread:    any.

    offset  bytes  field, little-endian
    0       8      magic
    8       4      version of header and body
    12      4      length h of the header
    16      8      XXH3-64 of magic, version, length and header
    24      h      header: JSON, with the lengths and the XXH3-128 of the body
    24 + h  ...    body: prompt ids, output ids and slots as int32, then the K/V payload (kvtransfer/replay/payload.py)

The digests find accidents, not attackers. A snapshot's K/V is used as it is: load snapshots from trusted sources only.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvtransfer.errors import BadSnapshot
from kvtransfer.layout import KvLayout
from kvtransfer.replay.payload import Payload, PayloadMeta

MAGIC = b"MANTAKV\n"
VERSION = 4
PREAMBLE_BYTES = 24
Ids = npt.NDArray[np.int32]  # [n]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplaySnapshot:
    """The state that decides how a request continues (SPEC H18). The counts that penalties use follow from the ids; the
    random number of a token follows from the seed and its position. So drawing is deterministic at any temperature,
    given the logits, whose last bits depend on the device (SPEC L02)."""

    prompt_ids: Ids  # [P]
    output_ids: Ids  # [O] made so far
    tokenizer: str  # digests of the meaning of ids, and of the template in which chats are rendered (SPEC L02); K/V
    chat_template: str  # depends on ids alone, so that caches and KV transfers do not compare these
    device: str  # the kind that it ran on: cpu or cuda
    cached: Mapping[str, int]  # prompt tokens that were reused, by tier (`CachedTokens.by_tier`)
    sampling: Mapping[str, Any]  # every field of the engine's SamplingParams, by name; JSON values
    eos_ids: tuple[int, ...]  # ids that end it beside its own stop ids
    salt: str
    adapter: Mapping[str, str]  # every field of the engine's AdapterRef, by name; {}: none
    priority: int
    return_logprobs: bool
    top_logprobs: int
    prompt_logprobs_from: int | None  # None once they were delivered
    meta: PayloadMeta  # token_range is [0, n)
    kv: Payload  # uint8 [L, 2, n, K, token_bytes] of the first n of prompt + output

    def __post_init__(self) -> None:
        num_ids = len(self.prompt_ids) + len(self.output_ids)
        if self.meta.token_range[0] != 0 or not 0 <= self.meta.num_tokens < num_ids:
            raise ValueError(f"K/V of tokens {self.meta.token_range} does not begin a sequence of {num_ids}")
        if self.kv.shape != self.meta.shape or self.kv.dtype != np.uint8:
            raise ValueError(f"K/V of shape {self.meta.shape} uint8 is wanted, got {self.kv.shape} {self.kv.dtype}")

    @property
    def rid(self) -> str:
        return self.meta.rid

    def save(self, path: str | Path) -> None:
        """Write the file, readable by its owner alone, as a whole and synced to disk, or not at all."""
        path = Path(path)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(self._pieces())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def to_bytes(self) -> bytes:
        """Return what `save` would write."""
        return b"".join(self._pieces())

    def _pieces(self) -> list[bytes | memoryview]:
        parts = [_raw(self.prompt_ids), _raw(self.output_ids), _raw(self.meta.slots), np.ascontiguousarray(self.kv)]
        return [_preamble(_header(self, parts)), *(part.reshape(-1).data for part in parts)]

    @staticmethod
    def load(path: str | Path) -> "ReplaySnapshot":
        """Read a snapshot. Raises: BadSnapshot for a file of another kind or version, cut short, or changed."""
        try:
            with open(path, "rb") as file:
                header = _read_header(file, str(path))
                body = _read_body(file, header, str(path))
            return _parse(header, body)
        except (KeyError, TypeError, ValueError) as error:
            raise BadSnapshot(f"{path}: its header makes no sense: {error}") from error


def _raw(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(ids, dtype="<i4").view(np.uint8)


def _header(snapshot: ReplaySnapshot, parts: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.reshape(-1).data)
    meta = snapshot.meta
    fields_ = {
        "rid": meta.rid,
        "row": meta.row,
        "cached_prefix_len": meta.cached_prefix_len,
        "layout": asdict(meta.layout),
        "tokenizer": snapshot.tokenizer,
        "chat_template": snapshot.chat_template,
        "device": snapshot.device,
        "cached": dict(snapshot.cached),
        "sampling": dict(snapshot.sampling),
        "eos_ids": list(snapshot.eos_ids),
        "salt": snapshot.salt,
        "adapter": dict(snapshot.adapter),
        "priority": snapshot.priority,
        "return_logprobs": snapshot.return_logprobs,
        "top_logprobs": snapshot.top_logprobs,
        "prompt_logprobs_from": snapshot.prompt_logprobs_from,
        "num_prompt": len(snapshot.prompt_ids),
        "num_output": len(snapshot.output_ids),
        "num_computed": meta.num_tokens,
        "body_bytes": sum(part.size for part in parts),
        "body_xxh3_128": digest.hexdigest(),
    }
    return json.dumps(fields_, allow_nan=False).encode()


def _preamble(header: bytes) -> bytes:
    start = MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little")
    return start + xxhash.xxh3_64_intdigest(start + header).to_bytes(8, "little") + header


def _read_header(file: BinaryIO, path: str) -> dict[str, Any]:
    size = os.fstat(file.fileno()).st_size
    start = file.read(PREAMBLE_BYTES)
    if start[:8] != MAGIC:
        raise BadSnapshot(f"{path}: no snapshot: a file that begins with {MAGIC!r} is wanted, got {start[:8]!r}")
    header_bytes = int.from_bytes(start[12:16], "little")
    if len(start) < PREAMBLE_BYTES or size < PREAMBLE_BYTES + header_bytes:
        raise BadSnapshot(
            f"{path}: cut short, or its length was changed: {size} bytes are there, its header alone needs "
            f"{PREAMBLE_BYTES + header_bytes}; copy it anew"
        )
    header = file.read(header_bytes)
    if xxhash.xxh3_64_intdigest(start[:16] + header) != int.from_bytes(start[16:24], "little"):
        raise BadSnapshot(f"{path}: its header was changed since it was written (digest differs); copy it anew")
    version = int.from_bytes(start[8:12], "little")
    if version != VERSION:
        raise BadSnapshot(
            f"{path}: it is of version {version}, and version {VERSION} is understood: use the release that made it"
        )
    return _typed({"the header": json.loads(header)}, "the header", dict)


def _read_body(file: BinaryIO, header: dict[str, Any], path: str) -> npt.NDArray[np.uint8]:
    there = os.fstat(file.fileno()).st_size - file.tell()
    wanted = header.get("body_bytes")
    if there != wanted:
        raise BadSnapshot(f"{path}: {wanted} bytes of body are wanted, {there} are there: cut short or appended to")
    body = np.fromfile(file, dtype=np.uint8)
    if xxhash.xxh3_128_hexdigest(body.data) != header.get("body_xxh3_128"):
        raise BadSnapshot(f"{path}: its body was changed since it was written (digest differs); copy it anew")
    return body


def _parse(header: dict[str, Any], body: npt.NDArray[np.uint8]) -> ReplaySnapshot:
    """Make the snapshot. Raises: KeyError, TypeError or ValueError for a header that does not describe ``body``."""
    named: dict[str, Any] = {
        f.name: _typed(header["layout"], f.name, str if f.name in _TEXTS else int)
        for f in fields(KvLayout)
        if f.default is MISSING or f.name in header["layout"]  # files made before a field came have none
    }
    layout = KvLayout(**named)
    counts = [_typed(header, name, int) for name in ("num_prompt", "num_output", "num_computed")]
    if min(counts) < 0 or 4 * sum(counts) > len(body):
        raise ValueError(f"{counts} ids and slots are not in a body of {len(body)} bytes")
    ids = body[: 4 * sum(counts)].view("<i4").astype(np.int32)
    prompt_ids, output_ids, slots = np.split(ids, np.cumsum(counts)[:2])
    meta = PayloadMeta(
        rid=_typed(header, "rid", str),
        layout=layout,
        prompt_len=len(prompt_ids),
        cached_prefix_len=_typed(header, "cached_prefix_len", int),
        token_range=(0, len(slots)),
        row=_typed(header, "row", int),
        slots=slots,
    )
    start = header["prompt_logprobs_from"]
    return ReplaySnapshot(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        tokenizer=_typed(header, "tokenizer", str),
        chat_template=_typed(header, "chat_template", str),
        device=_typed(header, "device", str),
        cached={name: _typed(header["cached"], name, int) for name in _typed(header, "cached", dict)},
        sampling=_typed(header, "sampling", dict),
        eos_ids=tuple(int(token) for token in _typed(header, "eos_ids", list)),
        salt=_typed(header, "salt", str),
        adapter={name: _typed(header["adapter"], name, str) for name in _typed(header, "adapter", dict)},
        priority=_typed(header, "priority", int),
        return_logprobs=_typed(header, "return_logprobs", bool),
        top_logprobs=_typed(header, "top_logprobs", int),
        prompt_logprobs_from=None if start is None else _typed(header, "prompt_logprobs_from", int),
        meta=meta,
        kv=body[4 * sum(counts) :].reshape(meta.shape),
    )


_TEXTS = ("model", "architecture", "dtype")  # fields of a KvLayout; the others are numbers


def _typed(values: Mapping[str, Any], name: str, wanted: type[T]) -> T:
    value = values[name]
    if type(value) is not wanted:  # not isinstance: True is no length
        raise TypeError(f"{name} is {type(value).__name__}, {wanted.__name__} is wanted")
    return value


def _sync_folder(folder: Path) -> None:
    """Sync ``folder``, so that the new name survives a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
