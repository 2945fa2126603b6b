"""Adapters on a GPU: rows in tiles of one adapter, two launches a product. Compiled on a GPU, interpreted on a CPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.config import AdapterLimits
from replicas.engine import adapters as adapters_module
from replicas.engine.engine import Engine
from replicas.errors import AdapterNotReadable, Fault
from replicas.kernels import gpu as fused
from replicas.kernels import triton_rows
from replicas.kernels.adapters.on_gpu import FEW_ROWS, ROWS, GpuLowRank, Pair, tiles_of
from replicas.layers.adapters import AdapterBank
from replicas.runner.batch import DeviceBatch, Staging
from replicas.runner.graphs import DecodeGraphs
from replicas.scheduler.plan import DecodePlan, StepPlan
from replicas.types import AdapterRef
from tests.adapters import TARGETS, make_adapter
from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE
from tests.gpu.test_gpu_engine import SMALL, ask, model, start
from tests.gpu.triton_or_skip import triton_paged
from tests.numerics import tiny

assert triton_paged  # Triton is here, at least interpreted
INPUTS, PIECES = 3000, (144, 48, 48)  # the last chunks of the inputs are short or empty, and so is a block of columns
RANKS = {0: (16, 16, 16), 1: (5, 0, 5), 2: (0, 0, 40), 3: (33, 33, 0)}  # of each adapter and weight; 0: none


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "kernels", lambda: triton_rows)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))


def pairs_of(adapter: int) -> list[Pair | None]:
    generator = torch.Generator().manual_seed(adapter)
    return [
        None
        if not rank
        else (
            torch.randn(rank, INPUTS, generator=generator) * INPUTS**-0.5,
            torch.randn(outputs, rank, generator=generator) * rank**-0.5,
        )
        for rank, outputs in zip(RANKS[adapter], PIECES, strict=True)
    ]


def held(dtype: torch.dtype, adapters: Sequence[int] = tuple(RANKS)) -> GpuLowRank:
    """Products "other", which nothing changes, and "one", with these adapters."""
    products = {"other": (64, (32,)), "one": (INPUTS, PIECES)}
    device = torch.device(DEVICE)
    made = GpuLowRank(products, dtype, device, Staging(device).upload, max_rank=40, max_held=8)
    for adapter in adapters:
        made.put(adapter, made.pack({"one": pairs_of(adapter)}))
    return made


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, and the product that is there before; rows of both lie a stride apart that is not their length."""
    generator = torch.Generator().manual_seed(rows)
    x, out = (torch.randn(rows, n + 16, generator=generator).to(DEVICE, dtype) for n in (INPUTS, sum(PIECES)))
    return x[:, :INPUTS], out[:, : sum(PIECES)]


def run(
    of: GpuLowRank, x: Tensor, out: Tensor, adapters: Sequence[int | None], graph_rows: int | None = None
) -> Tensor:
    """What ``out`` becomes where row i of x has adapter i."""
    runs = [(row, 1, adapter) for row, adapter in enumerate(adapters) if adapter is not None]
    of.step.set(runs, max((max(RANKS[each]) for each in adapters if each is not None), default=0), graph_rows)
    made = out.clone()
    of.added["one"](x, made)
    return made


def by_hand(x: Tensor, out: Tensor, adapters: Sequence[int | None]) -> Tensor:
    """Row by row, in fp64."""
    made = out.double().cpu()
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            for into, pair in zip(torch.split(made[row], PIECES), pairs_of(adapter), strict=True):
                if pair is not None:
                    a, b = (each.to(x.dtype).double() for each in pair)
                    into += b @ (a @ x[row].double().cpu())
    return made


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float16, 1e-2)], ids=["fp32", "fp16"])
@pytest.mark.parametrize("rows", [1, 9, FEW_ROWS + 5])
@pytest.mark.usefixtures("interpreted")
def test_each_row_has_what_its_adapter_adds(rows: int, dtype: torch.dtype, allowed: float) -> None:
    """Adapters of other ranks and of other weights, and rows without one, in turn. More rows than a graph's are not
    split over the inputs."""
    of, (x, out) = held(dtype), inputs(rows, dtype)
    adapters = [(3, 1, None, 0, 2)[row % 5] for row in range(rows)]
    made = run(of, x, out, adapters)
    assert float((made.cpu().double() - by_hand(x, out, adapters)).abs().max()) < allowed
    if rows > 2:
        assert torch.equal(made[2], out[2]), "a row without an adapter was touched"


@pytest.mark.parametrize("dtype", [torch.float32, *[torch.float16, torch.bfloat16] * (DEVICE == "cuda")])
@pytest.mark.usefixtures("interpreted")
def test_the_bits_of_a_row_do_not_depend_on_its_company(dtype: torch.dtype) -> None:
    """Alone; among rows of its adapter, of others, and of none; in a graph's step; in a step that is not split."""
    of, (x, out) = held(dtype), inputs(FEW_ROWS + 5, dtype)
    whole = [(3, 1, None, 0, 2)[row % 5] for row in range(len(x))]
    wanted = run(of, x, out, whole)
    assert not torch.equal(wanted, out)
    for first in (0, 1, 3, 4):
        alone = run(of, x[first : first + 1], out[first : first + 1], whole[first : first + 1])
        assert torch.equal(alone[0], wanted[first])
    assert torch.equal(run(of, x[:19], out[:19], whole[:19]), wanted[:19])
    assert torch.equal(run(of, x[:19], out[:19], whole[:19], graph_rows=24), wanted[:19])
    some = [whole[row] if whole[row] == 3 else None for row in range(40)]
    assert torch.equal(run(of, x[:40], out[:40], some)[::5], wanted[:40:5])


@pytest.mark.usefixtures("interpreted")
def test_an_adapter_that_was_dropped_makes_place_for_another() -> None:
    of, (x, out) = held(torch.float32, [0, 1]), inputs(4, torch.float32)
    first = run(of, x, out, [0, 1, 0, 1])
    of.drop(0)
    of.put(0, of.pack({"one": pairs_of(2)}))
    again = run(of, x, out, [0, 1, 0, 1])
    assert torch.equal(again[1::2], first[1::2])
    assert float((again.cpu().double() - by_hand(x, out, [2, 1, 2, 1])).abs().max()) < 1e-5


@pytest.mark.usefixtures("interpreted")
def test_no_host_memory_is_asked_for_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none to pin, the thread that reads hears of it, and not the engine's."""
    of = held(torch.float32, [])
    packed = of.pack({"one": pairs_of(0)})
    asked, empty = list[object](), torch.empty

    def watched(*shape: Any, device: object = "host", **more: Any) -> Tensor:
        asked.append(device)
        return empty(*shape, device=DEVICE, **more)

    monkeypatch.setattr(torch, "empty", watched)
    of.put(0, packed)
    assert asked == [torch.device(DEVICE)]


@pytest.mark.usefixtures("interpreted")
def test_kernels_without_rows_touch_nothing() -> None:
    of, (x, out) = held(torch.float32), inputs(3, torch.float32)
    of.step.set_idle()
    made = out.clone()
    of.added["one"](x, made)
    assert torch.equal(made, out)


@pytest.mark.parametrize("seed", range(5))
def test_every_row_with_an_adapter_is_in_one_tile_of_it(seed: int) -> None:
    """In as few tiles as there can be."""
    random = np.random.default_rng(seed)
    runs, first, wanted = list[tuple[int, int, int]](), 0, dict[int, int]()
    for _ in range(20):
        first += int(random.integers(0, 3))
        rows, adapter = int(random.integers(1, 40)), int(random.integers(0, 4))
        runs.append((first, rows, adapter))
        wanted |= dict.fromkeys(range(first, first + rows), adapter)
        first += rows
    tiles = tiles_of(runs)
    told = [(row, adapter) for adapter, *rows in tiles.tolist() for row in rows if row >= 0]
    assert sorted(told) == sorted(wanted.items())
    counts = np.bincount(list(wanted.values()))
    assert len(tiles) == sum(-(-counts // ROWS))


def test_a_replica_without_triton_leaves_an_adapter_to_others(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "kernels", lambda: None)
    device = torch.device("cuda")
    bank = AdapterBank({}, device, AdapterLimits(), Staging(device).upload)
    with pytest.raises(AdapterNotReadable, match="it needs Triton, which this replica cannot use"):
        bank.prepare(8, {})


PROMPT = list(range(70, 95))
NUM_NEW = 6 if DEVICE == "cuda" else 3  # two decode steps: each takes seconds where kernels are interpreted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(model(tmp_path / "model"))


@pytest.fixture
def adapters(tmp_path: Path, folder: Path) -> list[AdapterRef | None]:
    """The model alone, then adapters of other ranks and targets."""
    kinds: list[tuple[int, tuple[str, ...]]] = [(4, TARGETS), (20, ("q_proj", "v_proj", "down_proj")), (16, TARGETS)]
    return [
        None,
        *(
            make_adapter(tmp_path / str(i), folder, rank=rank, seed=i, targets=targets, size=0.5)
            for i, (rank, targets) in enumerate(kinds)
        ),
    ]


def merged_ids(folder: Path, ref: AdapterRef | None) -> list[int]:
    """What Transformers makes of the prompt with PEFT's merged model."""
    from peft import PeftModel

    alone = tiny.save("llama", folder.parent / "reference", **SMALL)
    merged = alone if ref is None else PeftModel.from_pretrained(alone, ref.path).merge_and_unload()
    return tiny.reference(merged, PROMPT, NUM_NEW)[1]


def told(engine: Engine, refs: Sequence[AdapterRef | None]) -> list[list[int]]:
    """The ids that requests with these adapters are answered, all at once."""
    made: list[list[int]] = [[] for _ in refs]
    for i, ref in enumerate(refs):
        assert engine.submit(replace(ask(str(i), PROMPT, max_new_tokens=NUM_NEW), adapter=ref)) == []
    while engine.open_rids:
        for delta in engine.step():
            made[int(delta.rid)] += delta.token_ids
            assert delta.finish is None or delta.finish.message is None, delta.finish
    engine.scheduler.check()
    return made


def test_requests_of_three_adapters_and_of_none_answer_as_the_merged_models_from_graphs_and_without(
    folder: Path, adapters: list[AdapterRef | None], gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, in one batch. Decode steps with adapters are replayed, wait for nothing, and compile nothing."""
    wanted = [merged_ids(folder, ref) for ref in adapters]
    assert len({tuple(ids) for ids in wanted}) == 4
    if gpu is None:  # interpreted, one adapter is answered so (test_an_adapter_for_which_the_gpu_has_no_memory...)
        without = start(str(folder), dtype="float32", cuda_graphs=False, adapters=AdapterLimits(max_rank=20))
        assert told(without, adapters) == wanted
        without.close()
    engine = start(str(folder), dtype="float32", adapters=AdapterLimits(max_rank=20))
    compiled = set(gpu.programs) if gpu is not None else set()
    launch, plans, waits, replayed = engine.steps.launch, list[DecodePlan](), list[str](), list[bool]()
    replay = DecodeGraphs.replay

    def counted(graphs: DecodeGraphs, batch: DeviceBatch, num_rows: int, *, adapted: bool) -> Tensor:
        replayed.append(adapted)
        return replay(graphs, batch, num_rows, adapted=adapted)

    def watched(plan: StepPlan) -> Any:
        before = len(gpu.waits) if gpu is not None else 0
        pending = launch(plan)
        if isinstance(plan, DecodePlan) and plan.adapters:
            plans.append(plan)
            waits.extend(gpu.waits[before:] if gpu is not None else ())
        return pending

    assert engine.executor.adapters is not None
    for ref in adapters[1:]:
        assert ref is not None
        engine.executor.adapters.load(ref, ())
    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    monkeypatch.setattr(engine.steps, "launch", watched)
    assert told(engine, adapters) == wanted
    assert any(len(set(plan.adapters)) == 4 for plan in plans)
    assert sum(replayed) >= len(plans) > 0
    assert not waits
    if gpu is not None:
        assert len(gpu.graphs) == 6  # of 1, 2 and 4 rows, with adapters and without
        assert gpu.programs == compiled, "a program was compiled while requests waited"
    engine.close()


def test_adapters_come_and_go_while_graphs_stay(
    folder: Path, adapters: list[AdapterRef | None], gpu: fake_cuda.FakeCuda | None
) -> None:
    """There is room for one and a half of the two that change all products; their memory is used again."""
    _, first, _, last = adapters
    wanted = {ref: merged_ids(folder, ref) for ref in (None, first, last)}
    limits = AdapterLimits(max_rank=20)
    engine = start(str(folder), dtype="float32", adapters=limits, scheduler={"max_running_requests": 1})
    runner = engine.steps.launch.__self__.runner  # type: ignore[attr-defined]
    assert told(engine, [first]) == [wanted[first]]
    stats = engine.stats().adapters
    assert stats is not None
    assert engine.executor.adapters is not None
    engine.executor.adapters._port.limits = replace(limits, host_bytes=stats.num_bytes * 3 // 2)  # type: ignore[misc]
    for ref in (last, first, None, last):
        assert told(engine, [ref]) == [wanted[ref]]
    stats = engine.stats().adapters
    assert stats is not None
    assert (stats.num_loads, stats.num_dropped, len(stats.held)) == (4, 3, 1)
    assert sum(each.nbytes for each in runner.adapters._held._held.values()) == stats.num_bytes
    engine.close()


def test_an_adapter_for_which_the_gpu_has_no_memory_is_answered_so(
    folder: Path, adapters: list[AdapterRef | None], gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And later it is tried again."""
    monkeypatch.setattr(adapters_module, "REFUSED_S", 0.0)
    engine = start(str(folder), dtype="float32", cuda_graphs=False, adapters=AdapterLimits(max_rank=20))
    put = GpuLowRank.put

    def full(self: GpuLowRank, adapter: int, packed: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", _no_memory)
            put(self, adapter, packed)  # type: ignore[arg-type]

    monkeypatch.setattr(GpuLowRank, "put", full)
    engine.submit(replace(ask("0", PROMPT), adapter=adapters[1]))
    deltas = []
    while engine.open_rids:
        deltas += engine.step()
    assert deltas[-1].finish is not None
    assert "bytes for another: lower cache.mem_fraction_static" in str(deltas[-1].finish.message)
    assert deltas[-1].finish.fault is Fault.UNAVAILABLE
    monkeypatch.setattr(GpuLowRank, "put", put)
    assert told(engine, [adapters[1]]) == [merged_ids(folder, adapters[1])]
    engine.close()


def _no_memory(*shape: object, **options: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")
