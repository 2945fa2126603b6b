"""Traces of requests: as an OTLP receiver gets them from the real exporter, and as trees of spans."""

import collections
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from deployments.http import tracing
from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.http.tracing import Tracing, span_tree
from deployments.record.route_log import RouteRecord
from replicas.errors import InvalidConfig
from routing.types import Role
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import answering, client_of
from tests.unit.deployments.pair_in_process import Desks, PdTransferReplica
from tests.unit.deployments.test_http_life import leave_after_first_event

SECRET = "The password of the harbour is swordfish"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


class Collector:
    """What came in, decoded."""

    url = ""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        self.bodies.append(body)
        self.paths.append(path)
        return 200, b""

    @property
    def resources(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [spans for request in requests for spans in request.resource_spans]

    @property
    def all_spans(self) -> list[Any]:
        return [span for each in self.resources for scope in each.scope_spans for span in scope.spans]

    @property
    def spans(self) -> dict[str, Any]:
        """The spans of one request by name."""
        found = {span.name: span for span in self.all_spans}
        assert len(found) == len(self.all_spans)
        return found


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python has them."""
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    with answering(collector.take) as port:
        collector.url = f"http://127.0.0.1:{port}"
        yield collector


class Traced:
    """A client of an app that traces; what it did is sent when it is left."""

    def __init__(self, service: Service, url: str, ratio: float) -> None:
        self.tracing = Tracing(tracing.otlp(url), ratio=ratio, model="smol", router_id="r1", version="0.1.0")
        self.client = client_of(make_app(service, tracing=self.tracing))

    async def __aenter__(self) -> httpx.AsyncClient:
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.tracing.stop()


@pytest.fixture
async def clean() -> AsyncIterator[None]:
    """The process has no tracer provider of its own, before and after."""
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
    yield
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)


@pytest.mark.model
async def test_a_chat_is_one_span_with_its_stages_under_it(service: Service, collector: Collector, clean: None) -> None:
    before_ns = time.time_ns()
    async with Traced(service, collector.url, 1.0) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "me"})
    assert collector.paths == ["/v1/traces"]
    [resource] = collector.resources
    named = values(resource.resource.attributes)
    assert (named["service.name"], named["service.instance.id"]) == ("manta", "r1")
    spans = collector.spans
    assert sorted(spans) == ["chat smol", "manta.decode", "manta.prefill", "manta.queue", "manta.route"]
    root = spans.pop("chat smol")
    told = values(root.attributes)
    usage = answer.json()["usage"]
    assert told.pop("manta.ttft_s") > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "manta",
        "gen_ai.request.model": "smol",
        "gen_ai.response.id": "chatcmpl-me",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "manta.outcome": "ok",
        "http.response.status_code": 200,
    }
    [record] = service.dispatcher.routes.recent()
    assert record.timeline.arrival.exemplar == {"trace_id": root.trace_id.hex()}
    assert (root.kind, root.parent_span_id, root.status.code) == (2, b"", 0)  # SERVER, no parent, unset
    assert answer.headers["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-03"  # random, sampled
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    order = [spans[f"manta.{name}"] for name in ("route", "queue", "prefill", "decode")]
    for earlier, later in itertools.pairwise(order):
        assert earlier.end_time_unix_nano == later.start_time_unix_nano
    assert before_ns <= root.start_time_unix_nano <= order[0].start_time_unix_nano
    assert values(spans["manta.route"].attributes)["manta.route.policy"] == "round_robin"
    assert values(spans["manta.decode"].attributes) == {
        "manta.request": "me", "manta.replica": "r0", "manta.output_tokens": 4}  # fmt: skip


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"prompt": "a b c", "max_tokens": 1, "rid": "mine"}, "cmpl-mine"),
        ("/generate", {"text": "a b c", "sampling_params": {"max_new_tokens": 1}, "rid": "mine"}, "mine"),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}, "rid": ["one", "two"]}, None),
        ("/v1/chat/completions", {"messages": []}, None),
    ],
)
async def test_a_span_has_the_id_of_the_answer_where_that_has_one(
    service: Service, collector: Collector, path: str, body: dict[str, Any], told: str | None
) -> None:
    """A batch has an id a part (manta.request on the stages); what was refused has none."""
    async with Traced(service, collector.url, 1.0) as client:
        answer = await client.post(path, json=body, headers={"x-request-id": "header"})
    [root] = [span for span in collector.all_spans if not span.parent_span_id]
    assert values(root.attributes).get("gen_ai.response.id") == told
    if told is not None:
        given = answer.json()
        assert told == given.get("id", given.get("meta_info", {}).get("id"))


@pytest.mark.model
async def test_a_trace_that_cannot_be_written_is_logged_and_its_span_ends(
    service: Service, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise KeyError("manta.queue")

    monkeypatch.setattr(tracing, "span_tree", broken)
    async with Traced(service, collector.url, 1.0) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert list(collector.spans) == ["chat smol"]
    assert "a trace could not be written whole" in caplog.text


@pytest.mark.model
async def test_a_receiver_that_says_nothing_holds_the_end_up_for_a_moment_only(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "LAST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traced = Traced(service, f"http://127.0.0.1:{silent.getsockname()[1]}", 1.0)
        assert (await traced.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        before_s = time.monotonic()
        await traced.tracing.stop()
        assert time.monotonic() - before_s < 2.0
        await traced.client.aclose()
    assert "did not take the last spans" in caplog.text


@pytest.mark.model
async def test_no_prompt_text_leaves(service: Service, collector: Collector) -> None:
    """Neither of the prompt, nor of an answer, nor of an error that names what the client sent."""
    async with Traced(service, collector.url, 1.0) as client:
        said = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]["content"]
        await client.post("/generate", json={"text": SECRET, "sampling_params": {"stop": SECRET * 100}})
    sent = b"".join(collector.bodies)
    assert b"manta.route" in sent
    assert said.strip().encode() not in sent
    assert not [word for word in SECRET.split() if len(word) > 4 and word.encode() in sent]


@pytest.mark.model
@pytest.mark.parametrize(("flag", "ratio", "sampled"), [("01", 0.0, True), ("00", 1.0, False)])
async def test_the_callers_trace_goes_on_and_its_sampled_flag_decides(
    service: Service, collector: Collector, flag: str, ratio: float, sampled: bool
) -> None:
    async with Traced(service, collector.url, ratio) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": f"{PARENT}-{flag}"})
    version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", "0af7651916cd43dd8448eb211c80319c", flag)
    assert span_id != "b7ad6b7169203331"
    if sampled:
        assert collector.spans["chat smol"].parent_span_id.hex() == "b7ad6b7169203331"
        assert collector.spans["chat smol"].span_id.hex() == span_id
    else:
        assert collector.bodies == []


@pytest.mark.model
async def test_the_ratio_decides_without_a_caller_and_a_bad_header_is_none(
    service: Service, collector: Collector
) -> None:
    async with Traced(service, collector.url, 0.0) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": "00-zz-1-01"})
    assert answer.headers["traceparent"].endswith("-02")  # random, not sampled
    [record] = service.dispatcher.routes.recent()
    assert (collector.bodies, record.timeline.arrival.exemplar) == ([], None)


@pytest.mark.model
async def test_an_error_has_its_span_and_header_and_other_routes_have_none(
    service: Service, collector: Collector
) -> None:
    async with Traced(service, collector.url, 1.0) as client:
        refused = await client.post("/v1/completions", json={"prompt": [], "max_tokens": -1})
        healthy = await client.get("/health")
    assert refused.status_code == 400
    assert "traceparent" not in healthy.headers
    [span] = collector.spans.values()
    assert span.name == "text_completion smol"
    assert refused.headers["traceparent"].split("-")[2] == span.span_id.hex()
    assert values(span.attributes)["http.response.status_code"] == 400
    assert span.status.code == 0  # the client's doing: not an error of ours


@pytest.mark.model
async def test_a_stream_and_several_prompts_are_one_span_each(service: Service, collector: Collector) -> None:
    async with Traced(service, collector.url, 1.0) as client:
        prompts = {"prompt": ["a b c", "d e f g"], "max_tokens": 2, "stream": True, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=prompts)
        assert answer.text.endswith("data: [DONE]\n\n")
    names = collections.Counter(span.name for span in collector.all_spans)
    stages = dict.fromkeys(["manta.route", "manta.queue", "manta.prefill", "manta.decode"], 2)
    assert names == {**stages, "text_completion smol": 1}
    [root] = [span for span in collector.all_spans if span.name.startswith("text")]
    told = values(root.attributes)
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]) == (4, ["length", "length"])


@pytest.mark.model
async def test_where_ray_serves_own_tracing_runs_its_span_is_the_parent(
    service: Service, collector: Collector, clean: None
) -> None:
    """No second global provider: whoever set one keeps it."""
    serves = TracerProvider().get_tracer("serve").start_span("router")
    async with Traced(service, collector.url, 0.0) as client:
        with trace.use_span(serves):
            await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": f"{PARENT}-00"})
    assert collector.spans["chat smol"].parent_span_id.hex() == f"{serves.get_span_context().span_id:016x}"


def test_tracing_is_off_unless_an_endpoint_is_configured() -> None:
    assert not tracing.configured(None, {})
    assert tracing.configured("http://collector:4318", {})
    assert tracing.configured(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})


def test_a_missing_exporter_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidConfig, match=r"pip install -e '\.\[otel\]'"):
        tracing.otlp("http://collector:4318")


@pytest.mark.model
async def test_a_client_that_leaves_has_its_span(service: Service, collector: Collector) -> None:
    """Aborted in the middle: the root alone, and no error of ours."""
    traced = Traced(service, collector.url, 1.0)
    long = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    await leave_after_first_event(make_app(service, tracing=traced.tracing), json.dumps(long).encode())
    await traced.tracing.stop()
    await traced.client.aclose()
    [span] = collector.spans.values()
    told = values(span.attributes)
    assert (told["manta.outcome"], told["http.response.status_code"], span.status.code) == ("cancelled", 200, 0)


@pytest.fixture
async def pairs() -> AsyncIterator[House]:
    """A router that hands over what may be handed over."""
    async with House(always_kv_transfer=True) as house:
        yield house


async def run(house: House, *replicas: ScriptedReplica) -> RouteRecord:
    await house.ready(*replicas)
    await house.collect(rid="a1.0-me")
    [record] = house.dispatcher.routes.recent()
    return record


async def test_a_kv_transfer_has_a_span_with_both_ends_and_what_came(pairs: House) -> None:
    desks = Desks()
    record = await run(pairs, PdTransferReplica("p0", Role.PREFILL, desks), PdTransferReplica("d0", Role.DECODE, desks))
    report = record.tries[-1].kv_transfer
    assert report is not None
    stages = {stage.name: stage for stage in span_tree([record]).stages}
    assert list(stages) == ["manta.route", "manta.queue", "manta.prefill", "manta.kv_transfer", "manta.decode"]
    assert stages["manta.kv_transfer"].attributes == {
        "manta.request": "me", "manta.source": "p0", "manta.target": "d0", "manta.transferred": True,
        "manta.pages": report.num_pages, "manta.bytes": report.num_bytes,
    }  # fmt: skip
    assert stages["manta.prefill"].attributes["manta.replica"] == "p0"
    assert stages["manta.decode"].attributes["manta.replica"] == "d0"


async def test_a_try_that_failed_is_told_by_its_errors_name_alone(pairs: House) -> None:
    tree = span_tree([await run(pairs, ScriptedReplica("r0", die_at=0), ScriptedReplica("r1"))])
    assert tree.failed_tries == ({"manta.replica": "r0", "error.type": "ReplicaGone"},)
    assert (tree.error, tree.attributes["manta.outcome"]) == (None, "ok")
