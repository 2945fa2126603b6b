"""When each alert fires and when not: series minute by minute and what is expected, for ``promtool test rules``.

``0+10x30`` is promtool's: 0, 10, 20 ... thirty more times; ``1x5`` is 1 six times; stale ends a series.
"""

from dataclasses import dataclass, field

Series = dict[str, str]  # series -> its values, one a minute

M = 'model="m"'
A = f'{M},role="decode",replica="a"'
B = f'{M},role="decode",replica="b"'
C = f'{M},role="decode",replica="c"'
ROUTER = f'{M},role="router",replica="r1"'
OBSERVATORY = f'{M},role="observatory",replica="o"'
IN_A = {"model": "m", "role": "decode", "replica": "a"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Quiet at ``quiet_at``, and firing with these labels and this summary at ``fires_at``; None: never."""

    alert: str
    series: Series
    quiet_at: str
    fires_at: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    summary: str = ""


def replicas(role: str, values: str) -> Series:
    return {f'manta_router_replicas{{{ROUTER},target_role="{role}",state="accepting"}}': values}


def requests(**outcomes: str) -> Series:
    return {
        f'manta_requests_total{{{ROUTER},endpoint="chat",outcome="{outcome}"}}': values
        for outcome, values in outcomes.items()
    }


def judged(slo: str, met: str, missed: str) -> Series:
    name = f'manta_slo_requests_total{{{ROUTER},slo="{slo}"'
    return {f'{name},met="true"}}': met, f'{name},met="false"}}': missed}


def pool(labels: str, values: str) -> Series:
    return {f'manta_kv_pool_capacity_tokens{{{labels},tier="L1"}}': values}


def scaled(running: int, least: int = 1) -> Series:
    name = f'manta_autoscaler_replicas{{{OBSERVATORY},target_role="decode"'
    return {
        f'{name},kind="running"}}': f"{running}x20",
        f'{name},kind="minimum"}}': f"{least}x20",
        f'{name},kind="maximum"}}': "4x20",
        f'manta_autoscaler_pressure_ratio{{{OBSERVATORY},target_role="decode",signal="queue"}}': "1.5x20",
    }


def reused(predicted: str, actual: str) -> Series:
    return {
        f"manta_router_predicted_overlap_tokens_total{{{ROUTER}}}": predicted,
        f"manta_router_actual_overlap_tokens_total{{{ROUTER}}}": actual,
    }


BURN = {"labels": {"model": "m"}, "quiet_at": "2m", "fires_at": "3m"}
CASES = (
    Case(alert="NoRouter", series={f'manta_build_info{{{ROUTER},version="1"}}': "1 1 1 1 stale"},
         quiet_at="4m", fires_at="5m",
         summary="No router answers: none runs, or it cannot be reached."),
    Case(alert="NoReadyReplica", series={**replicas("unified", "1 1 1 0x9"), **replicas("decode", "0x9")},
         quiet_at="3m", fires_at="4m", labels={"model": "m", "replica": "r1"},
         summary="No replica of m accepts requests."),
    Case(alert="NoReadyReplica", series={**replicas("unified", "0x9"), **replicas("decode", "1x9")}, quiet_at="9m"),
    Case(alert="NoPrefillReplica", series={**replicas("prefill", "1 1 1 0x9"), **replicas("decode", "1x9")},
         quiet_at="3m", fires_at="4m", labels={"model": "m", "replica": "r1"},
         summary="m has decode replicas and no prefill replica: they compute the prompts, and answers stall."),
    Case(alert="NoPrefillReplica", series={**replicas("prefill", "0x9"), **replicas("decode", "0x9")}, quiet_at="9m"),
    Case(alert="ReplicaSilent", quiet_at="3m", fires_at="4m", labels={"model": "m", "target_role": "decode"},
         series={f'manta_router_replicas{{{ROUTER},target_role="decode",state="silent"}}': "0 0 0 1x9"},
         summary="A decode replica of m is silent."),
    Case(alert="ReplicaUnhealthy", quiet_at="2m", fires_at="3m", labels={"model": "m", "target_role": "decode"},
         series={f'manta_router_replicas{{{ROUTER},target_role="decode",state="unhealthy"}}': "0 0 0 1x9"},
         summary="A decode replica of m is unhealthy."),
    Case(alert="ReplicaDeaths", quiet_at="5m", fires_at="8m", labels={"model": "m", "target_role": "decode"},
         series={f'manta_replica_deaths_total{{{OBSERVATORY},target_role="decode"}}': "0 0 0 1x3 2x9"},
         summary="Two or more decode replicas of m died within ten minutes."),
    Case(alert="TargetDown", series={'up{job="manta",instance="10.0.0.1:9101",node="n1"}': "1 1 1 0x9"},
         quiet_at="3m", fires_at="4m", labels={"job": "manta", "instance": "10.0.0.1:9101", "node": "n1"},
         summary="10.0.0.1:9101 does not answer."),
    Case(alert="PoolVanished", series={**pool(A, "1000x20 stale"), **pool(B, "1000x40")},
         quiet_at="25m", fires_at="26m", labels=IN_A,
         summary="The pool of replica a (decode) is gone, and no other replaced it."),
    Case(alert="PoolVanished", series=pool(A, "1000x20 stale"), quiet_at="25m", fires_at="26m", labels=IN_A,
         summary="The pool of replica a (decode) is gone, and no other replaced it."),
    Case(alert="PoolVanished", quiet_at="30m",  # another came for it
         series={**pool(A, "1000x20 stale"), **pool(B, "1000x40"), **pool(C, "_x22 1000x20")}),
    Case(alert="PoolVanished", quiet_at="30m",  # the autoscaler took it away
         series={**pool(A, "1000x20 stale"), **pool(B, "1000x40"),
                 f'manta_autoscaler_decisions_total{{{OBSERVATORY},direction="down"}}': "0x19 1x20"}),
    Case(alert="RequestErrors", series=requests(ok="0+90x30", error="0+6x30", timeout="0+4x30"),
         quiet_at="5m", fires_at="6m", labels={"model": "m"},
         summary="10% of the requests to m end with an error or a timeout."),
    Case(alert="RequestErrors", series=requests(ok="0+90x30", cancelled="0+10x30"), quiet_at="20m"),
    Case(alert="RequestsShed", series=requests(ok="0+90x30", shed="0+10x30"),
         quiet_at="2m", fires_at="3m", labels={"model": "m"},
         summary="10% of the requests to m are refused: the queues are too long, or a key has too many choices open."),
    Case(alert="TtftObjectiveBurn", series=judged("ttft", "0+50x9", "0+50x9"), **BURN,
         summary="50% of the requests to m miss the TTFT objective."),
    Case(alert="TtftObjectiveBurn", quiet_at="65m",  # five bad minutes after a good hour
         series=judged("ttft", "0+100x60 6000x9", "0x60 100+100x9")),
    Case(alert="ItlObjectiveBurn", series=judged("itl", "0+50x9", "0+50x9"), **BURN,
         summary="50% of the requests to m miss the ITL objective."),
    Case(alert="AutoscalerAtMaximum", series=scaled(running=4), quiet_at="9m", fires_at="10m",
         labels={"model": "m", "target_role": "decode"},
         summary="The decode replicas of m are at their maximum, and the load asks for more."),
    Case(alert="AutoscalerAtMaximum", series=scaled(running=3), quiet_at="20m"),
    Case(alert="AutoscalerAtMaximum", series=scaled(running=4, least=4), quiet_at="20m"),
    Case(alert="TooFewReplicas", series=scaled(running=4, least=4), quiet_at="9m", fires_at="10m",
         labels={"model": "m", "target_role": "decode"},
         summary="The decode replicas of m are too few for the load, and their number is fixed."),
    Case(alert="TooFewReplicas", series=scaled(running=4), quiet_at="20m"),
    Case(alert="TooFewReplicas", series=scaled(running=3, least=4), quiet_at="20m"),  # one is being replaced
    Case(alert="KvPoolNearlyFull", series={f'manta_kv_pool_utilization_ratio{{{A},tier="L1"}}': "0.5 0.97x9"},
         quiet_at="4m", fires_at="5m", labels=IN_A,
         summary="97% of the KV pool of a cannot be taken by new requests."),
    Case(alert="AdmissionBlocked", series={f'manta_admission_blocked{{{A},reason="pool"}}': "0 0 1x9",
                                           f'manta_admission_blocked{{{B},reason="slots"}}': "1x12"},
         quiet_at="2m", fires_at="4m", labels=IN_A, summary="Requests wait for room in the KV pool of a."),
    Case(alert="AdmissionBlocked", series={f'manta_admission_blocked{{{A},reason="pool"}}': "1 0 1 0 0 1 0 0 1 0"},
         quiet_at="9m"),
    Case(alert="RetractionsHigh",
         series={f"manta_scheduler_retracted_tokens_total{{{A}}}": "0+20x30",
                 f'manta_scheduler_tokens_total{{{A},kind="decode"}}': "0+100x30"},
         quiet_at="5m", fires_at="6m", labels=IN_A,
         summary="a gives up 20% as many tokens as it computes: its pool is too small for what runs."),
    Case(alert="KvTransferFailures",
         series={f'manta_transfers_total{{{A},direction="receive",outcome="ok"}}': "0+90x30",
                 f'manta_transfers_total{{{A},direction="receive",outcome="error"}}': "0+10x30"},
         quiet_at="5m", fires_at="6m", labels={"model": "m"},
         summary="10% of the KV transfers of m fail; prompts are computed twice."),
    Case(alert="KvTransferDamaged", series={f"manta_transfer_digest_mismatches_total{{{A}}}": "0 0 0 1x9"},
         quiet_at="2m", fires_at="3m", labels=IN_A,
         summary="a received K/V that differs from what was sent. It was not used."),
    Case(alert="WrongPages", series={f'manta_tier_wrong_pages_total{{{A},tier="L3"}}': "0 0 0 1x9"},
         quiet_at="2m", fires_at="3m", labels={**IN_A, "tier": "L3"},
         summary="a read back a page from L3 that is not what was written. It was not used."),
    Case(alert="PagesLost", series={f'manta_kv_pool_failed_checks_total{{{A},tier="L1"}}': "0 0 0 90x9 90x9"},
         quiet_at="2m", fires_at="3m", labels=IN_A,
         summary="a is idle, and pages or rows of its KV pool are not free: lost until it is restarted."),
    Case(alert="StepsFail", series={f"manta_scheduler_failed_steps_total{{{A}}}": "0 0 0 1x9"},
         quiet_at="2m", fires_at="3m", labels=IN_A,
         summary="Steps of a have failed. It went on; a request that fails each time has ended with 500."),
    Case(alert="StoreOff", series={f"manta_tier_store_up{{{A}}}": "1 1 1 0x9", f"manta_tier_store_up{{{B}}}": "1x12"},
         quiet_at="2m", fires_at="3m", labels=IN_A, summary="a does not use its store."),
    Case(alert="AdaptersReloaded", quiet_at="12m", fires_at="14m", labels=IN_A,
         series={f"manta_adapter_loads_total{{{A}}}": "0+6x30",
                 f'manta_scheduler_finished_requests_total{{{A},outcome="ok"}}': "0+10x30"},
         summary="a loads an adapter for 60% of its requests: it holds too few of those that are in use."),
    Case(alert="AdaptersReloaded", quiet_at="30m",  # few requests
         series={f"manta_adapter_loads_total{{{A}}}": "0+1x30",
                 f'manta_scheduler_finished_requests_total{{{A},outcome="ok"}}': "0+1x30"}),
    Case(alert="QuarantineDoesNotEnd", series={f"manta_transfer_oldest_drain_seconds{{{A}}}": "0+60x20"},
         quiet_at="6m", fires_at="7m", labels=IN_A,
         summary="A failed KV transfer has kept pages of a for 7m 0s."),
    Case(alert="RouterIndexStale", series=reused(predicted="0+6000x30", actual="0+3000x30"),
         quiet_at="11m", fires_at="12m", labels={"model": "m"},
         summary="Only 50% of the reuse that the routers of m predict comes true."),
    Case(alert="RouterIndexStale", series=reused(predicted="0+60x30", actual="0+30x30"), quiet_at="30m"),
    Case(alert="RouterReportsOld", series={f'manta_router_report_age_seconds{{{ROUTER},target="a"}}': "0+20x9"},
         quiet_at="2m", fires_at="3m", labels={"model": "m", "target": "a"},
         summary="The newest report of a is 1m 0s old."),
    Case(alert="KeysFileFailed", series={f"manta_router_keys_file_failed{{{ROUTER}}}": "0 0 1x9"},
         quiet_at="2m", fires_at="3m", labels={"model": "m", "role": "router", "replica": "r1"},
         summary="Router r1 of m cannot use its file of keys: those from before stay in force."),
    Case(alert="KeysFileFailed", series={f"manta_router_keys_file_failed{{{ROUTER}}}": "0 1 0x9"}, quiet_at="5m"),
    Case(alert="BatchesStalled", series={f"manta_router_batches_stalled{{{ROUTER}}}": "0 0 1x9"},
         quiet_at="1m", fires_at="3m", labels={"model": "m", "role": "router", "replica": "r1"},
         summary="Router r1 of m cannot keep what batch requests became: their batches wait."),
)  # fmt: skip

# recording rule -> series, minute, labels of what it records, value
RECORDED: dict[str, tuple[Series, str, dict[str, str], float]] = {
    "replica:manta_kv_pool_occupancy:ratio": (
        {f'manta_kv_pool_tokens{{{A},tier="L1",state="free"}}': "250x5",
         f'manta_kv_pool_tokens{{{A},tier="L1",state="evictable"}}': "750x5"}, "3m", IN_A, 0.75),
    "model:manta_cache_hit_tokens:ratio_rate5m": (
        {f'manta_cache_hit_tokens_total{{{A},tier="L1"}}': "0+60x9",
         f"manta_cache_lookup_tokens_total{{{A}}}": "0+240x9"}, "8m", {"model": "m"}, 0.25),
    **{f"model:manta_{slo}_objective_missed:ratio_rate{window}": (
        judged(slo, "0+180x80", "0+60x80"), "70m", {"model": "m"}, 0.25)
       for slo in ("ttft", "itl") for window in ("5m", "1h")},
}  # fmt: skip
