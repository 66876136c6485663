"""The model card of a stage, from its configuration, its data and the files in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase

from kedge.config import Config, field_advice
from kedge.config.presets import FAMILY
from kedge.data import encode_prompt, prompt_form
from kedge.errors import KedgeError
from kedge.inspect.diagnosis import diagnose_run
from kedge.inspect.doctor import one_line
from kedge.inspect.resolved import CRITIC_FREE
from kedge.logs.json_lines import METRICS_FILE, SAMPLES_FILE, read_samples
from kedge.models import ModelCard
from kedge.models.card import CardSample, hub_id, public_name, public_settings
from kedge.runs.resuming import CHANGED
from kedge.runs.run import Run
from kedge.system.stage import find_stage
from kedge.system.texts import names_function

NUM_SAMPLES = 2

ALGORITHMS = {
    "dr-grpo": "Dr. GRPO",
    "dr_grpo": "Dr. GRPO",
    "distill": "on-policy distillation",
    "to_go": "PPO without a critic",
    "total": "PPO without a critic",
}
"""Names of presets and advantages other than their capitals."""

NOT_SHOWN = ("out", "preset", "runtime", "checkpoint", "push")
"""Parts of the configuration that do not affect the result, or only describe the machine."""


def stage_card(
    config: Config,
    run: Run,
    facts: Mapping[str, object],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[str],
    ended: bool = False,
) -> ModelCard:
    """The card of a model that a stage saves.

    Args:
        config: The stage's configuration.
        run: Its run.
        facts: Results: settings and metrics that matter, in order.
        tokenizer: The model's.
        prompts: Prompts that it was trained on.
        ended: Include the findings on the run and its last samples; not in checkpoints, which are saved often.
    """
    stage = find_stage(run.stage)
    form = prompt_form(prompts, template=config.data.template)
    sources = [source for usage in run.data.roles.values() for source in usage.sources]
    return ModelCard(
        stage.name,
        str(stage.starting_model(config)),
        facts,
        data=run.data.facts(),
        datasets=[name for source in sources if (name := hub_id(source))],
        reward=_rewards(config) if stage.samples else (),
        warnings=_warnings(run.folder) if ended else (),
        samples=_samples(run.folder) if ended else (),
        settings=f"{_changed(run)}{recipe_of(config)}",
        algorithm=algorithm_of(config),
        prompt_form=form,
        adds_special_tokens=_adds_special_tokens(tokenizer, form == "conversation"),
    )


def algorithm_of(config: Config) -> str:
    """The name of the last preset that is an algorithm; without one that of the advantage if it needs no critic."""
    advantages = [config.ppo.estimator] if config.ppo.estimator in CRITIC_FREE else []
    family = [preset.name for preset in FAMILY if preset.name in config.preset]
    name = [*advantages, *sorted(family, key=config.preset.index)][-1:] or ["PPO"]
    return ALGORITHMS.get(name[0], name[0].upper())


def _rewards(config: Config) -> list[str]:
    """One line per term of the reward."""
    kinds = {True: "a function", False: "a reward model"}
    return [
        f"{public_name(term.source)}: {kinds[names_function(term.source)]}, weight {term.weight:g}"
        for term in config.reward
    ]


def _warnings(folder: Path) -> list[str]:
    """The doctor's findings so far, apart from notes."""
    try:
        found = diagnose_run(folder, advice=field_advice) if (folder / METRICS_FILE).is_file() else []
    except KedgeError:  # a damaged log must not cost the model
        return []
    return [f"{one_line(finding)}. {finding.means}" for finding in found if finding.severity != "note"]


def _samples(folder: Path) -> list[CardSample]:
    """The last responses of a PPO run."""
    if not (folder / SAMPLES_FILE).is_file():
        return []
    try:
        rows = read_samples(folder)[-NUM_SAMPLES:]
    except KedgeError:
        return []
    return [CardSample(str(row.get("prompt", "")), str(row.get("response", "")), row.get("score")) for row in rows]


def _changed(run: Run) -> str:
    """A line on what was changed during the run, for its recipe."""
    changed = run.facts.get(CHANGED)
    return f"# changed during the run: {changed}\n" if changed else ""


def recipe_of(config: Config) -> str:
    """The settings that differ from kedge's defaults, as YAML, without the paths of the machine."""
    changed = config.model_dump(mode="json", exclude_defaults=True, exclude=set(NOT_SHOWN))
    seed = {"runtime": {"seed": config.runtime.seed}}
    return yaml.safe_dump(public_settings({**changed, **seed}), sort_keys=False, allow_unicode=True)


def _adds_special_tokens(tokenizer: PreTrainedTokenizerBase, rendered: bool) -> bool:
    """True if plain `tokenizer(prompt)` adds special tokens to give the ids of the training.

    A rendered conversation has its special tokens already.
    """
    return not rendered and tokenizer.encode("a") == encode_prompt(tokenizer, "a")
