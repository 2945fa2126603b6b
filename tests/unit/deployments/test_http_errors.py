"""Bad input: an OpenAI-style error body and the right status, never a 500, never a stuck request."""

import dataclasses
from typing import Any

import httpx
import pytest

from deployments.http import convert
from deployments.http.bodies import LONG_BODY
from deployments.http.http_app import make_app
from deployments.http.service import Service
from replicas.engine.loop import EngineLoop
from replicas.errors import EngineDead
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of

pytestmark = pytest.mark.model
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 2, **fields}


def native(**fields: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling_params": {"max_new_tokens": 2}, **fields}


BAD: list[tuple[str, Any, str | None]] = [
    # route, body, the field that the error names
    (TEXT, text(temperature=-1), "temperature"),
    (TEXT, text(temperature=1e300), "temperature"),
    (TEXT, text(top_p=0), "top_p"),
    (TEXT, text(top_p=2), "top_p"),
    (TEXT, text(top_k=-5), "top_k"),
    (TEXT, text(min_p=-0.1), "min_p"),
    (TEXT, text(n=0), "n"),
    (TEXT, text(n=100_000), "n"),
    (TEXT, text(max_tokens=-1), "max_tokens"),
    (TEXT, text(min_tokens=5), "min_tokens"),
    (TEXT, text(seed=-(2**63) - 1), "seed"),
    (TEXT, text(presence_penalty=9), "presence_penalty"),
    (TEXT, text(repetition_penalty=0), "repetition_penalty"),
    (TEXT, text(logit_bias={"x": 1}), "logit_bias"),
    (TEXT, text(logit_bias={"999999": 1}), "logit_bias"),
    (TEXT, text(logit_bias={"5": 1000}), "logit_bias"),
    (TEXT, text(stop=["x"] * 300), "stop"),
    (TEXT, text(stop=[""]), "stop"),
    (TEXT, text(stop=["x" * 1000 + str(i) for i in range(17)]), "stop"),
    (TEXT, text(stop_token_ids=[-1]), "stop_token_ids"),
    (TEXT, text(logprobs=21), "logprobs"),
    (TEXT, text(best_of=3), "best_of"),
    (TEXT, text(regex="(a"), "regex"),
    (TEXT, text(guided_json={"type": "thing"}), "guided_json"),
    (TEXT, text(response_format={"type": "xml"}), "response_format"),
    (TEXT, text(timeout=1e9), "timeout"),
    (TEXT, text(timeout=-1), "timeout"),
    (TEXT, text(priority=10**6), "priority"),
    (TEXT, text(rid="two words"), "rid"),
    (TEXT, {"max_tokens": 2}, "prompt"),
    (TEXT, text(prompt=""), "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=[[]]), "prompt"),
    (TEXT, text(prompt=["ok", ""]), "prompt"),
    (TEXT, text(prompt={"a": 1}), "prompt"),
    (TEXT, text(prompt=[1, "a"]), "prompt"),
    (TEXT, text(prompt=[49152]), "prompt"),
    (TEXT, text(prompt=[-1]), "prompt"),
    (TEXT, text(prompt=["x"] * 257), "prompt"),
    (TEXT, text(stream="maybe"), "stream"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 10_000}, "tools"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": HI, "function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"continue_final_message": "no"}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "cache_salt": "a\0b"}, "cache_salt"),
    ("/generate", {"text": "a", "extra_key": "a\0b"}, "extra_key"),
    (CHAT, {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (NATIVE, {}, "text"),
    (NATIVE, native(input_ids=[1]), "text"),
    (NATIVE, native(text=""), "text"),
    (NATIVE, native(text=[]), "text"),
    (NATIVE, {"input_ids": [[1], []]}, "input_ids"),
    (NATIVE, native(sampling_params={"temperature": "x"}), "sampling_params"),
    (NATIVE, native(sampling_params={"json_schema": "{"}), "json_schema"),
    (NATIVE, native(json_schema="{}"), "json_schema"),
    (NATIVE, native(sampling_params=[{}, {}]), "sampling_params"),
    (NATIVE, native(token_ids_logprob=[1]), "token_ids_logprob"),
    (NATIVE, native(return_logprob=True, logprob_start_len=500), "logprob_start_len"),
    (NATIVE, native(rid=["a", "b"]), "rid"),
    (NATIVE, native(sampling_params={"sampling_seed": 2**63}), "sampling_seed"),
    (TEXT, text(allowed_token_ids=[]), "allowed_token_ids"),
    (TEXT, text(allowed_token_ids=[49152]), "allowed_token_ids"),
    (NATIVE, native(sampling_params={"allowed_token_ids": [-1]}), "allowed_token_ids"),
    (TEXT, text(bad_words=[" "]), "bad_words"),
    (TEXT, text(bad_words=["x" * 16_385]), "bad_words"),
    (CHAT, {"messages": HI, "bad_words": ["a"] * 257}, "bad_words"),
    (NATIVE, native(text=["a", "b"], sampling_params=[{"bad_words": ["x"] * 129}] * 2), "bad_words"),
    (TEXT, text(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (TEXT, text(truncate_prompt_tokens=8193), "truncate_prompt_tokens"),
    (NATIVE, native(sampling_params={"truncate": -2}), "truncate"),
    (TEXT, text(prompt_logprobs=21), "prompt_logprobs"),
    (CHAT, {"messages": HI, "prompt_logprobs": -1}, "prompt_logprobs"),
    (CHAT, {"messages": HI, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    # JSON's types: true is no number and no id, "2" is none
    (TEXT, text(prompt=[True]), "prompt"),
    (TEXT, text(max_tokens="2"), "max_tokens"),
    (TEXT, text(temperature=True), "temperature"),
    (TEXT, text(stream=1), "stream"),
    (TEXT, text(logit_bias={"5": True}), "logit_bias"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": "yes"}}, "stream_options"),
    (NATIVE, native(sampling_params={"max_new_tokens": True}), "sampling_params"),
    ("/detokenize", {"tokens": [True]}, "tokens"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
    (CHAT, {"messages": HI, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("/tokenize", {"prompt": ["x"] * 257}, "prompt"),
    ("/tokenize", {"prompt": ["x" * 8000] * 90}, "prompt"),
    ("/detokenize", {"tokens": [-4]}, "tokens"),
    ("/abort_request", {}, "rid"),
]


NOT_DONE: dict[str, Any] = {  # fields that would change the answer, with a value that asks for it; on every route
    "stop_regex": "a+", "repetition_detection": {"a": 1}, "thinking_token_budget": 9,
    "logits_processors": ["x"], "logits_processor": "x", "custom_logit_processor": "x", "custom_params": {"a": 1},
    "vllm_xargs": {"a": 1}, "use_beam_search": True, "typical_p": 0.5, "watermark": True, "token_ids_logprob": [1],
    "lora_path": "x", "lora_request": {"name": "x"}, "adapter_id": "x", "chat_template": "{{ x }}",
    "documents": [{"text": "x"}], "session_params": {"id": "x"}, "web_search_options": {"a": 1}, "input_embeds": [[0]],
    "prompt_embeds": "x", "image_data": "x", "video_data": "x", "audio_data": "x", "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": 1}, "return_hidden_states": True, "return_routed_experts": True, "return_entropy": True,
    "return_bytes": True, "return_tokens_as_token_ids": True, "decoder_input_details": True, "top_n_tokens": 5,
    "details": True, "return_full_text": True, "kv_transfer_params": {"a": 1}, "bootstrap_host": "x",
    "bootstrap_port": 5, "bootstrap_room": 5,
}  # fmt: skip
NOT_HERE: list[tuple[str, str, Any]] = [  # not done on one route
    (TEXT, "suffix", "x"), (CHAT, "echo", True), (CHAT, "best_of", 2), (CHAT, "add_special_tokens", True),
    (NATIVE, "prompt_logprobs", 1),
]  # fmt: skip
NO_CHANGE: dict[str, Any] = {  # fields that change nothing here, or ask for what is so anyway
    "length_penalty": 2.0, "early_stopping": True, "spaces_between_special_tokens": True, "parallel_tool_calls": True,
    "guided_decoding_backend": "x", "include_reasoning": True, "separate_reasoning": True, "use_beam_search": False,
    "typical_p": 1.0, "documents": [], "chat_template": "", "lora_path": None, "return_hidden_states": False,
    "user": "x", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": {"a": "b"},
    "stream_interval": 2, "data_parallel_rank": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logits_processors": None,
    "stop": None, "seed": None, "logit_bias": None, "a_field_of_the_client": 1,
}  # fmt: skip
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 1},
    TEXT: {"prompt": "hi", "max_tokens": 1},
    NATIVE: {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
}


@pytest.mark.parametrize("route", list(ASK))
async def test_a_field_that_would_change_the_answer_is_refused_by_name_and_never_ignored(
    client: httpx.AsyncClient, route: str
) -> None:
    here = [(name, value) for where, name, value in NOT_HERE if where == route]
    done = {"return_tokens_as_token_ids"} if route in (CHAT, TEXT) else set()
    for name, value in [*((name, value) for name, value in NOT_DONE.items() if name not in done), *here]:
        error = check_error(await client.post(route, json={**ASK[route], name: value}), 400)
        assert error["param"] == name
        why = "'x' is not loaded here" if name == "lora_path" else "is not supported by this server; leave it out"
        assert error["message"] == f"{name}: {why}"
    for name, value in [*NOT_DONE.items(), ("best_of", 2)] if route == NATIVE else ():
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1, name: value}}
        assert check_error(await client.post(route, json=body), 400)["param"] == name


@pytest.mark.parametrize("route", list(ASK))
async def test_fields_that_change_nothing_are_accepted(client: httpx.AsyncClient, route: str) -> None:
    """guidellm sends ``stop: null``; clients send fields of their own."""
    answer = await client.post(route, json=ASK[route] | dict.fromkeys(NOT_DONE) | NO_CHANGE)
    assert answer.status_code == 200, answer.text


def test_the_table_of_fields_that_are_not_done_is_whole() -> None:
    assert convert._NOT_DONE.keys() == NOT_DONE.keys()


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["object"] == "error"
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize("route", sorted({route for route, _, _ in BAD}))
async def test_a_wrong_field_is_named(client: httpx.AsyncClient, route: str) -> None:
    told = [(param, check_error(await client.post(path, json=body), 400)) for path, body, param in BAD if path == route]
    assert [(param, error) for param, error in told if error["param"] != param] == []


TOO_LONG: list[tuple[str, Any, str, str]] = [
    # route, body, the field that the error names, and what it says after the context's length
    (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}, "messages",
     "However, your messages resulted in 9031 tokens, and the output needs 1 more"),
    (CHAT, {"messages": HI, "max_tokens": 8190}, "max_tokens",
     "However, you requested 8221 tokens (31 in the prompt, 8190 in the completion)"),
    (CHAT, {"messages": HI, "max_completion_tokens": 8190}, "max_completion_tokens",
     "However, you requested 8221 tokens (31 in the prompt, 8190 in the completion)"),
    (TEXT, text(prompt=[5] * 8192), "prompt", "However, your prompt resulted in 8192 tokens, and the output needs 1"),
    (TEXT, text(prompt=[5] * 8193, max_tokens=0), "prompt", "However, your prompt resulted in 8193 tokens, which is"),
    (TEXT, text(prompt=[5] * 8000, max_tokens=193, stream=True), "max_tokens", "you requested 8193 tokens"),
    (TEXT, text(prompt=[[5], [5] * 8000], max_tokens=193), "max_tokens", "you requested 8193 tokens (8000 in the"),
    (NATIVE, {"input_ids": [5] * 8192}, "input_ids", "However, your prompt resulted in 8192 tokens"),
    (NATIVE, native(sampling_params={"max_new_tokens": 8192}), "max_new_tokens", "you requested 8193 tokens (1 in the"),
    (NATIVE, {"inputs": "hi", "parameters": {"max_new_tokens": 10**9}}, "max_new_tokens", "to at most 8191."),
    ("/route/explain", {"input_ids": [5] * 8000, "max_tokens": 193}, "max_tokens", "you requested 8193 tokens (8000"),
]  # fmt: skip


async def test_what_the_context_cannot_hold_is_said_in_openais_words_and_sglangs(client: httpx.AsyncClient) -> None:
    for route, body, param, said in TOO_LONG:
        error = check_error(await client.post(route, json=body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"].startswith("This model's maximum context length is 8192 tokens. However, you")
        assert "is longer than the model's context length" in error["message"]
        assert said in error["message"]


async def test_what_the_context_just_holds_is_served_and_no_limit_given_means_what_is_left(service: Service) -> None:
    """62 tokens of a context of 64: a limit of 2 fits; the defaults of 16 and 128, and a chat's, are cut to 2."""
    short = dataclasses.replace(service, model=dataclasses.replace(service.model, context_len=64))
    asks = [
        (TEXT, {"prompt": [5] * 62, "max_tokens": 2}),
        (TEXT, {"prompt": [5] * 62}),
        (NATIVE, {"input_ids": [5] * 62, "sampling_params": {"ignore_eos": True}}),
        (CHAT, {"messages": [{"role": "user", "content": " word" * 32}]}),  # 30 tokens are the template's
    ]
    async with client_of(make_app(short)) as client:
        for route, body in asks:
            answer = (await client.post(route, json={**body, "ignore_eos": True})).json()
            usage = answer.get("usage") or answer["meta_info"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (62, 2), route
        check_error(await client.post(TEXT, json={"prompt": [5] * 62, "max_tokens": 3}), 400)


async def test_a_native_field_has_its_own_name_in_errors(client: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 2, "min_new_tokens": 5}
    error = check_error(await client.post(NATIVE, json=native(sampling_params=sampling)), 400)
    assert error["param"] == "min_new_tokens"
    assert error["message"] == "min_new_tokens: must be between 0 and max_new_tokens (2), got 5"


NO_BODIES = [b"", b"{", b"[1, 2]", b"null", b'{"prompt": "\xff\xfe"}', b"[" * 100_000,
             b'{"max_tokens": ' + b"9" * 5000 + b"}"]
NO_NUMBERS = [b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}',
              b'{"prompt": "x", "timeout": Infinity}']


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
async def test_a_body_that_is_no_json_object_of_ours_is_a_400(client: httpx.AsyncClient, route: str) -> None:
    for body in [*NO_BODIES, *(NO_NUMBERS if route == TEXT else ())]:
        check_error(await client.post(route, content=body), 400)


LONE = b'"\\ud800"'  # a surrogate without its other half: no UTF-8 has it, so that no frame to a replica could
SURROGATES = [
    (NATIVE, b'{"text": "x", "rid": ' + LONE + b"}"),
    (NATIVE, b'{"text": "x", "sampling_params": {"stop": [' + LONE + b"]}}"),
    (NATIVE, b'{"text": "x", ' + LONE + b": 1}"),
    (NATIVE, b'{"text": "\xed\xa0\x80"}'),
    (TEXT, b'{"prompt": "x", "model": ' + LONE + b"}"),
    (CHAT, b'{"messages": [{"role": "user", "content": ' + LONE + b"}]}"),
    ("/abort_request", b'{"rid": ' + LONE + b"}"),
]


async def test_a_lone_surrogate_is_refused_wherever_it_stands(client: httpx.AsyncClient) -> None:
    for route, body in SURROGATES:
        for long in (body, body + b" " * LONG_BODY):  # both ways to parse
            assert "not valid JSON in UTF-8" in check_error(await client.post(route, content=long), 400)["message"]


async def test_bytes_of_a_surrogate_in_a_header_never_become_one(client: httpx.AsyncClient) -> None:
    half = "\ud800".encode("utf-8", "surrogatepass")
    answer = await client.post(NATIVE, json=native(), headers=[(b"x-request-id", half)])
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["id"].isascii()  # a new name
    check_error(await client.post(NATIVE, json=native(), headers=[(b"x-manta-session", half)]), 400)
    assert (await client.get("/route/%ED%A0%80")).status_code == 404


async def test_a_body_of_10_mb_is_a_413_that_states_the_limit_with_its_length_or_without(
    client: httpx.AsyncClient,
) -> None:
    async def chunks() -> Any:
        for _ in range(100):
            yield b"a" * 100_000

    for content in (b"a" * 10_000_000, chunks()):
        assert "4,194,304" in check_error(await client.post(TEXT, content=content), 413)["message"]


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(CHAT, json={"model": "gpt-9", "messages": HI}), 404)
    assert error["code"] == "model_not_found"
    assert "SmolLM2-135M-Instruct" in error["message"]
    check_error(await client.get("/v1/models/gpt-9"), 404)


async def test_an_unknown_route_and_a_wrong_method_have_the_same_body(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/v1/nothing"), 404)
    for method in ("GET", "PUT", "TRACE", "OPTIONS", "MADEUP"):
        answer = await client.request(method, CHAT)
        check_error(answer, 405)
        assert answer.headers["allow"] == "POST"
    assert (await client.head(CHAT)).status_code == 405  # without a body
    allowed = (await client.put("/v1/responses/of-two-routes")).headers["allow"]
    assert allowed == "DELETE, GET, HEAD"


async def test_what_is_refused_leaves_nothing_open(client: httpx.AsyncClient, engine_loop: EngineLoop) -> None:
    await client.post(TEXT, json=text(prompt=["fine", "also fine"], n=0))
    await client.post(TEXT, json=text(prompt=[5] * 9000))
    assert engine_loop.num_open == 0


async def test_what_an_engine_died_of_is_not_for_clients(client: httpx.AsyncClient, house: House) -> None:
    house.remove("r0")
    house.add(ScriptedReplica("dying", refuse=EngineDead("a step failed with OSError: /secret/path")))
    assert await house.fleet.wait_ready(30)
    error = check_error(await client.post(TEXT, json=text()), 503)
    assert "secret" not in error["message"]
    assert "no other replica could continue it" in error["message"]


async def test_a_deadline_that_passes_is_a_504(client: httpx.AsyncClient) -> None:
    body = text(max_tokens=4000, ignore_eos=True, timeout=0.2)
    error = check_error(await client.post(TEXT, json=body), 504)
    assert error["type"] == "timeout"
