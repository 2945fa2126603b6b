"""Answers that are made in the background, without a client: their events, for any number of readers.

Owns:      the answers that run or wait, and those that have ended, within bounds.
Never:     knows HTTP or the JSON of an answer (http/apis/responses.py); outlives its process.
Invariant: an answer is found only by the key that opened it. What runs makes room for nothing; of what has ended, the
           oldest of the key with most does.
Thread:    the router's event loop.

    run ──> ended, failed or cancelled: kept for ``kept_s`` ──> gone
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import islice
from typing import Any

from deployments.dispatch.resumable_streams import Event, Key, ResumableStream, ResumableStreams

MOST_EVENT_BYTES = 2 << 20  # of one answer: some 10,000 events of text; the oldest of more are dropped
MOST_ENDED_BYTES = 128 << 20  # of all answers that have ended


class BackgroundStream(ResumableStream):
    """The events of one answer that waits for no connection; event ``i`` is number ``i`` of the answer."""

    def __init__(
        self,
        batches: AsyncGenerator[list[Event], None],
        error_events: Callable[[Exception], list[Event]],
        show: Callable[[bool], dict[str, Any]],
    ) -> None:
        """``show``: makes the answer as it is now; given whether it was cancelled."""
        super().__init__(batches, error_events, after="", body=b"", headers={})
        self._show = show
        self._is_cancelled = False

    @property
    def num_dropped(self) -> int:
        """The events that have come and are not kept any more: the first ones."""
        return self._num_dropped

    def shown(self) -> dict[str, Any]:
        """Make the answer as it is now."""
        return self._show(self._is_cancelled)

    def cancel(self) -> None:
        """End its request, unless it has ended."""
        if not self.ended:
            self._is_cancelled = True
            self.stop()

    def on_end(self, call: Callable[[], None]) -> None:
        self._task.add_done_callback(lambda _: call())

    async def more(self, index: int, within_s: float) -> bytes:
        """Return the events from ``index`` on, which is none that was dropped; wait for one, but not for longer than
        ``within_s``, nor behind the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while index >= self.num_events and not self.ended:
                    self.news.clear()
                    await self.news.wait()
        return b"".join(event.data for event in islice(self._events, max(index - self._num_dropped, 0), None))

    async def _keep(self, batch: Sequence[Event]) -> None:
        self._add(batch)
        while self._num_bytes > MOST_EVENT_BYTES and len(self._events) > len(batch):
            self._num_bytes -= len(self._events.popleft().data)
            self._num_dropped += 1


class BackgroundStreams(ResumableStreams):
    """The answers of one router that are made in the background."""

    def __init__(self, *, kept_s: float = 600.0, timeout_s: float = 3600.0) -> None:
        """``kept_s``: how long an answer is kept after its end. ``timeout_s``: how long it may wait and run."""
        super().__init__(reconnect_s=kept_s)
        self.kept_s = kept_s
        self.timeout_s = timeout_s

    def find(self, key: Key) -> BackgroundStream | None:
        found = self._streams.get(key)
        assert found is None or isinstance(found, BackgroundStream)
        return found

    def run(self, key: Key, stream: BackgroundStream) -> None:
        """Keep ``stream``, for which there is room, under a name that none has had."""
        self._streams[key] = stream
        stream.on_end(lambda: self._ended(key, stream))

    def delete(self, key: Key) -> None:
        """End an answer, if it runs, and keep it no longer."""
        self._drop(key, "it was deleted")

    def _ended(self, key: Key, stream: BackgroundStream) -> None:
        if key in self._streams:
            self._wait(key, stream, f"it ended more than {self.kept_s:g} s ago")
            while self._drops_one():
                pass

    def _drops_one(self) -> bool:
        """Drop the oldest answer that has ended of the key with most bytes, if all that have ended are too large."""
        ended = {key: each for key, each in self._streams.items() if each in self._timers}
        held = Counter[str]()
        for (owner, _), each in ended.items():
            held[owner] += each.num_bytes
        if held.total() <= MOST_ENDED_BYTES or len(ended) == 1:
            return False
        [(owner, _)] = held.most_common(1)
        why = f"a router keeps {MOST_ENDED_BYTES >> 20} MiB of those that have ended, and others came"
        self._drop(next(key for key in ended if key[0] == owner), why)
        return True
