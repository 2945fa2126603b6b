"""The packed weights of a model in a file beside it, which all replicas of a host map instead of packing their own.

Owns:      ``panels-<format>-<rank>of<ranks>-<digest>.bin`` in the model's folder: panels one after the other, each at a
           multiple of 64 bytes, then the table of what lies where (JSON), its length, and `MAGIC`.
Never:     trusts a file that is not whole, or that was made of other weights: the digest is of the model's identity,
           and a file gets its name when it is complete.
Invariant: a rank without a file (a folder that cannot be written, a full disk) has the same numbers in its own memory.
Thread:    the one that loads the model; processes that load at once wait for the one that writes.
"""

import fcntl
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from replicas.kernels.panels import Packs, Panels, make
from replicas.kernels.weight_formats import WeightFormat
from replicas.memory.pool import give_back

log = logging.getLogger(__name__)

MAGIC = b"MANTAPAN"
VERSION = 1  # of the file and of the packed forms
ALIGNMENT = 64
WAIT_S = 120.0  # for another process that packs the same weights
Keep = Callable[[str], Packs]  # by a weight's name


class Entry(NamedTuple):
    """Where a weight's panels lie in the file, and what they are: see `Panels`."""

    format: WeightFormat
    n: int
    k: int
    group: int
    offset: int
    panels: int
    panel_bytes: int

    def read(self, data: "np.memmap[tuple[int], np.dtype[np.uint8]]") -> Panels:
        """View the panels in the mapped file."""
        part = torch.from_numpy(data[self.offset : self.offset + self.panels * self.panel_bytes])
        return Panels(self.format, self.n, self.k, self.group, part.view(self.panels, self.panel_bytes))


@contextmanager
def panel_file(folder: Path, what: str, meaning: Mapping[str, object]) -> Iterator[Keep]:
    """Yield where a model's panels come from: the file, or what is packed now and written to it.

    Args: what: begins the file's name; of files that begin so only the newest is kept.
          meaning: all that the numbers depend on.
    """
    digest = hashlib.sha256(json.dumps({**meaning, "version": VERSION}, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"panels-{what}-{digest}.bin"
    with ExitStack() as held:
        found = _entries(path)
        if found is None and _locked(folder / ".panels.lock", held):
            found = _entries(path)  # written meanwhile
            if found is None:
                yield from _written(path, what)
                return
        if found is None:
            yield lambda name: make
            return
        held.close()  # readers need not wait for each other
        entries, data = found, np.memmap(path, np.uint8, mode="c")

        def mapped(name: str) -> Packs:
            return lambda panels: entries[name].read(data) if name in entries else panels()

        yield mapped


def give_back_panels() -> int:
    """Give the memory of all mapped panels of this process back to the system. They are never written to, so the system
    reads them from their file again when they are used. Returns: the bytes of the mappings."""
    num_bytes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if re.search(r"/panels-[^/]*\.(bin|partial)( \(deleted\))?$", path):
            start, end = (int(each, 16) for each in addresses.split("-"))
            give_back(start, end - start)
            num_bytes += end - start
    return num_bytes


def _written(path: Path, what: str) -> Iterator[Keep]:
    """Yield what packs, and writes each weight, until the disk refuses one; completes the file."""
    partial, started_s = path.with_suffix(".partial"), time.monotonic()
    entries: dict[str, Entry] = {}
    try:
        file = partial.open("wb+")
    except OSError as error:
        log.info("weights are packed at every start: %s", error)
        yield lambda name: make
        return
    failed: list[OSError] = []

    def keep(name: str) -> Packs:
        def packs(panels: Callable[[], Panels]) -> Panels:
            packed = panels()
            if not failed:
                try:
                    entry = _append(file, packed)
                    entries[name] = entry
                    return entry.read(np.memmap(partial, np.uint8, mode="c"))
                except OSError as error:
                    failed.append(error)
            return packed

        return packs

    try:
        with file:
            yield keep
            failure = failed[0] if failed else _complete(file, entries)
        if failure is None:
            for old in path.parent.glob(f"panels-{what}-*.bin"):
                old.unlink(missing_ok=True)  # panels of other weights; existing mappings stay valid
            partial.replace(path)
            mib, took_s = path.stat().st_size / 2**20, time.monotonic() - started_s
            log.info("packed weights: %s, %.0f MiB, in %.1f s", path.name, mib, took_s)
        else:
            log.info("weights are packed at every start: %s", failure)
    finally:
        partial.unlink(missing_ok=True)


def _complete(file: BinaryIO, entries: Mapping[str, Entry]) -> OSError | None:
    """Write the table behind all panels. Returns: why it could not be written."""
    table = json.dumps(entries).encode()
    try:
        file.write(table + len(table).to_bytes(8, "little") + MAGIC)
        file.flush()
    except OSError as error:
        return error
    return None


def _append(file: BinaryIO, packed: Panels) -> Entry:
    """Write panels at the file's end. Returns: their entry in the table."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    offset = file.tell()
    file.write(packed.data.numpy().data)
    file.flush()
    panels, panel_bytes = packed.data.shape
    return Entry(packed.format, packed.n, packed.k, packed.group, offset, panels, panel_bytes)


def _entries(path: Path) -> dict[str, Entry] | None:
    """Read the table of a file; None if there is none, or it is not whole."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 16))
            length, magic = int.from_bytes(file.read(8), "little"), file.read(8)
            if magic != MAGIC or length > size - 16:
                return None
            file.seek(size - 16 - length)
            return {name: Entry(*entry) for name, entry in json.loads(file.read(length)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _locked(path: Path, held: ExitStack) -> bool:
    """Take the folder's lock, to be let go with ``held``; False if it cannot be had."""
    try:
        file = held.enter_context(path.open("w"))
    except OSError as error:
        log.info("weights are packed at every start: %s", error)
        return False
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                log.warning("%s has been held for %.0f s: weights are packed in this process's memory", path, WAIT_S)
                return False
            time.sleep(0.05)
