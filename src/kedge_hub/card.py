"""The model card: a model's README, with the metadata that hubs read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined, Template

from kedge.data.chat import PromptForm
from kedge.models.origin import Origin, hub_id, public_name, read_origin
from kedge_base.texts import markdown, printable, shortened
from kedge_base.version import DISTRIBUTION

MAX_SHOWN = 400
"""Maximum characters of a sample's prompt, and of its response."""

PLACE = "path/to/this/folder"
"""Placeholder for the model in the card's code; a push replaces it with the model's id on the hub."""

_TAGS = {"sft": ["sft"], "reward": ["reward-model", "rlhf"], "critic": ["critic", "rlhf"], "ppo": ["rlhf"]}

_PIPELINES = {"reward": "text-classification", "sft": "text-generation", "ppo": "text-generation"}


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
        base_model: The folder or hub id of the base model; absolute paths are not shown.
        facts: Rows of the table of results, in order; numbers are rounded.
        data: The rows used and dropped, by role.
        datasets: Hub ids of the data.
        reward: The rewards of PPO, one line each.
        warnings: The doctor's findings in the run, one line each.
        samples: Responses of the model.
        settings: The configuration that differs from the defaults, as YAML.
        algorithm: PPO, or the variant that the stage `ppo` ran.
        prompt_form: The form of the prompts that the model was trained on.
        adds_special_tokens: Prompts get the tokenizer's special tokens, as in training.
    """

    stage: str
    base_model: str
    facts: Mapping[str, object] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
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
            is_adapter: The model's folder has an adapter.
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


def _title(origin: Origin) -> str:
    """The name of the hub model at the start of the chain, or else of the folder that the training started from."""
    parts = [part for part in (origin.hub_base or origin.base_model).replace("\\", "/").split("/") if part]
    named = [part for part in parts if part not in ("model", ".", "..")]
    return named[-1] if named else "model"


def _rounded(value: object) -> str:
    """Format a number with at most four significant digits; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cut(text: str) -> str:
    return "\n".join(printable(line) for line in shortened(text, MAX_SHOWN).split("\n"))


def _code(text: str) -> str:
    """Format a text as inline code, without backquotes, which would end it."""
    return f"`{printable(text).replace('`', chr(39))}`"


def _fenced(text: str, language: str = "") -> str:
    """Format a code block, with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


@cache
def _template() -> Template:
    """Load the card's template from the package; values filled into it are never parsed as templates."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"code": _code, "cut": _cut, "fenced": _fenced, "markdown": markdown, "rounded": _rounded}
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))
