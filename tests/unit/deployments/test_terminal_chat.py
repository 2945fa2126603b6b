"""`chat`: with the real engine behind a socket, with answers that were recorded there, and when nothing answers."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.watch.terminal import ask, chat
from tests.unit.deployments.listening import answering, listening
from tests.unit.deployments.pseudo_terminal import manta

OPTIONS = chat.ChatOptions(model=None, system=None, max_tokens=8, temperature=0.0)
# Recorded from the real engine (greedy, max_tokens 8, the same question for the second time).
QUESTION, ANSWER = "Name three colours.", "1. Red: This is the most"
ROUTE = "replica=r0; overlap_predicted=32; overlap_actual=32; policy=round_robin; reason=only_candidate; tries=1"
USAGE = {"prompt_tokens": 34, "completion_tokens": 8, "total_tokens": 42,
         "prompt_tokens_details": {"cached_tokens": 32}}  # fmt: skip
FACTS = "prompt 34 tokens: 32 cached, 2 computed"
CHUNK = {"id": "chatcmpl-b691052081f71b2f", "object": "chat.completion.chunk", "created": 1795438022,
         "model": "SmolLM2-135M-Instruct", "system_fingerprint": None}  # fmt: skip


def chunk(text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, "matched_stop": None}
    return {**CHUNK, "choices": [choice]}


PARTS = ["1", ".", " Red", ":", " This", " is", " the", " most"]
RECORDED = [*map(chunk, PARTS), {**CHUNK, "choices": [], "usage": USAGE}]


class Recorded:
    """A server that answers each chat with the same events, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = RECORDED
        self.status = 200
        self.url = ""

    def respond(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "SmolLM2-135M-Instruct"}]}).encode()
        self.asked.append((path, headers.get("Authorization"), json.loads(body or b"{}")))
        if self.status != 200:
            return self.status, json.dumps({"error": {"message": "queues are too long", "code": "shed"}}).encode()
        return 200, b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in self.events) + b"data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[Recorded]:
    recorded = Recorded()
    with answering(recorded.respond) as port:
        recorded.url = f"http://127.0.0.1:{port}"
        yield recorded


def said(talk: chat.Conversation, text: str) -> str:
    return "".join(talk.say(text))


def test_a_conversation_sends_all_earlier_turns_until_it_is_forgotten(server: Recorded) -> None:
    options = chat.ChatOptions(model=None, system="Be brief.", max_tokens=8, temperature=None)
    talk = chat.Conversation(server.url, " secret\n", options, lambda: 0.0)
    assert said(talk, QUESTION) == ANSWER
    said(talk, "More.")
    talk.forget()
    said(talk, "Again.")
    [_, key, first], [_, _, second], [_, _, third] = server.asked
    assert key == "Bearer secret"
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert [each["content"] for each in second["messages"]] == ["Be brief.", QUESTION, ANSWER, "More."]
    assert [each["content"] for each in third["messages"]] == ["Be brief.", "Again."]
    assert (first["max_tokens"], "temperature" in first) == (8, False)


def test_the_first_token_is_that_of_the_reasoning_which_is_not_part_of_the_answer(server: Recorded) -> None:
    thought = {**CHUNK, "choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]}
    server.events = [thought, *RECORDED]
    times = iter(range(100))
    talk = chat.Conversation(server.url, None, OPTIONS, lambda: float(next(times)))
    assert said(talk, QUESTION) == ANSWER
    assert talk.last is not None
    assert (talk.last.first_s, talk.last.last_s) == (1.0, 9.0)  # nine parts came, the thought first


def test_a_turn_that_failed_leaves_no_message_behind(server: Recorded) -> None:
    talk = chat.Conversation(server.url, None, OPTIONS, lambda: 0.0)
    server.status = 429
    with pytest.raises(ask.Unanswered, match="answers 429: queues are too long"):
        said(talk, "Lost.")
    server.status, server.events = 200, [chunk("1"), {"error": {"message": "the replica died"}}]
    with pytest.raises(ask.Unanswered, match="the answer broke off: the replica died"):
        said(talk, "Lost, too.")
    server.events = RECORDED
    said(talk, "Heard.")
    assert [each["content"] for each in server.asked[-1][2]["messages"]] == ["Heard."]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(server: Recorded) -> None:
    talk = chat.Conversation(server.url, None, OPTIONS, lambda: 0.0)
    parts = talk.say(QUESTION)
    assert [next(parts), next(parts)] == ["1", "."]
    parts.close()  # type: ignore[attr-defined]
    said(talk, "Go on.")
    assert [each["content"] for each in server.asked[-1][2]["messages"]] == [QUESTION, "1.", "Go on."]


def test_the_facts_say_what_was_cached_how_fast_it_was_and_where_it_went() -> None:
    turn = chat.ChatTurn(usage=USAGE, route=chat.fields_of(ROUTE), first_s=0.25, last_s=0.75)
    assert chat.facts(turn) == (
        f"{FACTS} | first token 250 ms | 8 tokens at 14/s | on r0 (round_robin, only_candidate)"
    )
    apart = {**chat.fields_of(ROUTE), "prefill": "ModelReplica#p1", "tries": "2"}
    assert chat.facts(chat.ChatTurn(route=apart)) == "on r0 (round_robin, only_candidate), prompt by p1, 2 tries"
    assert chat.facts(chat.ChatTurn()) == ""


def test_in_a_pipe_lines_are_turns_and_only_answers_go_to_standard_output(server: Recorded) -> None:
    command = [sys.executable, "-m", "deployments", "chat", "--url", server.url, "--max-tokens", "8"]
    env, typed = {**os.environ, "MANTA_API_KEY": "secret"}, f"{QUESTION}\n\n/new\nMore.\n"
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n{ANSWER}\n")
    assert done.stderr.count(FACTS) == 2
    assert [len(body["messages"]) for _, _, body in server.asked] == [1, 1]
    assert {key for _, key, _ in server.asked} == {"Bearer secret"}


def test_a_failed_turn_is_the_exit_status_and_nothing_listening_is_said_at_once(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 401
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name three colours.\n"))
    assert chat.run(server.url, None, None, OPTIONS) == ask.REFUSED
    assert "an API key is asked for; give it in MANTA_API_KEY" in capsys.readouterr().err
    assert chat.run("127.0.0.1:1", None, None, OPTIONS) == ask.UNREACHABLE
    assert "nothing answers at 127.0.0.1:1 (" in capsys.readouterr().err.replace("http://", "")


def test_on_a_terminal_there_is_a_prompt_and_the_facts_after_each_answer(server: Recorded) -> None:
    with manta("chat", "--url", server.url, columns=200) as terminal:
        terminal.until("/quit\n\n> ")
        terminal.press("Name three colours.\n")
        terminal.until(f"{ANSWER}\n{FACTS}")
        terminal.press("/what\n")
        terminal.until("/what\n/explain why it went")
        terminal.press("/quit\n")
        terminal.rest()
        assert terminal.process.wait(60) == 0


@pytest.mark.model
async def test_with_the_real_engine_the_second_turn_finds_the_first_in_the_cache(service: Service) -> None:
    """Field names and headers are those that the routes send; `/explain` finds the request by its id."""
    async with listening(make_app(service)) as port:
        url = f"http://127.0.0.1:{port}"

        def talked() -> tuple[list[chat.ChatTurn], int, str]:
            talk, turns = chat.Conversation(url, None, OPTIONS, iter(range(100)).__next__), []
            for text in ("Name one colour. " * 8, "And another one."):
                said(talk, text)
                assert talk.last is not None
                turns.append(talk.last)
            told = io.StringIO()
            status = chat._command("/explain", talk, url, None, chat.Console(file=told, width=200))
            return turns, status, told.getvalue()

        (first, second), status, told = await asyncio.to_thread(talked)
    assert 1 <= first.usage["completion_tokens"] <= 8
    assert first.text
    assert second.usage["prompt_tokens_details"]["cached_tokens"] >= first.usage["prompt_tokens"] // 16 * 16
    assert second.route["replica"] == "r0"
    assert status == 0
    assert f"{second.rid}: ok, 1 try" in told


def test_a_manta_of_ones_own_starts_before_the_chat_and_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on printing, more than a pipe holds; one that does not start ends the chat with its own status."""
    said = "print('[1 s] starting'); print('[2 s] ready: m on 1 replica at http://h:1/v1'); print('x' * 200_000)"
    program = f"import os, time; print('pid', os.getpid(), flush=True); {said}; time.sleep(600)"
    with chat.serving([sys.executable, "-uc", program]) as url:
        pid = int(capsys.readouterr().err.split()[1])
        assert (url, psutil.pid_exists(pid)) == ("http://h:1", True)
    assert not psutil.pid_exists(pid)
    with (
        pytest.raises(ask.Unanswered, match="the lines above say why") as ended,
        chat.serving([sys.executable, "-c", "print('no such model'); raise SystemExit(2)"]),
    ):
        pass
    assert ended.value.status == 2
    assert capsys.readouterr().err == "no such model\n"
