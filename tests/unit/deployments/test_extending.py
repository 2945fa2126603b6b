"""A package of somebody else adds to the tables, and Manta serves with what it added (docs/extending.md)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import Decoder

from deployments.channel.frames import _ENCODER, _from_bytes
from deployments.http.bodies import WireType, asked_fields
from deployments.http.convert import asked_of
from deployments.http.http_app import make_app
from deployments.output.output_format import OutputFormat
from deployments.output.reasoning import REASONING_FORMATS
from deployments.output.tool_formats import TOOL_FORMATS
from deployments.replica.served_engine import ServedEngine
from deployments.settings.schema import AppConfig, parse
from kvtransfer.stores.store import ReadStatus, WriteStatus
from kvtransfer.stores.urls import BACKENDS, open_store
from replicas.attention import registry
from replicas.cache import retention
from replicas.cache.store_tier import PREFETCH
from replicas.cache.write_policy import RULES
from replicas.checkpoints.methods import METHODS
from replicas.config import EXTENSIONS, load_extensions
from replicas.engine.loop import EngineLoop
from replicas.errors import InvalidConfig, InvalidRequest
from replicas.kernels.instructions import SETS
from replicas.models.registry import MODELS
from replicas.request import CLASSES, Req
from replicas.scheduler.orders import ORDERS
from replicas.scheduler.rounds import FEATURES
from replicas.types import GenerateRequest, SamplingParams, asked
from routing.policies import POLICIES
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House
from tests.unit.deployments.listening import client_of
from tests.unit.kvtransfer.test_store_protocol import only
from tests.unit.output.outputs import read

TABLES: tuple[MutableMapping[str, Any], ...] = (
    POLICIES, TOOL_FORMATS, REASONING_FORMATS, BACKENDS,
    registry.BACKENDS, retention.POLICIES, RULES, PREFETCH, ORDERS, CLASSES, FEATURES, METHODS, SETS, MODELS,
)  # fmt: skip
TOY = '''
from deployments.output.call_readers import CallReader
from deployments.output.reasoning import REASONING_FORMATS, ReasoningFormat
from deployments.output.text_machine import Tags
from deployments.output.tool_formats import TOOL_FORMATS, ToolFormat
from kvtransfer.stores.file import FileMedium
from kvtransfer.stores.urls import BACKENDS, StoreBackend
from routing.policies import POLICIES, PolicyChoice
from routing.types import Reason


def last(query, candidates, turn):
    """Choose the last id."""
    return PolicyChoice(index=len(candidates) - 1, reason=Reason.TURN, compared=())


class ToyReader(CallReader):
    """Reads ``@name {arguments}``."""

    def _read(self):
        while tag := (yield from self._scan(Tags.of("@"), self._text)):
            self._raw = [tag]
            name = yield from self._word("{ ")
            if not name or (yield from self._after_spaces()) != "{":
                self._not_a_call()
                continue
            self._call(name)
            yield from self._value(self._arguments)


POLICIES["last"] = last
TOOL_FORMATS["toy"] = (
    ToolFormat(marker=lambda template: "@toy" in template, reader=ToyReader, name_tag="@",
               before_name="@", after_name=" ", end="\\n"),
)
REASONING_FORMATS["toy"] = ReasoningFormat(begin="[hm]", end="[/hm]")
BACKENDS["toy"] = StoreBackend(
    urls="toy:///folder", is_of_host=True, open=lambda url, most: FileMedium(url.path, capacity_bytes=most)
)
'''
MODEL_ARGS = {"path": MODEL, "tool_format": "toy", "reasoning_format": "toy"}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"properties": {"zone": {"enum": ["UTC"]}}}}}


def install(folder: Path, module: str, source: str) -> None:
    """Make a distribution of one module, which is an extension."""
    (folder / f"{module}.py").write_text(source)
    facts = folder / f"{module}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{EXTENSIONS}]\ntoys = {module}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages; what they add to the tables is gone after the test."""
    before = [dict(table) for table in TABLES]
    monkeypatch.syspath_prepend(tmp_path)
    load_extensions.cache_clear()
    yield tmp_path
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries)
    sys.modules.pop("manta_toys", None)
    load_extensions.cache_clear()


@pytest.fixture
def toys(packages: Path) -> AppConfig:
    """Settings that name what a package adds."""
    install(packages, "manta_toys", TOY)
    cache = {"store": f"toy://{packages}/store", "host_memory_bytes": 1 << 20}
    return parse({"model": MODEL_ARGS, "router": {"policy": "last"}, "cache": cache})


def test_settings_allow_what_a_package_adds_and_nothing_else(packages: Path) -> None:
    for group, name in (("router", "policy"), ("model", "tool_format"), ("model", "reasoning_format")):
        given: dict[str, Any] = {"model": {"path": MODEL}, "router": {}}
        given[group][name] = "toy"
        with pytest.raises(InvalidConfig, match=f"{group}.{name}: must be .*, not 'toy'"):
            parse(given)
    with pytest.raises(InvalidConfig, match=r"cache\.store: 'toy:///x' is no URL of a store: file:///absolute/path"):
        parse({"model": {"path": MODEL}, "cache": {"store": "toy:///x", "host_memory_bytes": 1 << 20}})


def test_an_extension_that_is_not_there_is_named(packages: Path) -> None:
    install(packages, "manta_toys", "import no_such_module")
    with pytest.raises(InvalidConfig, match="extension manta_toys of manta_toys cannot be imported: No module named"):
        parse({"model": {"path": MODEL}})


async def test_a_policy_and_a_tool_format_of_a_package_serve(toys: AppConfig, idle_engine: EngineLoop) -> None:
    async with House(policy=toys.router.policy) as house:
        await house.ready(*(ServedEngine(idle_engine, replica_id=name, node_id="here") for name in ("a", "b")))
        service = house.service(idle_engine.engine.tokenizer, tool_format=toys.model.tool_format)
        asked = {
            "messages": [{"role": "user", "content": "What time is it?"}], "tools": [NOW], "tool_choice": "required",
            "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0,
        }  # fmt: skip
        async with client_of(make_app(service)) as client:
            answer = await client.post("/v1/chat/completions", json=asked, headers={"x-request-id": "one"})
            assert answer.status_code == 200, answer.text
            [call] = answer.json()["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "now"
            assert json.loads(call["function"]["arguments"]) in ({}, {"zone": "UTC"})
            route = (await client.get("/route/one")).json()["tries"][0]
            assert (route["policy"], route["replica"]) == ("last", "b")


def test_reasoning_in_the_tags_of_a_package_is_told_apart(toys: AppConfig, idle_engine: EngineLoop) -> None:
    output = OutputFormat.of(idle_engine.engine.tokenizer, reasoning_format=toys.model.reasoning_format)
    assert read(output.reader(schemas=None), "[hm]Is it? [/hm] It is.") == [("think", "Is it?"), "It is."]


def test_the_examples_of_the_page_run_and_its_tests_exist(packages: Path) -> None:
    page = Path("docs/extending.md").read_text()
    sizes = [len(table) for table in TABLES]
    for section in page.split("\n## ")[1:]:
        exec(section.partition("```python\n")[2].partition("```")[0], {})
    assert [len(table) for table in TABLES] == [size + 1 for size in sizes]
    named = {path for each in re.findall(r"`(tests/[^`]+)`", page) for path in each.split()}
    assert [path for path in sorted(named) if not Path(path).exists()] == []


@dataclass(frozen=True, slots=True, kw_only=True)
class MySampling(SamplingParams):
    """The parameters with one more."""

    top_a: float = asked(0.25, "Leave out tokens that are less likely.", least=0, most=1, authors=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MyRequest(GenerateRequest):
    """A request with one more field of its body, and one of a header."""

    hops: int = asked(0, "The agents before.", name="num_hops", least=0, most=9)
    pace: float | None = asked(None, "Tokens a second that are enough.", header="x-my-pace", above=0, most=100)


def test_a_parameter_and_a_field_of_a_request_are_one_line_each() -> None:
    class Body(WireType):
        """A body of a generating route."""

        __annotations__ = asked_fields(MySampling) | asked_fields(MyRequest)

    def sent(body: dict[str, Any], **headers: str) -> Req:
        given = Body.model_validate(body)
        sampling: Any = MySampling(**asked_of(MySampling, given))
        request = MyRequest(
            rid="r", token_ids=[1], sampling=sampling,  # type: ignore[arg-type]
            **asked_of(MyRequest, given, headers),
        )  # fmt: skip
        request.validate(vocab_size=9)
        return Req.make(copied(request), index=0, now_s=0.0, eos_ids=frozenset())

    def copied(request: MyRequest) -> MyRequest:
        """Send the request to a replica, and its parameters beside it, of whose type frames do not know here."""
        arrived = Decoder(MyRequest, dec_hook=_from_bytes).decode(_ENCODER.encode(request))
        return replace(arrived, sampling=Decoder(MySampling).decode(_ENCODER.encode(request.sampling)))

    req = sent({"top_a": 0.5, "num_hops": 3, "priority": 2}, **{"x-my-pace": "7.5"})
    asked_for: Any = req.asked
    assert (req.rank.priority, asked_for.hops, asked_for.pace, asked_for.sampling.top_a) == (2, 3, 7.5, 0.5)
    without: Any = sent({"num_hops": None})
    assert (without.asked.hops, without.asked.pace, without.sampling.top_a) == (0, None, 0.25)
    for body, headers, message in (
        ({"top_a": 1.5}, {}, "top_a: must be at least 0 and at most 1, got 1.5"),
        ({"num_hops": 10}, {}, "num_hops: must be at least 0 and at most 9, got 10"),
        ({}, {"x-my-pace": "0"}, "x-my-pace: must be above 0 and at most 100, got 0.0"),
        ({}, {"x-my-pace": "fast"}, "x-my-pace: 'fast' is no number"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{message}$"):
            sent(body, **headers)
    shown = Body.model_json_schema()["properties"]
    assert shown["num_hops"]["anyOf"][0] == {"minimum": 0, "maximum": 9, "type": "integer"}
    assert shown["top_a"]["description"].endswith("what the model's author says (`model.sampling_defaults`), or 0.25.")
    assert "x-my-pace" not in shown


STATISTIC = """
import dataclasses
from dashboards import catalog
from replicas import types
{example}
given = {{"bases": (types.EngineStats,), "frozen": True, "slots": True, "kw_only": True}}
types.EngineStats = dataclasses.make_dataclass("EngineStats", [("num_mine", int, num_mine)], **given)
catalog.CATALOG[metric.name] = metric

from deployments.channel.frames import FrameReader, ReplicaReport, decode, encode
from deployments.fleet.seen import SeenReplica
from deployments.replica.served_engine import _activity
from deployments.watch.observatory.state import row_of
from tests.harness import ask, fake_engine, finish_all
from tests.unit.metrics.test_replica_figures import scrape

engine, _ = fake_engine()
before = engine.stats()
engine.submit(ask("a", range(1, 9)))
finish_all(engine)
(frame,) = FrameReader().feed(encode(ReplicaReport(stats=engine.stats(), error=None, num_open=0)))
report = decode(frame)
seen = SeenReplica(replica_id="a", role="unified", state="accepting", info=None, report=report, report_age_s=0.0)
print(report.stats.num_mine, row_of(seen, node="n", age_s=0.0, rates=None)["mine"],
      int(scrape(report.stats).value(metric.name)), _activity(before, report.stats, 1.0)["mine"])
"""


def test_a_statistic_is_a_field_and_its_metric_and_is_told_everywhere() -> None:
    """The example of the page, in a process of its own, as modules read the table when they are imported."""
    page = Path("docs/extending.md").read_text().partition("## Statistic of an engine")[2]
    program = STATISTIC.format(example=page.partition("```python\n")[2].partition("```")[0])
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["8"] * 4, run.stderr


def test_a_store_of_a_package_keeps_pages(toys: AppConfig) -> None:
    assert toys.cache.store is not None
    store = open_store(toys.cache.store, layout_digest=b"12345678", capacity_bytes=1 << 20)
    key, page = b"k" * 16, memoryview(bytearray(b"page" * 16))
    assert only(store.write([(key, [page])])).status is WriteStatus.STORED
    assert only(store.read([(key, [page])])).status is ReadStatus.OK
    store.check()
    store.close()
