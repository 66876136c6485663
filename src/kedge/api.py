"""One function per stage.

    kedge.ppo(model="path/or/hub-id", prompts=["Once upon a time"], reward=my_function, num_updates=20)

Data is a path, a hub id, or a list of texts or rows. Settings are fields of the configuration (see `kedge config
explain`): `**{"ppo.clip_range": 0.1}` or `ppo={"clip_range": 0.1}`, just `num_updates=20` if the name is unique among
the sections of the stage, and `preset="tldr-n+"` or `preset=["small-cpu", "grpo"]`.

Each function writes to the folder `out` and returns a result that points to the files. By default it is `runs/STAGE`,
or the first free folder among `runs/STAGE-2`, …; with `resume`, always `runs/STAGE`.

Invalid input raises `kedge.KedgeError`: one line that states what is wrong, where, and what is expected.
"""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kedge.config import (
    config_from_settings,
    full_name,
)
from kedge.data import Preview
from kedge.models import saving
from kedge.models.tokenizers import save_tokenizer
from kedge.rewards import RewardSpec
from kedge.runs.claim import claims
from kedge.runs.loaded_models import LoadedModel, NamedModels
from kedge.runs.preview import preview_data as show_data
from kedge.runs.run import resumed
from kedge.runs.training import Callback, check_callback
from kedge.stages.arguments import (
    Data,
    Model,
    StrPath,
    Weighted,
    check_whole,
    read_argument,
    resolved_arguments,
    with_named_models,
)
from kedge.training.runtime import default_modes
from kedge_base.machine.invocation import refuse_nested_run
from kedge_base.run_folder.output import Result, folder_of
from kedge_base.stage import find_stage, imported, stages

if TYPE_CHECKING:
    from kedge.stages.critic import CriticResult
    from kedge.stages.ppo import PpoResult
    from kedge.stages.reward import RewardResult
    from kedge.stages.rlhf import RlhfResult
    from kedge.stages.sft import SftResult

P = ParamSpec("P")
R = TypeVar("R")


def answering(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate the function of the stage with the same name; see `answering_for`."""
    return answering_for(function.__name__)(function)


def answering_for(stage: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that runs a stage: reject unknown names, with kedge's name for those of other libraries."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **arguments: P.kwargs) -> R:
            for name in (name for name in arguments if name not in own):
                full_name(name, stage, value=arguments[name])
            return function(*args, **arguments)

        return call

    return decorate


@answering
def sft(
    *,
    model: Model,
    demonstrations: Data,
    out: StrPath | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> SftResult:
    """Fine-tune a model on demonstrations; see `kedge.stages.sft.run_sft`.

    Args:
        model: Folder, hub id or `LoadedModel` to start from.
        demonstrations: Rows with `prompt` and `completion`, or with `messages`; or texts.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each optimizer step.
        settings: Fields of the configuration.
    """
    return run_stage("sft", locals())


@answering
def reward(
    *,
    model: Model,
    comparisons: Data,
    demonstrations: Data | None = None,
    out: StrPath | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> RewardResult:
    """Train a reward model on comparisons; see `kedge.stages.reward.run_reward`.

    Args:
        model: Folder or hub id to start from, ideally the fine-tuned policy.
        comparisons: Rows with `prompt`, `chosen`, `rejected`, or with `prompt`, `responses`, `ranks`.
        demonstrations: Texts that get a mean score of 0; by default the preferred responses.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each optimizer step.
        settings: Fields of the configuration.
    """
    return run_stage("reward", locals())


@answering
def critic(
    *,
    model: Model | None = None,
    prompts: Data,
    reward: Weighted,
    policy: Model | None = None,
    eval_prompts: Data | None = None,
    out: StrPath | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> CriticResult:
    """Train a critic on the returns of the policy's responses; see `kedge.stages.critic.run_critic`.

    Args:
        model: Folder or hub id of the policy that PPO will start from.
        prompts: As in `ppo`.
        reward: As in `ppo`.
        policy: Another name of `model`.
        eval_prompts: Prompts to evaluate the critic on; by default some of `prompts` are held out.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each optimizer step.
        settings: Fields of the configuration, such as `num_responses`.
    """
    return run_stage("critic", locals())


@answering
def ppo(
    *,
    model: Model | None = None,
    prompts: Data,
    reward: Weighted | None = None,
    environment: Callable[[], Any] | str | None = None,
    policy: Model | None = None,
    teacher: Model | None = None,
    critic: Model | None = None,
    eval_prompts: Data | None = None,
    advantage: Callable[..., object] | str | Mapping[str, int] | None = None,
    surrogate: Callable[..., object] | str | None = None,
    out: StrPath | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> PpoResult:
    """Train a policy with PPO; see `kedge.stages.ppo.run_ppo`.

    Args:
        model: Folder or hub id of the policy to start from.
        prompts: Texts, or rows with `prompt`; their other columns are passed to reward functions.
        reward: Reward model or function; a list of them, or a mapping to weights. Optional with an environment or a
            teacher.
        environment: A class for episodes of several turns, an agent (a function of a row and a client), `file.py:Class`
            or `openenv:URL`; see `kedge_tasks.environments.shapes` and `agent`.
        policy: Another name of `model`.
        teacher: The model that the KL is measured to, instead of the initial policy; no reward is needed then, and
            `preset="distill"` learns from the KL alone.
        critic: A trained critic to start from, such as a run of `kedge.critic`; or its kind, as `ppo.critic`.
        eval_prompts: Prompts for `eval_every` and `critic_check`; by default some of `prompts` are held out.
        advantage: An estimator of your own, `(rewards, mask, values=, group=)` → `(advantages, returns)` with tensors
            `[batch, time]`; or the value of `ppo.advantage`.
        surrogate: A policy loss of your own, `(log_ratios, advantages)` → one loss per token; or the value of
            `ppo.policy_loss`.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each update.
        settings: Fields of the configuration.
    """
    return run_stage("ppo", locals())


@answering
def rlhf(
    *,
    model: Model,
    demonstrations: Data,
    comparisons: Data | None = None,
    prompts: Data,
    reward: Weighted | None = None,
    labeler: RewardSpec | LoadedModel | None = None,
    out: StrPath | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> RlhfResult:
    """Run fine-tuning, reward model training and PPO in a chain, once or in rounds; see `kedge.stages.rlhf.run_rlhf`.

    Args:
        model: Folder, hub id or `LoadedModel` to start from.
        demonstrations: As in `sft`.
        comparisons: As in `reward`; None to begin with those that the labeler makes.
        prompts: As in `ppo`.
        reward: As in `ppo`; added to the trained reward model's score.
        labeler: Reward model or function that ranks the policy's responses from round 2 on, without comparisons from
            round 1 on.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each optimizer step, and each update of PPO.
        settings: Fields of the configuration, such as `num_rounds`.
    """
    return run_stage("rlhf", locals())


def run_stage(stage: str, arguments: dict[str, Any]) -> Any:
    """Run a stage with the arguments of its function."""
    refuse_nested_run()
    described = find_stage(stage)
    given = {**arguments.pop("settings"), **arguments}
    control: dict[str, Any] = {}
    if described.resumes:
        check_callback(given["on_update"])
        resume, given["out"] = resumed(given.pop("resume"), given["out"], stage)
        control = {"resume": resume, "callback": given.pop("on_update")}
    with claims(), with_named_models(described, given) as named:
        config, objects = resolved_arguments(described, named)
        return imported(described.run)(config, **objects, **control)


def preview_data(
    source: Data,
    *,
    stage: str | None = None,
    model: Model | None = None,
    num_examples: int = 2,
    num_rows: int | None = None,
    **settings: Any,
) -> Preview:
    """Preview data as a stage would read it; print the result. See `kedge.runs.preview.preview_data`.

    Args:
        source: A file, folder or hub id, or rows.
        stage: sft, reward, ppo, generate or evaluate; guessed from the columns if None.
        model: Folder, hub id or `LoadedModel`; its tokenizer reads the rows. None counts characters.
        num_examples: Rows to show.
        num_rows: Rows to read; None for all.
        settings: Fields of `data`, such as `columns={"prompt": "dialogue"}`.

    Raises:
        KedgeError: The source cannot be read, or a named column is missing.
    """
    check_whole("num_examples", num_examples, least=0)
    if num_rows is not None:
        check_whole("num_rows", num_rows, least=1)
    with tempfile.TemporaryDirectory(prefix="kedge-") as place:
        models = NamedModels(Path(place))
        reader = models.name(model, "model")
        for loaded in models.models.values():
            loaded.model.config.save_pretrained(reader)
            save_tokenizer(loaded.tokenizer, Path(reader))
        named = {} if model is None else read_argument("model", reader, "model")[0]
        return show_data(
            config_from_settings(stage if stage in list(stages()) else "sft", settings, named),
            os.fspath(source) if isinstance(source, os.PathLike) else source,
            stage=stage,
            num_examples=num_examples,
            num_rows=num_rows,
        )


@default_modes()
def merge(adapter: StrPath | Result, out: StrPath, *, trust_remote_code: bool = False) -> Path:
    """Save an adapter and its base, or the shards of a checkpoint, as one model; returns its folder.

    Args:
        adapter: A folder that PEFT saved, a run's folder or result, or a checkpoint in shards, such as `runs/ppo@8`.
        out: The new model's folder.
        trust_remote_code: Run Python code from the base model's folder.

    Raises:
        ModelError: The source is neither, does not belong to its base, or is damaged.
        OutputError: The folder is not free, or cannot be written.
    """
    return saving.merge(folder_of(adapter, "adapter"), folder_of(out, "out"), trust_remote_code=trust_remote_code)
