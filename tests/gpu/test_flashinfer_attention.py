"""What the FlashInfer backend asks of FlashInfer, answered by a stand-in that computes it in PyTorch; the real
library's signatures are held against the same calls where it is installed. On a GPU with the library, its kernels run.
"""

import importlib
import importlib.util
import inspect
import logging
import os
import pathlib
import sys
import sysconfig
from typing import Any

import filelock
import pytest
import torch

from replicas.attention import choice as choosing
from replicas.attention import workspace
from replicas.attention.base import AttentionSpec, Heads
from replicas.attention.choice import make_attention
from replicas.attention.registry import BACKENDS
from replicas.attention.torch_native import PLAIN
from replicas.config import AttentionChoice, AttentionKind
from replicas.errors import EngineDead, InvalidConfig
from replicas.memory.pool import MHATokenToKVPool
from tests.attention_steps import Step
from tests.gpu import fake_cuda, flashinfer_stand_in
from tests.gpu.device_steps import DEVICE, device_step, error, oracle, run
from tests.gpu.flashinfer_stand_in import CALLS
from tests.gpu.triton_or_skip import triton_paged

REAL = importlib.util.find_spec("flashinfer") is not None


@pytest.fixture
def flashinfer_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """replicas/attention/flashinfer.py over the real library on a GPU, else over the stand-in."""
    if DEVICE == "cpu" or not REAL:
        yield flashinfer_stand_in.install(monkeypatch)
        return
    CALLS.clear()
    yield importlib.import_module("replicas.attention.flashinfer")


def backend(module: Any, step: Step, kind: AttentionKind = PLAIN, prefill: str | None = None) -> Any:
    heads = {"num_heads": step.q.shape[1], "num_kv_heads": step.k.shape[1], "head_dim": step.q.shape[2]}
    return module.FlashInferAttention(step.pool, dtype=step.q.dtype, kind=kind, prefill=prefill, **heads)


def half_step(lengths: list[tuple[int, int]], **changes: Any) -> Step:
    shape = {"dtype": torch.float16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    return device_step(lengths, **{**shape, **changes})


ALLOWED = 4e-3  # fp16


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, ALLOWED), (torch.bfloat16, 3e-2)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("heads", [(9, 3), (8, 2), (14, 2)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_decode_and_extend_equal_the_oracle(
    flashinfer_attention: Any, heads: tuple[int, int], dtype: torch.dtype, allowed: float, page_size: int
) -> None:
    """Both decode kernels of FlashInfer: 3 query heads a KV head, and 4 and 7, for which tensor cores decode."""
    shape = {"dtype": dtype, "num_heads": heads[0], "num_kv_heads": heads[1], "page_size": page_size}
    for lengths in ([(0, 1), (1, 1), (16, 1), (70, 1)], [(0, 9), (33, 20), (16, 1)]):
        step = half_step(lengths, **shape)
        assert error(backend(flashinfer_attention, step), step) < allowed


def test_a_mixed_step_equals_the_oracle(flashinfer_attention: Any) -> None:
    """One request extends; four decode."""
    step = half_step([(30, 9), (40, 1), (33, 1), (60, 1), (3, 1)])
    step.batch.num_decode = 4
    assert error(backend(flashinfer_attention, step), step) < ALLOWED


@pytest.mark.parametrize(
    "kind", [AttentionKind(window=27), AttentionKind(scale=0.2, soft_cap=5.0), AttentionKind(window=40, soft_cap=4.0)]
)
def test_layers_of_one_kind_equal_the_oracle(flashinfer_attention: Any, kind: AttentionKind) -> None:
    """A mixed step; the first page of a request beyond the window is not asked for."""
    step = half_step([(50, 9), (70, 1), (40, 1), (43, 1), (3, 1)])
    step.batch.num_decode = 4
    assert error(backend(flashinfer_attention, step, kind), step, kind=kind) < ALLOWED
    assert float((run(backend(flashinfer_attention, step), step) - oracle(step, kind=kind)).abs().max()) > 0.01
    attention = backend(flashinfer_attention, step, kind)
    if kind.window == 27 and DEVICE == "cpu":
        CALLS.clear()
        attention.begin(step.batch)
        (_, _, extended, _), (_, _, decoded, _) = CALLS
        assert extended[1].tolist() == [0, 3], "of tokens 50 to 58 the first sees from 24 on: page 0 is left out"
        assert decoded[0].tolist() == [0, 3, 6, 8, 9]


def test_layers_of_several_kinds_go_to_the_next_backend_in_words() -> None:
    kinds = (AttentionKind(window=9), PLAIN)
    flashinfer, triton = BACKENDS["flashinfer"], BACKENDS["triton"]
    assert flashinfer.lacks(kinds) == "plans a step for layers of one kind, and this model's are of 2"
    assert flashinfer.lacks(kinds[:1]) is None
    sunk = (AttentionKind(sinks=True), PLAIN)
    assert flashinfer.lacks(sunk) == "serves no attention with sinks, which this model has"
    assert triton.lacks(kinds) is None


@pytest.mark.parametrize("taken", ["short", "long"])
def test_prompts_whose_tiles_fill_a_hopper_gpu_take_fa3(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """Two requests, the first after a prefix: with the second one's 9 tokens full tiles are enough for the device."""
    if DEVICE == "cpu":
        monkeypatch.setattr(flashinfer_attention, "is_hopper", lambda device: True)
        monkeypatch.setattr(workspace, "num_sms", lambda device: 20)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FA3 is for Hopper GPUs")
    lengths = [(40, workspace.filling_tokens(8, torch.device(DEVICE)) - 9), (0, 9)]
    step = half_step(lengths[: 1 if taken == "short" else 2], dtype=torch.bfloat16)
    attention = backend(flashinfer_attention, step)
    assert error(attention, step) < 3e-2
    assert attention._extend is attention._prefills[taken]
    chosen = backend(flashinfer_attention, half_step([(0, 1)]), AttentionKind(window=27))
    assert "long" not in chosen._prefills, "FA3 with a window was not measured"


FAR_PAGES = 81_920 if DEVICE == "cuda" else 200  # of 64 KiB: 5 GiB, further than 32 bits of bytes and of elements


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_the_last_pages_of_a_large_pool_are_read_and_written(
    flashinfer_attention: Any, kind: str, prefill: str
) -> None:
    """32 query heads and 8 of K and V of 128 dimensions, in bf16. On a CPU the pool is small."""
    lengths = [(0, 9), (33, 20), (16, 1)] if kind == "extend" else [(40, 1), (3, 1), (33, 1)]
    step = half_step(lengths, dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128)
    wanted = oracle(step)
    near = step.pool.data
    far = torch.zeros(FAR_PAGES, *near.shape[1:], dtype=near.dtype, device=near.device)
    far[-len(near) :] = near
    step.pool.data = far
    for slots in (step.batch.table, step.batch.out_slots):
        slots += (FAR_PAGES - len(near)) * step.pool.page_size
    got = run(backend(flashinfer_attention, step, prefill=prefill), step).float()
    assert float((got - wanted).abs().max()) < 3e-2
    assert not far[: -len(near)].any()


def test_a_step_for_a_graph_takes_the_wrapper_of_its_size(flashinfer_attention: Any) -> None:
    step = half_step([(40, 1), (40, 1), (9, 1)])
    step.batch.num_decode = 3
    attention = backend(flashinfer_attention, step)
    made = []
    for _ in range(2):
        attention.begin_graph(step.batch)
        attention.begin_captured(step.batch)
        made.append(attention.forward(0, step.q, step.k, step.v))
        attention._indices.zero_()
    first, again = made
    assert torch.equal(first, again)
    attention.begin(step.batch)
    assert float((attention.forward(0, step.q, step.k, step.v) - first).abs().max()) < ALLOWED
    if DEVICE == "cpu":
        assert sum(method == "__init__" and "use_cuda_graph" in options for _, method, _, options in CALLS) == 1


def test_an_unsupported_pool_is_named(flashinfer_attention: Any) -> None:
    why_not = flashinfer_attention.why_not
    half, full = torch.bfloat16, torch.float32
    assert why_not(half, dtype=half, head_dim=128) is None
    says = "knows K and V in bfloat16, float16 and float8_e4m3fn, not float32"
    assert why_not(full, dtype=full, head_dim=128) == says
    assert why_not(torch.float8_e4m3fn, dtype=half, head_dim=128) is None
    assert why_not(torch.float8_e4m3fn, dtype=full, head_dim=128) == (
        "wants queries in bfloat16 or float16 for K and V in float8_e4m3fn, not in float32"
    )
    assert why_not(half, dtype=full, head_dim=128) == (
        "wants queries in the dtype of K and V, which is bfloat16, not in float32"
    )
    assert why_not(half, dtype=half, head_dim=80) == "knows heads of 64, 128, 256 dimensions, not 80"


SHAPE: Heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def choose(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, AttentionChoice]:
    """What `auto` takes on a GPU, or on one that is not there."""
    if DEVICE == "cpu":
        fake_cuda.install(monkeypatch)
    return choose_on(torch.device("cuda", 0))


def choose_on(device: torch.device) -> tuple[Any, AttentionChoice]:
    pool = MHATokenToKVPool(2, 4, 1, 2, 64, torch.float16, device)
    return make_attention("auto", AttentionSpec(pool=pool, dtype=torch.float16, **SHAPE))


def failing(text: str) -> Any:
    def begin(self: object, batch: object) -> None:
        raise RuntimeError(text)

    return begin


def test_auto_takes_flashinfer_where_its_trial_step_runs(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial is two mixed steps, so that every kernel is there before the first request.
    What first use compiles is said before it, and ninja is found though the environment was not activated."""
    scripts = sysconfig.get_path("scripts")
    elsewhere = os.pathsep.join(place for place in os.environ["PATH"].split(os.pathsep) if place != scripts)
    monkeypatch.setenv("PATH", elsewhere)
    with caplog.at_level(logging.INFO, logger="replicas.attention"):
        backend, choice = choose(monkeypatch)
    assert isinstance(backend, flashinfer_attention.FlashInferAttention)
    assert choice == AttentionChoice(name="flashinfer", why="the fast one of this device")
    assert [record.message for record in caplog.records] == [
        "attention: compiling FlashInfer's kernels, minutes, once on this machine",
        "attention: flashinfer, the fast one of this device",
    ]
    assert os.environ["PATH"] == scripts + os.pathsep + elsewhere
    if DEVICE == "cpu":
        assert [method for _, method, _, _ in CALLS].count("run") == 2 * 2
        backends = [
            options.get("backend") for name, method, _, options in CALLS if "Prefill" in name and method == "__init__"
        ]
        assert backends == ["fa2", "fa3"]


def test_auto_takes_triton_where_flashinfer_fails_in_its_trial_step(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_attention.FlashInferAttention, "begin", failing("nvcc is not there"))
    backend, choice = choose(monkeypatch)
    assert isinstance(backend, triton_paged.TritonAttention)
    assert choice == AttentionChoice(
        name="triton", why="since flashinfer failed in a trial step: RuntimeError: nvcc is not there"
    )


def test_auto_takes_no_slow_reference_on_a_gpu_and_says_what_to_do(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_attention.FlashInferAttention, "begin", failing("nvcc is not there"))
    monkeypatch.setattr(triton_paged.TritonAttention, "begin", failing("no C compiler"))
    says = r"nvcc is not there; triton failed in a trial step: .*no C compiler\. .* or set attention: torch_native"
    with pytest.raises(InvalidConfig, match=says):
        choose(monkeypatch)


def test_one_replica_of_a_machine_at_a_time_compiles_in_its_trial_step(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Beside Triton's own cache, whose folder is not there yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    held: list[str] = []

    def look(backend: object, spec: object) -> None:
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(tmp_path / "cache" / ".manta-attention.lock", timeout=0).acquire()
        held.append(type(backend).__name__)

    monkeypatch.setattr(choosing, "try_out", look)
    choose(monkeypatch)
    assert held == ["FlashInferAttention"]
    filelock.FileLock(tmp_path / "cache" / ".manta-attention.lock", timeout=0).acquire().lock.release()


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU that has failed is of no use to the tests after this one")
def test_a_trial_step_that_breaks_the_gpu_ends_the_start_with_what_broke_it(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access every call fails, under whatever name: Triton's would be a lie."""
    fake = fake_cuda.install(monkeypatch)

    def illegal(self: object, batch: object) -> None:
        fake.sticky = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(fake.sticky)

    monkeypatch.setattr(flashinfer_attention.FlashInferAttention, "begin", illegal)
    with pytest.raises(EngineDead, match="attention: flashinfer has broken cuda:0 for this process") as caught:
        choose_on(fake_cuda.CUDA)
    assert "illegal memory access" in str(caught.value.__cause__)


def test_a_pool_on_a_cpu_is_refused() -> None:
    pool = MHATokenToKVPool(2, 4, 1, 2, 64, torch.float16, "cpu")
    for name in ("flashinfer", "triton"):
        with pytest.raises(InvalidConfig, match=f"{name} runs on a GPU"):
            make_attention(name, AttentionSpec(pool=pool, dtype=torch.float16, **SHAPE))


@pytest.mark.skipif(not REAL, reason="flashinfer is not installed; its signatures cannot be held against our calls")
@pytest.mark.skipif(DEVICE == "cuda", reason="the real library answers the other tests here")
def test_every_call_fits_the_real_librarys_signature(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = half_step([(30, 9), (40, 1), (33, 1), (60, 1)])
    step.batch.num_decode = 3
    attention = backend(flashinfer_attention, step)
    attention.begin(step.batch)
    attention.forward(0, step.q, step.k, step.v)
    decode = half_step([(40, 1), (9, 1)])
    attention = backend(flashinfer_attention, decode)
    for _ in range(2):
        attention.begin_graph(decode.batch)
        attention.begin_captured(decode.batch)
        attention.forward(0, decode.q, decode.k, decode.v)
    calls = list(CALLS)
    monkeypatch.delitem(sys.modules, "flashinfer")
    real = importlib.import_module("flashinfer")
    for name, method, arguments, options in calls:
        thing = getattr(real, name)
        if not method:
            inspect.signature(thing).bind(*arguments, **options)
            continue
        function = getattr(thing, method)
        if method == "plan":  # newer ones hide their names behind **kwargs
            function = getattr(thing, "_plan_impl", function)
        inspect.signature(function).bind(None, *arguments, **options)
    assert {(name, method) for name, method, _, _ in calls} == {
        (kind, method)
        for kind in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
        for method in ("__init__", "plan", "run")
    } | {("fast_decode_plan", "")}
