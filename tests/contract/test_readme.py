"""The README's table of settings is complete, and names nothing that does not exist."""

import dataclasses
import pathlib
import re

from deployments.schema import AppConfig

README = pathlib.Path("README.md").read_text()


def settings() -> set[str]:
    """Dotted names of every setting of serve_config.yaml's args, groups of more than one level left whole."""
    names = set()
    for group, field in AppConfig.model_fields.items():
        kind = field.annotation
        if dataclasses.is_dataclass(kind):
            names |= {f"{group}.{each.name}" for each in dataclasses.fields(kind)}
        elif hasattr(kind, "model_fields"):
            names |= {f"{group}.{name}" for name in kind.model_fields}
        else:
            names.add(group)
    return names


def test_every_setting_is_in_the_table_and_every_row_is_a_setting() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", README, flags=re.MULTILINE)
    table = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert table == settings()


def test_autoscaling_settings_are_named() -> None:
    kind = AppConfig.model_fields["replicas"].annotation.model_fields["autoscaling"].annotation  # type: ignore[union-attr]
    names = kind.__args__[0].model_fields  # type: ignore[union-attr]
    assert [name for name in names if f"`{name}`" not in README] == []
