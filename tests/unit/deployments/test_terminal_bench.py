"""`bench`: what is sent to a server that answers as recorded, and what is written of the answers."""

import json
import threading
from collections.abc import Mapping

import pytest

from deployments.watch.terminal import ask, bench, chat
from tests.unit.deployments.listening import answering

OPTIONS = chat.ChatOptions(model=None, system=None, max_tokens=3, temperature=None)
USAGE = {"prompt_tokens": 400, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 300}}


def answered(ttft_s: float, *gaps_s: float) -> bench.Answered:
    return bench.Answered(turn=chat.ChatTurn(usage=USAGE, first_s=ttft_s), gaps_s=gaps_s)


def test_the_report_says_what_came_how_fast_and_which_share_was_cached() -> None:
    refused = [ask.Unanswered("m answers 429: queues are too long", ask.UNREACHABLE)] * 2
    said = bench.report([answered(n / 100, 0.01, 0.03) for n in range(1, 101)], refused, 60.0)
    assert said.splitlines() == [
        "requests   102 in 60 s, 2 failed",
        "           2 x m answers 429: queues are too long",
        "output     5 tokens/s",
        "prompts    40k tokens, 75 % of them cached",
        "",
        "                        p50     p95     p99",
        "time to first token  500 ms  950 ms  990 ms",
        "time between tokens   10 ms   30 ms   30 ms",
    ]


def test_below_100_answers_there_is_no_p99_and_the_report_says_why() -> None:
    said = bench.report([answered(0.5, 0.01)] * 99, [], 60.0)
    assert "  p99" not in said
    assert said.endswith("\n(no p99: it takes 100 answers, and there are 99)")


class Server:
    """Answers each chat with three tokens, or refuses it; keeps the messages, and ends a load after some of them."""

    def __init__(self, *, wanted: int, status: int = 200) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.over = threading.Event()
        self._wanted, self._status = wanted, status

    def respond(self, path: str, _: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.asked.append(json.loads(body)["messages"])
        if len(self.asked) == self._wanted:
            self.over.set()
        if self._status != 200:
            return self._status, json.dumps({"error": {"message": "queues are too long"}}).encode()
        events = [{"choices": [{"delta": {"content": text}}]} for text in "abc"] + [{"choices": [], "usage": USAGE}]
        return 200, b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n"


def loaded(server: Server, *, users: int) -> bench.ChatLoad:
    with answering(server.respond) as port:
        load = bench.ChatLoad(f"http://127.0.0.1:{port}", None, OPTIONS)
        load.over = server.over
        load.run(users=users, for_s=60.0)
    return load


def test_users_share_a_system_message_and_begin_anew_after_the_last_turn() -> None:
    server = Server(wanted=bench.TURNS + 1)
    load = loaded(server, users=1)
    assert [len(messages) for messages in server.asked] == [2, 4, 6, 8, 2]  # system, then questions and answers
    assert server.asked[1][2] == {"role": "assistant", "content": "abc"}
    assert len(load.answered) == 5
    assert len(load.answered[0].gaps_s) == 2
    several = Server(wanted=20)
    loaded(several, users=4)
    firsts = [messages[0] for messages in (*server.asked, *several.asked)]
    assert {each["role"] for each in firsts} == {"system"}
    assert len({each["content"] for each in firsts}) == 2  # one a run: none begins as another run's does


def test_a_conversation_whose_last_turn_failed_ends_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "AFTER_FAILURE_S", 0.0)
    server = Server(wanted=bench.TURNS + 1)

    def respond(path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        status, said = server.respond(path, headers, body)
        return (429, b"{}") if len(server.asked) == bench.TURNS else (status, said)

    with answering(respond) as port:
        load = bench.ChatLoad(f"http://127.0.0.1:{port}", None, OPTIONS)
        load.over = server.over
        load.run(users=1, for_s=60.0)
    assert [len(messages) for messages in server.asked] == [2, 4, 6, 8, 2]
    assert (len(load.answered), len(load.failed)) == (4, 1)


def test_a_refused_request_counts_as_failed_and_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(Server(wanted=0, status=429).respond) as port:
        url = f"http://127.0.0.1:{port}"
        assert bench.run(url, None, OPTIONS, users=2, for_s=0.0) == ask.UNREACHABLE  # one request of each
    said = capsys.readouterr()
    assert said.err == (
        f"tiny at {url}: chats for 0 ms, concurrency 2, 4 turns a conversation, answers of up to 3 tokens\n"
    )
    assert f"2 failed\n           2 x {url} answers 429: queues are too long\n" in said.out


def test_a_load_that_is_stopped_is_reported_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(load: bench.ChatLoad, **_: object) -> None:
        load.answered.append(answered(0.5, 0.01))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.ChatLoad, "run", stopped)
    with answering(Server(wanted=0).respond) as port:
        assert bench.run(f"http://127.0.0.1:{port}", None, OPTIONS, users=1, for_s=60.0) == 0
    said = capsys.readouterr()
    assert said.out.startswith("requests   1 in ")
    assert "stopped: these are the requests that had ended" in said.err
