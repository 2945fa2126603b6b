"""Pydantic's errors as sentences about settings.

Owns:      the words. Each sentence begins with the dotted name of the setting that it is about, by which its line in
           the file is found (settings_file.py).
Never:     shows a group or a list that was given, which may be long, or a secret.
"""

import difflib
import re
from collections.abc import Callable, Collection
from typing import Any

from pydantic import ValidationError

from deployments.settings.other_names import here

_KINDS = {  # of pydantic's errors: what it wants, by what its name begins with
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
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_SECRET = ("key", "token")  # how names of secrets end
_SHOWN_CHARS = 60


def sentences(error: ValidationError, *, allowed: Callable[[str], list[str]]) -> list[str]:
    """One for each setting that is wrong: which, what it must be, and what was given.

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
        elif each["type"] == "value_error":  # ours
            lines = str(each["msg"]).removeprefix("Value error, ").splitlines()
            found += [line if line.startswith(f"{name}.") or not name else f"{name}: {line}" for line in lines]
        else:
            given = "" if name.endswith(_SECRET) or each["input"] == "" else f", not {shown(each['input'])}"
            found.append(f"{name}: {_wanted(each)}{given}")
    return list(dict.fromkeys(found))


def unknown(name: str, names: list[str]) -> str:
    """The sentence on setting ``name``, which is not among ``names`` of its group."""
    return f"{name}: is unknown{nearest(name.rpartition('.')[2], names)}; allowed: {', '.join(names)}"


def nearest(name: str, names: Collection[str]) -> str:
    """In words that follow ``name``: what it is called here, or which of ``names`` may have been meant."""
    if ours := here(name):
        return f" (here it is {ours})"
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def shown(value: Any) -> str:
    """What was given, short and as YAML has it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a group of settings" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."


def setting_of(sentence: str) -> str:
    """The dotted name that ``sentence`` begins with."""
    found = re.match(r"[\w-]+(\.[\w-]+)*", sentence)
    return found[0] if found else ""


def _wanted(error: Any) -> str:
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind].format(**context)}"
    if kind in ("literal_error", "enum"):
        return f"must be {context['expected']}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch" and context["pattern"] == "^https?://":
        return "must begin with http:// or https://"
    wanted = next((words for start, words in _KINDS.items() if kind.startswith(start)), None)
    return f"must be {wanted}" if wanted else str(error["msg"])
