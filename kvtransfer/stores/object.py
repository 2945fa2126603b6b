"""A store's medium in a bucket of an S3-compatible service.

Owns:      the client, the threads that wait for the service, and the bytes on their way.
Never:     lets a request touch a page: each has bytes of its own, so that one that is late harms nothing; and never
           evicts, which is for the bucket's lifecycle rules.
Invariant: a call ends within ``deadline_s``, and one that reads or writes many items within that of each, whatever the
           service does; at most MOST_CONNECTIONS requests are open, or read ahead, and those that hang end by their own
           timeouts, which botocore's retries included are a few times ``deadline_s``.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvtransfer.stores.items import HEADER_BYTES, Item, StoreKey, num_bytes

MOST_CONNECTIONS = 32
ATTEMPTS = 3  # with botocore's back-off between them
PRESENT_S = 60.0  # for so long what was found is not asked for again
ABSENT_S = 1.0
MOST_REMEMBERED = 65_536
NOT_FOUND = ("404", "NoSuchKey", "NotFound")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class ObjectMedium:
    """A `Medium` of one object an item: ``prefix/<first byte of the key, hex>/<key, hex>.kv``."""

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
        self._remembered: dict[StoreKey, tuple[int | None, float]] = {}  # bytes, None if absent; until when
        self._written: dict[StoreKey, int] = {}  # bytes

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        now, found = self._clock(), dict[StoreKey, int | None]()
        for key in keys:
            size, until = self._remembered.get(key, (None, now))
            if until > now:
                found[key] = size
        unknown = [key for key in keys if key not in found]
        for key, size in list(self._answers(unknown, self._size, together=True)):
            self._remember(key, size)  # which may forget what ``found`` has
            found[key] = size
        return [found[key] is not None for key in keys]

    def read(self, wanted: Iterable[Item]) -> Iterator[int]:
        for (key, into), data in self._answers(wanted, self._get):
            if data is None:
                self._remember(key, None)
                raise FileNotFoundError(errno.ENOENT, "there is no such object", self._name(key))
            size, content = data
            offset = 0
            for buffer in into:
                part = content[offset : offset + buffer.nbytes]
                buffer[: len(part)] = part
                offset += len(part)
            self._remember(key, size)
            yield size

    def write(self, items: Iterable[Item]) -> Iterator[bool]:
        copies = ((key, b"".join(item)) for key, item in items)  # made by this thread, whose pages they are
        for (key, data), stored in self._answers(copies, self._put):
            self._remember(key, len(data))
            if stored:
                self._written[key] = len(data)
            yield stored

    def delete(self, key: StoreKey) -> None:
        list(self._answers([key], lambda key: self._client.delete_object(Bucket=self._bucket, Key=self._name(key))))
        self._remember(key, None)
        self._written.pop(key, None)

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

    def _name(self, key: StoreKey) -> str:
        name = key.hex()
        return f"{self._prefix}{name[:2]}/{name}.kv"

    def _remember(self, key: StoreKey, size: int | None) -> None:
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[key] = size, self._clock() + (ABSENT_S if size is None else PRESENT_S)

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

    def _size(self, key: StoreKey) -> int | None:
        try:
            return int(self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"])
        except self._exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in NOT_FOUND:
                raise
            return None

    def _get(self, item: Item) -> tuple[int, bytes] | None:
        """Return an object's length and content, of one with another length than is wanted the header alone."""
        key, wanted = item[0], num_bytes(item[1])
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
        except self._exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in NOT_FOUND:
                raise
            return None
        with answer["Body"] as body:
            size = int(answer["ContentLength"])
            return size, body.read() if size == wanted else body.read(HEADER_BYTES)

    def _put(self, copy: tuple[StoreKey, bytes]) -> bool:
        key, data = copy
        if self._size(key) == len(data):
            return False
        self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data)
        return True
