"""Settings of other libraries: those of a run under kedge's names, and remedies in the library's own words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kedge_base.libraries import LIBRARIES, NUMBERS, OTHER_UNIT
from kedge_inspect.abroad.trainers import Trainer
from kedge_inspect.record import RunRecord, is_number

if TYPE_CHECKING:
    from kedge_inspect.doctor.rule import Change

SECTIONS = {"sft": "sft", "reward": "reward_model"}
KEDGE_ONLY = re.compile(
    r"\b(ppo|rollout|data|checkpoint|runtime|reward_functions)\.[a-z_]+|\bkedge\.|\.jsonl?\b|\.log\b"
    r"|^completions are texts"
)

STABLE_BASELINES = {
    "control.learning_rate": "learning_rate",
    "control.entropy_coef": "ent_coef",
    "control.num_envs": "n_envs",
    "control.total_steps": "total_timesteps",
    "control.early_stop_kl": "target_kl",
}
SWITCHES = {
    "algorithm.kl_ctrl.kl_coef": "algorithm.use_kl_in_reward",
    "actor_rollout_ref.actor.kl_loss_coef": "actor_rollout_ref.actor.use_kl_loss",
}
"""Arguments that have an effect only if another one is true; verl's configuration always has both."""

LARGEST = 1e300
"""Numbers from here on, and NaN, are not read."""

NAMES_OF_ESTIMATORS = ("algorithm.adv_estimator", "algo.advantage.estimator", "advantage_estimator")
ESTIMATORS = {
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "group_norm": "grpo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++_baseline",
}
"""Advantages by the names of verl and OpenRLHF, where kedge has another one."""


@dataclass(frozen=True)
class Counterpart:
    """An argument of another library.

    Attributes:
        argument: Its name.
        field: kedge's field.
        is_carried: Whether a number means the same in both.
        is_word: Whether it stands for a single value of the field.
        values: The library's values by kedge's.
    """

    argument: str
    field: str
    is_carried: bool = False
    is_word: bool = False
    values: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def is_off(self, settings: Mapping[str, Any]) -> bool:
        """True if another setting of the run turns it off."""
        return settings.get(SWITCHES.get(self.argument, "")) is False


@cache
def counterparts(trainer: Trainer) -> tuple[Counterpart, ...]:
    """The arguments of a trainer that have a counterpart in kedge, in the order of its tables."""
    if trainer.library not in LIBRARIES:
        return tuple(Counterpart(name, field, is_carried=True) for field, name in STABLE_BASELINES.items())
    tables = LIBRARIES[trainer.library]
    rows = [row for title in trainer.tables or tables if title for row in tables[title]]
    return tuple(made for names, here in rows for made in _counterparts(trainer, names, here))


def _counterparts(trainer: Trainer, names: str, here: str) -> Iterator[Counterpart]:
    own = re.search(rf"\bin {trainer.stage} (`.*)", here, re.IGNORECASE)
    here = own[1] if own else here
    lead = re.match(r"`([a-z_]+\.[a-z_.]+)(=?)", here)
    if lead is None:
        return
    name = lead[1]
    if trainer.stage in SECTIONS and name.startswith("ppo."):
        name = f"{SECTIONS[trainer.stage]}.{name.removeprefix('ppo.')}"
    is_carried = name in NUMBERS and not lead[2] and not OTHER_UNIT.search(here)
    values = dict(re.findall(r"(\w+) for (\w+)", here))
    for argument in names.split():
        if trainer.stage != "ppo" and argument.startswith("actor"):
            continue  # of OpenRLHF's PPO script alone
        yield Counterpart(argument, name, is_carried, bool(lead[2]), values)


def translate_settings(
    trainer: Trainer, settings: Mapping[str, Any], terms: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """The known settings of a run, section by section, under kedge's names.

    Args:
        trainer: The trainer.
        settings: Its settings under its own names.
        terms: The weights of its reward functions, if known.
    """
    config: dict[str, Any] = {name: {} for name in ("ppo", "rollout", "sft", "reward_model")}
    for each in counterparts(trainer):
        value = settings.get(each.argument)
        section, _, name = each.field.partition(".")
        if each.is_carried and is_number(value) and abs(value) < LARGEST and not each.is_off(settings):
            # A file may have a temperature of 1 instead of 1.0, which can be raised by less than a whole number.
            number = value if name.startswith(("num_", "max_", "total_")) else float(value)
            config.setdefault(section, {}).setdefault(name, number)
    if trainer.stage == "ppo":
        config["ppo"] |= {name: value for name, value in _of_algorithm(trainer, settings) if value is not None}
        config["rollout"] |= {name: value for name, value in _of_sampling(trainer, settings) if value is not None}
    if terms:
        config["reward"] = [{"name": name, "weight": weight} for name, weight in terms.items()]
    return config


def _of_algorithm(trainer: Trainer, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of `ppo` that have other forms in other libraries."""
    if trainer.key == "trl-grpo":
        divides = str(settings.get("scale_rewards", "group"))
        yield "advantage", {"none": "dr_grpo", "False": "dr_grpo"}.get(divides, "grpo")
        yield "kl_in", "loss"
        yield "ratio", settings.get("importance_sampling_level")
        yield "critic", "none"
        steps = settings.get("steps_per_generation")
        yield "num_minibatches", steps and max(1, steps // (settings.get("gradient_accumulation_steps") or 1))
        yield "aggregation", {"grpo": "sequence"}.get(str(settings.get("loss_type")), "token")
    elif trainer.key == "trl-rloo":
        yield "advantage", "rloo"
        yield "ratio", "sequence"
        yield "critic", "none"
        yield "whiten_advantages", bool(settings.get("normalize_advantages"))
    elif trainer.key == "trl-ppo":
        yield "advantage", "gae"
        yield "critic", "separate"
    else:
        estimator = next((settings[name] for name in NAMES_OF_ESTIMATORS if name in settings), None)
        named = ESTIMATORS.get(str(estimator), estimator)
        flat = settings.get("algorithm.norm_adv_by_std_in_grpo") is False and named == "grpo"
        yield "advantage", "dr_grpo" if flat else named
        in_loss = any(map(settings.get, ("actor_rollout_ref.actor.use_kl_loss", "algo.kl.use_loss", "use_kl_loss")))
        yield "kl_in", "loss" if in_loss else None
        yield "kl_coef", 0.0 if all(settings.get(name) is False for name in SWITCHES.values()) else None
        batch, mini = map(settings.get, ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"))
        if is_number(batch) and is_number(mini) and 0 < mini <= batch < LARGEST:
            yield "num_minibatches", int(batch // mini)


def _of_sampling(trainer: Trainer, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of `rollout` that have other forms in TRL."""
    responses = settings.get("num_generations")
    batch = settings.get("generation_batch_size")
    if responses and batch:
        yield "num_prompts", max(1, batch // responses)
    yield "missing_eos_score", "mask" if settings.get("mask_truncated_completions") else None
    penalty = settings.get("missing_eos_penalty")
    yield "missing_eos_score", None if penalty is None else {"subtract": penalty}


def in_words_of(run: RunRecord, change: Change) -> str:
    """A change in the words of the run's library; empty if it has no such setting."""
    assert run.trainer is not None
    if (own_name := f" ({change.field})") in change.text and change.value is None and change.direction == "switch":
        return change.text.replace(own_name, "")  # an instruction that does not depend on the library
    verb, _, rest = change.text.partition(change.field)
    same = (each for each in counterparts(run.trainer) if each.field == change.field)
    found = [each for each in same if not each.is_off(run.arguments)]
    found.sort(key=lambda each: each.argument not in run.arguments)
    leaf = change.field.rpartition(".")[2]
    if not found and leaf in run.arguments:  # an argument with kedge's own name
        found = [Counterpart(leaf, change.field, is_carried=True)]
    if leaf == "schedule":
        return next((f"raise {each.argument}, or start with one" for each in found if "warmup" in each.argument), "")
    word = next((each for each in found if str(change.value) in each.values), None)
    if word:
        return f"{verb}{word.argument}={word.values[str(change.value)]}{rest.removeprefix(f'={change.value}')}"
    plain = next((each for each in found if not each.is_word), None)
    if plain is None or (change.direction == "switch" and not plain.is_carried):
        return ""
    if plain.argument == "num_train_epochs" and (run.arguments.get("max_steps") or 0) > 0:
        return f"{verb}max_steps"
    return f"{verb}{plain.argument}{rest if plain.is_carried or change.value is None else ''}"


def without_own_words(text: str) -> str:
    """The parts of an advice text that hold for every library."""
    return "; ".join(part for part in text.split("; ") if not KEDGE_ONLY.search(part))
