"""`resolve`: checks the settings of one engine, and fills what was left open from the model and the machine.

Owns:  the sentence for each setting that is wrong: which, why, and what is allowed.
Never: reads files or devices; replicas/loading/model_files.py reads the model's folder, replicas/launch.py the machine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args, get_type_hints

from kvtransfer.layout import scale_bytes
from replicas.attention.registry import BACKENDS
from replicas.config import (
    DTYPE_BYTES,
    KV_DTYPE_BYTES,
    STORE_KEY_LEN,
    Attention,
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    Hardware,
    ModelConfig,
    NamesOf,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
)
from replicas.errors import InvalidConfig
from replicas.kernels.weight_formats import RULES, cut_by
from replicas.memory import sizing

CPU_MEMORY_SHARE = 0.15  # of available RAM, for weights + KV of one replica, when nothing is said
CPU_MEMORY_CAP = 3 << 30
CPU_MOST_RUNNING = 64  # a decode step of 64 takes 0.5 s on a core (SmolLM2, Zen 3): more would slow all their answers


def resolve(
    model: ModelConfig,
    hardware: Hardware,
    *,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    parallel: ParallelConfig | None = None,
    attention: Attention = "auto",
    cuda_graphs: bool = True,
    num_threads: int | None = None,
) -> EngineConfig:
    """Check the settings against model and machine and fill in what was left open. Pure.

    Raises: InvalidConfig with a sentence for every setting that is wrong: which, why, and what is allowed.
    """
    cache, scheduler, parallel = cache or CacheConfig(), scheduler or SchedulerConfig(), parallel or ParallelConfig()
    problems = [
        *_model_problems(model),
        *settings_problems(cache, scheduler),
        *_state_problems(model, cache),
        *_device_problems(model, cache, attention, hardware.device),
        *_rank_problems(model, parallel.tp),
    ]
    if problems:
        raise InvalidConfig(*problems)
    origin: dict[str, str] = {}
    if cache.device_memory_bytes is None and hardware.device == "cpu":
        budget = min(int(hardware.available_memory_bytes * CPU_MEMORY_SHARE), CPU_MEMORY_CAP)
        cache = replace(cache, device_memory_bytes=budget)
        origin["cache.device_memory_bytes"] = (
            f"{CPU_MEMORY_SHARE:.0%} of {hardware.available_memory_bytes / 2**30:.1f} GiB available RAM, "
            f"at most {CPU_MEMORY_CAP / 2**30:.0f} GiB"
        )
    cache, scheduler, of_requests = _requests(model, cache, scheduler, hardware.device)
    origin |= of_requests
    if scheduler.chunked_prefill_size is None:
        scheduler = replace(scheduler, chunked_prefill_size=512 if hardware.device == "cpu" else 8192)
        origin["scheduler.chunked_prefill_size"] = f"default on {hardware.device}"
    if hardware.device == "cuda" and scheduler.cascade:
        scheduler = replace(scheduler, cascade=False)
        origin["scheduler.cascade"] = "each request reads its own prefix on a GPU"
    scheduler, of_steps = _decode_steps(scheduler, model, parallel, hardware.device)
    origin |= of_steps
    if num_threads is None:
        num_threads = max(1, hardware.num_cpus // parallel.tp)
        origin["num_threads"] = f"{hardware.num_cpus} CPUs over {parallel.tp} ranks"
    return EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        device=hardware.device,
        attention=attention,
        cuda_graphs=cuda_graphs,
        num_threads=num_threads,
        origin=origin,
    )


def _requests(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, device: Device
) -> tuple[CacheConfig, SchedulerConfig, dict[str, str]]:
    """Fill in how many requests run, and whether they reuse prefixes: not where they have a recurrent state. Returns:
    the settings, and where those that were open come from."""
    origin = dict[str, str]()
    if model.states and cache.prefix_cache == "radix" and scheduler.overlap == "on":
        cache = replace(cache, prefix_cache="chunk")
        origin["cache.prefix_cache"] = (
            f"{model.architecture} keeps a recurrent state beside its pages, and with scheduler.overlap: on the one "
            "behind a page may be gone when it is to be kept: every prompt is computed whole"
        )
    if scheduler.max_running_requests is not None or (device != "cpu" and not model.states):
        return cache, scheduler, origin
    most, budget, why = CPU_MOST_RUNNING, cache.device_memory_bytes, f"default on {device}"
    if model.states:
        why = f"{why}, at most {most} with recurrent states"
        if device == "cpu" and budget is not None:
            left = int(budget * cache.mem_fraction_static) - sizing.weight_bytes(model, 1)
            most = sizing.state_rows(model, device, left, most, places=sizing.state_places(scheduler))
            why = f"{why}, which take half of what weights leave"
    origin["scheduler.max_running_requests"] = why
    return cache, replace(scheduler, max_running_requests=most), origin


def _state_problems(model: ModelConfig, cache: CacheConfig) -> Iterator[str]:
    """List what a model that keeps a recurrent state cannot do yet."""
    if not model.states:
        return
    if cache.host_memory_bytes and not model.num_layers:
        yield (
            f"cache.host_memory_bytes with {model.architecture}, which keeps recurrent states alone: the host tier has "
            "pages of K and V, in which states lie beside them; leave it out"
        )
    if cache.store is not None:
        yield (
            f"cache.store with {model.architecture}, which keeps a recurrent state: a store keeps K and V alone, which "
            "are of no use without it; leave it out, and set cache.host_memory_bytes"
        )


def transfer_problems(config: EngineConfig) -> Iterator[str]:
    """List why replicas of ``config`` cannot take part in KV transfers: mode: disaggregated, or transfer.fetch."""
    model, tp = config.model, config.parallel.tp
    if config.cache.label_channels is not None:
        yield f"attention = {config.attention!r} with KV transfers: pages arrive without labels; set auto"
    if model.states and not model.num_layers:
        yield (
            f"KV transfers of {model.architecture}: it keeps recurrent states alone, and pages of K and V would carry "
            "them; set mode: unified, without transfer.fetch"
        )
    elif model.states and tp > 1:
        yield (
            f"parallel.tp = {tp} with KV transfers of {model.architecture}: recurrent states are handed over by one "
            "rank; set parallel.tp: 1, or mode: unified, without transfer.fetch"
        )


def _decode_steps(
    scheduler: SchedulerConfig, model: ModelConfig, parallel: ParallelConfig, device: Device
) -> tuple[SchedulerConfig, dict[str, str]]:
    """Fill in what each decode step does. Returns: the settings, and where those that were open come from."""
    origin: dict[str, str] = {}
    if scheduler.overlap == "auto":
        scheduler = replace(scheduler, overlap="on" if device == "cuda" and not model.states else "off")
        origin["scheduler.overlap"] = f"default {'with recurrent states' if model.states else f'on {device}'}"
    if scheduler.speculation == "auto" and (why := _no_drafts(model, scheduler, parallel, device)) is not None:
        scheduler = replace(scheduler, speculation="off")
        origin["scheduler.speculation"] = why
    return scheduler, origin


def _no_drafts(
    model: ModelConfig, scheduler: SchedulerConfig, parallel: ParallelConfig, device: str
) -> str | None:
    """Tell why steps try no drafts of tokens here unless told to; None if they do."""
    if device != "cpu":
        return f"{device}: a row's bits depend on the rows beside it"
    if scheduler.overlap == "on":
        return "scheduler.overlap: a step is launched before the tokens are known that its drafts would follow"
    if model.states:
        return "a recurrent state is kept behind each token of a draft, in memory that more requests could have"
    if model.implementation == "transformers":
        return "Transformers' module may add up a row in another order beside other rows"
    if parallel.tp > 2:
        return "the sum of more than two ranks' parts has an order that a row's place decides"
    return None


def settings_problems(cache: CacheConfig, scheduler: SchedulerConfig) -> Iterator[str]:
    """List a sentence for each setting that is impossible on any model and machine."""
    for group, settings in (("cache", cache), ("scheduler", scheduler)):
        for name, hint in get_type_hints(type(settings), include_extras=True).items():
            names = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, NamesOf)), None)
            if names is not None and (value := getattr(settings, name)) not in names.allowed:
                yield f"{group}.{name} = {value!r} is unknown; allowed: {', '.join(names.allowed)}"
    if not 1 <= cache.page_size <= 1024:
        yield f"cache.page_size = {cache.page_size}; allowed: 1 to 1024 tokens"
    if cache.kv_dtype is not None and cache.kv_dtype not in KV_DTYPE_BYTES:
        yield f"cache.kv_dtype = {cache.kv_dtype!r} is unknown; allowed: {', '.join(KV_DTYPE_BYTES)}, or leave it out"
    if not 0.0 < cache.mem_fraction_static <= 1.0:
        yield f"cache.mem_fraction_static = {cache.mem_fraction_static}; allowed: above 0, at most 1"
    if cache.max_total_tokens is not None and cache.max_total_tokens < cache.page_size:
        yield f"cache.max_total_tokens = {cache.max_total_tokens}; allowed: {cache.page_size} (a page) or more"
    if cache.host_memory_bytes < 0:
        yield f"cache.host_memory_bytes = {cache.host_memory_bytes}; allowed: 0 (none) or more"
    if cache.host_memory_bytes and cache.prefix_cache == "chunk":
        yield "cache.host_memory_bytes with cache.prefix_cache: chunk, which keeps no pages; leave one out"
    if cache.store is not None and not cache.host_memory_bytes:
        yield "cache.store without cache.host_memory_bytes: pages go to and from the store through host memory; set it"
    for name, policy in (("eviction", cache.eviction), ("host_eviction", cache.host_eviction)):
        if policy == "priority" and scheduler.priorities == "off":
            yield (
                f"cache.{name}: priority with scheduler.priorities: off, where every request's priority is 0; set "
                f"scheduler.priorities: on, or another cache.{name}"
            )
    if cache.sparse_tokens < 1:
        yield f"cache.sparse_tokens = {cache.sparse_tokens}; allowed: 1 or more"
    if cache.store_bytes < 1:
        yield f"cache.store_bytes = {cache.store_bytes}; allowed: 1 or more"
    if cache.store_key is not None and len(cache.store_key) < STORE_KEY_LEN:
        yield (
            f"cache.store_key: has {len(cache.store_key)} characters, here or in MANTA_STORE_KEY; at least "
            f"{STORE_KEY_LEN} are wanted, as `openssl rand -hex 32` prints"
        )
    for name in ("max_running_requests", "chunked_prefill_size"):
        value = getattr(scheduler, name)
        if value is not None and value < 1:
            yield f"scheduler.{name} = {value}; allowed: 1 or more, or leave it out"
    if scheduler.max_queued_requests < 1:
        yield f"scheduler.max_queued_requests = {scheduler.max_queued_requests}; allowed: 1 or more"
    if not scheduler.late_factor >= 1:
        yield f"scheduler.late_factor = {scheduler.late_factor:g}; allowed: 1 or more"
    if scheduler.hang_kill_s < 0:
        yield f"scheduler.hang_kill_s = {scheduler.hang_kill_s:g}; allowed: 0 (never) or more"
    if not 0.0 <= scheduler.min_new_token_ratio <= scheduler.new_token_ratio <= 1.0:
        yield (
            "scheduler: 0 <= min_new_token_ratio <= new_token_ratio <= 1 is required, got "
            f"{scheduler.min_new_token_ratio} and {scheduler.new_token_ratio}"
        )


# dtypes of activations, where not weights but quantization says how these lie
ACTIVATIONS: dict[str, tuple[DType, ...]] = {"int8": ("float32",), "int4": ("float32", "bfloat16")}


def _model_problems(model: ModelConfig) -> Iterator[str]:
    if model.quantization not in get_args(Quantization):
        yield f"model.quantization = {model.quantization!r} is unknown; allowed: {', '.join(get_args(Quantization))}"
    if model.dtype not in DTYPE_BYTES:
        yield f"model.dtype = {model.dtype!r} is unknown; allowed: {sorted(DTYPE_BYTES)}"
    if model.num_heads % model.num_kv_heads:
        yield f"{model.path}: {model.num_heads} query heads are not a multiple of {model.num_kv_heads} KV heads"


def _device_problems(model: ModelConfig, cache: CacheConfig, attention: Attention, device: Device) -> Iterator[str]:
    scaled = cache.kv_dtype is not None and cache.kv_dtype in KV_DTYPE_BYTES and scale_bytes(cache.kv_dtype) > 0
    if cache.kv_dtype in ("int8", "fp8_e5m2") and device != "cpu":
        yield (
            f"cache.kv_dtype = {cache.kv_dtype!r} on {device}: only the CPU's kernels read it, with a scale for each "
            "token; leave cache.kv_dtype out, or set bfloat16 or fp8"
        )
    if scaled and device == "cpu" and model.head_dim % 4:
        yield (
            f"cache.kv_dtype = {cache.kv_dtype!r} needs a head_dim that is a multiple of 4, this model has "
            f"{model.head_dim}: leave cache.kv_dtype out"
        )
    if model.indexes and scaled:
        yield (
            f"cache.kv_dtype = {cache.kv_dtype!r} with {model.architecture}, whose index keeps keys beside K and V: "
            "these have no scales; leave cache.kv_dtype out, or set bfloat16"
        )
    if model.mla is not None and scaled:
        yield (
            f"cache.kv_dtype = {cache.kv_dtype!r} with latent attention (MLA): a latent vector of so few bits is every "
            "head's K and V, and no kernel here reads one; leave cache.kv_dtype out, or set bfloat16, or "
            "model.implementation: transformers, which keeps K and V of heads"
        )
    if model.quantization == "fp8" and device == "cpu":
        yield "model.quantization = 'fp8' on cpu: such products are made on a GPU alone; set int8 or int4, or none"
    elif model.quantization == "fp8" and model.implementation == "transformers":
        yield f"model.quantization = 'fp8' with {model.architecture}, which Transformers' code runs; leave it out"
    elif model.quantization == "fp8":
        pass
    elif model.quantization != "none" and device != "cpu":
        yield (
            f"model.quantization = {model.quantization!r} on {device}: such products are made on the CPU alone; leave "
            "model.quantization out, or serve without a GPU (replicas.gpus: 0)"
        )
    elif model.quantization != "none" and model.dtype not in (allowed := ACTIVATIONS[model.quantization]):
        yield (
            f"model.quantization = {model.quantization!r} with model.dtype = {model.dtype!r}; allowed beside it: "
            f"{' or '.join(allowed)}, in which its products may take activations; leave model.dtype out"
        )
    backend = BACKENDS.get(attention)
    if attention != "auto" and (backend is None or device not in backend.devices):
        there = [name for name, each in BACKENDS.items() if device in each.devices]
        yield f"attention = {attention!r} does not run on {device}; allowed there: auto, {', '.join(there)}"
    elif backend is not None and (lacks := backend.lacks(model.attention_kinds)):
        yield f"attention = {attention!r} {lacks}; set attention: auto"
    yield from _label_problems(model, cache, attention)


def _label_problems(model: ModelConfig, cache: CacheConfig, attention: Attention) -> Iterator[str]:
    """Of attention by labels of keys, which are made where keys are stored and go nowhere with pages."""
    if attention not in BACKENDS or not BACKENDS[attention].labels:
        if cache.label_channels is not None:
            readers = " or ".join(name for name, each in BACKENDS.items() if each.labels)
            yield f"cache.label_channels without attention: {readers}, which reads it; leave it out"
        return
    if cache.label_channels is None:
        yield (
            f"attention = {attention!r} without cache.label_channels: make the file with python -m replicas.calibrate "
            f"{model.path} TEXT, and name it"
        )
    if cache.host_memory_bytes:
        yield f"attention = {attention!r} with cache.host_memory_bytes: pages come back without labels; leave one out"
    if cache.kv_dtype not in (None, "float32", "bfloat16"):
        yield f"attention = {attention!r} with cache.kv_dtype = {cache.kv_dtype!r}; allowed: float32, bfloat16"
    if model.mla is not None:
        yield f"attention = {attention!r} with latent attention (MLA), which has no keys of heads; set attention: auto"


def _rank_problems(model: ModelConfig, tp: int) -> Iterator[str]:
    """Of products that ranks share by inputs too, with scales: after attention, and at the end of the MLP."""
    if tp not in model.tp_sizes() and model.implementation == "transformers":
        yield (
            f"parallel.tp = {tp}: {model.architecture} runs through Transformers, whose plan for it splits over "
            f"{model.tp_sizes()} ranks"
        )
        return
    if tp not in model.tp_sizes():
        yield (
            f"parallel.tp = {tp} does not split {model.num_heads} query heads, {model.num_kv_heads} KV heads "
            f"and an MLP of {_listed(model.inner_sizes)} evenly; sizes that work for this model: {model.tp_sizes()}"
        )
        return
    if model.stored is not None and model.stored.experts is not None:
        inner = model.inner_sizes[0]
        whole = [ranks for ranks in model.tp_sizes() if not cut_by(inner, ranks)]
        if tp not in whole:
            yield (
                f"parallel.tp = {tp}: {inner // tp} inputs of an expert's last product on each rank would cut "
                f"blocks that share a scale ({model.stored.about}); sizes that work for this model: {whole}"
            )
            return
    shared = (model.attended_size, *model.inner_sizes)

    def served(ranks: int) -> bool:
        return not any(cut_by(inputs, ranks) for inputs in shared)

    if model.quantization in ("int8", "int4") and not served(tp):
        yield (
            f"parallel.tp = {tp} with model.quantization = {model.quantization!r}: {shared[0] // tp} inputs of the "
            f"product after attention and {_listed(size // tp for size in shared[1:])} of the MLP's last on each rank "
            f"would cut groups that share a scale ({RULES[model.quantization]}); sizes that work for this model: "
            f"{[ranks for ranks in model.tp_sizes() if served(ranks)]}"
        )


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sizes))
