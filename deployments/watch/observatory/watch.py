"""The poll: once a second all routers are asked, the state advances, and the delta goes to the viewers.

Owns:      the timing, and the last answer of Serve.
Never:     ends by an error: what fails is shown as not answering.
Thread:    the observatory's event loop; Serve is asked on another thread, and the poll does not wait for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.routers import Routers
from deployments.watch.observatory.serve_details import ServeDetails
from deployments.watch.observatory.state import PERIOD_S, State
from deployments.watch.observatory.viewers import Viewers

log = logging.getLogger(__name__)

LOOK_S = 5.0  # how often Serve is asked: 5 ms of its controller each time


class Watch:
    """The poll of routers and of Serve; `run` it until cancelled."""

    def __init__(
        self,
        *,
        routers: Routers,
        look: Callable[[], ServeDetails],
        state: State,
        viewers: Viewers,
        on_poll: Callable[[float], None] = lambda took_s: None,
        on_view: Callable[[RouterView], None] = lambda view: None,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """``look`` blocks. ``on_poll`` gets the duration of each poll, ``on_view`` the newest answer.
        ``clock`` is for ages, ``calendar`` for what is shown."""
        self._routers = routers
        self._look = look
        self._state = state
        self._viewers = viewers
        self._on_poll = on_poll
        self._on_view = on_view
        self._clock = clock
        self._calendar = calendar
        self._details = ServeDetails()
        self._details_are_new = False
        self._failing = ""

    async def run(self) -> None:
        looking = asyncio.create_task(self._look_forever())
        try:
            while True:
                started_s = time.monotonic()
                await self.poll()
                await asyncio.sleep(max(PERIOD_S - (time.monotonic() - started_s), 0.05))
        finally:
            looking.cancel()

    async def poll(self) -> None:
        """Ask all routers once, and publish the delta."""
        started_s = time.perf_counter()
        try:
            views = await self._routers.observe(self._state.merged.since)
            self._on_poll(time.perf_counter() - started_s)
            new, self._details_are_new = self._details_are_new, False
            delta = self._state.advance(
                views, self._details, self._clock(), time_s=self._calendar(), details_are_new=new
            )
            self._viewers.publish(delta)
            if self._state.merged.latest is not None:
                self._on_view(self._state.merged.latest)
        except Exception:  # the next poll may succeed, and must come
            log.exception("a poll failed")

    async def look(self) -> None:
        """Ask Serve once."""
        try:
            self._details = await asyncio.to_thread(self._look)
            self._details_are_new, self._failing = True, ""
        except Exception as error:  # noqa: BLE001  # Ray's errors have no common base
            if self._failing != repr(error):
                log.warning("Serve did not say which replicas there are: %r", error)
            self._failing = repr(error)

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)
