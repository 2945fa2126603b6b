"""Scheduler, pools and model runner of a tiny model on a device, and which devices the tests of tests/gpu run on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, EngineConfig, Hardware, SchedulerConfig
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import load_model_config
from replicas.request import Req
from replicas.resolve import resolve
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.scheduler import Scheduler
from replicas.types import GenerateRequest, SamplingParams

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none on this machine"),
        ],
    ),
]
DRAWING = [  # where tokens may be drawn by a GPU's program: interpreted, or on the GPU
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, the better test")),
    DEVICES[1],
]
NUM_NEW = 48


@dataclass
class Rig:
    runner: ModelRunner
    scheduler: Scheduler

    def answer(self, prompts: list[list[int]], **sampling: object) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        reqs = []
        for i, prompt in enumerate(prompts):
            request = GenerateRequest(rid=str(i), token_ids=np.array(prompt, dtype=np.int32), sampling=params)
            reqs.append(Req.make(request, index=0, now_s=0.0, eos_ids=frozenset()))
            self.scheduler.submit(reqs[-1])
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            assert plan is not None
            self.scheduler.apply(plan, self.runner.run(plan))
            self.scheduler.check()
        return [req.output_ids.tolist() for req in reqs]


def engine_config(
    folder: Path, device: str, *, page_size: int = 4, chunk: int = 8, dtype: str = "float32"
) -> EngineConfig:
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 30
    return resolve(
        load_model_config(str(folder), device=device, dtype=dtype),  # type: ignore[arg-type]
        Hardware(device=device, num_cpus=1, available_memory_bytes=free),  # type: ignore[arg-type]
        cache=CacheConfig(page_size=page_size, max_total_tokens=512, mem_fraction_static=0.5),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=8),
    )


def make_rig(config: EngineConfig) -> Rig:
    runner = ModelRunner(config, TpGroup(device=config.device))
    size = runner.pool_size
    kv = KvCache(
        size=size, max_requests=8, context_len=config.model.context_len
    )
    return Rig(runner, Scheduler(kv, config.scheduler, max_running=8, clock=lambda: 0.0))
