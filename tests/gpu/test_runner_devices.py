"""Scheduler, pools and model runner on a device: the answer is Transformers', whatever the path. Needs no Ray.

The same tests run on the CPU everywhere, so that on a GPU only the device is new.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta
from replicas.kernels import gpu as kernels_of_gpu
from replicas.models.llama import Llama
from replicas.request import Req
from replicas.runner.batch import DeviceTable, Staging, build_decode, decode_arrays
from replicas.scheduler.plan import DecodePlan, ExtendPlan, ExtendRow, SampleRow, TableWrite
from replicas.types import GenerateRequest, SamplingParams
from tests.gpu import fake_cuda
from tests.gpu.fake_cuda import Launches
from tests.gpu.rigs import DEVICES, DRAWING, NUM_NEW, engine_config, make_rig
from tests.numerics import tiny


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen2", "qwen3-tied"])
def test_greedy_answers_are_transformers_in_batches_chunks_and_hits(tmp_path: Path, kind: str, device: str) -> None:
    model = tiny.save(kind, tmp_path)
    wanted = [tiny.reference(model, prompt, NUM_NEW)[1] for prompt in tiny.PROMPTS]
    for page_size, chunk in ((4, 8), (1, 64)):
        rig = make_rig(engine_config(tmp_path, device, page_size=page_size, chunk=chunk))
        assert rig.answer(tiny.PROMPTS) == wanted  # misses, together
        assert rig.answer(tiny.PROMPTS) == wanted  # hits
        assert rig.scheduler.counters["cached_tokens"] > 0
        assert rig.answer(tiny.PROMPTS[:1]) == wanted[:1]  # alone


@pytest.mark.parametrize("device", DEVICES)
def test_seeded_samples_do_not_depend_on_the_batch(tmp_path: Path, device: str) -> None:
    tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device))
    cuts = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    together = rig.answer(tiny.PROMPTS, **cuts)
    assert [rig.answer([prompt], **cuts)[0] for prompt in tiny.PROMPTS] == together


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_bfloat16_runs_and_stays_near_float32(tmp_path: Path, device: str) -> None:
    """The first token of each prompt has the float32 answer among its two most likely."""
    model = tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device, dtype="bfloat16"))
    first = [ids[0] for ids in rig.answer(tiny.PROMPTS)]
    for prompt, token in zip(tiny.PROMPTS, first, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        assert token in logits.topk(2).indices.tolist()


@pytest.mark.parametrize("device", DRAWING)
def test_tokens_that_stay_on_the_device_are_those_of_the_host(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, both ways; on a CPU the device's operations run there."""
    tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device))
    for sampling in ({}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 5}):
        made = []
        for on_device in (False, True):
            monkeypatch.setattr(rig.runner, "_samples_on_device", on_device)
            made.append(rig.answer(tiny.PROMPTS, **sampling))
        assert made[0] == made[1]


@pytest.mark.parametrize("device", DRAWING)
def test_a_step_that_follows_takes_what_the_one_before_it_sampled(tmp_path: Path, device: str) -> None:
    """The second step is launched before the first one's result is asked for; tokens 2 and 3 of each answer follow."""
    model = tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device, chunk=64))
    rig.runner._samples_on_device = True
    wanted = [tiny.reference(model, prompt, 3)[1] for prompt in tiny.PROMPTS]
    slots = [np.arange(16 * (i + 1) * 4, 16 * (i + 1) * 4 + 40, dtype=np.int32) for i in range(3)]  # pages of 4
    greedy = SamplingParams(temperature=0.0)
    rows, sampling = [], []
    for i, prompt in enumerate(tiny.PROMPTS):
        ids = np.array(prompt, np.int32)
        rows.append(ExtendRow(row=i + 1, token_ids=ids, prefix_len=0, slots=slots[i][: len(ids)], sample=True))
        sampling.append(
            SampleRow(
                params=greedy, position=len(ids), num_output=0, stop_ids=frozenset(), prompt_ids=ids, output_ids=ids[:0]
            )
        )
    writes = tuple(TableWrite(i + 1, 0, slots[i]) for i in range(3))
    steps = [rig.runner.launch(ExtendPlan(table_writes=writes, rows=tuple(rows), sampling=tuple(sampling)))]
    order = np.array([2, 0, 1], np.int32)  # rows of the next step, and where their tokens were sampled
    for step in range(2):
        lens = np.array([len(tiny.PROMPTS[i]) + step + 1 for i in order], np.int32)
        plan = DecodePlan(
            table_writes=(), rows=order + 1, token_ids=np.zeros(3, np.int32), seq_lens=lens,
            slots=np.array([slots[i][n - 1] for i, n in zip(order, lens, strict=True)], np.int32),
            sampling=tuple(sampling[i] for i in order),
            follows=order if step == 0 else np.arange(3, dtype=np.int32),
        )  # fmt: skip
        steps.append(rig.runner.launch(plan))
    made = [step.result().token_ids.tolist() for step in steps]
    assert made[0] == [ids[0] for ids in wanted]
    for step in (1, 2):
        assert made[step] == [wanted[i][step] for i in order]


@pytest.mark.parametrize("sampled", [None, [11, -1, 13]], ids=["rank 1", "rank 0"])
def test_input_ids_and_table_of_a_decode_step_are_one_copy_and_one_launch(
    sampled: list[int] | None, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operations are two, or five where a step follows. -1 is a broken token; a rank that has no tokens keeps
    its ids until they come."""
    if gpu is None:
        pytest.skip("a real device's launches are counted by nsys (docs/gpu.md)")
    rows, token_ids, lens, slots = (np.array(x, np.int32) for x in ([3, 1, 2], [7, 8, 9], [5, 6, 9], [50, 60, 90]))
    plan = DecodePlan(
        table_writes=(), rows=rows, token_ids=token_ids, seq_lens=lens, slots=slots, sampling=(),
        follows=np.array([2, 0, 1], np.int32),
    )  # fmt: skip
    tokens = None if sampled is None else torch.tensor(sampled, device="cuda")
    with Launches() as upload:
        Staging(torch.device("cuda", 0)).upload(decode_arrays(plan, 4))
    for num_kernels, num_others in ((1, 0), (0, 2 if sampled is None else 5)):
        if not num_kernels:
            monkeypatch.setattr(kernels_of_gpu, "kernels", lambda: None)
        table, before = DeviceTable(5, 16, torch.device("cuda", 0)), gpu.kernels
        with Launches() as seen:
            batch = build_decode(plan, table, Staging(torch.device("cuda", 0)), size=4, sampled=tokens)
        assert (gpu.kernels - before, len(seen.names) - len(upload.names)) == (num_kernels, num_others)
        torch.cuda.synchronize()
        assert batch.input_ids.tolist() == ([7, 8, 9, 0] if sampled is None else [13, 11, 0, 0])
        wanted = torch.zeros(5, 16, dtype=torch.int32)
        wanted[[3, 1, 2], [4, 5, 8]] = torch.tensor([50, 60, 90], dtype=torch.int32)
        assert torch.equal(table.slots.cpu(), wanted)
        if num_kernels and sampled is not None:  # which the kernel would read behind its memory
            beyond = replace(plan, follows=np.array([2, 0, 3], np.int32))
            with pytest.raises(AssertionError, match="a row follows a token that is not there"):
                build_decode(beyond, table, Staging(torch.device("cuda", 0)), size=4, sampled=tokens)


class _Slow:
    """A model whose last kernel takes a second."""

    def __init__(self, model: Llama) -> None:
        self._model = model

    def forward(self, input_ids: Tensor, meta: BatchMeta, logits_rows: Tensor | None = None) -> Tensor:
        logits = self._model.forward(input_ids, meta, logits_rows)
        torch.cuda._sleep(2_000_000_000)
        return logits


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_no_work_of_a_chunk_is_pending_when_its_step_returns(tmp_path: Path, device: str) -> None:
    """SPEC H09: whole pages of a chunk that samples nothing are sent next, by a library that knows no stream."""
    tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device, chunk=8))
    rig.runner._model = _Slow(rig.runner._model)  # type: ignore[assignment]
    request = GenerateRequest(rid="a", token_ids=np.arange(20, dtype=np.int32), sampling=SamplingParams())
    rig.scheduler.submit(Req.make(request, index=0, now_s=0.0, eos_ids=frozenset()))
    plan = rig.scheduler.schedule()
    assert plan is not None
    assert not plan.sampling
    rig.runner.run(plan)
    assert torch.cuda.current_stream().query()
