"""The settings file, or a model named on the command line instead: its content with line numbers and what flags change,
whether its port is free, and the sentences about wrong settings.

Owns:      the wording. Each sentence begins with the dotted name of its setting, by which its line in the file is
           found.
Never:     imports Ray, torch or pydantic, so that an error in the file or its port is reported within a second. Shows
           a secret, or a given group or list, which may be long.
"""

import contextlib
import copy
import difflib
import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from deployments.places import local_model
from replicas.errors import InvalidConfig

if TYPE_CHECKING:
    from pydantic import ValidationError

ALL_ADDRESSES = "0.0.0.0"  # Serve's default
LOOPBACK = "127.0.0.1"
PORT = 8000  # Serve's default
MANTA = "deployments.app:build"  # import paths of our applications
OBSERVATORY = "deployments.watch.observatory.app:build"
HTTP = "http_options"


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that a flag of the command line gives."""

    setting: str  # dotted: a group and its setting of ``args``, or of http_options
    value: Any
    flag: str  # as it was given: its name, a space, its value

    def apply(self, content: dict[str, Any], args: dict[str, Any]) -> None:
        *groups, name = self.setting.split(".")
        group = content if groups == [HTTP] else args
        for each in groups:
            group = group.setdefault(each, {})
        group[name] = self.value


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line asks to be served: the models of a settings file, or one model and the live view with every
    default; and what its flags change."""

    source: str  # path of the file; folder, GGUF file or hub id of the model
    is_model: bool = False
    changes: tuple[SettingChange, ...] = ()

    def __str__(self) -> str:
        return " ".join(dict.fromkeys([self.source, *(each.flag for each in self.changes)]))

    @property
    def words(self) -> list[str]:
        """Write the command line again: the source, and each flag with its value."""
        flags = dict.fromkeys(each.flag for each in self.changes)
        source = ["--model", self.source] if self.is_model else [self.source]
        return [*source, *("=".join(flag.split(" ", 1)) for flag in flags)]

    def read(self) -> "SettingsFile":
        """Read the settings and change them. Raises: InvalidConfig."""
        file = SettingsFile(str(self), _alone(self.source), is_file=False) if self.is_model else read(self.source)
        if not self.changes:
            return file
        content = copy.deepcopy(file.content)
        listed = content.get("applications") if isinstance(content, dict) else None
        ours = [each for each in listed or () if isinstance(each, dict) and each.get("import_path") == MANTA]
        if len(ours) != 1:
            raise InvalidConfig(f"{self.source}: flags change the settings of one application, and it has {len(ours)}")
        try:
            for each in self.changes:
                each.apply(content, ours[0].setdefault("args", {}))
        except (AttributeError, TypeError):
            wrong = f"{each.setting}: {each.flag} belongs into a group of settings, and {self.source} has none there"
            raise InvalidConfig(wrong) from None
        return replace(file, content=content, flags={each.setting: each.flag for each in self.changes})


def _alone(model: str) -> dict[str, Any]:
    """Write the settings of one model as a file has them. Ray's processes have other working folders: a path is made
    whole."""
    args = {"model": {"path": str(local_model(model) or model)}}
    return {
        "proxy_location": "HeadOnly",
        HTTP: {"host": LOOPBACK, "port": PORT},
        "applications": [
            {"name": "manta", "route_prefix": "/", "import_path": MANTA, "args": args},
            {"name": "observatory", "route_prefix": "/manta", "import_path": OBSERVATORY,
             "args": {"application": "manta"}},
        ],
    }  # fmt: skip


Given = str | CommandLine  # path of a settings file, or that with more


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The content of a settings file, with the lines of its parts."""

    path: str  # as given
    content: Any  # parsed YAML
    root: yaml.Node | None = None  # the same with lines; None for an empty file, and where there is no file
    is_file: bool = True
    flags: Mapping[str, str] = field(default_factory=dict)  # dotted setting -> the flag that gave it

    def line(self, *where: str | int) -> int:
        """Find the line of ``where`` (names and indices from the top), or of its deepest part that the file has."""
        node, line = self.root, 1
        for part in where:
            found = next(((key, value) for name, key, value in _parts(node) if name == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line

    def place(self, line: int, sentence: str) -> str:
        """Write where the setting of a sentence stands: the flag that gave it, or the file and ``line``."""
        if (flag := self.flags.get(setting_of(sentence))) is not None:
            return flag
        return f"{self.path}:{line}" if self.is_file else self.path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the HTTP server; Serve's defaults if the file has none. Raises: InvalidConfig."""
        options = self.content.get("http_options") if isinstance(self.content, dict) else None
        options = options if isinstance(options, dict) else {}
        host, port = options.get("host", ALL_ADDRESSES), options.get("port", PORT)
        if not isinstance(host, str):
            raise InvalidConfig(f"http_options.host: must be text, an address of this machine, not {host!r}")
        if wrong := _no_host(host):
            raise InvalidConfig(f"http_options.host: must be an address or a name alone, {wrong}")
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise InvalidConfig(f"http_options.port: must be a whole number from 1 to 65535, not {port!r}")
        return host, port

    @property
    def routes(self) -> list[str]:
        """The route of each application; Serve's default where the file has none."""
        listed = self.content.get("applications") if isinstance(self.content, dict) else None
        found = [str(each.get("route_prefix", "/")) for each in listed or () if isinstance(each, dict)]
        return [route for route in found if re.fullmatch(r"/[\w./-]*", route)]


def _no_host(host: str) -> str:
    """Say what ``host`` has that an address of a machine has not, and where that belongs; "" if there is nothing."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return ""
    bare, _, port = host.rpartition("://")[2].strip("/").rpartition(":")
    if port.isdecimal() and bare:
        return f"not {host!r}; write host: {bare.strip('[]')} and port: {port}"
    return f"not {host!r}" if set(host) & set(":/[] ") or not host else ""


def read(path: Given) -> SettingsFile:
    """Read a settings file. Raises: InvalidConfig that says what is wrong with the file, and on which line."""
    if isinstance(path, CommandLine):
        return path.read()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig(f"there is no file {path}{_nearest(path)}") from None
    except IsADirectoryError:
        raise InvalidConfig(f"{path} is a folder; give a file, such as {path.rstrip('/')}/serve_config.yaml") from None
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is {error.object[error.start]:#x}"
        raise InvalidConfig(f"{path} is not text in UTF-8: {wrong}") from None
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        twice = list(_twice(root))
        content = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        why = ", ".join(part for part in (error.context, error.problem) if part)
        raise InvalidConfig(f"{path}:{line}: this is not YAML: {why}") from None
    except yaml.YAMLError as error:
        raise InvalidConfig(f"{path}: this is not YAML: {error}") from None
    if twice:
        raise InvalidConfig(*(f"{path}:{line}: {name} is given twice; the first is on line {first}"
                              for name, first, line in twice))  # fmt: skip
    return SettingsFile(path, content, root)


def _parts(node: yaml.Node | None) -> Iterable[tuple[str, yaml.Node, yaml.Node]]:
    """List (name or index, the node of its name, the node of its value) of each part of ``node``."""
    if isinstance(node, yaml.MappingNode):
        return ((str(key.value), key, value) for key, value in node.value)
    if isinstance(node, yaml.SequenceNode):
        return ((str(index), value, value) for index, value in enumerate(node.value))
    return ()


def _twice(node: yaml.Node | None) -> Iterable[tuple[str, int, int]]:
    """Yield (name, first line, second line) of each name that a group has twice; YAML would take the last one."""
    seen: dict[str, int] = {}
    for name, key, value in _parts(node):
        line = key.start_mark.line + 1
        if isinstance(node, yaml.MappingNode) and name in seen and name != "<<":
            yield name, seen[name], line
        seen[name] = line
        yield from _twice(value)


def _nearest(path: str) -> str:
    folder = Path(path).parent
    if not folder.is_dir():
        return f": there is no folder {folder}"
    names = [each.name for pattern in ("*.yaml", "*.yml") for each in folder.glob(pattern)]
    near = difflib.get_close_matches(Path(path).name, names, n=1) or names[:1]
    return f" in {folder.resolve()}" + (f" (did you mean {near[0]}?)" if near else "; `manta serve MODEL` needs none")


_KINDS = {  # the start of a pydantic error's name -> what the setting must be
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_type": "text",
    "model": "a group of settings",
    "dict": "a group of settings",
    "mapping": "a group of settings",
    "dataclass": "a group of settings",
    "list": "a list",
}
_BOUNDS = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
}
BYTES = "_bytes"  # the ending of the names of sizes
_ADVICE = {"quantization": "a checkpoint that is quantised already (AWQ, GPTQ, ...) says so itself: leave this out"}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_SECRET = ("key", "token")  # endings of the names of secrets
_SHOWN_CHARS = 60


def sentences(error: "ValidationError", *, allowed: Callable[[str], list[str]]) -> list[str]:
    """Write one sentence for each wrong setting: its name, what it must be, and what was given.

    Args: allowed: dotted name of a group -> the settings that it has.
    """
    found: list[str] = []
    for each in error.errors(include_url=False):
        name = ".".join(str(part) for part in each["loc"])
        if each["type"] in _UNKNOWN:
            names = allowed(name.rpartition(".")[0])
            found.append(unknown(name, names))
        elif each["type"] == "missing":
            found.append(f"{name}: is missing")
        elif each["type"] == "value_error":  # raised by our own validators
            lines = str(each["msg"]).removeprefix("Value error, ").splitlines()
            found += [line if line.startswith(f"{name}.") or not name else f"{name}: {line}" for line in lines]
        else:
            given = "" if name.endswith(_SECRET) or each["input"] == "" else f", not {shown(each['input'])}"
            advice = _ADVICE.get(name.rpartition(".")[2]) if each["type"] == "literal_error" else None
            found.append(f"{name}: {_wanted(each)}{given}{f'; {advice}' if advice else ''}")
    return list(dict.fromkeys(found))


def unknown(name: str, names: list[str]) -> str:
    """Write the sentence about setting ``name``, which is not one of its group's ``names``."""
    last = name.rpartition(".")[2]
    is_certain = here(last) or difflib.get_close_matches(last, names, n=1, cutoff=0.8)
    others = "" if is_certain else f"; allowed: {', '.join(names)}"
    return f"{name}: is unknown{nearest(last, names)}{others}"


def nearest(name: str, names: Collection[str]) -> str:
    """Suggest our name for ``name``, or a similar one of ``names``, in words that follow it; "" if there is none."""
    if ours := here(name):
        return f" (here it is {ours})"
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def shown(value: Any) -> str:
    """Write a given value, short and in YAML's form."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a group of settings" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."


def refuse(given: Given, error: InvalidConfig) -> int:
    """Print all errors of what was to be served. Returns: the exit status."""
    print(f"{given} cannot be served:", *error.problems, sep="\n  ", file=sys.stderr)
    return 2


def setting_of(sentence: str) -> str:
    """Read the dotted name at the start of ``sentence``."""
    found = re.match(r"[\w-]+(\.[\w-]+)*", sentence)
    return found[0] if found else ""


def _wanted(error: Any) -> str:
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind].format(**context)}"
    if kind in ("literal_error", "enum"):
        return f"must be {context['expected']}"
    if kind.startswith("int") and str(error["loc"][-1]).endswith(BYTES):
        return "must be a whole number of bytes, or a size such as 512MiB or 2GB"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch" and context["pattern"] == "^https?://":
        return "must begin with http:// or https://"
    wanted = next((words for start, words in _KINDS.items() if kind.startswith(start)), None)
    return f"must be {wanted}" if wanted else str(error["msg"])


OURS: Mapping[str, str] = {
    "model_path": "model.path",
    "served_model_name": "model.served_name",
    "max_model_len": "model.context_len",
    "context_length": "model.context_len",
    "data_parallel_size": "replicas.count",
    "dp_size": "replicas.count",
    "tensor_parallel_size": "parallel.tp",
    "tp_size": "parallel.tp",
    "gpu_memory_utilization": "cache.mem_fraction_static",
    "mem_fraction_static": "cache.mem_fraction_static",
    "kv_cache_dtype": "cache.kv_dtype",
    "block_size": "cache.page_size",
    "page_size": "cache.page_size",
    "max_total_tokens": "cache.max_total_tokens",
    "enable_prefix_caching": "cache.prefix_cache",
    "disable_radix_cache": "cache.prefix_cache",
    "radix_eviction_policy": "cache.eviction",
    "max_num_seqs": "scheduler.max_running_requests",
    "max_running_requests": "scheduler.max_running_requests",
    "max_num_batched_tokens": "scheduler.chunked_prefill_size",
    "chunked_prefill_size": "scheduler.chunked_prefill_size",
    "scheduling_policy": "scheduler.policy",
    "schedule_policy": "scheduler.policy",
    "enable_priority_scheduling": "scheduler.priorities",
    "attention_backend": "attention",
    "enforce_eager": "cuda_graphs",
    "disable_cuda_graph": "cuda_graphs",
    "lora_modules": "adapters.names",
    "lora_paths": "adapters.names",
    "max_lora_rank": "adapters.max_rank",
}


def here(name: str) -> str:
    """Translate a name of vLLM or SGLang, of a file or a command line, to our setting; "" if it is not known."""
    return OURS.get(name.removeprefix("--").replace("-", "_"), "")


def check_port(host: str, port: int) -> None:
    """Check that the address is this machine's and free. Raises: InvalidConfig, which names the process there if this
    user may see it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise InvalidConfig(
                    f"http_options.host = {host!r}: is no address of this machine ({error.strerror}); {ALL_ADDRESSES} "
                    "listens on all of them, 127.0.0.1 for this machine alone"
                ) from error
            holder = _holder(port)
            held = f"{holder} listens there: stop it" if holder else "stop the process that holds it"
            if error.errno == errno.EACCES:
                held = "a port below 1024 is the administrator's"
            raise InvalidConfig(
                f"http_options.port = {port}: {host}:{port} cannot be listened on ({error.strerror}); {held}, or give "
                "another port"
            ) from error


def _holder(port: int) -> str:
    """Describe the process that listens at ``port``; "" if it cannot be found."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                process = psutil.Process(each.pid)
                return f"process {each.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
    return ""
