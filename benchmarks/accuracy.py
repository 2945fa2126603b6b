"""`python -m benchmarks.accuracy [--prompts N]`: what int8 weights cost in accuracy, against fp32, in one run.

Perplexity of 2,000 tokens of prose (benchmarks/perplexity.py), and greedy agreement: both engines continue the same
pieces of that text by 64 tokens; counted are equal tokens, and the place where the two first differ. After that place
the two write different texts, so that later tokens differ by nature.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import driver
from benchmarks.perplexity import perplexity, text_ids
from benchmarks.report import Row, publish
from replicas.config import CacheConfig, Quantization
from replicas.engine.engine import Engine
from replicas.launch import load_engine

MODEL = "models/SmolLM2-135M-Instruct"
PROMPT_LEN, NUM_NEW = 96, 64


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two engines' greedy answers to the same prompts."""

    equal_share: float  # of all tokens
    first_differences: tuple[int, ...]  # of each answer the first token that differs; its length where none does

    @classmethod
    def of(cls, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> "Agreement":
        equal = [[a == b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
        firsts = tuple(row.index(False) if False in row else len(row) for row in equal)
        return cls(sum(map(sum, equal)) / sum(map(len, equal)), firsts)


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parse.add_argument("--prompts", type=int, default=16)
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    publish(measure(options.prompts, options.threads), json_path=options.json)


def measure(num_prompts: int, num_threads: int) -> list[Row]:
    """Perplexities, and the agreement of int8 with fp32."""
    exact, exact_answers = _answers("none", num_prompts, num_threads)
    rounded, rounded_answers = _answers("int8", num_prompts, num_threads)
    agreement = Agreement.of(rounded_answers, exact_answers)
    section = f"int8 weights against fp32, {num_prompts} x {NUM_NEW} greedy tokens"
    return [
        Row.of(section, "perplexity, fp32", [exact], ""),
        Row.of(section, "perplexity, int8", [rounded], "", target="within 1 %", note=f"{rounded / exact - 1:+.2%}"),
        Row.of(section, "equal greedy tokens", [100 * agreement.equal_share], "%"),
        Row.of(section, "first difference, mean", [statistics.mean(agreement.first_differences)], "tokens"),
    ]


def _answers(quantization: Quantization, num_prompts: int, num_threads: int) -> tuple[float, list[tuple[int, ...]]]:
    engine = load_engine(
        MODEL, cache=CacheConfig(max_total_tokens=8192), num_threads=num_threads, quantization=quantization
    )
    try:
        ids = text_ids(engine)
        step = (len(ids) - PROMPT_LEN) // num_prompts
        prompts = [ids[i * step : i * step + PROMPT_LEN].tolist() for i in range(num_prompts)]
        return perplexity(engine, ids), [_answer(engine, prompt) for prompt in prompts]
    finally:
        engine.close()


def _answer(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    return driver.decode(engine, [prompt], NUM_NEW).token_ids[0]


if __name__ == "__main__":
    main()
