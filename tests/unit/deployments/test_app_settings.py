"""serve_config.yaml: what is wrong is named, with why and what is allowed."""

import dataclasses
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import app
from deployments.announce import curl
from deployments.app import check_config, replica_options
from deployments.autoscaling import Objective, TtftPolicy
from deployments.capacity import auto_count, replica_bytes
from deployments.places import ROOT, local_path, shown_path
from deployments.ray_env import host_of, prepare
from deployments.schema import parse
from deployments.serve import check_port, read
from replicas.config import CacheConfig, Device, Hardware, ParallelConfig, SchedulerConfig
from replicas.errors import InvalidConfig
from tests.embedded import MODEL

MODEL_ARGS = {"path": MODEL}
APART: dict[str, Any] = {"model": MODEL_ARGS, "mode": "disaggregated"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "model: is missing"),
        ({"model": {}}, "model.path: is missing"),
        ({"model": MODEL_ARGS, "repliacs": {}}, "repliacs: is unknown (did you mean 'replicas'?); allowed: model,"),
        ({"model": {**MODEL_ARGS, "nam": 1}}, "allowed: path, served_name, dtype, quantization, context_len"),
        ({"model": {**MODEL_ARGS, "dtype": "int3"}}, "model.dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"model": MODEL_ARGS, "cache": {"pagesize": 8}}, "'pagesize' is unknown (did you mean 'page_size'?)"),
        ({"model": MODEL_ARGS, "scheduler": {"policy": "x"}}, "scheduler.policy: Input should be 'lpm' or 'fcfs'"),
        ({"model": MODEL_ARGS, "router": {"policy": "x"}}, "allowed: estimated_ttft, round_robin, random"),
        ({"model": MODEL_ARGS, "replicas": {"count": 0}}, "count = 0; allowed: auto, or 1 and more"),
        ({"model": MODEL_ARGS, "replicas": {"cpus": 0}}, "replicas.cpus: Input should be greater than 0"),
        (
            {"model": MODEL_ARGS, "replicas": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}},
            "min_replicas (3) exceeds max_replicas (2)",
        ),
        (
            {"model": MODEL_ARGS, "replicas": {"autoscaling": {"look_back_period_s": 1, "metrics_interval_s": 1}}},
            "look_back_period_s (1.0) must exceed metrics_interval_s (1.0)",
        ),
        ({"model": MODEL_ARGS, "router": {"max_wait_s": 0}}, "router.max_wait_s: Input should be greater than 0"),
        ({"model": MODEL_ARGS, "mode": "apart"}, "mode: Input should be 'unified' or 'disaggregated'"),
        ({"model": MODEL_ARGS, "decode": {"count": 2}}, "decode: given, but mode is unified; set mode: disaggregated"),
        ({**APART, "router": {"policy": "random"}}, "where pairs of replicas are chosen by pd_pair"),
        ({**APART, "prefill": {"count": 0}}, "prefill.count: Input should be greater than or equal to 1"),
        ({**APART, "prefill": {"counts": 1}}, "(did you mean 'count'?); allowed: count, autoscaling, cpus,"),
        ({**APART, "decode": {"count": 1, "autoscaling": {}}}, "count and autoscaling are both given"),
        ({**APART, "decode": {"cache": {"pagesize": 8}}}, "'pagesize' is unknown (did you mean 'page_size'?)"),
        ({**APART, "decode": {"cache": {"page_size": "x"}}}, "decode.cache: page_size: Input should be a valid int"),
        ({**APART, "decode": {"cache": {"page_size": 8}}}, "prefill.cache.page_size = 16 and decode.cache.page_size"),
        ({**APART, "transfer": {"verify": "some"}}, "transfer.verify: Input should be 'off', 'last' or 'all'"),
        ({**APART, "transfer": {"room_timeout_s": 0}}, "transfer.room_timeout_s: Input should be greater than 0"),
        ({**APART, "router": {"max_wait_s": 180}}, "transfer.room_timeout_s = 180 must exceed router.max_wait_s = 180"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(args: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        parse(args)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensor_parallel_size: 2", "tensor_parallel_size: is unknown (here it is parallel.tp); allowed: model,"),
        ("parallel: {tp_size: 2}", "'tp_size' is unknown (here it is parallel.tp); allowed: tp"),
        ("gpu-memory-utilization: 0.5", "is unknown (here it is cache.mem_fraction_static)"),
        ("scheduler: {async_scheduling: true}", "'async_scheduling' is unknown (here it is scheduler.overlap)"),
        ("enforce_eager: true", "(here it is cuda_graphs)"),
        ("cache: {kv_dtype: fp8_e5m2}", "kv_dtype: Input should be 'float32', 'bfloat16', 'float16', 'int8' or 'fp8'"),
        ("cache: {kv_dtype: int8, kv_cache_dtype: int8}", "kv_dtype and kv_cache_dtype are both given"),
    ],
)
def test_a_name_of_vllm_or_sglang_is_answered_with_ours(text: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        parse({"model": MODEL_ARGS, **yaml.safe_load(text)})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "overlap"),
    [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("'on'", "on"), ("auto", "auto")],
)
def test_overlap_can_be_written_in_yaml_where_on_and_off_are_booleans(text: str, overlap: str) -> None:
    args = yaml.safe_load(f"scheduler: {{overlap: {text}}}")
    assert parse({"model": MODEL_ARGS, **args}).scheduler == SchedulerConfig(overlap=overlap)  # type: ignore[arg-type]


def test_priorities_can_be_written_in_yaml_where_on_and_off_are_booleans() -> None:
    for text, priorities in (("on", "on"), ("off", "off"), ("'on'", "on")):
        args = yaml.safe_load(f"scheduler: {{priorities: {text}}}")
        assert parse({"model": MODEL_ARGS, **args}).scheduler.priorities == priorities


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("kv_cache_dtype: fp32", "float32"), ("kv_cache_dtype: bf16", "bfloat16"), ("kv_dtype: fp16", "float16"),
        ("kv_cache_dtype: int8", "int8"), ("kv_cache_dtype: fp8", "fp8"), ("kv_dtype: fp8_e4m3", "fp8"),
        ("kv_cache_dtype: auto", None), ("kv_dtype: null", None),
    ],
)  # fmt: skip
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
    with pytest.raises(InvalidConfig) as error:
        parse({"model": {"path": ""}, "router": {"count": 0}, "attention": "x"})
    assert [word in str(error.value) for word in ("model.path", "router.count", "attention")] == [True] * 3


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
        ({"model": {"path": "models/none"}}, "there is no such folder .*make model"),
        (
            {"model": MODEL_ARGS, "attention": "triton"},
            r"attention = 'triton' does not run on cpu; allowed there: auto, cpu, torch_native$",
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
    with pytest.raises(InvalidConfig, match=says):
        check_config(parse(args))


def test_engine_settings_are_the_engines_own() -> None:
    config = parse({"model": MODEL_ARGS, "cache": {"page_size": 1}, "scheduler": {"max_running_requests": 3}})
    assert config.cache == CacheConfig(page_size=1)
    assert config.scheduler == SchedulerConfig(max_running_requests=3)
    assert config.parallel == ParallelConfig()


@pytest.mark.model
def test_the_file_of_the_project_is_in_order_and_says_auto() -> None:
    schema, configs = read(str(ROOT / "serve_config.yaml"))
    assert configs["manta"].replicas.count == "auto"
    assert configs["manta"].model.name == "SmolLM2-135M-Instruct"
    assert schema.http_options.port == 8000


def test_every_setting_that_the_file_mentions_exists() -> None:
    """Settings in comments too: uncommented, they parse."""
    lines = (ROOT / "serve_config.yaml").read_text().splitlines()
    setting = re.compile(r"( +)# (\w+: .*)")
    whole = "\n".join(setting.sub(r"\1\2", line) for line in lines[2:])
    args = yaml.safe_load(whole)["applications"][0]["args"]
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    assert {"policy", "max_running_requests", "chunked_prefill_size"} == set(args["scheduler"]) & known
    assert parse(args).replicas.autoscaling is not None


@pytest.mark.parametrize("text", ["", "applications: []", "a: [", "- 1", "applications: [{name: x, import_path: 5}]"])
def test_a_file_that_is_not_a_serve_config_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises((InvalidConfig, ValueError)):
        read(str(file))


def test_auto_is_two_where_cores_and_memory_carry_two_else_one() -> None:
    def count(num_cpus: float, gib: float, cpus: float = 1.0) -> int:
        need = replica_bytes(CacheConfig(device_memory_bytes=1 << 30), available_bytes=0, weights_bytes=0)
        return auto_count(
            num_cpus=num_cpus, cpus_per_replica=cpus, available_bytes=int(gib * 2**30), bytes_per_replica=need
        )[0]

    assert [count(2, 16), count(64, 64)] == [2, 2]
    assert [count(1, 16), count(2, 3), count(0.5, 1), count(3, 16, cpus=2)] == [1, 1, 1, 1]


def test_each_rank_has_a_bundle_of_its_own() -> None:
    options = replica_options(parse({"model": MODEL_ARGS, "replicas": {"count": 1, "cpus": 2}, "parallel": {"tp": 3}}))
    assert options["placement_group_bundles"] == [{"CPU": 2.0}] * 3
    assert options["ray_actor_options"]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"
    assert options["max_ongoing_requests"] > 1024


@pytest.mark.model
@pytest.mark.parametrize("machine", ["cpu", "cuda"])
def test_settings_are_judged_by_the_replicas_device_not_by_the_machine_that_checks(
    monkeypatch: pytest.MonkeyPatch, machine: Device
) -> None:
    checks = Hardware(device=machine, num_cpus=2, available_memory_bytes=1 << 30)
    monkeypatch.setattr(app, "measure_hardware", lambda: checks)
    int8 = {"model": {**MODEL_ARGS, "quantization": "int8"}, "cache": {"kv_dtype": "int8"}, "attention": "cpu"}
    check_config(parse(int8))
    check_config(parse({"model": MODEL_ARGS, "attention": "triton", "replicas": {"gpus": 1}}))


def test_replicas_without_gpus_see_none_of_their_machines() -> None:
    def environment(gpus: float) -> dict[str, str]:
        options = replica_options(parse({"model": MODEL_ARGS, "replicas": {"count": 1, "gpus": gpus}}))
        return dict(options["ray_actor_options"]["runtime_env"]["env_vars"])

    assert environment(0) == {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert environment(1) == {"OMP_NUM_THREADS": "1"}


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


def test_serves_own_autoscaling_rule_is_there_for_those_who_ask() -> None:
    settings = parse({"model": MODEL_ARGS, "replicas": {"autoscaling": {"target_ongoing_requests": 3}}})
    config = replica_options(settings)["autoscaling_config"]
    assert config.target_ongoing_requests == 3
    assert "deployments" not in config.policy.policy_function


def test_a_model_path_is_found_from_anywhere_and_shown_relative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path(MODEL) == str(ROOT / MODEL)
    assert shown_path(str(ROOT / MODEL)) == MODEL
    assert shown_path("Qwen/Qwen3-0.6B") == local_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_cluster_of_our_own_has_a_token_and_another_keeps_its_ways() -> None:
    ours: dict[str, str] = {}
    prepare(ours)
    assert ours["RAY_AUTH_MODE"] == "token"
    assert len(ours["RAY_AUTH_TOKEN"]) == 64
    for theirs in ({"RAY_ADDRESS": "10.0.0.1:6379"}, {"RAY_AUTH_MODE": "disabled"}):
        given = dict(theirs)
        prepare(given)
        assert "RAY_AUTH_TOKEN" not in given


@pytest.mark.parametrize(
    ("host", "there"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_a_ray_of_our_own_is_on_the_loopback_where_http_is(host: str, there: bool) -> None:
    ours: dict[str, str] = {}
    prepare(ours, host=host)
    assert ours.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == ("0" if there else None)  # Ray's name for it
    given = {"RAY_ADDRESS": "10.0.0.1:6379"}
    prepare(given, host=host)
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in given


def test_the_host_is_read_from_the_settings_file_and_serves_default_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    for text, host in (("http_options: {host: 127.0.0.1}", "127.0.0.1"), ("{}", "0.0.0.0"), (":\n- :", "0.0.0.0")):
        file.write_text(text)
        assert host_of(str(file)) == host
    assert host_of(str(tmp_path / "none.yaml")) == "0.0.0.0"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(InvalidConfig, match=rf"127.0.0.1:{port} cannot be listened on .*another port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_the_curl_line_can_be_pasted() -> None:
    line = curl("http://127.0.0.1:8000", "m")
    assert line.startswith("curl http://127.0.0.1:8000/v1/chat/completions ")
    assert line.count("'") == 4
