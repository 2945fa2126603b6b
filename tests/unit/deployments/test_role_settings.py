"""mode: disaggregated as data: what each role runs with, and a secret that is never shown."""

import re
from typing import Any

import pytest
import yaml

from deployments.app import replica_options
from deployments.command.announce import counted
from deployments.command.check import read
from deployments.places import ROOT
from deployments.replica.feasible import checked
from deployments.router import shown_settings
from deployments.settings.groups import (
    STORE_KEY_VARIABLE,
    TOKEN_VARIABLE,
    AutoscalingSettings,
    with_secrets,
    without_secrets,
)
from deployments.settings.roles import DEPLOYMENTS, config_of, keeps_whole_pages, roles_of
from deployments.settings.schema import parse
from kvtransfer.types import TransferSettings, Verify
from replicas.config import CacheConfig, SchedulerConfig
from replicas.errors import InvalidConfig
from replicas.resolve import settings_problems
from routing.types import Role
from tests.embedded import MODEL

APART: dict[str, Any] = {"model": {"path": MODEL}, "mode": "disaggregated"}
SECRET = "a secret of the cluster"


def test_a_role_replaces_parts_of_the_settings_that_it_names() -> None:
    config = parse(
        {
            **APART,
            "replicas": {"cpus": 2, "drain_timeout_s": 5},
            "cache": {"page_size": 32, "max_total_tokens": 1000},
            "prefill": {"count": 3, "tp": 3, "cache": {"max_total_tokens": 500}},
            "decode": {"cpus": 4, "autoscaling": {"max_replicas": 5}},
        }
    )
    prefill, decode = config_of(config, Role.PREFILL), config_of(config, Role.DECODE)
    assert (prefill.replicas.count, prefill.replicas.cpus, prefill.parallel.tp) == (3, 2, 3)
    assert (decode.replicas.cpus, decode.parallel.tp, decode.replicas.drain_timeout_s) == (4, 1, 5)
    assert prefill.cache == CacheConfig(page_size=32, max_total_tokens=500)
    assert decode.cache == CacheConfig(page_size=32, max_total_tokens=1000)
    assert decode.replicas.autoscaling == AutoscalingSettings(max_replicas=5)
    assert replica_options(prefill)["num_replicas"] == 3
    assert len(replica_options(prefill)["placement_group_bundles"]) == 3
    assert replica_options(decode)["autoscaling_config"].max_replicas == 5


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, False),
        ({"mode": "unified"}, False),
        ({"mode": "unified", "transfer": {"fetch": "auto"}}, False),
        ({"cache": {"host_memory_bytes": 1 << 30}}, True),
        ({"decode": {"cache": {"host_memory_bytes": 1 << 30}}}, True),
        ({"cache": {"host_memory_bytes": 1 << 30}, "prefill": {"cache": {"host_memory_bytes": 0}}}, True),
    ],
)
def test_pages_are_whole_on_both_sides_where_one_needs_that(changes: dict[str, Any], whole: bool) -> None:
    assert keeps_whole_pages(parse({**APART, **changes})) == whole


def test_what_a_role_has_otherwise_is_converted_as_the_settings_of_all_are() -> None:
    """Page sizes given as text and as a number are one page size."""
    prefill, decode = {"max_total_tokens": "16384", "page_size": "16"}, {"page_size": 16}
    config = parse({**APART, "prefill": {"cache": prefill}, "decode": {"cache": decode}})
    assert config_of(config, Role.PREFILL).cache == CacheConfig(max_total_tokens=16384, page_size=16)
    assert config.prefill.cache == {"max_total_tokens": 16384, "page_size": 16}


def test_a_count_of_a_role_is_instead_of_autoscaling_and_auto_is_one_of_each() -> None:
    both = parse({**APART, "replicas": {"autoscaling": {}}, "decode": {"count": 2}})
    assert config_of(both, Role.DECODE).replicas.autoscaling is None
    assert config_of(both, Role.PREFILL).replicas.autoscaling == AutoscalingSettings()
    assert [config_of(parse(APART), role).replicas.count for role in roles_of(parse(APART))] == [1, 1]


def test_the_example_is_in_order_and_what_its_comments_mention_exists() -> None:
    path = ROOT / "docs/examples/disaggregated.yaml"
    _, configs = read(str(path))
    assert [DEPLOYMENTS[role] for role in roles_of(configs["manta"])] == ["PrefillReplica", "DecodeReplica"]
    setting = re.compile(r"( +)# (\w+: .*)")
    whole = "\n".join(setting.sub(r"\1\2", line) for line in path.read_text().splitlines()[3:])
    args = yaml.safe_load(whole)["applications"][0]["args"]
    assert parse(args).prefill.tp == 3


@pytest.mark.parametrize("given", [{}, {"transfer": None}, {"transfer": {"verify": "last"}}])
def test_a_token_is_made_where_none_is_given(given: dict[str, Any]) -> None:
    first, second = (with_secrets({**APART, **given}, {})["transfer"]["token"] for _ in range(2))
    assert len(first) == 64
    assert first != second
    assert with_secrets({**APART, **given}, {TOKEN_VARIABLE: SECRET})["transfer"]["token"] == SECRET


@pytest.mark.model
def test_a_token_of_the_environment_that_is_too_short_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "fifteen letters")
    says = f"transfer.token: must have at least 16 characters, here or in {TOKEN_VARIABLE}"
    with pytest.raises(InvalidConfig, match=says) as error:
        checked(APART)
    assert "fifteen" not in f"{error.value} {error.value.__cause__}"
    monkeypatch.setenv(TOKEN_VARIABLE, "sixteen letters.")
    config, settings = checked(APART)
    assert settings["transfer"] == {"token": "sixteen letters."}
    assert config.transfer.token is not None


def test_the_settings_come_before_the_environment() -> None:
    args = {**APART, "transfer": {"token": SECRET}}
    assert with_secrets(args, {TOKEN_VARIABLE: "of the environment"})["transfer"]["token"] == SECRET


def test_engines_get_the_token_and_the_address_of_their_node() -> None:
    group = parse({**APART, "transfer": {"token": SECRET, "verify": False, "heartbeat_misses": 5}}).transfer
    assert group.of_engine("10.0.0.7") == TransferSettings(
        host="10.0.0.7", token=SECRET.encode(), verify=Verify.OFF, heartbeat_misses=5
    )
    fixed = parse({**APART, "transfer": {"token": SECRET, "host": "127.0.0.1"}}).transfer
    assert fixed.of_engine("10.0.0.7").host == "127.0.0.1"


def test_the_token_is_never_shown() -> None:
    args = {**APART, "transfer": {"token": SECRET, "verify": "last"}}
    config = parse(args)
    assert "cluster" not in repr(config.transfer.of_engine("10.0.0.7"))
    assert SECRET not in str(config) + repr(config) + str(config.transfer.shown()) + str(without_secrets(args))
    assert without_secrets(args)["transfer"] == {"verify": "last"}


STORE_KEY = "the key of the store, 32 letters"


def test_the_stores_key_is_that_of_the_settings_else_of_the_environment_for_every_role() -> None:
    environ = {STORE_KEY_VARIABLE: STORE_KEY}
    unified = {"model": APART["model"]}
    assert with_secrets(unified, {}) == unified
    assert parse(with_secrets(unified, environ)).cache.store_key == STORE_KEY
    assert with_secrets({**unified, "cache": {"store_key": "ours"}}, environ)["cache"] == {"store_key": "ours"}
    apart = parse(with_secrets({**APART, "prefill": {"cache": {"page_size": 16}}}, environ))
    assert [config_of(apart, role).cache.store_key for role in roles_of(apart)] == [STORE_KEY] * 2
    assert with_secrets({**unified, "cache": "wrong"}, environ)["cache"] == "wrong"  # the check reports it


def test_a_short_store_key_is_refused_and_no_store_key_is_ever_shown() -> None:
    [said] = settings_problems(CacheConfig(store_key="guess me, please"), SchedulerConfig())
    assert "has 16 characters, here or in MANTA_STORE_KEY; at least 32 are wanted" in said
    assert "guess" not in said
    own = {"cache": {"store_key": STORE_KEY}}
    args = {**APART, **own, "prefill": own, "decode": own, "transfer": {"token": SECRET}}
    config = parse(args)
    assert config.cache.store_key == STORE_KEY
    shown = str(shown_settings(config, args))
    assert "'page_size': 16" in shown
    assert STORE_KEY not in shown + repr(config.cache) + str(without_secrets(args))
    with pytest.raises(InvalidConfig, match=r"cache\.store_key") as error:
        parse({**APART, "cache": {"store_key": 123456789}})
    assert "123456789" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfer": {"token": SECRET, "verify": "some"}},
        {"transfer": {"token": "too short"}},
        {"transfer": {"tokn": SECRET}},
        {"transfer": {"token": SECRET}, "mode": "unified"},
        {"transfer": {"token": SECRET}, "router": {"policy": "random"}},
        {"transfer": [SECRET]},
    ],
)
def test_an_error_about_the_settings_does_not_repeat_the_token(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as error:
        parse({**APART, **wrong})
    said = f"{error.value} {error.value!r} {error.value.__cause__}"
    assert SECRET not in said
    assert "too short" not in said


def test_replicas_are_counted_by_role() -> None:
    assert [counted({Role.UNIFIED: count}) for count in (1, 2)] == ["1 replica", "2 replicas"]
    assert counted({Role.PREFILL: 1, Role.DECODE: 3}) == "1 prefill replica and 3 decode replicas"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Verify.ALL),
        ({"replicas": {"gpus": 1}}, Verify.LAST),
        ({"decode": {"gpus": 1}}, Verify.LAST),
        ({"replicas": {"gpus": 1}, "prefill": {"gpus": 0}, "decode": {"gpus": 0}}, Verify.ALL),
        ({"replicas": {"gpus": 1}, "transfer": {"verify": "all"}}, Verify.ALL),
        ({"replicas": {"gpus": 1}, "transfer": {"verify": False}}, Verify.OFF),
    ],
)
def test_both_sides_verify_the_last_page_of_a_write_where_one_of_them_has_gpus(
    settings: dict[str, Any], wanted: Verify
) -> None:
    """A page of a GPU is read back for its digest. A side that checks more than the other sends would refuse all."""
    config = parse({**APART, **settings})
    for role in (Role.PREFILL, Role.DECODE):
        assert config_of(config, role).transfer.verify is wanted
