"""The fleet board's lower rows: what the engines do in a step, and which replicas there are."""

from dashboards.board import KIT, Line, Needs, Panel, Row, Shape, Unit

ENGINE = Row(
    "Engine steps",
    (
        Panel(
            title="Requests of one step",
            shows="Mean number of requests in a forward step, by phase.",
            act="Decode well below the running requests: they are retracted or wait for pages; see the KV pool board.",
            lines=(Line(KIT.mean("scheduler_batch_requests", by=["phase"]), "{{phase}}"),), unit=Unit.NUMBER,
        ),
        Panel(
            title="New tokens of one step",
            shows="Mean number of new tokens in a forward step, by phase.",
            act="Prefill far below chunked_prefill_size under load: prompts are short or mostly cached; nothing to do.",
            lines=(Line(KIT.mean("scheduler_batch_tokens", by=["phase"]), "{{phase}}"),), unit=Unit.NUMBER,
        ),
        Panel(
            title="Duration of one step, p90",
            shows="Nine of ten forward steps took at most this long, by role and phase.",
            act="Prefill steps bound the inter-token latency of a unified replica: lower chunked_prefill_size.",
            lines=(
                Line(KIT.quantile(0.9, "scheduler_step_duration_seconds", by=["role", "phase"]), "{{role}} {{phase}}"),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Mixed steps",
            shows="Steps of prompts in which running requests made a token too, per second, by role. They count as "
                "prefill here, with all their requests, tokens and time.",
            act="None while prompts come to a unified replica that is writing: scheduler.mixed_steps is off.",
            lines=(Line(KIT.rate("scheduler_mixed_steps_total", by=["role"]), "{{role}}"),), unit=Unit.PER_S,
        ),
        Panel(
            title="Running requests and their limit",
            shows="Requests in forward steps, and the most that can be, of all replicas.",
            act="At the limit with a pool that is not full: raise max_running_requests.",
            lines=(
                Line(KIT.gauge("scheduler_requests", where={"state": "running"}), "running"),
                Line(KIT.gauge("scheduler_running_limit_requests"), "limit"),
            ),
        ),
        Panel(
            title="Prompt tokens that wait",
            shows="Prompt tokens in queues that no cache holds: the work that is ahead, by replica.",
            act="Over Tokens per second it is the time that the next request will wait; above the objective, add "
                "replicas.",
            lines=(Line(KIT.gauge("scheduler_queued_tokens", by=["replica"]), "{{replica}}"),), unit=Unit.NUMBER,
        ),
        Panel(
            title="Requests that replicas ended",
            shows="Tries that ended in replicas, by how; a request that was tried twice counts twice.",
            act="error: the replica's log says why. aborted: clients left, or a retry took over.",
            lines=(Line(KIT.rate("scheduler_finished_requests_total", by=["outcome"]), "{{outcome}}"),),
            shape=Shape.STACKED, unit=Unit.REQUESTS_PER_S,
        ),
    ),
)  # fmt: skip

REPLICAS = Row(
    "Replicas",
    (
        Panel(
            title="Replicas by state",
            shows="Replicas that the routers know, by role and state; the highest count of any router.",
            act="unhealthy: Serve replaces them; see `serve status`. starting for long: the replica's log says what it "
                "waits for.",
            lines=(
                Line(KIT.gauge("router_replicas", over="max", by=["target_role", "state"]),
                     "{{target_role}} {{state}}"),
            ),
        ),
        Panel(
            title="Autoscaler",
            shows="Replicas that run, and that the autoscaler wants.",
            act="Wanted above running for minutes: the cluster has no room; see `ray status`.",
            lines=(
                Line(KIT.gauge("autoscaler_replicas", over="max", by=["target_role", "kind"]),
                     "{{target_role}} {{kind}}"),
            ),
            needs=Needs.AUTOSCALING,
        ),
        Panel(
            title="Pressure",
            shows="Load over what the replicas carry within the limits, by signal; above 1 asks for more.",
            act="The highest signal is the cause: queue (prefill speed), kv_pool (memory), slots "
                "(max_running_requests).",
            lines=(
                Line(KIT.gauge("autoscaler_pressure_ratio", over="max", by=["target_role", "signal"]),
                     "{{target_role}} {{signal}}"),
            ),
            unit=Unit.RATIO, needs=Needs.AUTOSCALING,
        ),
        Panel(
            title="Changes of the wanted number",
            shows="What the autoscaler decided, per second.",
            act="Up and down in turns: raise downscale_delay_s.",
            lines=(
                Line(KIT.rate("autoscaler_decisions_total", by=["target_role", "direction"]),
                     "{{target_role}} {{direction}}"),
            ),
            unit=Unit.PER_S, needs=Needs.AUTOSCALING,
        ),
        Panel(
            title="How long starts took",
            shows="The start of each replica, by phase.",
            act="load_weights: put the model on local disk. total far above the rest: other ranks, or the transfer "
                "desk.",
            lines=(
                Line(KIT.gauge("replica_start_seconds", over="max", by=["replica", "phase"]), "{{replica}} {{phase}}"),
            ),
            shape=Shape.BARS, unit=Unit.SECONDS,
        ),
        Panel(
            title="Versions",
            shows="Processes by the version that they run.",
            act="More than one after a deployment has ended: restart what is old.",
            lines=(Line(KIT.gauge("build_info", by=["role", "version"]), "{{role}} {{version}}"),), shape=Shape.BARS,
        ),
        Panel(
            title="Live view",
            shows="Live views that are open, and how long asking all routers for their state takes (p90).",
            act="Above 1 s the live view lags: the routers have too little CPU.",
            lines=(
                Line(KIT.gauge("observatory_viewers"), "viewers"),
                Line(KIT.quantile(0.9, "observatory_poll_duration_seconds"), "poll p90, s"),
            ),
        ),
        Panel(
            title="What replicas are",
            shows="Replicas by node, accelerator, attention backend and how they hand over K/V.",
            act="An unexpected accelerator or node: check the placement in serve_config.yaml. triton or torch_native "
                "on a GPU: GET /get_server_info says why.",
            lines=(
                Line(
                    KIT.gauge("replica_info", over="max",
                              by=["replica", "node", "accelerator", "attention", "tensor_parallel", "kv_dtype",
                                  "transfer_backend"]),
                    "{{replica}}: {{node}}, {{accelerator}}, {{attention}}, TP {{tensor_parallel}}, {{kv_dtype}}, "
                    "{{transfer_backend}}",
                ),
            ),
            shape=Shape.BARS, width=16,
        ),
    ),
)  # fmt: skip
