"""The adapters (LoRA) that one rank holds: what each adds to which product, and which rows of a step have which.

Owns:      the numbers of adapters in steps; this rank's share of their weights: of a column-parallel product B is split
           as the weight is, of a row-parallel one A, whose part goes through the product's own sum over ranks.
Never:     reads files (checkpoints/adapters.py) or decides which adapters stay (engine/adapters.py).
Invariant: an adapter adds to every layer that it names, or is refused by name before any of it is held.
Thread:    `put`, `drop` and `begin`: the one that runs the model. `prepare`: any.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from replicas.config import AdapterLimits
from replicas.errors import InvalidAdapter
from replicas.kernels.adapters.low_rank import LowRankKernel, Packed, StepRows, together
from replicas.kernels.adapters.on_gpu import TorchLowRank
from replicas.kernels.team import team
from replicas.layers.layer import full_name
from replicas.layers.linear import Linear, Pair

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PutAdapter:
    """An order to every rank: hold its share of an adapter."""

    identity: str
    rank: int
    pairs: Mapping[str, tuple[Floats, Floats]]  # whole, as `AdapterWeights` of checkpoints/adapters.py has them


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """An order to every rank: forget an adapter that no step has any more."""

    identity: str


AdapterOrder = PutAdapter | DropAdapter


@dataclass(frozen=True, slots=True, eq=False)
class RankAdapter:
    """A rank's share of an adapter, as its kernels read it."""

    identity: str
    rank: int
    parts: Mapping[str, "Packed | Sequence[Pair | None]"]  # by product
    num_bytes: int  # of the parts


class AdapterBank:
    """The adapters on one rank."""

    def __init__(self, products: Mapping[str, Linear], device: torch.device, limits: AdapterLimits) -> None:
        """``products``: those that adapters can add to, by their names in the checkpoint."""
        self._products, self._step = products, StepRows()
        self._numbers: dict[str, tuple[int, int]] = {}  # identity -> its number in steps, its rank
        self._added: dict[str, LowRankKernel | TorchLowRank] = {}
        for name, product in products.items():
            pieces = list(product.weights_here.values())
            if device.type == "cpu":
                threads, inputs = team(torch.get_num_threads()), product.matmul.shape[1]
                self._added[name] = LowRankKernel(
                    self._step, inputs, pieces, threads, max_rank=limits.max_rank, max_held=limits.max_held
                )
            else:
                self._added[name] = TorchLowRank(self._step, pieces, device)

    def run(self, order: AdapterOrder) -> None:
        """Run this rank's part of an order. What rank 0 could prepare, this rank can."""
        if isinstance(order, DropAdapter):
            self.drop(order.identity)
        else:
            self.put(self.prepare(order))

    def prepare(self, order: PutAdapter) -> RankAdapter:
        """Cut this rank's share of an adapter, and bring it into the form of the kernels.

        Raises: InvalidAdapter that names a layer that adapters cannot change here, or have in another shape.
        """
        left = {name: (torch.from_numpy(a), torch.from_numpy(b)) for name, (a, b) in order.pairs.items()}
        parts: dict[str, Packed | Sequence[Pair | None]] = {}
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
                parts[name] = self._added[name].pack(cut)
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
        num_bytes = _num_bytes(parts.values())
        packed = {name: part for name, part in parts.items() if isinstance(part, Packed)}
        parts |= dict(zip(packed, together(list(packed.values())), strict=True))
        return RankAdapter(order.identity, order.rank, parts, num_bytes)

    def put(self, adapter: RankAdapter) -> None:
        """Hold an adapter for the steps that follow."""
        taken = {number for number, _ in self._numbers.values()}
        number = next(number for number in itertools.count() if number not in taken)
        self._numbers[adapter.identity] = number, adapter.rank
        for name, product in self._products.items():
            product.added = self._added[name]
        for name, part in adapter.parts.items():
            self._added[name].put(number, part)  # type: ignore[arg-type]  # its own `pack` made it

    def drop(self, identity: str) -> None:
        number, _ = self._numbers.pop(identity)
        for added in self._added.values():
            added.drop(number)

    def begin(self, adapters: Sequence[str], lengths: Sequence[int]) -> None:
        """Let the next step have rows of ``adapters``, ``lengths`` of each, one behind the other; "": of none."""
        runs: list[tuple[int, int, int]] = []
        first = most = 0
        for identity, group in itertools.groupby(zip(adapters, lengths, strict=True), key=lambda each: each[0]):
            rows = sum(length for _, length in group)
            if identity:
                number, rank = self._numbers[identity]
                runs.append((first, rows, number))
                most = max(most, rank)
            first += rows
        self._step.set(runs, most)


def _num_bytes(parts: Iterable[Packed | Sequence[Pair | None]]) -> int:
    arrays: list[Floats | torch.Tensor] = []
    for part in parts:
        arrays += part.panels if isinstance(part, Packed) else itertools.chain(*filter(None, part))
    return sum(each.nbytes for each in arrays)
