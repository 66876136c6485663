"""The model card: what a stranger needs to judge and use a model, with the metadata that model hubs read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kedge.data.chat import PromptForm
from kedge.models.origin import Origin, read_origin
from kedge.system.texts import markdown, names_function, printable
from kedge.system.version import DISTRIBUTION, __version__

__all__ = ["CardSample", "ModelCard", "hub_id", "public_name"]

MAX_SHOWN = 400
"""Characters of a sample's prompt, and of its response."""

PLACE = "path/to/this/folder"
"""Stands for the model in the code; replaced by its id on the hub when it is pushed."""

_STAGES = {
    "sft": "fine-tuned on demonstrations",
    "reward": "as a reward model",
    "critic": "as a critic for PPO",
    "ppo": "trained with PPO",
}
_TAGS = {"sft": ["sft"], "reward": ["reward-model", "rlhf"], "critic": ["critic", "rlhf"], "ppo": ["ppo", "rlhf"]}

_LIMITS = {
    "sft": "It imitates its demonstrations, with their mistakes. Held-out figures are on rows of the same sources.",
    "reward": "Its score is only meaningful in comparison with other responses to the same prompt, and for texts like "
    "those that it was trained on. A policy that is optimized against it finds texts that it overrates.",
    "critic": "It predicts the returns of one policy under one reward, at one temperature; for other responses its "
    "values mean little.",
    "ppo": "It was optimized for its reward, which is not the same as what people want: beyond some distance from the "
    "starting model, a higher score can mean a worse response.",
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_PROMPTS: dict[PromptForm, str] = {
    "conversation": "The prompt is a conversation, rendered with the chat template.",
    "text": "The prompt is plain text, which the model continues; no chat template is applied.",
    "tldr": "The prompt is a forum post in the TL;DR format, and the model writes the summary.",
}


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
        warnings: What the doctor found in the run, one line each.
        samples: Responses of the model.
        settings: The configuration that differs from the defaults, as YAML.
        prompt_form: The form of the prompts that the model was trained on.
        adds_special_tokens: Whether a prompt gets the tokenizer's special tokens, as in training.
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
    prompt_form: PromptForm | None = None
    adds_special_tokens: bool = True

    @property
    def origin(self) -> Origin:
        """What `kedge.json` says: the stage, the base and the start of the chain of stages."""
        earlier = read_origin(self.base_model, hub=False)
        start = hub_id(self.base_model) or (earlier.hub_base if earlier else None)
        return Origin(self.stage, public_name(self.base_model), start, self.prompt_form)

    def render(self, *, score_shift: str = "") -> str:
        """The card as Markdown, with the metadata header that model hubs read.

        Args:
            score_shift: For a reward model, the entry of its configuration that is subtracted from the score.
        """
        origin = self.origin
        usage = {"reward": lambda: _reward_usage(score_shift), "critic": _critic_usage}.get(
            self.stage, self._policy_usage
        )()
        parts = [
            f"# {_title(origin)}, {_STAGES[self.stage]}",
            self._made_from(origin),
            _section("Results", _table(self.facts)),
            _section("Use", *usage),
            _section("Training data", _table(self.data)),
            _section("Reward", *(f"- {_code(line)}" for line in self.reward)),
            _section("Samples", *(_sample(sample) for sample in self.samples)),
            _section("Limitations", _LIMITS[self.stage], *(f"- {markdown(line)}" for line in self.warnings)),
            _section("Reproduce", *self._recipe()),
        ]
        body = "\n\n".join(part for part in parts if part)
        return f"---\n{yaml.safe_dump(self._header(origin), sort_keys=False)}---\n\n{body}\n"

    def _header(self, origin: Origin) -> dict[str, object]:
        pipelines = {"reward": "text-classification", "sft": "text-generation", "ppo": "text-generation"}
        pipeline = {"pipeline_tag": pipelines[self.stage]} if self.stage in pipelines else {}
        base = {"base_model": origin.hub_base} if origin.hub_base else {}
        datasets = {"datasets": list(dict.fromkeys(self.datasets))} if self.datasets else {}
        return {
            "library_name": "transformers",
            **pipeline,
            "tags": ["kedge", *_TAGS[self.stage]],
            **base,
            **datasets,
        }

    def _made_from(self, origin: Origin) -> str:
        chain = origin.hub_base if origin.hub_base and origin.hub_base != origin.base_model else None
        since = f", which started from {_code(chain)}" if chain else ""
        return f"Trained with {DISTRIBUTION} {__version__} from {_code(origin.base_model)}{since}."

    def _policy_usage(self) -> list[str]:
        special = "" if self.adds_special_tokens else ", add_special_tokens=False"
        listing = _POLICY_USAGE.format(place=PLACE, prompt=_EXAMPLES[self.prompt_form or "text"], special=special)
        return [_PROMPTS.get(self.prompt_form or "text", ""), _fenced(listing, "python")]

    def _recipe(self) -> list[str]:
        if not self.settings:
            return []
        return [f"`kedge {self.stage} --config config.yaml` with this file:", _fenced(self.settings, "yaml")]


_EXAMPLES: dict[PromptForm, str] = {
    "conversation": 'messages = [{"role": "user", "content": "How deep is the sea?"}]\n'
    "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)",
    "text": 'prompt = "Once upon a time"',
    "tldr": 'prompt = "SUBREDDIT: r/sailing\\n\\nTITLE: My rope broke\\n\\nPOST: It broke at sea.\\n\\nTL;DR:"',
}

_POLICY_USAGE = """from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{place}"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

{prompt}
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False{special})
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""

_REWARD_USAGE = """from transformers import AutoModelForSequenceClassification, AutoTokenizer

name = "{place}"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name)

text = "Once upon a time" + " there was a ship." + tokenizer.eos_token
inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
score = model(**inputs).logits[0, 0].item() - model.config.{key}"""


def public_name(source: str | os.PathLike[str]) -> str:
    """The name of a model, file or function that says nothing about the machine it is on.

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


def hub_id(source: str) -> str | None:
    """The name as a hub id, without a split; None for a local path."""
    name = source.partition(":")[0]
    is_local = os.path.exists(os.path.expanduser(source)) or os.path.exists(os.path.expanduser(name))
    return name if _HUB_ID.fullmatch(name) and not is_local else None


def _title(origin: Origin) -> str:
    """What the model is a version of: the model at the start of the chain, or else the folder it was trained from."""
    parts = [part for part in (origin.hub_base or origin.base_model).replace("\\", "/").split("/") if part]
    named = [part for part in parts if part not in ("model", ".", "..")]
    return markdown(named[-1] if named else "model")


def _section(title: str, *paragraphs: str) -> str:
    text = "\n\n".join(part for part in paragraphs if part)
    return f"## {title}\n\n{text}" if text else ""


def _table(rows: Mapping[str, object]) -> str:
    lines = "\n".join(f"| {markdown(name)} | {markdown(_rounded(value))} |" for name, value in rows.items())
    return f"| | |\n|---|---|\n{lines}" if lines else ""


def _rounded(value: object) -> str:
    """A number with at most four significant digits; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _sample(sample: CardSample) -> str:
    score = "" if sample.score is None else f"\n\nScore: {_rounded(sample.score)}"
    return f"Prompt:\n\n{_fenced(_cut(sample.prompt))}\n\nResponse:\n\n{_fenced(_cut(sample.response))}{score}"


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


def _reward_usage(key: str) -> list[str]:
    return [
        "The score of a prompt and its response; the text ends with the EOS token.",
        _fenced(_REWARD_USAGE.format(place=PLACE, key=key), "python"),
    ]


def _critic_usage() -> list[str]:
    return [
        "PPO starts from it, with the policy and the reward that it was trained for. It has a value at every token of "
        "a response: the return to expect from there.",
        _fenced(f"kedge ppo --model POLICY --prompts PROMPTS --reward REWARD --critic {PLACE}"),
    ]
