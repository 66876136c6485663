"""YAML read safely: numbers as people write them, no key twice, nothing without end, and the line of every field."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from kedge.config.schema.field import DEEPEST
from kedge.errors import ConfigError

__all__ = ["Document", "parse_value", "read_document"]

MAX_BYTES = 2**20
MAX_VALUES = 100_000

# SafeLoader's own slips on `!!timestamp x`, `!!bool x`, `!!int ''` and numbers beyond a float's range.
_UNFIT_VALUES = (AttributeError, LookupError, OverflowError, TypeError)


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
    settings, places = _load(_text_of(Path(path)), str(path))
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


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path}: is no file that can be read to its end")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_BYTES:,} bytes, which no configuration is")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be the name of a file ({error})") from None


def _load(text: str, where: str) -> tuple[Any, dict[str, str]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if node is None:
            return None, {}
        _check_size(node)
        places = dict(_places(node, where, ""))  # before construction, which resolves merge keys in place
        return loader.construct_document(node), places  # pyright: ignore[reportUnknownMemberType]
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text else ""
        raise ConfigError(f"{where}: is not valid YAML ({line}{error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{where}: is not valid YAML ({reason})") from None
    except _UNFIT_VALUES:
        raise ConfigError(f"{where}: is not valid YAML (a value is not of the kind that its tag says)") from None


def _check_size(node: yaml.Node) -> None:
    """Refuse what a few aliases can blow up to billions of values, before any of them is made."""
    values, depth = _measured(node, {})
    if depth > DEEPEST:
        ending = "without end" if math.isinf(depth) else f"deeper than {DEEPEST} levels"
        raise ValueError(f"a value is nested {ending}")
    if values > MAX_VALUES:
        raise ValueError(f"with its aliases written out it has over {MAX_VALUES:,} values")


def _measured(node: yaml.Node, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """How many values a node stands for, aliases written out, and how deep; infinite for one that holds itself."""
    if id(node) not in known:
        known[id(node)] = (math.inf, math.inf)  # what a node finds that holds itself
        parts = [_measured(part, known) for part in _inside(node)]
        known[id(node)] = (
            1 + sum(values for values, _ in parts),
            1 + max((depth for _, depth in parts), default=0),
        )
    return known[id(node)]


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in cast("list[tuple[yaml.Node, yaml.Node]]", node.value) for part in pair]
    return cast("list[yaml.Node]", node.value) if isinstance(node, yaml.SequenceNode) else []


def _places(node: yaml.Node, path: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Each dotted name with its `file:line`; no mapping at any depth has a key twice."""
    if isinstance(node, yaml.SequenceNode):
        for entry in _inside(node):
            yield from _places(entry, path, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        name, place = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if name in seen:
            raise ConfigError(f"{place}: {name} is given twice; keep one")
        seen.add(name)
        yield name, place
        yield from _places(value, path, f"{name}.")
