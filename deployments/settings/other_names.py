"""What users of vLLM and SGLang, and YAML itself, call our settings and their values.

Owns:      which of their spellings are taken as ours, and which names are only pointed at ours.
Invariant: inside there is one spelling, that of replicas/config.py: this runs before the checks.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator

DTYPES: Mapping[str, str | None] = {
    "fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
    "fp8_e4m3": "fp8", "auto": None,
}  # fmt: skip
OURS: Mapping[str, str] = {
    "model_path": "model.path",
    "served_model_name": "model.served_name",
    "max_model_len": "model.context_len",
    "context_length": "model.context_len",
    "data_parallel_size": "replicas.count",
    "dp_size": "replicas.count",
    "tensor_parallel_size": "parallel.tp",
    "tp_size": "parallel.tp",
    "gpu_memory_utilization": "cache.mem_fraction_static",
    "mem_fraction_static": "cache.mem_fraction_static",
    "kv_cache_dtype": "cache.kv_dtype",
    "block_size": "cache.page_size",
    "page_size": "cache.page_size",
    "max_total_tokens": "cache.max_total_tokens",
    "enable_prefix_caching": "cache.prefix_cache",
    "disable_radix_cache": "cache.prefix_cache",
    "radix_eviction_policy": "cache.eviction",
    "max_num_seqs": "scheduler.max_running_requests",
    "max_running_requests": "scheduler.max_running_requests",
    "max_num_batched_tokens": "scheduler.chunked_prefill_size",
    "chunked_prefill_size": "scheduler.chunked_prefill_size",
    "enable_chunked_prefill": "scheduler.mixed_steps",
    "enable_mixed_chunk": "scheduler.mixed_steps",
    "async_scheduling": "scheduler.overlap",
    "disable_overlap_schedule": "scheduler.overlap",
    "scheduling_policy": "scheduler.policy",
    "schedule_policy": "scheduler.policy",
    "enable_priority_scheduling": "scheduler.priorities",
    "attention_backend": "attention",
    "enforce_eager": "cuda_graphs",
    "disable_cuda_graph": "cuda_graphs",
}


def here(name: str) -> str:
    """Our setting, for a name of theirs as in a file or on a command line; "" for one that is not known."""
    return OURS.get(name.removeprefix("--").replace("-", "_"), "")


def _dtype(value: Any) -> Any:
    return DTYPES.get(value, value) if isinstance(value, str) else value


def _quantization(value: Any) -> Any:
    return "none" if value is None else value


def _cache(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "kv_cache_dtype" in value:
        if "kv_dtype" in value:
            raise ValueError("kv_dtype and kv_cache_dtype are both given, and are one setting; leave one out")
        value = {"kv_dtype" if name == "kv_cache_dtype" else name: each for name, each in value.items()}
    return {**value, "kv_dtype": _dtype(value["kv_dtype"])} if "kv_dtype" in value else value


def _scheduler(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    # in YAML a bare ``on`` is True
    flags = {name: value[name] for name in ("overlap", "priorities") if isinstance(value.get(name), bool)}
    return {**value, **{name: "on" if is_on else "off" for name, is_on in flags.items()}}


DTYPE_NAMES = BeforeValidator(_dtype)
QUANTIZATION_NAMES = BeforeValidator(_quantization)
CACHE_NAMES = BeforeValidator(_cache)
SCHEDULER_NAMES = BeforeValidator(_scheduler)
