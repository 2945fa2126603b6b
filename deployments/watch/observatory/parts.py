"""What the observatory's HTTP routes need, in one value.

Thread: the observatory's event loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from deployments.fleet.seen import Target
from deployments.watch.observatory.admin_key import AdminKey
from deployments.watch.observatory.fan_in import Fetch, fetch_text
from deployments.watch.observatory.page_files import PageFile
from deployments.watch.observatory.routers import Routers
from deployments.watch.observatory.state import State
from deployments.watch.observatory.trees import Trees
from deployments.watch.observatory.viewers import Viewers


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The routes find it in ``app.state.parts``."""

    state: State
    routers: Routers
    trees: Trees
    viewers: Viewers
    key: AdminKey
    files: Mapping[str, PageFile]
    own_target: Callable[[], Target | None]  # where the observatory's own metrics are served
    clock: Callable[[], float]  # seconds since 1970
    fetch: Fetch = field(default=fetch_text)
    wrong_s: list[float] = field(default_factory=list)  # when a login showed a wrong key

    @property
    def closed(self) -> bool:
        """What it shows is behind a key at the routers, and there is none here."""
        latest = self.state.merged.latest
        return not self.key.is_set and latest is not None and latest.asks_for_key

    def targets(self) -> list[Target]:
        """Who serves metrics, the observatory too; alone it stands here until a router has answered."""
        own = self.own_target()
        return [*self.state.merged.targets(), *([own] if own is not None else [])]


def parts_of(request: HTTPConnection) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts
