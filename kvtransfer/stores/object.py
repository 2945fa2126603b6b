"""A store's medium in a bucket of an S3-compatible service.

Owns:      the client, the threads that wait for the service, and the bytes on their way.
Never:     lets a request touch a page: each has bytes of its own, so that one that is late harms nothing; and never
           evicts, which is for the bucket's lifecycle rules.
Invariant: a call ends within ``deadline_s``, a look within two, and one that reads or writes many objects within that
           of each, whatever the service does; at most MOST_CONNECTIONS requests are open, or runs read ahead, and those
           that hang end by their own timeouts, which botocore's retries included are a few times ``deadline_s``.
Thread:    the store's; each request runs on one of MOST_CONNECTIONS threads, and the store's waits for it.

Why boto3 and not the OBJ plugin of NIXL 1.5.1, as measured: NIXL can delete no object; it reports a read that is longer
than its object as done; it tells a missing object from a broken service by no error, and a present one's length not
at all; and only the wheel for CUDA 12 has a plugin that loads without a CUDA library, while two of its wheels cannot
be imported by one process.
"""

import collections
import concurrent.futures
import errno
import importlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvtransfer.stores.items import HEADER_BYTES, Item, KeyInRun, StoreKey, num_bytes

MOST_CONNECTIONS = 32
ATTEMPTS = 3  # with botocore's back-off between them
PRESENT_S = 60.0  # for so long what was found is not asked for again
ABSENT_S = 1.0
MOST_REMEMBERED = 65_536
NOT_FOUND = ("404", "NoSuchKey", "NotFound")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Part = tuple[str, int, bytes | memoryview]  # of an item: its object, its length there, and what was read of it


class ObjectMedium:
    """A `Medium` of one object a run, ``prefix/<first byte of its key>/<its key>.<pages>.kv`` in hex: its items one
    after the other. An item that was not written with all of its run has an object of its own, ``<key>.kv``.

    One request brings a run in place of a page. An item is looked for in its run first, and then alone.
    """

    keeps_runs = True

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        deadline_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a client; the service is not asked yet. Credentials come from where boto3 finds them.

        Args:    endpoint: an http(s) URL; None for AWS.
        Raises:  ValueError without boto3, or for an endpoint that is no URL.
        """
        try:
            boto3 = importlib.import_module("boto3")
            self._exceptions: Any = importlib.import_module("botocore.exceptions")
            config = importlib.import_module("botocore.config").Config(
                connect_timeout=deadline_s / 2,
                read_timeout=deadline_s,
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                max_pool_connections=MOST_CONNECTIONS,
                request_checksum_calculation="when_required",  # items have their own; some services refuse S3's
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if endpoint else "auto"},
            )
        except ImportError as error:
            raise ValueError(f"a store at s3:// needs boto3 (pip install -e '.[s3]'), and: {error}") from error
        session = boto3.session.Session()
        region = region or session.region_name or "us-east-1"
        self._client: Any = session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._deadline_s = deadline_s
        self._clock = clock
        self._threads = concurrent.futures.ThreadPoolExecutor(MOST_CONNECTIONS, thread_name_prefix="manta-s3")
        self._remembered: dict[str, tuple[bool, float]] = {}  # whether it is there; until when
        self._written: dict[str, int] = {}  # bytes

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        names = [(_name(key, in_run=True), _name(key)) for key in keys]
        there = self._there({run for run, _ in names})
        there |= self._there({own for run, own in names if not there[run]} - there.keys())
        return [there[run] or there[own] for run, own in names]

    def read(self, wanted: Iterable[Item]) -> Iterator[int]:
        for (_, items), parts in self._answers(_objects(wanted), self._get):
            for (key, into), part in itertools.zip_longest(items, parts):
                if part is None:
                    self._remember(_name(key), False)
                    raise FileNotFoundError(errno.ENOENT, "there is no such object", _name(key))
                name, size, content = part
                offset = 0
                for buffer in into:
                    copied = content[offset : offset + buffer.nbytes]
                    buffer[: len(copied)] = copied
                    offset += len(copied)
                self._remember(name, True)
                yield size

    def write(self, items: Iterable[Item]) -> Iterator[bool]:
        objects = _objects(items, whole=True)
        # copied by this thread, whose pages they are
        copies = ((name, run, b"".join(b"".join(pages) for _, pages in run)) for name, run in objects)
        for (name, run, data), stored in self._answers(copies, self._put):
            self._remember(name, True)
            if stored:
                self._written[name] = len(data)
            yield from [stored] * len(run)

    def delete(self, key: StoreKey) -> None:
        """Delete a page, and the run that it is in: the others of that are computed anew."""
        names = {_name(key), _name(key, in_run=True)}
        for name, _ in self._answers(names, lambda name: self._client.delete_object(**self._place(name))):
            self._remember(name, False)
            self._written.pop(name, None)

    def idle(self) -> bool:
        return False

    def held(self) -> tuple[int, int, int]:
        """What this process has written and not deleted; nothing is evicted here."""
        sizes = list(self._written.values())  # one step: another thread may ask
        return len(sizes), sum(sizes), 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def check(self) -> None:
        assert len(self._remembered) <= MOST_REMEMBERED

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _remember(self, name: str, there: bool) -> None:
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[name] = there, self._clock() + (PRESENT_S if there else ABSENT_S)

    def _there(self, names: Collection[str]) -> dict[str, bool]:
        """Tell which objects are there. What is remembered is not asked for."""
        now = self._clock()
        known = [(name, *self._remembered.get(name, (False, now))) for name in names]
        there = {name: found for name, found, until in known if until > now}
        for name, size in list(self._answers([name for name in names if name not in there], self._size, together=True)):
            there[name] = size is not None
            self._remember(name, there[name])  # which may forget what ``there`` has
        return there

    def _answers(
        self, asked: Iterable[Asked], request: Callable[[Asked], Answer], *, together: bool = False
    ) -> Iterator[tuple[Asked, Answer]]:
        """Make a request for each of ``asked``, MOST_CONNECTIONS ahead of the answer that is wanted. Yields: each with
        its answer, in order.

        Raises: OSError for the first that failed; TimeoutError past the deadline of one answer, or of all ``together``.
        """
        to_come = ((each, self._threads.submit(request, each)) for each in asked)
        futures = collections.deque(itertools.islice(to_come, MOST_CONNECTIONS))
        until = time.monotonic() + self._deadline_s
        try:
            while futures:
                each, future = futures[0]
                answer = future.result(timeout=max(until - time.monotonic(), 0.0))
                futures.popleft()
                futures.extend(itertools.islice(to_come, 1))
                yield each, answer
                until = until if together else time.monotonic() + self._deadline_s
        except concurrent.futures.TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._bucket} has not answered in {self._deadline_s} s") from None
        except Exception as error:  # botocore lets those of urllib3 through; they have no common root
            raise OSError(errno.EIO, f"{self._bucket}: {error}") from error
        finally:
            for _, future in futures:
                future.cancel()  # those that wait for a thread

    def _size(self, name: str) -> int | None:
        try:
            return int(self._client.head_object(**self._place(name))["ContentLength"])
        except self._exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in NOT_FOUND:
                raise
            return None

    def _get(self, asked: tuple[str, list[Item]]) -> list[Part | None]:
        """Return each item's part of a run's object, and where there is none their own objects, to the first that is
        missing."""
        name, items = asked
        key, into = items[0]
        length = num_bytes(into)
        if isinstance(key, KeyInRun) and (run := self._content(name, key.num_pages * length)):
            whole = memoryview(run[2])  # of an object of another length only a header: no item of it is right
            parts = [whole[at * length : (at + 1) * length] for at in range(key.place, key.place + len(items))]
            return [(name, len(part), part) for part in parts]
        return list(itertools.takewhile(bool, (self._content(_name(key), length) for key, _ in items)))

    def _content(self, name: str, wanted: int) -> Part | None:
        """Return an object's name, length and content, of one with another length than ``wanted`` the header alone."""
        try:
            answer = self._client.get_object(**self._place(name))
        except self._exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in NOT_FOUND:
                raise
            return None
        with answer["Body"] as body:
            size = int(answer["ContentLength"])
            return name, size, body.read() if size == wanted else body.read(HEADER_BYTES)

    def _put(self, copy: tuple[str, list[Item], bytes]) -> bool:
        name, ((key, _), *_), data = copy
        if self._size(name) == len(data):
            return False
        in_run = _name(key, in_run=True)
        if isinstance(key, KeyInRun) and in_run != name and self._size(in_run) == key.num_pages * len(data):
            return False  # another replica had the whole run
        self._client.put_object(**self._place(name), Body=data)
        return True


def _name(key: StoreKey, *, in_run: bool = False) -> str:
    """Return the name of the object that holds a page alone, or of its run's."""
    name = f"{key.run.hex()}.{key.num_pages}" if in_run and isinstance(key, KeyInRun) else key.hex()
    return f"{name[:2]}/{name}.kv"


def _objects(items: Iterable[Item], *, whole: bool = False) -> Iterator[tuple[str, list[Item]]]:
    """Put neighbours of one run together, with their object's name. ``whole``: only where none of it is missing."""
    for name, group in itertools.groupby(items, key=lambda item: _name(item[0], in_run=True)):
        run = list(group)
        key = run[0][0]
        if whole and isinstance(key, KeyInRun) and len(run) < key.num_pages:
            yield from ((_name(key), [(key, pages)]) for key, pages in run)
        else:
            yield name, run
