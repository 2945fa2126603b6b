"""Checks whether a settings file can be served, and lists all errors with the file's name and line.

Owns:      the checks of the file's top level: groups, applications, observatories; feasible.py judges each application.
Never:     starts Ray.
"""

import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray._private.utils import get_num_cpus
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.http.service import read_face
from deployments.places import local_model, may_be_hub_id
from deployments.replica.feasible import ANY_MEMORY, examined, kept_parts, small_pools
from deployments.settings import settings_file
from deployments.settings.capacity import Capacity, shortages
from deployments.settings.schema import AppConfig, notices
from deployments.settings.settings_file import (
    MANTA,
    OBSERVATORY,
    Given,
    SettingsFile,
    nearest,
    sentences,
    setting_of,
    shown,
    unknown,
)
from deployments.watch.observatory import settings as observatory
from replicas.errors import InvalidConfig
from replicas.memory.ram import available_ram

OURS = (MANTA, OBSERVATORY)

Say = Callable[[str], None]


def read(path: Given, say: Say | None = None) -> tuple[ServeDeploySchema, dict[str, AppConfig]]:
    """Read and check a settings file, also against this machine unless RAY_ADDRESS names a cluster.

    Args:    say: called with a line about each step that takes long.
    Returns: the file as Serve reads it; the settings of each Manta application by name.
    Raises:  InvalidConfig with a sentence for each error.
    """
    file = settings_file.read(path)
    if not isinstance(file.content, dict) or not file.content.get("applications"):
        model = file.content.get("model") if isinstance(file.content, dict) else None
        alone = f"manta serve {model if isinstance(model, str) else 'MODEL'}"
        raise InvalidConfig(
            f"{path}:1: a mapping with `applications` is needed; see serve_config.yaml of the project. A model "
            f"needs no file: {alone}"
        )
    check = _Check(file, on_cluster="RAY_ADDRESS" in os.environ, say=say or (lambda _: None))
    schema = check.schema()
    check.applications()
    if check.problems or schema is None:
        ordered = sorted(dict.fromkeys(check.problems))  # by line
        raise InvalidConfig(*(f"{file.place(line, sentence)}: {sentence}" for line, sentence in ordered))
    return schema, check.configs


class _Check:
    """The check of one file; ``problems`` holds (line, sentence) of each error."""

    def __init__(self, file: SettingsFile, *, on_cluster: bool, say: Say) -> None:
        self._file = file
        self._on_cluster = on_cluster
        self._say = say
        self._applications: list[Any] = list(_listed(file.content["applications"]))
        self.problems: list[tuple[int, str]] = []
        self.configs: dict[str, AppConfig] = {}

    def schema(self) -> ServeDeploySchema | None:
        """Check the file against Serve's schema. Unknown names, which Serve ignores, are errors here."""
        content = self._file.content
        self._check_names(content, ServeDeploySchema)
        self._check_names(content.get("http_options"), HTTPOptionsSchema, "http_options")
        for index, application in enumerate(self._applications):
            self._check_names(application, ServeApplicationSchema, "applications", index)
        try:
            self._file.address  # noqa: B018  # our sentence, before Serve's
        except InvalidConfig as error:
            self._add(error.problems)
        self._check_routes()
        try:
            return ServeDeploySchema.model_validate(content)
        except ValidationError as error:
            known = {line for line, _ in self.problems}
            for sentence in sentences(error, allowed=lambda _: []):
                if self._file.line(*setting_of(sentence).split(".")) not in known:
                    self._add([sentence])
            return None

    def _check_routes(self) -> None:
        """Check that no two applications have one route, by their names; Serve's own sentence names neither."""
        owners: dict[str, str] = {}
        for index, each in enumerate(self._applications):
            if isinstance(each, dict) and isinstance(route := each.get("route_prefix", "/"), str):
                name = str(each.get("name", index))
                if (other := owners.setdefault(route, name)) != name:
                    advice = "give one of them another"
                    self._add([f"applications: {other} and {name} have one route_prefix, {route!r}; {advice}"])

    def applications(self) -> None:
        """Check the applications, one by one and together."""
        for index, application in enumerate(self._applications):
            if not isinstance(application, dict):
                self._add([f"applications.{index}: must be a group of settings, not {shown(application)}"])
                continue
            self._check_import(application, index)
            if application.get("import_path") == MANTA:
                self._check_manta(application, index)
        for index, application in enumerate(self._applications):
            if isinstance(application, dict) and application.get("import_path") == OBSERVATORY:
                self._check_observatory(application, index)
        if self.configs and not self._on_cluster:
            here = this_machine(count_gpus=any(map(_asks_gpus, self.configs.values())))
            index = next(i for i, each in enumerate(self._applications) if each.get("import_path") == MANTA)
            for sentence in shortages(self.configs.values(), here):
                advice = "give less, or set RAY_ADDRESS to a cluster that has more"
                self._add([f"{sentence}; {advice}"], "applications", index, "args")

    def _check_names(self, group: Any, kind: type[BaseModel], *where: str | int) -> None:
        known = list(kind.model_fields)
        for name in group if isinstance(group, dict) else ():
            if name not in known:
                self._add([unknown(str(name), known)], *where)

    def _check_import(self, application: Mapping[str, Any], index: int) -> None:
        """Check that the application can be imported here; one that runs elsewhere may be importable only there."""
        path = application.get("import_path")
        if path in OURS or not isinstance(path, str):
            return  # the schema has reported what is no text
        near = difflib.get_close_matches(path, OURS, n=1, cutoff=0.8)
        elsewhere = self._on_cluster or application.get("runtime_env")
        if (elsewhere and not near) or _importable(path, whole=bool(near)):
            return
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        sentence = f"import_path: {path!r} cannot be imported{meant}; Manta's are {MANTA} and {OBSERVATORY}"
        self._add([sentence], "applications", index)

    def _check_manta(self, application: Mapping[str, Any], index: int) -> None:
        args = application.get("args") or {}
        if not isinstance(args, dict):
            return  # as above
        model = args.get("model")
        path = model.get("path") if isinstance(model, dict) else None
        if isinstance(path, str) and may_be_hub_id(path) and local_model(path) is None:
            self._say(f"asking the Hugging Face hub for {path}'s config.json")
        ram = ANY_MEMORY if self._on_cluster else available_ram()
        for each in notices(args):
            line = self._file.line("applications", index, "args", *setting_of(each).split("."))
            self._say(f"warning: {self._file.place(line, each)}: {each}")
        config, problems = examined(args, available_bytes=ram)
        self._add(problems, "applications", index, "args")
        if config is not None and not problems:
            for each in small_pools(config, available_bytes=ram):
                self._say(f"warning: {each}")
            for each in kept_parts(config, available_bytes=ram):
                self._say(each)
            if said := read_face(config.model).sampling:
                shown = ", ".join(f"{field} {value:g}" for field, value in said.items())
                self._say(f"sampling, where a request says nothing: {shown}, of generation_config.json")
        if config is not None:
            self.configs[str(application.get("name", index))] = config

    def _check_observatory(self, application: Mapping[str, Any], index: int) -> None:
        where = ("applications", index, "args")
        try:
            watched = observatory.parse(observatory.with_key(application.get("args") or {})).application
        except InvalidConfig as error:
            self._add(error.problems, *where)
            return
        names = {each.get("name"): each.get("import_path") for each in self._applications if isinstance(each, dict)}
        if watched not in names:
            known = [str(name) for name, path in names.items() if path != OBSERVATORY]
            meant = f"{nearest(watched, known)}; known: {', '.join(known) or 'none'}"
            self._add([f"application: {watched!r} is not in this file{meant}"], *where)
        elif names[watched] == OBSERVATORY:
            self._add([f"application: {watched!r} is an observatory; name the application to watch"], *where)

    def _add(self, problems: Iterable[str], *where: str | int) -> None:
        """Note the errors with their lines. Args: where: the group that contains the settings of ``problems``."""
        self.problems += [(self._file.line(*where, *setting_of(each).split(".")), each) for each in problems]


def this_machine(*, count_gpus: bool) -> Capacity:
    """Measure what a Ray on this machine will have."""
    num_gpus = 0
    if count_gpus:
        from replicas.loading import device

        num_gpus = device.num_gpus()
    return Capacity(num_cpus=get_num_cpus(), num_gpus=num_gpus, where="this machine")


def _asks_gpus(config: AppConfig) -> bool:
    return any(group.gpus for group in (config.replicas, config.prefill, config.decode))


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _importable(path: str, *, whole: bool) -> bool:
    """Whether the module of ``module:name`` (or module.name) is found, as Serve finds it: also in the current folder.

    Args: whole: import the module and look for the name; a module that is not ours may do anything when imported.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    added = [folder for folder in [str(Path.cwd())] if folder not in sys.path]
    sys.path[:0] = added
    try:
        if not whole:
            return bool(module) and importlib.util.find_spec(module) is not None
        return hasattr(importlib.import_module(module), name)
    except (ImportError, ValueError):
        return False
    finally:
        for folder in added:
            sys.path.remove(folder)
