"""`deployments check`: what is wrong with a settings file is said in plain words, all at once, with file and line."""

import contextlib
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import huggingface_hub.utils._http as http_of_hub
import pytest
import yaml
from huggingface_hub import constants
from ray.serve.exceptions import RayServeException

from deployments import app
from deployments.command import check, serve
from deployments.command.check import read
from deployments.command.cluster import NoCluster
from deployments.http import service
from deployments.places import ROOT
from deployments.replica import feasible
from deployments.replica.feasible import impossible
from deployments.settings import settings_file
from deployments.settings.capacity import Capacity
from deployments.settings.schema import ModelSettings, parse
from replicas.checkpoints import hub
from replicas.config import AttentionKind
from replicas.errors import InvalidConfig
from replicas.loading.model_files import load_model_config
from tests.embedded import MODEL
from tests.unit.deployments import listening

FILE = f"""\
http_options:
  host: 127.0.0.1
  port: 8000
applications:
  - name: manta
    route_prefix: /
    import_path: deployments.app:build
    args:
      model:
        path: {MODEL}
      replicas:
        count: 1
      cache:
        page_size: 16
"""
HOST = "http_options.host: must be an address or a name alone"
WATCHED = """\
  - name: observatory
    route_prefix: /manta
    import_path: deployments.watch.observatory.app:build
    args:
      application: manta
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is."""
    here = Capacity(num_cpus=2, num_gpus=0, where="this machine")
    monkeypatch.setattr(check, "this_machine", lambda count_gpus: here)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def problems(folder: Path, text: str) -> list[str]:
    """What is said of a file bad.yaml with ``text``, without its folder."""
    file = folder / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as refused:
        read(str(file))
    return [problem.replace(f"{folder}/", "") for problem in refused.value.problems]


@pytest.mark.model
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("http_options:", "http_optoins:", "1: http_optoins: is unknown (did you mean 'http_options'?)"),
        ("  host:", "  hots:", "2: hots: is unknown (did you mean 'host'?)"),
        ("port: 8000", "port: eight", "3: http_options.port: must be a whole number from 1 to 65535, not 'eight'"),
        ("127.0.0.1", "a:84", f"2: {HOST}, not 'a:84'; write host: a and port: 84"),
        ("127.0.0.1", "http://[::1]:80/", f"2: {HOST}, not 'http://[::1]:80/'; write host: ::1 and port: 80"),
        ("127.0.0.1", "'[::1]'", f"2: {HOST}, not '[::1]'"),
        ("page_size: 16", "page_size: yes", "14: cache.page_size: must be a whole number, not 'true'"),
        ("port: 8000", "port: 0", "3: http_options.port: must be a whole number from 1 to 65535, not 0"),
        ("route_prefix", "rout_prefix", "6: rout_prefix: is unknown (did you mean 'route_prefix'?)"),
        (
            "deployments.app:build",
            "deployments.app:biuld",
            "7: import_path: 'deployments.app:biuld' cannot be imported (did you mean 'deployments.app:build'?)",
        ),
        ("deployments.app:build", "5", "7: applications.0.import_path: must be text, not 5"),
        ("deployments.app:build", "nowhere:app", "7: import_path: 'nowhere:app' cannot be imported; Manta's are"),
        ("page_size: 16", "pagesize: 16", "14: cache.pagesize: is unknown (did you mean 'page_size'?)"),
        ("page_size: 16", "page_size: 0", "14: cache.page_size = 0; allowed: 1 to 1024 tokens"),
        ("count: 1", "gpus: 1", "12: replicas.gpus = 1: 1 GPU is needed (1 replica at 1), and this machine has 0;"),
        ("cache:", "cache: {page_size: 16}\n      cache:", "14: cache is given twice; the first is on line 13"),
        (
            "count: 1",
            "<<: {count: 1}\n        <<: {}\n        count: 1\n        count: 2",  # what is merged may be so
            "15: count is given twice; the first is on line 14",
        ),
        ("port: 8000", "port: [", "5: this is not YAML: while parsing a flow"),
        (f"path: {MODEL}", "path: 5", "10: model.path: must be text, not 5"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_files_name_and_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in FILE
    [said] = problems(tmp_path, FILE.replace(old, new, 1) + WATCHED)
    assert said.startswith(f"bad.yaml:{says}")
    assert not re.search(r"[{}]|pydantic|Traceback", said)


@pytest.mark.model
@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ("max_total_tokens: 64", "max_total_tokens: the pool holds 64 tokens at most, and the context is 8,192: req"),
        ("device_memory_bytes: 600MiB", "device_memory_bytes: the pool holds 608 tokens at most, and the context is"),
        ("device_memory_bytes: 2GiB", None),
    ],
)
def test_a_pool_that_is_smaller_than_the_context_is_a_warning(tmp_path: Path, cache: str, says: str | None) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(FILE.replace("page_size: 16", cache))
    told: list[str] = []
    read(str(file), told.append)
    assert len(told) == (0 if says is None else 1)
    assert all(each.startswith(f"warning: cache.{says}") for each in told)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that this process listens at."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.model
def test_check_looks_at_the_port_and_a_cluster_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "good.yaml"
    with held_port() as port:
        file.write_text(FILE.replace("8000", str(port)))
        assert serve.check(str(file)) == 0
        in_order, but = capsys.readouterr().out.splitlines()
        assert in_order == f"{file} is in order"
        assert but.startswith(f"but here it would not start now: http_options.port = {port}: 127.0.0.1:{port} cannot")
        assert f"(Address already in use); process {os.getpid()} (" in but
    assert serve.check(str(file)) == 0
    assert capsys.readouterr().out == f"{in_order}\n"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(serve.cluster, "connect", Mock(side_effect=NoCluster("It is off.")))
    assert serve.check(str(file)) == 0
    assert capsys.readouterr().out == (
        "not looked at: whether the nodes can hold the replicas, and what serves there. It is off.\n"
        f"{in_order}\nnot looked at: whether the cluster's port is free\n"
    )


@pytest.mark.model
def test_the_command_says_all_that_is_wrong_in_the_order_of_the_file_and_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = FILE.replace("port: 8000", "port: eight").replace("count: 1", "cpus: 64").replace("size: 16", "size: 0")
    text += "        kv_dtype: int3\n" + WATCHED.replace("application: manta", "application: mant")
    file = tmp_path / "bad.yaml"
    file.write_text(text + "loging_config: {}\n")
    assert serve.check(str(file)) == 2
    out, err = capsys.readouterr()
    first, *said = err.splitlines()
    assert (out, first) == ("", f"{file} cannot be served:")
    assert [int(each.split(":")[1]) for each in said] == [3, 12, 14, 15, 20, 21]
    assert said[4] == f"  {file}:20: application: 'mant' is not in this file (did you mean 'manta'?); known: manta"


def test_on_a_cluster_this_machine_is_not_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    file = tmp_path / "good.yaml"
    file.write_text(FILE.replace("count: 1", "{count: 8, cpus: 16}").replace("replicas:\n        ", "replicas: "))
    _, configs = read(str(file))
    assert configs["manta"].replicas.cpus == 16


def test_two_applications_on_one_route_are_both_named(tmp_path: Path) -> None:
    second = FILE[FILE.index("  - name") :].replace("name: manta", "name: manta2")
    [said] = problems(tmp_path, FILE + second)
    assert said.endswith(":4: applications: manta and manta2 have one route_prefix, '/'; give one of them another")


@pytest.mark.parametrize(("text", "advice"), [("", "MODEL"), ("model: owner/name", "owner/name"), ("- 1", "MODEL")])
def test_a_file_without_applications_says_how_to_serve_without_one(tmp_path: Path, text: str, advice: str) -> None:
    [said] = problems(tmp_path, text)
    assert said.startswith("bad.yaml:1: a mapping with `applications` is needed; see serve_config.yaml of the project.")
    assert said.endswith(f" A model needs no file: manta serve {advice}")
    assert settings_file.read(str(tmp_path / "bad.yaml")).line("applications", 0) == 1


def test_a_file_is_no_model_and_a_path_in_a_folder_that_is_here_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_unreached", Mock(side_effect=AssertionError))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    for path, why in (("mine/notes.txt", "is a file, and no GGUF; "), ("mine/none", "there is no such folder in ")):
        told: list[str] = []
        (tmp_path / "f.yaml").write_text(FILE.replace(MODEL, path))
        with pytest.raises(InvalidConfig, match=f"f.yaml:10: model.path = '{path}'.*{why}"):
            read(str(tmp_path / "f.yaml"), told.append)
        assert told == []


def test_a_file_that_is_not_there_is_said_in_plain_words_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "serve_config.yaml").write_text(FILE)
    for path, says in (
        (tmp_path / "serve_confg.yaml", rf"^there is no file .* in {tmp_path} \(did you mean serve_config.yaml\?\)$"),
        (tmp_path / "mine.yaml", r"\(did you mean serve_config.yaml\?\)$"),  # the only one
        (tmp_path / "no" / "x.yaml", "^there is no file .*: there is no folder "),
        (tmp_path, "is a folder; give a file, such as "),
    ):
        with pytest.raises(InvalidConfig, match=says):
            read(str(path))
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff")
    with pytest.raises(InvalidConfig, match="is not text in UTF-8: byte 3 is 0xff"):
        read(str(tmp_path / "binary.yaml"))


def test_a_wrong_model_folder_names_each_place_once_and_the_nearest(tmp_path: Path) -> None:
    [said] = impossible(parse({"model": {"path": "models/SmolLM2-135M-Instuct"}}))
    assert said.count(str(ROOT)) == 1
    assert "(did you mean 'models/SmolLM2-135M-Instruct'?)" in said
    [said] = impossible(parse({"model": {"path": str(tmp_path / "none")}}))
    assert said.startswith(f"model.path = '{tmp_path}/none': there is no such folder; `make model`")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, r"'BloomForCausalLM' is not .*\(ALiBi\)"),
        ({}, r"architecture '\?' is not supported"),
    ],
)
def test_an_architecture_that_is_not_supported_gets_the_list_of_those_that_are(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    [said] = impossible(parse({"model": {"path": str(tmp_path)}}))
    assert re.search(says, said)
    assert "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM" in said


def linked(folder: Path, name: str, content: str | None) -> Path:
    """The embedded model in ``folder``, but for its file ``name``."""
    folder.mkdir(exist_ok=True)
    for each in Path(ROOT / MODEL).iterdir():
        if each.name != name:
            (folder / each.name).symlink_to(each)
    if content is not None:
        (folder / name).write_text(content)
    return folder


@pytest.mark.model
@pytest.mark.parametrize(("name", "content", "says"), [
    ("config.json", "{", "config.json cannot be read: Expecting"),
    ("config.json", "[]", "config.json holds no settings of a model"),
    ("tokenizer.json", None, "no tokenizer can be loaded from"),
    ("tokenizer_config.json", '{"eos', "no tokenizer can be loaded from"),
    ("chat_template.jinja", "{% for m in messages %}{{ m.content }", r"its chat template cannot be read: .*\(line 1\)"),
    ("chat_template.jinja", "{% for m in messages %}{{ m.role }}{% endfor %}", "its chat template leaves out what"),
    ("generation_config.json", "", "generation_config.json cannot be read: Expecting value"),
    ("generation_config.json", "[]", "generation_config.json holds no settings of a model"),
    ("generation_config.json", '{"temperature": "hot"}', "config.json: temperature = 'hot'; a number is"),
    ("generation_config.json", '{"top_p": 7}', "top_p: must be above 0 and at most 1, got 7.0. Mend it, or set"),
])  # fmt: skip
def test_a_file_of_the_model_that_a_start_would_refuse_is_refused_by_check(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    [said] = impossible(parse({"model": {"path": str(linked(tmp_path, name, content))}}))
    assert re.search(says, said), said
    assert str(tmp_path) in said


@pytest.mark.model
def test_what_the_models_author_says_of_sampling_is_told_and_can_be_set_aside(tmp_path: Path) -> None:
    said = {"do_sample": False, "temperature": 0.6, "top_k": 20.0, "top_p": None, "min_p": 0, "eos_token_id": 2}
    folder = linked(tmp_path / "model", "generation_config.json", json.dumps(said))
    file, told = tmp_path / "own.yaml", list[str]()
    file.write_text(FILE.replace(MODEL, str(folder)))
    _, configs = read(str(file), told.append)
    assert told == [
        "sampling, where a request says nothing: top_k 20, temperature 0.6, min_p 0, of generation_config.json"
    ]
    assert service.read_face(configs["manta"].model).sampling == {"temperature": 0.6, "top_k": 20, "min_p": 0.0}
    file.write_text(FILE.replace(MODEL, f"{folder}\n        sampling_defaults: openai"))
    _, configs = read(str(file), told.append)
    assert len(told) == 1
    assert service.read_face(configs["manta"].model).sampling == {}


@pytest.mark.model
@pytest.mark.parametrize(
    ("cache", "model", "tp", "says"),
    [
        ({"device_memory_bytes": 1000}, {}, 1, r"cache.device_memory_bytes = 1000: no memory is left for the KV pool"),
        ({"device_memory_bytes": 500 << 20}, {}, 1, "weights took 513 MiB"),
        ({"device_memory_bytes": 600 << 20}, {}, 3, "^$"),
        ({"device_memory_bytes": 600 << 20}, {}, 1, "^$"),
        ({"device_memory_bytes": 1141 << 19}, {}, 1, "the KV pool holds less than a page of 16 tokens: 0 MiB at 46,"),
        ({"device_memory_bytes": 300 << 20}, {"quantization": "int8"}, 1, "^$"),
    ],
)
def test_a_budget_that_holds_no_page_is_decided_from_the_config_and_the_size_of_the_weights(
    cache: dict[str, Any], model: dict[str, Any], tp: int, says: str
) -> None:
    """SmolLM2: 134.5 million numbers, 513 MiB in fp32."""
    said = impossible(parse({"model": {"path": MODEL, **model}, "cache": cache, "parallel": {"tp": tp}}))
    assert re.search(says, "\n".join(said))


def test_building_on_a_cluster_that_lacks_the_gpus_warns_and_does_not_refuse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may grow. On a Ray of our own the file is refused before that starts."""
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.serve_details, "_get_global_client", lambda **_: None)
    monkeypatch.setattr(app.ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(app.ray, "nodes", lambda: [])
    monkeypatch.setattr(app.log, "propagate", True)
    app.build({"model": {"path": MODEL}, "replicas": {"gpus": 1, "count": 1}})
    [said] = {each.getMessage() for each in caplog.records if "they wait" in each.getMessage()}
    assert said.startswith("replicas.gpus = 1: 1 GPU is needed (1 replica at 1), and the cluster has 0; they wait")


def test_building_on_a_cluster_none_of_whose_nodes_can_hold_a_replica_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its start would never end: two ranks are not put on two nodes."""
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}] * 2 + [{"Alive": False, "Resources": {"CPU": 16.0}}]
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    with pytest.raises(InvalidConfig) as refused:
        app.build({"model": {"path": MODEL}, "parallel": {"tp": 3}, "replicas": {"count": 1}})
    assert isinstance(refused.value, RayServeException)  # of which Serve shows the text alone
    assert refused.value.problems == (
        "parallel.tp = 3: the ranks of a replica share one node, which needs 3 CPUs, and the largest node of the "
        "cluster has 2 CPUs",
    )


def test_checking_a_file_for_a_cluster_asks_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "wide.yaml", []
    file.write_text(FILE + "      parallel: {tp: 3}\n")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(serve.cluster, "connect", asked.append)
    nodes = ((0.0, 0.0), (2.0, 0.0))
    cluster = Capacity(num_cpus=8, num_gpus=0, where="the cluster", nodes=nodes)
    monkeypatch.setattr(serve.serve_details, "capacity_of_cluster", lambda: cluster)
    monkeypatch.setattr(serve.serve_details, "serving", {"manta": {"ModelReplica": 1}}.__getitem__)
    assert serve.check(str(file)) == 2
    _, wide, outage = capsys.readouterr().err.splitlines()
    assert wide.startswith("  parallel.tp = 3: the ranks of a replica share one node, which needs 3 CPUs")
    assert outage.startswith("  parallel.tp = 3: the replicas that serve have 1, and Serve stops one of them before")
    assert asked == ["10.0.0.1:6379"]


@pytest.mark.model
@pytest.mark.parametrize(("mode", "is_told"), [("unified", False), ("disaggregated", True)])
def test_a_pool_that_holds_the_context_and_not_what_a_transfer_carries_is_a_warning(
    mode: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (AttentionKind(window=64), AttentionKind()) * 15
    model = replace(feasible._model(parse({"model": {"path": MODEL}})), attention_kinds=kinds)
    monkeypatch.setattr(feasible, "_model", lambda config: model)
    config = parse({"model": {"path": MODEL}, "mode": mode, "cache": {"max_total_tokens": model.context_len}})
    told = feasible.small_pools(config, available_bytes=feasible.ANY_MEMORY)
    assert len(told) == is_told
    assert all("at most, and the context, with what a KV transfer carries, is" in each for each in told)


@pytest.mark.model
def test_a_share_of_little_memory_is_a_budget_too() -> None:
    config = parse({"model": {"path": MODEL}})
    [said] = impossible(config, available_bytes=1 << 30)
    assert "cache.device_memory_bytes is not given, which is 15% of 1.0 GiB available RAM" in said
    assert impossible(config) == []  # on whatever machine the replicas will be


@pytest.mark.model
def test_a_shortage_of_a_role_names_its_own_settings() -> None:
    cache = {"device_memory_bytes": 1000}
    small = {"model": {"path": MODEL}, "mode": "disaggregated", "decode": {"cache": cache}}
    assert [each.split(":")[0] for each in impossible(parse(small))] == ["decode.cache.device_memory_bytes = 1000"]


def test_a_hub_that_is_not_reached_is_one_line_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library would try for half a minute, and say so in words of its own."""
    lines, waited = [], []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lines.append)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [handler])
    monkeypatch.setattr(http_of_hub.time, "sleep", waited.append)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    file, told = tmp_path / "hub.yaml", list[str]()
    file.write_text(FILE.replace(MODEL, "nobody/nothing"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(InvalidConfig) as refused:
            read(str(file), told.append)
    assert told == ["asking the Hugging Face hub for nobody/nothing's config.json"]
    [problem] = refused.value.problems
    assert problem.startswith(f"{file}:10: model.path = 'nobody/nothing': there is no such folder, and the Hugging")
    assert f"at {endpoint} cannot be reached" in problem
    assert "refused" in problem
    assert (lines, waited) == ([], [])


@pytest.fixture
def hub_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ModelSettings]:
    """Makes a port of this machine the hub; gives a model that is there alone."""

    def at(port: int) -> ModelSettings:
        hub._unreached.cache_clear()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        address = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{")[2]
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{constants.ENDPOINT}/{{{address}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        return parse({"model": {"path": "nobody/nothing"}}).model

    return at


@pytest.mark.parametrize(("status", "code", "said"), [
    (404, "RepoNotFound", "hub has no such model, or none for this HF_TOKEN. Check"),
    (403, "GatedRepo", "hub gives it only to users who have accepted its terms"),
    (404, "RevisionNotFound", "hub has no such revision of it"),
])  # fmt: skip
def test_why_the_hub_gave_no_model_is_said_in_words_of_ours(
    hub_at: Callable[[int], ModelSettings], status: int, code: str, said: str
) -> None:
    headers = f"HTTP/1.1 {status} x\r\nX-Error-Code: {code}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with listening.speaking(headers.encode()) as port, pytest.raises(InvalidConfig, match=said) as refused:
        service.config_folder(hub_at(port))
    assert "\n" not in str(refused.value)


FILE_OF_HUB = b'HTTP/1.1 200 x\r\nX-Repo-Commit: 0f\r\nETag: "1f"\r\nContent-Length: 20\r\n\r\n'


@pytest.mark.parametrize(("leaves", "end", "said"), [
    (b"HEAD / ", "silent", r"cannot be reached \(no answer within"), (b"HEAD /n", "closes", "disconnected"),
    (b"HEAD /n", "resets", "reset by peer"), (b"GET", "closes", "closed|disconnected"), (b"GET", "resets", "reset"),
    (b"GET", "silent", "timed out"),
])  # fmt: skip
def test_a_hub_that_breaks_off_or_falls_silent_in_the_midst_of_a_file_is_one_sentence(
    hub_at: Callable[[int], ModelSettings], monkeypatch: pytest.MonkeyPatch, leaves: bytes, end: str, said: str
) -> None:
    """``leaves``: how the request begins that has no whole answer: the look, the file's length, or the file."""
    monkeypatch.setattr(http_of_hub.time, "sleep", lambda wait_s: None)  # between the tries of the hub's library
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    if leaves == b"HEAD / ":
        monkeypatch.setattr(hub, "REACH_S", 0.2)
    held, left = list[socket.socket](), list[bytes]()

    def answer(connection: socket.socket, asked: bytes) -> None:
        if not asked.startswith(leaves):
            connection.sendall(FILE_OF_HUB)
            return
        left.append(asked)
        if leaves == b"GET" and len(left) == 1:  # where each try brings bytes, the library tries for ever
            connection.sendall(FILE_OF_HUB + b'{"model')
        if end == "silent":
            held.append(connection.dup())
        elif end == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with listening.speaking(answer) as port, pytest.raises(InvalidConfig, match=said) as refused:
        service.config_folder(hub_at(port))
    for each in held:
        each.close()
    assert left
    assert str(refused.value).startswith("model.path = 'nobody/nothing': there is no such folder, and the Hugging Face")
    assert "\n" not in str(refused.value)


@pytest.mark.model
def test_a_revision_of_a_hub_id_is_asked_for_by_every_process_and_a_folder_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit is the same weights at every start; the main branch is what its owner makes of it."""
    asked: list[tuple[str, str | None]] = []

    def snapshot(name: str, *, revision: str | None = None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((name, revision))
        return str(ROOT / MODEL)

    def file(name: str, filename: str, *, revision: str | None = None) -> str:
        return f"{snapshot(name, revision=revision, allow_patterns=[filename])}/{filename}"

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # there is no other hub to look for
    for module in (service, huggingface_hub):
        monkeypatch.setattr(module, "snapshot_download", snapshot)
    monkeypatch.setattr(service, "hf_hub_download", file)
    config = parse({"model": {"path": "nobody/nothing", "revision": "abc123"}})
    assert impossible(config) == []
    assert service.tokenizer_folder(config.model) == str(ROOT / MODEL)
    assert load_model_config("nobody/nothing", revision="abc123").vocab_size == 49_152
    assert len(asked) >= 3
    weights = ("nobody/nothing", Path(MODEL).name)  # of the commit whose index was read
    assert set(asked) == {("nobody/nothing", "abc123"), weights}
    monkeypatch.setattr(app, "shortages", lambda *_: [])
    here = Capacity(num_cpus=2, num_gpus=0, where="the cluster")
    monkeypatch.setattr(app.serve_details, "capacity_of_cluster", lambda: here)
    for model in ({"path": "nobody/nothing", "revision": "abc123"}, {"path": MODEL}):
        app.build({"model": model, "replicas": {"count": 1}})
    assert "model.revision" not in caplog.text
    app.build({"model": {"path": "nobody/nothing"}, "replicas": {"count": 1}})
    assert "model.revision is not set: each start loads the newest commit of nobody/nothing. Set it" in caplog.text
    [said] = impossible(parse({"model": {"path": MODEL, "revision": "abc123"}}))
    assert said == f"model.revision = 'abc123': {MODEL} is a folder, which has one; leave it out"


def test_a_port_that_is_taken_is_said_within_a_second_before_ray_and_torch_are_imported(tmp_path: Path) -> None:
    with held_port() as port:
        file = tmp_path / "taken.yaml"
        file.write_text(FILE.replace("8000", str(port)))
        command = [sys.executable, "-m", "deployments", "serve", str(file)]
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)  # of this child alone: others of ours may end meanwhile
            process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2
    says = f"{file}:3: http_options.port = {port}: 127.0.0.1:{port} cannot be listened on (Address already in use); "
    assert f"{says}process {os.getpid()} (" in said
    assert used.ru_utime + used.ru_stime < 3.5  # Ray and torch take 7; on a busy machine 1.05 was seen


def test_the_projects_files_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the GPUs or the cores that this machine may lack."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for file in ("serve_config.yaml", "docs/examples/disaggregated.yaml", "docs/examples/tiers.yaml"):
        schema, configs = read(str(ROOT / file))
        assert (list(configs), schema.http_options.port) == (["manta"], 8000)
        assert yaml.safe_load((ROOT / file).read_text())
