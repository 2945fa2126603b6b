"""Ollama's API on the real model: by hand, and with Ollama's own Python client from another environment, which
`make tools-test` makes."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.http.apis.ollama import OllamaForm
from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.http.streaming import AnswerSoFar, Change
from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from replicas.types import Finish, FinishReason, TokenDelta, Usage
from tests.programs import REQUIRED
from tests.unit.deployments.listening import listening

PYTHON = Path(__file__).parents[3] / ".tools/clients/bin/python"
NAME = "SmolLM2-135M-Instruct"
USER = {"role": "user", "content": "What is the capital of France?"}
USAGE = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0)
OPTIONS = {"temperature": 0, "num_predict": 4}
CLIENT = """
import json, sys, ollama
client = ollama.Client(sys.argv[1])
name = client.list().models[0].model
asked = {"model": name, "options": {"temperature": 0, "num_predict": 4}}
user = {"role": "user", "content": "What is the capital of France?"}
chat = client.chat(messages=[user], **asked)
lines = list(client.chat(messages=[user], stream=True, **asked))
text = client.generate(prompt=user["content"], **asked)
schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
form = client.chat(model=name, messages=[user], format=schema)
try:
    client.chat(model="another", messages=[user])
except ollama.ResponseError as error:
    refused = [error.status_code, error.error]
print(json.dumps({
    "name": name, "text": chat.message.content, "joined": "".join(each.message.content for each in lines),
    "generated": text.response, "reason": chat.done_reason, "output": lines[-1].eval_count, "num": len(lines),
    "done": [each.done for each in lines][-2:], "form": form.message.content, "refused": refused,
}))
"""


async def lines_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = (await client.post(path, json=body)).raise_for_status()
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.model
async def test_without_stream_false_the_answer_comes_in_lines_that_add_up_to_the_whole(
    client: httpx.AsyncClient,
) -> None:
    body = {"messages": [USER], "options": OPTIONS}
    whole = (await client.post("/api/chat", json=body | {"stream": False})).raise_for_status().json()
    *lines, last = await lines_of(client, "/api/chat", body)
    assert len(lines) >= 2
    assert "".join(each["message"]["content"] for each in (*lines, last)) == whole["message"]["content"]
    assert {each["done"] for each in lines} == {False}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 4)
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] > 8
    assert 0 < last["prompt_eval_duration"] <= last["total_duration"]
    openai = {"messages": [USER], "temperature": 0, "max_tokens": 4}
    chat = (await client.post("/v1/chat/completions", json=openai)).raise_for_status().json()
    assert chat["choices"][0]["message"]["content"] == whole["message"]["content"]


@pytest.mark.model
async def test_a_generation_is_a_chat_of_one_message(client: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, USER], "options": OPTIONS, "stream": False}
    text = {"system": "Be brief.", "prompt": USER["content"], "options": OPTIONS, "stream": False}
    said = (await client.post("/api/chat", json=chat)).json()
    generated = (await client.post("/api/generate", json=text)).json()
    assert generated["response"] == said["message"]["content"]
    assert (generated["prompt_eval_count"], "message" in generated) == (said["prompt_eval_count"], False)


@pytest.mark.model
@pytest.mark.parametrize("prompt", [{}, {"prompt": "", "system": None, "keep_alive": "5m"}])
async def test_a_request_without_a_prompt_loads_a_model_and_runs_nothing(
    client: httpx.AsyncClient, prompt: dict[str, Any]
) -> None:
    [line] = await lines_of(client, "/api/generate", {"model": NAME} | prompt)
    whole = (await client.post("/api/generate", json={"stream": False} | prompt)).raise_for_status()
    assert "x-manta-route" not in whole.headers
    for said in (line, whole.json()):
        assert said.pop("created_at") > "2026"
        assert said == {"model": NAME, "response": "", "done": True, "done_reason": "load"}
    another = await client.post("/api/generate", json={"model": "another"} | prompt)
    assert another.status_code == 404


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages: images are not supported"),
        ("/api/chat", {"messages": []}, "messages: is empty"),
        ("/api/chat", {"messages": [USER], "options": {"num_predict": -3}}, "options: num_predict must be at least -2"),
        ("/api/chat", {"messages": [USER], "format": "xml"}, "format: "),
        ("/api/generate", {"prompt": "hi", "raw": True}, "raw: is not supported"),
        ("/api/generate", {"prompt": "hi", "context": [1]}, "context: is not supported"),
    ],
)
async def test_what_is_refused_is_named_in_ollamas_form(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], says: str
) -> None:
    refused = await client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(says)
    assert list(refused.json()) == ["error"]


@pytest.mark.model
async def test_the_served_model_is_listed(client: httpx.AsyncClient, service: Service) -> None:
    [model] = (await client.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"], model["details"]) == (NAME, NAME, {"family": "llama"})
    assert (await client.get("/api/version")).json() == {"version": service.version}


def change(*parts: Part, finish: Finish | None = None) -> Change:
    delta = TokenDelta(rid="r", index=0, token_ids=(1,), text="", usage=USAGE, finish=finish)
    return Change(key=(0, 0), delta=delta, parts=parts, begins=False)


def test_calls_are_in_the_last_line_with_whole_arguments() -> None:
    form, so_far = OllamaForm(model="m", is_chat=True), AnswerSoFar(None)
    stop = Finish(reason=FinishReason.STOP, message="")
    given = (change(ReasoningPart("Hm."), TextPart("I look.")), change(CallPart(0, "read"), ArgumentsPart(0, '{"pa')),
             change(ArgumentsPart(0, 'th": "a"}'), CallPart(1, "stop"), finish=stop))  # fmt: skip
    said = [form.events(each, so_far)[0]["message"] for each in given]
    functions = [{"name": "read", "arguments": {"path": "a"}}, {"name": "stop", "arguments": {}}]
    assert said == [
        {"role": "assistant", "content": "I look.", "thinking": "Hm."},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [{"function": each} for each in functions]},
    ]


def test_a_line_alone_does_not_tell_prompt_from_output_and_its_output_took_time() -> None:
    end = change(TextPart("b"), finish=Finish(reason=FinishReason.STOP, message=""))
    alone = OllamaForm(model="m", is_chat=True).whole([end], AnswerSoFar(None))
    assert alone["eval_duration"] == alone["total_duration"] > 0
    assert "prompt_eval_duration" not in alone
    form, so_far = OllamaForm(model="m", is_chat=True), AnswerSoFar(None)
    *_, last = [form.events(each, so_far)[0] for each in (change(TextPart("a")), change(TextPart("b")), end)]
    assert min(last["prompt_eval_duration"], last["eval_duration"]) > 0
    assert abs(last["prompt_eval_duration"] + last["eval_duration"] - last["total_duration"]) <= 2  # rounded
    assert len(form.first_s) == 1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(
    not any(PYTHON.parents[1].glob("lib/*/site-packages/ollama")) and REQUIRED not in os.environ,
    reason="Ollama's client is not installed: run `make tools-test`",
)
async def test_ollamas_own_client_chats_generates_lists_and_reads_errors(service: Service) -> None:
    async with listening(make_app(service)) as port:
        process = await asyncio.create_subprocess_exec(
            PYTHON, "-c", CLIENT, f"http://127.0.0.1:{port}", env={**os.environ, "PYTHONPATH": ""},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(120):
            said, _ = await process.communicate()
    told = json.loads(said)
    assert (told["name"], told["reason"], told["output"], told["done"]) == (NAME, "length", 4, [False, True])
    assert told["text"] == told["joined"] == told["generated"] != ""
    assert told["num"] >= 3
    assert json.loads(told["form"]) == {"a": 7}
    assert told["refused"] == [404, f"the model 'another' is not served here; served: {NAME!r}"]
