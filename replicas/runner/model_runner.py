"""Runs plans on one rank's device: weights, KV pool, attention backend, and the forward pass.

Owns:      the rank's weights, its KV pool and its copy of the ReqToTokenPool.
Never:     schedules, or knows a request; it sees rows, slots and tokens.
Invariant: K/V of a chunk is in the pool of every rank when the step's result is ready: it may be sent to a peer next.
           On a CPU, and on ranks above 0, it is there when `forward` returns; rank 0 on a GPU may have to wait.
           All ranks have pools of equal size (the minimum over ranks, SPEC A04) and run equal plans in equal order.
Thread:    the engine thread on rank 0; the worker's main thread on other ranks.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import (
    AttentionBackend,
    AttentionSpec,
    BatchMeta,
    ChoosingAttention,
    HeadTurn,
    RotatingAttention,
    SnapshotStep,
)
from replicas.attention.choice import AttentionApart, make_attention
from replicas.attention.page_lists import to_device
from replicas.attention.workspace import num_sms
from replicas.config import AttentionChoice, EngineConfig
from replicas.errors import InvalidConfig
from replicas.kernels import gpu
from replicas.kernels.adapters import low_rank
from replicas.layers.adapters import AdapterBank
from replicas.layers.layer import computes_in
from replicas.layers.tp_group import TpGroup
from replicas.loading.device import bytes_once_free, device_bytes, free_device_bytes
from replicas.loading.model_files import load_model_config
from replicas.loading.weights import load_weights, weight_bytes
from replicas.memory import sizing
from replicas.memory.allocator import ROW_SLACK, len_with_carried
from replicas.memory.kv_scales import checkpoint_scales
from replicas.memory.pool import MHATokenToKVPool, zeros
from replicas.memory.scaled_pool import Fp8KVPool, kv_pool
from replicas.memory.state_pool import StatePool
from replicas.models.llama import Llama
from replicas.models.registry import model_class
from replicas.runner import batch as batches
from replicas.runner import set_aside
from replicas.runner.batch import PendingTokens, Staging, within_memory
from replicas.runner.graphs import DecodeGraphs, GraphAttention
from replicas.runner.sampler import DevicePromptLogprobs, Sampler
from replicas.runner.warm_up import run_largest_step
from replicas.scheduler.plan import (
    DecodePlan,
    DoneStep,
    ExtendPlan,
    FailedStep,
    PendingStep,
    SampleRow,
    StepPlan,
    StepResult,
    idle_decode,
    idle_extend,
)
from replicas.types import TokenIds

log = logging.getLogger(__name__)


class ModelRunner:
    """The model on one rank: loads it, sizes and allocates the pools, runs steps (order of SPEC A03)."""

    def __init__(self, config: EngineConfig, tp: TpGroup) -> None:
        torch.set_num_threads(config.num_threads)
        torch.set_grad_enabled(False)
        self._config = config
        self.tp = tp
        self.device = tp.device
        memory, held_before = self._memory(), self._held_bytes()
        self._reserve_bytes = int(memory * (1.0 - config.cache.mem_fraction_static))
        self._reserve_bytes += set_aside.bytes_for_logits(config, tp.size)
        if config.model.moe is not None and self.device.type == "cuda" and gpu.kernels() is None:
            raise InvalidConfig(
                "on a GPU experts need Triton, which cannot be used here (the log says why): install a C compiler and "
                "Python's headers (gcc, python3-dev), or serve on CPUs (replicas.gpus: 0)"
            )
        if config.model.quantization == "fp8":
            from replicas.kernels.experts import fp8

            if (reason := fp8.why_not(self.device)) is not None:
                raise InvalidConfig(f"model.quantization: fp8 needs {reason}: leave it out")
        self._attention = _LateAttention()
        started_s = time.monotonic()
        self._model = model_class(config.model)(config.model, tp, self._attention)
        load_weights(self._model, config.model, tp, one_order=config.one_order)
        self.weight_bytes = weight_bytes(self._model)
        load_s = time.monotonic() - started_s
        log.info("weights: %.0f MiB in %.1f s", self.weight_bytes / 2**20, load_s)
        channels = self._label_channels()
        self.pool_size = self._size_pool(memory, max(self.weight_bytes, self._held_bytes() - held_before), channels)
        self.max_running = sizing.max_running_requests(
            self.pool_size.num_tokens, config.model.context_len, config.scheduler.max_running_requests
        )
        try:
            self.pools = self._make_pools(channels)  # of K and V on this rank; the second of window layers, if any
        except torch.OutOfMemoryError as error:
            raise InvalidConfig(
                f"the KV pool of {self.pool_size.describe()} does not fit on {self.device}, of which "
                f"{free_device_bytes(self.device) >> 20:,} MiB are free: lower cache.mem_fraction_static "
                f"({config.cache.mem_fraction_static:g}) or set cache.device_memory_bytes"
            ) from error
        self.table = self._make_table()
        self._attention.backend, self.attention_choice = self._make_attention()
        self._sampler = Sampler(config.model.vocab_size, self.device)
        # of the step launched last: its tokens [S], or the step itself while it waits for masks; rank 0 only
        self._sampled: Tensor | LateSampling | None = None
        self._samples_on_device = self.device.type == "cuda" and gpu.kernels() is not None  # the host goes on meanwhile
        self._staging = Staging(self.device)
        self._graphs: DecodeGraphs | None = None
        self.start_times = {"load_weights": load_s, "warm_up": self._warm_up()}  # s, by phase

    @property
    def attention(self) -> AttentionBackend:
        """The backend that runs this rank's attention."""
        return self._attention.ready

    @property
    def pool(self) -> MHATokenToKVPool:
        """The pool whose pages requests hold."""
        return self.pools[0]

    @property
    def states(self) -> StatePool | None:
        """What the model keeps of requests beside K and V; None of a model that keeps nothing."""
        return None if isinstance(self._model, Llama) else self._model.states

    @functools.cached_property
    def adapters(self) -> AdapterBank:
        """The adapters on this rank, where any are served; on a CPU asked for when the first is loaded."""
        assert self._config.adapters is not None
        products = self._model.adaptable() if isinstance(self._model, Llama) else {}
        return AdapterBank(products, self.device, self._config.adapters, self._staging.upload)

    @property
    def _adapts_on_gpu(self) -> bool:
        return self._config.adapters is not None and self.device.type == "cuda" and gpu.kernels() is not None

    def _begin_adapters(self, plan: StepPlan, graph_rows: int | None) -> bool:
        """Say which rows of the step have which adapter. Returns: whether any has. ``graph_rows``: of the graph that
        runs it; None: none does."""
        if isinstance(plan, DecodePlan):
            adapters, lengths = plan.adapters, [1] * len(plan.adapters)
        else:
            adapters = tuple(row.adapter for row in plan.rows)
            lengths = [len(row.token_ids) for row in plan.rows]
        has_any = any(adapters)
        if has_any or "adapters" in self.__dict__:
            self.adapters.begin(adapters, lengths, graph_rows)
        return has_any

    def forward(self, plan: StepPlan, *, warms: bool = False) -> tuple[Tensor, batches.DeviceBatch]:
        """Run a step. Returns: logits [S, V] fp32 of the wanted rows, [S, 0] on ranks above 0, and the batch.
        ``warms``: with the kernels of adapters on a GPU, though no row has one."""
        graph_rows = None if self._graphs is None else self._graphs.size_of(plan)
        adapted = self._begin_adapters(plan, graph_rows)
        if warms and self._adapts_on_gpu:
            self.adapters.begin_idle()
        if self._graphs is not None and graph_rows is not None and isinstance(plan, DecodePlan):
            batch = self._graphs.fill(plan, self._followed(plan))
            return self._graphs.replay(batch, len(plan.rows), adapted=adapted), batch
        batch = batches.build(plan, self.table, self._staging, self._followed(plan))
        self._share_followed(plan, batch)
        if isinstance(plan, ExtendPlan) and any(row.pooling is not None and row.pooling.method for row in plan.rows):
            assert isinstance(self._model, Llama), "`Intake.check` refuses others"
            batch.hidden = self._model.hidden(batch.input_ids, batch.meta)
            logits = self._model.head(batch.hidden if batch.logits_rows is None else batch.hidden[batch.logits_rows])
        else:
            logits = self._model.forward(batch.input_ids, batch.meta, batch.logits_rows)
        if isinstance(plan, ExtendPlan) and self.device.type == "cuda" and self.tp.rank > 0:
            # Kernels may still run, and the sender of pages knows no stream. Each rank waits for its own kernels. Rank
            # 0, which releases the pages, waits for its result, and for the others in the last collective.
            torch.cuda.current_stream(self.device).synchronize()
        return logits, batch

    def between_layers(self, call: Callable[[], None]) -> None:
        """Call ``call`` on this thread while a step computes, before the attention of each layer without an index."""
        self._attention.between_layers = call

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step and its sampling; rank 0 only. The next plan may be launched before this one's result is known,
        and follow it (`DecodePlan.follows`). On a CPU the step is over when this returns, unless it follows and has
        constrained rows: their masks need the tokens of the step before, so it is sampled at the next launch, or when
        its result is asked for."""
        if isinstance(self._sampled, LateSampling):
            self._sampled.sample()
        return within_memory(lambda: self._launch(plan), self._does_not_fit)

    def _launch(self, plan: StepPlan) -> PendingStep:
        logits, batch = self.forward(plan)
        if isinstance(plan, DecodePlan) and plan.follows is not None and any(row.mask for row in plan.sampling):
            self._sampled = late = LateSampling(self, plan, logits, batch)
            return late
        return self._sample(plan, logits, batch)

    def sample_late(self, step: "LateSampling") -> PendingStep:
        """Sample ``step``, whose masks are known now."""
        assert step is self._sampled, "steps are sampled in the order of their launch"
        return within_memory(lambda: self._sample(step.plan, step.logits, step.batch), self._does_not_fit)

    @property
    def _does_not_fit(self) -> str:
        return (
            f"a step did not fit into the memory of {self.device}: try again later; where this happens often, lower "
            f"cache.mem_fraction_static ({self._config.cache.mem_fraction_static:g})"
        )

    def _sample(self, plan: StepPlan, logits: Tensor, batch: batches.DeviceBatch) -> PendingStep:
        """Start the sampling of a step whose forward was launched. On a GPU nothing waits for it, but where tokens
        cannot be drawn there."""
        wanted = logits
        if len(batch.sample_rows) != len(logits):
            wanted = logits[to_device(np.array(batch.sample_rows, np.int64), self.device)]
        pooled = None
        if isinstance(plan, ExtendPlan) and any(row.pooling is not None for row in plan.rows):
            pooled = self._sampler.pooler.read(plan, batch.hidden, wanted)
        targets = _targets(logits, plan, batch) if isinstance(plan, ExtendPlan) else {}
        if self._samples_on_device or (self.device.type == "cuda" and not plan.sampling):
            last_ids = batch.input_ids if isinstance(plan, DecodePlan) else None
            tokens, on_device = self._sampler.sample_on_device(wanted, plan.sampling, last_ids)
            self._sampled = tokens
            prompts = {index: DevicePromptLogprobs.of(*target) for index, target in targets.items()}
            return PendingTokens(tokens, on_device, prompts, pooled)
        made = {index: self._sampler.prompt_logprobs(*target) for index, target in targets.items()}
        if not plan.sampling:
            return DoneStep(StepResult(token_ids=np.empty(0, dtype=np.int32), prompt_logprobs=made))
        token_ids, logprobs = self._sampler.sample(wanted, _completed(plan, batch))
        if pooled is not None:
            logprobs = pooled.told(logprobs, pooled.tensors)
        self._sampled = torch.from_numpy(token_ids).to(self.device)
        return DoneStep(StepResult(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=made))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step and sample; rank 0 only."""
        return self.launch(plan).result()

    def close(self) -> None:
        """Drop the graphs, whose collectives NCCL must not free before."""
        self._graphs = None

    def _followed(self, plan: StepPlan) -> Tensor | None:
        """Return the tokens [S] of the last step, which ``plan`` follows; None where it follows none, or they are rank
        0's."""
        if not isinstance(plan, DecodePlan) or plan.follows is None or self.tp.rank:
            return None
        assert isinstance(self._sampled, Tensor), "a plan follows a step, but no step has sampled yet"
        return self._sampled

    def _share_followed(self, plan: StepPlan, batch: batches.DeviceBatch) -> None:
        """Give the input ids of a step that follows another from rank 0 to every rank."""
        if isinstance(plan, DecodePlan) and plan.follows is not None:
            self.tp.broadcast(batch.input_ids[: len(plan.follows)])

    def _memory(self) -> int:
        """Count the bytes of the device that this rank may use: its part of the budget, or on a GPU all of it."""
        cache = self._config.cache
        budget = None if cache.device_memory_bytes is None else cache.device_memory_bytes // self.tp.size
        if self.device.type == "cuda":
            total = device_bytes(self.device)[1]
            wanted = int(total * cache.mem_fraction_static) if budget is None else budget
            # with a cap the pool may fit beside what is taken
            free, _ = bytes_once_free(self.device, 0 if cache.max_total_tokens is not None else wanted)
            return sizing.rank_memory(total, free, budget, cache.mem_fraction_static)
        assert budget is not None
        return budget

    def _held_bytes(self) -> int:
        """Count the bytes of a GPU that tensors of this process take."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _size_pool(self, memory: int, weights: int, channels: Tensor | None = None) -> sizing.PoolSize:
        config, cache = self._config, self._config.cache
        taken = weights + set_aside.bytes_for_graphs(config) + set_aside.bytes_for_adapters(config, self.tp.size)
        taken += set_aside.bytes_for_attention(config, self.tp.size, num_sms=num_sms(self.device))
        taken += set_aside.bytes_for_logits(config, self.tp.size)
        kv_bytes = self.tp.min_int(sizing.kv_bytes(memory, taken, cache.mem_fraction_static))
        cell_bytes = config.model.kv_cell_bytes(tp=self.tp.size, kv_dtype=config.kv_dtype)
        if channels is not None:
            cell_bytes += channels.numel() * torch.float32.itemsize  # a token's labels
        cap = sizing.token_cap(config)
        kv_bytes = sizing.beside_states(kv_bytes, config) - set_aside.bytes_for_table(config, kv_bytes, cell_bytes)
        size = sizing.pool_size(kv_bytes, cell_bytes, cache.page_size, cap)
        return sizing.with_snapshots(config, sizing.with_windows(config, size, kv_bytes), kv_bytes)

    def _capture_graphs(self) -> None:
        """Record decode steps, if the device, and on every rank the attention backend and the group, can."""
        rows, attention = set_aside.graph_rows(self._config), self.attention
        if not rows:
            return
        reason = self.tp.why_not_captured and f"the ranks' group {self.tp.why_not_captured}"
        if not isinstance(attention, GraphAttention):
            reason = f"attention {self.attention_choice.name} cannot be captured"
        if not self.tp.min_int(reason is None) or not isinstance(attention, GraphAttention):
            log.info("CUDA graphs: none, %s", reason or "another rank has none: its log says why")
            return
        graphs = DecodeGraphs(
            attention,
            self.table,
            self._staging,
            max_rows=rows,
            vocab_size=0 if self.tp.rank else self._config.model.vocab_size,
        )
        begin: dict[bool, Callable[[int], None]] = {False: lambda size: None}
        if self._adapts_on_gpu:
            bank = self.adapters
            begin = {False: lambda size: bank.begin((), ()), True: bank.begin_idle}
        graphs.capture(self._forward_begun, self.tp, begin)
        self._graphs = graphs

    def _forward_begun(self, batch: batches.DeviceBatch) -> Tensor:
        """Run the forward pass of a step that attention has begun already."""
        self._attention.begun = batch.meta
        return self._model.forward(batch.input_ids, batch.meta, None)

    def _label_channels(self) -> Tensor | None:
        """Return the channels [L, K, C] of this rank's heads, for attention by labels; else None."""
        if self._config.cache.label_channels is None:
            return None
        from replicas.memory.sparse_pool import rank_channels

        return rank_channels(self._config, self.tp.rank)

    def _make_table(self) -> batches.DeviceTable:
        config, size, apart = self._config, self.pool_size, None
        positions = len_with_carried(config.model.context_len, size.page_size, config.carried)
        rows, row_len = self.max_running + 1, positions + ROW_SLACK
        if size.windows is not None:
            apart = batches.WindowTable(rows, row_len, num_pages=size.num_pages, page_size=size.page_size)
        snapshots = None
        if config.model.states:
            snapshots = SnapshotStep(places=sizing.state_places(config.scheduler))
            if size.num_snapshots:
                snapshots = replace(snapshots, page_size=size.page_size, pages=self._snapshot_pages())
        return batches.DeviceTable(rows, row_len, self.device, apart, snapshots)

    def _snapshot_pages(self) -> Tensor:
        """Return what snapshots of states lie in: the pool's pages, or a memory of their own."""
        size = self.pool_size
        if size.snapshot_pages:
            return self.pool.bytes_of_pages()
        shape = (size.num_snapshots + 1, sizing.snapshot_bytes(self._config))
        return zeros(shape, torch.uint8, self.device)

    def _make_attention(self) -> tuple[AttentionBackend, AttentionChoice]:
        config = self._config
        spec = AttentionSpec(
            pool=self.pool,
            dtype=computes_in(self.device, getattr(torch, config.model.dtype)),
            num_heads=config.model.num_heads // self.tp.size,
            num_kv_heads=self.pool.num_kv_heads,
            head_dim=config.model.head_dim,
            kinds=config.model.attention_kinds,
            num_threads=config.num_threads,
            graph_rows=set_aside.graph_rows(config),
            sparse_tokens=config.cache.sparse_tokens,
        )
        if len(self.pools) == 1:
            return make_attention(config.attention, spec)
        layers = config.window_layers
        of_full, of_windows = (
            tuple(kind for kind, is_window in zip(spec.kinds, layers, strict=True) if is_window == apart)
            for apart in (False, True)
        )
        full, choice = make_attention(config.attention, replace(spec, kinds=of_full))
        windows, _ = make_attention(choice.name, replace(spec, pool=self.pools[1], kinds=of_windows))
        return AttentionApart(full, windows, layers), choice

    def _make_pools(self, channels: Tensor | None) -> list[MHATokenToKVPool]:
        model, windows = self._config.model, self.pool_size.windows
        if channels is not None:
            from replicas.memory.sparse_pool import DoubleSparseTokenToKVPool

            dtype, size = getattr(torch, self._config.kv_dtype), self.pool_size
            labelled = DoubleSparseTokenToKVPool(
                size.num_pages, size.page_size, channels, model.head_dim, dtype, self.device
            )
            return [labelled]
        make = functools.partial(
            kv_pool,
            self._config.kv_dtype,
            page_size=self.pool_size.page_size,
            num_kv_heads=max(1, model.num_kv_heads // self.tp.size),
            head_dim=model.head_dim,
            device=self.device,
            latent=None if model.mla is None else (model.mla.kv_lora_rank, model.mla.qk_rope_head_dim),
        )
        apart = sum(self._config.window_layers) if windows is not None else 0
        pool = make(num_pages=self.pool_size.num_pages, num_layers=model.kept_layers - apart)
        if isinstance(pool, Fp8KVPool):
            pool.layer_scales = checkpoint_scales(Path(model.path), model.num_layers)
        return [pool] if windows is None else [pool, make(num_pages=windows.num_pages, num_layers=apart)]

    def _warm_up(self) -> float:
        """Compile and touch everything that would delay the first request; writes only to the dummy page 0.

        Returns: its duration in s.
        """
        started_s = time.monotonic()
        forward = functools.partial(self.forward, warms=True)
        if self._config.adapters is not None and self.device.type == "cpu":
            for kernel in (low_rank.shrink, low_rank.expand):
                assert kernel.address  # compile now, not in the first request with an adapter
        forward(idle_extend(self.max_running, 2))
        logits, _ = forward(idle_decode(1, row=self.max_running, seq_len=2))
        if self.tp.rank == 0:
            self._sampler.warm_up(logits, on_device=self._samples_on_device)
        self._capture_graphs()
        if self.device.type == "cuda":
            run_largest_step(
                self._config, forward, row=self.max_running, device=self.device, reserve_bytes=self._reserve_bytes
            )
        warm_up_s = time.monotonic() - started_s
        log.info("warm-up: %.1f s", warm_up_s)
        return warm_up_s


class LateSampling:
    """A step whose forward was launched and which is sampled once the tokens of the step before it are taken in."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, logits: Tensor, batch: batches.DeviceBatch) -> None:
        self.plan, self.logits, self.batch = plan, logits, batch
        self._runner = runner
        self._pending: PendingStep | None = None

    def sample(self) -> PendingStep:
        """Start the sampling, unless that is done. An error is this step's, whose result raises it: the launch of the
        next one, which comes here too, goes on."""
        if self._pending is None:
            try:
                self._pending = self._runner.sample_late(self)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - `result` raises it; a panic is no Exception
                self._pending = FailedStep(error)
        return self._pending

    def result(self) -> StepResult:
        return self.sample().result()


class _LateAttention:
    """The attention backend as the model sees it: set after the pool, which is sized by what the weights leave."""

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.between_layers: Callable[[], None] = lambda: None
        self.begun: BatchMeta | None = None  # a step that graphs.py has begun

    @property
    def ready(self) -> AttentionBackend:
        assert self.backend is not None
        return self.backend

    def begin(self, batch: BatchMeta) -> None:
        if batch is not self.begun:
            self.ready.begin(batch)
        elif isinstance(self.backend, GraphAttention):
            self.backend.begin_captured(batch)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        self.between_layers()
        return self.ready.forward(layer, q, k, v, sinks)

    def set_index_keys(self, index: int, tokens: Tensor, keys: Tensor) -> None:
        assert isinstance(self.backend, ChoosingAttention)
        self.backend.set_index_keys(index, tokens, keys)

    def read_index_keys(self, index: int, request: int, num_tokens: int, dim: int) -> Tensor:
        assert isinstance(self.backend, ChoosingAttention)
        return self.backend.read_index_keys(index, request, num_tokens, dim)

    def forward_chosen(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chosen: Tensor
    ) -> Tensor:
        assert isinstance(self.backend, ChoosingAttention)
        return self.backend.forward_chosen(layer, q, k, v, sinks, chosen)

    @property
    def rotates(self) -> bool:
        return isinstance(self.backend, RotatingAttention)

    def forward_rotating(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn | None) -> Tensor:
        assert isinstance(self.backend, RotatingAttention)
        self.between_layers()
        return self.backend.forward_rotating(layer, q, k, v, turn)


def _completed(plan: StepPlan, batch: batches.DeviceBatch) -> Sequence[SampleRow]:
    """Return the rows to sample on the host, those with penalties with the tokens that a step which follows lacks."""
    if not isinstance(plan, DecodePlan) or plan.follows is None:
        return plan.sampling
    if not any(row.params.has_penalties for row in plan.sampling):
        return plan.sampling
    last = batch.input_ids[: len(plan.rows), None].cpu().numpy().astype(np.int32)  # [B, 1]
    rows = zip(plan.sampling, last, strict=True)
    return [row._replace(output_ids=np.append(row.output_ids, ids)) for row, ids in rows]


def pack_weights(path: str) -> None:
    """Write the file of packed weights of the model in folder ``path``, as the first engine on a CPU does.

    Raises: InvalidConfig for a folder that holds no such model.
    """
    config, tp = load_model_config(path, device="cpu"), TpGroup(device="cpu")
    model = model_class(config)(config, tp, _LateAttention())
    load_weights(model, config, tp, one_order=False)


def _targets(
    logits: Tensor, plan: ExtendPlan, batch: batches.DeviceBatch
) -> dict[int, tuple[Tensor, TokenIds, int]]:
    """List by row of ``plan`` the prompt tokens whose logprobs are wanted: their logits, themselves, and the number of
    alternatives."""
    found = {}
    for rows in batch.prompt_rows:
        row = plan.rows[rows.plan_row]
        assert row.target_ids is not None
        found[rows.plan_row] = logits[rows.first : rows.first + rows.count], row.target_ids, row.top_logprobs
    return found
