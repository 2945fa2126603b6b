"""The settings file as text: what it holds, and on which line.

Owns:      reading it, and where a sentence about one of its settings belongs.
Never:     imports Ray, torch or pydantic: what is wrong with the file or its port is said within a second.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replicas.errors import InvalidConfig

ALL_ADDRESSES = "0.0.0.0"  # Serve's default
PORT = 8000  # Serve's default


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A file that was read."""

    path: str  # as it was given
    content: Any  # what YAML says
    root: yaml.Node | None  # the same with lines; None for an empty file

    def line(self, *where: str | int) -> int:
        """Of the deepest part of ``where``, names and indices from the top, that the file has."""
        node, line = self.root, 1
        for part in where:
            found = next(((key, value) for name, key, value in _parts(node) if name == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        return line

    @property
    def address(self) -> tuple[str, int]:
        """Where HTTP listens: host and port, Serve's own where the file says nothing. Raises: InvalidConfig."""
        options = self.content.get("http_options") if isinstance(self.content, dict) else None
        options = options if isinstance(options, dict) else {}
        host, port = options.get("host", ALL_ADDRESSES), options.get("port", PORT)
        if not isinstance(host, str):
            raise InvalidConfig(f"http_options.host: must be text, an address of this machine, not {host!r}")
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise InvalidConfig(f"http_options.port: must be a whole number from 1 to 65535, not {port!r}")
        return host, port


def read(path: str) -> SettingsFile:
    """Raises: InvalidConfig, saying in plain words what is wrong with the file, and on which line."""
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
    """(name or index, where it stands, its value) of each part of ``node``."""
    if isinstance(node, yaml.MappingNode):
        return ((str(key.value), key, value) for key, value in node.value)
    if isinstance(node, yaml.SequenceNode):
        return ((str(index), value, value) for index, value in enumerate(node.value))
    return ()


def _twice(node: yaml.Node | None) -> Iterable[tuple[str, int, int]]:
    """(name, line of the first, line of the second) of names that a group has more than once: YAML takes the last."""
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
    return f" in {folder.resolve()}" + (f" (did you mean {near[0]}?)" if near else "")
