"""The adapters (LoRA) that one rank holds: what each adds to which product, and which rows of a step have which.

Owns:      the numbers of adapters in steps; this rank's share of their weights: of a column-parallel product B is split
           as the weight is, of a row-parallel one A, whose part goes through the product's own sum over ranks.
Never:     reads files (checkpoints/adapters.py) or decides which adapters stay (engine/adapters.py).
Invariant: an adapter adds to every layer that it names, or is refused by name before any of it is held. All ranks hold
           it, or none: each says whether it could before a step may have it.
Thread:    `put`, `drop` and `begin`: the one that runs the model. `prepare`: any.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from replicas.config import AdapterLimits
from replicas.errors import AdapterNotReadable, InvalidAdapter, Overloaded
from replicas.kernels import gpu
from replicas.kernels.adapters.low_rank import HostLowRank, HostPacked, is_bf16
from replicas.kernels.adapters.on_gpu import GpuLowRank, GpuPacked, Upload
from replicas.kernels.team import team
from replicas.layers.layer import full_name
from replicas.layers.linear import Linear, Pair
from replicas.layers.tp_group import TpGroup

log = logging.getLogger(__name__)
Floats = npt.NDArray[np.float32]


Pairs = Mapping[str, tuple[Floats, Floats]]  # whole, as `AdapterWeights` of checkpoints/adapters.py has them


@dataclass(frozen=True, slots=True)
class PrepareAdapter:
    """An order to every rank: read an adapter's files beside the steps, and say how that went."""

    number: int  # of this order; the newest is the one that may be put
    identity: str
    path: str  # of its folder


@dataclass(frozen=True, slots=True)
class PutAdapter:
    """An order to every rank: hold its share of an adapter, which it was to prepare."""

    prepared: PrepareAdapter


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """An order to every rank: forget an adapter that no step has any more."""

    identity: str


AdapterOrder = PrepareAdapter | PutAdapter | DropAdapter


@dataclass(frozen=True, slots=True, eq=False)
class RankAdapter:
    """A rank's share of an adapter, as its kernels read it."""

    rank: int
    packed: HostPacked | GpuPacked


class AdapterBank:
    """The adapters on one rank."""

    def __init__(
        self, products: Mapping[str, Linear], device: torch.device, limits: AdapterLimits, upload: Upload
    ) -> None:
        """``products``: those that adapters can add to, by their names in the checkpoint; ``upload``: to a GPU."""
        self._products = products
        self._numbers: dict[str, tuple[int, int]] = {}  # identity -> its number in steps, its rank
        shapes = {name: (one.matmul.shape[1], list(one.weights_here.values())) for name, one in products.items()}
        most = {"max_rank": limits.max_rank, "max_held": limits.max_held}
        self._held: HostLowRank | GpuLowRank
        if device.type == "cpu":
            self._held = HostLowRank(shapes, team(torch.get_num_threads()), **most)
            return
        dtype = next((one.matmul.weight.dtype for one in products.values() if one.matmul.weight is not None), None)
        self._held = GpuLowRank(shapes, dtype or torch.float32, device, upload, **most)
        self._add()

    def _add(self) -> None:
        """Let every product ask what adapters add to it."""
        for name, product in self._products.items():
            product.added = self._held.added[name]

    def prepare(self, rank: int, pairs: Pairs) -> RankAdapter:
        """Cut this rank's share of an adapter of ``rank``, and bring it into the form of the kernels.

        Raises: InvalidAdapter that names a layer that adapters cannot change here, or have in another shape;
                AdapterNotReadable where this replica can use none.
        """
        if isinstance(self._held, GpuLowRank) and gpu.kernels() is None:
            raise AdapterNotReadable(
                "adapter: it needs Triton, which this replica cannot use on its GPU: its log says why"
            )
        left = {name: (torch.from_numpy(a), torch.from_numpy(b)) for name, (a, b) in pairs.items()}
        parts: dict[str, Sequence[Pair | None]] = {}
        for name, product in self._products.items():
            cut: list[Pair | None] = []
            for weight in product.weights_here:
                pair = left.pop(full_name(name, weight), None)
                try:
                    cut.append(None if pair is None else product.share_of(weight, pair))
                except ValueError as error:
                    raise InvalidAdapter(
                        f"adapter: {full_name(name, weight)}: {error}: it is another model's"
                    ) from error
            if any(cut):
                parts[name] = cut
        if left:
            layers = {
                full_name(n, weight).rpartition(".")[2] for n, p in self._products.items() for weight in p.weights_here
            }
            raise InvalidAdapter(
                f"adapter: {next(iter(left))} ({len(left)} in all) cannot be changed by an adapter here: "
                + (
                    f"of this model's blocks {', '.join(sorted(layers))} can"
                    if layers
                    else "no layer of this model can"
                )
            )
        if isinstance(self._held, GpuLowRank):
            return RankAdapter(rank, self._held.pack(parts))
        narrow = all(is_bf16(weight) for pair in pairs.values() for weight in pair)  # one form on all ranks
        return RankAdapter(rank, self._held.pack(parts, narrow=narrow))

    def put(self, identity: str, share: Callable[[], RankAdapter], tp: TpGroup) -> None:
        """Hold this rank's ``share`` of an adapter for the steps that follow; all ranks call this together.

        Raises: Overloaded on all of them where one could not, as without memory for it; none holds it then.
        """
        is_held = True
        why = (
            "adapter: a rank of this replica could not hold it, its log says why: where memory is short, lower "
            "adapters.host_bytes, and on a GPU cache.mem_fraction_static"
        )
        try:
            self._hold(identity, share())
        except Exception as error:  # whatever it is: the others wait for this rank's word
            log.exception("rank %d cannot hold adapter %s", tp.rank, identity)
            is_held = False
            if isinstance(error, Overloaded):
                why = str(error)
        if tp.min_int(is_held):
            return
        if is_held:
            self.drop(identity)
        raise Overloaded(why)  # without its cause, whose traceback keeps the weights

    def _hold(self, identity: str, share: RankAdapter) -> None:
        """Give an adapter a number in steps, and its weights to the kernels.

        Raises: Overloaded, on a GPU without memory for them.
        """
        taken = {number for number, _ in self._numbers.values()}
        number = next(number for number in itertools.count() if number not in taken)
        try:
            self._held.put(number, share.packed)  # type: ignore[arg-type]  # its own `pack` made it
        except torch.OutOfMemoryError as error:
            raise Overloaded(
                f"adapter: the GPU has no {share.packed.num_bytes:,} bytes for another: lower cache.mem_fraction_static"
            ) from error
        self._numbers[identity] = number, share.rank
        self._add()

    def drop(self, identity: str) -> None:
        number, _ = self._numbers.pop(identity)
        self._held.drop(number)

    def begin(self, adapters: Sequence[str], lengths: Sequence[int], graph_rows: int | None = None) -> None:
        """Let the next step have rows of ``adapters``, ``lengths`` of each, one behind the other; "": of none.
        ``graph_rows``: of the CUDA graph that runs it; None: none does."""
        runs: list[tuple[int, int, int]] = []
        first = most = 0
        for identity, group in itertools.groupby(zip(adapters, lengths, strict=True), key=lambda each: each[0]):
            rows = sum(length for _, length in group)
            if identity:
                number, rank = self._numbers[identity]
                runs.append((first, rows, number))
                most = max(most, rank)
            first += rows
        if isinstance(self._held, GpuLowRank):
            self._held.step.set(runs, most, graph_rows)
        else:
            self._held.step.set(runs, most)

    def begin_idle(self, graph_rows: int | None = None) -> None:
        """Let a GPU's kernels run in the next step though none of its rows has an adapter."""
        if isinstance(self._held, GpuLowRank):
            self._held.step.set_idle(graph_rows)
