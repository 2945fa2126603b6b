"""A bucket under faults: a service that is gone, hangs, trickles, refuses, or breaks off."""

import contextlib
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtransfer.stores import object as object_store
from kvtransfer.stores.items import HEADER_BYTES, Item, StoreKey, keys_in_runs
from kvtransfer.stores.object import MOST_CONNECTIONS, ObjectMedium
from kvtransfer.stores.store import ReadStatus, Store, WriteStatus
from tests.s3_server import BUCKET, CREDENTIALS
from tests.unit.kvtransfer.test_file_store import Clock
from tests.unit.kvtransfer.test_store_protocol import LAYOUT, PAGE_BYTES, Pages, key_of, only, run_of_pages, views

ITEM_BYTES = HEADER_BYTES + PAGE_BYTES
DEADLINE_S = 0.5  # of services that do not answer; others have the time that a busy machine takes


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def service(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A TCP server that reads a request's head and leaves the rest to ``answer``. Yields: its URL."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (part := self.request.recv(4096)):
                    return
                head += part
            answer(self.request, head)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def open_bucket(endpoint: str, clock: Callable[[], float] = time.monotonic, deadline_s: float = 60.0) -> Store:
    medium = ObjectMedium(BUCKET, endpoint=endpoint, region="us-east-1", deadline_s=deadline_s, clock=clock)
    return Store(medium, layout_digest=LAYOUT, clock=clock)


def read(store: Store) -> tuple[ReadStatus, float]:
    """Returns: how a read of item 1 ended, and the seconds it took."""
    started = time.monotonic()
    result = only(store.read([(key_of(1), views(run_of_pages(1, seed=1)))]))
    return result.status, time.monotonic() - started


def test_a_service_that_is_gone_is_an_error_and_then_silence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        clock = Clock()
        store = open_bucket(endpoint, clock, DEADLINE_S)
        assert only(store.write([(key_of(1), views(run_of_pages(1, seed=1)))])).status is WriteStatus.ERROR
        assert read(store)[0] is ReadStatus.ERROR
        assert store.stats().errors == 2
        assert read(store)[0] is ReadStatus.ERROR  # nobody was asked: it counts no error
        assert store.contains([key_of(1)]) == [False]
        assert store.stats().errors == 2
        clock.now += 0.6
        assert store.contains([key_of(1)]) == [False]
        assert store.stats().errors == 3
        store.close()


def test_a_service_that_hangs_ends_each_call_at_its_deadline_and_touches_no_page() -> None:
    release = threading.Event()
    asked = threading.Semaphore(0)

    def hang(connection: socket.socket, _: bytes) -> None:
        asked.release()
        release.wait(20)

    with service(hang) as endpoint:
        clock = Clock()
        store = open_bucket(endpoint, clock, DEADLINE_S)
        took = []
        for number in range(3):
            status, seconds = read(store)
            assert status is ReadStatus.ERROR
            took.append(seconds)
            assert store.stats().errors == number + 1
            clock.now += 60
        assert DEADLINE_S <= min(took) < DEADLINE_S + 1, "others who load the machine may stretch one call"
        started = time.monotonic()
        assert store.contains([key_of(number) for number in range(100)]) == [False] * 100
        assert time.monotonic() - started < 2 * DEADLINE_S + 2  # not one for each round of MOST_CONNECTIONS keys: 4
        number_asked = 0
        while asked.acquire(blocking=False):
            number_asked += 1
        assert 1 <= number_asked <= 3 * MOST_CONNECTIONS  # not one connection a key
        release.set()
        store.close()


def test_bytes_that_come_too_late_do_not_reach_the_pages() -> None:
    """The service sends the first half of an object, and the rest when its reader has given up."""
    late = threading.Event()
    sent = threading.Event()

    def trickle(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % ITEM_BYTES + b"x" * 500)
        late.wait(20)
        with contextlib.suppress(OSError):
            connection.sendall(b"x" * (ITEM_BYTES - 500))
        sent.set()

    with service(trickle) as endpoint:
        store = open_bucket(endpoint, deadline_s=DEADLINE_S)
        pages = run_of_pages(1, seed=1)
        assert only(store.read([(key_of(1), views(pages))])).status is ReadStatus.ERROR
        late.set()
        assert sent.wait(20)
        store.close()
        assert (pages == run_of_pages(1, seed=1)).all()


@pytest.mark.parametrize("broken", ["503", "cut off", "not http"])
def test_an_answer_that_is_none_is_an_error_not_a_miss(broken: str) -> None:
    answers = {
        "503": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
        "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nshort" % ITEM_BYTES,
        "not http": b"hello\r\n\r\n",
    }
    num_asked = 0

    def answer(connection: socket.socket, _: bytes) -> None:
        nonlocal num_asked
        num_asked += 1
        connection.sendall(answers[broken])

    with service(answer) as endpoint:
        store = open_bucket(endpoint)
        assert read(store)[0] is ReadStatus.ERROR
        assert num_asked >= 1
        assert (store.stats().errors, store.stats().missing, store.stats().corrupt) == (1, 0, 0)
        store.close()


class Held:
    """A service that answers a request when as many wait as a test wants, and counts them."""

    def __init__(self, together: int, answer: bytes) -> None:
        self._all_here = threading.Barrier(together)
        self._answer = answer
        self.num_asked = 0

    def __call__(self, connection: socket.socket, head: bytes) -> None:
        self.num_asked += 1
        self._all_here.wait(60)  # broken, and so an error, where fewer come
        connection.sendall(self._answer)


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_batch_keeps_every_connection_busy(call: str) -> None:
    """The service answers none before all connections have asked: two rounds for twice as many items, no more.

    With 20 ms a round and pages of 16 tokens that is 25,600 tokens/s read; one at a time, 800.
    """
    pages = views(run_of_pages(2 * MOST_CONNECTIONS, seed=1))
    items = [(key_of(number), [page]) for number, page in enumerate(pages)]
    # a HEAD of a write is told that the item is there
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % ITEM_BYTES
    held = Held(MOST_CONNECTIONS, answer + (b"x" * ITEM_BYTES if call == "read" else b""))
    with service(held) as endpoint:
        medium = ObjectMedium(BUCKET, endpoint=endpoint, region="us-east-1", deadline_s=60.0)
        if call == "read":
            wanted = [(key, [memoryview(bytearray(HEADER_BYTES)), *into]) for key, into in items]
            assert list(medium.read(wanted)) == [ITEM_BYTES] * len(items)
        else:
            blank = memoryview(bytes(HEADER_BYTES))
            assert not any(medium.write((key, [blank, *item]) for key, item in items))
        assert held.num_asked == len(items)
        medium.close()


def test_what_is_read_ahead_is_bounded_and_given_up_with_the_read() -> None:
    """The first answer is 404, which ends the read: no more of 1,000 are asked for."""
    held = Held(1, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    with service(held) as endpoint:
        store = open_bucket(endpoint)
        pages = views(run_of_pages(1000, seed=1))
        results = list(store.read([(key_of(number), [page]) for number, page in enumerate(pages)]))
        assert [result.status for result in results] == [ReadStatus.MISSING]
        store.close()
        assert held.num_asked <= 2 * MOST_CONNECTIONS


def test_a_look_knows_what_it_knew_at_its_beginning(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service says of one key may push out what was remembered of another: that was a KeyError."""
    monkeypatch.setattr(object_store, "MOST_REMEMBERED", 2)
    store = open_bucket(s3_server, Clock())
    for known in (1, 2):
        assert store.contains([key_of(number) for number in range(known)]) == [False] * known
    assert store.contains([key_of(number) for number in range(5)]) == [False] * 5
    store.check()


class Chain:
    """A chain of 11 pages in a bucket: runs 0-3 and 4-7, and three pages that fill none. Others may write it too."""

    def __init__(self, endpoint: str) -> None:
        self._url = {"endpoint": endpoint, "region": "us-east-1", "prefix": uuid.uuid4().hex}
        self.plain = [key_of(number) for number in range(11)]  # as a version without runs names them
        self.keys = keys_in_runs(self.plain, 4)
        self.pages = run_of_pages(11, seed=1)
        self.medium = self.replica()._medium

    def replica(self) -> Store:
        """A process that has asked for nothing yet."""
        return Store(ObjectMedium(BUCKET, deadline_s=60.0, **self._url), layout_digest=LAYOUT)

    def items(self, keys: list[StoreKey], pages: Pages, first: int, end: int) -> list[Item]:
        return [(keys[at], [pages[at].data]) for at in range(first, end)]

    def write(self, first: int, end: int, keys: list[StoreKey] | None = None) -> list[WriteStatus]:
        return [each.status for each in self.replica().write(self.items(keys or self.keys, self.pages, first, end))]

    def read(self, first: int, end: int) -> list[ReadStatus]:
        """Read with a fresh client. What it says is OK is what was written."""
        into = np.zeros_like(self.pages)
        statuses = [each.status for each in self.replica().read(self.items(self.keys, into, first, end))]
        for at, status in enumerate(statuses, start=first):
            assert status is not ReadStatus.OK or np.array_equal(into[at], self.pages[at])
        return statuses

    def objects(self) -> dict[str, int]:
        """Return the bucket's objects: their names' ends, and their bytes in items."""
        listed = self.medium._client.list_objects_v2(Bucket=BUCKET, Prefix=self._url["prefix"])
        return {each["Key"].rpartition("/")[2]: each["Size"] / ITEM_BYTES for each in listed.get("Contents", [])}


STORED, PRESENT, OK = WriteStatus.STORED, WriteStatus.PRESENT, ReadStatus.OK


@pytest.fixture
def chain(s3_server: str) -> Chain:
    return Chain(s3_server)


def test_a_whole_run_is_one_object_and_is_read_from_any_of_its_pages_on(chain: Chain) -> None:
    """A node of pages 1 to 10 is written: run 0-3 is not whole there, nor is what follows run 4-7."""
    assert chain.write(1, 11) == [STORED] * 10
    alone = [f"{chain.plain[at].hex()}.kv" for at in (1, 2, 3, 8, 9, 10)]
    assert chain.objects() == dict.fromkeys(alone, 1) | {f"{chain.plain[7].hex()}.4.kv": 4}
    assert chain.replica().contains(chain.keys) == [at > 0 for at in range(11)]
    for first in (1, 2, 6, 7, 10):
        assert chain.read(first, 11) == [OK] * (11 - first)
    assert chain.read(1, 6) == [OK] * 5
    assert chain.read(0, 11) == [ReadStatus.MISSING]
    held = chain.replica()
    list(held.write(chain.items(chain.keys, chain.pages, 0, 8)))
    assert (held.stats().items, held.stats().bytes) == (1, 4 * ITEM_BYTES)  # run 4-7 was there, 0-3 alone was not


def test_a_run_takes_one_request(chain: Chain) -> None:
    chain.write(0, 8)
    asked: list[str] = []
    replica = chain.replica()
    replica._medium._client.meta.events.register("before-send.s3", lambda request, **_: asked.append(request.method))
    assert replica.contains(chain.keys[:8]) == [True] * 8
    assert [each.status for each in replica.read(chain.items(chain.keys, chain.pages, 0, 8))] == [OK] * 8
    assert asked == ["HEAD"] * 2 + ["GET"] * 2


def test_replicas_that_write_other_parts_of_a_run_find_each_others_pages(chain: Chain) -> None:
    assert chain.write(0, 6) == [STORED] * 6  # run 0-3, and two pages
    assert chain.write(6, 7) == [STORED]
    assert chain.read(0, 8) == [OK] * 7 + [ReadStatus.MISSING]
    assert chain.write(0, 8) == [PRESENT] * 4 + [STORED] * 4
    assert chain.write(5, 7) == [PRESENT] * 2
    assert chain.read(3, 8) == [OK] * 5
    assert chain.write(2, 4) == [PRESENT] * 2  # they are in the run
    assert len(chain.objects()) == 5


def test_pages_of_a_version_without_runs_are_read_and_it_misses_those_of_runs(chain: Chain) -> None:
    chain.write(0, 8, chain.plain)
    assert chain.replica().contains(chain.keys[:9]) == [True] * 8 + [False]
    assert chain.read(1, 8) == [OK] * 7
    chain.replica().delete(chain.plain[2])
    assert chain.read(0, 8) == [OK] * 2 + [ReadStatus.MISSING]
    assert chain.write(0, 4) == [STORED] * 4  # a run
    chain.replica().delete(chain.plain[3])
    assert chain.replica().contains(chain.plain[:5]) == [True, True, False, False, True]
    assert chain.read(0, 8) == [OK] * 8


@pytest.mark.parametrize(
    ("wrong", "num_good"), [("a bit", 5), ("cut", 4), ("longer", 4), ("empty", 4), ("items changed places", 4)]
)
def test_a_run_that_is_not_right_ends_the_read_and_is_deleted(chain: Chain, wrong: str, num_good: int) -> None:
    """Run 4-7 of pages 0 to 10; its page 5 has a flipped bit, or the object is another."""
    chain.write(0, 11)
    name = f"{chain.plain[7].hex()[:2]}/{chain.plain[7].hex()}.4.kv"
    place = chain.medium._place(name)
    run = chain.medium._client.get_object(**place)["Body"].read()
    flipped = bytearray(run)
    flipped[ITEM_BYTES + HEADER_BYTES + 500] ^= 1
    changed = {
        "a bit": bytes(flipped),
        "cut": run[: 2 * ITEM_BYTES],
        "longer": run + b"x",
        "empty": b"",
        "items changed places": run[ITEM_BYTES:] + run[:ITEM_BYTES],
    }[wrong]
    chain.medium._client.put_object(**place, Body=changed)
    assert chain.read(0, 11) == [OK] * num_good + [ReadStatus.CORRUPT]
    assert chain.replica().contains(chain.keys) == [not 4 <= at < 8 for at in range(11)]
    assert chain.read(0, 11) == [OK] * 4 + [ReadStatus.MISSING]
    assert chain.write(4, 8) == [STORED] * 4
    assert chain.read(0, 11) == [OK] * 11
