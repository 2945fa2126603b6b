"""Conversations over the three forms of a chat: the same ids, and nearly all from the cache from the second turn on."""

from typing import Any

import pytest

from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.timeout(400)]
SYSTEM = "You are the keeper of a small lighthouse, and answer in one short sentence. " * 20
QUESTIONS = ["What do you see tonight?", "And how is the sea?", "Who lives with you?", "When will you leave?"]
COMMON: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "temperature": 0}


def chat(url: str, turns: list[dict[str, Any]]) -> tuple[str, int, int]:
    messages = [{"role": "system", "content": SYSTEM}, *turns]
    answer = post(f"{url}/v1/chat/completions", messages=messages, max_tokens=24)
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def response(url: str, turns: list[dict[str, Any]]) -> tuple[str, int, int]:
    answer = post(f"{url}/v1/responses", instructions=SYSTEM, input=turns, max_output_tokens=24)
    usage = answer["usage"]
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def message(url: str, turns: list[dict[str, Any]]) -> tuple[str, int, int]:
    answer = post(f"{url}/v1/messages", system=SYSTEM, messages=turns, max_tokens=24)
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    return "".join(part["text"] for part in answer["content"]), usage["input_tokens"] + cached, cached


def post(url: str, **body: Any) -> dict[str, Any]:
    answer = HTTP.post(url, json={**COMMON, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def conversation(url: str, ask: Any) -> list[tuple[str, int, int]]:
    """Text, tokens of the prompt, and those of them that were cached, of each turn; nothing is cached before."""
    assert HTTP.post(f"{url}/flush_cache", timeout=30).status_code == 200
    turns: list[dict[str, Any]] = []
    told = []
    for question in QUESTIONS:
        turns.append({"role": "user", "content": question})
        told.append(ask(url, turns))
        turns.append({"role": "assistant", "content": told[-1][0]})
    return told


def test_the_three_forms_of_a_conversation_have_the_same_ids_and_are_answered_from_the_cache(app: Running) -> None:
    told = {ask.__name__: conversation(app.url, ask) for ask in (chat, response, message)}
    texts = {name: [(text, prompt) for text, prompt, _ in turns] for name, turns in told.items()}
    assert texts["response"] == texts["chat"]
    assert texts["message"] == texts["chat"]
    for name, turns in told.items():
        later = turns[1:]
        rate = sum(cached for _, _, cached in later) / sum(prompt for _, prompt, _ in later)
        print(f"{name}: {rate:.3f} of the prompts from turn 2 on were cached")
        assert rate >= 0.9, turns
