"""The files and batches of an application: one folder, which all routers share.

    batches.sqlite   files and batches; of those that have not ended the lines, in the order in which to run them, and
                     the entry of each line that has been answered
    files/ID         the content of each file

Owns:      the folder, and the room in it; every status of a batch; which router runs it.
Never:     reads a request; runs one. Holds a file in memory, or a transaction while it reads one.
Invariant: a line has at most one entry, whoever runs it: the first that is written. A file that has a row is complete:
           the row is written behind it. The output of a batch, its row and its last status are one transaction.
Thread:    any; each call has a connection of its own. Calls block: routers make them on the store's threads (`run`), so
           that a folder that hangs holds up nothing else.

A batch belongs to the router in its row until a time in its row, which that router puts off again and again. When it is
over, another router takes the batch, and runs the lines that have no entry. Nothing but entries says what was done. The
journal is SQLite's rollback journal, which needs no shared memory: routers on several nodes may share the folder where
its file system has locks. The journal's file stays, so that a full disk lets files be deleted, and batches be told.

    validating ──lines are in order──> in_progress ──all have entries──> finalizing ──files are written──> completed
        │ no file or lines, or too many     ├── its time is over ──────────> finalizing ──────────────────> expired
        └──> failed                         └── its client ends it ──> cancelling ────────────────────────> cancelled
"""

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvtransfer.stores.folder import open_own
from replicas.errors import Fault, InvalidConfig, InvalidRequest, MantaError

log = logging.getLogger(__name__)

T = TypeVar("T")
Row = dict[str, Any]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
BUSY_S = 30.0  # how long a call waits for another one's transaction
ORPHAN_S = 3600.0  # a file without a row is deleted after so long: its upload or its batch was cut off
LEAST_BYTES = 4096  # that a file counts, and a batch beside its metadata
MOST_FILES, MOST_OPEN = 10_000, 100  # of one key; open batches
KEPT_S = 30 * 86_400  # a batch after its end, and its output
JOURNAL_BYTES = 1 << 20  # that it keeps between two changes
NUM_THREADS = 8
LOG_S = 10.0  # between two log lines about the folder
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL,
    ends_as TEXT, output_file_id TEXT, error_file_id TEXT, errors TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    router TEXT NOT NULL DEFAULT '', router_until REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, place INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    custom_id TEXT NOT NULL, PRIMARY KEY (batch, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    batch TEXT NOT NULL, number INTEGER NOT NULL, ok INTEGER NOT NULL, entry TEXT NOT NULL,
    PRIMARY KEY (batch, number));
CREATE TABLE IF NOT EXISTS rooms (
    file TEXT PRIMARY KEY, owner TEXT NOT NULL, bytes INTEGER NOT NULL, until REAL NOT NULL);
"""
NOT_RUN = """
SELECT number, start, size, custom_id FROM lines
WHERE batch = ?1 AND number NOT IN (SELECT number FROM entries WHERE batch = ?1) ORDER BY place
"""
_OWN = f"""
SELECT owner, MAX(bytes, {LEAST_BYTES}) AS bytes FROM files UNION ALL SELECT owner, bytes FROM rooms
"""  # beside the database


class FolderFull(MantaError):
    """The files of all batches have as many bytes as the folder may hold."""

    fault = Fault.TOO_LARGE
    code = "files_full"


class TooMany(MantaError):
    """The key has as many files, or open batches, as one may have."""

    fault = Fault.TOO_MANY
    code = "too_many_kept"


class FolderFails(MantaError):
    """The folder cannot be read or written now: 507 where its disk is full."""

    code = "batch_folder_fails"

    def __init__(self, why: str, *, is_full: bool) -> None:
        super().__init__(f"the folder of files and batches (router.batch_folder) {why}")
        self.fault = Fault.DISK_FULL if is_full else Fault.UNAVAILABLE


class FileInUse(MantaError):
    """The file is the input of a batch that has not ended."""

    fault = Fault.CONFLICT
    code = "file_in_use"


class Line(NamedTuple):
    """One request of a batch: where it stands in the input file."""

    number: int  # in the file, from 0 on
    start: int  # its first byte
    size: int  # in bytes
    custom_id: str
    num_passed: int = 0  # answers after which it is run again
    num_failed: int = 0  # of them, failures of the server


class LineEntry(NamedTuple):
    """What a line has become: a line of the output file, or of the error file."""

    number: int
    ok: bool
    text: str


class BatchStore:
    """The files and batches in one folder."""

    def __init__(self, folder: Path, *, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """``max_bytes``: of all files. Raises: OSError, also where others may write there; sqlite3.Error."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._clock = clock
        self._logged_s = 0.0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="manta-batches")
        for each in (folder, folder / "files"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(open_own(str(each), stat.S_IFDIR))
        with self._open() as db:
            db.executescript(_SCHEMA)

    async def run(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        """Make a call that blocks."""
        work = functools.partial(call, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def is_there(self) -> bool:
        """Whether there is a folder to look for files in."""
        return (self.folder / "files").is_dir()

    def path(self, file_id: str) -> Path:
        """Return where the content of a file is; ``file_id`` is one of ours."""
        return self.folder / "files" / file_id

    def new_file(self, owner: str, *, num_bytes: int, alone: bool) -> str:
        """Make the id of a file that is about to be written, and keep room for ``num_bytes`` of it until `add_file` or
        `drop_room`. Unless ``owner`` is ``alone``, what it has takes at most as much as is left free beside it, so that
        none can fill the folder. Raises: FolderFull; TooMany."""
        file_id, now, room = f"file-{secrets.token_hex(12)}", self._clock(), max(num_bytes, LEAST_BYTES)
        with self._change() as db:
            db.execute("DELETE FROM rooms WHERE until < ?", (now,))
            self._require_room(db, owner, room, alone=alone)
            values = (file_id, owner, room, now + ORPHAN_S)
            db.execute("INSERT INTO rooms VALUES (?, ?, ?, ?)", values)
        return file_id

    def drop_room(self, file_id: str) -> None:
        """Keep no room for a file that does not come; where that cannot be noted, it ends by itself."""
        with contextlib.suppress(sqlite3.Error), self._change() as db:
            db.execute("DELETE FROM rooms WHERE file = ?", (file_id,))

    def add_file(self, file_id: str, *, owner: str, filename: str, purpose: str, kept_s: int | None) -> Row:
        """Add the file that was written to `path`; ``kept_s``: until it is deleted, None: it stays. Raises: FolderFull,
        if it took so long to come that its room was given up."""
        with self._change() as db:
            if not db.execute("DELETE FROM rooms WHERE file = ?", (file_id,)).rowcount:
                self._require_room(db, owner, self.path(file_id).stat().st_size, alone=True)
            self._insert_file(db, file_id, owner=owner, filename=filename, purpose=purpose, kept_s=kept_s)
        found = self.file(owner, file_id)
        assert found is not None
        return found

    def file(self, owner: str, file_id: str) -> Row | None:
        return self._one("SELECT * FROM files WHERE owner = ? AND id = ?", owner, file_id)

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, most: int, ascending: bool
    ) -> tuple[list[Row], bool]:
        """List files behind the one of id ``after``. Returns: ``most`` of them, and whether there are more."""
        wanted = ("AND purpose = ?", [purpose]) if purpose is not None else ("", [])
        return self._page("files", owner, wanted, after=after, most=most, ascending=ascending)

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file. Returns: whether it was there. Raises: FileInUse."""
        with self._change() as db:
            gone = db.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, file_id)).rowcount > 0
            if gone:
                self._require_unused(db, file_id)
        if gone:
            self.path(file_id).unlink(missing_ok=True)
        return gone

    def add_batch(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        window_s: float,
        metadata: Row | None,
        alone: bool = False,
    ) -> Row:
        """Add a batch, which the next router that looks takes. Raises: InvalidRequest where its file is gone;
        FolderFull; TooMany."""
        batch_id, now = f"batch_{secrets.token_hex(12)}", int(self._clock())
        with self._change() as db:
            self._require_room(db, owner, LEAST_BYTES + len(json.dumps(metadata)), alone=alone)
            query = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN {OPEN}"
            if db.execute(query, (owner,)).fetchone()[0] >= MOST_OPEN:
                raise TooMany(f"this key has {MOST_OPEN} batches that have not ended: wait for one, or cancel one")
            added = db.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, metadata, status, "
                "created_at, expires_at) SELECT ?, owner, ?, id, ?, ?, 'validating', ?, ? FROM files "
                "WHERE owner = ? AND id = ?",
                (batch_id, endpoint, window, json.dumps(metadata), now, now + int(window_s), owner, input_file_id),
            ).rowcount
            if not added:
                raise InvalidRequest("input_file_id: there is no such file of this key", param="input_file_id")
        found = self.batch(owner, batch_id)
        assert found is not None
        return found

    def batch(self, owner: str, batch_id: str) -> Row | None:
        return self._one("SELECT * FROM batches WHERE owner = ? AND id = ?", owner, batch_id)

    def batches(self, owner: str, *, after: str | None, most: int) -> tuple[list[Row], bool]:
        """List batches, the newest first; as `files`."""
        return self._page("batches", owner, ("", []), after=after, most=most, ascending=False)

    def open_batches(self) -> list[Row]:
        """List the batches of all owners that have not ended, the oldest first."""
        with self._open() as db:
            return _rows(db.execute(f"SELECT * FROM batches WHERE status IN {OPEN} ORDER BY seq"))

    def cancel(self, owner: str, batch_id: str) -> Row | None:
        """Have a batch end, if it has not begun to; its router does it. Returns: its row."""
        with self._change() as db:
            db.execute(
                "UPDATE batches SET status = 'cancelling', ends_as = 'cancelled', cancelling_at = ? "
                "WHERE owner = ? AND id = ? AND status IN ('validating', 'in_progress')",
                (int(self._clock()), owner, batch_id),
            )
        return self.batch(owner, batch_id)

    def claim(self, router: str, *, hold_s: float, most: int) -> list[Row]:
        """Take batches that no router runs, and hold those that ``router`` runs, for ``hold_s``: the oldest of each
        owner first, then each one's second. A batch that is held gives way to another owner's first.

        Returns: at most ``most`` batches, which are its own for so long.
        """
        now = self._clock()
        with self._change() as db:
            rows = db.execute(
                f"SELECT id, router FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY router = ?1 DESC, "
                f"seq) AS turn FROM batches WHERE status IN {OPEN}) WHERE router = ?1 OR router_until < ?2 "
                f"ORDER BY turn, router = ?1 DESC, seq",
                (router, now),
            ).fetchall()
            held = [(router, now + hold_s, batch_id) for batch_id, _ in rows[:most]]
            given = [("", 0.0, batch_id) for batch_id, holder in rows[most:] if holder == router]
            db.executemany("UPDATE batches SET router = ?, router_until = ? WHERE id = ?", held + given)
            return _rows(
                db.execute(f"SELECT * FROM batches WHERE status IN {OPEN} AND router = ? ORDER BY seq", (router,))
            )

    def release(self, router: str) -> None:
        """Leave the batches of ``router`` to others: it ends."""
        with self._change() as db:
            db.execute("UPDATE batches SET router = '', router_until = 0 WHERE router = ?", (router,))

    def put_in_order(self, batch: Row, keyed: Iterable[tuple[Line, bytes] | LineEntry], *, max_lines: int) -> None:
        """Begin a batch: its lines are run in the order of their keys. What is an `LineEntry` already is not run.

        The lines wait in a table of this connection, which SQLite keeps and sorts on disk.
        """
        wrong, number = list[LineEntry](), 0
        with self._open() as db:
            db.execute(
                "CREATE TEMP TABLE keyed (number INTEGER, start INTEGER, size INTEGER, custom_id TEXT UNIQUE, key)"
            )
            db.execute("BEGIN")
            for each in keyed:
                number += 1
                if number > max_lines:
                    break
                if isinstance(each, LineEntry):
                    wrong.append(each)
                    continue
                line, key = each
                added = db.execute("INSERT OR IGNORE INTO temp.keyed VALUES (?, ?, ?, ?, ?)", (*line[:4], key)).rowcount
                if not added:
                    wrong.append(not_run(line.number, line.custom_id, "duplicate_custom_id", "an earlier line has it"))
            db.execute("COMMIT")
            problem = (
                f"it has more than {max_lines:,} lines" if number > max_lines else None if number else "it is empty"
            )
            db.execute("BEGIN IMMEDIATE")
            if not self._may_go_on(db, batch, "validating"):
                return
            if problem is not None:
                self._end(db, batch, "failed", errors=_told("invalid_file", f"the input file cannot be run: {problem}"))
            else:
                db.execute(
                    "INSERT INTO lines SELECT ?, ROW_NUMBER() OVER (ORDER BY key, number), number, start, size, "
                    "custom_id FROM temp.keyed",
                    (batch["id"],),
                )
                self._insert_entries(db, batch, wrong)
                db.execute(
                    "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? WHERE id = ?",
                    (int(self._clock()), number, batch["id"]),
                )
            db.execute("COMMIT")

    def fail(self, batch: Row, problem: str) -> None:
        """End a batch whose input cannot be read."""
        with self._change() as db:
            if self._may_go_on(db, batch, "validating", "in_progress"):
                self._end(db, batch, "failed", errors=_told("invalid_file", f"the input file cannot be run: {problem}"))

    def to_run(self, batch_id: str) -> list[Line]:
        """List the requests of a batch that have no entry yet, in the order in which to run them."""
        with self._open() as db:
            return [Line(*row) for row in db.execute(NOT_RUN, (batch_id,))]

    def add_entries(self, batch: Row, entries: Iterable[LineEntry]) -> None:
        """Keep what lines have become; of a line that has an entry nothing is changed."""
        with self._change() as db:
            if self._may_go_on(db, batch, "in_progress", "cancelling"):
                self._insert_entries(db, batch, entries)

    def finish(self, batch: Row, ends_as: str) -> None:
        """Begin the end of a batch that runs; of what expires, lines without an entry get one."""
        with self._change() as db:
            if not self._may_go_on(db, batch, "validating", "in_progress"):
                return
            if ends_as == "expired":
                rows = db.execute(NOT_RUN, (batch["id"],)).fetchall()
                why = "the batch's completion window was over before this line was answered"
                self._insert_entries(db, batch, (not_run(row[0], row[3], "batch_expired", why) for row in rows))
            db.execute(
                "UPDATE batches SET status = 'finalizing', ends_as = ?, finalizing_at = ? WHERE id = ?",
                (ends_as, int(self._clock()), batch["id"]),
            )

    def write_files(self, batch: Row) -> None:
        """End a batch: its entries become the output file and the error file, in the order of the input."""
        made = dict[str, str]()
        with contextlib.ExitStack() as undo:
            for column, ok in (("output_file_id", 1), ("error_file_id", 0)):
                file_id = f"file-{secrets.token_hex(12)}"
                undo.callback(self.path(file_id).unlink, missing_ok=True)
                if self._write_entries(batch["id"], ok, self.path(file_id)):
                    made[column] = file_id
            if self._end_with(batch, made):
                undo.pop_all()

    def _end_with(self, batch: Row, made: dict[str, str]) -> bool:
        """End a batch with the files ``made``. Returns: whether it was its router's still."""
        with self._change() as db:
            if self._may_go_on(db, batch, "finalizing", "cancelling"):
                for column, file_id in made.items():
                    name = f"{batch['id']}_{column.partition('_')[0]}.jsonl"
                    self._insert_file(
                        db, file_id, owner=batch["owner"], filename=name, purpose="batch_output", kept_s=KEPT_S
                    )
                self._end(db, batch, batch["ends_as"], errors=None, **made)
                return True
        return False

    def tell(self, batch: Row, problem: str | None) -> None:
        """Write into an open batch why it does not go on; None: it does."""
        with self._change() as db:
            told = None if problem is None else _told("storage_failed", problem)
            query = f"UPDATE batches SET errors = ? WHERE id = ? AND router = ? AND status IN {OPEN}"
            db.execute(query, (told, batch["id"], batch["router"]))

    def failure(self, error: Exception) -> FolderFails:
        """Say in words for a client why a call has failed, and in one line for the log, unless it had one just now."""
        if self._clock() >= self._logged_s + LOG_S:
            self._logged_s = self._clock()
            log.error("router.batch_folder: %s: %s: %s", self.folder, type(error).__name__, error)
        return FolderFails(why(error), is_full=is_full(error))

    def sweep(self) -> None:
        """Delete what has been kept for its time, and what was left of files that were cut off."""
        now = self._clock()
        with self._change() as db:
            ended = "COALESCE(completed_at, failed_at, expired_at, cancelled_at)"
            db.execute(f"DELETE FROM batches WHERE status NOT IN {OPEN} AND {ended} < ?", (now - KEPT_S,))
            older = "UPDATE files SET expires_at = created_at + ? WHERE purpose = 'batch_output' AND expires_at IS NULL"
            db.execute(older, (KEPT_S,))  # of versions before this one
            used = f"SELECT input_file_id FROM batches WHERE status IN {OPEN}"
            db.execute(f"DELETE FROM files WHERE expires_at < ? AND id NOT IN ({used})", (now,))
            known = {file_id for (file_id,) in db.execute("SELECT id FROM files")}
        for path in (self.folder / "files").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another router was quicker
                if path.name not in known and path.stat().st_mtime < now - ORPHAN_S:
                    path.unlink()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.folder / "batches.sqlite", timeout=BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_mode = PERSIST")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            yield db
        finally:
            db.close()  # what was not committed is undone

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    def _one(self, query: str, *values: Any) -> Row | None:
        with self._open() as db:
            return next(iter(_rows(db.execute(query, values))), None)

    def _page(
        self, table: str, owner: str, wanted: tuple[str, list[Any]], *, after: str | None, most: int, ascending: bool
    ) -> tuple[list[Row], bool]:
        condition, values = wanted
        order, beyond = ("ASC", ">") if ascending else ("DESC", "<")
        if after is not None:
            condition += f" AND seq {beyond} (SELECT seq FROM {table} WHERE owner = ? AND id = ?)"
            values = [*values, owner, after]
        query = f"SELECT * FROM {table} WHERE owner = ? {condition} ORDER BY seq {order} LIMIT ?"
        with self._open() as db:
            found = _rows(db.execute(query, (owner, *values, most + 1)))
        return found[:most], len(found) > most

    def _insert_file(
        self, db: sqlite3.Connection, file_id: str, *, owner: str, filename: str, purpose: str, kept_s: int | None
    ) -> None:
        now = int(self._clock())
        db.execute(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file_id, owner, filename, purpose, self.path(file_id).stat().st_size, now,
             None if kept_s is None else now + kept_s),
        )  # fmt: skip

    def _require_room(self, db: sqlite3.Connection, owner: str, num_bytes: int, *, alone: bool) -> None:
        """Raise TooMany or FolderFull, unless ``owner`` may have one thing more, of ``num_bytes``."""
        of_owner = "FILTER (WHERE owner = ?1)"
        query = f"SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(bytes) {of_owner}, 0), COUNT(*) {of_owner} FROM ({_OWN})"
        held, own, num = db.execute(query, (owner,)).fetchone()
        if num >= MOST_FILES:
            raise TooMany(f"this key has {num:,} files, outputs of batches among them: delete some")
        query = f"SELECT COALESCE(SUM({LEAST_BYTES} + LENGTH(metadata)), 0) FROM batches WHERE owner = ?"
        own += db.execute(query, (owner,)).fetchone()[0] + num_bytes
        pages, free, page_bytes = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        left = self._max_bytes - held - (pages - free) * page_bytes - num_bytes
        if left < 0 or (not alone and own > left):  # how many all hold concerns no key
            raise FolderFull(
                "no more files are kept, and no batches, as these have 10 GiB: delete some, as DELETE /v1/files/ID does"
            )

    def _require_unused(self, db: sqlite3.Connection, file_id: str) -> None:
        query = f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {OPEN}"
        used = db.execute(query, (file_id,)).fetchone()
        if used is not None:
            raise FileInUse(f"file {file_id} is the input of {used[0]}, which has not ended: cancel that first")

    def _may_go_on(self, db: sqlite3.Connection, batch: Row, *statuses: str) -> bool:
        """Whether the batch is its router's still, in one of ``statuses``."""
        marks = ", ".join("?" * len(statuses))
        query = f"SELECT 1 FROM batches WHERE id = ? AND router = ? AND status IN ({marks})"
        return db.execute(query, (batch["id"], batch["router"], *statuses)).fetchone() is not None

    def _insert_entries(self, db: sqlite3.Connection, batch: Row, entries: Iterable[LineEntry]) -> None:
        num = {True: 0, False: 0}
        for each in entries:
            row = (batch["id"], each.number, each.ok, each.text)
            num[each.ok] += db.execute("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?)", row).rowcount
        query = "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE id = ?"
        db.execute(query, (num[True], num[False], batch["id"]))

    def _write_entries(self, batch_id: str, ok: int, path: Path) -> bool:
        """Write the entries of one kind to ``path``. Returns: whether there are any."""
        with self._open() as db, path.open("w", encoding="utf-8") as file:
            query = "SELECT entry FROM entries WHERE batch = ? AND ok = ? ORDER BY number"
            num = 0
            for (text,) in db.execute(query, (batch_id, ok)):
                file.write(text + "\n")
                num += 1
            file.flush()
            os.fsync(file.fileno())
        if not num:
            path.unlink()
        return num > 0

    def _end(self, db: sqlite3.Connection, batch: Row, status: str, **columns: str | None) -> None:
        columns |= {"status": status}
        assigned = ", ".join(f"{name} = ?" for name in columns)
        db.execute(
            f"UPDATE batches SET {assigned}, {status}_at = ?, router = '' WHERE id = ? AND router = ?",
            (*columns.values(), int(self._clock()), batch["id"], batch["router"]),
        )
        for table in ("lines", "entries"):
            db.execute(f"DELETE FROM {table} WHERE batch = ?", (batch["id"],))


def batch_store(folder: str | None, *, max_bytes: int) -> BatchStore | None:
    """Open the store that the settings name; None: they name none. Raises: InvalidConfig."""
    if folder is None:
        return None
    try:
        return BatchStore(Path(folder), max_bytes=max_bytes)
    except (OSError, sqlite3.Error) as error:
        raise InvalidConfig(f"router.batch_folder: {folder} cannot keep files and batches: {error}") from error


def not_run(number: int, custom_id: str | None, code: str, message: str) -> LineEntry:
    """Make the entry of a line that is not run."""
    error = {"code": code, "message": message, "line": number + 1}
    return LineEntry(number, False, entry_text(custom_id, error=error))


def _told(code: str, message: str) -> str:
    param = "input_file_id" if code == "invalid_file" else None
    return json.dumps([{"code": code, "message": message, "line": None, "param": param}])


def is_full(error: Exception) -> bool:
    """Whether what failed had no room on its disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def why(error: Exception) -> str:
    """Say what a folder is that made ``error``, without its name."""
    if is_full(error):
        return "has no room on its disk"
    if isinstance(error, OSError):
        return f"cannot be used: {error.strerror or type(error).__name__}"
    return f"cannot be used: {error}"


def entry_text(custom_id: str | None, *, response: str = "null", error: Row | None = None) -> str:
    """Write an entry in OpenAI's form; ``response`` is JSON already."""
    made = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id}
    return f'{json.dumps(made)[:-1]}, "response": {response}, "error": {json.dumps(error)}}}'


def _rows(cursor: sqlite3.Cursor) -> list[Row]:
    names = [each[0] for each in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
