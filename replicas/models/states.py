"""Recurrent states: modules of Transformers that keep one (gated delta rule, state space, short convolution) run on the
states of our requests.

Owns:      how such a module is told what it kept of each request of a packed step, and what it keeps then.
Never:     computes a recurrence: the module's own code does, or our kernels in it (models/own_parts.py), on all of a
           step's requests at once. Holds no memory of states (memory/state_pool.py does).
Invariant: a module without our kernels sees the tokens of one request alone, behind that request's state; requests with
           one token each are seen together, as a batch. A module that would begin at zero behind a state when it is
           given several tokens (Mamba's scan) is given them one by one.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from replicas.attention.base import BatchMeta
from replicas.config import StateLayer, StateTensor
from replicas.memory.state_pool import Segment, StatePool
from replicas.models.own_parts import DeltaRule

log = logging.getLogger(__name__)

CACHES = ("cache_params", "past_key_values")  # the argument that takes Transformers' cache
Kind = Literal["conv", "recurrent", "linear"]
Named = Mapping[str, Any]


class _OwnCache(Cache):  # type: ignore[misc]
    """Transformers' cache as one module sees it: a layer that holds the states of the texts of its batch."""

    def __init__(self, layer: StateLayer, tensors: Sequence[Tensor], *, behind: bool) -> None:
        """``tensors`` [B, *shape] each, which the module's updates go into; ``behind``: they hold a state."""
        self._linear, self._behind = {}, behind
        kept = LinearAttentionLayer(1 + max(tensor.number for tensor in layer.tensors))
        for told, tensor in zip(layer.tensors, tensors, strict=True):
            if told.kind == "linear":
                self._linear[layer.layer] = tensor
                continue
            of_kind = kept.conv_states if told.kind == "conv" else kept.recurrent_states
            made = kept.is_conv_states_initialized if told.kind == "conv" else kept.is_recurrent_states_initialized
            of_kind[told.number], made[told.number] = tensor, True
            kept.has_previous_state[told.number] = behind
            if told.kind == "conv":
                kept.conv_kernel_size[told.number] = tensor.shape[-1]
        kept.dtype, kept.device = tensors[0].dtype, tensors[0].device
        super().__init__(layers=[kept] * (layer.layer + 1))

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for its one state."""
        return self._linear[layer_idx] if self._behind else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep MiniMax's state."""
        self._linear[layer_idx].copy_(linear_cache)


@dataclass(slots=True, eq=False)
class _Step:
    """The requests of one step: those that run alone, and those with one token behind a state, which run together."""

    alone: list[Segment]
    tokens: Tensor | None = None  # [B] the packed tokens of those that run together; None: all of the step
    reads: Tensor | None = None  # [B] their places; None: none run together
    writes: Tensor | None = None
    order: Tensor | None = None  # [T] where each packed token's result stands; None: in order


class ServedStates:
    """The modules of a served model that keep a state, and the pool of what they keep."""

    def __init__(self, module: PreTrainedModel, layers: Sequence[StateLayer], dtype: torch.dtype) -> None:
        """Put ourselves before the modules' forward. ``dtype``: of activations."""
        self._kept = [
            (tensor.shape, torch.float32 if tensor.exact else dtype) for layer in layers for tensor in layer.tensors
        ]
        self._device = next(module.parameters()).device
        self.pool: StatePool | None = None  # made in the first step, which knows the rows
        self.step = _Step([])
        self.segments = torch.empty(0)  # of the step [N, 4] int64, for our kernels
        self._by_modules, first = False, 0
        self._turned: list[int] = []  # the tensors that our kernels keep the other way round, by number
        own = self._device.type == "cpu" and dtype == torch.float32
        for layer in layers:
            part = module.get_submodule(layer.module)
            rule = DeltaRule(part, layer) if own and DeltaRule.fits(part, layer) else None
            self._by_modules |= rule is None
            if rule is not None:
                self._turned.append(first + rule.conv)
            part.forward = _Mixer(self, layer, slice(first, first + len(layer.tensors)), part.forward, rule)
            first += len(layer.tensors)

    def begin(self, meta: BatchMeta) -> None:
        """Find the states of a step's requests. Raises: RuntimeError where one is not there."""
        kept = meta.snapshots
        if self.pool is None:
            of_rows = {} if kept is None else {"places": kept.places, "page_size": kept.page_size, "pages": kept.pages}
            self.pool = StatePool(self._kept, len(meta.table), self._device, **of_rows)  # type: ignore[arg-type]
            for number in self._turned:  # in memory; a state is read as a module keeps it
                tensor = self.pool.tensors[number]
                self.pool.tensors[number] = tensor.view(len(tensor), *tensor.shape[:0:-1]).transpose(1, 2)
        if kept is not None:
            self.pool.copy(kept.copies)
        bounds, seq_lens = (lengths.tolist() for lengths in meta.on_host())
        segments = self.pool.begin(meta.rows.tolist(), bounds, seq_lens, meta.out_slots)
        places = [(each.start, each.end, -1 if each.read is None else each.read, each.write) for each in segments]
        self.segments = torch.tensor(places, dtype=torch.int64)
        if self._by_modules:
            self.step = self._by_request(segments)

    def _by_request(self, segments: Sequence[Segment]) -> _Step:
        """Part the requests of a step into those that run alone and those that run together."""
        joint = [each for each in segments if each.read is not None and each.end - each.start == 1 and not each.is_part]
        if len(joint) < 2:
            return _Step(list(segments))
        alone = [each for each in segments if each not in joint]
        reads = self._upload([each.read for each in joint if each.read is not None])
        writes = self._upload([each.write for each in joint])
        if not alone:
            return _Step([], None, reads, writes)
        tokens = [each.start for each in joint]
        found = [token for each in alone for token in range(each.start, each.end)] + tokens
        order = None if found == sorted(found) else self._upload(found).argsort()
        return _Step(alone, self._upload(tokens), reads, writes, order)

    def _upload(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def end(self) -> None:
        """Keep what the step has made; not called where it fails."""
        assert self.pool is not None
        self.pool.end()


class _Mixer:
    """The forward pass of one module: its own, on each request of the step, or with our kernels on all of them."""

    def __init__(
        self, states: ServedStates, layer: StateLayer, which: slice, forward: Callable[..., Any], rule: DeltaRule | None
    ) -> None:
        self._states, self._layer, self._which, self._forward, self._rule = states, layer, which, forward, rule
        self._names = list(inspect.signature(forward).parameters)
        self._cache = cache_argument(forward)

    def __call__(self, *given: Any, **named: Any) -> Any:
        named |= dict(zip(self._names, given, strict=False))
        step, pool = self._states.step, self._states.pool
        assert pool is not None
        tensors, num_tokens = pool.tensors[self._which], num_tokens_of(named)
        if self._rule is not None:
            return self._rule(tensors, self._states.segments, {**named, self._cache: None})
        made = [
            self._run_alone(_between(named, num_tokens, part.start, part.end), part, tensors) for part in step.alone
        ]
        if step.reads is not None and step.writes is not None:
            batch = cut(named, num_tokens, lambda x: _rows(x, step.tokens).transpose(0, 1))
            held = [tensor.index_select(0, step.reads) for tensor in tensors]
            out = self._run(batch, held, behind=True)
            for tensor, state in zip(tensors, held, strict=True):
                tensor.index_copy_(0, step.writes, state)
            made.append(each_tensor(out, lambda x: x.transpose(0, 1) if x.dim() > 1 and x.shape[1] == 1 else x))
        return _joined(made, step.order)

    def _run_alone(self, named: Named, part: Segment, tensors: Sequence[Tensor]) -> Any:
        """Run the tokens of one request, all at once where the module can."""
        states, count = [tensor[part.write : part.write + 1] for tensor in tensors], part.end - part.start
        if part.read is None:
            return self._run(named, states, behind=False)
        for tensor, state in zip(tensors, states, strict=True):
            state.copy_(tensor[part.read : part.read + 1])
        if self._layer.whole or count == 1:
            return self._run(named, states, behind=True)
        singles = (_between(named, count, at, at + 1) for at in range(count))
        return _joined([self._run(single, states, behind=True) for single in singles], None)

    def _run(self, named: Named, states: Sequence[Tensor], *, behind: bool) -> Any:
        return self._forward(**{**named, self._cache: _OwnCache(self._layer, states, behind=behind)})


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which a module takes Transformers' cache; "" where it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in names), "")


def num_tokens_of(named: Named) -> int:
    """Count the packed tokens: the module's first tensor is [1, T, hidden]."""
    return next(value.shape[1] for value in named.values() if isinstance(value, Tensor) and value.dim() == 3)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors of a value, which may be a tuple of them."""
    if isinstance(value, Tensor):
        return change(value)
    return tuple(each_tensor(each, change) for each in value) if isinstance(value, tuple | list) else value


def cut(named: Named, num_tokens: int, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Change those tensors among a module's arguments that have something for each token: [1, T, ...]."""

    def of_tokens(x: Tensor) -> Tensor:
        return change(x) if x.dim() > 1 and x.shape[:2] == (1, num_tokens) else x

    return {name: each_tensor(value, of_tokens) for name, value in named.items()}


def _between(named: Named, num_tokens: int, start: int, end: int) -> dict[str, Any]:
    """Cut the tokens [start, end) out of a module's arguments."""
    return cut(named, num_tokens, lambda x: x[:, start:end])


def _rows(x: Tensor, tokens: Tensor | None) -> Tensor:
    return x if tokens is None else x.index_select(1, tokens)


def _joined(parts: Sequence[Any], order: Tensor | None) -> Any:
    """Join what a module returned for parts of the tokens; what is not of the tokens is the last part's."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tuple):
        return tuple(_joined(each, order) for each in zip(*parts, strict=True))
    if not isinstance(parts[0], Tensor) or any(x.dim() < 3 or x.shape[0] != 1 for x in parts):
        return parts[-1]
    joined = torch.cat(list(parts), dim=1)
    return joined if order is None else joined.index_select(1, order)


class _Asked(Cache):  # type: ignore[misc]
    """Transformers' cache in a model that is outlined: writes down what its modules keep beside K and V."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.running: list[str] = []  # modules that take a cache, the innermost last
        self.told: dict[str, dict[tuple[Kind, int], tuple[tuple[int, ...], torch.dtype]]] = {}  # by module
        self.layers_of: dict[str, set[int]] = {}
        self.index_dims: dict[str, int] = {}  # by module: numbers of the key that it keeps of a token
        self.named: dict[str, dict[str, Any]] = {}  # the arguments of a module's call

    def _note(self, kind: Kind, layer: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        module = self.running[-1]
        self.told.setdefault(module, {})[kind, number] = shape, dtype
        self.layers_of.setdefault(module, set()).add(layer)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for its one state: there is none yet."""
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any) -> Tensor:
        size = named.get("conv_kernel_size") or conv_states.shape[-1]
        self._note("conv", layer_idx, state_idx, (*conv_states.shape[1:-1], size), conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._note("recurrent", layer_idx, state_idx, tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Note MiniMax's state."""
        self._note("linear", layer_idx, 0, tuple(linear_cache.shape[1:]), linear_cache.dtype)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Note the keys of an index (models/indexes.py)."""
        self.index_dims[self.running[-1]] = indexer_key_states.shape[-1]
        return indexer_key_states

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """K and V are the attention function's to keep."""
        return key_states, value_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def layers_with_states(cache: DynamicCache) -> set[int]:
    """Return the numbers of the layers that keep a state, as Transformers' cache of the model has them."""
    return {number for number, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


@contextlib.contextmanager
def asking(model: PreTrainedModel) -> Iterator[_Asked]:
    """Give the modules of an outlined ``model`` a cache that writes down what they ask of it."""
    asked, hooks = _Asked(), []
    for name, part in model.named_modules():
        argument = "" if isinstance(part, PreTrainedModel) else cache_argument(part.forward)
        if argument:
            hooks += _watched(asked, name, part, argument)
    try:
        yield asked
    finally:
        for hook in hooks:
            hook.remove()


def _watched(asked: _Asked, name: str, part: nn.Module, argument: str) -> list[Any]:
    names = list(inspect.signature(part.forward).parameters)

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked.running.append(name)
        asked.named[name] = named = named | dict(zip(names, given, strict=False)) | {argument: asked}
        return (), named

    def after(*_: Any) -> None:
        asked.running.pop()

    return [part.register_forward_pre_hook(before, with_kwargs=True), part.register_forward_hook(after)]


def told_states(model: PreTrainedModel, asked: _Asked) -> tuple[StateLayer, ...]:
    """Return what the modules of an outlined ``model`` keep, in order of their calls."""
    assert all(len(numbers) == 1 for numbers in asked.layers_of.values()), "a module keeps the states of one layer"
    found, whole = [], dict[type[nn.Module], bool]()
    for module, states in asked.told.items():
        part, (number,) = model.get_submodule(module), asked.layers_of[module]
        tensors = tuple(
            StateTensor(kind=kind, number=index, shape=shape, exact=dtype == torch.float32)
            for (kind, index), (shape, dtype) in states.items()
        )
        layer = StateLayer(module=module, layer=number, tensors=tensors, whole=True)
        if type(part) not in whole:
            dtypes = [dtype for _, dtype in states.values()]
            whole[type(part)] = _goes_on_whole(part, layer, asked.named[module], dtypes)
        found.append(replace(layer, whole=whole[type(part)]))
    return tuple(found)


def _goes_on_whole(part: nn.Module, layer: StateLayer, named: Named, dtypes: Sequence[torch.dtype]) -> bool:
    """Tell whether what a module makes of several tokens depends on each of its states, by derivatives.

    Transformers' scan of Mamba begins at zero behind a state, without a word; no test below two chunks would see it.
    """
    return all(_depends(part, layer, named, dtypes, which) for which in range(len(dtypes)))


def _depends(part: nn.Module, layer: StateLayer, named: Named, dtypes: Sequence[torch.dtype], which: int) -> bool:
    held = [
        torch.zeros(1, *tensor.shape, dtype=dtype, device="meta")
        for tensor, dtype in zip(layer.tensors, dtypes, strict=True)
    ]
    with torch.enable_grad(), forward_ad.dual_level():
        held[which] = forward_ad.make_dual(held[which], torch.zeros_like(held[which]))  # type: ignore[no-untyped-call]
        try:
            out = part.forward(**{**named, cache_argument(part.forward): _OwnCache(layer, held, behind=True)})
        except (RuntimeError, NotImplementedError) as error:
            log.debug("%s: one token at a time behind a state, %s", layer.module, error)
            return False
        results = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        return any(
            forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
            for x in results
        )
