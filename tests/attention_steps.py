"""Steps over a small paged pool with shuffled pages, for tests and benchmarks of attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta, KvPool
from replicas.memory.scaled_pool import kv_pool
from replicas.scheduler.plan import PrefixGroup

MAX_DRAWN = 1 << 24  # random numbers of a pool; drawing gigabytes takes longer than measuring


class SmallPool:
    """A KvPool: the one page-major, head-major allocation, without the bookkeeping."""

    def __init__(
        self, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, num_layers: int = 1
    ) -> None:
        self.page_size = page_size
        shape = (num_pages + 1, num_layers, 2, num_kv_heads, page_size, head_dim)
        self.data = torch.from_numpy(np.zeros(shape, np.float32))  # in huge pages, as the engine's pool: numpy asks

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.data[:, layer, 0]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.data[:, layer, 1]

    def scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        page, offset = slots // self.page_size, slots % self.page_size
        return self.get_key_buffer(layer)[page, :, offset], self.get_value_buffer(layer)[page, :, offset]

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        page, offset = loc // self.page_size, loc % self.page_size
        self.data[page, layer, 0, :, offset] = k
        self.data[page, layer, 1, :, offset] = v


@dataclass(kw_only=True)
class Step:
    """One step of a layer: what a backend's begin and forward are given."""

    pool: KvPool
    batch: BatchMeta
    q: Tensor  # [T, H, D], strided as a slice of a fused QKV product
    k: Tensor  # [T, K, D]
    v: Tensor  # [T, K, D]
    num_layers: int


def filled_pool(num_pages: int, shape: dict[str, Any], kv_dtype: str | None, random: torch.Generator) -> KvPool:
    """A pool whose every slot holds normal numbers; they repeat where it is larger than any test's."""
    if kv_dtype is None:
        small = SmallPool(num_pages=num_pages, **shape)
        num_drawn = max(1, MAX_DRAWN // small.data[0].numel())  # pages
        small.data[:num_drawn].normal_(generator=random)
        for start in range(num_drawn, num_pages + 1, num_drawn):
            part = small.data[start : start + num_drawn]
            part.copy_(small.data[: len(part)])
        return small
    pool = kv_pool(kv_dtype, num_pages=num_pages, device="cpu", **shape)
    slots = torch.arange((num_pages + 1) * shape["page_size"])
    k, v = torch.randn(2, len(slots), shape["num_kv_heads"], shape["head_dim"], generator=random)
    pool.set_kv_buffer(0, slots, k, v)
    pool.buffer[:, 1:] = pool.buffer[:, :1]
    return pool


def make_step(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    num_layers: int = 1,
    seed: int = 0,
    num_decode: int | None = None,
    shared: Sequence[tuple[list[int], int]] = (),
    kv_dtype: str | None = None,
    kv_lora_rank: int | None = None,
) -> Step:
    """A step of requests given as (prefix_len, new tokens); K and V of the prefixes are in the pool, pages shuffled.

    Mixed when it says that its last ``num_decode`` requests decode. ``shared``: which requests have the same first
    tokens, and how many, whole pages; all of a group decode, or all extend. Without ``kv_dtype`` the pool is a
    SmallPool, whose numbers a test can set. ``kv_lora_rank``: K and V are one latent vector, with a ``kv_dtype``.
    """
    random = torch.Generator().manual_seed(seed)
    num_pages = [-(-(prefix + new) // page_size) for prefix, new in lengths]
    shape: dict[str, Any] = {
        "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": num_layers,
    }  # fmt: skip
    if kv_lora_rank is not None:
        shape["latent"] = kv_lora_rank, head_dim - kv_lora_rank
    pool = filled_pool(sum(num_pages), shape, kv_dtype, random)
    pages = torch.randperm(sum(num_pages), generator=random) + 1
    table = torch.zeros(len(lengths) + 1, max(num_pages) * page_size, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 1, generator=random)[: len(lengths)].int()
    groups = tuple(PrefixGroup(members=np.array(members, np.int32), length=length) for members, length in shared)
    leader = {member: (members[0], length) for members, length in shared for member in members}
    per_request = list(pages.split(num_pages))
    for member, (first, length) in leader.items():
        assert length % page_size == 0
        assert length < sum(lengths[member])
        per_request[member][: length // page_size] = per_request[first][: length // page_size]
    out_slots, positions = [], []
    for row, (prefix, new), own in zip(rows.tolist(), lengths, per_request, strict=True):
        slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()
        table[row, : len(slots)] = slots
        out_slots.append(slots[prefix : prefix + new])
        positions.append(torch.arange(prefix, prefix + new))
    prefix_lens = torch.tensor([prefix for prefix, _ in lengths], dtype=torch.int32)
    new_lens = torch.tensor([new for _, new in lengths], dtype=torch.int32)
    num_tokens = int(new_lens.sum())
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=random)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    v = v if kv_lora_rank is None else k[..., :kv_lora_rank]
    is_decode = num_decode is None and bool((new_lens == 1).all())
    first_decode = 0 if is_decode else len(lengths) - (num_decode or 0)
    batch = BatchMeta(
        is_decode=is_decode,
        qo_indptr=torch.cat((torch.zeros(1, dtype=torch.int32), new_lens.cumsum(0, dtype=torch.int32))),
        rows=rows,
        prefix_lens=prefix_lens,
        seq_lens=prefix_lens + new_lens,
        positions=torch.cat(positions),
        out_slots=torch.cat(out_slots),
        table=table,
        max_seq_len=int((prefix_lens + new_lens).max()),
        num_tokens=num_tokens,
        num_decode=num_decode or 0,
        prefix_groups=tuple(group for group in groups if group.members[0] >= first_decode),
        prompt_groups=tuple(group for group in groups if group.members[0] < first_decode),
    )
    return Step(pool=pool, batch=batch, q=q, k=k, v=v, num_layers=num_layers)
