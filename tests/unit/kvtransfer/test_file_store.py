"""A folder of items under faults: a full disk, one that fails, processes that are killed, processes that share it."""

import errno
import fcntl
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.stores.file import FileMedium
from kvtransfer.stores.folder import NUM_SHARDS, ROUND_S
from kvtransfer.stores.items import HEADER_BYTES
from kvtransfer.stores.store import ReadStatus, Store, Untrusted, WriteStatus
from tests.unit.kvtransfer.test_store_protocol import LAYOUT, PAGE_BYTES, key_of, only, run_of_pages, views

ITEM_BYTES = HEADER_BYTES + PAGE_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_store(root: Path, capacity_bytes: int = 10**9, clock: Clock | None = None) -> Store:
    clock = clock or Clock()
    return Store(FileMedium(str(root), capacity_bytes=capacity_bytes, clock=clock), layout_digest=LAYOUT, clock=clock)


def put(store: Store, number: int) -> WriteStatus:
    return only(store.write([(key_of(number), views(run_of_pages(1, seed=number)))])).status


def holds(store: Store, number: int) -> bool:
    """Whether an item can be read; what is read is as it was written."""
    into = np.zeros((1, PAGE_BYTES), dtype=np.uint8)
    status = only(store.read([(key_of(number), views(into))])).status
    assert status in (ReadStatus.OK, ReadStatus.MISSING)
    assert status is not ReadStatus.OK or np.array_equal(into, run_of_pages(1, seed=number))
    return status is ReadStatus.OK


def file_of(root: Path, number: int) -> Path:
    name = key_of(number).hex()
    return root / name[:2] / f"{name}.kv"


def used_at(root: Path, number: int, time_s: int) -> None:
    os.utime(file_of(root, number), (time_s, time_s))


def scan(store: Store) -> None:
    for _ in range(NUM_SHARDS):
        store.idle()


def next_round(store: Store, clock: Clock) -> None:
    for _ in range(NUM_SHARDS):
        clock.now += ROUND_S / NUM_SHARDS
        store.idle()


def test_opening_a_store_lists_nothing_and_reads_find_all(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    for number in range(20):
        put(first, number)
    second = open_store(tmp_path)
    assert second.stats().items == 0
    assert second.contains([key_of(number) for number in range(21)]) == [True] * 20 + [False]
    assert all(holds(second, number) for number in range(20))
    third = open_store(tmp_path)
    scan(third)
    assert (third.stats().items, third.stats().bytes) == (20, 20 * ITEM_BYTES)
    assert third.idle() is False  # the next round is not due
    third.check()


def test_the_least_recently_used_item_is_evicted_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity_bytes=10 * ITEM_BYTES)
    for number in range(10):
        put(store, number)
    assert holds(store, 0)  # used: the oldest is 1 now
    assert put(store, 2) is WriteStatus.PRESENT  # used too
    assert put(store, 10) is WriteStatus.STORED
    assert put(store, 11) is WriteStatus.STORED
    assert [number for number in range(12) if not file_of(tmp_path, number).exists()] == [1, 3]
    assert store.stats().evicted == 2
    assert store.stats().bytes == 10 * ITEM_BYTES
    store.check()


def test_a_full_store_is_trimmed_to_nine_tenths_when_idle(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity_bytes=100 * ITEM_BYTES)
    for number in range(101):
        put(store, number)
    scan(store)
    assert (store.stats().items, store.stats().evicted) == (90, 11)
    assert not any(file_of(tmp_path, number).exists() for number in range(11))
    scan(store)
    assert store.stats().items == 90


def test_an_item_larger_than_the_capacity_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity_bytes=2 * ITEM_BYTES)
    put(store, 1)
    result = only(store.write([(key_of(2), views(run_of_pages(3, seed=2)))]))
    assert result.status is WriteStatus.FULL
    assert result.reason.endswith(f"an item of {HEADER_BYTES + 3000} bytes finds no room in {2 * ITEM_BYTES}")
    assert holds(store, 1)
    assert put(store, 3) is WriteStatus.STORED  # no silence after it: nothing is broken


def test_what_another_process_used_meanwhile_is_not_evicted(tmp_path: Path) -> None:
    clock = Clock()
    ours = open_store(tmp_path, capacity_bytes=3 * ITEM_BYTES, clock=clock)
    for number in (1, 2, 3):
        put(ours, number)
        used_at(tmp_path, number, number)
    scan(ours)
    assert holds(open_store(tmp_path), 1)
    put(ours, 4)
    assert [number for number in (1, 2, 3, 4) if file_of(tmp_path, number).exists()] == [1, 3, 4]
    put(open_store(tmp_path), 5)
    used_at(tmp_path, 5, 2)  # before all others
    next_round(ours, clock)
    put(ours, 6)
    assert [number for number in range(1, 7) if file_of(tmp_path, number).exists()] == [1, 4, 6]


def test_what_another_process_added_and_evicted_is_known_after_a_round(tmp_path: Path) -> None:
    clock = Clock()
    ours = open_store(tmp_path, clock=clock)
    put(ours, 1)
    scan(ours)
    theirs = open_store(tmp_path)
    put(theirs, 2)
    put(theirs, 3)
    theirs.delete(key_of(1))
    assert ours.stats().items == 1
    assert not holds(ours, 1)  # a file that vanished is a miss
    assert ours.stats().errors == 0
    next_round(ours, clock)
    assert (ours.stats().items, ours.stats().bytes) == (2, 2 * ITEM_BYTES)
    ours.check()


def test_a_file_that_was_not_there_is_looked_for_again_after_a_second(tmp_path: Path) -> None:
    clock = Clock()
    ours = open_store(tmp_path, clock=clock)
    assert ours.contains([key_of(1)]) == [False]
    put(open_store(tmp_path), 1)
    clock.now += 0.9
    assert ours.contains([key_of(1)]) == [False]
    clock.now += 0.2
    assert ours.contains([key_of(1)]) == [True]


def test_the_first_writes_scan_too_so_that_a_full_folder_stays_bounded(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    for number in range(100):
        put(first, number)
        used_at(tmp_path, number, number)
    second = open_store(tmp_path, capacity_bytes=100 * ITEM_BYTES)  # its owner is never idle
    for number in range(100, 164):
        assert put(second, number) is WriteStatus.STORED
    assert second.stats().items == 100
    assert len(list(tmp_path.glob("*/*.kv"))) == 100
    assert not file_of(tmp_path, 0).exists()


def test_a_temporary_file_goes_when_its_writer_is_dead_and_stays_while_it_lives(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, 1)
    folder = file_of(tmp_path, 1).parent
    ours = [folder / f".{key_of(1).hex()}.0abc-{number}.tmp" for number in (1, 2)]
    foreign = folder / "notes.tmp"
    for path in [*ours, foreign]:
        path.write_bytes(b"x")
    with ours[1].open("r+b") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        scan(store)
        assert [path.exists() for path in [*ours, foreign]] == [False, True, True]
    assert store.stats().items == 1


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    root = tmp_path / "disk"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "manta-test", str(root)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a file system needs root's rights here: {mounted.stderr}")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_a_disk_that_is_full_refuses_and_what_it_holds_stays_readable(tiny_disk: Path) -> None:
    store = open_store(tiny_disk)
    statuses = [put(store, number) for number in range(30)]
    stored = [number for number, status in enumerate(statuses) if status is WriteStatus.STORED]
    assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
    assert stored[:5] == [0, 1, 2, 3, 4]
    assert len([number for number in stored if holds(store, number)]) == store.stats().items
    assert not list(tiny_disk.glob("*/.*"))  # no torn temporary file takes room
    assert store.stats().full == 30 - len(stored)
    assert statuses[-2:] != [WriteStatus.FULL] * 2  # each refusal evicted the oldest, so that new items get in
    store.check()


def test_a_failing_disk_is_left_alone_for_a_while_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    put(store, 1)
    tries = []

    def fail(*arguments: object) -> int:
        tries.append(clock.now)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        broken.setattr(os, "preadv", fail)
        into = views(run_of_pages(1, seed=1))
        for _ in range(100):
            assert put(store, 2) is WriteStatus.ERROR
            assert only(store.read([(key_of(1), into)])).status is ReadStatus.ERROR
            assert store.contains([key_of(1)]) == [False]
            clock.now += 0.1
        assert len(tries) == 2 * 5  # at 0, 0.5, 1.5, 3.5, 7.5 s of 10
        assert store.stats().errors == 10
    clock.now += 30
    assert put(store, 2) is WriteStatus.STORED
    assert holds(store, 1)
    assert not list(tmp_path.glob("*/.*"))
    store.check()


def test_a_write_that_stops_half_way_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write, written = open_store(tmp_path), os.pwritev, list[int]()

    def half(file: int, buffers: list[memoryview], offset: int) -> int:
        """As the kernel does at a file's limit: the first call writes a part, the next one fails."""
        if written:
            raise OSError(errno.EFBIG, "File too large")
        whole = b"".join(buffers)
        written.append(write(file, [whole[: len(whole) // 2]], offset))
        return written[0]

    with monkeypatch.context() as limited:
        limited.setattr(os, "pwritev", half)
        assert put(store, 1) is WriteStatus.ERROR
    assert written == [ITEM_BYTES // 2]
    assert list(tmp_path.glob("*/*")) == []
    assert (store.stats().errors, store.stats().items) == (1, 0)
    store.check()


def given_away(path: Path) -> None:
    """Let another user own ``path``."""
    if os.geteuid():
        pytest.skip("giving a file to another user needs root's rights")
    os.chown(path, 12345, -1)


def put_in_place(path: Path, what: str) -> None:
    """Put something else where the item ``path`` is."""
    data = path.read_bytes()
    if what == "another user's file":
        return given_away(path)
    path.rename(path.parents[2] / "elsewhere")
    match what:
        case "a folder":
            path.mkdir()
        case "a link":
            path.symlink_to(path.parents[2] / "elsewhere")
        case "a FIFO":
            os.mkfifo(path)
        case "a socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        case _:
            path.write_bytes(data)
            path.chmod(0o666)
    return None


PLANTED = ["a folder", "a link", "a FIFO", "a socket", "another user's file", "a file that others may write"]


@pytest.mark.timeout(60)  # a FIFO that is waited for
@pytest.mark.parametrize("what", PLANTED)
def test_what_stands_in_an_items_place_and_is_not_ours_is_a_miss_and_is_counted(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    for number in (1, 2):
        put(store, number)
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    put_in_place(file_of(Path("store"), 1), what)
    into = np.zeros((1, PAGE_BYTES), dtype=np.uint8)
    result = only(store.read([(key_of(1), views(into))]))
    assert (result.status, into.any()) == (ReadStatus.CORRUPT, False)
    assert result.reason.startswith(file_of(tmp_path, 1).name)
    assert holds(store, 2)  # no silence: the medium is not broken
    assert (store.stats().corrupt, store.stats().errors) == (1, 0)
    assert store.contains([key_of(1)]) == [False]
    if what != "a folder":
        assert put(store, 1) is WriteStatus.STORED
        assert holds(store, 1)
    store.check()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", PLANTED[1:])
def test_what_was_there_before_a_write_and_is_not_ours_is_replaced(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_store(tmp_path / "store"), 1)
    monkeypatch.chdir(tmp_path)
    put_in_place(file_of(Path("store"), 1), what)
    store = open_store(tmp_path / "store")
    assert put(store, 1) is WriteStatus.STORED
    assert holds(store, 1)


@pytest.mark.parametrize("what", ["a link", "another user's", "writable by others"])
def test_a_shard_that_is_not_ours_alone_is_neither_read_nor_written(tmp_path: Path, what: str) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    others = [number for number in range(2, 9) if file_of(root, number).parent != file_of(root, 1).parent]
    for number in (1, *others):
        put(store, number)
    shard = file_of(root, 1).parent
    if what == "a link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    elif what == "writable by others":
        shard.chmod(0o777)
    else:
        given_away(shard)
    held = sorted(shard.iterdir())
    for opened in (store, open_store(root)):
        assert not reads(opened, 1)
        assert opened.contains([key_of(1)]) == [False]
        assert put(opened, 1) is WriteStatus.ERROR
        scan(opened)
        assert all(holds(opened, number) for number in others)
        assert put(opened, others[0]) is WriteStatus.PRESENT  # no silence
        opened.check()
    assert sorted(shard.iterdir()) == held  # nothing was put there, or taken away


def reads(store: Store, number: int) -> bool:
    status = only(store.read([(key_of(number), views(run_of_pages(1, seed=0)))])).status
    assert status in (ReadStatus.OK, ReadStatus.CORRUPT)
    return status is ReadStatus.OK


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("a link", "is no folder"),
        ("another user's", "belongs to user 12345, and this process is user"),
        ("writable by the group", r"can be written by others \(mode 770\)"),
        ("writable by all", r"can be written by others \(mode 1777\)"),
    ],
)
def test_a_root_that_is_not_ours_alone_is_refused_and_one_that_becomes_so_is_a_miss(
    tmp_path: Path, what: str, fault: str
) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    put(store, 1)
    match what:
        case "a link":
            root.rename(tmp_path / "elsewhere")
            root.symlink_to(tmp_path / "elsewhere")
        case "another user's":
            given_away(root)
        case "writable by the group":
            root.chmod(0o770)
        case _:
            root.chmod(0o1777)
    with pytest.raises(Untrusted, match=f"{root} {fault}"):
        open_store(root)
    assert only(store.read([(key_of(1), views(run_of_pages(1, seed=1)))])).status is ReadStatus.CORRUPT
    assert put(store, 2) is WriteStatus.ERROR
    scan(store)
    assert len(list(root.glob("*/*.kv"))) == 1


def test_a_root_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    clock = Clock()
    store = open_store(root, clock=clock)
    put(store, 1)
    root.rename(tmp_path / "gone")
    assert not holds(store, 1)
    assert put(store, 2) is WriteStatus.ERROR
    assert not root.exists()
    (tmp_path / "gone").rename(root)
    clock.now += 1
    assert holds(store, 1)
    assert put(store, 2) is WriteStatus.STORED
    store.check()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_two_stores_do_in_one_folder_a_read_is_right_or_none(tmp_path: Path, seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    capacity_bytes = draw.choice([3, 10, 40]) * ITEM_BYTES
    stores = [open_store(tmp_path, capacity_bytes, clock) for _ in range(2)]
    num_read = num_damaged = 0
    for _ in range(300):
        store, number, what = draw.choice(stores), draw.randrange(30), draw.randrange(20)
        clock.now += draw.random()
        pages = run_of_pages(1, seed=number)
        if what < 7:
            status = only(store.write([(key_of(number), views(pages))])).status
            assert status in (WriteStatus.STORED, WriteStatus.PRESENT)
        elif what < 14:
            into = np.zeros_like(pages)
            status = only(store.read([(key_of(number), views(into))])).status
            assert status is not ReadStatus.ERROR
            assert status is not ReadStatus.OK or np.array_equal(into, pages)
            num_read += status is ReadStatus.OK
        elif what == 14:
            store.delete(key_of(number))
        elif what == 15 and file_of(tmp_path, number).exists():
            item = bytearray(file_of(tmp_path, number).read_bytes() or b"x")
            item[draw.randrange(len(item))] ^= 1 << draw.randrange(8)
            file_of(tmp_path, number).write_bytes(item[: draw.choice([len(item), draw.randrange(len(item))])])
            num_damaged += 1
        elif what < 18:
            store.contains([key_of(each) for each in range(30)])
        else:
            for _ in range(draw.choice([1, NUM_SHARDS])):
                store.idle()
        store.check()
    assert num_read > 0
    assert sum(store.stats().corrupt for store in stores) <= num_damaged
    assert [store.stats().errors for store in stores] == [0, 0]


KILLED = """
import os, signal, sys
from pathlib import Path
from kvtransfer.stores import file, folder
from kvtransfer.stores.items import HEADER_BYTES
from tests.unit.kvtransfer.test_file_store import open_store, put
from tests.unit.kvtransfer.test_store_protocol import PAGE_BYTES

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def renamed_and_killed(*names, rename=os.rename, **folders):
    rename(*names, **folders)
    die()

def killed_after(num_bytes):
    def write(descriptor, buffers, offset):
        os.write(descriptor, b"".join(buffers)[:num_bytes])
        die()
    os.pwritev = write

root, num_points = Path(sys.argv[1]), int(sys.argv[2])
whole = HEADER_BYTES + PAGE_BYTES
for point in range(num_points):
    child = os.fork()
    if child == 0:
        if point == 0:
            folder.fcntl.flock = die  # the temporary file is there, empty
        elif point == 1:
            file.touch = die  # complete, not renamed
        elif point == 2:
            os.rename = die
        elif point == 3:
            os.rename = renamed_and_killed
        else:
            killed_after(whole * (point - 4) // (num_points - 5))
        put(open_store(root), point)
        os._exit(1)  # not killed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point
print("killed", num_points)
"""


def test_killed_at_each_of_50_points_of_a_write_an_item_is_whole_or_absent(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "50"], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "killed 50\n", run.stderr
    assert 45 <= len(list(tmp_path.glob("*/.*.tmp"))) <= 49  # a later writer may have scanned a shard
    store = open_store(tmp_path)
    assert [number for number in range(50) if holds(store, number)] == [3]  # the one that was renamed
    scan(store)
    assert not list(tmp_path.glob("*/.*"))
    assert (store.stats().items, store.stats().corrupt) == (1, 0)
    assert [put(store, number) for number in range(50)].count(WriteStatus.STORED) == 49
    store.check()
