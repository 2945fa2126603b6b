"""The adapters (LoRA) that requests may name: those of the settings, and those that were loaded over HTTP.

Owns:      what a name stands for: a folder, and the digest of what that held when the name was given, its version.
Never:     reads weights for a replica, or changes a request that runs: it carries the digest. Reads a file on the event
           loop, which a network mount that hangs would stop: each wait for one ends.
Invariant: a name in ``adapters.names_folder`` is one file, which is replaced as a whole and looked at each time that a
           request names it; so all routers that share the folder agree, and one that starts again finds the same. What
           the settings name is fixed. A folder counts only if it and its files lie below ``adapters.roots``, links
           followed, and is looked up again when its name's file has changed. A name's file counts only if no other user
           may have written it.
Thread:    `find`, `of_folder` and `all` on that of ``looks``, `load` and `unload` on that of ``loads``.
"""

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from deployments.places import local_path
from deployments.settings.groups import ADAPTER_NAME, LONGEST_NAME, AdapterSettings
from deployments.tenancy.tenants import TAKEN
from kvtransfer.stores.folder import open_own, read_own
from replicas.checkpoints.adapters import CONFIG, WEIGHTS, Shapes, identify
from replicas.errors import InvalidAdapter, InvalidConfig, InvalidRequest, Overloaded, UnknownModel
from replicas.types import AdapterRef

log = logging.getLogger("ray.serve")
T = TypeVar("T")

ENDING = ".json"
LONGEST = 255  # bytes of a file's name, on the file systems that there are
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # of a file system that has no hard links
LISTED_S = 1.0  # how long a list of the names is used
LOOK_S, LOAD_S = 5.0, 300.0  # how long requests wait for files; to load one, up to adapters.max_bytes is read


Size = tuple[int | None, int | None]  # rank, bytes of the weights in fp32


class FileThread:
    """A thread for work on files that may hang. While the work of one does, others do not wait behind it."""

    def __init__(self, name: str, *, deadline_s: float) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"manta-{name}")
        self._deadline_s = deadline_s
        self._late: Future[Any] | None = None  # the work that nobody waits for any more

    @property
    def is_free(self) -> bool:
        """Whether no work is late."""
        return self._late is None or self._late.done()

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in its turn. Raises: Overloaded where it does not end in time."""
        late = Overloaded(
            "the files of adapters (adapters.names_folder, adapters.roots) do not answer: try again later"
        )
        if not self.is_free:
            raise late
        future = self._thread.submit(work)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not future.cancel():  # it has begun
                self._late = future
            raise late from error


class Adapters:
    """The adapters that one router knows, each by the name that requests use."""

    def __init__(self, settings: AdapterSettings | None = None, *, model: str = "", fits: Shapes | None = None) -> None:
        """Take the model's own name, which no adapter has, and the weights that they can add to (None: not known).

        Raises: InvalidConfig for a folder of the settings that holds no adapter of the model.
        """
        self._settings = settings = settings or AdapterSettings()
        self._fits = fits
        self._model = model
        self._limits = settings.limits
        self._sizes: dict[str, Size] = {}  # of what each name stands for, as last read
        if settings.names_folder is not None and os.path.exists(settings.names_folder):
            _require_own(settings.names_folder)
        self._fixed = {name: self._of_settings(name, path) for name, path in settings.names.items()}
        self._seen: dict[str, tuple[tuple[int, ...], AdapterRef]] = {}  # name -> its file as last read with success
        self._listed: list[AdapterRef] = []  # what each name stood for at ``_listed_s``
        self._of_folder: dict[str, list[str]] = {}  # path -> names, then
        self._listed_s, self._changed_s = -math.inf, 0.0  # when a listing began, and a name was (un)loaded here, last
        self.looks = FileThread("adapters", deadline_s=LOOK_S)
        self.loads = FileThread("adapter-loads", deadline_s=LOAD_S)
        self._told: dict[str, str] = {}  # name -> why its file is of no use, as the log has it already

    @property
    def are_possible(self) -> bool:
        """Whether there are any, or may be later."""
        return bool(self._fixed) or self._settings.names_folder is not None

    def find(self, name: str) -> AdapterRef | None:
        """Return what ``name`` stands for now."""
        if name in self._fixed:
            return self._fixed[name]
        try:
            stat = self._file(name).stat()
        except (OSError, ValueError, InvalidRequest):
            self._seen.pop(name, None)
            self._told.pop(name, None)
            return None
        stamp, seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size), self._seen.get(name)
        if seen is not None and seen[0] == stamp:
            return seen[1]
        ref = self._read(name)
        if ref is not None:  # what failed is tried again: it may pass without a change of the file
            self._seen[name] = stamp, ref
        return ref

    def of_folder(self, path: str) -> list[AdapterRef]:
        """Return what stands for the folder ``path`` now, of the names that did when they were listed."""
        self._list()
        found = [self.find(name) for name in self._of_folder.get(path, ())]
        return [ref for ref in found if ref is not None and ref.path == path]

    def all(self) -> list[AdapterRef]:
        """Return what each name stood for when they were listed, in the order of the names."""
        self._list()
        return self._listed

    def sized(self, refs: Sequence[AdapterRef]) -> list[tuple[AdapterRef, Size]]:
        """Return adapters that have names, with their sizes."""
        return [(ref, self._sizes.get(ref.name, (None, None))) for ref in refs]

    def _list(self) -> None:
        """List the names, where that was longer ago than `LISTED_S`, or than a change that was made here."""
        now_s = time.monotonic()
        if self._changed_s < self._listed_s and now_s < self._listed_s + LISTED_S:
            return
        folder = self._settings.names_folder
        files = [] if folder is None or not os.path.isdir(folder) else os.listdir(folder)
        kept = {unquote(file.removesuffix(ENDING)) for file in files if file.endswith(ENDING)}
        names, of_folder = sorted({*self._fixed, *kept}), defaultdict(list)
        self._listed = [ref for name in names if (ref := self.find(name)) is not None]
        for ref in self._listed:
            of_folder[ref.path].append(ref.name)
        self._of_folder, self._listed_s = dict(of_folder), now_s

    def load(self, name: str, path: str, *, in_place: bool) -> AdapterRef:
        """Give ``name`` to what the folder ``path`` holds now.

        Args:   path: absolute, or relative to a root. in_place: the name may stand for something already.
        Raises: InvalidAdapter; InvalidRequest for a name that is not free; an error of 503 if the folder of names
                cannot be written, and InvalidConfig if others may write it.
        """
        file = self._file(name)
        if name in self._fixed or name == self._model or name in TAKEN:
            why = TAKEN.get(name, "stands in the settings")
            raise InvalidRequest(f"lora_name: {name!r} {why}: give another one", param="lora_name")
        folder = self._below_roots(path)
        info = identify(folder, self._limits, self._fits)
        ref = AdapterRef(identity=info.identity, path=str(folder), name=name)
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(error) from error
        _require_own(str(file.parent))
        new = file.with_name(f"{secrets.token_hex(8)}.new")
        try:
            new.write_text(json.dumps(asdict(ref) | {"rank": info.rank, "num_bytes": info.num_bytes}))
            if in_place:
                new.replace(file)
            else:
                _put_where_none_is(new, file)
        except FileExistsError as error:
            raise InvalidRequest(
                f"lora_name: the adapter {name!r} has already been loaded; to replace it, set load_inplace to true",
                param="lora_name",
            ) from error
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            self._changed_s = time.monotonic()
        log.warning("adapter %s: %s is loaded from %s", name, ref.identity[:12], ref.path)
        return ref

    def unload(self, name: str) -> None:
        """Forget a name that was loaded; requests that run keep what it stood for. Raises: UnknownModel,
        InvalidRequest."""
        if name in self._fixed:
            raise InvalidRequest(f"lora_name: {name!r} stands in the settings: take it out there", param="lora_name")
        try:
            self._file(name).unlink()
        except FileNotFoundError as error:
            raise UnknownModel(f"the adapter {name[:200]!r} cannot be found") from error
        except OSError as error:
            raise _unwritable(error) from error
        self._changed_s = time.monotonic()
        log.warning("adapter %s is unloaded", name)

    def _of_settings(self, name: str, path: str) -> AdapterRef:
        folder = Path(local_path(path)).absolute()
        try:
            info = identify(folder, self._limits, self._fits)
        except (InvalidAdapter, Overloaded) as error:
            raise InvalidConfig(f"adapters.names.{name} = {path!r}: {error}") from error
        self._sizes[name] = info.rank, info.num_bytes
        return AdapterRef(identity=info.identity, path=str(folder), name=name)

    def _file(self, name: str) -> Path:
        """Return the file of a name. Raises: InvalidRequest."""
        if self._settings.names_folder is None:
            raise InvalidRequest("adapters are not loaded here: adapters.roots and adapters.names_folder are not set")
        if len(name) > LONGEST_NAME or not re.fullmatch(ADAPTER_NAME, name):
            wanted = f"must match {ADAPTER_NAME}, and have at most {LONGEST_NAME} characters"
            raise InvalidRequest(f"lora_name: {name[:200]!r} {wanted}", param="lora_name")
        file = f"{quote(name, safe='')}{ENDING}"
        if len(file) > LONGEST:
            raise InvalidRequest(
                f"lora_name: {name!r} makes a file's name of {len(file)} characters; at most {LONGEST} are allowed, of "
                "which each of / @ + = takes 3",
                param="lora_name",
            )
        return Path(self._settings.names_folder) / file

    def _below_roots(self, path: str) -> Path:
        """Follow ``path`` below a root. Raises: InvalidAdapter."""
        roots = [Path(os.path.realpath(root)) for root in self._settings.roots]
        for root in roots:
            try:
                folder = Path(os.path.realpath(root / path))
                files = [Path(os.path.realpath(folder / file)) for file in (CONFIG, WEIGHTS)]
                is_there = folder.is_dir()
            except (ValueError, OSError):  # a NUL; too long
                continue
            if is_there and all(any(each.is_relative_to(root) for root in roots) for each in (folder, *files)):
                return folder
        raise InvalidAdapter(f"lora_path: {path[:200]!r} is no folder below adapters.roots")

    def _read(self, name: str) -> AdapterRef | None:
        """Read the file of a name. Returns: None where it is gone, or says nothing that is of use."""
        try:
            if name == self._model:
                raise InvalidAdapter("it has the name of the model, which answers to it")
            kept: dict[str, Any] = json.loads(read_own(str(self._file(name))))
            folder = self._below_roots(kept["path"])
            ref = AdapterRef(identity=str(kept["identity"]), path=str(folder), name=name)
            self._sizes[name] = kept.get("rank"), kept.get("num_bytes")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, InvalidAdapter) as error:
            if self._told.get(name) != repr(error):
                self._told[name] = repr(error)
                log.error("adapter %s: its file in adapters.names_folder is of no use: %r", name, error)
            return None
        self._told.pop(name, None)
        return ref


def _require_own(folder: str) -> None:
    """Raises: InvalidConfig for a folder of names that others may write to."""
    try:
        os.close(open_own(os.path.realpath(folder), stat.S_IFDIR))
    except OSError as error:
        raise InvalidConfig(f"adapters.names_folder: {error.strerror or error}") from error


def _unwritable(error: OSError) -> Overloaded:
    return Overloaded(f"adapters.names_folder cannot be written ({error.strerror}): try again later")


def _put_where_none_is(new: Path, file: Path) -> None:
    """Put ``new`` at ``file``. Raises: FileExistsError where there is one."""
    try:
        os.link(new, file)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        file.touch(exist_ok=False)  # takes the name; until it is replaced it says nothing, as if it was not there
        new.replace(file)
