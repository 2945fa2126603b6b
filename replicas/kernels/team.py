"""Runs compiled kernels on torch's own OpenMP threads, one at a time or as the stages of a program.

Owns:      how a Python function becomes a kernel (numba, compiled once per machine and kept on disk), and how it is
           started: ``GOMP_parallel`` of the libgomp that torch loaded. One pool serves both, so that no idle pool spins
           on the cores that the other one needs (numba's own work queue beside torch: +90 us a call on two cores). Of a
           program: the list of stages as the team reads it, and a task counter for each.
Never:     holds data. A kernel gets one struct of addresses and sizes; the caller keeps the memory alive.
Invariant: a kernel runs to its end before `Team.run` returns; results do not depend on the number of threads. A stage
           begins when every thread has ended the one before it; counters are 0 when a program begins.
Thread:    any; the interpreter lock is released while a kernel runs. Each calling thread has its own OpenMP team. A
           program is not run by two threads at once.

Why programs: a kernel started from Python costs 6-10 us beside its work, a stage of a program below 1 us, and a block
of a model has ten of them.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import filelock
import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numpy as np
import torch
from numba import carray
from numba.core import sigutils, types
from numba.core.ccallback import CFunc
from torch import Tensor

from replicas.kernels.simd import call_kernel, load_i64

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_OPTIONS: dict[str, Any] = {"nopython": True, "error_model": "numpy", "fastmath": {"contract", "nsz", "arcp"}}
COMPILING_S = 120.0  # of another process; the slowest kernel takes 17 s of a core

thread_id = types.ExternalFunction("omp_get_thread_num", types.int32())
team_size = types.ExternalFunction("omp_get_num_threads", types.int32())
barrier = types.ExternalFunction("GOMP_barrier", types.void())  # every thread of the team waits for all others


def inlined(function: F) -> F:
    """Compile a function that kernels call.

    One that is made inside another function needs a ``__qualname__`` of its own. Kernels are kept on disk, and what
    several processes compiled may have equal symbols for different functions: all would call the first that is loaded.
    """
    assert "<locals>" not in function.__qualname__, f"{function.__qualname__} needs a name of its own"
    compiled: F = numba.jit(**_OPTIONS)(function)
    return compiled


def struct(name: str, integers: str, floats: str = "") -> type[ctypes.Structure]:
    """Make the struct of a kernel's arguments: int64 (addresses in bytes, sizes) and float32 fields; names separated
    by spaces."""
    fields = [(field, ctypes.c_int64) for field in integers.split()] + [(f, ctypes.c_float) for f in floats.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Kernel:
    """A numba function of one struct pointer; compiled, or read from the cache on disk, at the first use."""

    def __init__(self, function: Callable[[Any], None], arguments: type[ctypes.Structure]) -> None:
        self.function = function
        self.arguments = arguments

    @functools.cached_property
    def address(self) -> int:
        record = numba.from_dtype(np.dtype(self.arguments))
        signature = types.void(types.CPointer(record))  # type: ignore[attr-defined]
        compiled: Any = CFunc(self.function, sigutils.normalize_signature(signature), locals={}, options=_OPTIONS)
        alone: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        try:
            compiled.enable_caching()
            # numba looks at the file of this function alone; what it calls lies in others
            compiled._cache._cache_file._source_stamp = _sources()
            alone = one_at_a_time(f"{compiled._cache.cache_path}/.{self.function.__qualname__}.lock")
        except RuntimeError as error:  # neither the package's folder nor the user's cache can be written
            log.warning("%s: compiled anew at every start; set NUMBA_CACHE_DIR to a folder that can be written", error)
        with alone:
            compiled.compile()
        self._compiled = compiled  # owns the code: keep it
        return int(compiled.address)


@contextlib.contextmanager
def one_at_a_time(path: str) -> Iterator[None]:
    """Let one process of this machine compile; others wait at the file ``path``, COMPILING_S at most, and then read
    what it has kept. A process that dies lets go of the file."""
    lock = filelock.FileLock(path, timeout=COMPILING_S)
    with contextlib.suppress(filelock.Timeout, OSError):  # it hangs, or its file system has no locks
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@functools.cache
def _sources() -> str:
    """Hash the files that kernels are made of: code that was kept on disk is of these, or is made anew."""
    digest, package = hashlib.blake2b(digest_size=16), pathlib.Path(__file__).parent
    for file in sorted([*package.rglob("*.py"), *package.with_name("attention").glob("cpu*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def kernel(arguments: type[ctypes.Structure]) -> Callable[[Callable[[Any], None]], Kernel]:
    """Decorate ``f(pointer)``, which is run by every thread of a team at once, with ``pointer[0]`` the struct."""
    return lambda function: Kernel(function, arguments)


class Team:
    """The ``num_threads`` threads that run kernels together."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads = {num_threads}; allowed: 1 or more")
        self.num_threads = num_threads
        self._local = threading.local()

    def run(self, function: Kernel, arguments: ctypes.Structure) -> None:
        """Run the kernel on all threads and wait for them. ``arguments`` is a ``function.arguments``."""
        _PARALLEL(function.address, ctypes.addressof(arguments), self.num_threads, 0)

    def scratch(self, floats: int) -> int:
        """Return the address of memory for kernels that this thread starts, until its next `scratch`; grows, never
        shrinks."""
        return self.memory(floats).data_ptr()

    def memory(self, floats: int) -> torch.Tensor:
        """Return the memory of `scratch` as a tensor; its address stays valid while the caller keeps the tensor."""
        if getattr(self._local, "floats", 0) < floats:
            self._local.floats, self._local.memory = floats, torch.empty(floats)
        memory: torch.Tensor = self._local.memory
        return memory


@functools.cache
def team(num_threads: int) -> Team:
    """Return the process's team of that size: kernels of all layers run on it, one after the other."""
    return Team(num_threads)


def team_for(num_floats: int, least: int) -> Team:
    """Return all of torch's threads for work on at least ``least`` floats, else one: for a team between the two
    libgomp ends threads, and starts them anew for the next kernel."""
    return team(torch.get_num_threads() if num_floats >= least else 1)


class PassingThread(threading.Thread, Generic[T]):
    """A daemon thread that runs ``work()`` and ends, and its OpenMP team with it.

    For what another thread will go on with: libgomp counts the threads of all teams of a process, and while there are
    more than CPUs none of them waits awake: at every barrier it sleeps and is woken (a decode step of 16 ms took 19.5).
    """

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._future = work, Future[T]()
        self.start()

    def run(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is read
            self._future.set_exception(error)

    def result(self) -> T:
        """Return or raise the outcome of ``work`` once the thread has ended: a process that exits sooner is aborted."""
        self.join()
        return self._future.result()


def _openmp() -> ctypes.CDLL:
    """Load the OpenMP library of torch's process: by its plain name when torch loaded it so, else the file torch ships,
    in either folder: wheels for aarch64 have the second.

    Raises: RuntimeError when there is none.
    """
    package = pathlib.Path(torch.__file__).parent
    shipped = sorted([*(package / "lib").glob("libgomp*"), *package.with_name("torch.libs").glob("libgomp*")])
    for name in [*map(str, shipped), "libgomp.so.1", "libiomp5.so"]:
        try:
            library = ctypes.CDLL(name)
            for symbol in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
                llvmlite.binding.add_symbol(symbol, ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value)
        except (OSError, AttributeError):
            continue
        return library
    raise RuntimeError("the CPU kernels need an OpenMP library (libgomp): none in torch's folder, none on the system")


_PARALLEL = _openmp().GOMP_parallel
_PARALLEL.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
_PARALLEL.restype = None


_COUNTER_BYTES = 64  # a cache line each
ProgramArgs = struct("ProgramArgs", "stages num_stages")  # stages: [N, 2] int64, addresses of kernel and arguments


class Stage(Protocol):
    """One kernel on memory that does not move, for any number of rows that fit there."""

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        """Return the kernel for ``num_rows`` and its arguments (kept alive by the stage, set in place).

        Args: counter: address of an int64 that is 0 whenever the kernel begins, for tasks taken one by one.
        """
        ...


@runtime_checkable
class ReadingStage(Stage, Protocol):
    """A stage that can read its input from another place at each run."""

    def read_from(self, x: Tensor) -> None:
        """Read the rows of ``x`` from now on. The caller keeps ``x`` until the run has ended."""
        ...


@kernel(ProgramArgs)
def _run_stages(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    for i in range(a.num_stages):
        if i:
            barrier()
        call_kernel(load_i64(a.stages + 16 * i), load_i64(a.stages + 16 * i + 8))


class Program:
    """Stages that ``team`` runs in order."""

    def __init__(self, stages: Sequence[Stage], team: Team, kept: Sequence[bool] | None = None) -> None:
        """``kept``: those that runs have which are not ``whole``; None: all."""
        self.stages = tuple(stages)
        self._kept = np.array(kept or [True] * len(self.stages))
        self._team = team
        self._num_rows = 0  # that the stages are prepared for
        self._table = np.zeros((len(self.stages), 2), np.int64)
        self._short = self._table[self._kept]
        self._counters = np.zeros((len(self.stages) + 1, _COUNTER_BYTES // 8), np.int64)
        self._counters_at = self._counters.ctypes.data
        self._all, self._some = (ProgramArgs(table.ctypes.data, len(table)) for table in (self._table, self._short))

    def run(self, num_rows: int, *, whole: bool = True) -> None:
        """Run the stages on the first ``num_rows`` >= 1 rows of their memory: all, or those that are kept."""
        if num_rows != self._num_rows:
            self._prepare(num_rows)
        self._counters.fill(0)
        self._team.run(_run_stages, self._all if whole else self._some)

    def _prepare(self, num_rows: int) -> None:
        calls = [stage.prepare(num_rows, self._counters_at + _COUNTER_BYTES * i) for i, stage in enumerate(self.stages)]
        self._table[:] = [(function.address, ctypes.addressof(arguments)) for function, arguments in calls]
        self._short[:] = self._table[self._kept]
        self._num_rows = num_rows
