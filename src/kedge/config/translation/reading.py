"""Reads the settings of other trainers: YAML, Hydra's overrides, Python with TRL's trainers, and shell scripts."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

from kedge.config.loading.yaml_text import parse_value, text_of
from kedge.config.schema.section import flat_names
from kedge.config.translation.trl_scripts import python_settings, trainer_named
from kedge_base.errors import ConfigError

_VERL = re.compile(r"\b(main_(?:ppo|dapo)\w*)(.*)")
_TRL = re.compile(r"(\S+\.py|\btrl\s+(?:ppo|grpo))(?=\s)(.*)")
_END = re.compile(r"[&|;]+|\d?>.*")
_OVERRIDE = re.compile(r"[+~]*(\w+(?:\.\w+)*)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(
    r"""^\s*(?:export\s+)?(\w+)(\+?)=(?:\(((?:[^()]|\$\(\(.*?\)\))*)\)|"([^"]*)"|'([^']*)'|((?:\$\{.*\}|\$\(\(.*?\)\)|\S)*))""",
    re.MULTILINE,
)
_VARIABLE = re.compile(r'\$(\w+)|"?\$\{(\w+)(?:\[@\])?(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}("?)')
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}")
_OPERATORS = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv"}


class Read(NamedTuple):
    """The settings in a file, by dotted name, and the library and the trainer that it names; empty if it names none."""

    settings: dict[str, Any]
    library: str = ""
    trainer: str = ""


def read_settings(path: Path, overrides: list[str]) -> Read:
    """Read the settings in a file, and in overrides of it.

    Args:
        path: YAML (a mapping, or a list of overrides, as in `.hydra/overrides.yaml`); a script that starts verl or a
            script of TRL; or Python with TRL's configuration.
        overrides: `a.b=c`, as Hydra takes them.

    Raises:
        ConfigError: The file cannot be read, or has no settings.
    """
    text = text_of(path)
    content, library, trainer = _content(text, path)
    if not content or not isinstance(content, (dict, list)):
        raise ConfigError(
            f"{path}: is neither YAML with settings, nor a script that starts verl's main_ppo or a script of TRL, nor "
            "Python with TRL's PPOConfig or GRPOConfig"
        )
    listed = cast("list[Any]", content) if isinstance(content, list) else []
    found = flat_names(cast("dict[str, Any]", content)) if isinstance(content, dict) else {}
    for override in (*listed, *overrides):
        if match := _OVERRIDE.fullmatch(str(override)):
            found[match[1]] = parse_value(match[2], match[0])
        elif override in overrides:
            raise ConfigError(f"--set {override}: must be NAME=VALUE")
    if not found:
        raise ConfigError(f"{path}: is a list without overrides such as a.b=c")
    return Read({name: _referred(found, name, value) for name, value in found.items()}, library, trainer)


def _content(text: str, path: Path) -> tuple[Any, str, str]:
    """Settings, or overrides, and the library and the trainer that are named."""
    if path.suffix in (".yaml", ".yml"):
        return parse_value(text, str(path)), "", ""
    if path.suffix == ".py":
        settings, trainer = python_settings(text, str(path))
        return settings, "TRL", trainer
    if command := _command(text, _VERL):
        return command[1], "verl", ""
    if command := _command(text, _TRL):
        return _options(command[1]), "TRL", trainer_named(command[0])
    return None, "", ""


def _options(words: list[str]) -> dict[str, Any]:
    """The options of a command by name: true for one without a value, a list of several values."""
    given: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in words:
        if word.startswith("--"):
            name, sign, value = word.removeprefix("--").partition("=")
            values = given[name.replace("-", "_")] = [parse_value(value, word)] if sign else []
        else:
            values.append(parse_value(word, word))
    return {name: (values[0] if len(values) == 1 else values or True) for name, values in given.items()}


def _referred(settings: Mapping[str, Any], name: str, value: Any) -> Any:
    """The value that Hydra's interpolation stands for: `${a.b}`, `${.b}`, or `${oc.select:a.b,default}`."""
    for _ in range(9):
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if not found:
            break
        target = name.rpartition(".")[0] + found[1] if found[1].startswith(".") else found[1]
        value = settings.get(target, found[2] and parse_value(found[2], name))
    return os.path.expanduser(value) if isinstance(value, str) else value


def _command(script: str, pattern: re.Pattern[str]) -> tuple[str, list[str]] | None:
    """Find a command in a script: the match of `pattern`, and its arguments with variables expanded.

    Conditions are not evaluated: of several assignments before the command, the last one counts.
    """
    text = re.sub(r"^\s*#.*\n", "", script, flags=re.MULTILINE).replace("\\\n", " ")
    command = pattern.search(text)
    if command is None:
        return None
    variables = dict(os.environ)
    for name, adds, *values in _ASSIGNMENT.findall(text[: command.start()]):
        before = f"{variables.get(name, '')} " if adds else ""
        variables[name] = before + _filled(" ".join("".join(values).split()), variables)
    try:
        words = shlex.split(_filled(command[2], variables))
    except ValueError as error:
        raise ConfigError(f"the command with {command[1]} cannot be read: {error}") from None
    return command[1], list(takewhile(lambda word: not _END.fullmatch(word), words))


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Expand variables and arithmetic; expressions that need a shell are unchanged."""

    def value(found: re.Match[str]) -> str:
        held = variables.get(found[1] or found[2]) or (found[3] or "").strip("\"'")
        return held if "[@]" in found[0] else found[0][: found[0].index("$")] + held + (found[4] or "")

    for _ in range(9):  # a default may name another variable
        text = _VARIABLE.sub(value, text)
    return _ARITHMETIC.sub(lambda found: str(computed(found[1].replace("/", "//"), variables)), text)


def computed(text: str, values: Mapping[str, Any]) -> Any:
    """The value of a name, or of an arithmetic expression of names; the text itself if it is neither."""
    if text in values:
        return values[text]
    try:
        return _number(ast.parse(_NAME.sub(lambda found: str(values[found[0]]), text).strip(), mode="eval").body)
    except (SyntaxError, LookupError, ZeroDivisionError):
        return text


def _number(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):
        name = _OPERATORS[type(node.op).__name__]
        found = getattr(operator, name)(_number(node.left), _number(node.right))
        return int(found) if name == "floordiv" else found
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    raise LookupError
