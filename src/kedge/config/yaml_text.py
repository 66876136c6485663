"""YAML read safely: numbers as people write them, no key twice, and the line that every field stands on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from kedge.config.words import printable
from kedge.errors import ConfigError

__all__ = ["Document", "parse_value", "read_document"]


class _Loader(yaml.SafeLoader):
    """Safe loading, to which the resolver below belongs alone."""


# YAML 1.1 reads `3e-6` as text, for want of a dot; everybody who writes it means a number.
_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Document:
    """A file's settings and, for each dotted name in it, the place it stands at (`run.yaml:12`)."""

    settings: dict[str, Any]
    places: dict[str, str]


def read_document(path: str | Path) -> Document:
    """Read a YAML file whose top level is a mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds a key twice.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error})") from None
    settings, places = _load(text, str(path))
    if settings is None:
        return Document({}, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold `field: value` lines, e.g. `model: path/to/model`")
    return Document(cast("dict[str, Any]", settings), places)


def parse_value(text: str, where: str) -> Any:
    """The value of one override: `0.1`, `3e-6`, `null`, `[a, b]` or plain text.

    Raises:
        ConfigError: the text is no YAML.
    """
    return _load(text, where)[0]


def _load(text: str, where: str) -> tuple[Any, dict[str, str]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if node is None:
            return None, {}
        places = dict(_places(node, where, ""))  # before construction, which resolves merge keys in place
        return loader.construct_document(node), places  # pyright: ignore[reportUnknownMemberType]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text else ""
        raise ConfigError(f"{where}: is not valid YAML ({line}{printable(str(error.problem))})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{where}: is not valid YAML ({printable(reason)})") from None


def _places(node: yaml.Node, path: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Each dotted name of the two upper levels with its `file:line`; deeper ones are not fields."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        name, place = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if name in seen:
            raise ConfigError(f"{place}: {printable(name)} is given twice; keep one")
        seen.add(name)
        yield name, place
        if not prefix:
            yield from _places(value, path, f"{name}.")
