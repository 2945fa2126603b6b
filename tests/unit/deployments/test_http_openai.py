"""The OpenAI routes against what clients read of them (HTTP_API.md), on the real model."""

import dataclasses
import json
from typing import Any

import httpx
import pytest

from deployments.http.http_app import make_app
from deployments.http.service import Service
from replicas.engine.loop import EngineLoop
from replicas.scheduler.rounds import Feature
from replicas.scheduler.speculation import Speculation
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.unit.deployments.listening import client_of

pytestmark = pytest.mark.model
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
PROMPT = "The capital of France is"


def events(body: str) -> list[dict[str, Any]]:
    """Payloads of a stream that ends as it must."""
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def post(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def stream(client: httpx.AsyncClient, route: str, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(route, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


async def test_a_chat_answers(client: httpx.AsyncClient) -> None:
    body = await post(client, CHAT, **ASK)
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 37
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == 45


async def test_the_template_options_may_come_as_its_variables_and_the_bodys_own_fields_win(
    client: httpx.AsyncClient,
) -> None:
    async def prompt_tokens(**body: Any) -> int:
        return int((await post(client, CHAT, **ASK, max_tokens=1, **body))["usage"]["prompt_tokens"])

    plain = await prompt_tokens(add_generation_prompt=False)
    variables = {"add_generation_prompt": False, "continue_final_message": False}
    assert await prompt_tokens(chat_template_kwargs=variables) == plain < 37
    assert await prompt_tokens(chat_template_kwargs=variables, add_generation_prompt=True) == 37


async def test_a_streamed_chat_adds_up_to_the_same(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, CHAT, **ASK)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "The capital of France is Paris."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["choices"] for chunk in chunks)  # no usage was asked for


async def test_usage_comes_last_and_only_when_asked_for(client: httpx.AsyncClient) -> None:
    """Trap: bench_serving reads choices[0] of every chunk of a stream without include_usage."""
    options = {"include_usage": True}
    for route, body in ((CHAT, ASK), (TEXT, {"prompt": PROMPT, "max_tokens": 3})):
        *chunks, last = await stream(client, route, **body, stream_options=options)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] >= 1
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_a_stream_has_an_event_a_step_where_steps_make_several_tokens(
    client: httpx.AsyncClient, idle_engine: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, an answer comes in the drafts that the cache keeps of it; rows cost as good as nothing here."""
    engine = idle_engine.engine
    drafts = Speculation(engine.kv, engine.scheduler.counters, step_s={}, clock=lambda: 0.0)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Seven birds of the sea are", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    answers = []
    for each in (Feature(), drafts):
        monkeypatch.setattr(engine.scheduler, "features", engine.scheduler.features | {"speculation": each})
        before = engine.stats().num_decode_steps
        chunks = [each for each in await stream(client, TEXT, **body, stream_options=options) if each["choices"]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert len(counts) == engine.stats().num_decode_steps - before + 1  # the first token is the prompt's
        answers.append(("".join(chunk["choices"][0]["text"] for chunk in chunks), counts))
    (text, ones), (again, several) = answers
    assert again == text
    assert ones == list(range(1, 61))
    assert len(several) < 30
    assert several[-1] == 60


async def test_a_completion_has_16_tokens_unless_told_and_a_chat_what_fits(client: httpx.AsyncClient) -> None:
    """Trap: an absent max_tokens means the context's rest in a chat."""
    body = await post(client, TEXT, prompt=PROMPT, temperature=0, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "Count from 1 to 30, one per line."}], "temperature": 0}
    assert (await post(client, CHAT, **chat))["usage"]["completion_tokens"] > 16


async def test_a_batch_of_ids_answers_with_one_choice_each_in_order(client: httpx.AsyncClient) -> None:
    """Trap: prompt [[int]]."""
    tokenizer = Tokenizer(MODEL)
    ids = [tokenizer.encode(text).tolist() for text in ("One, two, three,", PROMPT)]
    body = await post(client, TEXT, prompt=ids, max_tokens=1, temperature=0)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, " four"), (1, " Paris")]
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_n_choices_differ_and_their_prompt_counts_once(client: httpx.AsyncClient) -> None:
    body = await post(client, TEXT, prompt=PROMPT, max_tokens=8, n=3, seed=5, temperature=1.5, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in body["choices"]}) == 3
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 24
    chunks = await stream(client, TEXT, prompt=PROMPT, max_tokens=8, n=3, seed=5, temperature=1.5, ignore_eos=True)
    for choice in body["choices"]:
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]


async def test_a_stop_string_ends_and_is_trimmed_unless_asked_for(client: httpx.AsyncClient) -> None:
    body = {"prompt": "One, two, three,", "max_tokens": 20, "temperature": 0, "stop": [" six"]}
    [choice] = (await post(client, TEXT, **body))["choices"]
    assert choice["text"] == " four, five,"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", " six")
    [choice] = (await post(client, TEXT, **body, include_stop_str_in_output=True))["choices"]
    assert choice["text"] == " four, five, six"


async def test_a_stop_text_waits_for_min_tokens_and_not_for_min_new_tokens(client: httpx.AsyncClient) -> None:
    """The first is vLLM's field, the second SGLang's; each means what it means there."""
    body = {"prompt": "One, two, three,", "max_tokens": 12, "temperature": 0, "stop": [" five"]}
    [choice] = (await post(client, TEXT, **body, min_tokens=8))["choices"]
    assert choice["text"].startswith(" four, five, six")
    sampling = {"max_new_tokens": 12, "min_new_tokens": 8, "temperature": 0, "stop": [" five"]}
    assert (await post(client, "/generate", text="One, two, three,", sampling_params=sampling))["text"] == " four,"


async def test_echo_with_logprobs_is_what_lm_eval_reads(client: httpx.AsyncClient) -> None:
    """Trap: token_logprobs has prompt + 1 entries, the first null; greedy is the key with the highest value."""
    body = await post(client, TEXT, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1, echo=True)
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT + " Paris"
    assert logprobs["tokens"] == ["The", " capital", " of", " France", " is", " Paris"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21, 24]
    last = logprobs["top_logprobs"][-1]
    assert max(last, key=last.get) == " Paris"
    assert [len(top) in (1, 2) for top in logprobs["top_logprobs"][1:]] == [True] * 5


async def test_no_token_of_a_completions_logprobs_hides_another(client: httpx.AsyncClient) -> None:
    """Parts of characters have one text, U+FFFD; lm-eval asks whether the likeliest key is the token's own."""
    prompt = "漢字🦜漢字"
    ids = Tokenizer(MODEL).encode(prompt).tolist()
    body = {"prompt": prompt, "max_tokens": 0, "logprobs": 5, "echo": True}
    [choice] = (await post(client, TEXT, **body))["choices"]
    by_text = choice["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in by_text["tokens"])
    [choice] = (await post(client, TEXT, **body, return_tokens_as_token_ids=True))["choices"]
    by_id = choice["logprobs"]
    assert by_id["tokens"] == [f"token_id:{token}" for token in ids]
    for found in (by_text, by_id):
        rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        for token, value, top in list(rows)[1:]:
            assert len(top) - (value < sorted(top.values())[1]) == 5
            assert top[token] == value
    assert [list(top.values()) for top in by_text["top_logprobs"][1:]] == [
        list(top.values()) for top in by_id["top_logprobs"][1:]
    ]
    chat = await post(client, CHAT, **ASK, logprobs=True, top_logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    [first] = chat["choices"][0]["logprobs"]["content"]
    assert first["token"] == first["top_logprobs"][0]["token"] == f"token_id:{Tokenizer(MODEL).encode('The')[0]}"


async def test_logprobs_of_a_chat_are_tokens_with_bytes(client: httpx.AsyncClient) -> None:
    body = await post(client, CHAT, **ASK, logprobs=True, top_logprobs=2, max_tokens=2)
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "The"
    assert bytes(second["bytes"]).decode() == " capital"
    assert len(first["top_logprobs"]) == 2
    assert first["top_logprobs"][0]["logprob"] == pytest.approx(first["logprob"])


@pytest.mark.parametrize("prompt", ["日本の首都は 🙂", "<|im_start|>é"])
async def test_text_offsets_count_characters_of_the_text_whatever_tokens_they_are_made_of(
    client: httpx.AsyncClient, prompt: str
) -> None:
    """日 and 🙂 are several tokens each: one that begins within a character has the place of that character."""
    tokenizer = Tokenizer(MODEL)
    bias = {str(token): 50 for token in tokenizer.encode("🙂é").tolist()}
    body = {"prompt": prompt, "max_tokens": 6, "logprobs": 1, "temperature": 2.0, "seed": 1, "logit_bias": bias}
    [choice] = (await post(client, TEXT, **body, echo=True, return_token_ids=True))["choices"]
    ids = [*tokenizer.encode(prompt).tolist(), *choice["token_ids"]]
    offsets = choice["logprobs"]["text_offset"]
    size = len(prompt.encode())
    before = b"".join(map(tokenizer.token_bytes, ids))
    starts = [sum(len(tokenizer.token_bytes(token)) for token in ids[:i]) for i in range(len(ids))]
    assert offsets[: len(ids) - 6] == [len(before[:at].decode(errors="ignore")) for at in starts if at < size]
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(choice["text"])
    chunks = [chunk["choices"][0]["logprobs"] for chunk in await stream(client, TEXT, **body, echo=True)]
    assert [offset for chunk in chunks for offset in chunk["text_offset"]] == offsets
    [alone] = (await post(client, TEXT, **body))["choices"]
    assert alone["logprobs"]["text_offset"] == [offset - len(prompt) for offset in offsets[len(ids) - 6 :]]


async def test_a_seed_also_a_negative_one_repeats_an_answer_and_no_seed_does_not(client: httpx.AsyncClient) -> None:
    async def text(route: str = TEXT, **fields: Any) -> str:
        body = await post(client, route, prompt=PROMPT, temperature=2.0, max_tokens=6, ignore_eos=True, **fields)
        return str(body["choices"][0]["text"])

    seeds = [-1, -(2**63), 2**63 - 1, 0]
    texts = [await text(seed=seed) for seed in seeds]
    assert len(set(texts)) == 4
    assert await text(seed=-1) == texts[0]
    assert await text() != await text()
    sampling = {"temperature": 2.0, "max_new_tokens": 6, "ignore_eos": True, "sampling_seed": -1}
    assert (await post(client, "/generate", text=PROMPT, sampling_params=sampling))["text"] == texts[0]


async def answer(client: httpx.AsyncClient, route: str, *, max_tokens: int = 6, **fields: Any) -> str:
    """The text that ``route`` gives for a question that all three are asked alike."""
    if route == "chat":
        body = await post(client, CHAT, **ASK, max_tokens=max_tokens, **fields)
        return str(body["choices"][0]["message"]["content"])
    if route == "text":
        body = await post(client, TEXT, prompt=PROMPT, temperature=0, max_tokens=max_tokens, **fields)
        return str(body["choices"][0]["text"])
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, **fields}
    return str((await post(client, "/generate", text=PROMPT, sampling_params=sampling))["text"])


@pytest.mark.parametrize("route", ["text", "chat", "native"])
async def test_only_allowed_tokens_are_made_and_no_bad_words(client: httpx.AsyncClient, route: str) -> None:
    """A bad word is not written behind a space nor without: one of a single token, which the answer has unless asked,
    and one of two."""
    tokenizer = Tokenizer(MODEL)
    allowed = tokenizer.encode(" London, in England").tolist()
    text = await answer(client, route, allowed_token_ids=allowed, ignore_eos=True)
    assert len(text) > 3
    assert set(tokenizer.encode(text).tolist()) <= set(allowed)
    assert "Paris" in await answer(client, route, max_tokens=8)
    words = ["Paris", "capital city"]
    text = await answer(client, route, max_tokens=8, bad_words=words)
    assert text
    assert not any(word in text for word in words)


async def test_the_last_tokens_of_a_prompt_are_kept(client: httpx.AsyncClient) -> None:
    ids = Tokenizer(MODEL).encode(PROMPT).tolist()
    body = await post(client, TEXT, prompt=PROMPT, truncate_prompt_tokens=3, max_tokens=0, echo=True, logprobs=0)
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == (" of France is", 0)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 3, 10]
    whole = await post(client, TEXT, prompt=ids[-3:], max_tokens=0, echo=True, logprobs=0)
    assert body["choices"] == whole["choices"]
    chat = await post(client, CHAT, **ASK, truncate_prompt_tokens=9, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == 9
    one: dict[str, Any] = {"max_new_tokens": 1}
    for given in ({"truncate_prompt_tokens": 3, "sampling_params": one}, {"sampling_params": {"truncate": 3, **one}}):
        assert (await post(client, "/generate", text=PROMPT, **given))["meta_info"]["prompt_tokens"] == 3


async def test_as_many_tokens_of_a_prompt_are_kept_as_leave_room_for_the_output(service: Service) -> None:
    """62 of 100 tokens in a context of 64 beside 2 of output."""
    short = dataclasses.replace(service, model=dataclasses.replace(service.model, context_len=64))
    async with client_of(make_app(short)) as client:
        body = await post(client, TEXT, prompt=[5] * 100, max_tokens=2, truncate_prompt_tokens=-1, ignore_eos=True)
        sampling = {"max_new_tokens": 2, "truncate": -1, "ignore_eos": True}
        native = await post(client, "/generate", input_ids=[5] * 100, sampling_params=sampling)
    for usage in (body["usage"], native["meta_info"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (62, 2)


async def test_prompt_logprobs_have_vllms_form(client: httpx.AsyncClient) -> None:
    """By token id: the prompt's own first, with its rank, then the most likely ones; nothing precedes the first."""
    ids = Tokenizer(MODEL).encode(PROMPT).tolist()
    body = await post(client, TEXT, prompt=PROMPT, max_tokens=1, temperature=0, prompt_logprobs=2, n=2, seed=1)
    for choice in body["choices"]:
        assert choice["logprobs"] is None
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(entry)) for entry in others] == [str(token) for token in ids[1:]]
        assert [entry[str(token)]["decoded_token"] for entry, token in zip(others, ids[1:], strict=True)] == [
            " capital", " of", " France", " is",
        ]  # fmt: skip
        for entry, token in zip(others, ids[1:], strict=True):
            own = entry[str(token)]
            assert len(entry) == (2 if own["rank"] <= 2 else 3)
            ranked = sorted(entry.values(), key=lambda each: each["rank"])
            assert [each["rank"] for each in ranked][:2] == [1, 2]
            assert [each["logprob"] for each in ranked] == sorted((each["logprob"] for each in ranked), reverse=True)
    scored = await post(client, TEXT, prompt=PROMPT, max_tokens=1, temperature=0, echo=True, logprobs=1)
    own = [entry[str(token)]["logprob"] for entry, token in zip(others, ids[1:], strict=True)]
    assert own == pytest.approx(scored["choices"][0]["logprobs"]["token_logprobs"][1:5])
    chat = await post(client, CHAT, **ASK, max_tokens=1, prompt_logprobs=0, logprobs=True, top_logprobs=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1


async def test_a_developers_message_is_the_systems_where_the_template_knows_none(client: httpx.AsyncClient) -> None:
    async def ids(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}]
        return list((await post(client, "/tokenize", messages=messages))["tokens"])

    assert await ids("developer") == await ids("system")


async def test_a_repeated_prefix_is_seen_in_cached_tokens_and_not_under_another_salt(client: httpx.AsyncClient) -> None:
    await client.post("/flush_cache")
    body = {"prompt": "A long story about pages and trees. " * 12, "max_tokens": 2}
    usages = [(await post(client, TEXT, **body, cache_salt=salt))["usage"] for salt in ("one", "one", "two", "")]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, (usages[0]["prompt_tokens"] - 1) // 16 * 16, 0, 0]


async def test_the_final_message_can_be_continued(client: httpx.AsyncClient) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The capital of France is"}]
    body = await post(client, CHAT, messages=messages, temperature=0, continue_final_message=True, max_tokens=2)
    assert body["choices"][0]["message"]["content"].startswith(" Paris")


async def test_the_request_id_is_echoed(client: httpx.AsyncClient) -> None:
    answer = await client.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "cmpl-abc-1"
    bad = await client.get("/ping", headers={"X-Request-Id": "a b\x7f"})
    assert bad.headers["x-request-id"] != "a b\x7f"
