"""The model card of a stage, from its configuration, its data and the files in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kedge.config import Config, field_advice
from kedge.config.presets import FAMILY
from kedge.data import encode_prompt, prompt_form
from kedge.models.origin import hub_id, public_name
from kedge.runs.recipe import recipe_of
from kedge.runs.resuming import CHANGED
from kedge.runs.run import Run
from kedge_base.errors import KedgeError
from kedge_base.estimators import ESTIMATORS
from kedge_base.run_folder.record_format import METRICS_FILE, read_samples
from kedge_base.stage import find_stage
from kedge_base.texts import names_function
from kedge_hub.card import CardSample, ModelCard
from kedge_inspect.diagnosis import diagnose_run
from kedge_inspect.doctor import one_line

NUM_SAMPLES = 2

ALGORITHMS = {"distill": "on-policy distillation"}
"""Names of presets that are neither an estimator's nor simply the preset in capitals."""


def stage_card(
    run: Run,
    facts: Mapping[str, object],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[str],
    ended: bool = False,
) -> ModelCard:
    """The card of a model that a stage saves.

    Args:
        run: The stage's run.
        facts: The most important settings and metrics, in order.
        tokenizer: The model's.
        prompts: Prompts that it was trained on.
        ended: Include the doctor's findings and the last samples; False for checkpoints, which are saved often.
    """
    config = run.config
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
    """Name the algorithm: the last preset that is one, else that of the advantage estimator."""
    family = [preset.name for preset in FAMILY if preset.name in config.preset]
    if not family:
        return config.ppo.estimator_facts.title
    name = max(family, key=config.preset.index)
    estimator = ESTIMATORS.get(name.replace("-", "_"))
    return estimator.title if estimator else ALGORITHMS.get(name, name.upper())


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
    except Exception:  # a damaged log or a bug in a rule must not prevent saving the model
        return []
    return [f"{one_line(finding)}. {finding.means}" for finding in found if finding.severity != "note"]


def _samples(folder: Path) -> list[CardSample]:
    """The last responses of a PPO run."""
    try:
        rows = read_samples(folder)[-NUM_SAMPLES:]
    except KedgeError:  # no samples, or a damaged file
        return []
    return [CardSample(str(row.get("prompt", "")), str(row.get("response", "")), row.get("score")) for row in rows]


def _changed(run: Run) -> str:
    """A comment for the recipe that lists the changes made during the run."""
    changed = run.facts.get(CHANGED)
    return f"# changed during the run: {changed}\n" if changed else ""


def _adds_special_tokens(tokenizer: PreTrainedTokenizerBase, rendered: bool) -> bool:
    """True if `tokenizer(prompt)` with its default special tokens gives the ids of training.

    A rendered conversation already contains its special tokens.
    """
    return not rendered and tokenizer.encode("a") == encode_prompt(tokenizer, "a")
