"""Runs the batches that a router holds: each line as if a client had sent it, when replicas have room.

Owns:      which lines of its batches run, and at which replica each begins.
Never:     keeps a body: a line is read from its file when it begins, its entry goes to the store within KEEP_S. Where
           the store cannot take it, the entry stays, no line is begun, and the store is tried again, ever later.
Invariant: no more lines are open than there are places at the replicas. A line that found no room (`PASSING`) is run
           again, ever later, until the batch's time is over.
Thread:    the router's event loop; the store's calls run on its threads.

The order of a batch is cut into as many runs of neighbours as there are replicas, and each replica takes its own run
from the front, so that it computes a prefix once for all lines that begin with it. One that is through takes the second
half of the longest run that is left. Requests of others come first in the engines (`GenerateRequest.offline`).
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from deployments.batches.store import OPEN, BatchStore, Line, LineEntry, Row, entry_text, not_run, why
from deployments.record.route_log import RequestWatch, tell
from replicas.errors import StepFailed

log = logging.getLogger(__name__)
T = TypeVar("T")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_LINES = 50_000  # of a batch, as OpenAI's
HOLD_S = 15.0  # how long a batch is held; when its router dies, another one takes it after so long
SHOWN = ("id", "router", "status", "total", "completed", "failed", "created_at", "expires_at")  # of one, to everybody
LOOK_S = 1.0  # between two looks for batches, cancellations and places
KEEP_S = 0.5  # between two writes of entries
SWEEP_S = 60.0
MOST_BATCHES = 4  # that one router runs at a time; they share the places
FIRST_WAIT_S, LAST_WAIT_S = 0.5, 30.0  # before a line is run again, while it keeps its place; before the store is tried
PASSING = frozenset({429, 503})  # statuses after which it is run again as often as it takes
FAILED = frozenset({500, 502})  # after these only so often in all: it may be the line that fails
MOST_FAILED = 3
_KEY = ("cache_salt", "tools", "instructions", "messages", "prompt", "input")  # in the order of the prompt

# answers a batch request, at a replica if it can: status, id of the request, and body, which is JSON
Answer = Callable[[Row, Line, bytes, str], Awaitable[tuple[int, str, bytes]]]
Running = asyncio.Task[tuple[Line, LineEntry | None]]


def keyed_lines(path: Path, endpoint: str, *, max_bytes: int) -> Iterator[tuple[Line, bytes] | LineEntry]:
    """Read the requests of a batch, each with the key by which it is put in order: its prompt, as JSON.

    Keys in alphabetical order are the texts' trie depth-first: lines with a common beginning are neighbours, so what
    one computes the next one finds in the cache, however small that is. Blank lines are left out.

    Args: max_bytes: of a line.
    """
    number = start = 0
    with path.open("rb") as file:
        while data := file.readline(max_bytes + 1):
            size, is_long = len(data), len(data) > max_bytes
            while not data.endswith(b"\n") and (rest := file.readline(1 << 16)):  # of one that is too long
                size, data = size + len(rest), rest
            if data.strip() or is_long:
                yield _too_long(number, max_bytes) if is_long else _keyed(Line(number, start, size, ""), data, endpoint)
                number += 1
            start += size


def _too_long(number: int, max_bytes: int) -> LineEntry:
    return not_run(number, None, "invalid_line", f"it has more than {max_bytes:,} bytes (router.max_body_bytes)")


def _keyed(line: Line, data: bytes, endpoint: str) -> tuple[Line, bytes] | LineEntry:
    try:
        raw = from_json(data.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        return not_run(line.number, None, "invalid_json_line", f"it is not valid JSON in UTF-8: {error}")
    custom_id = raw.get("custom_id") if isinstance(raw, dict) else None
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        return not_run(line.number, None, "invalid_line", "custom_id must be a text of 1 to 512 characters")
    body = raw.get("body")
    if raw.get("method", "POST") != "POST" or raw.get("url") != endpoint or not isinstance(body, dict):
        wanted = f'"method": "POST", "url": "{endpoint}", and "body" with an object'
        return not_run(line.number, custom_id, "invalid_line", f"this batch's lines have {wanted}")
    if body.get("stream") or body.get("background"):
        return not_run(line.number, custom_id, "invalid_line", "stream and background have no place in a batch")
    return line._replace(custom_id=custom_id), to_json([body.get(name) for name in _KEY])


class Runs:
    """The requests of a batch that are still to be begun: a run of neighbours for each replica."""

    def __init__(self, lines: list[Line]) -> None:
        self._lines = lines
        self._runs: dict[str, range] = {}  # of places in ``lines``
        self._rest = [range(len(lines))]  # no replica's yet
        self._again = deque[Line]()

    def __len__(self) -> int:
        return len(self._again) + sum(map(len, [*self._runs.values(), *self._rest]))

    def take(self, replica: str) -> Line | None:
        """Return the next line for ``replica``; None where none is left. Those to be run again come behind all others:
        one that is never let in keeps no other one waiting."""
        run = self._runs.get(replica) or self._new_run()
        if not run:
            return self._again.popleft() if self._again else None
        self._runs[replica] = run[1:]
        return self._lines[run[0]]

    def again(self, line: Line) -> None:
        """Put back a line that was begun."""
        self._again.append(line)

    def keep(self, replicas: Mapping[str, int]) -> None:
        """Note which replicas there are: the runs of others are anybody's."""
        for gone in self._runs.keys() - replicas.keys():
            self._rest.append(self._runs.pop(gone))

    def _new_run(self) -> range:
        """Take a run that is nobody's, or the second half of the longest one."""
        self._rest = sorted(filter(len, self._rest), key=len)
        if self._rest:
            return self._rest.pop()
        longest = max(self._runs, key=lambda each: len(self._runs[each]), default=None)
        if longest is None:
            return range(0)
        run = self._runs[longest]
        half = len(run) // 2
        self._runs[longest] = run[:half]
        return run[half:]


class BatchRunner:
    """The batches that one router runs."""

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        *,
        router_id: str,
        places: Callable[[], Mapping[str, int]],
        max_line_bytes: int,
        watch: RequestWatch | None = None,
    ) -> None:
        """``places``: how many lines each replica may have now."""
        self._store = store
        self._answer = answer
        self._router_id = router_id
        self._places = places
        self._max_line_bytes = max_line_bytes
        self._held: dict[str, Row] = {}  # as of the last look
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch = watch if watch is not None else RequestWatch()
        self._num_running = 0  # lines
        self._problems: dict[str, str] = {}  # why a batch does not go on; under "" why none can be looked for

    async def run_forever(self) -> None:
        """Run batches until cancelled; then leave them to other routers."""
        swept_s = 0.0
        try:
            while True:
                try:
                    await self._look()
                    if time.monotonic() > swept_s + SWEEP_S:
                        swept_s = time.monotonic()
                        await self._store.run(self._store.sweep)
                    self._note("", None)
                except (OSError, sqlite3.Error) as error:  # the folder may be back in a moment
                    self._note("", error)
                except Exception:  # the edge: so may be what else it is
                    log.exception("the batches in %s cannot be looked for; trying again", self._store.folder)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._store.release(self._router_id)

    def progress(self) -> list[dict[str, Any]]:
        """Tell how far the batches are that this router runs, as of the last look."""
        problems = self._problems
        return [{**{name: row[name] for name in SHOWN}, "problem": problems.get(row["id"], problems.get("", ""))}
                for row in self._held.values()]  # fmt: skip

    async def _look(self) -> None:
        """Take batches, and let go of those that are not ours any more."""
        rows = await self._store.run(self._store.claim, self._router_id, hold_s=HOLD_S, most=MOST_BATCHES)
        self._held = {row["id"]: row for row in rows}
        for batch_id, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[batch_id]
            elif batch_id not in self._held:
                task.cancel()
        for batch_id in self._held.keys() - self._tasks.keys():
            self._tasks[batch_id] = asyncio.create_task(self._run(batch_id))

    async def _run(self, batch_id: str) -> None:
        """Bring a batch from where it is to its end."""
        held, store = self._held[batch_id], self._store
        batch: Row | None = held
        try:
            while batch is not None and batch["status"] in OPEN and batch["router"] == self._router_id:
                if batch["status"] == "validating" and time.time() >= batch["expires_at"]:
                    await self._kept(batch, store.finish, batch, "expired")
                elif batch["status"] == "validating":
                    await self._kept(batch, self._put_in_order, batch)
                elif batch["status"] == "in_progress":
                    lines = await self._kept(batch, store.to_run, batch_id)
                    ends_as = await self._run_lines(batch, Runs(lines))
                    if ends_as is not None:
                        await self._kept(batch, store.finish, batch, ends_as)
                else:
                    await self._kept(batch, store.write_files, batch)
                batch = await self._kept(batch, store.batch, batch["owner"], batch_id)
        except FileNotFoundError:
            await self._kept(held, store.fail, held, "it is gone")
        except Exception:  # the edge: other batches go on, and this one is tried again
            log.exception("batch %s cannot go on; trying again in %g s", batch_id, LAST_WAIT_S)
            await asyncio.sleep(LAST_WAIT_S)
        finally:
            self._note(batch_id, None)

    async def _kept(self, batch: Row, call: Callable[..., T], *args: Any) -> T:
        """Make a call of the store, again and again until it succeeds. Raises: FileNotFoundError for an input that is
        gone."""
        wait_s, is_told = FIRST_WAIT_S, False
        while True:
            try:
                made = await self._store.run(call, *args)
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, FileNotFoundError) and self._store.is_there:
                    raise
                self._note(batch["id"], error)
                is_told = is_told or await self._tell(batch)  # a full disk may have no room for that either
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_WAIT_S)
            else:
                if wait_s > FIRST_WAIT_S and self._note(batch["id"], None):
                    await self._tell(batch)
                return made

    async def _tell(self, batch: Row) -> bool:
        """Say in the batch's ``errors`` why it does not go on, or that it does. Returns: whether that was kept."""
        with contextlib.suppress(OSError, sqlite3.Error):
            await self._store.run(self._store.tell, batch, self._problems.get(batch["id"]))
            return True
        return False

    def _note(self, batch_id: str, error: Exception | None) -> bool:
        """Note why a batch does not go on, or that it does. Returns: whether that is news."""
        before = self._problems.pop(batch_id, None)
        if error is not None:
            self._problems[batch_id] = f"router.batch_folder {why(error)}"
        now = self._problems.get(batch_id)
        if (before is None) == (now is None):  # calls that fail by turns say it in different words
            return False
        name = f"batch {batch_id}" if batch_id else "the look for batches"
        if now is None:
            log.warning("%s waits no more", name)
        else:
            log.error("%s waits: %s (%r); what lines became is kept in memory, and no line begins", name, now, error)
        tell(self._watch.batches_stalled, len(self._problems))
        return True

    def _put_in_order(self, batch: Row) -> None:
        path = self._store.path(batch["input_file_id"])
        lines = keyed_lines(path, batch["endpoint"], max_bytes=self._max_line_bytes)
        self._store.put_in_order(batch, lines, max_lines=MAX_LINES)

    async def _run_lines(self, batch: Row, runs: Runs) -> str | None:
        """Run the requests of a batch. Returns: how it ends; None if its client has cancelled it."""
        running, entries, kept_s = dict[Running, str](), list[LineEntry](), time.monotonic()
        try:
            while len(runs) or running:
                if time.time() >= batch["expires_at"]:
                    return "expired"
                if self._held.get(batch["id"], batch)["status"] == "cancelling":
                    return None
                self._begin(batch, runs, running)
                if not running:
                    await asyncio.sleep(KEEP_S)
                    continue
                done, _ = await asyncio.wait(running, timeout=KEEP_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del running[task]
                    line, entry = task.result()
                    if entry is None:
                        runs.again(line)
                    else:
                        entries.append(entry)
                    outcome = "repeated" if entry is None else "completed" if entry.ok else "failed"
                    tell(self._watch.line_ran, outcome)
                if entries and (time.monotonic() > kept_s + KEEP_S or not (len(runs) or running)):
                    await self._kept(batch, self._store.add_entries, batch, entries)
                    entries, kept_s = [], time.monotonic()
            return "completed"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if entries:
                with contextlib.suppress(OSError, sqlite3.Error):  # they run again, at another router
                    await self._store.run(self._store.add_entries, batch, entries)

    def _begin(self, batch: Row, runs: Runs, running: dict[Running, str]) -> None:
        """Begin as many lines as there are places; owners have equal shares of them, and so have an owner's batches."""
        places, owners = self._places(), [each["owner"] for each in ({batch["id"]: batch} | self._held).values()]
        share = len(set(owners)) * owners.count(batch["owner"])
        runs.keep(places)
        taken = Counter(running.values())
        for replica, most in places.items():
            for _ in range(-(-most // share) - taken[replica]):
                line = runs.take(replica)
                if line is None:
                    return
                running[asyncio.create_task(self._run_line(batch, line, replica))] = replica

    async def _run_line(self, batch: Row, line: Line, replica: str) -> tuple[Line, LineEntry | None]:
        """Run one line, and after a failure that may pass wait. Returns: it, and its entry; None: it is run again."""
        self._count_running(1)
        refused = False
        try:
            data = await self._kept(batch, self._read, batch, line)
            status, request_id, body = await self._answer(batch, line, data, replica)
            refused = status in FAILED and from_json(body).get("error", {}).get("code") == StepFailed.code
        except FileNotFoundError:
            raise
        except Exception as error:  # the edge: one line's fault ends no other line
            log.exception("line %d of batch %s failed", line.number, batch["id"])
            status, request_id, body = 500, "", to_json({"error": {"message": type(error).__name__}})
        finally:
            self._count_running(-1)
        if status in PASSING or (status in FAILED and not refused and line.num_failed + 1 < MOST_FAILED):
            await asyncio.sleep(min(LAST_WAIT_S, FIRST_WAIT_S * 2**line.num_passed))
            is_failed = status in FAILED
            return line._replace(num_failed=line.num_failed + is_failed, num_passed=line.num_passed + 1), None
        about = json.dumps({"status_code": status, "request_id": request_id})[:-1]
        text = entry_text(line.custom_id, response=f'{about}, "body": {body.decode()}}}')
        return line, LineEntry(line.number, status == 200, text)

    def _count_running(self, change: int) -> None:
        self._num_running += change
        tell(self._watch.lines_running, self._num_running)

    def _read(self, batch: Row, line: Line) -> bytes:
        with self._store.path(batch["input_file_id"]).open("rb") as file:
            file.seek(line.start)
            raw: dict[str, Any] = from_json(file.read(line.size).removeprefix(b"\xef\xbb\xbf"))
        with contextlib.suppress(KeyError):
            del raw["body"]["priority"]
        return to_json(raw["body"])
