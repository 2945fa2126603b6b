"""Sizes of the pools at start-up: from free bytes to pages, and from tokens to request rows. Pure functions.

Owns:      the formulas of start-up sizing (SPEC A04-A09).
Never:     measures a device or talks to other ranks; the caller takes the minimum over ranks and passes it in.
Invariant: a pool of ``num_pages`` pages never needs more than the bytes it was sized from, the dummy page aside.
"""

import logging
from dataclasses import dataclass, replace

from replicas.config import (
    DTYPE_BYTES,
    LONGEST_DRAFT,
    STATE_DRAFT,
    WORTH_SPLITTING,
    Device,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    tail_pages,
)
from replicas.errors import InvalidConfig

log = logging.getLogger(__name__)

MIN_ROWS, MAX_ROWS = 2048, 4096  # of the ReqToTokenPool when max_running_requests is not given (SPEC A08)
STATE_PLACES = 3  # of each state of a running request: read, written, behind its last page (memory/state_pool.py)
SNAPSHOT_END = 8  # bytes behind the states of a snapshot, that say which one it is (memory/state_pool.py)
ROWS_PER_CONTEXT = 512  # rows for each request of full length that the pool holds
SLACK = 2  # tokens that are kept before a window: those that a step still under way sees


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPool:
    """The pool of the layers that see a window of each text alone (cache/parts.py); its dummy page 0 on top."""

    num_pages: int
    cell_bytes: int  # K and V of one token, its layers, on this rank
    reach: int  # tokens that its layers see at most, the one that sees among them
    seen_pages: int  # pages before a page's border that the token behind it sees
    request_pages: int  # most that a request sees that decodes
    step_pages: int  # most that the prompts of a step see beside that

    @staticmethod
    def of(
        num_pages: int, *, page_size: int, cell_bytes: int, reach: int, step_tokens: int, drafted: int = LONGEST_DRAFT
    ) -> "WindowPool":
        """Describe a pool of ``num_pages``, or of as many more as one request and a step of ``step_tokens`` need.
        ``drafted``: tokens of a draft at most."""
        tail, step = tail_pages(reach, page_size), -(-step_tokens // page_size)
        # it begins and ends within pages; or at the last page's border, and a draft ends within a page
        request = max(-(-(reach + SLACK + drafted) // page_size) + 1, tail + -(-(1 + drafted) // page_size))
        return WindowPool(
            num_pages=max(num_pages, request + step),
            cell_bytes=cell_bytes,
            reach=reach,
            seen_pages=tail - 1,
            request_pages=request,
            step_pages=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """One rank's KV pool. The dummy page 0 comes on top and is not counted."""

    num_pages: int
    page_size: int  # tokens
    cell_bytes: int  # K and V of one token, all layers that have them in this pool, on this rank
    windows: WindowPool | None = None  # of the other layers; None: there are none
    num_snapshots: int = 0  # of recurrent states, behind pages (cache/parts.py), that there can be at once
    snapshot_pages: int = 0  # in which each lies; 0: pages have no bytes, and snapshots have a memory of their own

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def bytes(self) -> int:
        windows = self.windows
        apart = 0 if windows is None else windows.num_pages * self.page_size * windows.cell_bytes
        return self.num_tokens * self.cell_bytes + apart

    def describe(self) -> str:
        windows = self.windows
        apart = "" if windows is None else f", of {windows.num_pages * self.page_size:,} of them windows too"
        return f"{self.num_tokens:,} tokens{apart}, {self.num_pages:,} pages, {self.bytes / 2**20:,.0f} MiB"


def kv_bytes(memory: int, weights: int, mem_fraction_static: float) -> int:
    """Count the bytes for the KV pool: the memory less the weights and a reserve for activations (SPEC A05).

    Args:   memory: bytes that a rank may use (`rank_memory`); weights: those of it that it holds for weights, and sets
            aside. Not the difference of what is free before and after: another engine on the GPU moves that.
            mem_fraction_static: share of ``memory`` for weights and KV together; the reserve is memory * (1 - it),
            elsewhere called reserve_ratio (SPEC A09).
    Raises: InvalidConfig when nothing is left.
    """
    reserve = memory * (1.0 - mem_fraction_static)
    left = int(memory - weights - reserve)
    if left <= 0:
        share = weights / max(memory, 1)
        raising = f"increase mem_fraction_static above {share:.2f}, or " if share < 1 else ""
        raise InvalidConfig(
            f"no memory is left for the KV pool: there are {_mib(memory)}, weights took {_mib(weights)}, and "
            f"mem_fraction_static = {mem_fraction_static:g} reserves {_mib(reserve)}: {raising}give the replica more "
            f"memory (cache.device_memory_bytes)"
        )
    return left


def rank_memory(total: int, free: int, budget: int | None, mem_fraction_static: float) -> int:
    """Count the bytes of a GPU that one rank may use: its ``budget``, where cache.device_memory_bytes gives one, else
    all of the GPU.

    Several engines on one GPU each take mem_fraction_static of all of it, in whatever order they start. If the share is
    more than the ``free`` bytes at the start, other processes hold memory that was not planned for; then the share is
    of the free bytes.

    Raises: InvalidConfig when a budget is given, and the GPU has not as much free.
    """
    if budget is not None:
        if budget > free:
            raise InvalidConfig(
                f"cache.device_memory_bytes gives each rank {_mib(budget)}, but of the GPU's {_mib(total)} only "
                f"{_mib(free)} are free: lower it, or end what holds the rest"
            )
        return budget
    if total * mem_fraction_static <= free:
        return total
    log.warning(
        "mem_fraction_static = %g of the GPU's %s is more than the %s that are free, so it is taken of those: if "
        "engines share this GPU, their fractions must sum to less than 1",
        mem_fraction_static, _mib(total), _mib(free),
    )  # fmt: skip
    return free


def weight_bytes(model: ModelConfig, tp: int) -> int:
    """Count the bytes of the weights on each of ``tp`` ranks, by the model's shape alone: an upper bound on a CPU,
    where an embedding that is a view of the file is not held, and of a model that Transformers runs."""
    if model.num_weights:
        return model.num_weights * DTYPE_BYTES[model.dtype]  # an upper bound: ranks hold some of them whole
    hidden, attention = model.hidden_size, model.attention_products(tp)
    mlp, vocab, moe = model.intermediate_size // tp, -(-model.vocab_size // tp), model.moe
    tables = [(vocab, hidden)] * (1 if model.tie_embeddings else 2)
    biases = model.attention_bias * attention[0][0] + model.output_bias * hidden + model.mlp_bias * (2 * mlp + hidden)
    vectors = model.num_layers * (biases + 2 * hidden + model.qk_norm * 2 * model.head_dim) + hidden
    of_products, of_tables = model.weight_number_bytes
    dense = model.num_layers if moe is None else len(moe.dense_layers)
    blocks = model.num_layers * sum(rows * row for rows, row in attention) + dense * 3 * hidden * mlp
    exact, experts = 0, 0  # bytes of what is never rounded, and numbers of the experts that are chosen
    if moe is not None:
        sparse = model.num_layers - dense
        experts = sparse * 3 * hidden * moe.num_experts * moe.intermediate_size // tp
        blocks += sparse * 3 * hidden * moe.shared_intermediate_size // tp
        exact = sparse * 4 * (moe.num_experts * (hidden + moe.score_bias + moe.biases) + moe.shared_gate * hidden)
        exact += sparse * 4 * moe.biases * moe.num_experts * (2 * moe.intermediate_size // tp + hidden)
    numbers = blocks * of_products + experts * model.expert_number_bytes + sum(n * k for n, k in tables) * of_tables
    return int(numbers) + vectors * DTYPE_BYTES[model.dtype] + exact


def state_places(scheduler: SchedulerConfig) -> int:
    """Count the places of a running request's states: with drafts, one more for each token of them."""
    return STATE_PLACES + (STATE_DRAFT if scheduler.speculation == "on" else 0)


def state_bytes(config: EngineConfig, num_rows: int) -> int:
    """Count the bytes of the recurrent states of ``num_rows`` running requests, and of the row that warms up."""
    return state_places(config.scheduler) * (num_rows + 1) * config.model.state_bytes(config.device)


def state_rows(model: ModelConfig, device: Device, left: int, most: int, *, places: int) -> int:
    """Count the requests, at most ``most``, whose states take half of the ``left`` bytes beside the weights; 1 where
    even that is too much, which `beside_states` then says."""
    return min(most, max(1, left // 2 // (places * model.state_bytes(device)) - 1))


def beside_states(left: int, config: EngineConfig) -> int:
    """Count the bytes of ``left``, of one rank beside its weights, that the states of running requests leave.

    Raises: InvalidConfig when that is none.
    """
    num_rows = config.scheduler.max_running_requests
    if not config.model.states or num_rows is None:
        return left
    taken = state_bytes(config, num_rows)
    if taken >= left:
        raise InvalidConfig(
            f"the states of {num_rows} running requests take {_mib(taken)}, {_mib(taken // (num_rows + 1))} each, and "
            f"{_mib(left)} are left beside the weights: lower scheduler.max_running_requests, or give the replica more "
            "memory (cache.device_memory_bytes)"
        )
    return left - taken


def part_bytes(config: EngineConfig, *, apart: bool) -> dict[str, int]:
    """Count what the model keeps of a text, in bytes of all ranks: "token", in layers that see all; "window", in those
    that see one alone; "state". Without what it does not keep.

    Args: apart: window layers have a pool of their own; else each of their tokens is part of "token".
    """
    model, layers = config.model, config.window_layers if apart else ()
    token = config.num_kv_parts * model.kv_cell_bytes(tp=config.parallel.tp, kv_dtype=config.kv_dtype)
    of_windows = token * sum(layers) // max(len(layers), 1)
    found = {
        "token": token - of_windows,
        "window": of_windows * model.reach,
        "state": model.state_bytes(config.device) if model.states else 0,
    }
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def group_parts(config: EngineConfig, size: PoolSize) -> dict[str, int]:
    """Count the bytes of a page by group, all ranks: "full", "window" for its part in that pool, "state" for a
    snapshot. Without the groups that ``size`` has no room for."""
    found = {"full": config.num_kv_parts * size.page_size * size.cell_bytes}
    if size.windows is not None:
        found["window"] = config.num_kv_parts * size.page_size * size.windows.cell_bytes
    elif size.num_snapshots:
        found["state"] = size.snapshot_pages * found["full"] or snapshot_bytes(config)
    return found


def snapshot_bytes(config: EngineConfig) -> int:
    """Count the bytes of a snapshot of the model's recurrent states."""
    return config.model.state_bytes(config.device) + SNAPSHOT_END


def describe_parts(config: EngineConfig, *, apart: bool) -> str:
    """Say what `part_bytes` counts, and what the states of running requests take together."""
    model, num_rows, each = config.model, config.scheduler.max_running_requests, part_bytes(config, apart=apart)
    said = [f"K and V of a token take {each['token']:,} bytes"] if "token" in each else []
    if "window" in each:
        layers = sum(config.window_layers)
        said.append(f"those of a window of {model.reach:,} tokens, in {layers} layers, {each['window']:,} bytes more")
    if "state" in each and num_rows is not None:
        taken, places = state_bytes(config, num_rows), state_places(config.scheduler)
        said.append(
            f"recurrent states of {num_rows} running requests, {each['state']:,} bytes each and {places} times, "
            f"take {_mib(taken)}"
        )
    if "state" in each and config.cache.prefix_cache == "radix":
        snapshot, page = snapshot_bytes(config), config.cache.page_size * each.get("token", 0) // config.num_kv_parts
        lost = f" in {-(-snapshot // page):,} pages, of which {-snapshot % page:,} bytes are not used" if page else ""
        said.append(f"a snapshot of a state takes {snapshot:,} bytes{lost}")
    return "; ".join(said)


def token_cap(config: EngineConfig) -> int | None:
    """Return the most tokens that the pool may hold: the user's cap; without K and V, where a page takes no bytes, at
    most as many as may run."""
    cap, num_rows = config.cache.max_total_tokens, config.scheduler.max_running_requests
    if config.model.num_layers or num_rows is None:
        return cap
    pages = num_rows * -(-config.model.context_len // config.cache.page_size)
    most = pages * config.cache.page_size
    return most if cap is None else min(cap, most)


def pool_tokens(kv_bytes: int, cell_bytes: int, page_size: int, max_total_tokens: int | None) -> int:
    """Count the tokens that fit, at most ``max_total_tokens``, in whole pages (SPEC A06, A07; K1: a cap of 0 is a cap).

    Args:   kv_bytes: the least over all ranks, so that equal pools come out everywhere (SPEC A04).
            max_total_tokens: the user's cap; warns when it is larger than what fits. All that fit where
            ``cell_bytes`` is 0.
    Raises: InvalidConfig when not even one page fits.
    """
    profiled = kv_bytes // cell_bytes if cell_bytes else max_total_tokens or 0
    tokens = profiled
    if max_total_tokens is not None:
        if max_total_tokens > profiled:
            log.warning("max_total_tokens = %d is more than fits; using %d tokens", max_total_tokens, profiled)
        tokens = min(profiled, max_total_tokens)
    tokens -= tokens % page_size
    if tokens < page_size:
        cap = "no cap" if max_total_tokens is None else f"max_total_tokens = {max_total_tokens}"
        raise InvalidConfig(
            f"the KV pool holds less than a page of {page_size} tokens: {_mib(kv_bytes)} at {cell_bytes:,} bytes "
            f"a token is {profiled} tokens, {cap}: increase mem_fraction_static or the memory, or lower page_size"
        )
    return tokens


def pool_size(kv_bytes: int, cell_bytes: int, page_size: int, max_total_tokens: int | None) -> PoolSize:
    """Size a pool by `pool_tokens`."""
    tokens = pool_tokens(kv_bytes, cell_bytes, page_size, max_total_tokens)
    return PoolSize(num_pages=tokens // page_size, page_size=page_size, cell_bytes=cell_bytes)


def with_windows(config: EngineConfig, size: PoolSize, kv_bytes: int) -> PoolSize:
    """Split a pool in two where some layers see a window alone: these then keep K and V of a part of the tokens, and
    the same bytes hold more.

    A share of the pages (`EngineConfig.window_share`) has a part in the window pool; one request and a step's prompts
    always fit.

    Args:    size: of the pool as it is whole. kv_bytes: what both may take.
    Returns: ``size`` where there are no such layers, or too few tokens could be left out to be worth it: not where
             pages go to other replicas, whose pools may have other sizes.
    Raises:  InvalidConfig where both do not fit.
    """
    if not any(config.window_layers):
        return size
    page_size, layers = size.page_size, config.window_layers
    windows_cell = size.cell_bytes * sum(layers) // len(layers)
    windows_bytes, full_bytes = page_size * windows_cell, page_size * (size.cell_bytes - windows_cell)
    num_pages = int(kv_bytes / (full_bytes + config.window_share * windows_bytes))
    if config.cache.max_total_tokens is not None:
        num_pages = min(num_pages, config.cache.max_total_tokens // page_size)
    windows = WindowPool.of(
        int(config.window_share * num_pages),
        page_size=page_size,
        cell_bytes=windows_cell,
        reach=config.model.reach,
        step_tokens=config.chunked_prefill_size,
    )
    num_pages = min(num_pages, (kv_bytes - windows.num_pages * windows_bytes) // full_bytes)
    if windows.num_pages > WORTH_SPLITTING * num_pages and not config.hands_off:
        return size
    if num_pages < 1:
        raise InvalidConfig(
            f"the windows of one request and a step's prompts take {_mib(windows.num_pages * windows_bytes)}, and "
            f"{_mib(kv_bytes)} are left for K and V: give the replica more memory (cache.device_memory_bytes, "
            "cache.max_total_tokens), or lower scheduler.chunked_prefill_size"
        )
    return PoolSize(
        num_pages=num_pages, page_size=page_size, cell_bytes=size.cell_bytes - windows_cell, windows=windows
    )


def with_snapshots(config: EngineConfig, size: PoolSize, kv_bytes: int) -> PoolSize:
    """Let snapshots of recurrent states lie in pages of a pool, or, where pages have no bytes, have all ``kv_bytes``.

    Raises: InvalidConfig where one and a page do not fit.
    """
    if not config.model.states or config.cache.prefix_cache != "radix":
        return size
    each, page = snapshot_bytes(config), size.page_size * size.cell_bytes
    num_pages = -(-each // page) if page else 0
    most = size.num_pages // num_pages if page else min(size.num_pages, kv_bytes // each - 1)
    if most < 1 or size.num_pages <= num_pages:
        raise InvalidConfig(
            f"a snapshot of the model's recurrent state takes {_mib(each)}, a page of K and V {_mib(page)}, and "
            f"{_mib(size.bytes or kv_bytes)} are left for both: lower scheduler.max_running_requests, give the replica "
            "more memory (cache.device_memory_bytes, cache.max_total_tokens), or set cache.prefix_cache: chunk"
        )
    return replace(size, num_snapshots=most, snapshot_pages=num_pages)


def page_bytes(config: EngineConfig, size: PoolSize) -> int:
    """Count the bytes of a page of K and V, all ranks; of a window pool its share."""
    windows = size.windows
    cell = float(config.model.kv_cell_bytes(tp=config.parallel.tp, kv_dtype=config.kv_dtype))
    if windows is not None:
        cell -= windows.cell_bytes * (1 - windows.num_pages / size.num_pages)
    return int(config.cache.page_size * config.num_kv_parts * cell)


def max_running_requests(tokens: int, context_len: int, given: int | None) -> int:
    """Count the rows of the ReqToTokenPool: ``given``, or 512 per full context, within 2,048 and 4,096 (SPEC A08)."""
    if given is not None:
        return given
    return min(max(int(tokens / context_len * ROWS_PER_CONTEXT), MIN_ROWS), MAX_ROWS)


def _mib(n: float) -> str:
    return f"{n / 2**20:,.0f} MiB"
