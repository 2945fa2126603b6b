"""The table of all settings in Markdown, made from the classes that declare them: `manta settings`.

Owns:      the form of the table in docs/settings.md; names, types and defaults are those of the classes, a meaning is
           the comment behind a field or above it.
"""

import dataclasses
import enum
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from deployments.settings.constants import is_constant
from deployments.settings.groups import AutoscalingSettings, Settings
from deployments.settings.schema import AppConfig, defaults
from deployments.settings.settings_file import BYTES
from replicas.config import NamesOf

WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", SecretStr: "text"}
_FIELD = re.compile(r"^    (\w+): ")


def main() -> int:
    """Print the table. Returns: the exit status."""
    print(table(), end="")
    return 0


def table() -> str:
    """Make the Markdown table of all settings, in the order of the classes."""
    rows = [f"| `{name}` | {kind} | {default} | {meaning} |" for name, kind, default, meaning in _rows(AppConfig, "")]
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _rows(group: type[Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    meanings, hints = _comments(group), typing.get_type_hints(group, include_extras=True)
    for name, default in defaults(group).items():
        if is_constant(f"{prefix}{name}"):
            continue
        inner = _group(hints[name])
        if inner is not None and inner is not AutoscalingSettings:
            yield from _rows(inner, f"{prefix}{name}.")
            continue
        values = "bytes, or a size (`2GiB`)" if name.endswith(BYTES) else _values(hints[name])
        yield f"{prefix}{name}", values, _shown(default), meanings.get(name, "")
        if inner is not None and not prefix.startswith(("prefill.", "decode.")):
            yield from _rows(inner, f"{prefix}{name}.")


def _comments(group: type[Any]) -> dict[str, str]:
    """Map each field to the comment behind it, or to the lines of comment above it."""
    found, above = {}, ""
    for line in inspect.getsource(group).splitlines():
        field = _FIELD.match(line)
        _, _, comment = line.partition("  # ")
        if field is not None:
            found[field[1]] = (comment or above).replace("|", "\\|")
        above = f"{above} {line.strip()[2:]}".strip() if line.strip().startswith("# ") else ""
    return found


def _group(hint: Any) -> type[Any] | None:
    """Find the class of settings in a type hint; None for a plain value."""
    kinds = [each for each in (typing.get_args(hint) or (hint,)) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, Settings) or dataclasses.is_dataclass(each)), None)


def _values(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        named = next((each for each in hint.__metadata__ if isinstance(each, NamesOf)), None)
        return _values(hint.__origin__) if named is None else ", ".join(f"`{each}`" for each in named.allowed)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{each.value}`" for each in hint)
    if hint in WORDS:
        return WORDS[hint]
    if typing.get_origin(hint) is tuple:
        return "list"
    parts = [_values(each) for each in typing.get_args(hint) if each is not type(None)]
    return ", ".join(parts) if parts and typing.get_origin(hint) is not dict else "settings"


def _shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "(required)"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "none" if default in (None, ()) else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
