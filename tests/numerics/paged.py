"""Runs a model over a paged pool as an engine would, in the plainest way: for tests of numerics."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replicas.attention.base import AttentionSpec, BatchMeta
from replicas.attention.choice import make_attention
from replicas.config import DType, Implementation, ModelConfig, Quantization
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import load_model_config
from replicas.loading.weights import load_weights
from replicas.memory.scaled_pool import kv_pool
from replicas.models.registry import model_class
from tests.numerics.tiny import uncached

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"


class PagedModel:
    """A model, its pool, and a table of requests. Pages are given out in a shuffled order, never taken back.

    What was never written reads 1e4, so that looking where nothing is shows.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TpGroup,
        *,
        page_size: int,
        num_pages: int,
        num_rows: int = 8,
        attention: str = "torch_native",
    ) -> None:
        """K and V are in fp32, whatever the model's dtype."""
        heads = max(1, config.num_kv_heads // tp.size)
        self.pool = kv_pool(
            "float32", num_pages=num_pages, page_size=page_size, num_layers=config.kept_layers, num_kv_heads=heads,
            head_dim=config.head_dim, device=tp.device,
            latent=None if config.mla is None else (config.mla.kv_lora_rank, config.mla.qk_rope_head_dim),
        )  # fmt: skip
        self.pool.buffer.fill_(1e4)
        spec = AttentionSpec(
            pool=self.pool,
            dtype=torch.float32,
            num_heads=config.num_heads // tp.size,
            num_kv_heads=heads,
            head_dim=config.head_dim,
            kinds=config.attention_kinds,
            num_threads=torch.get_num_threads(),
        )
        backend, _ = make_attention(attention, spec)
        self.model = model_class(config)(config, tp, backend)
        load_weights(self.model, config, tp, one_order=False, progress=lambda done, total: None)
        self.table = torch.zeros(num_rows, page_size * num_pages, dtype=torch.int32)
        self.lens = [0] * num_rows
        self._tp, self._vocab_size = tp, config.vocab_size
        self._free = list(range(1, num_pages + 1))
        random.Random(7).shuffle(self._free)

    def run(self, new: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """One step: new tokens of some rows. Returns each row's logits [its tokens, V], which ranks have of rank 0."""
        logits = self.model.forward(*self.pack(new))
        if self._tp.size > 1:
            mine = logits.contiguous() if self._tp.rank == 0 else logits.new_empty(len(logits), self._vocab_size)
            logits = self._tp.broadcast(mine)
        return dict(zip(new, logits.split([len(ids) for ids in new.values()]), strict=True))

    def pack(self, new: Mapping[int, Sequence[int]]) -> tuple[Tensor, BatchMeta]:
        """The step's ids [T] and shape; gives slots to the new tokens."""
        prefix = [self.lens[row] for row in new]
        for row, ids in new.items():
            self._grow(row, len(ids))
        seq = [self.lens[row] for row in new]
        positions = torch.cat([torch.arange(a, b) for a, b in zip(prefix, seq, strict=True)])
        counts = [len(ids) for ids in new.values()]
        row_of = torch.tensor(list(new)).repeat_interleave(torch.tensor(counts))
        meta = BatchMeta(
            is_decode=all(n == 1 for n in counts) and min(prefix) > 0,
            qo_indptr=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            rows=torch.tensor(list(new), dtype=torch.int32),
            prefix_lens=torch.tensor(prefix, dtype=torch.int32),
            seq_lens=torch.tensor(seq, dtype=torch.int32),
            positions=positions,
            out_slots=self.table[row_of, positions].long(),
            table=self.table,
            max_seq_len=max(seq),
            num_tokens=sum(counts),
        )
        return torch.tensor([i for ids in new.values() for i in ids]), meta

    def prefill(self, prompts: Sequence[Sequence[int]], *, chunk: int) -> list[Tensor]:
        """All prompts together, at most ``chunk`` tokens of each a step. Returns each prompt's logits [L, V]."""
        parts: list[list[Tensor]] = [[] for _ in prompts]
        for start in range(0, max(len(p) for p in prompts), chunk):
            step = {row: list(p[start : start + chunk]) for row, p in enumerate(prompts) if start < len(p)}
            for row, logits in self.run(step).items():
                parts[row].append(logits)
        return [torch.cat(part) for part in parts]

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 1 << 20) -> list[list[int]]:
        """The next ``num_tokens`` most likely ids of each prompt."""
        out = [[int(logits[-1].argmax())] for logits in self.prefill(prompts, chunk=chunk)]
        while len(out[0]) < num_tokens:
            logits = self.run({row: ids[-1:] for row, ids in enumerate(out)})
            for row, ids in enumerate(out):
                ids.append(int(logits[row][-1].argmax()))
        return out

    def _grow(self, row: int, count: int) -> None:
        size = self.pool.page_size
        for position in range(self.lens[row], self.lens[row] + count):
            if position % size == 0:
                page = self._free.pop()
                self.table[row, position : position + size] = torch.arange(page * size, (page + 1) * size)
        self.lens[row] += count


def open_model(
    folder: Path,
    *,
    page_size: int = 4,
    num_pages: int = 256,
    num_rows: int = 8,
    attention: str = "torch_native",
    dtype: DType = "float32",
    quantization: Quantization = "none",
    implementation: Implementation = "auto",
    context_len: int | None = None,
) -> PagedModel:
    """The model in ``folder``, on one rank."""
    config = load_model_config(
        str(folder), dtype=dtype, quantization=quantization, implementation=implementation, context_len=context_len
    )
    return PagedModel(
        config,
        TpGroup(device="cpu"),
        page_size=page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        attention=attention,
    )


def assert_as_transformers(
    model: PreTrainedModel, prompts: Sequence[list[int]], logits: Sequence[Tensor], answers: Sequence[list[int]],
    share: float = 1e-4,
) -> None:  # fmt: skip
    """Given each prompt with its answer, Transformers has ``logits`` [L, V] for the prompt, within ``share`` of their
    span, and each id of the answer is its most likely one behind those before it."""
    for prompt, ours, answer in zip(prompts, logits, answers, strict=True):
        wanted = uncached(model, [*prompt, *answer])
        assert_close_in_range(ours, wanted[: len(prompt)], share)
        assert answer == wanted[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def assert_close_in_range(ours: Tensor, wanted: Tensor, share: float) -> None:
    """Largest error below ``share`` of the span of the wanted logits."""
    error, span = (ours - wanted).abs().max().item(), (wanted.max() - wanted.min()).item()
    assert error < share * span, f"max error {error:.3g} is {error / span:.2g} of the logits' range {span:.3g}"
