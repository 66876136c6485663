"""Reads and writes safe YAML: `3e-6` is a number, duplicate keys and aliases are errors; keeps the lines of fields."""

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml

from kedge_base.errors import ConfigError

MAX_BYTES = 2**20

# SafeLoader raises these for `!!timestamp x`, `!!bool x`, `!!int ''` and numbers beyond a float's range.
_BAD_TAGS = (AttributeError, LookupError, OverflowError, TypeError)


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases, dates, octal numbers and numbers to base 60.

    A few aliases can expand to billions of values, or to a value that contains itself. No field is a date, but a folder
    may have a date, 007 or 12:30 as its name. A field for numbers reads the text 010 as ten.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  as in SafeLoader
        first: [each for each in found if each[0].rpartition(":")[2] not in ("timestamp", "int", "float")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # pyright: ignore[reportUnknownMemberType]
            alias = cast(Any, self.peek_event())  # pyright: ignore[reportUnknownMemberType]
            problem = f"aliases such as *{alias.anchor} are not supported; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts which `_Loader` would read as numbers."""


_NUMBERS = {
    "int": r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$",
    # YAML 1.1 reads `3e-6`, which has no dot, as text.
    "float": r"[-+]?((\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+|\d[\d_]*\.[\d_]*|\.\d[\d_]*|\.(?i:inf))$|\.(?i:nan)$",
}
for _kind in (_Loader, _Dumper):
    for _name, _form in _NUMBERS.items():
        _kind.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
            f"tag:yaml.org,2002:{_name}", re.compile(_form), list("-+.0123456789")
        )


@dataclass(frozen=True)
class Document:
    """A file's settings, and the place of each dotted name in it (`run.yaml:12`)."""

    settings: dict[str, Any]
    places: dict[str, str]


def read_document(path: str | Path) -> Document:
    """Read a YAML file with a mapping at the top level; an empty file is an empty mapping.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or has a key twice.
    """
    settings, places = _load(text_of(Path(os.path.expanduser(path))), str(path))
    if settings is None:
        return Document({}, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must consist of `field: value` lines, e.g. `model: path/to/model`")
    return Document(cast("dict[str, Any]", settings), places)


def parse_value(text: str, where: str) -> Any:
    """Parse the value of an override: `0.1`, `3e-6`, `null`, `[a, b]` or plain text.

    Raises:
        ConfigError: The text is not YAML.
    """
    return _load(text, where)[0]


def to_yaml(settings: object, *, width: int = 80) -> str:
    """Write settings in their order, as YAML that is read back unchanged, with lines of about this width."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def text_of(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: It cannot be read, or is too large.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_BYTES:,} bytes, the limit for a configuration")
        return content.decode("utf-8-sig")
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not a valid file name ({error})") from None


def _load(text: str, where: str) -> tuple[Any, dict[str, str]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if node is None:
            return None, {}
        places = dict(_places(node, where, ""))  # before construction, which resolves merge keys in place
        return loader.construct_document(node), places  # pyright: ignore[reportUnknownMemberType]
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text else ""
        raise ConfigError(f"{where}: cannot be read as YAML ({line}{error.problem})") from None
    except RecursionError:
        raise ConfigError(f"{where}: cannot be read as YAML (it is nested too deeply)") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{where}: cannot be read as YAML ({reason})") from None
    except _BAD_TAGS:
        raise ConfigError(f"{where}: cannot be read as YAML (a value does not fit its tag)") from None


def _places(node: yaml.Node, path: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Map each dotted name to its `file:line`; reject duplicate keys at any depth, also in dotted form."""
    if isinstance(node, yaml.SequenceNode):
        for entry in cast("list[yaml.Node]", node.value):
            deque(_places(entry, path, prefix), maxlen=0)  # only checked: several entries may have a key
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        own = (f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}")
        for name, place in chain([own], _places(value, path, f"{own[0]}.")):
            if name in seen:
                raise ConfigError(f"{place}: {name} is given twice; keep one")
            seen.add(name)
            yield name, place
