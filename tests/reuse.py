"""What a cache finds again of texts: one KvCache without a model, and what comes to it, one request at a time.

python -m tests.reuse chats agents fifty     # prints a table; without names all but the trace
python -m tests.reuse trace                  # the second half of ../shared/traces/conversation_trace.jsonl
"""

import json
import pathlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from replicas.cache.kv import KvCache
from replicas.config import AttentionKind, CacheConfig, Hardware
from replicas.memory import sizing
from replicas.memory.sizing import PoolSize
from replicas.request import Req
from replicas.resolve import resolve
from replicas.types import Finish, FinishReason, TokenIds
from tests.harness import choice_of, model_config

TRACE = pathlib.Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
STATE_TOKENS = 1500  # whose K and V take as much as a state: Qwen3.5's default shape
BLOCK = 512  # tokens of a trace's block
Ids = TokenIds


def full(num_tokens: int, page_size: int = 16) -> PoolSize:
    """Size a pool whose layers all see everything."""
    return PoolSize(num_pages=num_tokens // page_size, page_size=page_size, cell_bytes=1)


def windows(num_tokens: int, page_size: int = 16) -> PoolSize:
    """Size one of the same bytes for a model of Gemma 3's shape: five of six layers see 512 tokens."""
    kinds = (AttentionKind(window=512),) * 5 + (AttentionKind(),)
    model = model_config(num_layers=6, context_len=131072, attention_kinds=kinds)
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30)
    config = resolve(model, hardware, cache=CacheConfig(page_size=page_size))
    cell = model.kv_cell_bytes(tp=1, kv_dtype=config.kv_dtype)
    return sizing.with_windows(config, sizing.pool_size(num_tokens * cell, cell, page_size, None), num_tokens * cell)


def states(num_tokens: int, page_size: int = 16) -> PoolSize:
    """Size one of the same bytes for a model with recurrent states."""
    size, pages = full(num_tokens, page_size), -(-STATE_TOKENS // page_size)
    return replace(size, num_snapshots=size.num_pages // pages, snapshot_pages=pages)


class Texts:
    """A cache, and what was asked of it. Chunks of ``chunk`` tokens."""

    def __init__(self, size: PoolSize, *, chunk: int = 512, seed: int = 1) -> None:
        self.kv = KvCache(size=size, max_requests=8, context_len=1 << 18)
        self.cached = self.asked = 0  # tokens of prompts
        self._chunk, self._ids = chunk, np.random.default_rng(seed)

    def new(self, num_tokens: int) -> Ids:
        """Make tokens that nobody has asked for."""
        return self._ids.integers(0, 30000, num_tokens, dtype=np.int32)

    def ask(self, prompt: Ids, answer: int | Ids) -> tuple[Ids, int]:
        """Ask for ``prompt``, and have so many tokens answered, or these. Returns: both, and the tokens cached."""
        kv, made = self.kv, self.new(answer) if isinstance(answer, int) else answer
        req = choice_of("r", prompt, max_new_tokens=len(made) + 1)
        cached = kv.admit(req)
        self.cached, self.asked = self.cached + cached, self.asked + len(prompt)
        while req.computed_len < req.num_tokens:
            assert req.holding is not None
            end, chunk_end = req.computed_len + self._chunk, req.holding.behind.chunk_end
            end = min(req.num_tokens, end // kv.page_size * kv.page_size)
            end = chunk_end if req.computed_len < chunk_end < end else end
            kv.extend(req, end)
            req.computed_len = end
            kv.commit(req)
        for at in range(0, len(made), kv.page_size):  # a page of steps at once
            self._decode(req, made[at : at + kv.page_size])
        req.finish = Finish(reason=FinishReason.LENGTH)
        text = req.ids[: req.num_tokens].copy()
        kv.release(req, keep=True)
        return text, cached

    def _decode(self, req: Req, made: Ids) -> None:
        assert req.holding is not None
        for token in made:
            req.append(int(token))
        self.kv.extend(req, req.holding.kv_len + len(made))
        req.computed_len += len(made)
        if self.kv.store.parts is not None:
            row = self.kv.table.view(req.holding.row, 0, req.holding.kv_len)
            self.kv.store.parts.moved_on(req.holding, req.holding.kv_len, row)


def chats(
    size: PoolSize,
    *,
    num: int,
    turns: int,
    in_turn: bool,
    system: int = 0,
    num_systems: int = 1,
    user: tuple[int, int] = (100, 100),
    answer: tuple[int, int] = (100, 100),
) -> float:
    """Have ``num`` conversations of ``turns``, by chance or in turn, behind prompts of ``system`` tokens; a turn adds
    ``user`` tokens, least and most, and an ``answer``. Returns: the share of the prompts' tokens that was cached."""
    texts, draw = Texts(size), random.Random(1)
    starts = [texts.new(system) for _ in range(num_systems)]
    so_far, done, active = [starts[i % num_systems] for i in range(num)], [0] * num, list(range(num))
    while active:
        i = active[0] if in_turn else draw.choice(active)
        active.append(active.pop(active.index(i)))
        prompt = np.concatenate([so_far[i], texts.new(draw.randint(*user))])
        so_far[i], _ = texts.ask(prompt, draw.randint(*answer))
        done[i] += 1
        if done[i] == turns:
            active.remove(i)
    return texts.cached / texts.asked


def trace(size: PoolSize) -> float:
    """Ask for the prompts of the public trace, and have its answers made, which no prompt repeats. Returns: of the
    second half's prompts, the share that was cached."""
    texts, lines = Texts(size, chunk=8192), TRACE.read_text().splitlines()
    for number, line in enumerate(lines):
        if number == len(lines) // 2:
            texts.cached = texts.asked = 0
        told = json.loads(line)
        prompt = np.repeat(np.array(told["hash_ids"], dtype=np.int32), BLOCK)[: told["input_length"]]
        texts.ask(prompt, np.full(told["output_length"], 10**6 + number, dtype=np.int32))
    return texts.cached / texts.asked


Load = Callable[[PoolSize, bool], float]  # and whether conversations come in turn

LOADS: dict[str, tuple[Load, Sequence[int]]] = {  # and pools, in tokens of full attention
    "chats": (
        lambda size, in_turn: chats(
            size, num=24, turns=8, in_turn=in_turn, system=1500, num_systems=3, user=(20, 400), answer=(30, 300)
        ),
        (16_000, 32_000, 64_000, 128_000),
    ),
    "agents": (
        lambda size, in_turn: chats(
            size, num=24, turns=30, in_turn=in_turn, system=3000, user=(50, 1500), answer=(20, 150)
        ),
        (150_000, 300_000, 600_000),
    ),
    "fifty": (
        lambda size, in_turn: chats(size, num=50, turns=8, in_turn=in_turn, user=(20, 400), answer=(30, 300)),
        (38_000,),
    ),
}


def main() -> None:
    """Print the share of prompts that is cached, of each kind of model that is named, or of all, in the same bytes."""
    kinds = {each.__name__: each for each in (full, windows, states)}
    names = [name for name in sys.argv[1:] if name not in kinds] or list(LOADS)
    asked = [kinds[name] for name in sys.argv[1:] if name in kinds] or list(kinds.values())
    print("| load, tokens | " + " | ".join(kind.__name__ for kind in asked) + " |\n|" + "---|" * (1 + len(asked)))
    for name in names:
        if name == "trace":
            for num_tokens in (4_000_000, 8_000_000):
                found = [f"{trace(kind(num_tokens, BLOCK)):.3f}" for kind in asked]
                print(f"| trace, {num_tokens:,} | " + " | ".join(found) + " |", flush=True)
            continue
        load, sizes = LOADS[name]
        for num_tokens in sizes:
            for in_turn in (False, True):
                found = [f"{load(kind(num_tokens), in_turn):.3f}" for kind in asked]
                order = "in turn" if in_turn else "by chance"
                print(f"| {name} {order}, {num_tokens:,} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
