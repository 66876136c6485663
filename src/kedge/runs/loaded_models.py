"""Saves models that are passed as Python objects to the run's folder, from which the run loads them like others."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from kedge.models.sources import quiet_transformers
from kedge.models.tokenizers import CONFIG_FILE, save_tokenizer
from kedge.rewards import RewardTerm
from kedge_base.errors import ConfigError, ModelError, OutputError
from kedge_base.machine.durable import copy_tree
from kedge_base.machine.invocation import is_first_rank
from kedge_base.run_folder.output import is_run, writing

LONGEST_WAIT = 600.0
"""Seconds for which a rank waits until the first one has saved a model."""


def is_pretrained(value: object) -> bool:
    """True for a model or tokenizer of transformers. Checks a method, because the classes are slow to import."""
    return hasattr(value, "save_pretrained")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and its tokenizer as Python objects, to use instead of a model's name. A plain pair is equivalent.

        kedge.ppo(model=kedge.LoadedModel(model, tokenizer), prompts=prompts, reward=my_function)

    The objects are not changed: they are saved to `in_memory_models/` in the run's folder, from which the run starts
    and can be resumed.

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
                    f"LoadedModel: the {name} is of type {type(getattr(self, name)).__name__}; "
                    f"expected a transformers {name}"
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
        except Exception as error:  # a model's own code can raise anything
            raise ModelError(f"a model of type {type(self.model).__name__} cannot be saved: {error}") from error


@dataclass
class NamedModels:
    """The loaded models among the arguments of a call, by the name of their folder.

    Attributes:
        folder: Where they are saved.
        models: Found so far.
    """

    folder: Path
    models: dict[str, LoadedModel] = field(default_factory=dict)

    def name(self, value: Any, name: str) -> Any:
        """Replace the loaded models in an argument by the folders where they will be saved.

        Args:
            value: A model, a reward with a weight, or a list or mapping of them; other values are returned as they are.
            name: The name of the model's folder.
        """
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_pretrained, value)):
            value = LoadedModel(*value)
        if isinstance(value, LoadedModel):
            free = name if name not in self.models else f"{name}-{len(self.models) + 1}"
            self.models[free] = value
            return str(self.folder / free)
        if isinstance(value, RewardTerm):
            return replace(value, reward=self.name(value.reward, name))
        if isinstance(value, Mapping):
            return {self.name(spec, name): weight for spec, weight in cast("Mapping[Any, Any]", value).items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.name(each, name) for each in cast("Sequence[Any]", value))
        return value

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Save the models, on the first rank; after an error, remove them unless the run has started.

        Raises:
            ConfigError: The run started from other models.
            OutputError: The folder cannot be written.
        """
        run = self.folder.parent
        resumed = is_run(run)
        created = [path for path in (run, *run.parents) if not path.exists()]
        try:
            for name, loaded in self.models.items():
                if not is_first_rank() and not resumed:
                    _await(self.folder / name)
                    continue
                with tempfile.TemporaryDirectory(prefix="kedge-") as place, writing(self.folder):
                    loaded.save(Path(place))
                    if resumed:
                        _check_same(Path(place), self.folder / name)
                        continue
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                    part = self.folder / f"{name}.part"
                    copy_tree(Path(place), part)
                    part.rename(self.folder / name)
            yield
        except BaseException:
            if not resumed and not is_run(run):
                shutil.rmtree(self.folder, ignore_errors=True)
                for path in created:
                    if path.is_dir() and not any(path.iterdir()):
                        path.rmdir()
            raise


def _await(folder: Path) -> None:
    """Wait until the first rank has saved a model, before the ranks are connected.

    Raises:
        OutputError: It has not.
    """
    until = time.monotonic() + LONGEST_WAIT
    while not folder.is_dir():
        if time.monotonic() > until:
            raise OutputError(f"{folder} has not been saved by the first rank")
        time.sleep(0.05)


def _check_same(new: Path, old: Path) -> None:
    """Reject resuming with other weights or another tokenizer than at the start of the run."""
    names = sorted(str(path.relative_to(new)) for path in new.rglob("*.safetensors"))
    if filecmp.cmpfiles(new, old, names, shallow=False)[0] != names:
        raise ConfigError(f"the model is not the one that the run started from, which is in {old}")
    if _tokenizer(new) != _tokenizer(old):
        raise ConfigError(f"the tokenizer is not the one that the run started from, which is in {old}")


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Read a saved tokenizer's chat templates, special tokens and vocabulary, but not its last padding settings."""
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.jinja")
    }
    for path in (path for path in (folder / "tokenizer.json", folder / CONFIG_FILE) if path.is_file()):
        found |= json.loads(path.read_bytes())
    used = ("chat_template", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    return {name: value for name, value in found.items() if name in used or name.endswith((".jinja", "_token"))}
