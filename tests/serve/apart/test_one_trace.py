"""One request over two replicas as a trace: sent by OTLP, read from what a collector's debug exporter prints.

The collector is Rotel, of which PyPI has builds; it prints as the OpenTelemetry Collector's debug exporter does.
"""

import importlib.util
import itertools
import re
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import unavailable
from tests.serve.running import HTTP, Running, free_port

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = "SmolLM2-135M-Instruct"

SECRET = "harbour"
SENT_S = 30.0  # the exporter sends every 5 s, the collector prints every 0.2 s
STAGES = ["manta.route", "manta.queue", "manta.prefill", "manta.kv_transfer", "manta.decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """One span, as it was printed; times in nanoseconds since 1970."""

    trace_id: str
    parent_id: str
    span_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]  # with the type that the collector gives: Str(...), Int(...)
    num_events: int


def read(text: str) -> list[Printed]:
    """Read the spans from what the collector printed: the root, and its stages in their order."""
    spans = []
    for part in re.split(r"^Span #\d+$", text, flags=re.MULTILINE)[1:]:
        part = part.partition("\nResourceSpans #")[0]
        told = dict(re.findall(r"^ *([A-Z][A-Za-z ]*?) *: (.*)$", part, flags=re.MULTILINE))
        own, *events = part.partition("\nAttributes:\n")[2].split("\nSpanEvent #")
        spans.append(
            Printed(
                trace_id=told["Trace ID"],
                parent_id=told["Parent ID"],
                span_id=told["ID"],
                name=told["Name"],
                kind=told["Kind"],
                start_ns=int(told["Start time"]),
                end_ns=int(told["End time"]),
                attributes=dict(re.findall(r"^ +-> ([\w.]+): (.*)$", own, flags=re.MULTILINE)),
                num_events=len(events),
            )
        )
    return sorted(spans, key=lambda span: STAGES.index(span.name) if span.name in STAGES else -1)


@pytest.fixture(scope="module")
def collector(otlp_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a collector where the routers send their spans. Yields: what it prints."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        unavailable("no collector: `make install-test` installs Rotel, where there is a build of it")
    folder = tmp_path_factory.mktemp("collector")
    printed = folder / "printed.txt"
    command = [
        str(Path(found.origin).with_name("rotel-agent")), "start", "--exporter", "blackhole",
        "--debug-log", "traces", "--debug-log-verbosity", "detailed", "--pid-file", str(folder / "pid"),
        "--otlp-http-endpoint", f"127.0.0.1:{otlp_port}", "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    with printed.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield printed
    finally:
        process.terminate()
        process.wait(30)


def test_a_request_over_two_replicas_is_one_trace_at_a_collector(
    app: Running, collector: Path
) -> None:
    trace_id, caller_id = secrets.token_hex(16), secrets.token_hex(8)
    asked = {"messages": [{"role": "user", "content": f"Tell of a {SECRET}. " * 20}], "max_tokens": 8, "temperature": 0}
    headers = {"X-Request-Id": "traced", "traceparent": f"00-{trace_id}-{caller_id}-01"}
    answer = HTTP.post(f"{app.url}/v1/chat/completions", json=asked, headers=headers, timeout=180)
    assert answer.status_code == 200, answer.text
    root, *stages = read(printed_in(collector, app))
    assert [root.name, *(span.name for span in stages)] == [f"chat {MODEL}", *STAGES]
    assert {span.trace_id for span in (root, *stages)} == {trace_id}
    assert (root.parent_id, root.kind, root.num_events) == (caller_id, "SPAN_KIND_SERVER", 0)
    assert [span.parent_id for span in stages] == [root.span_id] * len(STAGES)
    assert answer.headers["traceparent"].split("-")[1:3] == [trace_id, root.span_id]

    assert root.start_ns <= stages[0].start_ns
    for earlier, later in itertools.pairwise(stages):
        assert earlier.end_ns == later.start_ns
    of = {span.name: span.attributes for span in stages}
    both = {state["replica"]["role"]: f"Str({state['replica']['replica_id']})" for state in app.states()}
    assert [of[name]["manta.replica"] for name in ("manta.queue", "manta.prefill")] == [both["prefill"]] * 2
    assert [of[name]["manta.replica"] for name in ("manta.route", "manta.decode")] == [both["decode"]] * 2
    [only] = HTTP.get(f"{app.url}/route/traced", timeout=30).json()["tries"]
    assert of["manta.kv_transfer"] == {
        "manta.request": "Str(traced)",
        "manta.source": both["prefill"],
        "manta.target": both["decode"],
        "manta.transferred": "Bool(true)",
        "manta.pages": f"Int({only['kv_transfer']['num_pages']})",
        "manta.bytes": f"Int({only['kv_transfer']['num_bytes']})",
    }
    usage = answer.json()["usage"]
    assert of["manta.decode"]["manta.output_tokens"] == f"Int({usage['completion_tokens']})"
    assert root.attributes["gen_ai.usage.input_tokens"] == f"Int({usage['prompt_tokens']})"
    assert SECRET not in collector.read_text()


def printed_in(collector: Path, app: Running) -> str:
    """Wait for the spans, and until no more of them is printed. Returns: all that the collector has printed."""
    looks = [""]

    def settled() -> bool:
        looks.append(collector.read_text())
        return looks[-1].count("\nSpan #") > len(STAGES) and looks[-1] == looks[-2]

    app.until(settled, SENT_S, look_s=0.5)
    return looks[-1]
