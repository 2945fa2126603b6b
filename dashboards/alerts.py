"""What Manta is judged by: the figures of the live view with their objectives, and the alerts.

Owns:      names, units and objectives of the figures; condition, threshold, duration and words of each alert.
Never:     holds a measured value. The observatory evaluates this table (deployments/watch/observatory/alerts.py) and
           dashboards/prometheus/rules.yml is written from it, so the live view and Prometheus cannot differ.

A ratio is of two sums and has no value while nothing happened. Sources are what a condition reads: for Prometheus the
series in SOURCES; the observatory reads the same counters from routers' answers and replicas' reports, under that name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dashboards.catalog import ITL

UNITS = {"seconds", "tokens/s", "ratio", "requests"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the live view; ``series`` are its lines in the history, first the one whose value is shown."""

    name: str
    title: str
    unit: str
    series: tuple[str, ...]
    objective: str | None = None  # the setting of ``observability`` that it is held against
    most: float | None = None  # the largest value that can be told apart: a histogram's last bound

    def __post_init__(self) -> None:
        assert self.unit in UNITS, self.unit


FIGURES = (
    Figure(name="ttft", title="TTFT", unit="seconds", series=("ttft_p50", "ttft_p95", "ttft_p99"),
           objective="ttft_objective_s"),
    Figure(name="itl", title="ITL", unit="seconds", series=("itl_p50", "itl_p95", "itl_p99"),
           objective="itl_objective_s", most=ITL[-1]),
    Figure(name="output", title="Output", unit="tokens/s", series=("output", "prefill", "cached")),
    Figure(name="hit", title="Cache hit", unit="ratio", series=("hit",)),
    Figure(name="errors", title="Errors", unit="ratio", series=("errors", "shed")),
    Figure(name="queue", title="Queue", unit="requests", series=("queue", "running")),
    Figure(name="kv", title="KV in use", unit="ratio", series=("kv_max", "kv_mean")),
)  # fmt: skip
SERIES = tuple(name for figure in FIGURES for name in figure.series)

MODEL, REPLICA = ("model",), ("model", "role", "replica")
SOURCES: Mapping[str, str] = {
    "requests": "manta_requests_total",
    "failed": 'manta_requests_total{outcome=~"error|timeout"}',
    "shed": 'manta_requests_total{outcome="shed"}',
    "ttft_judged": 'manta_slo_requests_total{slo="ttft"}',
    "ttft_missed": 'manta_slo_requests_total{slo="ttft",met="false"}',
    "itl_judged": 'manta_slo_requests_total{slo="itl"}',
    "itl_missed": 'manta_slo_requests_total{slo="itl",met="false"}',
    "predicted": "manta_router_predicted_overlap_tokens_total",
    "actual": "manta_router_actual_overlap_tokens_total",
    "tokens": "manta_scheduler_tokens_total",
    "retracted": "manta_scheduler_retracted_tokens_total",
    "received": 'manta_transfers_total{direction="receive"}',
    "receive_failed": 'manta_transfers_total{direction="receive",outcome="error"}',
    "damaged": "manta_transfer_digest_mismatches_total",
    "wrong_pages": "manta_tier_wrong_pages_total",
    "adapter_loads": "manta_adapter_loads_total",
    "finished": "manta_scheduler_finished_requests_total",
    "pool_blocks": 'manta_admission_blocked{reason="pool"}',
    "failed_checks": "manta_kv_pool_failed_checks_total",
    "failed_steps": "manta_scheduler_failed_steps_total",
    "pool_used": 'manta_kv_pool_utilization_ratio{tier="L1"}',
    "drain_s": "manta_transfer_oldest_drain_seconds",
    "report_age_s": "manta_router_report_age_seconds",
}  # every counter's name ends in _total


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """``part`` / ``of``, both counters, over each of the windows, is above (``below``: below) the bound."""

    part: str
    of: str
    bound: float
    minutes: tuple[int, ...] = (5,)
    below: bool = False
    least_per_s: float = 0.0  # of ``of``; with fewer the share says nothing
    by: tuple[str, ...] = MODEL

    @property
    def promql(self) -> str:
        by, sign = ", ".join(self.by), "<" if self.below else ">"
        asked = [f"{self.ratio(minutes)}\n{sign} {self.bound:g}" for minutes in self.minutes]
        if self.least_per_s:
            window = _window(self.minutes[0])
            asked.append(f"sum by ({by}) (rate({SOURCES[self.of]}[{window}])) > {self.least_per_s:g}")
        return f"\nand on ({by})\n".join(asked)

    def ratio(self, minutes: int) -> str:
        """Return the PromQL of the share itself over one window."""
        by, window = ", ".join(self.by), _window(minutes)
        part, of = (f"sum by ({by}) (rate({SOURCES[name]}[{window}]))" for name in (self.part, self.of))
        return f"{part}\n/ ({of} > 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A gauge is above the bound, by its average over the last ``minutes`` where they are given: one that goes up and
    down with each step would begin its alert anew each time."""

    source: str
    bound: float
    by: tuple[str, ...] = REPLICA
    minutes: int = 0

    @property
    def promql(self) -> str:
        gauge = SOURCES[self.source]
        value = f"avg_over_time({gauge}[{_window(self.minutes)}])" if self.minutes else gauge
        return f"max by ({', '.join(self.by)}) ({value}) > {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grew:
    """A counter that should stand still has grown."""

    source: str
    minutes: int = 10
    by: tuple[str, ...] = REPLICA

    @property
    def promql(self) -> str:
        return f"sum by ({', '.join(self.by)}) (increase({SOURCES[self.source]}[{_window(self.minutes)}])) > 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stands:
    """A state of the fleet that needs its own PromQL; ``reading`` is above 0 in the observatory while it lasts."""

    promql: str
    reading: str | None = None  # None: only Prometheus can see it


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert; docs/runbook.md has a section for it.

    ``summary`` has {share} or {duration} for the value, {detail} for what only the observatory knows, labels by name.
    """

    name: str
    severity: str  # critical: requests fail or soon will; warning: look today
    when: Share | Over | Grew | Stands
    for_s: int
    summary: str
    figure: str | None = None  # that shows it
    # the live view does not look well while it is pending: its condition is no moment's doubt; but Serve or the fleet
    # end it or name it otherwise soon, so Prometheus looks at these more often (files.py)
    at_once: bool = False
    comment: str = ""

    def __post_init__(self) -> None:
        assert self.severity in ("warning", "critical")
        assert self.figure is None or self.figure in {figure.name for figure in FIGURES}


def _window(minutes: int) -> str:
    return f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"


def _burn(slo: str, title: str, comment: str = "") -> Alert:
    return Alert(
        name=f"{slo.capitalize()}ObjectiveBurn", severity="warning", for_s=120, figure=slo, comment=comment,
        when=Share(part=f"{slo}_missed", of=f"{slo}_judged", bound=0.3, minutes=(5, 60)),
        summary=f"{{share}} of the requests to {{model}} miss the {title} objective{{detail}}.",
    )  # fmt: skip


def _kind(kind: str) -> str:
    """Return the PromQL of a number of replicas of each role, as the autoscaler has it."""
    return f'max by (model, target_role) (manta_autoscaler_replicas{{kind="{kind}"}})'


AT_MOST = (  # as many as there may be, and too few
    "max by (model, target_role) (manta_autoscaler_pressure_ratio) > 1\nand on (model, target_role)\n"
    f"{_kind('running')}\n>= {_kind('maximum')}\n"
)
PENDING, SEEN, FIRING = "pending", "seen", "firing"  # seen: pending, but told `at_once`
ALERTS = (
    Alert(name="NoRouter", severity="critical", for_s=60,
          when=Stands(promql='absent(sum(manta_build_info{role="router"}))', reading="no_router"),
          summary="No router answers: none runs, or it cannot be reached."),
    Alert(name="NoReadyReplica", severity="critical", for_s=60, when=Stands(reading="no_ready_replica", promql=(
              'sum by (model, replica) (manta_router_replicas{state="accepting",target_role=~"unified|decode"}) == 0')),
          summary="No replica of {model} accepts requests."),
    Alert(name="NoPrefillReplica", severity="warning", for_s=60, when=Stands(reading="no_prefill_replica", promql=(
              'sum by (model, replica) (manta_router_replicas{state="accepting",target_role="prefill"}) == 0\n'
              "and on (model, replica)\n"
              'sum by (model, replica) (manta_router_replicas{state="accepting",target_role="decode"}) > 0')),
          summary="{model} has decode replicas and no prefill replica: they compute the prompts, and answers stall."),
    Alert(name="ReplicaSilent", severity="critical", for_s=10, at_once=True,
          when=Stands(reading="silent", promql=(
              'max by (model, target_role) (manta_router_replicas{state="silent"}) > 0')),
          summary="A {target_role} replica of {model} is silent{detail}.",
          comment="A process that was killed is silent too, until Serve has noticed: for a second or two."),
    Alert(name="ReplicaUnhealthy", severity="critical", for_s=0, at_once=True,
          when=Stands(reading="unhealthy", promql=(
              'max by (model, target_role) (manta_router_replicas{state="unhealthy"}) > 0')),
          summary="A {target_role} replica of {model} is unhealthy{detail}."),
    Alert(name="ReplicaDeaths", severity="warning", for_s=0, when=Stands(reading="deaths", promql=(
              "sum by (model, target_role) (increase(manta_replica_deaths_total[10m])) > 1.5")),
          summary="Two or more {target_role} replicas of {model} died within ten minutes.",
          comment="increase() extrapolates: two are a little more or less than 2."),
    Alert(name="TargetDown", severity="warning", for_s=30, at_once=True,
          when=Stands(promql='up{job="manta"} == 0', reading="silent_router"), summary="{instance} does not answer."),
    Alert(name="PoolVanished", severity="warning", for_s=300, when=Stands(promql=(
              'max by (model, role, replica) (manta_kv_pool_capacity_tokens{tier="L1"} offset 15m)\n'
              "unless on (model, role, replica)\n"
              'max by (model, role, replica) (manta_kv_pool_capacity_tokens{tier="L1"})\n'
              "unless on (model, role)\n"
              "(\n"
              '  count by (model, role) (manta_kv_pool_capacity_tokens{tier="L1"})\n'
              '  >= count by (model, role) (manta_kv_pool_capacity_tokens{tier="L1"} offset 15m)\n'
              ")\n"
              "unless on (model)\n"
              'sum by (model) (increase(manta_autoscaler_decisions_total{direction="down"}[20m])) > 0')),
          summary="The pool of replica {replica} ({role}) is gone, and no other replaced it.",
          comment="A pool that was there 15 minutes ago, unless as many of its role are there again, or the autoscaler "
          "removed it. Per replica, since absent() says nothing while one of several is left."),
    Alert(name="RequestErrors", severity="critical", for_s=300, figure="errors",
          when=Share(part="failed", of="requests", bound=0.05),
          summary="{share} of the requests to {model} end with an error or a timeout."),
    Alert(name="RequestsShed", severity="warning", for_s=120, figure="errors",
          when=Share(part="shed", of="requests", bound=0.05),
          summary="{share} of the requests to {model} are refused: the queues are too long, or a key has too many "
          "choices open."),
    _burn("ttft", "TTFT", comment="95 % of requests shall meet their objective. 0.3 is six times the budget of 5 %: a "
          "month's is spent in five days. The hour says that it is not a moment, the five minutes that it goes on."),
    _burn("itl", "ITL"),
    Alert(name="AutoscalerAtMaximum", severity="warning", for_s=600, figure="queue",
          when=Stands(reading="at_maximum", promql=f'{AT_MOST}and on (model, target_role)\n{_kind("maximum")}\n'
                      f'> {_kind("minimum")}'),
          summary="The {target_role} replicas of {model} are at their maximum, and the load asks for more."),
    Alert(name="TooFewReplicas", severity="warning", for_s=600, figure="queue",
          when=Stands(reading="too_few", promql=f'{AT_MOST}and on (model, target_role)\n{_kind("maximum")}\n'
                      f'<= {_kind("minimum")}'),
          summary="The {target_role} replicas of {model} are too few for the load, and their number is fixed{detail}."),
    Alert(name="KvPoolNearlyFull", severity="warning", for_s=120, figure="kv",
          when=Over(source="pool_used", bound=0.95, minutes=2),
          summary="{share} of the KV pool of {replica} cannot be taken by new requests."),
    Alert(name="AdmissionBlocked", severity="warning", for_s=60, figure="kv",
          when=Over(source="pool_blocks", bound=0.5, minutes=2),
          summary="Requests wait for room in the KV pool of {replica}."),
    Alert(name="RetractionsHigh", severity="warning", for_s=300, figure="kv",
          when=Share(part="retracted", of="tokens", bound=0.1, by=REPLICA),
          summary="{replica} gives up {share} as many tokens as it computes: its pool is too small for what runs."),
    Alert(name="KvTransferFailures", severity="warning", for_s=300,
          when=Share(part="receive_failed", of="received", bound=0.05),
          summary="{share} of the KV transfers of {model} fail; prompts are computed twice."),
    Alert(name="KvTransferDamaged", severity="critical", for_s=0, when=Grew(source="damaged"),
          summary="{replica} received K/V that differs from what was sent. It was not used."),
    Alert(name="WrongPages", severity="critical", for_s=0, when=Grew(source="wrong_pages", by=(*REPLICA, "tier")),
          summary="{replica} read back a page from {tier} that is not what was written. It was not used."),
    Alert(name="PagesLost", severity="warning", for_s=0, when=Grew(source="failed_checks"),
          summary="{replica} is idle, and pages or rows of its KV pool are not free: lost until it is restarted."),
    Alert(name="StepsFail", severity="warning", for_s=0, when=Grew(source="failed_steps"), figure="errors",
          summary="Steps of {replica} have failed. It went on; a request that fails each time has ended with 500."),
    Alert(name="StoreOff", severity="warning", for_s=0,
          when=Stands(promql="min by (model, role, replica) (manta_tier_store_up) == 0", reading="store_off"),
          summary="{replica} does not use its store{detail}."),
    Alert(name="AdaptersReloaded", severity="warning", for_s=600,
          when=Share(part="adapter_loads", of="finished", bound=0.5, minutes=(10,), by=REPLICA, least_per_s=0.05),
          summary="{replica} loads an adapter for {share} of its requests: it holds too few of those that are in use."),
    Alert(name="QuarantineDoesNotEnd", severity="warning", for_s=60, when=Over(source="drain_s", bound=300),
          summary="A failed KV transfer has kept pages of {replica} for {duration}."),
    Alert(name="RouterIndexStale", severity="warning", for_s=600, figure="hit",
          when=Share(part="actual", of="predicted", bound=0.7, minutes=(10,), below=True, least_per_s=10),
          summary="Only {share} of the reuse that the routers of {model} predict comes true.",
          comment="Much less is reused than was predicted, and what was predicted is more than a few tokens."),
    Alert(name="RouterReportsOld", severity="warning", for_s=15, at_once=True,
          when=Over(source="report_age_s", bound=30, by=("model", "target")),
          summary="The newest report of {target} is {duration} old."),
    Alert(name="KeysFileFailed", severity="warning", for_s=60,
          when=Stands(promql="max by (model, role, replica) (manta_router_keys_file_failed) > 0"),
          summary="Router {replica} of {model} cannot use its file of keys: those from before stay in force."),
    Alert(name="BatchesStalled", severity="warning", for_s=10,
          when=Stands(promql="max by (model, role, replica) (manta_router_batches_stalled) > 0",
                      reading="batches_stalled"),
          summary="Router {replica} of {model} cannot keep what batch requests became{detail}: their batches wait."),
)  # fmt: skip

BOUNDS = {alert.name: alert.when.bound for alert in ALERTS if isinstance(alert.when, Share | Over)}  # for the boards
BURNS = {alert.figure: alert.when for alert in ALERTS if alert.name.endswith("ObjectiveBurn")}
RECORDINGS: Mapping[str, str] = {
    "replica:manta_kv_pool_occupancy:ratio": (
        "1 - (\n"
        '  sum by (model, role, replica) (manta_kv_pool_tokens{tier="L1",state="free"})\n'
        '  / (sum by (model, role, replica) (manta_kv_pool_tokens{tier="L1"}) > 0)\n'
        ")"
    ),
    "model:manta_cache_hit_tokens:ratio_rate5m": (
        "sum by (model) (rate(manta_cache_hit_tokens_total[5m]))\n"
        "/ (sum by (model) (rate(manta_cache_lookup_tokens_total[5m])) > 0)"
    ),
    **{
        f"model:manta_{slo}_objective_missed:ratio_rate{_window(minutes)}": share.ratio(minutes)
        for slo, share in BURNS.items()
        if isinstance(share, Share)
        for minutes in share.minutes
    },
}
