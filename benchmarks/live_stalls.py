"""What a long prompt does to answers that are being written: `python -m benchmarks.live_stalls`.

Two replicas on a local Ray, alternately as two whole ones (unified) and as one for prefill and one for decode. Some
chats write long answers; meanwhile prompts of 4,000 tokens arrive, one after another. Measured is the time between the
tokens of the chats (ITL), as their clients see it, with and without the long prompts, and the first token of the
long prompts themselves.

What to expect. A whole replica that takes a long prompt makes one token of each chat there in each of the prompt's
steps, which take many times a decode step: those chats are slower for all of the prompt's time, those on the other
replica are not. (``scheduler.mixed_steps: false``: they stall for all of it.) Apart, a prompt slows no chat; but all of
them share one replica, so that each token takes longer in the median. That is the trade: a better p99 for a worse p50.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import live_app
from benchmarks.client import Client, ClosedLoop, OpenLoop, Run
from benchmarks.report import Row, publish
from benchmarks.serving import percentile
from benchmarks.workloads import random_lengths

SECTION = "long prompts beside answers being written, 2 replicas"
VOCAB_SIZE = 32_000
MODES = {
    "unified": ("serve_config.yaml", {"replicas": {"count": 2, "cpus": 1}}),
    "disaggregated": ("docs/examples/disaggregated.yaml", {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    chats: int
    chat_len: int  # tokens of an answer
    prompts: int
    prompt_len: int
    rate: float  # long prompts a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One mode in one round. Times in seconds."""

    quiet_gaps_s: tuple[float, ...]  # between the chats' tokens, nothing else running
    gaps_s: tuple[float, ...]  # with long prompts
    tpots_s: tuple[float, ...]  # of each chat, with long prompts
    ttfts_s: tuple[float, ...]  # of the long prompts
    num_failed: int


async def measure(url: str, sizes: Sizes, seed: int, max_s: float) -> Measured:
    """Chats alone, then chats with long prompts beside them."""
    client = Client(url, "SmolLM2-135M-Instruct")

    async def chats(number: int) -> Run:
        workload = random_lengths(
            num_requests=sizes.chats, input_len=64, output_len=sizes.chat_len, vocab_size=VOCAB_SIZE,
            seed=3 * seed + number,
        )  # fmt: skip
        return await client.run(workload, ClosedLoop(concurrency=sizes.chats), max_s=max_s)

    async def prompts() -> Run:
        workload = random_lengths(
            num_requests=sizes.prompts, input_len=sizes.prompt_len, output_len=2, vocab_size=VOCAB_SIZE, seed=seed
        )
        await asyncio.sleep(2.0)  # the chats have begun
        return await client.run(workload, OpenLoop(rate=sizes.rate, seed=seed), max_s=max_s)

    warm_up = random_lengths(num_requests=2, input_len=600, output_len=4, vocab_size=VOCAB_SIZE, seed=3 * seed + 2)
    await client.run(warm_up, ClosedLoop(concurrency=2), max_s=max_s)
    quiet = await chats(0)
    busy, long = await asyncio.gather(chats(1), prompts())
    return Measured(
        quiet_gaps_s=_gaps(quiet),
        gaps_s=_gaps(busy),
        tpots_s=tuple(sample.tpot_s for sample in busy.answered if sample.tpot_s is not None),
        ttfts_s=tuple(sample.ttft_s for sample in long.answered if sample.ttft_s is not None),
        num_failed=sum(sum(run.errors.values()) for run in (quiet, busy, long)),
    )


def _gaps(run: Run) -> tuple[float, ...]:
    return tuple(gap for sample in run.answered for gap in sample.gaps_s)


def rows_of(found: dict[str, list[Measured]]) -> list[Row]:
    """One table: each mode's times by round, and the ratios."""
    rows = []

    def add(name: str, values: Sequence[float], unit: str) -> None:
        rows.append(Row.of(SECTION, name, values, unit))

    for mode, rounds in found.items():
        for name, of in (("without long prompts", "quiet_gaps_s"), ("with long prompts", "gaps_s")):
            for share in (50, 99, 100):
                values = [1000 * percentile(list(getattr(each, of)), share) for each in rounds]
                add(f"{mode}, {name}: ITL p{share}", values, "ms")
        add(f"{mode}: TPOT of the slowest chat", [1000 * max(each.tpots_s) for each in rounds], "ms")
        add(f"{mode}: TTFT p50 of long prompts", [percentile(list(each.ttfts_s), 50) for each in rounds], "s")
        add(f"{mode}: failed", [float(each.num_failed) for each in rounds], "")
    pairs = list(zip(found["unified"], found["disaggregated"], strict=True))
    for share in (50, 99, 100):
        ratios = [percentile(list(b.gaps_s), share) / percentile(list(a.gaps_s), share) for a, b in pairs]
        add(f"ITL p{share} with long prompts, disaggregated / unified", ratios, "x")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.live_stalls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--rounds", type=int, default=2, help="each serves both modes, in alternating order")
    parse.add_argument("--chats", type=int, default=4)
    parse.add_argument("--chat-len", type=int, default=400, help="tokens of an answer")
    parse.add_argument("--prompts", type=int, default=4)
    parse.add_argument("--prompt-len", type=int, default=4000)
    parse.add_argument("--rate", type=float, default=0.2, help="long prompts a second")
    parse.add_argument("--max-s", type=float, default=240.0, help="seconds a run may take")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    sizes = Sizes(
        chats=options.chats,
        chat_len=options.chat_len,
        prompts=options.prompts,
        prompt_len=options.prompt_len,
        rate=options.rate,
    )
    found: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for round_ in range(options.rounds):
        for mode in list(MODES) if round_ % 2 == 0 else list(reversed(MODES)):
            config_file, args = MODES[mode]
            with live_app.serving(config_file, args) as url:
                measured = asyncio.run(measure(url, sizes, options.seed + round_, options.max_s))
            found[mode].append(measured)
            p99_ms = 1000 * percentile(list(measured.gaps_s), 99)
            print(f"  {mode}: ITL p99 {p99_ms:.0f} ms", file=sys.stderr, flush=True)
    publish(rows_of(found), json_path=options.json)


if __name__ == "__main__":
    main()
