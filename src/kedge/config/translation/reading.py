"""Reads the settings of other trainers: YAML, Hydra's overrides, and shell scripts that start verl."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kedge.config.loading.yaml_text import parse_value, text_of
from kedge_base.errors import ConfigError

_COMMAND = re.compile(r"\bmain_(?:ppo|dapo)\w*(.*)")
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


def read_settings(path: Path, overrides: list[str]) -> dict[str, Any]:
    """The settings in a file, and in overrides of it, by dotted name.

    Args:
        path: YAML (a mapping, or a list of overrides, as in `.hydra/overrides.yaml`), or a script that starts verl.
        overrides: `a.b=c`, as Hydra takes them.

    Raises:
        ConfigError: The file cannot be read, or has no settings.
    """
    text = text_of(path)
    content: Any = parse_value(text, str(path)) if path.suffix in (".yaml", ".yml") else _arguments(text)
    if not content or not isinstance(content, (dict, list)):
        raise ConfigError(
            f"{path}: is neither YAML with settings nor a script with verl's main_ppo; of TRL, only YAML is read"
        )
    listed = cast("list[Any]", content) if isinstance(content, list) else []
    found: dict[str, Any] = {} if listed else _flat(content, "")
    for override in (*listed, *overrides):
        if match := _OVERRIDE.fullmatch(str(override)):
            found[match[1]] = parse_value(match[2], match[0])
        elif override in overrides:
            raise ConfigError(f"--set {override}: must be NAME=VALUE")
    return {name: _referred(found, name, value) for name, value in found.items()}


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(each, f"{name}.{key}" if name else str(key)) for key, each in cast("dict[Any, Any]", value).items())
    return {inner: each for part in parts for inner, each in part.items()}


def _referred(settings: Mapping[str, Any], name: str, value: Any) -> Any:
    """The value that Hydra's interpolation stands for: `${a.b}`, `${.b}`, or `${oc.select:a.b,default}`."""
    for _ in range(9):
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if not found:
            break
        target = name.rpartition(".")[0] + found[1] if found[1].startswith(".") else found[1]
        value = settings.get(target, found[2] and parse_value(found[2], name))
    return os.path.expanduser(value) if isinstance(value, str) else value


def _arguments(script: str) -> list[str]:
    """The arguments of the command of a script that starts verl, with the script's variables filled in.

    Conditions are not evaluated: of several assignments before the command, the last one counts.
    """
    text = re.sub(r"^\s*#.*\n", "", script, flags=re.MULTILINE).replace("\\\n", " ")
    command = _COMMAND.search(text)
    variables = dict(os.environ)
    for name, adds, *values in _ASSIGNMENT.findall(text[: command.start()] if command else ""):
        before = f"{variables.get(name, '')} " if adds else ""
        variables[name] = before + _filled(" ".join("".join(values).split()), variables)
    try:
        return shlex.split(_filled(command[1], variables)) if command else []
    except ValueError as error:
        raise ConfigError(f"the command of verl cannot be read: {error}") from None


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Fill in variables and arithmetic; what needs a shell stays as it is."""

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
