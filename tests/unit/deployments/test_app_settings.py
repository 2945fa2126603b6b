"""serve_config.yaml: what is wrong is named, with why and what is allowed."""

import copy
import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deployments import app
from deployments.app import replica_options
from deployments.autoscaling import Objective, TtftPolicy
from deployments.command.announce import curl
from deployments.command.haproxy import prepare_ray
from deployments.places import ROOT, ask_nodes_directly, local_path, may_be_hub_id, shown_path
from deployments.replica.feasible import engine_of, impossible
from deployments.replica.model_replica import settle
from deployments.settings import settings_file
from deployments.settings.capacity import Capacity, auto_count, outages, shortages, too_wide
from deployments.settings.constants import CONSTANTS, EXPERIMENTS_VARIABLE
from deployments.settings.roles import config_of
from deployments.settings.schema import RouterSettings, constants_in, notices, parse
from deployments.settings.settings_file import check_port
from replicas.config import CacheConfig, SchedulerConfig
from replicas.errors import InvalidConfig
from replicas.grammar.checking import MAX_SCHEMA
from routing.types import Role
from tests.embedded import MODEL

MODEL_ARGS = {"path": MODEL}
APART: dict[str, Any] = {"model": MODEL_ARGS, "mode": "disaggregated"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "model: is missing"),
        ({"model": MODEL_ARGS, "repliacs": {}}, "repliacs: is unknown (did you mean 'replicas'?)"),
        ({"model": MODEL_ARGS, "rep": {}}, "rep: is unknown; allowed: model,"),
        ({"model": {**MODEL_ARGS, "nam": 1}}, "allowed: path, revision, served_name, dtype,"),
        ({"model": {**MODEL_ARGS, "dtype": "int3"}}, "dtype: must be 'float32', 'bfloat16' or 'float16', not 'int3'"),
        ({"model": MODEL_ARGS, "router": {"policy": "ranodm"}}, "not 'ranodm' (did you mean 'random'?)"),
        ({"model": MODEL_ARGS, "replicas": {"count": 0}}, "count: must be auto, or a whole number of 1 or more"),
        (
            {"model": MODEL_ARGS, "replicas": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}},
            "min_replicas (3) exceeds max_replicas (2)",
        ),
        (
            {"model": MODEL_ARGS, "replicas": {"autoscaling": {"look_back_period_s": 1, "metrics_interval_s": 1}}},
            "look_back_period_s (1.0) must exceed metrics_interval_s (1.0)",
        ),
        ({"model": MODEL_ARGS, "router": {"max_wait_s": 0}}, "router.max_wait_s: must be above 0, not 0"),
        ({"model": MODEL_ARGS, "decode": {"count": 2}}, "decode: given, but mode is unified; set mode: disaggregated"),
        ({**APART, "router": {"policy": "random"}}, "where pd_pair chooses pairs of replicas"),
        ({**APART, "prefill": {"count": 0}}, "prefill.count: must be at least 1, not 0"),
        ({**APART, "decode": {"count": 1, "autoscaling": {}}}, "count and autoscaling are both given"),
        ({**APART, "decode": {"cache": {"pagesize": 8}}}, "decode.cache.pagesize: is unknown (did you mean 'page_"),
        ({**APART, "decode": {"cache": {"page_size": "x"}}}, "decode.cache.page_size: must be a whole number, not 'x'"),
        ({**APART, "decode": {"cache": {"page_size": 8}}}, "prefill.cache.page_size = 16 and decode.cache.page_size"),
        ({"model": MODEL_ARGS, "cache": 5}, "cache: must be a group of settings, not 5"),
        ({"model": {"path": ["a"]}}, "model.path: must be text, not a list"),
        ({"model": MODEL_ARGS, "cuda_graphs": "perhaps"}, "cuda_graphs: must be true or false, not 'perhaps'"),
        ({"model": MODEL_ARGS, "observability": {"metrics_port": None}}, "port: must be a whole number, not nothing"),
        ({"model": MODEL_ARGS, "observability": {"otlp_endpoint": "x"}}, "must begin with http:// or https://"),
        ({"model": MODEL_ARGS, "replicas": {"gpus": 1.5}}, "gpus: must be a whole number, or a part of one GPU"),
        ({"model": MODEL_ARGS, "scheduler": {"watchdog_s": True}}, "scheduler.watchdog_s: must be a number, not 'tr"),
        (
            {"model": MODEL_ARGS, "cache": {"device_memory_bytes": "2 gigs"}},
            "must be a whole number of bytes, or a size such as 512MiB or 2GB, not '2 gigs'",
        ),
        ({"model": {**MODEL_ARGS, "quantization": "awq"}}, "or 'fp8', not 'awq'; a checkpoint that is quantised"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(args: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        parse(args)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensor_parallel_size: 2", "tensor_parallel_size: is unknown (here it is parallel.tp)"),
        ("parallel: {tp_size: 2}", "parallel.tp_size: is unknown (here it is parallel.tp)"),
        ("gpu-memory-utilization: 0.5", "is unknown (here it is cache.mem_fraction_static)"),
        ("scheduler: {schedule_policy: fcfs}", "scheduler.schedule_policy: is unknown (here it is scheduler.policy"),
        ("enforce_eager: true", "(here it is cuda_graphs)"),
        ("cache: {kv_dtype: fp8_e3m4}", "cache.kv_dtype: must be 'float32', 'bfloat16', 'float16', 'int8', 'fp8' or"),
        ("cache: {kv_dtype: int8, kv_cache_dtype: int8}", "kv_dtype and kv_cache_dtype are both given"),
    ],
)
def test_a_name_of_vllm_or_sglang_is_answered_with_ours(text: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        parse({"model": MODEL_ARGS, **yaml.safe_load(text)})
    assert says in str(error.value)


def test_a_file_that_names_a_constant_is_served_with_its_value_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group's, also those of a role, and whatever the value is."""
    args: dict[str, Any] = {**APART, "replicas": {"autoscaling": {"max_replicas": 3}}}
    plain, given = parse(args), copy.deepcopy(args)
    for name in CONSTANTS:
        group, _, last = name.rpartition(".")
        for each in {"autoscaling": ["replicas.autoscaling"], "cache": ["cache", "prefill.cache"]}.get(group, [group]):
            inner = given
            for part in each.split("."):
                inner = inner.setdefault(part, {})
            inner[last] = "anything"
    assert parse({"model": MODEL_ARGS, "scheduler": {"ageing_s": 7}}).scheduler.ageing_s == 7  # as in all tests
    monkeypatch.delenv(EXPERIMENTS_VARIABLE)
    assert parse(given) == plain
    told = constants_in(given)
    assert len(told) == len(CONSTANTS) + sum(name.startswith("cache.") for name in CONSTANTS)
    assert told["prefill.cache.write_policy"].startswith(
        "prefill.cache.write_policy: is no setting any more, 'adaptive' holds instead of 'anything': it was the best"
    )


def test_an_old_name_is_read_as_the_new_one_and_both_are_refused() -> None:
    """YAML's bare ``on`` too."""
    assert not notices(new := {"model": MODEL_ARGS, "scheduler": {"speculation": True}})
    old: dict[str, Any] = {"model": MODEL_ARGS, "scheduler": {"drafts": True}}
    assert parse(old) == parse(new) != parse({"model": MODEL_ARGS})
    assert notices(old) == ["scheduler.drafts: is scheduler.speculation now, and is read as that. Rename it"]
    with pytest.raises(InvalidConfig, match=r"scheduler\.drafts"):
        parse({"model": MODEL_ARGS, "scheduler": {"drafts": "on", "speculation": "off"}})


def test_both_sides_of_a_kv_transfer_wait_for_longer_than_a_router_lets_requests_queue() -> None:
    waits = config_of(parse({**APART, "router": {"max_wait_s": 400}}), Role.DECODE).transfer
    assert (waits.open_timeout_s, waits.room_timeout_s) == (600, 600)
    assert config_of(parse(APART), Role.PREFILL).transfer.room_timeout_s == 180


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GB", 2_000_000_000), ("2.5GiB", 2_684_354_560), ("512MiB", 536_870_912), ("1Gi", 1 << 30),
        ("500M", 500_000_000), ("64 kB", 64_000), ("4096", 4096), ("4096B", 4096), ("1_000_000", 1_000_000),
    ],
)  # fmt: skip
def test_a_size_is_taken_as_kubernetes_writes_it_in_every_group(text: str, num_bytes: int) -> None:
    args = yaml.safe_load(f"{{cache: {{store_bytes: {text}}}, router: {{max_body_bytes: {text}}}}}")
    decode = {"cache": {"device_memory_bytes": text}}
    config = parse({**APART, **args, "decode": decode})
    taken = (config.cache.store_bytes, config.router.max_body_bytes, config.decode.cache["device_memory_bytes"])
    assert taken == (num_bytes,) * 3


def test_a_gguf_file_is_named_without_its_ending() -> None:
    for path, name in (("a/tiny.gguf", "tiny"), ("a/b-00001-of-00002.gguf", "b"), ("a/tiny-GGUF", "tiny-GGUF")):
        assert parse({"model": {"path": path}}).model.name == name
    assert parse({"model": {"path": "a.gguf", "served_name": "a.gguf"}}).model.name == "a.gguf"


@pytest.mark.parametrize("name", ["overlap", "priorities"])
@pytest.mark.parametrize(("text", "word"), [("on", "on"), ("false", "off"), ("'on'", "on")])
def test_on_and_off_can_be_written_in_yaml_where_they_are_booleans(name: str, text: str, word: Any) -> None:
    args = yaml.safe_load(f"scheduler: {{{name}: {text}}}")
    assert parse({"model": MODEL_ARGS, **args}).scheduler == replace(SchedulerConfig(), **{name: word})


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("kv_cache_dtype: bf16", "bfloat16"), ("kv_dtype: fp8_e4m3", "fp8"), ("kv_cache_dtype: auto", None)],
)
def test_dtypes_of_k_and_v_are_taken_under_the_names_of_others(text: str, dtype: str | None) -> None:
    """Issue 6, section 2: ``kv_cache_dtype: fp32|bf16|int8|fp8``; of a role's own cache too."""
    cache = yaml.safe_load(text)
    assert parse({"model": MODEL_ARGS, "cache": cache}).cache == CacheConfig(kv_dtype=dtype)  # type: ignore[arg-type]
    apart = parse({**APART, "cache": cache, "decode": {"cache": cache}})
    assert apart.decode.cache == {"kv_dtype": dtype}


@pytest.mark.parametrize(
    ("text", "dtype"), [("bf16", "bfloat16"), ("half", "float16"), ("float", "float32"), ("auto", None)]
)
def test_the_dtype_of_a_model_and_no_quantization_are_too(text: str, dtype: str | None) -> None:
    model = parse({"model": {**MODEL_ARGS, **yaml.safe_load(f"{{dtype: {text}, quantization: null}}")}}).model
    assert (model.dtype, model.quantization) == (dtype, "none")


def test_every_wrong_setting_is_listed_at_once() -> None:
    wrong = {"router": {"count": 0}, "attention": "x", "cache": {"pagesize": 8, "page_size": "x"}}
    with pytest.raises(InvalidConfig) as error:
        parse({"model": {"path": ""}, **wrong})
    named = ["model.path", "router.count", "cache.page_size", "cache.pagesize", "attention"]
    assert [problem.partition(":")[0] for problem in error.value.problems] == named
    assert "{" not in str(error.value)  # no dump of what was given


def test_a_secret_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(InvalidConfig) as error:
        parse({**APART, "transfer": {"token": 123456789}})
    assert "transfer.token" in str(error.value)
    assert "123456789" not in str(error.value)


@pytest.mark.model
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"model": MODEL_ARGS, "parallel": {"tp": 2}}, r"parallel.tp = 2 does not split .* \[1, 3\]"),
        ({"model": MODEL_ARGS, "cache": {"page_size": 0}}, "cache.page_size = 0; allowed: 1 to 1024"),
        ({"model": {**MODEL_ARGS, "context_len": 9000}}, "model.context_len = 9000; .* allows 1 to 8192"),
        (
            {**APART, "prefill": {"tp": 2}, "decode": {"tp": 3}},
            "prefill.tp = 2 and decode.tp = 3: one must be a multiple of the other",
        ),
        ({**APART, "decode": {"tp": 9}}, r"decode.tp = 9 does not split the model's 3 KV heads, .* allowed: \[1, 3\]"),
        (
            {"model": MODEL_ARGS, "replicas": {"gpus": 0.5}, "parallel": {"tp": 3}},
            r"gpus = 0.5 with tp = 3 \(unified replicas\): the ranks of a replica cannot share a GPU",
        ),
        ({**APART, "prefill": {"tp": 3, "gpus": 0.5}}, r"gpus = 0.5 with tp = 3 \(prefill replicas\)"),
        ({"model": {"path": "models/none"}}, "there is no such folder .*make model"),
        (
            {"model": MODEL_ARGS, "attention": "triton"},
            r"attention = 'triton' does not run on cpu; allowed there: auto, cpu, torch_native, double_sparse$",
        ),
        (
            {"model": MODEL_ARGS, "attention": "cpu", "replicas": {"gpus": 1}},
            r"attention = 'cpu' does not run on cuda; allowed there: auto, flashinfer, triton, torch_native$",
        ),
        ({"model": MODEL_ARGS, "replicas": {"gpus": 1}, "cache": {"kv_dtype": "int8"}}, "kv_dtype = 'int8' on cuda"),
        ({"model": {**MODEL_ARGS, "quantization": "int8"}, "replicas": {"gpus": 1}}, "quantization = 'int8' on cuda"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_starts(args: dict[str, Any], says: str) -> None:
    assert any(re.search(says, problem) for problem in impossible(parse(args)))


@pytest.mark.model
def test_the_file_of_the_project_serves_on_a_gpu_with_one_line_more_and_no_setting_of_a_cpu() -> None:
    args = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]["args"]
    args["replicas"]["gpus"] = 1
    config = parse(args)
    assert impossible(config) == []
    assert auto_count(config, capacity(16, num_gpus=1), available_bytes=79 << 30, weights_bytes=16 << 30)[0] == 1
    engine = engine_of(config, Role.UNIFIED)
    assert (engine.device, engine.scheduler.max_running_requests, engine.chunked_prefill_size) == ("cuda", None, 8192)
    assert (engine.cache.device_memory_bytes, engine.cache.max_total_tokens) == (None, None)


def test_every_setting_that_the_file_mentions_exists() -> None:
    """Settings in comments too: uncommented, they parse."""
    lines = (ROOT / "serve_config.yaml").read_text().splitlines()
    setting = re.compile(r"( +)# (\w+: .*)")
    whole = "\n".join(setting.sub(r"\1\2", line) for line in lines[2:])
    args = yaml.safe_load(whole)["applications"][0]["args"]
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    assert {"policy", "max_running_requests", "chunked_prefill_size"} <= set(args["scheduler"]) <= known
    assert parse(args).replicas.autoscaling is not None


def capacity(num_cpus: float, num_gpus: float = 0) -> Capacity:
    return Capacity(num_cpus=num_cpus, num_gpus=num_gpus, where="this machine")


def test_auto_is_two_where_cores_and_memory_carry_two_else_one() -> None:
    def count(num_cpus: float, gib: float, cpus: float = 1.0) -> int:
        settings = {"replicas": {"cpus": cpus}, "cache": {"device_memory_bytes": 1 << 30}}
        config = parse({"model": MODEL_ARGS, **settings})
        return auto_count(config, capacity(num_cpus), available_bytes=int(gib * 2**30), weights_bytes=0)[0]

    assert [count(2, 16), count(64, 64)] == [2, 2]
    assert [count(1, 16), count(2, 3), count(0.5, 1), count(3, 16, cpus=2)] == [1, 1, 1, 1]


def test_auto_fills_the_gpus_of_each_node_and_does_not_count_the_memory_of_the_host() -> None:
    def count(
        num_gpus: float, gpus: float, *, tp: int = 1, num_cpus: float = 64, nodes: tuple[tuple[float, float], ...] = ()
    ) -> int:
        config = parse({"model": MODEL_ARGS, "replicas": {"gpus": gpus}, "parallel": {"tp": tp}})
        has = replace(capacity(num_cpus, num_gpus), nodes=nodes)
        return auto_count(config, has, available_bytes=1, weights_bytes=16 << 30)[0]

    assert [count(1, 1), count(2, 1), count(8, 1), count(0, 1)] == [1, 2, 8, 1]
    assert [count(8, 1, tp=2), count(8, 1, tp=4), count(8, 1, tp=3), count(1, 0.25), count(1, 0.1)] == [4, 2, 2, 4, 10]
    assert [count(8, 1, num_cpus=1), count(8, 1, num_cpus=3)] == [1, 3]
    # ranks share a node: of 6 and 2 GPUs 4 at once are there one time, and 2 at once four times
    uneven = ((32.0, 6.0), (32.0, 2.0), (64.0, 0.0))
    assert [count(8, 1, tp=tp, num_cpus=128, nodes=uneven) for tp in (1, 2, 4)] == [8, 4, 1]
    assert count(8, 1, num_cpus=68, nodes=((4.0, 8.0), (64.0, 0.0))) == 4  # the CPUs of another node are no help


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"replicas": {"count": 3}}, "replicas.count = 3: 3 CPUs are needed (3 replicas at 1), and this machine has 2"),
        ({"replicas": {"count": 1}, "parallel": {"tp": 3}}, "parallel.tp = 3: 3 CPUs are needed (1 replica of 3 ranks"),
        ({"replicas": {"autoscaling": {"min_replicas": 3, "max_replicas": 9}}}, "replicas.autoscaling.min_replicas"),
        ({"router": {"cpus": 2}}, "replicas.count = 1: 3 CPUs are needed (1 replica at 1 and routers at 2 in all)"),
        (
            {"mode": "disaggregated", "prefill": {"count": 2}},
            "prefill.count = 2: 3 CPUs are needed (2 prefill replicas at 1 and 1 decode replica at 1), and",
        ),
        ({"mode": "disaggregated", "decode": {"gpus": 1}}, "decode.gpus = 1: 1 GPU is needed (1 decode replica at 1)"),
    ],
)
def test_replicas_that_find_no_place_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    [problem] = shortages([parse({"model": MODEL_ARGS, **settings})], capacity(2))
    assert problem.startswith(says)


def test_replicas_that_find_a_place_are_not() -> None:
    for settings in ({"replicas": {"count": 2}}, {"replicas": {"gpus": 0.5, "count": 2}}, {"mode": "disaggregated"}):
        assert shortages([parse({"model": MODEL_ARGS, **settings})], capacity(2, num_gpus=1)) == []


@pytest.mark.parametrize(
    ("settings", "nodes", "says"),
    [
        ({"parallel": {"tp": 3}}, [(3, 0), (1, 0)], ""),
        ({"parallel": {"tp": 3}}, [], ""),  # one machine: shortages has a sentence
        ({"parallel": {"tp": 3}}, [(0, 0)], ""),  # a head alone, which may get nodes when they are asked for
        ({"parallel": {"tp": 3}}, [(2, 0), (2, 0)], "parallel.tp = 3: the ranks of a replica share one node, which "
         "needs 3 CPUs, and the largest node of this machine has 2 CPUs"),
        ({"parallel": {"tp": 4}, "replicas": {"gpus": 1}}, [(64, 0)], ""),
        ({"parallel": {"tp": 4}, "replicas": {"gpus": 1}}, [(64, 0), (8, 2), (4, 4)], ""),
        ({"parallel": {"tp": 8}, "replicas": {"gpus": 1}}, [(64, 0), (8, 4), (4, 2)], "parallel.tp = 8: the ranks of a "
         "replica share one node, which needs 8 CPUs and 8 GPUs, and the largest node of this machine has 8 CPUs and 4 "
         "GPUs"),
        ({"mode": "disaggregated", "decode": {"tp": 3}}, [(2, 0)], "decode.tp = 3: the ranks of a replica"),
    ],
)  # fmt: skip
def test_ranks_that_find_no_place_on_one_node_are_refused(
    settings: dict[str, Any], nodes: list[tuple[float, float]], says: str
) -> None:
    config = parse({"model": MODEL_ARGS, **settings})
    found = too_wide([config], replace(capacity(99, 99), nodes=tuple(nodes)))
    assert [each.startswith(says) for each in found] == [True] * bool(says)


@pytest.mark.model
@pytest.mark.parametrize(
    ("nodes", "router", "wanted", "each_on_its_own"),
    [
        ([2.0], {}, 1, False),
        ([0.0, 2.0], {}, 2, True),
        ([0.0, 2.0], {"cpus": 1}, 1, False),  # one node alone has a CPU for it
        ([2.0, 2.0, 2.0], {"count": 3}, 3, False),  # as asked for
    ],
)
def test_a_cluster_of_two_nodes_and_more_has_two_routers_each_on_a_node_of_its_own(
    monkeypatch: pytest.MonkeyPatch, nodes: list[float], router: dict[str, Any], wanted: int, each_on_its_own: bool
) -> None:
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.serve_details, "_get_global_client", lambda **_: None)  # Serve does not run yet
    monkeypatch.setattr(app.ray, "cluster_resources", lambda: {"CPU": sum(nodes)})
    monkeypatch.setattr(app.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in nodes])
    made = app.build({"model": {"path": MODEL}, "replicas": {"count": 1}, "router": router})._bound_deployment
    assert made.num_replicas == wanted
    assert (made._replica_config.max_replicas_per_node == 1) is each_on_its_own
    assert (parse(made.init_args[0]).router.count or 1) == wanted  # it asks the other one for routes
    overlaps = wanted == 1 and not router.get("cpus")  # else its successor would wait for a CPU, perhaps for ever
    assert made._deployment_config.max_surge_percent == (100 if overlaps else 0)


@pytest.mark.parametrize(
    ("settings", "serving", "says"),
    [
        ({}, {}, ""),  # nothing serves
        ({"replicas": {"count": 5}, "scheduler": {"max_running_requests": 7}}, {"ModelReplica": 1}, ""),
        ({"mode": "disaggregated"}, {"ModelReplica": 1}, "mode = 'disaggregated': the application that serves has ano"),
        ({}, {"PrefillReplica": 1, "DecodeReplica": 1}, "mode = 'unified': the application that serves has another"),
        ({"mode": "disaggregated", "allow_outage": True}, {"ModelReplica": 1}, ""),
        ({"mode": "disaggregated"}, {"DecodeReplica": 1}, ""),  # the only prefill replica has just died
        ({"parallel": {"tp": 3}}, {"ModelReplica": 1}, "parallel.tp = 3: the replicas that serve have 1, and Serve"),
        ({"mode": "disaggregated", "decode": {"tp": 3}}, {"PrefillReplica": 1, "DecodeReplica": 1}, "decode.tp = 3: "),
        ({"parallel": {"tp": 3}}, {"ModelReplica": 3}, ""),
    ],
)  # fmt: skip
def test_a_change_for_which_serve_stops_what_serves_first_is_refused_unless_an_outage_is_allowed(
    settings: dict[str, Any], serving: dict[str, int], says: str
) -> None:
    found = outages(parse({"model": MODEL_ARGS, **settings}), serving)
    assert [each.startswith(says) for each in found] == [True] * bool(says)


def test_each_rank_has_a_bundle_of_its_own() -> None:
    options = replica_options(parse({"model": MODEL_ARGS, "replicas": {"count": 1, "cpus": 2}, "parallel": {"tp": 3}}))
    assert options["placement_group_bundles"] == [{"CPU": 2.0}] * 3
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert "runtime_env" not in options["ray_actor_options"], "Ray would start a process for it, and not take one"
    assert options["max_ongoing_requests"] > 1024


@pytest.mark.model
def test_settings_are_judged_by_the_replicas_device_and_no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking one makes a context of half a gigabyte in the process that checks, for as long as it serves."""

    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("the device was asked")

    for name in ("is_available", "mem_get_info", "init", "_lazy_init", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, asked)
    monkeypatch.setattr(app.ray, "cluster_resources", lambda: {"CPU": 16.0, "GPU": 1.0})
    monkeypatch.setattr(app.ray, "nodes", lambda: [])
    int8 = {"model": {**MODEL_ARGS, "quantization": "int8"}, "cache": {"kv_dtype": "int8"}, "attention": "cpu"}
    on_gpu = {"model": MODEL_ARGS, "attention": "triton", "replicas": {"gpus": 1}}
    for args in (int8, on_gpu):
        assert impossible(parse(args)) == []
        assert replica_options(parse(args))["num_replicas"] >= 1


@pytest.mark.parametrize(("gpus", "sees"), [(0, ""), (2, "3,5")])
def test_a_replica_sees_the_gpus_that_ray_gave_it_and_no_other_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: float, sees: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")  # Ray may be told to leave it as it is
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(app.ray, "get_gpu_ids", lambda: [3, 5])
    replicas = parse({"model": MODEL_ARGS, "replicas": {"count": 1, "gpus": gpus, "cpus": 2.5}}).replicas
    settle(num_threads=replicas.num_threads, device=replicas.device)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"]) == (sees, "2")


@pytest.mark.parametrize("name", ["min_replicas", "initial_replicas"])
def test_autoscaling_to_no_replica_at_all_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}: must be at least 1: without a replica the routers answer 503"):
        parse({"model": MODEL_ARGS, "replicas": {"autoscaling": {name: 0}}})


def test_autoscaling_takes_the_place_of_the_count() -> None:
    options = replica_options(parse({"model": MODEL_ARGS, "replicas": {"autoscaling": {"max_replicas": 4}}}))
    assert "num_replicas" not in options
    assert options["autoscaling_config"].max_replicas == 4
    policy = options["autoscaling_config"].policy
    assert policy.policy_function == "deployments.autoscaling:TtftPolicy"
    assert TtftPolicy(**policy.policy_kwargs).objective == Objective()


def test_a_model_path_is_found_from_anywhere_and_shown_relative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path(MODEL) == str(ROOT / MODEL)
    assert shown_path(str(ROOT / MODEL)) == MODEL
    ids = ("owner/name", "name", "owner/", "/name", "owner/name/more", "models/name")
    assert [may_be_hub_id(each) for each in ids] == [True] + [False] * 5
    assert shown_path("Qwen/Qwen3-0.6B") == local_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_cluster_of_our_own_has_a_token_and_another_keeps_its_ways() -> None:
    ours: dict[str, str] = {}
    prepare_ray(ours)
    assert ours["RAY_AUTH_MODE"] == "token"
    assert len(ours["RAY_AUTH_TOKEN"]) == 64
    for theirs in ({"RAY_ADDRESS": "10.0.0.1:6379"}, {"RAY_AUTH_MODE": "disabled"}):
        given = dict(theirs)
        prepare_ray(given)
        assert "RAY_AUTH_TOKEN" not in given


CALL = """
import grpc, sys
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
for host in ("127.0.0.1", "localhost"):
    grpc.channel_ready_future(grpc.insecure_channel(f"{host}:{port}")).result(float(sys.argv[1]))
"""


def test_the_processes_of_a_ray_ask_no_http_proxy_for_each_other() -> None:
    """Serve's calls go by gRPC, which heeds http_proxy: a start waited for ever, and logged 90 lines a second."""
    proxied = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    failed = subprocess.run([sys.executable, "-c", CALL, "1"], env=proxied, capture_output=True, text=True, check=False)
    assert "FutureTimeoutError" in failed.stderr
    prepare_ray(proxied)
    subprocess.run([sys.executable, "-c", CALL, "60"], env=proxied, capture_output=True, check=True)
    given = {"no_grpc_proxy": "10.0.0.0/8"}
    ask_nodes_directly(given)
    assert given == {"no_grpc_proxy": "10.0.0.0/8"}


@pytest.mark.parametrize(
    ("host", "there"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_a_ray_of_our_own_is_on_the_loopback_where_http_is(host: str, there: bool) -> None:
    ours: dict[str, str] = {}
    prepare_ray(ours, host=host)
    assert ours.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == ("0" if there else None)  # Ray's name for it
    given = {"RAY_ADDRESS": "10.0.0.1:6379"}
    prepare_ray(given, host=host)
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in given


def test_the_address_is_read_from_the_settings_file_and_serves_default_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    for text, address in (("http_options: {host: 127.0.0.1}", ("127.0.0.1", 8000)), ("{}", ("0.0.0.0", 8000))):
        file.write_text(text)
        assert settings_file.read(str(file)).address == address


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_no_address_of_this_machine_is_not_a_port_that_is_taken(host: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^http_options.host = '{host}': is no address of this machine"):
        check_port(host, 8000)


def test_the_curl_line_can_be_pasted() -> None:
    line = curl("http://127.0.0.1:8000", "m")
    assert line.startswith("curl http://127.0.0.1:8000/v1/chat/completions ")
    assert line.count("'") == 4


def test_routers_accept_no_longer_schema_than_replicas_do() -> None:
    assert RouterSettings(max_schema_bytes=MAX_SCHEMA).max_schema_bytes == MAX_SCHEMA
    with pytest.raises(ValueError, match="max_schema_bytes"):
        RouterSettings(max_schema_bytes=MAX_SCHEMA + 1)
