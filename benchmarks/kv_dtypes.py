"""`python -m benchmarks.kv_dtypes [--json OUT]`: what a narrow `cache.kv_dtype` costs the embedded model's answers.

Perplexity of 2,000 tokens of a text, and how long greedy answers to 8 beginnings of it agree with those of a float32
pool. Speed is measured by `python -m benchmarks.kernels`.
"""

import argparse
from collections.abc import Sequence

from benchmarks import driver
from benchmarks.accuracy import Agreement
from benchmarks.perplexity import perplexity, text_ids
from benchmarks.report import Row, publish
from replicas.config import CacheConfig, KvDType
from replicas.engine.engine import Engine
from replicas.launch import load_engine
from replicas.types import TokenIds
from tests.embedded import MODEL

KV_DTYPES: tuple[KvDType, ...] = ("float32", "bfloat16", "int8", "fp8")
NUM_ANSWERS, PROMPT_LEN, ANSWER_LEN = 8, 200, 64


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m benchmarks.kv_dtypes", description=__doc__)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    publish(measure(), json_path=parse.parse_args(argv).json)


def measure() -> list[Row]:
    section, rows = "perplexity and greedy answers by cache.kv_dtype", []
    exact: float = 0.0
    wanted: Sequence[Sequence[int]] = ()
    for kv_dtype in KV_DTYPES:
        engine = load_engine(
            MODEL, cache=CacheConfig(kv_dtype=kv_dtype, max_total_tokens=8192), context_len=2048
        )
        ids = text_ids(engine)
        found, answers = perplexity(engine, ids), greedy(engine, ids)
        engine.close()
        exact, wanted = exact or found, wanted or answers
        agreed = Agreement.of(answers, wanted).first_differences
        note = f"{100 * (found / exact - 1):+.3f} %"
        rows.append(Row.of(section, f"{kv_dtype}: perplexity of {len(ids):,} tokens", [found], "", note=note))
        name = f"{kv_dtype}: tokens of {ANSWER_LEN} before the first that differs"
        rows.append(Row.of(section, name, agreed, "tokens"))
    return rows


def greedy(engine: Engine, ids: TokenIds) -> Sequence[Sequence[int]]:
    """Answers to beginnings of the text, one after the other in it."""
    prompts = [ids[i * PROMPT_LEN : (i + 1) * PROMPT_LEN].tolist() for i in range(NUM_ANSWERS)]
    return driver.decode(engine, prompts, ANSWER_LEN).token_ids


if __name__ == "__main__":
    main()
