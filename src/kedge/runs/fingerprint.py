"""Content hashes of a run's models, data and code, to detect on resuming that a file has changed."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from inspect import getsource, isclass, isfunction
from pathlib import Path
from typing import Any, cast

from huggingface_hub import constants

from kedge.config import Config
from kedge.data.sources import is_data_file
from kedge.logs.json_lines import plain_json
from kedge.models import find_model
from kedge.models.adapters import is_adapter, read_adapter
from kedge.training.checkpoint.files import record_file
from kedge_base.errors import DataError
from kedge_base.packages import is_own_module
from kedge_base.run_folder.output import CHECKPOINTS, FINISHED_FILE, MODEL_FOLDER, checkpoints_in
from kedge_base.stage import stages, value_of
from kedge_base.texts import names_function, names_judge


def _code_files(source: str) -> list[Path]:
    """The files of a function named `path/to/file.py:function` or `package.module:function`: its own file first, then
    those of modules that it imports from its folder or the working directory.

    Imports are read from the source, without running anything: a file that cannot be parsed does not hide others, and
    packages need no `__init__.py`, which the standard library's ModuleFinder does not allow for.
    """
    name = source if source.endswith(".py") else source.rpartition(":")[0]
    here = Path.cwd()
    path = Path(os.path.expanduser(name))
    first = [path] if name.endswith(".py") else list(_module_files(name.split("."), here))
    found = dict.fromkeys(path for path in first if os.path.isfile(path))
    waiting = list(found)
    roots = [*(path.resolve().parent for path in waiting[:1] if name.endswith(".py")), here]
    while waiting:
        for path in _imported_files(waiting.pop(), roots):
            if path not in found:
                found[path] = None
                waiting.append(path)
    return list(found)


def _imported_files(path: Path, roots: list[Path]) -> Iterator[Path]:
    """The files that a file imports from these folders, or from its own."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # reported when the file is imported
        return
    for node in ast.walk(tree):
        names: list[list[str]] = []
        places = roots
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            names = [module, *([*module, alias.name] for alias in node.names)]
            folders = path.resolve().parents
            places = [folders[node.level - 1]] if 0 < node.level <= len(folders) else roots
        for name in names:
            if name and name[0] not in sys.stdlib_module_names:
                for place in places:
                    yield from _module_files(name, place)


def _module_files(name: list[str], root: Path) -> Iterator[Path]:
    """The files that importing a dotted name from a folder runs: its packages' and its own."""
    for depth in range(1, len(name) + 1):
        place = root.joinpath(*name[:depth])
        for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if os.path.isfile(path):
                yield path


MODEL_FILES = (
    *("*.safetensors", "value_head/*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.py"),
    *("*.jinja", "additional_chat_templates/*.jinja"),
)

CODE = ".code"
"""Suffix of a field's name for the functions that were passed for it from Python."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def input_hashes(
    config: Config, in_memory: Mapping[str, object] | None = None, *, files: dict[Path, str] | None = None
) -> dict[str, str]:
    """Hash each local model, data set and reward that a configuration names, by field.

    Hub ids are not hashed, since their content may change without a fixed revision; nor are objects passed in memory,
    nor data that a function reads. Functions and classes passed in memory are hashed by their source, as `reward.code`.
    For a function given by name, the modules that it imports from its folder or the working directory are also hashed.
    Rows passed in memory are hashed as JSON, with the `repr` of objects.

    Args:
        config: The resolved configuration.
        in_memory: Objects passed from Python instead of configured fields, by dotted name.
        files: The hash of each file that has been read, to which the others are added.
    """
    files = {} if files is None else files
    hashes = {name: _hash_of(sources, files) for name, sources in _sources(config).items()}
    for name, value in (in_memory or {}).items():
        if name.startswith("data.") and isinstance(value, (list, tuple)):
            hashes[name] = _digest([json.dumps(_stable(value)).encode()])
        hashes[f"{name}{CODE}"] = _digest(_code(value))
    return {name: value for name, value in hashes.items() if value}


def _code(value: object) -> Iterator[bytes]:
    """The source of functions and classes in the user's code. A lambda's lines also contain the call around it."""
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        given: Any = getattr(entry, "reward", entry)
        is_own = (isfunction(given) or isclass(given)) and not is_own_module(str(given.__module__))
        if is_own and given.__name__ != "<lambda>":
            for part in (given, *filter(isfunction, vars(given).values())):  # a notebook's class has no source
                with suppress(OSError, TypeError):
                    yield getsource(part).encode()


def _stable(value: object) -> Any:
    """Convert a value to JSON types that are the same in every process: sets are sorted, objects lose their address."""
    if isinstance(value, Mapping):
        return {str(key): _stable(entry) for key, entry in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_stable(entry) for entry in cast("Sequence[object]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_stable(entry)) for entry in cast("Set[object]", value))
    plain = plain_json(value)
    return plain if isinstance(value, str) or not isinstance(plain, str) else _ADDRESS.sub("", plain)


def input_hashes_of_all(configs: Sequence[Config]) -> list[dict[str, str]]:
    """The `input_hashes` of several configurations; the files that they share are read once."""
    files = dict[Path, str]()
    return [input_hashes(config, files=files) for config in configs]


def _sources(config: Config) -> dict[str, list[str]]:
    """The models, data, rewards and functions that a configuration names, by field."""
    models = {
        "model": config.model,
        "reward_model.base": config.reward_model.base,
        "critic.base": config.critic.base if config.critic.names_base else None,
        "ppo.reference": config.ppo.reference,
        "ppo.critic_init": config.ppo.critic_init if config.ppo.names_critic else None,
    }
    data = ("demonstrations", "comparisons", "prompts", "eval_prompts", "pretraining")
    added = [(stage.adds_sections, name) for stage in stages().values() for name in stage.inputs]
    own = {name: value_of(config, name) for sections, name in added if name.partition(".")[0] in sections}
    own |= {name: value_of(config, name) for name in ("data.chat_template", "environment.source", "judge.rubric")}
    return {
        **{name: [find_model(source)] for name, source in models.items() if source},
        **{f"data.{name}": list(getattr(config.data, name)) for name in data},
        **{name: [value] for name, value in own.items() if value},
        **{
            f"ppo.{name}": [getattr(config.ppo, name)]
            for name in ("advantage", "policy_loss")
            if names_function(str(getattr(config.ppo, name)))
        },
        "evaluate.judge": [_place(config.evaluate.judge)] if config.evaluate.judge else [],
        "rlhf.labeler": [] if config.rlhf.labeler is None or config.rlhf.asks_people else [_place(config.rlhf.labeler)],
        "reward": [_place(term.source) for term in config.reward],
    }


def hub_revisions(config: Config) -> dict[str, str]:
    """The revisions of models and data sets from a hub, as they are in its cache."""
    found: dict[str, str] = {}
    for name in itertools.chain(*_sources(config).values()):
        for kind in ("models", "datasets"):
            cached = f"{kind}--{name.partition(':')[0].replace('/', '--')}"
            with suppress(OSError):
                found[name] = Path(constants.HF_HUB_CACHE, cached, "refs", "main").read_text("utf-8").strip()
    return found


def outdated_models(config: Config) -> list[str]:
    """One line per named model whose unfinished run has a newer checkpoint: it was extended, and then killed."""
    against = [find_model(config.evaluate.against)] if config.evaluate.against else []
    named = dict.fromkeys(Path(name) for name in (*itertools.chain(*_sources(config).values()), *against))
    runs = [each.parent for each in named if each.name == MODEL_FOLDER and each.is_dir()]
    return [
        f"{run} has not finished, and its model is older than its checkpoint of update {update}, which {run}@{update} "
        "names"
        for run in runs
        if not (run / FINISHED_FILE).exists()
        for update, newest in checkpoints_in(run / CHECKPOINTS)[-1:]
        if newest.stat().st_mtime_ns > (run / MODEL_FOLDER).stat().st_mtime_ns
    ]


def lost_inputs(
    config: Config, saved: Mapping[str, str], current: Mapping[str, str], *, allowed: Collection[str] = ()
) -> list[str]:
    """One line per field whose files, or rows, are no longer found, for example because of a relative path.

    Args:
        config: The configuration to resume with.
        saved: Fingerprint of the run.
        current: Fingerprint of the current files.
        allowed: Fields, or whole sections, that may differ.
    """
    sources = {name: ", ".join(each) for name, each in _sources(config).items()}
    here = f"is not found in {Path.cwd()}; resume from the folder in which the run was started"
    return [
        f"{name} was given from Python, or as text; give it again in the same way"
        if found.startswith("python:")
        else f"{name}: {found} {'is not found' if os.path.isabs(os.path.expanduser(found)) else here}"
        for name in saved
        if name not in current and not _is_part(name, allowed)
        if (found := sources.get(name))
    ]


def changed_inputs(saved: Mapping[str, str], current: Mapping[str, str], *, allowed: Collection[str] = ()) -> list[str]:
    """One line per field with a model or data that changed since the run started.

    Args:
        saved: Fingerprint of the run.
        current: Fingerprint of the current files.
        allowed: Fields, or whole sections, that may differ.
    """
    # The source of a function is not always known, for example in a process that reads it from standard input.
    unknown = [name for name in saved.keys() ^ current.keys() if name.endswith(CODE)]
    differing = [name for name in {**saved, **current} if saved.get(name) != current.get(name) and name not in unknown]
    return [
        f"{name}: the {'code has' if name.endswith(CODE) else 'files have'} changed since the run started"
        for name in differing
        if not _is_part(name, allowed)
    ]


def _is_part(name: str, allowed: Collection[str]) -> bool:
    return any(name == whole or name.startswith(f"{whole}.") for whole in allowed)


def _hash_of(sources: Iterable[str], files: dict[Path, str]) -> str:
    """Hash all files that the names refer to; empty without files. The hash of each is read from `files`, or added."""
    found = [each for source in sources for each in (*_files(source), *_base_files(source))]
    try:
        files |= {path: record_file(path).sha256 for _, path in found if path not in files}
        return _digest(f"{name} {files[path]}\n".encode() for name, path in found)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}") from error


def _place(source: str) -> str:
    """Return the name of a function unchanged, or the location of a model."""
    return source if names_function(source) else find_model(source)


def _base_files(source: str) -> list[tuple[str, Path]]:
    """The files of the model that an adapter belongs to."""
    return _files(read_adapter(source).base) if is_adapter(os.path.expanduser(source)) else []


def _files(source: str) -> list[tuple[str, Path]]:
    """The files that a name refers to, by name: the file itself, a folder's data or model files, or code."""
    path = Path(os.path.expanduser(source))
    before_colon = Path(os.path.expanduser(source.rpartition(":")[0] or source))
    folder = path if os.path.exists(path) else before_colon  # folder:split is a part of the folder
    if os.path.isdir(folder):
        data = {file for file in folder.rglob("*") if is_data_file(file)}
        found = data | {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
        files = sorted(file for file in found if os.path.isfile(file))  # skips folders and pipes with such names
        return [(file.relative_to(folder).as_posix(), file) for file in files]
    if names_judge(source):
        return []
    if names_function(source):
        return [(file.name, file) for file in _code_files(source)]
    return next(([(file.name, file)] for file in (path, before_colon) if os.path.isfile(file)), [])


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    empty = True
    for piece in pieces:
        digest.update(piece)
        empty = False
    return "" if empty else digest.hexdigest()
