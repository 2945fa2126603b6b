"""What the load consists of: seeded prompts of token ids, or of text, by their shapes. Pure.

Owns:      which tokens are shared between requests, and how many there are.
Invariant: the same arguments give the same workload; another shape or seed shares no prompt with it, so that one
           run's prefixes are never another run's hits. `passages` alone are of one text: no prompt comes twice in a
           run, another run may have some of them again.
"""

from dataclasses import dataclass
from random import Random

FIRST_ID = 256  # below lie special tokens in most vocabularies


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation."""

    token_ids: tuple[int, ...]  # what the user adds to the history
    max_new_tokens: int
    text: str = ""  # in the place of token_ids, until a tokenizer has read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that follow each other; each request sends the whole history, answers included."""

    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations in order of arrival."""

    name: str  # shape and sizes, for reports
    conversations: tuple[Conversation, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


def random_lengths(
    *, num_requests: int, input_len: int, output_len: int, spread: float = 0.0, vocab_size: int, seed: int
) -> Workload:
    """Return unrelated prompts; lengths are uniform in [len * (1 - spread), len * (1 + spread)]."""
    if not 0.0 <= spread < 1.0:
        raise ValueError(f"spread = {spread}; it must be at least 0 and below 1")
    name = f"random {num_requests} x {input_len} in, {output_len} out" + (f", +-{spread:.0%}" if spread else "")
    rng = Random(f"{seed}/{name}")
    conversations = []
    for index in range(num_requests):
        num_in, num_out = (
            max(1, round(length * rng.uniform(1 - spread, 1 + spread))) for length in (input_len, output_len)
        )
        conversations.append(_single(str(index), _ids(rng, num_in, vocab_size), num_out))
    return Workload(name=name, conversations=tuple(conversations))


def shared_prefix(
    *,
    num_groups: int,
    per_group: int,
    prefix_len: int,
    question_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Return groups that share a prefix and ask different questions, shuffled together."""
    name = f"shared-prefix {num_groups} x {per_group}, {prefix_len} + {question_len} in, {output_len} out"
    rng = Random(f"{seed}/{name}")
    conversations = []
    for group in range(num_groups):
        prefix = _ids(rng, prefix_len, vocab_size)
        conversations += [
            _single(f"{group}.{index}", prefix + _ids(rng, question_len, vocab_size), output_len)
            for index in range(per_group)
        ]
    rng.shuffle(conversations)
    return Workload(name=name, conversations=tuple(conversations))


def multi_turn(
    *, num_users: int, num_turns: int, turn_len: int, output_len: int, vocab_size: int, seed: int
) -> Workload:
    """Return conversations whose every request resends the whole history."""
    name = f"multi-turn {num_users} users x {num_turns} turns, {turn_len} in, {output_len} out a turn"
    rng, conversations = Random(f"{seed}/{name}"), []
    for user in range(num_users):
        drawn = [_ids(rng, turn_len, vocab_size) for _ in range(num_turns)]
        turns = tuple(Turn(token_ids=each, max_new_tokens=output_len) for each in drawn)
        conversations.append(Conversation(name=str(user), turns=turns))
    return Workload(name=name, conversations=tuple(conversations))


def passages(
    *, text: str, ask: str, num_requests: int, num_lines: int, output_len: int, vocab_size: int, seed: int
) -> Workload:
    """Return chats, in ChatML, that each give lines of ``text``, which no other has, and then ``ask`` for something."""
    name = f"{num_requests} x {num_lines} lines: {ask} {output_len} out"
    rng, lines = Random(f"{seed}/{name}"), [line for line in text.splitlines() if line]
    conversations = []
    starts = rng.sample(range(0, len(lines) - num_lines + 1, num_lines), num_requests)
    for index, at in enumerate(starts):
        given = "\n".join([*lines[at : at + num_lines], "", ask])
        turn = f"<|im_start|>user\n{given}<|im_end|>\n<|im_start|>assistant\n"
        conversations.append(_single(str(index), (), output_len, text=turn))
    return Workload(name=name, conversations=tuple(conversations))


def _single(name: str, token_ids: tuple[int, ...], output_len: int, *, text: str = "") -> Conversation:
    return Conversation(name=name, turns=(Turn(token_ids=token_ids, max_new_tokens=output_len, text=text),))


def _ids(rng: Random, num: int, vocab_size: int) -> tuple[int, ...]:
    if vocab_size <= FIRST_ID:
        raise ValueError(f"vocab_size = {vocab_size}; prompts are drawn from ids {FIRST_ID} and up")
    return tuple(rng.choices(range(FIRST_ID, vocab_size), k=num))
