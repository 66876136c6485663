"""One function per stage.

    kedge.ppo(model="path/or/hub-id", prompts=["Once upon a time"], reward=my_function, num_updates=20)

Data is a path, a hub id, or a list of texts or rows. Settings are fields of the configuration (see `kedge config
explain`): `**{"ppo.clip_range": 0.1}` or `ppo={"clip_range": 0.1}`, just `num_updates=20` if the name is unique among
the sections of the stage, and `preset="tldr-n+"` or `preset=["small-cpu", "grpo"]`.

Each function writes to the folder `out` and returns a result that points to the files. By default it is `runs/STAGE`,
or the first of `runs/STAGE-2`, … that is free; with `resume`, always `runs/STAGE`.

Invalid input raises `kedge.KedgeError`: one line that states what is wrong, where, and what is expected.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from kedge.config import (
    Config,
    check_stage,
    config_from_settings,
    field_advice,
    full_name,
    full_settings,
    parse_value,
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
from kedge_base.errors import ConfigError
from kedge_base.machine.invocation import refuse_nested_run
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import Result, folder_of
from kedge_base.stage import find_stage, imported, stages
from kedge_hub.pushing import push_model
from kedge_inspect.diagnosis import diagnose_run
from kedge_inspect.doctor import Finding
from kedge_inspect.report import write_report as make_report

if TYPE_CHECKING:
    from kedge.stages.critic import CriticResult
    from kedge.stages.ppo import PpoResult
    from kedge.stages.reward import RewardResult
    from kedge.stages.rlhf import RlhfResult
    from kedge.stages.sft import SftResult
    from kedge_lab.check_critic import CriticCheckResult
    from kedge_lab.evaluate import EvaluateResult, PassResult
    from kedge_lab.generate import GenerateResult
    from kedge_lab.sweep import SweepResult

P = ParamSpec("P")
R = TypeVar("R")


def _answering(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a stage's function: other libraries' names are answered before Python misses an argument."""
    stage = "evaluate" if function.__name__ in ("check_critic", "pass_at_k") else function.__name__
    own = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **arguments: P.kwargs) -> R:
        for name in (name for name in arguments if name not in own):
            full_name(name, stage, value=arguments[name])
        return function(*args, **arguments)

    return call


@_answering
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
    return _run("sft", locals())


@_answering
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
    return _run("reward", locals())


@_answering
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
        eval_prompts: Prompts to measure the critic with; without them, some of the prompts are held out.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each optimizer step.
        settings: Fields of the configuration, such as `num_responses`.
    """
    return _run("critic", locals())


@_answering
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
        environment: A class for episodes of several turns, `file.py:Class` or `openenv:URL`; see
            `kedge_tasks.environments.shapes`.
        policy: Another name of `model`.
        teacher: The model that the KL is measured to, in place of the policy's start; then no reward is needed, and
            `preset="distill"` learns from the KL alone.
        critic: A trained critic to start from, such as a run of `kedge.critic`; or its kind, as `ppo.critic`.
        eval_prompts: Prompts for `eval_every` and `critic_check`; without them, some of the prompts are held out.
        advantage: An estimator of your own, `(rewards, mask, values=, group=)` → `(advantages, returns)` with tensors
            `[batch, time]`; or the value of `ppo.advantage`.
        surrogate: A policy loss of your own, `(log_ratios, advantages)` → one loss per token; or the value of
            `ppo.policy_loss`.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each update.
        settings: Fields of the configuration.
    """
    return _run("ppo", locals())


@_answering
def rlhf(
    *,
    model: Model,
    demonstrations: Data,
    comparisons: Data,
    prompts: Data,
    reward: Weighted | None = None,
    labeler: RewardSpec | LoadedModel | None = None,
    out: StrPath | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> RlhfResult:
    """Fine-tuning, reward model and PPO in a chain, once or in rounds; see `kedge.stages.rlhf.run_rlhf`.

    Args:
        model: Folder, hub id or `LoadedModel` to start from.
        demonstrations: As in `sft`.
        comparisons: As in `reward`.
        prompts: As in `ppo`.
        reward: As in `ppo`; added to the trained reward model's score.
        labeler: Reward model or function that ranks the policy's responses from round 2 on.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each optimizer step, and each update of PPO.
        settings: Fields of the configuration, such as `num_rounds`.
    """
    return _run("rlhf", locals())


@_answering
def generate(
    *,
    model: Model,
    prompts: Data,
    reward: Weighted | None = None,
    environment: Callable[[], Any] | str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> GenerateResult:
    """Sample and optionally score responses to prompts; see `kedge_lab.generate.run_generate`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        reward: As in `ppo`.
        environment: As in `ppo`; the responses are episodes with it.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `temperature` or `best_of`.
    """
    return _run("generate", locals())


@_answering
def evaluate(
    *,
    model: Model,
    prompts: Data,
    judge: RewardSpec | LoadedModel | None = None,
    against: Model | None = None,
    environment: Callable[[], Any] | str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> EvaluateResult:
    """Measure a policy's win rate against another policy or references; see `kedge_lab.evaluate.run_evaluate`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        judge: A reward model or a reward function; with `judge_mode="pairwise"` a function that compares two responses.
        against: Folder or hub id of the policy to compare with; None for the references in the data (the columns
            `completion`, `chosen` or `summary`).
        environment: As in `ppo`: episodes are compared, by what they are paid unless there is a judge.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `judge_mode`.
    """
    return _run("evaluate", locals())


@_answering
def pass_at_k(
    *,
    model: Model,
    prompts: Data,
    judge: RewardSpec | LoadedModel | None = None,
    num_responses: int = 8,
    against: Model | None = None,
    environment: Callable[[], Any] | str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> PassResult:
    """Measure how many prompts a policy solves with k responses; see `kedge_lab.evaluate.run_pass_at_k`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        judge: A function such as `kedge_tasks.verify:gsm8k`, that scores right responses 1. Optional with an
            environment.
        num_responses: Responses to each prompt, at least 2: the largest k.
        against: Folder or hub id of a policy to measure as well.
        environment: As in `ppo`: an episode that is paid 1 or more is right.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `generate.temperature`.
    """
    check_whole("num_responses", num_responses, least=2)
    return _run("evaluate", locals())


@_answering
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
        reward: As in `ppo`, instead of the run's.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `evaluate.num_prompts`.
    """
    if critic is None:
        raise ConfigError("critic is missing: name a run of PPO or of critic, or a trained critic")
    return _run("evaluate", locals())


def _run(stage: str, arguments: dict[str, Any]) -> Any:
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


def doctor(run: StrPath | Result) -> list[Finding]:
    """Problems of a run, most serious first; see `kedge_inspect.diagnosis.diagnose_run`.

    Args:
        run: The run's folder or result, or a folder with the runs of several stages.

    Raises:
        DataError: The folder holds no run, or a file in it is damaged.
    """
    return diagnose_run(folder_of(run), advice=field_advice)


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


def push(model: StrPath | Result, repo: str, *, private: bool = False, existing: bool = False) -> str:
    """Push a trained model to the Hugging Face hub; returns its address.

    `kedge.ppo(..., push={"repo": "org/name"})` pushes as soon as the training has finished.

    Args:
        model: A run's folder or result, one of its checkpoints (`runs/ppo@8`), or a model's folder.
        repo: `org/name`; created if it does not exist.
        private: Whether a new repository is private.
        existing: Whether a repository with content that kedge did not push may get a commit.

    Raises:
        ConfigError: The push is not possible; nothing is pushed.
        PushError: The hub refused, or the connection failed.
    """
    return push_model(folder_of(model, "model"), repo, private=private, existing=existing, say=say)


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


def write_report(*runs: StrPath | Result, out: StrPath | None = None) -> Path:
    """Write one HTML page about one or more runs; see `kedge_inspect.report.write_report`.

    Args:
        runs: Folders or results of runs, or folders with the runs of several stages; runs in progress are allowed.
        out: Path of the page; by default `report.html`, in the run's folder for one run, else in the current folder.

    Raises:
        KedgeError: A folder holds no run or is damaged, or `out` exists and is not a kedge report.
    """
    page = None if out is None else folder_of(out, "out")
    return make_report([folder_of(run) for run in runs], page, advice=field_advice)


def sweep(
    stage: str,
    fields: Mapping[str, Sequence[object]],
    *,
    model: Model | None = None,
    demonstrations: Data | None = None,
    comparisons: Data | None = None,
    prompts: Data | None = None,
    reward: Weighted | None = None,
    seeds: int | Sequence[int] | None = None,
    num_random: int | None = None,
    num_processes: int | None = None,
    metric: str | None = None,
    goal: str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> SweepResult:
    """Run a stage with several settings and seeds, and compare them; see `kedge_lab.sweep.run_sweep`.

    The runs are separate processes, so data, rewards and models are given by name.

    Args:
        stage: sft, reward, critic, ppo or control.
        fields: The values to try, by dotted name; with `num_random` also a range, `["1e-6..1e-4"]`.
        model: As in the stage's function, like the next four.
        demonstrations: See `model`.
        comparisons: See `model`.
        prompts: See `model`.
        reward: See `model`.
        seeds: Number of seeds of each setting, or the seeds; None for that of `runtime.seed`.
        num_random: Number of settings to draw; None tries every combination.
        num_processes: Runs at a time; None for one per core on a CPU, one on a GPU.
        metric: The metric to compare by; None for the stage's usual one.
        goal: `max` or `min`; None to go by the metric's name.
        out: The sweep's folder; `runs/sweep-STAGE` by default. The same call continues the sweep in it.
        settings: Fields of the configuration that all runs share.
    """
    swept = [each.name for each in stages().values() if each.is_swept]
    if stage not in swept:
        raise ConfigError(f"a sweep runs {', '.join(swept)}, not {stage!r}")
    if not isinstance(fields, Mapping) or not all(isinstance(field, str) for field in fields):
        raise ConfigError(f"fields must be a mapping from fields to lists of values to try; it is {fields!r}")
    for name, value in (("num_random", num_random), ("num_processes", num_processes)):
        if value is not None:
            check_whole(name, value, least=1)
    if goal not in (None, "max", "min") or not isinstance(metric, (str, type(None))):
        raise ConfigError(f"metric must be the name of one, and goal max or min; they are {metric!r} and {goal!r}")
    from kedge_lab.sweep import plan_trials, run_sweep

    given: dict[str, Any] = {
        "model": model,
        "data.demonstrations": demonstrations,
        "data.comparisons": comparisons,
        "data.prompts": prompts,
        "reward": reward,
    }
    parts: list[Mapping[str, Any]] = [settings]
    for field, value in ((field, value) for field, value in given.items() if value is not None):
        values, kept = read_argument(field, value, field)
        if kept is not None:
            raise ConfigError(
                f"the runs of a sweep are processes of their own: {field} must be a file or folder, by name"
            )
        parts.append(values)
    shared = full_settings(stage, *parts)
    full_settings(stage, *({name: values} for name, values in fields.items()))  # refuses two names of a field

    def resolve(values: Mapping[str, str]) -> Config:
        config = config_from_settings(stage, shared, {name: parse_value(text, name) for name, text in values.items()})
        check_stage(config, stage)
        return config

    swept_texts = {field: _as_texts(field, values) for field, values in fields.items()}
    trials = plan_trials(swept_texts, _seeds(seeds), resolve, num_random=num_random)
    folder = folder_of(out or Path("runs") / f"sweep-{stage}", "out")
    return run_sweep(trials, stage, folder, num_processes=num_processes, metric=metric, goal=goal)


def _as_texts(field: str, values: object) -> list[str]:
    """Values as on the command line, where a text such as `null` needs quotes.

    Raises:
        ConfigError: They are not in a list, or one has no text, such as a function.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{field} must be a list of values to try; it is {values!r}")
    try:
        return [_as_text(value, field) for value in cast("Iterable[object]", values)]
    except TypeError:
        raise ConfigError(f"{field}: the runs of a sweep are processes of their own; {values!r} is not text") from None


def _as_text(value: object, field: str) -> str:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    with suppress(ConfigError):  # text that is not YAML needs quotes too
        if isinstance(value, str) and parse_value(value, field) == value:
            return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """A path or a number of NumPy as JSON has it."""
    return os.fspath(value) if isinstance(value, os.PathLike) or not hasattr(value, "tolist") else value.tolist()


def _seeds(seeds: int | Sequence[int] | None) -> Sequence[int] | None:
    """The seeds; a number stands for that many."""
    if seeds is None:
        return None
    try:
        return range(index(seeds)) if isinstance(seeds, Integral) else [index(seed) for seed in cast("Any", seeds)]
    except TypeError:
        raise ConfigError(f"seeds must be a number of seeds or a list of them; it is {seeds!r}") from None
