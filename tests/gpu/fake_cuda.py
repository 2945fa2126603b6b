"""A fake CUDA device: tensors that say cuda:0 and compute on the CPU, and the torch.cuda that goes with it.

FakeTensorMode knows devices too, but it has no values, holds for one thread, and cannot index a tensor of CUDA in a
build of torch without CUDA; an engine needs all three. Here values are real, so an engine gives the CPU's tokens.

The device refuses: an operation on tensors of both (CUDA takes from the host only numbers without dimensions, and
indices); a copy that is not waited for, from or into host memory that is not pinned; while a graph is captured, what
goes between host and device. A captured graph is the list of its operations; a replay runs them over the same memory.

An asynchronous copy is late. What it brings to the host is there when the host has waited for an event or a stream
behind it, and is NOTHING_YET before. What it takes from the host must not be written before the host has waited, which
is looked at whenever the host waits for anything. And one on another stream than a thread's first runs only when
something waits for it, or when that stream goes on: who does not order it behind or before the engine's work sees that.
Kernels are late in memory that a test watches: a copy on another stream, issued before the host or that stream has
waited for them, reads what was there before.

Owns:      the patches of torch and Triton, which pytest's monkeypatch takes back.
Never:     imitates time otherwise: an operation that is no such copy has run when it returns, on whatever stream.
Thread:    any.
"""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from replicas.layers import tp_group

CUDA = torch.device("cuda", 0)
TOTAL_BYTES = 4 << 30
NOTHING_YET = 0x5A  # in every byte
INDEXING = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_}
READS = {Tensor.__bool__, Tensor.__float__, Tensor.__index__, Tensor.__int__, Tensor.item, Tensor.tolist}
DTYPES = {  # of what the Triton kernels are given, by name; the rest is in the model's dtype or the pool's
    name: dtype
    for dtype, names in {
        torch.int32: "table rows seq_lens tiles qo_indptr prefix_lens",
        torch.int64: "out_slots",
        torch.float32: "part_out part_lse",
    }.items()
    for name in names.split()
}
of_torch = {
    name: getattr(torch, name) for name in ("arange", "as_tensor", "empty", "full", "ones", "randn", "tensor", "zeros")
}
to_of_torch = Tensor.to


class OnCuda(Tensor):
    """A tensor of the CPU that counts as one of the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            answer = ANSWERS.get(func)
            return answer(*args, **(kwargs or {})) if answer else FAKE.run(func, args, kwargs or {})


def plain(x: Any) -> Any:
    """``x`` as the tensor of the CPU that it is."""
    return x.as_subclass(Tensor) if isinstance(x, OnCuda) else x


class Launches(TorchDispatchMode):
    """Counts PyTorch's operations that launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if not view and not func.__name__.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Stream:
    """Of the device; everything on it has run, but for late copies."""

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = id(self)
        self.behind: list[Stream] = []  # what it has waited for
        self.seen: dict[Stream, int] = {}  # of each of them, up to which number

    def wait_stream(self, other: "Stream") -> None:
        self.behind.append(other)
        self.seen[other] = FAKE.num_copies
        FAKE.go_on(other)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def synchronize(self) -> None:
        FAKE.wait("stream", self)

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, **options: object) -> None:
        self._place: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._place = stream or FAKE.streams[-1], FAKE.num_copies

    def wait(self, stream: Stream | None = None) -> None:
        if self._place is not None:
            (stream or FAKE.streams[-1]).seen[self._place[0]] = self._place[1]
            FAKE.go_on(*self._place)

    def synchronize(self) -> None:
        if self._place is not None:
            FAKE.fenced.append(self._place[0])
            FAKE.passed(*self._place)


class Write(NamedTuple):
    """What work on ``stream``, the host has not waited for, has changed in memory that a test watches."""

    stream: Stream
    number: int
    memory: Tensor  # [bytes]
    at: Tensor
    before: Tensor


class Copy:
    """An asynchronous copy between pinned memory and the device, which a stream runs and the host later waits for."""

    def __init__(self, to: Tensor, source: Tensor, *, to_host: bool, stream: Stream) -> None:
        self._to, self._source, self._to_host, self.stream = plain(to), plain(source), to_host, stream
        self._given = None if to_host else self._source.clone()  # what the host has put there
        self._read: Tensor | None = None
        self._unseen = [w for w in FAKE.writes if w.stream is not stream and w.number > stream.seen.get(w.stream, 0)]
        FAKE.num_copies += 1
        self.number = FAKE.num_copies
        if to_host:
            for earlier in FAKE.copies:
                if earlier.stream is stream:
                    earlier.read()  # before this one writes
            nothing = of_torch["full"]((self._to.nbytes,), NOTHING_YET, dtype=torch.uint8)
            self._to.copy_(nothing.view(self._to.dtype).view(self._to.shape))

    def run(self) -> None:
        if self._read is None:
            self._read = self._early() if self._unseen else self._source.clone()
            if not self._to_host:
                self._to.copy_(self._read)

    def _early(self) -> Tensor:
        """The source as it was before the work that this copy did not wait for."""
        memory = self._unseen[0].memory
        assert all(each.memory is memory for each in self._unseen), "one memory is watched"
        now = memory.clone()
        for each in reversed(self._unseen):
            memory[each.at] = each.before
        read = self._source.clone()
        memory.copy_(now)
        return read

    def read(self) -> None:
        """Another copy behind it on its stream may write what it reads."""
        self.check()
        self.run()
        self._given = None

    def pass_(self) -> None:
        """The host has waited for it."""
        self.run()
        if self._to_host:
            assert self._read is not None
            self._to.copy_(self._read)

    def check(self) -> None:
        if self._given is not None and not torch.equal(_bytes(self._source), _bytes(self._given)):
            raise RuntimeError("pinned memory was written before the copy out of it had run: a fence is missing")


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        noted, FAKE.noted = FAKE.noted, None
        with FAKE.writing():
            for operation in self.operations:
                operation()
        if noted is not None:
            noted.append([])
            FAKE.noted = noted


class FakeCuda:
    """What has been asked of the device since `install`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.waits: list[str] = []  # operations that the host waited for
        self.copied_on: list[Stream] = []  # the stream of each copy to the host
        self.fenced: list[Stream] = []  # the stream of each event that the host waited for
        self.noted: list[list[str]] | None = None  # operations of the device, a list more for each replay
        self.copies: list[Copy] = []  # the asynchronous ones that the host has not waited for
        self.num_copies = 0  # and those that it has; writes in watched memory count too
        self.watched: Tensor | None = None
        self.writes: list[Write] = []  # in it, that the host has not waited for
        self._lock = threading.Lock()
        self._default = Stream()
        self._of_thread = threading.local()
        self.graphs: list[Graph] = []
        self.kernels = 0  # of Triton that were launched
        self.programs: set[tuple[str, str]] = set()  # that Triton would have compiled for those: kernel, and for what
        self.capturing: Graph | None = None
        self.sticky = ""  # what every wait says once the device is broken
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no other memory gets that
        self._registered: list[range] = []  # addresses
        self._kept_error = False

    @property
    def streams(self) -> list[Stream]:
        """Of this thread; the current one is last."""
        if not hasattr(self._of_thread, "streams"):
            self._of_thread.streams = [self._default]
        streams: list[Stream] = self._of_thread.streams
        return streams

    def go_on(self, stream: Stream, last: int | None = None) -> None:
        """Run the copies that ``stream`` has, up to number ``last``."""
        with self._lock:
            for copy in self.copies:
                if copy.stream is stream and (last is None or copy.number <= last):
                    copy.run()

    def watch(self, x: Tensor) -> None:
        """Let kernels be late in the memory of ``x``."""
        self.watched = plain(x).view(-1).view(torch.uint8)

    @contextlib.contextmanager
    def noting(self) -> Iterator[list[list[str]]]:
        """Note copies, launches and operations that the host asks the device for: before and between replays."""
        self.noted = noted = [[]]
        yield noted
        self.noted = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Note what an operation changes in watched memory."""
        memory = self.watched
        was = None if memory is None else memory.clone()
        yield
        if memory is not None and was is not None and not torch.equal(memory, was):
            at = (memory != was).nonzero()[:, 0]
            self.num_copies += 1
            self.writes.append(Write(self.streams[-1], self.num_copies, memory, at, was[at]))

    def passed(self, stream: Stream | None, last: int | None = None) -> None:
        """The host has waited for what ``stream`` has, up to copy ``last``; None: for all streams."""
        with self._lock:
            self.writes = [
                each
                for each in self.writes
                if (stream is not None and each.stream is not stream) or (last is not None and each.number > last)
            ]
            waiting = []
            for copy in self.copies:
                copy.check()
                if (stream is None or copy.stream is stream) and (last is None or copy.number <= last):
                    copy.pass_()
                else:
                    waiting.append(copy)
            self.copies = waiting

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, makes: bool = False) -> Any:
        """A function of torch with tensors of the device among its arguments; ``makes``: one on the device."""
        if self._kept_error:
            self._kept_error = False
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")
        name = getattr(func, "__name__", str(func))
        for x in tree_leaves((args, kwargs)):
            index = func in INDEXING and isinstance(x, Tensor) and x.dtype in (torch.int64, torch.bool)
            if type(x) is Tensor and x.dim() and not index and not makes:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {name} got one of the CPU: "
                    f"{x.dtype} {tuple(x.shape)}"
                )
        if func in READS:
            self.wait(name, self.streams[-1])
        self.go_on(self.streams[-1])
        given: list[tuple[Tensor, Tensor]] = []

        def unwrap(x: Any) -> Any:
            if not isinstance(x, OnCuda):
                return x
            given.append((plain(x), x))
            return given[-1][0]

        def wrap(x: Any) -> Any:
            for inner, was in given:
                if inner is x:
                    return was
            return x.as_subclass(OnCuda) if isinstance(x, Tensor) else x

        args, kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
        with self.writing(), Launches() if self.noted is not None else contextlib.nullcontext() as launched:
            made = func(*args, **kwargs)
        if self.noted is not None and launched is not None:
            self.noted[-1] += launched.names
        if self.capturing is not None:
            self.capturing.operations.append(lambda: _again(func, args, kwargs, made))
        return tree_map(wrap, made)

    def kernel(self, run: Callable[[], None], name: str = "kernel") -> None:
        """``run`` as one kernel: a graph that captures it replays it whole, with what its numbers on the host are then.
        """
        self.go_on(self.streams[-1])
        graph, self.capturing = self.capturing, None
        noted, self.noted = self.noted, None
        try:
            with self.writing():
                run()
        finally:
            self.capturing, self.noted = graph, noted
        if noted is not None:
            noted[-1].append(name)
        if graph is not None:
            graph.operations.append(run)

    def pin(self, x: Tensor) -> Tensor:
        self._pinned[x.untyped_storage().data_ptr()] = x
        return x

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        """cudaHostRegister: a range stays registered when its mapping goes; a refusal is reported at the next launch
        too."""
        if any(address < each.stop and each.start < address + num_bytes for each in self._registered):
            self._kept_error = True
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self._registered.append(range(address, address + num_bytes))
        return 0

    def unregister(self, address: int) -> int:
        """cudaHostUnregister."""
        [known] = [each for each in self._registered if each.start == address]
        self._registered.remove(known)
        return 0

    def is_pinned(self, x: Tensor) -> bool:
        address = x.untyped_storage().data_ptr()
        return address in self._pinned or any(x.data_ptr() in addresses for addresses in self._registered)

    def wait(self, what: str, stream: Stream | None = None) -> None:
        """``stream``: the one that the host waits for; None: all."""
        if self.sticky:
            raise RuntimeError(self.sticky)
        if self.capturing is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.waits.append(what)
        self.passed(stream)

    def copied(self, on_host: Tensor, *, to_host: bool, non_blocking: bool) -> None:
        """Between ``on_host`` and the device."""
        if self.capturing is not None:
            raise RuntimeError("a copy between host and device: operation not permitted when stream is capturing")
        if self.noted is not None:
            self.noted[-1].append("copy")
        if to_host:
            self.copied_on.append(self.streams[-1])
        if not non_blocking:
            self.waits.append("copy")
            self.passed(self.streams[-1])
        elif not self.is_pinned(on_host):
            raise RuntimeError("this copy is asynchronous, and the host's memory is not pinned")

    def copy(self, to: Tensor, source: Tensor, *, to_host: bool) -> None:
        """Start an asynchronous one, which `copied` has allowed."""
        with self._lock:
            copy = Copy(to, source, to_host=to_host, stream=self.streams[-1])
            self.copies.append(copy)
            if copy.stream is self._default:
                copy.run()

    def allocated(self) -> int:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _alive()}
        return sum(storages.values())


FAKE = FakeCuda()


def _alive() -> list[Tensor]:
    return [plain(x) for x in gc.get_objects() if type(x) is OnCuda]


def _again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    """A captured operation: its results into the memory that the first ones have."""
    for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _is_cuda(device: Any) -> bool:
    device = torch.device(device) if device is not None else torch.device("cpu")
    assert device.type == "cpu" or device.index in (None, 0), f"{device}: there is one GPU"
    return bool(device.type == "cuda")


def _factory(name: str) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        if _is_cuda(device):
            if name in ("as_tensor", "tensor"):
                FAKE.copied(FAKE.pin(of_torch["empty"](1)), to_host=False, non_blocking=True)  # pageable and small
            made: Tensor = FAKE.run(of_torch[name], args, options, makes=True)
            return made.as_subclass(OnCuda)
        made = of_torch[name](*args, **options, **({} if device is None else {"device": device}))
        return FAKE.pin(made) if pin_memory else made

    return make


def _to(x: Tensor, *args: Any, **options: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype)
    kept = {name: options.pop(name) for name in ("copy", "memory_format") if name in options}
    with torch._C.DisableTorchFunctionSubclass():
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
        to_cuda = isinstance(x, OnCuda) if device is None else _is_cuda(device)
        if to_cuda == isinstance(x, OnCuda):
            args = x, dtype or x.dtype
            return FAKE.run(to_of_torch, args, kept) if to_cuda else to_of_torch(*args, **kept)
        if to_cuda:
            FAKE.copied(x, to_host=False, non_blocking=non_blocking)
            made = to_of_torch(x, dtype or x.dtype).clone()
            if non_blocking:
                FAKE.copy(made, x, to_host=False)
            return made.as_subclass(OnCuda)
        FAKE.copied(plain(x), to_host=True, non_blocking=non_blocking)
        return to_of_torch(plain(x), dtype or x.dtype).clone()


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    on_host = [x for x in (to, source) if not isinstance(x, OnCuda)]
    if on_host:
        to_host = on_host[0] is to
        FAKE.copied(on_host[0], to_host=to_host, non_blocking=non_blocking)
        if non_blocking:
            FAKE.copy(to, source, to_host=to_host)
        else:
            plain(to).copy_(plain(source))
        return to
    return FAKE.run(Tensor.copy_, (to, source), {})


def _bytes(x: Tensor) -> Tensor:
    flat = x.contiguous().flatten()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # of one element it may be any


def _no_numpy(x: Tensor, *args: Any, **options: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")


ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda x: CUDA,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda x: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda x: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda x: 0,
    Tensor.is_pinned: lambda x: False,
    Tensor.cpu: lambda x: _to(x, "cpu"),
    Tensor.to: _to,
    Tensor.copy_: _copy,
    Tensor.numpy: _no_numpy,
    Tensor.__array__: _no_numpy,
}


@functools.cache
def _specialised(kernel: Any) -> Callable[..., tuple[Any, ...]]:
    """What tells from a launch's arguments which program of ``kernel`` runs, as Triton's launcher finds it for a Hopper
    GPU: types, constants, and which pointers and integers are multiples of 16, or are 1."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    options = {name: value for name, value in kernel.kwargs.items() if name.startswith("do_not")}
    compiled = JITFunction(kernel.fn, **options)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    found: Callable[..., tuple[Any, ...]] = create_function_from_signature(
        compiled.signature, compiled.params, backend
    )
    return found


class Kernel:
    """A Triton kernel: given tensors of the device of the types it was compiled for, it is interpreted over them."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            for name, x in zip(self._kernel.arg_names, args, strict=False):
                if isinstance(x, Tensor):
                    assert isinstance(x, OnCuda), f"{name} is on the CPU"
                    assert x.dtype == DTYPES.get(name, x.dtype), f"{name} is {x.dtype}"
                    assert x.stride(-1) == 1, f"{name} has strides {x.stride()}"
            assert "enable_fp_fusion" in options, "Triton's default differs between its versions"
            plains = [plain(x) for x in args]
            FAKE.kernels += 1
            FAKE.programs.add((self._kernel.fn.__name__, str(_specialised(self._kernel)(*plains, **options)[1:])))
            with _disable_current_modes():  # what the interpreter does is no launch
                FAKE.kernel(lambda: self._kernel[grid](*plains, **options), self._kernel.fn.__name__)

        return launch


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    FAKE.streams.append(stream)
    try:
        yield
    finally:
        FAKE.streams.pop()


@contextlib.contextmanager
def _capture(graph: Graph, **options: Any) -> Iterator[None]:
    FAKE.capturing = graph
    try:
        yield
    finally:
        FAKE.capturing = None
    FAKE.graphs.append(graph)


def kernels_of(module: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: Kernel(kernel) for name, kernel in vars(module).items() if hasattr(kernel, "fn")})


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """From now on this process has a GPU; Triton must be interpreting."""
    from replicas.attention import triton_kernels, triton_paged
    from replicas.kernels import gpu, triton_rows
    from replicas.kernels.adapters import on_gpu as low_rank
    from replicas.kernels.adapters import triton_low_rank
    from replicas.kernels.experts import on_gpu, triton_grouped

    FAKE.reset()
    _device_constructors()  # keeps the functions that `with torch.device("meta")` means, before they are replaced
    for name in of_torch:
        monkeypatch.setattr(torch, name, _factory(name))
    monkeypatch.setattr(Tensor, "to", _to)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: FAKE.pin(x.clone()))
    properties = SimpleNamespace(multi_processor_count=4, name="a fake GPU", total_memory=TOTAL_BYTES)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: _is_cuda(device),
        "mem_get_info": lambda device=None: (TOTAL_BYTES - FAKE.allocated(), TOTAL_BYTES),
        "memory_allocated": lambda device=None: FAKE.allocated(),
        "max_memory_allocated": lambda device=None: FAKE.allocated(),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: FAKE.wait("synchronize"),
        "current_stream": lambda device=None: FAKE.streams[-1],
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "CUDAGraph": Graph,
        "graph": _capture,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=FAKE.register, cudaHostUnregister=FAKE.unregister, cudaGetErrorString=str
        ),
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(triton_paged, "kernels", kernels_of(triton_kernels))
    elementwise, adapters, experts = map(kernels_of, (triton_rows, triton_low_rank, triton_grouped))
    monkeypatch.setattr(gpu, "kernels", lambda: elementwise)
    monkeypatch.setattr(low_rank, "programs", lambda: adapters)
    monkeypatch.setattr(on_gpu, "programs", lambda: experts)
    monkeypatch.setattr(triton_paged, "PROGRAMS", 8)  # an interpreted program takes a millisecond
    return FAKE


class ThroughTheHost:
    """Gloo's collectives over tensors of a device, copied to the host and back: NCCL refuses two ranks on one GPU."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def wait(self) -> None: ...

    def allreduce(self, tensors: list[Tensor], *options: Any) -> "ThroughTheHost":
        on_host = [x.cpu() for x in tensors]
        self._gloo.allreduce(on_host, *options).wait()
        return self._back(tensors, on_host)

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> "ThroughTheHost":
        on_host = [x.cpu() for x in parts[0]]
        self._gloo.allgather([on_host], [tensors[0].cpu()]).wait()
        return self._back(parts[0], on_host)

    def gather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> "ThroughTheHost":
        on_host = [[x.cpu() for x in each] for each in parts]
        self._gloo.gather(on_host, [tensors[0].cpu()], options).wait()
        return self._back(parts[0], on_host[0]) if parts else self

    def broadcast(self, tensors: list[Tensor], options: Any) -> "ThroughTheHost":
        on_host = [x.cpu() for x in tensors]
        self._gloo.broadcast(on_host, options).wait()
        return self._back(tensors, on_host)

    def _back(self, tensors: list[Tensor], on_host: list[Tensor]) -> "ThroughTheHost":
        for x, y in zip(tensors, on_host, strict=True):
            x.copy_(y)
        return self


_meet = tp_group._meet


def meet_through_the_host(
    rank: int, size: int, init_method: str, device: torch.device, timeout: timedelta
) -> ThroughTheHost:
    """What ranks have in the place of NCCL: each one's GPU is the same, or is not there."""
    return ThroughTheHost(_meet(rank, size, init_method, torch.device("cpu"), timeout))
