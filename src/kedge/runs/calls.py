"""Builds the calls that follow a stage, as shell commands or Python, and results that show them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import Self

from kedge.config import Config, changed_values, load_config, parse_value
from kedge_base.errors import KedgeError
from kedge_base.registry import service
from kedge_base.run_folder.output import CONFIG_FILE, MODEL_FOLDER, REPORT_FILE
from kedge_base.run_folder.record_format import read_config, read_metrics
from kedge_base.stage import find_stage, imported, stages
from kedge_base.texts import printable

Values: TypeAlias = tuple[str, ...] | dict[str, float]

TO_FILL_IN = ("",)
"""An argument that only the user knows: `PROMPTS` in the shell, `prompts` in Python."""

TEST_PROMPTS = (*TO_FILL_IN, "test_prompts")
"""The same, for prompts that the run was not trained on."""


@dataclass(frozen=True)
class Call:
    """A call of a stage.

    Attributes:
        stage: As on the command line.
        arguments: Values by the common name of option and keyword; a value may be a mapping to weights. `TO_FILL_IN`
            marks an unknown value, followed by its name unless it is the argument's.
        settings: Fields of the configuration, by dotted name.
    """

    stage: str
    arguments: Mapping[str, Values]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def shell(self) -> str:
        """`kedge ppo --model runs/sft/model --prompts PROMPTS data.template=tldr`."""
        return " ".join(["kedge", self.stage, *self._options(), *self._overrides()])

    def python(self) -> str:
        """`kedge.ppo(model='runs/sft/model', prompts=prompts, **{'data.template': 'tldr'})`."""
        parts = [f"{name}={_python(name, values)}" for name, values in self.arguments.items()]
        settings = {name: _alone(value) if name == "preset" else value for name, value in self.settings.items()}
        parts += [f"{name}={settings.pop(name)!r}" for name in list(settings) if "." not in name]
        if settings:
            parts.append(f"**{settings!r}")
        return f"kedge.{self.stage}({', '.join(parts)})"

    def _options(self) -> Iterator[str]:
        for name, values in self.arguments.items():
            words = [f"{value}={weight}" for value, weight in values.items()] if isinstance(values, dict) else values
            unknown = _placeholder(name, values)
            yield from [f"--{name} {unknown.upper()}"] if unknown else (f"--{name} {_quoted(value)}" for value in words)

    def _overrides(self) -> Iterator[str]:
        for name, value in self.settings.items():
            if name == "preset":
                yield from (f"--preset {_quoted(preset)}" for preset in value)
                continue
            text = value if _stays_text(value) else json.dumps(value, ensure_ascii=False)
            yield _quoted(f"{name}={text}")


def _stays_text(value: object) -> bool:
    """True for a text that an override does not read as another value, as it would `###` or `1e5`."""
    try:
        return isinstance(value, str) and parse_value(value, value) == value
    except KedgeError:
        return False


def _alone(values: Sequence[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else [*values]


def _quoted(text: str) -> str:
    """Quote an argument for the shell; control characters are escaped, so that they do not reach the terminal."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = printable(text.replace("\\", "\\\\")).replace("'", "\\'")
    return f"$'{escaped}'"


def _placeholder(name: str, values: Values) -> str:
    """Return the placeholder of an argument that only the user knows; empty for other arguments."""
    return "" if isinstance(values, dict) or values[:1] != TO_FILL_IN else values[-1] or name


def _python(name: str, values: Values) -> str:
    if unknown := _placeholder(name, values):
        return unknown
    return repr(values if isinstance(values, dict) else _alone(values))


CARRIED = (
    "preset",
    "data.",
    "rollout.max_new_tokens",
    "rollout.stop_token",
    "runtime.device",
    "runtime.num_threads",
    "runtime.precision",
    "runtime.trust_remote_code",
)
"""Settings that belong to the data, the model and the machine, so that the next stage needs them as well."""

_DATA = ("demonstrations", "comparisons", "prompts")


def next_calls(config: Config, stage: str, folder: Path, *, start: str = "", judge: str = "") -> list[Call]:
    """Return the usual next calls, with the stage's data and the settings that they read.

    Args:
        config: The stage's configuration.
        stage: The finished stage.
        folder: Its folder.
        start: The policy to compare the new one with; by default, the one that the stage started from.
        judge: The reward that judges the new policy; by default the first one of the configuration.
    """
    reference = find_stage(stage).next_calls
    calls: list[Call] = imported(reference)(config, str(folder / "model"), start, judge) if reference else []
    unread = {call.stage: find_stage(call.stage).unread for call in calls}
    return [
        replace(call, settings={name: each for name, each in call.settings.items() if name not in unread[call.stage]})
        for call in calls
    ]


def after_sft(config: Config, model: str, start: str, judge: str) -> list[Call]:
    """Calls that train a reward model from the policy, and sample the policy's responses."""
    demonstrations, comparisons, _ = _data(config)
    settings = _renamed(_training(config), r"^(?!.*\.)", "demonstrations.")  # not for comparisons
    data = {"demonstrations": demonstrations} if config.data.demonstrations else {}
    reward = Call("reward", {"model": (model,), "comparisons": comparisons, **data}, settings)
    as_prompts = _renamed(_carried(config), r"^demonstrations\.", "prompts.")
    return [reward, Call("generate", {"model": (model,), "prompts": demonstrations}, as_prompts)]


def after_reward(config: Config, model: str, start: str, judge: str) -> list[Call]:
    """The call of PPO with the reward model."""
    settings = _training(config)
    role = "prompts"
    if config.data.comparisons and not config.data.prompts:
        role = "comparisons"
        settings = _renamed(settings, r"^comparisons\.", "prompts.")
    [name] = base = _base(config)
    policy = TO_FILL_IN if _has_scores(name) else base
    arguments = {"model": policy, "prompts": _given(getattr(config.data, role)), "reward": (model,)}
    return [Call("ppo", arguments, {**settings, **_shares(config, role)})]


def after_critic(config: Config, model: str, start: str, judge: str) -> list[Call]:
    """The call of PPO that starts from the critic."""
    prompts = _data(config)[-1]
    arguments = {"model": _base(config), "prompts": prompts, "reward": _rewards(config), "critic": (model,)}
    return [Call("ppo", arguments, {**_training(config), **_of_ppo(config), **_shares(config, "prompts")})]


def after_policy(config: Config, model: str, start: str, judge: str) -> list[Call]:
    """Calls that compare the new policy with the initial one, or sample episodes if it was trained on episodes.

    They need unseen prompts, because they hold out none of the training prompts.
    """
    first = [judge] if judge else [term.source for term in config.reward][:1]
    unseen = _given(config.data.eval_prompts)
    unseen = TEST_PROMPTS if unseen == TO_FILL_IN else unseen
    if config.environment.source is not None:
        plays = {"model": (model,), "prompts": unseen, "environment": _given([config.environment.source])}
        return [Call("generate", plays, {**_carried(config), **_changed(config, "environment.m")})]
    against = (start,) if start else _base(config)
    arguments = {"model": (model,), "against": against, "prompts": unseen, "judge": _given(first)}
    return [Call("evaluate", arguments, _carried(config))]


def _data(config: Config) -> list[tuple[str, ...]]:
    return [_given(getattr(config.data, name)) for name in _DATA]


def _base(config: Config) -> tuple[str, ...]:
    return _given([str(config.model or config.reward_model.base)])


def _training(config: Config) -> dict[str, Any]:
    return {**_carried(config), **_changed(config, "adapter.")}


def _has_scores(name: str) -> bool:
    """True for the local folder of a reward model, which PPO cannot train as the policy."""
    try:
        architectures = json.loads(Path(name, "config.json").read_bytes())["architectures"]
        return any(str(each).endswith(("ForSequenceClassification", "RewardModel")) for each in architectures)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def following_call(folder: Path) -> str:
    """Return the Python call that usually follows the run in a folder; empty without such a call or a configuration."""
    try:
        stage = read_config(folder)[0].get("stage", "")
        config = load_config(folder / CONFIG_FILE)
    except KedgeError:
        return ""
    following = next_calls(config, stage, folder) if stage in stages() and find_stage(stage).length else []
    return following[0].python() if following else ""


def _rewards(config: Config) -> Values:
    """Return the rewards, with weights if any; rewards with settings or names are left for the user to fill in."""
    sources = _given([term.source for term in config.reward])
    plain = all(not term.settings and term.name is None for term in config.reward)
    weights = {term.source: term.weight for term in config.reward}
    if sources == TO_FILL_IN or not plain or len(weights) < len(sources):
        return TO_FILL_IN
    return sources if {*weights.values()} == {1} else weights


def _of_ppo(config: Config) -> dict[str, Any]:
    """Return the settings of PPO and its sampling: the critic was fitted to returns that depend on some of them.

    The kind of critic is the stage's, even if `ppo.critic` is another.
    """
    kind = config.critic.kind
    kept = _changed(config, "ppo.", "rollout.", "reward_functions.", "schedules")
    for name in ("ppo.critic", "ppo.critic_init", *(["ppo.critic_learning_rate"] if kind == "shared" else [])):
        kept.pop(name, None)
    if config.ppo.critic != "auto" and config.ppo.resolved_critic == kind:
        return {**kept, "ppo.critic": config.ppo.model_dump()["critic"]}
    is_open = config.ppo.critic == "auto" and "ppo.critic_learning_rate" not in kept
    return kept if is_open else {**kept, "ppo.critic": kind}


def _carried(config: Config) -> dict[str, Any]:
    sources = {f"data.{name}" for name in (*_DATA, "pretraining", "mix")}
    return {
        name: value
        for name, value in _changed(config, *CARRIED).items()
        if name not in sources and not _is_in_memory(value)
    }


def _shares(config: Config, role: str) -> dict[str, Any]:
    """Return `data.mix` for the sources of a role, if it has shares of them and the next call can name them."""
    shares = config.data.shares(role)
    return {} if shares is None or _is_in_memory(getattr(config.data, role)) else {"data.mix": [*shares]}


def _changed(config: Config, *sections: str) -> dict[str, Any]:
    return {name: value for name, value in changed_values(config).items() if name.startswith(sections)}


def _is_in_memory(value: object) -> bool:
    """True if a setting is a placeholder for data that was passed from Python."""
    return isinstance(value, list) and any(str(each).startswith("python:") for each in value)


def _renamed(settings: dict[str, Any], pattern: str, role: str) -> dict[str, Any]:
    """Return the settings for data that is read in another role: in the names of columns, it replaces a pattern."""
    columns = settings.get("data.columns")
    if not columns:
        return settings
    named = {re.sub(pattern, role, name): column for name, column in columns.items()}
    return {**settings, "data.columns": named}


def _given(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the sources, if they are names, or a placeholder for data passed from Python."""
    return tuple(sources) if sources and not _is_in_memory(sources) else TO_FILL_IN


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run, which shows the report in its folder.

    As text it is at most three lines: the outcome, the files to open, and the call that usually comes next.

    Attributes:
        folder: The run's folder.
    """

    folder: Path

    def __repr__(self) -> str:
        return "\n  ".join(map(printable, _lines(type(self).__name__, self.folder)))

    def _repr_html_(self) -> str:
        return service("report_as_html")(self.folder)


@dataclass(frozen=True, repr=False)
class TrainingResult(RunResult):
    """The result of a run that trains a model."""

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.folder / MODEL_FOLDER


@dataclass(frozen=True, repr=False)
class UpdatesResult(TrainingResult):
    """The result of a run in updates.

    Attributes:
        metrics: The rows of `metrics.jsonl`.
    """

    metrics: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The result of a run in a folder."""
        return cls(folder, read_metrics(folder))


def _lines(kind: str, folder: Path) -> Iterator[Any]:
    report = service("report_as_text")(folder)
    yield f"{kind} in {folder}: {report}"
    files = {"model": folder / MODEL_FOLDER, "report": folder / REPORT_FILE}
    if found := [f"{label}: {path}" for label, path in files.items() if path.exists()]:
        yield ", ".join(found)
    if following := following_call(service("runs_in")(folder)[-1]):
        yield f"next: {following}"
