"""A router's metrics of its requests, counted when something happens to one.

Owns:      which event is which metric.
Never:     keeps a request.
Invariant: best, predicted and actual overlap, and the prompt tokens that they are held against, are counted together,
           with the first token of a request: their ratios compare the same requests.
Thread:    the router's event loop.

A request is one prompt; an HTTP request with several counts as several, and one that was refused before any of its
prompts was sent on (a wrong body, say) as one, in ``requests_total`` alone. Token counts, stages and duration are of
requests that ended ok. Requests for tokens alone have a count and a duration.

Which objectives a request met: `route_log.judged`.
"""

from collections.abc import Iterator, Mapping

from dashboards.catalog import ANSWERING, ENDPOINTS, FINISHES, LINES, OUTCOMES, STAGES
from deployments.dispatch.leases import ReplicaGone, ReplicaHangs
from deployments.dispatch.prefill_leg import PrefillLost
from deployments.record.route_log import RequestWatch, Try, predicted_tokens
from deployments.record.timeline import Timeline
from deployments.watch.metrics.emitter import Emitter, Value
from replicas.errors import AdapterNotReadable, DiedInStep, EngineDead, NotSent, Overloaded, StepFailed
from routing.migration import CAUSES, Cause
from routing.types import Decision
from routing.why import MissCause

RETRIES: Mapping[type, str] = {
    ReplicaGone: "replica_gone",
    ReplicaHangs: "replica_hangs",
    EngineDead: "engine_dead",
    DiedInStep: "died_in_step",
    StepFailed: "step_failed",
    Overloaded: "overloaded",
    NotSent: "overloaded",  # as its request ends
    AdapterNotReadable: "overloaded",  # there; another replica may read it
    PrefillLost: "prefill_lost",
}


class RouterEvents(RequestWatch):
    """The metrics of requests, counted as a `RequestWatch`."""

    def __init__(self, emitter: Emitter, *, objectives: Mapping[str, float], disaggregated: bool) -> None:
        super().__init__(objectives)
        self._emitter = emitter
        emitter.tell(("adapter_requests_total", "adapter_tokens_total"), self._told_of_adapters)
        counter, histogram = emitter.counter, emitter.histogram
        self.gaps = emitter.tally("inter_token_latency_seconds")
        self.on_gap = self.gaps.add_many
        self._ended = {
            (endpoint, outcome): counter("requests_total", endpoint=endpoint, outcome=outcome)
            for endpoint in ENDPOINTS
            for outcome in OUTCOMES
        }
        counter("http_responses_total", status="200")  # from the first scrape, as the series of known labels
        self._finishes = {each: counter("request_finishes_total", reason=each) for each in FINISHES}
        self._open = {each: emitter.gauge("requests_in_flight", endpoint=each) for each in ANSWERING}
        self._ttft = {each: histogram("time_to_first_token_seconds", endpoint=each) for each in ANSWERING}
        self._duration = {each: histogram("request_duration_seconds", endpoint=each) for each in ENDPOINTS}
        self._stages = {each: histogram("request_stage_duration_seconds", stage=each) for each in STAGES}
        names = ("request_prompt_tokens", "request_output_tokens", "time_per_output_token_seconds")
        self._of_answers = {name: histogram(name) for name in names}
        self._slo = {
            (slo, met): counter("slo_requests_total", slo=slo, met="true" if met else "false")
            for slo in ("ttft", "itl")
            for met in (True, False)
        }
        for slo in ("ttft", "itl"):
            emitter.gauge("slo_objective_seconds", slo=slo).set(objectives[f"{slo}_objective_s"])
        self._decision_s = histogram("router_decision_duration_seconds")
        self._migrations = {each: counter("requests_moved_total", reason=each) for each in CAUSES}
        self._retries = {each: counter("router_retries_total", reason=each) for each in RETRIES.values()}
        self._tokens = {
            kind: counter(f"router_{kind}_tokens_total")
            for kind in ("prompt", "best_overlap", "predicted_overlap", "actual_overlap", "fetched")
        }
        self._overlap_error = {
            sign: histogram("router_overlap_error_ratio", sign=sign) for sign in ("over", "under", "exact")
        }
        self._ttft_error = {sign: histogram("router_ttft_error_seconds", sign=sign) for sign in ("over", "under")}
        emitter.gauge("router_streams_detached")
        for how in ("kept", "again"):
            counter("router_streams_resumed_total", how=how)
        counter("router_streams_expired_total")
        for name in ("router_batch_lines_running", "router_batches_stalled"):
            emitter.gauge(name)
        for outcome in LINES:
            counter("router_batch_lines_total", outcome=outcome)
        for each in MissCause:
            counter("router_uncached_requests_total", cause=each.value)
            counter("router_uncached_tokens_total", cause=each.value)
        for outcome in ("ok", "error"):
            counter("router_fetches_total", outcome=outcome)
        counter("router_fetch_seconds_total")
        self._kv_transfers = {}
        if disaggregated:
            self._kv_transfers = {
                came: counter("router_kv_transfers_total", outcome="ok" if came else "error") for came in (True, False)
            }

    def opened(self, endpoint: str) -> None:
        self._open[endpoint].inc()

    def decided(self, decision: Decision, *, took_s: float, failure: Exception | None) -> None:
        emitter = self._emitter
        emitter.counter("router_decisions_total", policy=decision.policy, reason=decision.reason.value).inc()
        self._decision_s.observe(took_s)
        if decision.pair is not None and self._kv_transfers:
            emitter.counter("router_pair_decisions_total", reason=decision.pair.reason.value).inc()
        reason = RETRIES.get(type(failure))
        if reason is not None:
            self._retries[reason].inc()

    def began(self, noted: Try, timeline: Timeline) -> None:
        super().began(noted, timeline)
        if timeline.ttft_s is not None:
            self._ttft[timeline.arrival.endpoint].observe(timeline.ttft_s, timeline.arrival.exemplar)
        decision, actual = noted.decision, noted.cached_tokens or 0
        predicted = predicted_tokens(noted)
        self._tokens["prompt"].inc(decision.num_tokens)
        self._tokens["best_overlap"].inc(decision.best_overlap[1])
        self._tokens["predicted_overlap"].inc(predicted)
        self._tokens["actual_overlap"].inc(actual)
        self._overlap_error[_sign(predicted - actual)].observe(abs(predicted - actual) / decision.num_tokens)
        if noted.ttft_s is not None:
            error_s = decision.predicted_ttft_s - noted.ttft_s
            self._ttft_error["over" if error_s >= 0 else "under"].observe(abs(error_s))

    def moved(self, cause: Cause) -> None:
        self._migrations[cause].inc()

    def tried(self, noted: Try) -> None:
        if noted.miss is not None:
            cause = noted.miss.cause.value
            self._emitter.counter("router_uncached_requests_total", cause=cause).inc()
            self._emitter.counter("router_uncached_tokens_total", cause=cause).inc(noted.miss.tokens)
        fetch, report = noted.decision.fetch, noted.fetch_report
        if fetch is not None and report is not None:
            outcome = "ok" if report.transferred else "error"
            self._emitter.counter("router_fetches_total", outcome=outcome).inc()
            self._emitter.counter("router_fetch_seconds_total").inc(report.grant_s + report.wait_s)
            if report.transferred:
                self._tokens["fetched"].inc(fetch.num_tokens * report.num_bytes / max(fetch.num_bytes, 1))
        if noted.kv_transfer is not None and noted.decision.prefill_id is not None and self._kv_transfers:
            self._kv_transfers[noted.kv_transfer.transferred].inc()

    def ended(self, timeline: Timeline, *, prompt_tokens: int, outcome: str, adapter: str = "") -> None:
        endpoint = timeline.arrival.endpoint
        self._open[endpoint].dec()
        self._ended[endpoint, outcome].inc()
        for reason in timeline.finish_reasons:
            self._finishes[reason].inc()
        super().ended(timeline, prompt_tokens=prompt_tokens, outcome=outcome, adapter=adapter)
        stages = timeline.stages
        if outcome != "ok" or stages is None:
            return
        self._duration[endpoint].observe(stages.total_s, timeline.arrival.exemplar)
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(stages, f"{stage}_s"))
        self._of_answers["request_prompt_tokens"].observe(prompt_tokens)
        self._of_answers["request_output_tokens"].observe(timeline.num_output)
        if timeline.mean_itl_s is not None:
            self._of_answers["time_per_output_token_seconds"].observe(timeline.mean_itl_s)

    def _told_of_adapters(self) -> Iterator[tuple[str, Mapping[str, str], Value]]:
        for (name, kind), number in self.adapters.copy().items():
            if kind == "requests":
                yield "adapter_requests_total", {"adapter": name}, number
            else:
                yield "adapter_tokens_total", {"adapter": name, "kind": kind}, number

    def responded(self, status: int) -> None:
        self._emitter.counter("http_responses_total", status=str(status)).inc()

    def answered(self, endpoint: str, *, outcome: str, total_s: float) -> None:
        self._ended[endpoint, outcome].inc()
        if outcome == "ok":
            self._duration[endpoint].observe(total_s)
        super().answered(endpoint, outcome=outcome, total_s=total_s)

    def streams_detached(self, num: int) -> None:
        self._emitter.gauge("router_streams_detached").set(num)

    def stream_resumed(self, how: str) -> None:
        self._emitter.counter("router_streams_resumed_total", how=how).inc()

    def lines_running(self, num: int) -> None:
        self._emitter.gauge("router_batch_lines_running").set(num)

    def batches_stalled(self, num: int) -> None:
        self._emitter.gauge("router_batches_stalled").set(num)

    def line_ran(self, outcome: str) -> None:
        self._emitter.counter("router_batch_lines_total", outcome=outcome).inc()

    def stream_expired(self) -> None:
        self._emitter.counter("router_streams_expired_total").inc()

    def _count(self, outcome: str, met: Mapping[str, bool]) -> None:
        super()._count(outcome, met)
        for slo, in_time in met.items():
            self._slo[slo, in_time].inc()


def _sign(difference: int) -> str:
    return "over" if difference > 0 else "under" if difference < 0 else "exact"
