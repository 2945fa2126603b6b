"""Writes a line for each request, from which a day can be replayed: lengths, salted hashes of pages, what happened.

Owns:      one file for the life of this router, which only its user may read; the salt of its hashes, which is written
           nowhere and ends with the process.
Never:     writes text, token ids, or what names a key, a session or a client; blocks or fails a request.
Invariant: the file consists of whole lines of JSON, at most ``max_bytes``. The first says what is recorded; a line with
           ``replica`` alone describes one, before the first request there; a line with ``lost`` counts the requests
           that are missing before it. Two pages have one hash where their tokens, and all before them, are the same.
Thread:    `add` runs on the router's event loop, everything that hashes or writes on a thread of its own.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import logging
import os
import pathlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deployments.record.rids import owner_of
from deployments.record.route_log import Ended, RouteRecord, told_of
from kvtransfer.pages import page_keys

VERSION = 1  # of the form of the lines
MOST_WAITING = 1000  # requests whose lines are still to be written
BATCH = 100  # lines written at once
HASH_BYTES = 6  # eight characters a page; among ten million pages two have the same by chance once in six recordings
CLOSE_S = 5.0
SCHEDULER = "scheduler."
UNTOLD = ("rid", "key", "stream")  # of what the log says of a request

FilledIn = Mapping[str, Mapping[str, Any]]  # settings that were left open: value and reason

log = logging.getLogger(__name__)


class Recorder:
    """The recording of one router."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        name: str,
        page_size: int,
        max_bytes: int,
        facts: Mapping[str, Any],
        filled_in_of: Callable[[str], FilledIn],
    ) -> None:
        """``facts``: of the fleet, for the first line. The file is made with the first request."""
        self.path = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{name}.jsonl"
        self._facts = {"recording": VERSION, "page_size": page_size, **facts}
        self._page_size = page_size
        self._filled_in_of = filled_in_of
        self._max_bytes = max_bytes
        self._salt = secrets.token_bytes(32)
        self._waiting: queue.Queue[Ended | None] = queue.Queue(MOST_WAITING)
        self._num_refused = 0  # written by `add` alone: too many waited
        self._num_failed = 0  # written by the thread alone
        self._num_told = 0  # of both, as the file says
        self._file: int | None = None  # its descriptor; None until it could be made
        self._size = 0  # bytes of whole lines
        self._described: set[str] = set()  # replicas
        self._is_full = self._complained = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """The requests that have no line."""
        return self._num_refused + self._num_failed

    def add(self, ended: Ended) -> None:
        """Have the line of ``ended`` written; what cannot wait is counted as lost."""
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            self._num_refused += 1

    def close(self) -> None:
        """Write what waits, for at most ``CLOSE_S``, and end."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        going = True
        while going:
            taken = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                taken += (self._waiting.get_nowait() for _ in range(BATCH - 1))
            batch = list(itertools.takewhile(lambda each: each is not None, taken))
            going = len(batch) == len(taken)
            try:
                self._write([each for each in batch if each is not None])
            except OSError as error:  # the next batch may find room
                self._num_failed += len(batch)
                self._complain(error)
            except Exception:
                self._num_failed += len(batch)
                log.exception("%d requests are missing in the recording %s", len(batch), self.path)
        if self._file is not None:
            os.close(self._file)

    def _write(self, batch: Sequence[Ended]) -> None:
        """Append the lines of ``batch``, all or none. Raises: OSError."""
        if self._is_full or not batch:
            return
        if self._file is not None and not os.fstat(self._file).st_nlink:  # it was deleted: nobody could read the rest
            os.close(self._file)
            self._file, self._size = None, 0
            self._described.clear()
        if self._file is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        num_lost, told = self.num_lost, list[Mapping[str, Any]]()
        if not self._size:
            told.append({**self._facts, "time_s": time.time()})
        if num_lost != self._num_told:
            told.append({"lost": num_lost - self._num_told})
        new = {each.record.tries[-1].decision.replica_id: each.record for each in batch if each.record is not None}
        told += [_described(new[name], name, self._filled_in_of(name)) for name in new if name not in self._described]
        told += [self.line(each) for each in batch]
        data = b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in told)
        if self._size + len(data) > self._max_bytes:
            self._is_full = True
            log.warning("the recording %s ends at %d bytes", self.path, self._size)
            return
        try:
            num_written = 0
            while num_written < len(data):
                num_written += os.write(self._file, data[num_written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        self._num_told = num_lost
        self._described |= new.keys()

    def line(self, ended: Ended) -> dict[str, Any]:
        """Return what is written of a request."""
        request, timeline, sampling = ended.request, ended.timeline, ended.request.sampling
        told = told_of(request, timeline, ended.record, ended.outcome)
        stages, arrival = timeline.stages_so_far, timeline.arrival
        return {
            "time_s": round(arrival.time_s, 4),
            "endpoint": arrival.endpoint,
            **{name: value for name, value in told.items() if name not in UNTOLD},
            "route_s": round(stages.route_s, 4),
            "prefill_s": round(stages.prefill_s, 4),
            "n": sampling.n,
            "max_tokens": sampling.max_new_tokens,
            "priority": request.priority,
            "objective_s": request.objective_s,
            "deadline_s": request.deadline_s,
            "session": self._hashed("session", ended.session_id),
            "tenant": self._hashed("tenant", owner_of(request.rid)),
            "blocks": self._blocks(ended),
        }

    def _blocks(self, ended: Ended) -> str:
        """Return the hashes of the whole pages of prompt and answer, without what separates them."""
        request, size = ended.request, self._page_size
        if ended.record is None:
            keys = page_keys(request.token_ids, size, request.namespace)
        else:
            keys = ended.record.tries[0].decision.keys
        rest = np.concatenate([request.token_ids[len(keys) * size :], np.array(ended.answer, dtype=np.int32)])
        parent = int(keys[-1]) if len(keys) else None
        more = page_keys(rest[:-1], size, request.namespace, parent)  # no step computes the K/V of the last token
        return "".join(self._digest(key.tobytes()) for key in (*keys, *more))

    def _hashed(self, kind: str, name: str) -> str:
        return self._digest(f"{kind}/{name}".encode()) if name else ""

    def _digest(self, data: bytes) -> str:
        digest = hashlib.blake2b(data, key=self._salt, digest_size=HASH_BYTES).digest()
        return base64.urlsafe_b64encode(digest).decode()

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log.error("requests are missing in the recording %s, which says how many: %s", self.path, error)


def _described(record: RouteRecord, replica_id: str, filled_in: FilledIn) -> dict[str, Any]:
    """Return the line of a replica, as the decision of ``record`` saw it, with what it filled in of the scheduler."""
    view = next(each.view for each in record.tries[-1].decision.candidates if each.replica_id == replica_id)
    return {
        "replica": replica_id,
        "role": view.role.value,
        "pool_pages": view.pool_pages,
        "max_running": view.max_running_requests,
        "rate_step_tokens": view.rate_step_tokens,
        "prefill_tokens_per_s": round(view.prefill_tokens_per_s, 1),
        "decode_step_s": round(view.decode_step_s, 6),
        "scheduler": {
            name.removeprefix(SCHEDULER): filled["value"]
            for name, filled in filled_in.items()
            if name.startswith(SCHEDULER)
        },
    }
