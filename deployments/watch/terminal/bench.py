"""``manta bench``: a short load of chats on a running Manta, and what its clients saw.

Each of several users chats on a thread: a turn follows the answer to the turn before, and a new conversation follows
the last turn. All users of a run share a system message. So a part of each prompt is cached, as in chats of people; no
prompt begins as one of an earlier run did, so that two runs can be compared.

Invariant: a request counts once, as answered or as failed; times are those of answered requests alone.
"""

import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deployments.watch.observatory.figures import QUANTILES, quantile
from deployments.watch.terminal import ask
from deployments.watch.terminal.chat import ChatOptions, ChatTurn, Conversation
from deployments.watch.terminal.table import Table, count, percent, plain, seconds, share, spaced

TURNS = 4  # of a conversation
QUESTION_WORDS, SYSTEM_WORDS = 40, 200
AFTER_FAILURE_S = 1.0  # before a user whose request failed sends another
ENOUGH = 100  # requests for a p99
WORDS = (
    "river stone window garden market bridge letter winter engine mountain paper island teacher forest signal copper "
    "harbour ladder morning pocket silver thunder village weather yellow basket candle desert feather hammer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer as its client saw it."""

    turn: ChatTurn
    gaps_s: tuple[float, ...]  # between the parts of its text


class ChatLoad:
    """Users who chat until the time is over, and what came of their requests."""

    def __init__(self, url: str, key: str | None, options: ChatOptions) -> None:
        self.answered: list[Answered] = []
        self.failed: list[ask.Unanswered] = []
        self._url, self._key, self._options = url, key, options
        self.over = threading.Event()  # once it is set, no more requests are sent

    def run(self, *, users: int, for_s: float) -> None:
        """Have each user send one request, and more until ``for_s`` is over; wait for the answers."""
        shared = f"{_words(random.Random(), SYSTEM_WORDS)}. Answer at length."
        threads = [threading.Thread(target=self._chat, args=(shared,), daemon=True) for _ in range(users)]
        for each in threads:
            each.start()
        try:
            self.over.wait(for_s)
        finally:
            self.over.set()
        for each in threads:
            each.join()

    def _chat(self, shared: str) -> None:
        draw, turn = random.Random(), 0
        talk = Conversation(self._url, self._key, replace(self._options, system=shared), time.monotonic)
        while turn == 0 or not self.over.is_set():
            if turn % TURNS == 0:
                talk.forget()
            turn += 1
            try:
                times = [time.monotonic() for _ in talk.say(f"Tell me about {_words(draw, QUESTION_WORDS)}.")]
            except ask.Unanswered as error:
                self.failed.append(error)
                self.over.wait(AFTER_FAILURE_S)
                continue
            assert talk.last is not None
            gaps_s = (after - before for before, after in itertools.pairwise(times))
            self.answered.append(Answered(turn=talk.last, gaps_s=tuple(gaps_s)))


def _words(draw: random.Random, num: int) -> str:
    return " ".join(draw.choices(WORDS.split(), k=num))


def report(answered: Sequence[Answered], failed: Sequence[ask.Unanswered], wall_s: float) -> str:
    """Write what the clients saw in ``wall_s``."""
    usages = [each.turn.usage for each in answered]
    prompt, output = (sum(each.get(f"{name}_tokens", 0) for each in usages) for name in ("prompt", "completion"))
    cached = sum((each.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for each in usages)
    lines = [
        f"requests   {len(answered) + len(failed)} in {seconds(wall_s)}, {len(failed)} failed",
        *(f"           {number} x {message}" for message, number in Counter(map(str, failed)).most_common()),
        f"output     {count(output / wall_s)} tokens/s",
        f"prompts    {count(prompt)} tokens, {percent(share(cached, prompt))} of them cached",
    ]
    ttfts_s = (each.turn.first_s for each in answered if each.turn.first_s is not None)
    times = {"time to first token": ttfts_s, "time between tokens": (gap for each in answered for gap in each.gaps_s)}
    shown = list(QUANTILES) if len(answered) >= ENOUGH else ["p50", "p95"]
    table = Table([{"": name, **_quantiles(values, shown)} for name, values in times.items()])
    few = [] if len(shown) == 3 else [f"(no p99: it takes {ENOUGH} answers, and there are {len(answered)})"]
    return plain(spaced(["\n".join(lines), table, *few]))


def _quantiles(values: Iterable[float], shown: Iterable[str]) -> dict[str, str]:
    ranked = sorted(values)
    return {f">{name}": seconds(quantile(ranked, QUANTILES[name])) for name in shown}


def run(url: str, key: str | None, options: ChatOptions, *, users: int, for_s: float) -> int:
    """Run the command; Ctrl-C ends it early. Return the exit status: 0, or that of the first request that failed."""
    try:
        options = replace(options, model=options.model or ask.first_model(url, key))
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    print(f"{options.model} at {url}: chats for {seconds(for_s)}, concurrency {users}, {TURNS} turns a conversation, "
          f"answers of up to {options.max_tokens} tokens", file=sys.stderr)  # fmt: skip
    load, started_s = ChatLoad(url, key, options), time.monotonic()
    try:
        load.run(users=users, for_s=for_s)
    except KeyboardInterrupt:
        print("stopped: these are the requests that had ended", file=sys.stderr)
    answered, failed = load.answered.copy(), load.failed.copy()  # after Ctrl-C the users go on until the process ends
    print(report(answered, failed, time.monotonic() - started_s))
    return failed[0].status if failed else 0
