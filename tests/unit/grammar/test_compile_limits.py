"""How long a grammar may take to compile."""

from dataclasses import replace

import pytest

from replicas.engine.choice import Choice
from replicas.engine.compiling import COMPILE_AGAIN_S, COMPILE_S, Compilation, Grammars
from replicas.types import Constraint
from tests.harness import Clock, ask, fake_engine


@pytest.mark.parametrize(("resumed_ids", "limit_s"), [((), COMPILE_S), ((5, 6), COMPILE_AGAIN_S)])
def test_that_of_an_output_that_began_elsewhere_may_take_longer(resumed_ids: tuple[int, ...], limit_s: float) -> None:
    """It has been compiled in time there; this machine may be busier."""
    clock, tokenizer = Clock(), fake_engine()[0].tokenizer
    grammars = Grammars(tokenizer, 1000, clock)
    request = replace(ask("a", [1, 2, 3]), resumed_ids=resumed_ids)
    choice = Choice.make(request, 0, tokenizer=tokenizer, now_s=0.0, eos_ids=frozenset())
    constraint = Constraint(kind="regex", text="a+")
    grammars.waiting.append(Compilation(request, [choice], constraint, since_s=0.0, started=True))
    clock.now_s = limit_s
    assert grammars.poll() == []
    clock.now_s = limit_s + 0.1
    [task] = grammars.poll()
    assert f"more than {limit_s:g} s" in str(task.made)
