"""One layer of attention on a GPU by FlashInfer's FA2 and FA3 and by Triton, where they differ. Needs no Ray.

    python -m benchmarks.gpu.attention [--json FILE]

Llama-8B's heads (32, 8 of K and V, 128 dimensions) in bf16, pages of 16. What decides `PREFILL` of
replicas/attention/flashinfer.py: a long prompt alone, a short one behind a long cached prefix, many short ones, and
requests that read a prefix together. Medians of a step's forward, planning left out.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from replicas.attention.base import AttentionBackend
from replicas.attention.registry import missing
from tests.attention_steps import Step
from tests.gpu.device_steps import device_step

REPEATS = 20
SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests as (prefix, new tokens), and how many of them share how many tokens."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    shared: tuple[int, int] = (0, 0)  # members, tokens


CASES = (
    Case(name="prefill 8k", lengths=((0, 8192),)),
    Case(name="128 over 32k", lengths=((32_768, 128),)),
    Case(name="16 x 512", lengths=((0, 512),) * 16),
    Case(name="group of 8 x 32k", lengths=((32_784, 1),) * 8, shared=(8, 32_768)),
    Case(name="group of 64 x 4k", lengths=((4112, 1),) * 64, shared=(64, 4096)),
)
TINY = (Case(name="tiny", lengths=((32, 9),)), Case(name="tiny group", lengths=((40, 1),) * 2, shared=(2, 32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is here")
    times = measure(CASES)
    for case, by_backend in times.items():
        print(f"{case:20}", "  ".join(f"{name} {seconds * 1e6:9.1f} us" for name, seconds in by_backend.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"cases": [asdict(case) for case in CASES], "seconds": times}, indent=1))


def measure(cases: tuple[Case, ...]) -> dict[str, dict[str, float]]:
    """Seconds of a layer, by case and backend."""
    return {case.name: {name: _median_s(make, case) for name, make in _backends().items()} for case in cases}


def _backends() -> dict[str, Callable[[Step], AttentionBackend]]:
    from replicas.attention.triton_paged import TritonAttention

    heads = {name: SHAPE[name] for name in ("num_heads", "num_kv_heads", "head_dim")}

    def triton(step: Step) -> AttentionBackend:
        return TritonAttention(step.pool, **heads)

    if (reason := missing("flashinfer")) is not None:
        print(f"Triton alone: flashinfer {reason}")
        return {"triton": triton}
    from replicas.attention import flashinfer

    def by(prefill: str) -> Callable[[Step], AttentionBackend]:
        def make(step: Step) -> AttentionBackend:
            chosen, flashinfer.PREFILL = flashinfer.PREFILL, prefill
            try:
                return flashinfer.FlashInferAttention(step.pool, dtype=torch.bfloat16, **heads)
            finally:
                flashinfer.PREFILL = chosen

        return make

    return {"fa2": by("fa2"), "fa3": by("fa3"), "triton": triton}


def _median_s(make: Callable[[Step], AttentionBackend], case: Case) -> float:
    members, length = case.shared
    groups = [(list(range(members)), length)] if members else []
    step = device_step(
        list(case.lengths), dtype=torch.bfloat16, device="cuda", shared=groups, num_decode=members or None, **SHAPE
    )
    backend = make(step)
    backend.begin(step.batch)
    times = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        backend.forward(0, step.q, step.k, step.v)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
