"""However often and wherever a request is broken off, its parts add up to one undisturbed generation."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from deployments.dispatch.progress import Progress
from deployments.record.rids import client_rid, new_rid, with_try
from replicas.types import Finish, FinishReason, TokenDelta
from tests.unit.deployments.sample_values import ask, token

LENGTH = 6


@given(st.integers(1, 3), st.lists(st.lists(st.integers(0, LENGTH), min_size=3, max_size=3), max_size=5))
def test_every_id_is_delivered_once_in_order(n: int, lives: list[list[int]]) -> None:
    """Args: lives: for each replica, how many tokens of each choice it delivers before it dies; the last lives on."""
    progress = Progress(ask(n=n, max_new_tokens=LENGTH))
    received: list[TokenDelta] = []
    for number, life in enumerate([*lives, [LENGTH] * 3]):
        for part in [] if progress.done else progress.parts(number=number, waited_s=0.0):
            for index in range(part.request.sampling.n):
                choice = index if part.choice is None else part.choice
                start = len(part.request.resumed_ids)
                for position in range(start, min(start + life[choice], LENGTH)):
                    finish = Finish(reason=FinishReason.LENGTH) if position == LENGTH - 1 else None
                    received.append(progress.accept(token(part.request, index, position, finish), part.choice))
        progress.check()
    assert progress.done
    for index in range(n):
        mine = [delta for delta in received if delta.index == index]
        assert [each for delta in mine for each in delta.token_ids] == [1000 + i for i in range(LENGTH)]
        assert [delta.finish is not None for delta in mine] == [False] * (LENGTH - 1) + [True]
    assert {delta.rid for delta in received} == {"a1.0-me"}


def test_names_are_unique_inside_and_found_by_the_clients_own() -> None:
    first, second = new_rid("a-b.c"), new_rid("a-b.c")
    assert first != second
    retried = with_try(first, 2, choice=1)
    assert len({first, retried, with_try(first, 2)}) == 3
    assert client_rid(first) == client_rid(retried) == "a-b.c"


def test_a_resumed_choice_reports_the_cached_tokens_of_its_first_token() -> None:
    """The second replica reuses what it likes; the client's usage says what its request found where it began."""

    def told(delta: TokenDelta, cached_tokens: int) -> TokenDelta:
        return dataclasses.replace(delta, usage=dataclasses.replace(delta.usage, cached_tokens=cached_tokens))

    progress = Progress(ask(n=2, max_new_tokens=2))
    [whole] = progress.parts(number=0, waited_s=0.0)
    assert progress.accept(told(token(whole.request, 0, 0, None), 1), None).usage.cached_tokens == 1
    first, second = progress.parts(number=1, waited_s=0.0)  # the replica died; choice 1 had not begun
    assert progress.accept(told(token(first.request, 0, 1, None), 3), first.choice).usage.cached_tokens == 1
    assert progress.accept(told(token(second.request, 0, 0, None), 3), second.choice).usage.cached_tokens == 3


def test_of_several_choices_the_longest_that_has_not_ended_counts_as_prompt() -> None:
    request = ask(n=3, max_new_tokens=8)
    progress = Progress(request)
    assert progress.so_far() is request
    end = Finish(reason=FinishReason.STOP)
    for choice, num_tokens in enumerate([3, 1, 2]):
        for position in range(num_tokens):
            ends = choice == 0 and position == 2
            progress.accept(token(request, choice, position, end if ends else None), None)
    assert progress.so_far().token_ids.tolist() == [1, 2, 3, 4, 1000, 1001]
