"""Reads TRL's settings in Python scripts with its trainers, without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from kedge_base.errors import ConfigError

_DATA = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_TRAINER = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "reward_model": "reward_model_path"}


class Computed(str):
    """The expression of a value that a script computes."""


def trainer_named(text: str) -> str:
    """The trainer in the name of a class or script, `ppo` or `grpo`; empty without one."""
    return next((name for name in ("grpo", "ppo") if name in text.lower()), "")


def python_settings(script: str, place: str) -> tuple[dict[str, Any], str]:
    """Return the settings in a Python script by the names of TRL's arguments, and the trainer.

    They are the arguments of its `PPOConfig` or `GRPOConfig`, `LoraConfig` and `load_dataset`, and the model and
    rewards of its trainer. The script is not run: values that it computes are `Computed`.

    Raises:
        ConfigError: The script is not Python.
    """
    try:
        tree = ast.parse(script)
    except SyntaxError as error:
        raise ConfigError(f"{place}: is not Python: {error.msg} in line {error.lineno}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # zero bytes, or nested too deeply
        raise ConfigError(f"{place}: is not Python: {error or 'it is nested too deeply'}") from None
    known: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            known[ast.unparse(node.targets[0])] = node.value
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "trl":
            known |= {each.asname or each.name: ast.Constant(each.name) for each in node.names}
    found: dict[str, Any] = {}
    trainer = ""
    for name, call in _calls(tree):
        given = {word.arg: word.value for word in call.keywords if word.arg}
        if name.endswith("Config") and trainer_named(name):
            trainer = trainer_named(name)
            found |= {each: _value(value, known) for each, value in given.items()}
        elif name.endswith("Trainer") and trainer_named(name):
            trainer = trainer or trainer_named(name)
            found |= {_TRAINER[each]: _value(value, known) for each, value in given.items() if each in _TRAINER}
        elif name == "LoraConfig":
            lora = {_LORA.get(each, f"lora_{each.removeprefix('lora_')}"): value for each, value in given.items()}
            found |= {"use_peft": True, **{each: _value(value, known) for each, value in lora.items()}}
        elif name == "load_dataset":
            given = {**dict(zip(_DATA, call.args, strict=False)), **given}
            if "data_files" in given:  # `path` then names their format
                given = {"path": given["data_files"]}
            read = {_DATA[each]: _value(value, known) for each, value in given.items() if each in _DATA}
            found |= {each: value if isinstance(value, str) else Computed(value) for each, value in read.items()}
    return found, trainer


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a script, with the last part of what is called, such as `PPOConfig`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def _value(node: ast.expr, known: Mapping[str, ast.expr]) -> Any:
    """The value of a literal, or of a name for one; the source of a loaded model; the name of what TRL has; else
    `Computed`.
    """
    for _ in range(9):  # a name may be bound to another name
        if not isinstance(node, ast.Name) or node.id not in known:
            break
        node = known[node.id]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained") and node.args:
        return _value(node.args[0], known)
    if isinstance(node, ast.List):
        values = [_value(each, known) for each in node.elts]
        return values if not any(isinstance(each, Computed) for each in values) else Computed(ast.unparse(node))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Computed(ast.unparse(node))
