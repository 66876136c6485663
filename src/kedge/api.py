"""One function per stage.

    kedge.ppo(model="path/or/hub-id", prompts=["Once upon a time"], reward=my_function, num_updates=20)

Data is a path, a hub id, or a list of texts or rows. Settings are fields of the configuration (see `kedge config
explain`): `**{"ppo.clip_range": 0.1}` or `ppo={"clip_range": 0.1}`, just `num_updates=20` if the name is unique among
the sections of the stage, and `preset="tldr-n+"` or `preset=["small-cpu", "grpo"]`.

Each function writes to the folder `out` (default: `runs/STAGE`) and returns a result that points to the files.
With `dry_run=True`, the functions of the training stages write nothing and return an estimate of the time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from kedge.arguments import Arguments, Data, Model, StrPath, Weighted
from kedge.config import Config, field_advice, parse_value
from kedge.data import Preview
from kedge.errors import ConfigError
from kedge.inspect.diagnosis import diagnose_run
from kedge.inspect.doctor import Finding
from kedge.inspect.report import write_report as make_report
from kedge.loaded_model import LoadedModel, with_loaded_models
from kedge.models import merging
from kedge.models.pushing import push_model
from kedge.rewards import RewardSpec
from kedge.runs.preview import preview_data as show_data
from kedge.runs.run import Resume
from kedge.runs.training import Callback, Update
from kedge.stages.check_critic import CriticCheckResult, run_check_critic
from kedge.stages.critic import CriticResult, run_critic
from kedge.stages.dry_run import DryRun
from kedge.stages.dry_run import dry_run as time_stage
from kedge.stages.evaluate import EvaluateResult, run_evaluate
from kedge.stages.generate import GenerateResult, run_generate
from kedge.stages.ppo import PpoResult, run_ppo
from kedge.stages.reward import RewardResult, run_reward
from kedge.stages.rlhf import RlhfResult, run_rlhf
from kedge.stages.sft import SftResult, run_sft
from kedge.stages.stage import stages
from kedge.stages.sweep import SweepResult, plan_trials, run_sweep

__all__ = [
    "LoadedModel",
    "Update",
    "check_critic",
    "critic",
    "doctor",
    "evaluate",
    "generate",
    "merge",
    "ppo",
    "preview_data",
    "push",
    "reward",
    "rlhf",
    "sft",
    "sweep",
    "write_report",
]


@overload
def sft(*, dry_run: Literal[True], **arguments: Any) -> DryRun: ...
@overload
def sft(
    *,
    model: Model,
    demonstrations: Data,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: Literal[False] = False,
    **settings: Any,
) -> SftResult: ...
@with_loaded_models("sft")
def sft(
    *,
    model: Model,
    demonstrations: Data,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> SftResult | DryRun:
    """Fine-tune a model on demonstrations; see `kedge.stages.sft.run_sft`.

    Args:
        model: Folder, hub id or `LoadedModel` to start from.
        demonstrations: Rows with `prompt` and `completion`, or with `messages`; or texts.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one.
        on_update: Called with an `Update` after each update (optimizer step in sft and reward).
        dry_run: Load and check everything, time a few rows, and return an estimate; nothing is written.
        settings: Fields of the configuration.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, out=out)
    rows = arguments.rows("data.demonstrations", demonstrations)
    config = arguments.config("sft")
    if dry_run:
        return _dry_run(config, "sft", resume, demonstrations=rows)
    return run_sft(config, demonstrations=rows, resume=_resume(resume), callback=on_update)


@overload
def reward(*, dry_run: Literal[True], **arguments: Any) -> DryRun: ...
@overload
def reward(
    *,
    model: Model,
    comparisons: Data,
    demonstrations: Data | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: Literal[False] = False,
    **settings: Any,
) -> RewardResult: ...
@with_loaded_models("reward")
def reward(
    *,
    model: Model,
    comparisons: Data,
    demonstrations: Data | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> RewardResult | DryRun:
    """Train a reward model on comparisons; see `kedge.stages.reward.run_reward`.

    Args:
        model: Folder or hub id to start from, ideally the fine-tuned policy.
        comparisons: Rows with `prompt`, `chosen`, `rejected`, or with `prompt`, `responses`, `ranks`.
        demonstrations: Texts whose mean score is set to 0; by default the preferred responses.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one.
        on_update: Called with an `Update` after each update (optimizer step in sft and reward).
        dry_run: Load and check everything, time a few rows, and return an estimate; nothing is written.
        settings: Fields of the configuration.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, out=out)
    rows = arguments.rows("data.comparisons", comparisons)
    texts = arguments.rows("data.demonstrations", demonstrations)
    config = arguments.config("reward")
    if dry_run:
        return _dry_run(config, "reward", resume, comparisons=rows, demonstrations=texts)
    return run_reward(config, comparisons=rows, demonstrations=texts, resume=_resume(resume), callback=on_update)


@overload
def critic(*, dry_run: Literal[True], **arguments: Any) -> DryRun: ...
@overload
def critic(
    *,
    model: Model | None = None,
    prompts: Data,
    reward: Weighted,
    policy: Model | None = None,
    eval_prompts: Data | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: Literal[False] = False,
    **settings: Any,
) -> CriticResult: ...
@with_loaded_models("critic")
def critic(
    *,
    model: Model | None = None,
    prompts: Data,
    reward: Weighted,
    policy: Model | None = None,
    eval_prompts: Data | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> CriticResult | DryRun:
    """Train a critic on the returns of the policy's responses; see `kedge.stages.critic.run_critic`.

    Args:
        model: Folder or hub id of the policy that PPO will start from.
        prompts: As in `ppo`.
        reward: As in `ppo`.
        policy: Another name of `model`.
        eval_prompts: Prompts to measure the critic with; without them, some of the prompts are held out.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one.
        on_update: Called with an `Update` after each optimizer step.
        dry_run: Load and check everything, time a few rows, and return an estimate; nothing is written.
        settings: Fields of the configuration, such as `num_responses`.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, policy=policy, out=out)
    rows = arguments.rows("data.prompts", prompts)
    held_out = arguments.rows("data.eval_prompts", eval_prompts)
    rewards = arguments.rewards(reward)
    config = arguments.config("critic")
    if dry_run:
        return _dry_run(config, "critic", resume, prompts=rows, eval_prompts=held_out, reward=rewards)
    return run_critic(
        config, prompts=rows, eval_prompts=held_out, reward=rewards, resume=_resume(resume), callback=on_update
    )


@overload
def ppo(*, dry_run: Literal[True], **arguments: Any) -> DryRun: ...
@overload
def ppo(
    *,
    model: Model | None = None,
    prompts: Data,
    reward: Weighted,
    policy: Model | None = None,
    critic: Model | None = None,
    eval_prompts: Data | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: Literal[False] = False,
    **settings: Any,
) -> PpoResult: ...
@with_loaded_models("ppo")
def ppo(
    *,
    model: Model | None = None,
    prompts: Data,
    reward: Weighted,
    policy: Model | None = None,
    critic: Model | None = None,
    eval_prompts: Data | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> PpoResult | DryRun:
    """Train a policy with PPO; see `kedge.stages.ppo.run_ppo`.

    Args:
        model: Folder or hub id of the policy to start from.
        prompts: Texts, or rows with `prompt`, whose other columns are passed to reward functions.
        reward: Reward model or function; a list of them, or a mapping to weights.
        policy: Another name of `model`.
        critic: A trained critic to start from, such as a run of `kedge.critic`; or its kind, as `ppo.critic`.
        eval_prompts: Prompts for `eval_every` and `critic_check`; without them, some of the prompts are held out.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one.
        on_update: Called with an `Update` after each update (optimizer step in sft and reward).
        dry_run: Load and check everything, time a few rows, and return an estimate; nothing is written.
        settings: Fields of the configuration.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, policy=policy, out=out)
    arguments.critic(critic)
    rows = arguments.rows("data.prompts", prompts)
    held_out = arguments.rows("data.eval_prompts", eval_prompts)
    rewards = arguments.rewards(reward)
    config = arguments.config("ppo")
    if dry_run:
        return _dry_run(config, "ppo", resume, prompts=rows, eval_prompts=held_out, reward=rewards)
    return run_ppo(
        config, prompts=rows, eval_prompts=held_out, reward=rewards, resume=_resume(resume), callback=on_update
    )


@overload
def rlhf(*, dry_run: Literal[True], **arguments: Any) -> DryRun: ...
@overload
def rlhf(
    *,
    model: Model,
    demonstrations: Data,
    comparisons: Data,
    prompts: Data,
    reward: Weighted | None = None,
    labeler: RewardSpec | LoadedModel | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: Literal[False] = False,
    **settings: Any,
) -> RlhfResult: ...
@with_loaded_models("rlhf")
def rlhf(
    *,
    model: Model,
    demonstrations: Data,
    comparisons: Data,
    prompts: Data,
    reward: Weighted | None = None,
    labeler: RewardSpec | LoadedModel | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    on_update: Callback | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> RlhfResult | DryRun:
    """Fine-tuning, reward model and PPO in a chain, once or in rounds; see `kedge.stages.rlhf.run_rlhf`.

    Args:
        model: Folder, hub id or `LoadedModel` to start from.
        demonstrations: As in `sft`.
        comparisons: As in `reward`.
        prompts: As in `ppo`.
        reward: As in `ppo`; added to the trained reward model's score.
        labeler: Reward model or function that ranks the policy's responses from round 2 on.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one.
        on_update: Called with an `Update` after each update (optimizer step in sft and reward).
        dry_run: Load and check everything, time a few rows, and return an estimate; nothing is written.
        settings: Fields of the configuration, such as `num_rounds`.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, out=out)
    rows = {
        "demonstrations": arguments.rows("data.demonstrations", demonstrations),
        "comparisons": arguments.rows("data.comparisons", comparisons),
        "prompts": arguments.rows("data.prompts", prompts),
    }
    function = arguments.function("rlhf.labeler", labeler)
    rewards = None if reward is None else arguments.rewards(reward)
    config = arguments.config("rlhf")
    if dry_run:
        return _dry_run(config, "rlhf", resume, **rows, reward=rewards, labeler=function)
    rewarded: Any = {"reward": rewards, "labeler": function}
    return run_rlhf(config, **rows, **rewarded, resume=_resume(resume), callback=on_update)


@with_loaded_models("generate")
def generate(
    *, model: Model, prompts: Data, reward: Weighted | None = None, out: StrPath | None = None, **settings: Any
) -> GenerateResult:
    """Sample and optionally score responses to prompts; see `kedge.stages.generate.run_generate`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        reward: As in `ppo`.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `temperature`.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, out=out)
    rows = arguments.rows("data.prompts", prompts)
    rewards = None if reward is None else arguments.rewards(reward)
    return run_generate(arguments.config("generate"), prompts=rows, reward=rewards)


@with_loaded_models("evaluate")
def evaluate(
    *,
    model: Model,
    prompts: Data,
    judge: RewardSpec | LoadedModel,
    against: Model | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> EvaluateResult:
    """Measure a policy's win rate against another policy or references; see `kedge.stages.evaluate.run_evaluate`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        judge: A reward model or a reward function; with `judge_mode="pairwise"` a function that compares two responses.
        against: Folder or hub id of the policy to compare with; None for the references in the data (the columns
            `completion`, `chosen` or `summary`).
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `judge_mode`.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, out=out)
    arguments.name("evaluate.against", against)
    rows = arguments.rows("data.prompts", prompts)
    function = arguments.function("evaluate.judge", judge)
    return run_evaluate(arguments.config("evaluate"), prompts=rows, judge=function)


@with_loaded_models("evaluate")
def check_critic(
    *,
    critic: StrPath,
    prompts: Data,
    model: Model | None = None,
    reward: Weighted | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> CriticCheckResult:
    """Compare a critic's values of prefixes with the returns of fresh continuations; see `run_check_critic`.

    Args:
        critic: A run of PPO or of `critic`, or a trained critic (folder or hub id).
        prompts: As in `ppo`.
        model: The policy, for a critic that is not a run's.
        reward: As in `ppo`, in place of the run's.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `critic_continuations`.

    Raises:
        KedgeError: An invalid input; one line.
    """
    arguments = Arguments(settings, model=model, out=out)
    arguments.name("evaluate.critic", critic)
    rows = arguments.rows("data.prompts", prompts)
    rewards = None if reward is None else arguments.rewards(reward)
    return run_check_critic(arguments.config("evaluate"), prompts=rows, reward=rewards)


def doctor(run: StrPath) -> list[Finding]:
    """Problems of a run, most serious first; see `kedge.inspect.diagnosis.diagnose_run`.

    Args:
        run: The run's folder, or a folder with the runs of several stages.

    Raises:
        DataError: The folder holds no run, or a file in it is damaged.
    """
    return diagnose_run(Path(run), advice=field_advice)


def preview_data(
    source: Data,
    *,
    stage: str | None = None,
    model: StrPath | None = None,
    num_examples: int = 2,
    num_rows: int | None = None,
    **settings: Any,
) -> Preview:
    """Preview data as a stage would read it; print the result. See `kedge.runs.preview.preview_data`.

    Args:
        source: A file, folder or hub id, or rows.
        stage: sft, reward, ppo, generate or evaluate; guessed from the columns if None.
        model: Folder or hub id whose tokenizer reads the rows; None counts characters.
        num_examples: Rows to show.
        num_rows: Rows to read; None for all.
        settings: Fields of `data`, such as `columns={"prompt": "dialogue"}`.

    Raises:
        KedgeError: The source cannot be read, or a named column is missing; one line.
    """
    config = Arguments(settings, model=model).config("sft")
    return show_data(
        config,
        os.fspath(source) if isinstance(source, os.PathLike) else source,
        stage=stage,
        num_examples=num_examples,
        num_rows=num_rows,
    )


def push(model: StrPath, repo: str, *, private: bool = False, existing: bool = False) -> str:
    """Push a trained model to the Hugging Face hub; returns its address.

    `kedge.ppo(..., push={"repo": "org/name"})` pushes as soon as the training has finished.

    Args:
        model: A run's folder, one of its checkpoints (`runs/ppo@8`), or a model's folder.
        repo: `org/name`; created if it does not exist.
        private: Whether a new repository is private.
        existing: Whether a repository with content that kedge did not push may get a commit.

    Raises:
        ConfigError: The push is not possible; nothing is pushed.
        PushError: The hub refused, or the connection failed.
    """
    return push_model(model, repo, private=private, existing=existing)


def merge(adapter: StrPath, out: StrPath, *, trust_remote_code: bool = False) -> Path:
    """Save an adapter and its base, or the shards of a checkpoint, as one model; returns its folder.

    Args:
        adapter: A folder that PEFT saved, or a checkpoint in shards, such as `runs/ppo@8`.
        out: The new model's folder.
        trust_remote_code: Run Python code from the base model's folder.

    Raises:
        ModelError: The source is neither, does not belong to its base, or is damaged.
        OutputError: The folder is not free, or cannot be written.
    """
    return merging.merge(os.fspath(adapter), out, trust_remote_code=trust_remote_code)


def write_report(*runs: StrPath, out: StrPath | None = None) -> Path:
    """Write one HTML page about one or more runs; see `kedge.inspect.report.write_report`.

    Args:
        runs: Folders of runs, or folders with the runs of several stages; runs in progress are allowed.
        out: Path of the page; by default `report.html`, in the run's folder for one run, else in the current folder.

    Raises:
        KedgeError: A folder holds no run or is damaged, or `out` exists and is not a kedge report.
    """
    return make_report([Path(run) for run in runs], None if out is None else Path(out), advice=field_advice)


def sweep(
    stage: str,
    fields: Mapping[str, Sequence[object]],
    *,
    model: Model | None = None,
    demonstrations: Data | None = None,
    comparisons: Data | None = None,
    prompts: Data | None = None,
    reward: Weighted | None = None,
    seeds: int | Sequence[int] = 1,
    num_random: int | None = None,
    num_processes: int | None = None,
    metric: str | None = None,
    goal: str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> SweepResult:
    """Run a stage with several settings and seeds, and compare them; see `kedge.stages.sweep.run_sweep`.

    The runs are processes of their own, so data, rewards and models are given by name.

    Args:
        stage: sft, reward, critic, ppo or control.
        fields: The values to try, by dotted name; with `num_random` also a range, `["1e-6..1e-4"]`.
        model: As in the stage's function, like the next four.
        demonstrations: See `model`.
        comparisons: See `model`.
        prompts: See `model`.
        reward: See `model`.
        seeds: Number of seeds of each setting, or the seeds.
        num_random: Number of settings to draw; None tries every combination.
        num_processes: Runs at a time; None for one per core on a CPU, one on a GPU.
        metric: The metric to compare by; None for the stage's usual one.
        goal: `max` or `min`; None to go by the metric's name.
        out: The sweep's folder; `runs/sweep-STAGE` by default. The same call continues the sweep in it.
        settings: Fields of the configuration that all runs share.

    Raises:
        KedgeError: An invalid input; one line.
    """
    swept = [each.name for each in stages().values() if each.is_swept]
    if stage not in swept:
        raise ConfigError(f"a sweep runs {', '.join(swept)}, not {stage!r}")
    arguments = Arguments(settings, model=model)
    data = {"data.demonstrations": demonstrations, "data.comparisons": comparisons, "data.prompts": prompts}
    given = {name: arguments.rows(name, rows) for name, rows in data.items()}
    given["reward"] = None if reward is None else arguments.rewards(reward)
    for name in (name for name, value in given.items() if value is not None):
        raise ConfigError(f"the runs of a sweep are processes of their own: {name} must be a file or folder, by name")
    trials = plan_trials(
        {field: [_as_text(value) for value in values] for field, values in fields.items()},
        range(seeds) if isinstance(seeds, int) else seeds,
        lambda values: arguments.config(stage, {name: parse_value(text, name) for name, text in values.items()}),
        num_random=num_random,
    )
    folder = Path(out or Path("runs") / f"sweep-{stage}")
    return run_sweep(trials, stage, folder, num_processes=num_processes, metric=metric, goal=goal)


def _as_text(value: object) -> str:
    """A value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _dry_run(config: Config, stage: str, resume: bool, **given: Any) -> DryRun:
    if resume:
        raise ConfigError("dry_run starts a new run; leave resume out")
    return time_stage(config, stage, **given)


def _resume(wanted: bool) -> Resume | None:
    return Resume() if wanted else None
