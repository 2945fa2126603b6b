"""The load client against a real local HTTP server that plays an OpenAI completions endpoint."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from benchmarks.client import OPENAI, Client, ClosedLoop, Dialect, OpenLoop
from benchmarks.serving import rows_of
from benchmarks.workloads import multi_turn, random_lengths

WORKLOAD = random_lengths(num_requests=6, input_len=8, output_len=3, vocab_size=32_000, seed=0)


class Endpoint:
    """Answers token t of a prompt with id 1000 + t; remembers the bodies and how many were open at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.most_open = 0
        self.tells_ids = True
        self.says_done = True
        self.connections: set[object] = set()
        self.fault: Callable[[int], str | None] = lambda index: None
        self.never = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.fault(len(self.bodies))
        self.connections.add(request.transport)
        self.bodies.append(body)
        if fault == "503":
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self.stream(response, body, fault)
        finally:
            self.open -= 1
        return response

    async def stream(self, response: web.StreamResponse, body: dict[str, Any], fault: str | None) -> None:
        async def send(chunk: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        if fault == "hang":
            await self.never.wait()
        if fault == "error":
            await send({"error": {"message": "engine died"}})
            return
        for token in range(body["max_tokens"]):
            await asyncio.sleep(0)
            ids = {"token_ids": [1000 + token]} if self.tells_ids else {}
            await send({"choices": [{"index": 0, "text": "x", "finish_reason": None, **ids}]})
            if fault == "cut":
                return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if not self.says_done:
            await send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
            return
        await send({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}}})
        await response.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def served(endpoint: Endpoint, dialect: Dialect = OPENAI) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/v1/completions", endpoint.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        yield Client(f"http://{host}:{port}/", "m", dialect=dialect)
    finally:
        endpoint.never.set()
        await runner.cleanup()


async def test_it_counts_tokens_gaps_and_cached_tokens() -> None:
    endpoint = Endpoint()
    async with served(endpoint) as client:
        run = await client.run(WORKLOAD, ClosedLoop(concurrency=2), max_s=30)
    assert run.errors == {}
    assert run.answers_known
    for sample in run.samples:
        assert (sample.prompt_tokens, sample.completion_tokens, sample.cached_tokens) == (8, 3, 2)
        assert sample.token_ids == [1000, 1001, 1002]
        assert len(sample.gaps_s) == 2
        assert sample.ttft_s is not None
        assert sample.tpot_s == pytest.approx(sum(sample.gaps_s) / 2)
        assert 0 < sample.ttft_s + sum(sample.gaps_s) <= sample.e2e_s
    assert endpoint.bodies[0] == {
        "model": "m",
        "prompt": list(WORKLOAD.conversations[0].turns[0].token_ids),
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def test_a_closed_loop_never_has_more_open_than_asked() -> None:
    endpoint = Endpoint()
    async with served(endpoint) as client:
        await client.run(WORKLOAD, ClosedLoop(concurrency=2), max_s=30)
    assert (endpoint.most_open, len(endpoint.bodies)) == (2, 6)


async def test_an_open_loop_starts_requests_whether_or_not_others_ended() -> None:
    endpoint = Endpoint()
    endpoint.fault = lambda index: "hang"
    async with served(endpoint) as client:
        run = await client.run(WORKLOAD, OpenLoop(rate=1000.0), max_s=0.5)
    assert endpoint.most_open == 6
    assert run.errors == {"cut off after 0.5 s": 6}


def test_open_loop_arrivals_are_seeded_and_have_the_rate() -> None:
    arrivals = OpenLoop(rate=10.0, seed=3).arrivals_s(2000)
    assert arrivals == OpenLoop(rate=10.0, seed=3).arrivals_s(2000)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("503", 'HTTP 503: {"error": {"message": "full"}}'),
        ("error", "in the stream: engine died"),
        ("cut", "the stream ended without [DONE]"),
    ],
)
async def test_a_failed_request_is_reported_and_is_not_among_the_answered(fault: str, error: str) -> None:
    endpoint = Endpoint()
    endpoint.fault = lambda index: fault if index == 1 else None
    async with served(endpoint) as client:
        run = await client.run(WORKLOAD, ClosedLoop(concurrency=1), max_s=30)
    assert run.errors == {error: 1}
    assert len(run.answered) == 5
    rows = {row.name: row for row in rows_of(WORKLOAD, [run])}
    assert (rows["requests answered"].value, rows["requests failed"].note) == (5, error)
    assert rows["output tokens/s"].value == pytest.approx(5 * 3 / run.wall_s)


async def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    run = await Client("http://127.0.0.1:9", "m").run(WORKLOAD, ClosedLoop(concurrency=6), max_s=30)
    assert sum(run.errors.values()) == 6
    assert rows_of(WORKLOAD, [run])[2].value == 6


async def test_a_conversation_resends_its_history_with_the_answers() -> None:
    endpoint = Endpoint()
    workload = multi_turn(num_users=1, num_turns=2, turn_len=4, output_len=2, vocab_size=32_000, seed=0)
    first, second = (list(turn.token_ids) for turn in workload.conversations[0].turns)
    async with served(endpoint) as client:
        run = await client.run(workload, ClosedLoop(concurrency=1), max_s=30)
    assert [body["prompt"] for body in endpoint.bodies] == [first, [*first, 1000, 1001, *second]]
    assert run.answers_known


async def test_without_token_ids_the_history_has_stand_ins_and_the_report_says_so() -> None:
    endpoint = Endpoint()
    endpoint.tells_ids = False
    workload = multi_turn(num_users=1, num_turns=2, turn_len=4, output_len=2, vocab_size=32_000, seed=0)
    async with served(endpoint) as client:
        run = await client.run(workload, ClosedLoop(concurrency=1), max_s=30)
    assert len(endpoint.bodies[1]["prompt"]) == 4 + 2 + 4
    notes = [row.note for row in rows_of(workload, [run]) if row.name == "cached prompt tokens"]
    assert "stand-ins" in notes[0]


async def test_after_a_failed_turn_the_rest_of_the_conversation_is_not_sent() -> None:
    endpoint = Endpoint()
    endpoint.fault = lambda index: "503"
    workload = multi_turn(num_users=1, num_turns=3, turn_len=4, output_len=2, vocab_size=32_000, seed=0)
    async with served(endpoint) as client:
        run = await client.run(workload, ClosedLoop(concurrency=1), max_s=30)
    assert len(endpoint.bodies) == 1
    assert [sample.error for sample in run.samples[1:]] == ["not sent: an earlier turn failed"] * 2


async def test_a_server_that_takes_text_gets_the_history_as_text_with_its_own_answers() -> None:
    endpoint = Endpoint()
    workload = multi_turn(num_users=1, num_turns=2, turn_len=2, output_len=3, vocab_size=32_000, seed=0)
    dialect = Dialect(as_text=lambda token_ids: f"<{len(token_ids)}>")
    async with served(endpoint, dialect) as client:
        await client.run(workload, ClosedLoop(concurrency=1), max_s=30)
    assert [body["prompt"] for body in endpoint.bodies] == ["<2>", "<2>xxx<2>"]


async def test_a_dialects_fields_take_the_place_of_our_own() -> None:
    endpoint = Endpoint()
    async with served(endpoint, Dialect(fields={"seed": 7})) as client:
        await client.run(WORKLOAD, ClosedLoop(concurrency=1), max_s=30)
    assert set(endpoint.bodies[0]) == {"model", "prompt", "max_tokens", "stream", "seed"}


async def test_a_stream_may_end_with_the_reason_alone_only_where_the_dialect_says_so() -> None:
    endpoint = Endpoint()
    endpoint.says_done = False
    async with served(endpoint, Dialect(says_done=False)) as client:
        run = await client.run(WORKLOAD, ClosedLoop(concurrency=6), max_s=30)
    assert run.errors == {}
    assert run.answered[0].completion_tokens == 3
    async with served(endpoint) as client:
        run = await client.run(WORKLOAD, ClosedLoop(concurrency=6), max_s=30)
    assert run.errors == {"the stream ended without [DONE]": 6}


async def test_connections_are_kept_unless_the_dialect_says_that_the_server_does_not() -> None:
    kept, closed = Endpoint(), Endpoint()
    for endpoint, dialect in ((kept, OPENAI), (closed, Dialect(keeps_alive=False))):
        async with served(endpoint, dialect) as client:
            await client.run(WORKLOAD, ClosedLoop(concurrency=1), max_s=30)
    assert (len(kept.connections), len(closed.connections)) == (1, 6)
