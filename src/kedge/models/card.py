"""Records of a model's origin in its folder: the model card, with the metadata that hubs read, and `kedge.json`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from jinja2 import Environment, StrictUndefined, Template
from transformers.utils.hub import cached_file

from kedge.data.chat import PromptForm
from kedge.errors import ModelError
from kedge.models.sources import find_model, quiet_transformers
from kedge.system.texts import markdown, names_function, printable
from kedge.system.version import DISTRIBUTION, __version__

CARD = "README.md"
ORIGIN_FILE = "kedge.json"
"""In a model's folder. It marks models that kedge made, also on the hub."""

MAX_BYTES = 2**20
MAX_SHOWN = 400
"""Characters of a sample's prompt, and of its response."""

PLACE = "path/to/this/folder"
"""Stands for the model in the code; replaced by its id on the hub when it is pushed."""

_TAGS = {"sft": ["sft"], "reward": ["reward-model", "rlhf"], "critic": ["critic", "rlhf"], "ppo": ["rlhf"]}

_PIPELINES = {"reward": "text-classification", "sft": "text-generation", "ppo": "text-generation"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Origin:
    """How a model was made.

    Attributes:
        stage: The stage that trained it.
        base_model: The model that it was trained from: a hub id, or the name of a folder.
        hub_base: The hub id at the start of the chain of stages; None if it started from a local folder.
        algorithm: PPO, or the relative of it that the stage `ppo` ran.
        prompt_form: The form of the prompts that it was trained on; None if unknown.
        kedge: The version of kedge.
    """

    stage: str
    base_model: str
    hub_base: str | None = None
    prompt_form: PromptForm | None = None
    kedge: str = __version__

    def write(self, folder: Path) -> None:
        """Write `kedge.json`."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=2)
        (folder / ORIGIN_FILE).write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))


def read_origin(source: str | os.PathLike[str], *, hub: bool = True) -> Origin | None:
    """The origin of a model; None if kedge did not make it, or the file is damaged.

    Args:
        source: Its folder, run or hub id.
        hub: Ask the hub if there is no such folder.
    """
    try:
        name = find_model(os.fspath(source))
        path = Path(name) / ORIGIN_FILE if os.path.isdir(name) else _from_hub(name) if hub else None
        if path is None or path.stat().st_size > MAX_BYTES:
            return None
        return _parsed(json.loads(path.read_bytes()))
    except (ModelError, OSError, ValueError, RecursionError):
        return None


def _parsed(values: object) -> Origin | None:
    """An origin from the content of a file, which may come from anyone."""
    if not isinstance(values, Mapping):
        return None
    entries = cast("Mapping[Any, Any]", values)
    texts = {name: printable(entry)[:200] for name, entry in entries.items() if isinstance(entry, str)}
    if "stage" not in texts or "base_model" not in texts:
        return None
    form = texts.get("prompt_form")
    return Origin(
        texts["stage"],
        texts["base_model"],
        texts.get("hub_base"),
        cast("PromptForm", form) if form in get_args(PromptForm) else None,
        texts.get("kedge", ""),
    )


def _from_hub(name: str) -> Path | None:
    try:
        with quiet_transformers():
            found = cached_file(
                name,
                ORIGIN_FILE,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
    except (OSError, ValueError):  # not a hub id, or no such repository
        return None
    return None if found is None else Path(found)


@dataclass(frozen=True)
class CardSample:
    """A response shown in the card."""

    prompt: str
    response: str
    score: float | None = None


@dataclass(frozen=True)
class ModelCard:
    """Contents of the model card. All texts may come from data: they are escaped.

    Attributes:
        stage: Training stage: `sft`, `reward`, `critic` or `ppo`.
        base_model: The folder or hub id of the base model; no absolute path is written.
        facts: Rows of the table of results, in order; numbers are rounded.
        data: The rows used and dropped, by role.
        datasets: Hub ids of the data.
        reward: The rewards of PPO, one line each.
        warnings: The doctor's findings in the run, one line each.
        samples: Responses of the model.
        settings: The configuration that differs from the defaults, as YAML.
        algorithm: PPO, or the relative of it that the stage `ppo` ran.
        prompt_form: The form of the prompts that the model was trained on.
        adds_special_tokens: A prompt gets the tokenizer's special tokens, as in training.
    """

    stage: str
    base_model: str
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    datasets: Sequence[str] = ()
    reward: Sequence[str] = ()
    warnings: Sequence[str] = ()
    samples: Sequence[CardSample] = ()
    settings: str = ""
    algorithm: str = "PPO"
    prompt_form: PromptForm | None = None
    adds_special_tokens: bool = True

    @property
    def origin(self) -> Origin:
        """The content of `kedge.json`: the stage, the base and the start of the chain of stages."""
        earlier = read_origin(self.base_model, hub=False)
        start = hub_id(self.base_model) or (earlier.hub_base if earlier else None)
        return Origin(self.stage, public_name(self.base_model), start, self.prompt_form)

    def render(self, *, score_shift: str = "", is_adapter: bool = False) -> str:
        """The card as Markdown, with the metadata header that model hubs read.

        Args:
            score_shift: For a reward model, the entry of its configuration that is subtracted from the score.
            is_adapter: Its folder has an adapter.
        """
        origin = self.origin
        text = _template().render(
            card=self,
            origin=origin,
            title=_title(origin),
            header=yaml.safe_dump(self._header(origin), sort_keys=False),
            distribution=DISTRIBUTION,
            place=PLACE,
            score_shift=score_shift,
            is_adapter=is_adapter,
        )
        return f"{text.strip()}\n"

    def _header(self, origin: Origin) -> dict[str, object]:
        algorithm = [self.algorithm.lower().replace(". ", "-").replace(" ", "-")] if self.stage == "ppo" else []
        entries = {
            "library_name": "transformers",
            "pipeline_tag": _PIPELINES.get(self.stage),
            "tags": ["kedge", *algorithm, *_TAGS[self.stage]],
            "base_model": origin.hub_base,
            "datasets": list(dict.fromkeys(self.datasets)),
        }
        return {name: entry for name, entry in entries.items() if entry}


def public_name(source: str | os.PathLike[str]) -> str:
    """The name of a model, file or function without details of this machine.

    Hub ids and relative paths stay. An absolute path becomes relative to the working directory, or loses its folders.
    """
    name = os.fspath(source)
    if names_function(name) and ":" in name and not os.path.isdir(name):
        file, _, function = name.rpartition(":")
        return f"{public_name(file)}:{function}" if os.sep in file else name
    path = Path(os.path.expanduser(name))
    if not path.is_absolute():
        return name
    if path.is_relative_to(Path.cwd()) and path != Path.cwd():
        return path.relative_to(Path.cwd()).as_posix()
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def public_settings(value: Any) -> Any:
    """Settings, or one of them, with absolute paths replaced by names."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {public_settings(name): public_settings(entry) for name, entry in entries.items()}  # data.mix: sources
    if isinstance(value, list):
        return [public_settings(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, str) and (value.startswith("~") or os.path.isabs(value)):
        return public_name(value)
    return value


def hub_id(source: str) -> str | None:
    """The name as a hub id, without a split; None for a local path."""
    name = source.partition(":")[0]
    is_local = os.path.exists(os.path.expanduser(source)) or os.path.exists(os.path.expanduser(name))
    return name if _HUB_ID.fullmatch(name) and not is_local else None


def _title(origin: Origin) -> str:
    """The name of the model at the start of the chain, or else of the folder that this one was trained from."""
    parts = [part for part in (origin.hub_base or origin.base_model).replace("\\", "/").split("/") if part]
    named = [part for part in parts if part not in ("model", ".", "..")]
    return named[-1] if named else "model"


def _rounded(value: object) -> str:
    """A number with at most four significant digits; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cut(text: str) -> str:
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return "\n".join(printable(line) for line in shown.split("\n"))


def _code(text: str) -> str:
    """A text as inline code; backquotes inside would end it."""
    return f"`{printable(text).replace('`', chr(39))}`"


def _fenced(text: str, language: str = "") -> str:
    """A block of code, in a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


@cache
def _template() -> Template:
    """The card's template, which is data of the package; its values are never templates."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"code": _code, "cut": _cut, "fenced": _fenced, "markdown": markdown, "rounded": _rounded}
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))
