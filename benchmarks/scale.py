"""How much the offline benchmarks run: the sizes that the issue asks for, or a quick check of every part."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to run."""

    rounds: int = 3
    batches: tuple[int, ...] = (1, 8, 32)
    decode_prompt_len: int = 128
    decode_len: int = 32
    prefill_lens: tuple[int, ...] = (256, 1024)
    prefix_rounds: int = 2  # a round takes minutes with ChunkCache
    num_groups: int = 8
    per_group: int = 8
    prefix_len: int = 1024
    question_len: int = 64
    prefix_output_len: int = 32
    concurrency: int = 16
    unique_requests: int = 8
    unique_len: int = 512


FULL = Scale()
QUICK = Scale(
    rounds=1,
    batches=(1, 8),
    decode_prompt_len=32,
    decode_len=8,
    prefill_lens=(256,),
    prefix_rounds=1,
    num_groups=2,
    per_group=4,
    prefix_len=256,
    question_len=32,
    prefix_output_len=8,
    concurrency=4,
    unique_requests=2,
    unique_len=128,
)
