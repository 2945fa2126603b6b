"""What an absent or a strange field means."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.http.bodies import NativeSampling
from deployments.http.convert import Masks, native_sampling, salt_of
from deployments.http.http_app import make_app
from replicas.errors import InvalidRequest
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of


def test_different_keys_give_different_salts() -> None:
    pairs = [(None, None), ("a", None), ("a", "b"), (None, "a"), ("ab", None), ('a", "b', "c"), ("b", "a")]
    assert len({salt_of(*pair) for pair in pairs}) == len(pairs)
    assert salt_of("", "") == salt_of(None) == ""


@pytest.mark.parametrize(
    ("keys", "param"),
    [(("a\0b", None), "cache_salt"), (("a", "\0"), "extra_key"), (("\1id\1", None), "cache_salt")],
)  # fmt: skip
def test_a_key_that_could_pass_for_two_or_an_adapters_is_refused(keys: tuple[str, str | None], param: str) -> None:
    with pytest.raises(InvalidRequest, match="U") as caught:
        salt_of(*keys)
    assert caught.value.param == param


HI = [{"role": "user", "content": "Hi"}]
AUTHORS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.2}


@pytest.mark.model
@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}, "temperature"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, "temperature"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, "temperature"),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}, "temperature"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 1}, "stream": False}, "options.temperature"),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}, "sampling_params.temperature"),
    ],
)
async def test_the_authors_sampling_holds_on_every_route_where_a_request_says_nothing(
    house: House, route: str, body: dict[str, Any], field: str
) -> None:
    replica = ScriptedReplica("r0")
    await house.ready(replica)
    service = house.service(Tokenizer(MODEL))
    service = replace(service, model=replace(service.model, sampling=AUTHORS))
    async with client_of(make_app(service)) as client:
        info = (await client.get("/get_model_info")).json()
        group, _, name = field.rpartition(".")
        told = {**body, group: {**body[group], name: 0.9}} if group else {**body, name: 0.9}
        for sent in (body, told):
            answer = await client.post(route, json={"model": service.model.name, **sent})
            assert answer.status_code == 200, answer.text
    assert info["preferred_sampling_params"] == AUTHORS
    first, second = (request.sampling for request in replica.requests)
    assert {name: getattr(first, name) for name in AUTHORS} == AUTHORS
    assert {name: getattr(second, name) for name in AUTHORS} == AUTHORS | {"temperature": 0.9}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"top_k": -1}, {"top_k": None}),
        ({"top_k": 0, "min_p": 0}, {"top_k": None, "min_p": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 1}, {"temperature": 1.0}),
        ({"temperature": None, "top_p": 1.0}, {"top_p": 1.0}),
    ],
)
def test_what_a_request_says_of_sampling_wins_over_the_author(given: dict[str, Any], meant: dict[str, Any]) -> None:
    made = native_sampling(NativeSampling(**given), AUTHORS, max_new_tokens=1, masks=Masks(None, ()))
    assert {name: getattr(made, name) for name in AUTHORS} == AUTHORS | meant
