"""A router's metrics of its requests, counted when something happens to one.

Owns:      which event is which metric.
Never:     keeps a request.
Invariant: best, predicted and actual overlap, and the prompt tokens that they are held against, are counted together,
           with the first token of a request: their ratios compare the same requests.
Thread:    the router's event loop.

A request is one prompt; an HTTP request with several counts as several, and one that was refused before any of its
prompts was sent on (a wrong body, say) as one, in ``requests_total`` alone. Token counts, stages and duration are of
requests that ended ok. Requests for tokens alone have a count and a duration.

The first-token objective is missed by a request that failed before its first token, and the inter-token one by one that
failed after it: an overload that refuses or times out must not look like one that serves all requests in time. A
client that leaves, or asks for something impossible, counts for neither.
"""

from collections.abc import Mapping

from dashboards.catalog import ANSWERING, ENDPOINTS, OUTCOMES, STAGES
from deployments.dispatch.leases import ReplicaGone, ReplicaHangs
from deployments.dispatch.prefill_leg import PrefillLost
from deployments.dispatch.route_log import RequestWatch, Try
from deployments.dispatch.timeline import Timeline
from deployments.watch.metrics.emitter import Emitter
from replicas.errors import EngineDead, Overloaded
from routing.types import Decision

FAILED = ("error", "shed", "timeout")  # outcomes in which the client did not get its answer
RETRIES: Mapping[type, str] = {
    ReplicaGone: "replica_gone",
    ReplicaHangs: "replica_hangs",
    EngineDead: "engine_dead",
    Overloaded: "overloaded",
    PrefillLost: "prefill_lost",
}


class RouterEvents(RequestWatch):
    """The metrics of requests, counted as a `RequestWatch`."""

    def __init__(
        self, emitter: Emitter, *, ttft_objective_s: float, itl_objective_s: float, disaggregated: bool
    ) -> None:
        self._emitter = emitter
        self._ttft_objective_s = ttft_objective_s
        self._itl_objective_s = itl_objective_s
        counter, histogram = emitter.counter, emitter.histogram
        self.on_gap = emitter.tally("inter_token_latency_seconds").add_many
        self._ended = {
            (endpoint, outcome): counter("requests_total", endpoint=endpoint, outcome=outcome)
            for endpoint in ENDPOINTS
            for outcome in OUTCOMES
        }
        self._open = {each: emitter.gauge("requests_in_flight", endpoint=each) for each in ANSWERING}
        self._ttft = {each: histogram("time_to_first_token_seconds", endpoint=each) for each in ANSWERING}
        self._duration = {each: histogram("request_duration_seconds", endpoint=each) for each in ENDPOINTS}
        self._stages = {each: histogram("request_stage_duration_seconds", stage=each) for each in STAGES}
        self._prompt = histogram("request_prompt_tokens")
        self._output = histogram("request_output_tokens")
        self._slo = {
            (slo, met): counter("slo_requests_total", slo=slo, met="true" if met else "false")
            for slo in ("ttft", "itl")
            for met in (True, False)
        }
        self._decision_s = histogram("router_decision_duration_seconds")
        self._retries = {each: counter("router_retries_total", reason=each) for each in RETRIES.values()}
        self._tokens = {
            kind: counter(f"router_{kind}_tokens_total")
            for kind in ("prompt", "best_overlap", "predicted_overlap", "actual_overlap")
        }
        self._overlap_error = {
            sign: histogram("router_overlap_error_ratio", sign=sign) for sign in ("over", "under", "exact")
        }
        self._ttft_error = {sign: histogram("router_ttft_error_seconds", sign=sign) for sign in ("over", "under")}
        self._hand_offs = {}
        if disaggregated:
            self._hand_offs = {
                came: counter("router_hand_offs_total", outcome="transferred" if came else "failed")
                for came in (True, False)
            }

    def opened(self, endpoint: str) -> None:
        self._open[endpoint].inc()

    def decided(self, decision: Decision, *, took_s: float, failure: Exception | None) -> None:
        emitter = self._emitter
        emitter.counter("router_decisions_total", policy=decision.policy, reason=decision.reason.value).inc()
        self._decision_s.observe(took_s)
        if decision.pair is not None and self._hand_offs:
            emitter.counter("router_pair_decisions_total", reason=decision.pair.reason.value).inc()
        reason = RETRIES.get(type(failure))
        if reason is not None:
            self._retries[reason].inc()

    def began(self, noted: Try, timeline: Timeline) -> None:
        if timeline.ttft_s is not None:
            self._ttft[timeline.arrival.endpoint].observe(timeline.ttft_s)
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

    def tried(self, noted: Try) -> None:
        if noted.hand_off is not None and noted.decision.prefill_id is not None and self._hand_offs:
            self._hand_offs[noted.hand_off.transferred].inc()

    def ended(self, timeline: Timeline, *, prompt_tokens: int, outcome: str) -> None:
        endpoint = timeline.arrival.endpoint
        self._open[endpoint].dec()
        self._ended[endpoint, outcome].inc()
        self._judge(timeline, outcome)
        stages = timeline.stages
        if outcome != "ok" or stages is None:
            return
        self._duration[endpoint].observe(stages.total_s)
        for stage, histogram in self._stages.items():
            histogram.observe(getattr(stages, f"{stage}_s"))
        self._prompt.observe(prompt_tokens)
        self._output.observe(timeline.num_output)

    def answered(self, endpoint: str, *, outcome: str, total_s: float) -> None:
        self._ended[endpoint, outcome].inc()
        if outcome == "ok":
            self._duration[endpoint].observe(total_s)
        elif outcome in FAILED and endpoint in ANSWERING:
            self._slo["ttft", False].inc()

    def _judge(self, timeline: Timeline, outcome: str) -> None:
        """Count against each objective, as the module's docstring says."""
        failed = outcome in FAILED
        if not failed and outcome != "ok":
            return
        ttft_s, itl_s = timeline.ttft_s, timeline.mean_itl_s
        if ttft_s is not None:
            self._slo["ttft", ttft_s <= self._ttft_objective_s].inc()
        elif failed:
            self._slo["ttft", False].inc()
        if ttft_s is not None and failed:
            self._slo["itl", False].inc()
        elif itl_s is not None:
            self._slo["itl", itl_s <= self._itl_objective_s].inc()


def predicted_tokens(noted: Try) -> int:
    """Return the tokens predicted to be cached where the prompt was computed in the end (as routing/fleet_state.py)."""
    failed = noted.hand_off is not None and not noted.hand_off.transferred
    if failed and noted.decision.pair is not None:
        return noted.decision.pair.chosen.cached_tokens
    return noted.decision.overlap_tokens


def _sign(difference: int) -> str:
    return "over" if difference > 0 else "under" if difference < 0 else "exact"
