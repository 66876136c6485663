"""A call of a stage, written as a shell command or as a line of Python."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.system.texts import printable

__all__ = ["TO_FILL_IN", "Call"]

TO_FILL_IN = ("",)
"""An argument that only the user knows: `PROMPTS` in the shell, `prompts` in Python."""


@dataclass(frozen=True)
class Call:
    """A call of a stage.

    Attributes:
        stage: As on the command line.
        arguments: Values by the name that option and keyword share, or a mapping of them to weights; `TO_FILL_IN` for
            one that is not known.
        settings: Fields of the configuration, by dotted name.
    """

    stage: str
    arguments: Mapping[str, tuple[str, ...] | dict[str, float]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def shell(self) -> str:
        """`kedge ppo --model runs/sft/model --prompts PROMPTS data.template=tldr`."""
        return " ".join(["kedge", self.stage, *self._options(), *self._overrides()])

    def python(self) -> str:
        """`kedge.ppo(model='runs/sft/model', prompts=prompts, **{'data.template': 'tldr'})`."""
        parts = [f"{name}={_python(name, values)}" for name, values in self.arguments.items()]
        settings = {name: _alone(value) if name == "preset" else value for name, value in self.settings.items()}
        parts += [f"{name}={settings.pop(name)!r}" for name in list(settings) if "." not in name]
        if settings:
            parts.append(f"**{settings!r}")
        return f"kedge.{self.stage}({', '.join(parts)})"

    def _options(self) -> Iterator[str]:
        for name, values in self.arguments.items():
            words = [f"{value}={weight}" for value, weight in values.items()] if isinstance(values, dict) else values
            for value in words:
                yield f"--{name} {_quoted(value) if value else name.upper()}"

    def _overrides(self) -> Iterator[str]:
        for name, value in self.settings.items():
            if name == "preset":
                yield from (f"--preset {_quoted(preset)}" for preset in value)
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield _quoted(f"{name}={text}")


def _alone(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def _quoted(text: str) -> str:
    """A word for the shell; control characters are escaped, so that they do not reach the terminal."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = printable(text.replace("\\", "\\\\")).replace("'", "\\'")
    return f"$'{escaped}'"


def _python(name: str, values: tuple[str, ...] | dict[str, float]) -> str:
    if values == TO_FILL_IN:
        return name
    if values == ("True",):
        return "True"
    if isinstance(values, dict):
        return repr(values)
    return repr(_alone(list(values)))
