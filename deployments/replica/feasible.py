"""Checks whether the model and the replicas' device can do what the settings of one application ask.

Owns:      what is decided before anything starts, from config.json, the tokenizer and the size of the weights.
Never:     loads weights, or asks a GPU: that would make a CUDA context in the process that checks.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.http import tracing
from deployments.http.service import config_folder, read_face, tokenizer_folder
from deployments.places import check_model_path, local_path
from deployments.settings.adapters import Adapters
from deployments.settings.groups import with_secrets
from deployments.settings.roles import check_ranks, config_of, keeps_whole_pages, roles_of
from deployments.settings.schema import AppConfig, examine, parse
from deployments.settings.settings_file import setting_of
from replicas.checkpoints.checkpoint import weight_files
from replicas.config import EngineConfig, Hardware, ModelConfig
from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.loading.model_files import load_model_config
from replicas.memory import sizing
from replicas.memory.allocator import len_with_carried
from replicas.resolve import resolve, settings_problems, transfer_problems
from replicas.text.tokenizer import Tokenizer
from routing.types import Role

ANY_MEMORY = 1 << 62  # of replicas on machines that are not this one


def checked(args: dict[str, Any]) -> tuple[AppConfig, dict[str, Any]]:
    """Return the settings, and the arguments that the replicas read them from.

    Raises: InvalidConfig with a sentence for every setting that is wrong on any machine.
    """
    settings = with_secrets(args)
    config = parse(settings)  # the secrets of the environment too
    if problems := impossible(config):
        raise InvalidConfig(*problems)
    return config, settings


def examined(args: dict[str, Any], *, available_bytes: int) -> tuple[AppConfig | None, list[str]]:
    """Return the settings, as far as they can be read, and a sentence for everything that is wrong with them on a
    machine with ``available_bytes`` of RAM."""
    config, problems = examine(with_secrets(args))
    if config is not None:
        problems = list(dict.fromkeys([*problems, *impossible(config, available_bytes=available_bytes)]))
    return config, problems


def impossible(config: AppConfig, *, available_bytes: int = ANY_MEMORY) -> list[str]:
    """Return a sentence for everything that this model, or a machine with ``available_bytes`` of RAM, cannot do."""
    found: dict[str, None] = dict.fromkeys(settings_problems(config.cache, config.scheduler))

    @contextlib.contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except InvalidConfig as error:
            found.update(dict.fromkeys(error.problems))

    with collected():
        tracing.check(config.observability)
    with collected():
        config.router.known_keys()
    model = None
    with collected():
        model = _model(config)
        read_face(config.model)
        if model is not None and not found:
            Tokenizer(tokenizer_folder(config.model))  # and the chat template
    with collected():
        Adapters(config.adapters, fits=None if model is None else model.adaptable())
    with collected():
        heads = None if model is None else model.num_kv_heads
        check_ranks(config, num_kv_heads=heads, latent=model is not None and model.mla is not None)
    for role in roles_of(config) if model is not None else ():
        try:
            engine = engine_of(config, role, available_bytes=available_bytes)
            most_pool_tokens(engine)
            if engine.hands_off and (problems := [*transfer_problems(engine)]):
                raise InvalidConfig(*problems)
        except InvalidConfig as error:
            found.update(dict.fromkeys(_named(problem, config, role) for problem in error.problems))
    return list(found)


def engine_of(config: AppConfig, role: Role, *, available_bytes: int = ANY_MEMORY) -> EngineConfig:
    """Resolve the settings of an engine of ``role``, except for its device's memory. Raises: InvalidConfig."""
    own = config_of(config, role)
    hardware = Hardware(device=own.replicas.device, num_cpus=1, available_memory_bytes=available_bytes)
    resolved = resolve(
        _model(own),
        hardware,
        cache=own.cache,
        scheduler=own.scheduler,
        parallel=own.parallel,
        attention=own.attention,
        num_threads=own.replicas.num_threads,
    )
    hands_off = role is not Role.UNIFIED or config.transfer.fetch == "auto"
    return replace(resolved, hands_off=hands_off, whole_pages=keeps_whole_pages(config))


def small_pools(config: AppConfig, *, available_bytes: int) -> list[str]:
    """Return a sentence for each role whose pool, at most, holds no request of the context's length."""
    found: dict[str, None] = {}
    for role in roles_of(config):
        engine = engine_of(config, role, available_bytes=available_bytes)
        tokens, page_size, context_len = most_pool_tokens(engine), engine.cache.page_size, engine.model.context_len
        # what is too long to be fetched is computed
        longest = context_len if role is Role.UNIFIED else len_with_carried(context_len, page_size, engine.carried)
        if tokens is not None and tokens < longest:
            cap = engine.cache.max_total_tokens
            beside = ", with what a KV transfer carries," if longest > context_len else ""
            by = "max_total_tokens" if cap is not None and cap - cap % page_size == tokens else "device_memory_bytes"
            sentence = (
                f"cache.{by}: the pool holds {tokens:,} tokens at most, and the context{beside} is {longest:,}: "
                "requests that need more are refused, others wait for room; raise it, or lower model.context_len"
            )
            found[_named(sentence, config, role)] = None
    return list(found)


def kept_parts(config: AppConfig, *, available_bytes: int) -> list[str]:
    """Say of each role what it keeps of a text, in bytes, where layers differ in that, and what it does not do with a
    recurrent state."""
    found: dict[str, None] = {}
    for role in roles_of(config):
        engine = engine_of(config, role, available_bytes=available_bytes)
        if engine.model.states or any(engine.window_layers):
            why = engine.origin.get("cache.prefix_cache") if engine.model.states else None
            parts = sizing.describe_parts(engine, apart=any(engine.window_layers))
            found["; ".join([*([why] if why else []), parts])] = None
    return list(found)


def most_pool_tokens(engine: EngineConfig) -> int | None:
    """Count the tokens that the pool of an engine holds at most; None if its device's memory decides.

    Raises: InvalidConfig if the memory that a replica on the CPU may take holds no page beside its weights.
    """
    budget, cap = engine.cache.device_memory_bytes, sizing.token_cap(engine)
    if engine.device != "cpu" or budget is None:
        return cap
    tp = engine.parallel.tp
    weights = sizing.weight_bytes(engine.model, tp)
    cell_bytes = engine.model.kv_cell_bytes(tp=tp, kv_dtype=engine.kv_dtype)
    try:
        left = sizing.kv_bytes(budget // tp, weights, engine.cache.mem_fraction_static)
        left = sizing.beside_states(left, engine)
        size = sizing.pool_size(left, cell_bytes, engine.cache.page_size, None if cell_bytes else cap)
        fit = sizing.with_snapshots(engine, sizing.with_windows(engine, size, left), left).num_tokens
    except InvalidConfig as error:
        origin = engine.origin.get("cache.device_memory_bytes")
        given = f" = {budget}" if origin is None else f" is not given, which is {origin}"
        raise InvalidConfig(f"cache.device_memory_bytes{given}: {error}") from error
    return fit if cap is None else min(fit, cap - cap % engine.cache.page_size)


def _named(problem: str, config: AppConfig, role: Role) -> str:
    """Name the setting of ``problem`` as the role's own group has it, if that sets it."""
    if role is Role.UNIFIED:
        return problem
    own, setting = getattr(config, role.value), setting_of(problem)
    if setting == "parallel.tp" and own.tp is not None:
        return problem.replace("parallel.tp", f"{role.value}.tp", 1)
    return f"{role.value}.{problem}" if setting.removeprefix("cache.") in own.cache else problem


def _model(config: AppConfig) -> ModelConfig:
    """Read the model's config. Raises: InvalidConfig, also for an unknown architecture or missing weights."""
    check_model_path(config.model.path)
    folder = config_folder(config.model)
    try:
        model = load_model_config(
            str(folder),
            dtype=config.model.dtype,
            context_len=config.model.context_len,
            device=config.replicas.device,
            quantization=config.model.quantization,
            implementation=config.model.implementation,
        )
    except UnsupportedModel as error:
        raise InvalidConfig(f"model.path = {config.model.path!r}: {error}") from error
    local = Path(local_path(config.model.path)).is_dir()
    if local and config.model.revision is not None:
        raise InvalidConfig(
            f"model.revision = {config.model.revision!r}: {config.model.path} is a folder, which has one; leave it out"
        )
    if local:  # a hub's folder holds its config.json alone at first
        weight_files(folder)
    return model
