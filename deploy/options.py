"""What a command line says as name=value, for the argument of an environment or a task source."""

from typing import Any

import typer
import yaml


def named_values(texts: list[str] | None, example: str) -> dict[str, Any]:
    """Values are YAML; `typer.BadParameter` for a text that is no name=value."""
    pairs = [text.partition("=") for text in texts or ()]
    for name, equals, value in pairs:
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{name + equals + value!r}: write name=value, e.g. {example}")
    return {name: yaml.safe_load(value) for name, _, value in pairs}
