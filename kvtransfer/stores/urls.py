"""Opens a store by its URL.

    file:///var/cache/manta                                a folder of this host
    file://~/.cache/manta/store                            one in the home of the user whose process this is
    s3://bucket/prefix                                     AWS; credentials and region from where boto3 finds them
    s3://bucket/prefix?endpoint=http://10.0.0.7:9000&region=eu-1&timeout_s=5    a service that speaks S3

Owns:      the table of backends, by the scheme of their URLs. To add one: docs/extending.md.
"""

import os
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtransfer.stores.file import FileMedium
from kvtransfer.stores.items import NO_SECRET
from kvtransfer.stores.object import ObjectMedium
from kvtransfer.stores.store import Medium, Store, Untrusted


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """The URL of a store in its parts."""

    text: str  # as given
    host: str  # between // and the next /; of a bucket its name
    path: str
    options: Mapping[str, str]  # after a ?; the backend has each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBackend:
    """One kind of store: its URLs, and what opens it."""

    urls: str  # what its URLs look like, for those who gave another
    options: tuple[str, ...] = ()  # that may follow a URL after a ?
    is_of_host: bool  # what it holds is for the processes of one host
    # open it; with the most bytes that it may hold, all its processes together, if it counts them. Raises: ValueError
    open: Callable[[StoreUrl, int], Medium]

    @property
    def wanted(self) -> str:
        """Say what URL is wanted."""
        return f"{self.urls} is wanted" + (f", and after a ? any of {', '.join(self.options)}" if self.options else "")


def _folder(url: StoreUrl, capacity_bytes: int) -> Medium:
    path = urllib.parse.unquote(url.path)
    if url.host == "~":
        path = os.path.expanduser(f"~{path}")
    if url.host not in ("", "localhost", "~") or not os.path.isabs(path):
        raise ValueError(_no_store(url.text))
    if capacity_bytes <= 0:
        raise ValueError(f"a store in a folder needs a capacity, capacity_bytes = {capacity_bytes}")
    try:
        return FileMedium(path, capacity_bytes=capacity_bytes)
    except Untrusted as error:
        raise ValueError(
            f"the store {url.text} is not used: {error}. Name a folder that is not there, which is made, or take it "
            "for yourself: chown it to the user of this process, chmod it to 700, and name it rather than a link to it"
        ) from error
    except OSError as error:
        told = f"the store {url.text} cannot be opened: {error}. Name a folder that can be written"
        raise ValueError(told) from error


def _bucket(url: StoreUrl, capacity_bytes: int) -> Medium:
    """Open a bucket, which has lifecycle rules for its capacity."""
    if not url.host:
        raise ValueError(f"{url.text!r} names no bucket: {BACKENDS['s3'].wanted}")
    try:
        deadline_s = float(url.options.get("timeout_s", "5"))
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s < 3600:
        raise ValueError(f"{url.text!r}: timeout_s is seconds, more than 0 and less than 3600")
    endpoint, region = url.options.get("endpoint"), url.options.get("region")
    return ObjectMedium(url.host, prefix=url.path, endpoint=endpoint, region=region, deadline_s=deadline_s)


BACKENDS: dict[str, StoreBackend] = {
    "file": StoreBackend(urls="file:///absolute/path, file://~/path", is_of_host=True, open=_folder),
    "s3": StoreBackend(
        urls="s3://bucket/prefix", options=("endpoint", "region", "timeout_s"), is_of_host=False, open=_bucket
    ),
}


def open_store(url: str, *, layout_digest: bytes, capacity_bytes: int, secret: bytes = NO_SECRET) -> Store:
    """Open the store at ``url``. It may be on any thread; the calls that follow come from one.

    Args:    layout_digest: 8 bytes that differ where a page's bytes mean something else; see `page_chain`.
             capacity_bytes: of a folder, all its processes together.
             secret: that items are tagged with (`store_secret`), where others can write too.
    Raises:  ValueError for a URL that names no store, or one that this host cannot have; it says what to do.
    """
    backend, parts = parsed(url)
    return Store(backend.open(parts, capacity_bytes), layout_digest=layout_digest, secret=secret)


def parsed(url: str) -> tuple[StoreBackend, StoreUrl]:
    """Find the backend of ``url``, which is not opened. Raises: ValueError for a URL or an option of none."""
    parts = urllib.parse.urlsplit(url)
    backend = BACKENDS.get(parts.scheme)
    if backend is None:
        raise ValueError(_no_store(url))
    options = {name: values[-1] for name, values in urllib.parse.parse_qs(parts.query, keep_blank_values=True).items()}
    if unknown := sorted(options.keys() - set(backend.options)):
        raise ValueError(f"{url!r} has no option {', '.join(unknown)}: {backend.wanted}")
    given = {name: value for name, value in options.items() if value}
    return backend, StoreUrl(text=url, host=parts.netloc, path=parts.path, options=given)


def name_of(url: str) -> str:
    """Return a name that two processes have in common if they share the store at ``url``, without its options."""
    backend, _ = parsed(url)
    return (f"{socket.gethostname()}:" if backend.is_of_host else "") + url.partition("?")[0]


def _no_store(url: str) -> str:
    *others, last = [backend.urls for backend in BACKENDS.values()]
    wanted = f"{', '.join(others)} or {last}" if others else last
    return f"{url!r} is no URL of a store: {wanted} is wanted"
