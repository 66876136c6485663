"""Models given as Python objects: saved into the run's folder, from where the run loads them like any other."""

from __future__ import annotations

import filecmp
import functools
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from kedge.config import full_name
from kedge.errors import ConfigError, ModelError
from kedge.models.pretrained import quiet_transformers
from kedge.models.tokenizers import save_tokenizer
from kedge.rewards import RewardTerm
from kedge.runs.claim import claim_free_folder, claims
from kedge.system.durable import copy_tree
from kedge.system.invocation import refuse_nested_run
from kedge.system.output import IN_MEMORY_FOLDER, check_output, is_run, writing

__all__ = ["LoadedModel", "is_pretrained", "with_loaded_models"]

P = ParamSpec("P")
R = TypeVar("R")

MODEL_ARGUMENTS = {
    "model": "model",
    "policy": "model",
    "critic": "critic",
    "against": "against",
    "judge": "judge",
    "labeler": "labeler",
    "reward": "reward",
}
"""The arguments of the stages' functions that name models, and the names of their folders."""


def is_pretrained(value: object) -> bool:
    """Whether a value is a model or tokenizer of transformers, by a method: its classes are slow to import."""
    return hasattr(value, "save_pretrained")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and its tokenizer as Python objects, wherever a model is named; the pair alone is the same.

        kedge.ppo(model=kedge.LoadedModel(model, tokenizer), prompts=prompts, reward=my_function)

    The objects are not changed: they are saved to `in_memory_models/` in the run's folder, and the run starts from
    there, so that it can also be resumed from there.

    Attributes:
        model: A transformers model: a causal language model, or a sequence classifier with one label as a reward model.
        tokenizer: Its tokenizer, with the chat template if it has one.
    """

    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        for name, method in (("model", "forward"), ("tokenizer", "encode")):
            if not is_pretrained(getattr(self, name)) or not hasattr(getattr(self, name), method):
                raise ConfigError(
                    f"LoadedModel: the {name} is a {type(getattr(self, name)).__name__}; expected a transformers {name}"
                )

    def save(self, folder: Path) -> None:
        """Save model and tokenizer.

        Raises:
            ModelError: transformers refuses.
        """
        try:
            with quiet_transformers():
                self.model.save_pretrained(folder)
                save_tokenizer(self.tokenizer, folder)
        except Exception as error:  # whatever a model's own code raises
            raise ModelError(f"a {type(self.model).__name__} cannot be saved: {error}") from error


def with_loaded_models(stage: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for the function of a stage: its models may be `LoadedModel` objects.

    They are saved into the run's folder and replaced by their names. After an error, they are removed unless the run
    has started. Other libraries' names, such as TRL's, are answered before Python misses an argument.

    Args:
        stage: The stage, whose name is that of the default output folder.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **arguments: P.kwargs) -> R:
            refuse_nested_run()
            given, found = cast("dict[str, Any]", dict(arguments)), _Found()
            for name in (name for name in given if name not in own):
                full_name(name, stage, value=given[name])
            given |= {
                name: found.name(given[name], folder) for name, folder in MODEL_ARGUMENTS.items() if name in given
            }
            if not found.models:
                return function(*args, **arguments)
            if given.get("dry_run"):
                return _with_temporary_folder(found.models, given, cast("Callable[..., R]", function))
            with claims():
                run = _output(given.get("out"), stage)
                with _saved(found.models, run / IN_MEMORY_FOLDER):
                    named = {**_with_names(given, run / IN_MEMORY_FOLDER), "out": str(run)}
                    return cast("Callable[..., R]", function)(*args, **named)

        return call

    return decorate


def _output(out: str | Path | None, stage: str) -> Path:
    if out is None:
        return claim_free_folder(Path("runs") / stage)
    return Path(out).expanduser() if is_run(Path(out)) else check_output(out)


@dataclass(frozen=True)
class _Name:
    """Stands for a loaded model in the arguments: the name of its folder."""

    name: str


@dataclass
class _Found:
    """The loaded models of one call, by the name of their folder."""

    models: dict[str, LoadedModel] = field(default_factory=dict)

    def name(self, value: Any, name: str) -> Any:
        """The argument with names in place of its loaded models."""
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_pretrained, value)):
            value = LoadedModel(*value)
        if isinstance(value, LoadedModel):
            free = name if name not in self.models else f"{name}-{len(self.models) + 1}"
            self.models[free] = value
            return _Name(free)
        if isinstance(value, RewardTerm):
            return replace(value, reward=self.name(value.reward, name))
        if isinstance(value, Mapping):
            return {self.name(spec, name): weight for spec, weight in cast("Mapping[Any, Any]", value).items()}
        if isinstance(value, (list, tuple)):
            return [self.name(each, name) for each in cast("Sequence[Any]", value)]
        return value


def _with_names(value: Any, folder: Path) -> Any:
    """The arguments with the models' folders."""
    if isinstance(value, _Name):
        return str(folder / value.name)
    if isinstance(value, RewardTerm):
        return replace(value, reward=_with_names(value.reward, folder))
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return {_with_names(key, folder): _with_names(entry, folder) for key, entry in entries.items()}
    return [_with_names(each, folder) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def _with_temporary_folder(
    models: Mapping[str, LoadedModel], given: Mapping[str, Any], function: Callable[..., R]
) -> R:
    """Call a function that writes nothing; the models are saved only while it runs."""
    with tempfile.TemporaryDirectory(prefix="kedge-") as place:
        for name, loaded in models.items():
            loaded.save(Path(place) / name)
        return function(**_with_names(given, Path(place)))


@contextmanager
def _saved(models: Mapping[str, LoadedModel], folder: Path) -> Iterator[None]:
    """Save the models; after an error, remove them unless the run has started.

    Raises:
        ConfigError: The run started from other models.
        OutputError: The folder cannot be written.
    """
    run, resumed = folder.parent, is_run(folder.parent)
    created = [path for path in (run, *run.parents) if not path.exists()]
    try:
        for name, loaded in models.items():
            with tempfile.TemporaryDirectory(prefix="kedge-") as place, writing(folder):
                loaded.save(Path(place))
                if resumed:
                    _check_same(Path(place), folder / name)
                    continue
                shutil.rmtree(folder / name, ignore_errors=True)
                copy_tree(Path(place), folder / name)
        yield
    except BaseException:
        if not resumed and not is_run(run):
            shutil.rmtree(folder, ignore_errors=True)
            for path in created:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
        raise


def _check_same(new: Path, old: Path) -> None:
    """Refuse to resume with other weights than the run started from."""
    names = sorted(str(path.relative_to(new)) for path in new.rglob("*.safetensors"))
    if filecmp.cmpfiles(new, old, names, shallow=False)[0] != names:
        raise ConfigError(f"the model is not the one that the run started from, which is in {old}")
