"""Checks a finished critic: its values of prefixes against the returns that the policy earns by continuing them.

    prompts ─▶ responses ─▶ prefixes ─▶ continuations ─▶ returns to go ─▶ critic_checks.jsonl, summary.json, report
                                └─────▶ V(prefix) ──────────▲

Source: VinePPO (arXiv 2410.01679), section 7.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedge.algorithm.prefix_test import PrefixTest
from kedge.config import Config, load_config, with_values
from kedge.config.schedules import config_at
from kedge.logs.critic_checks import check_row
from kedge.logs.json_lines import RunLog
from kedge.logs.table import Cell, print_table
from kedge.models import ActorCritic, find_model
from kedge.runs.calls import RunResult
from kedge.runs.ending import say_results
from kedge.runs.inputs import Rewards
from kedge.runs.run import open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import measuring
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.measurements import PrefixSample, sample_prefixes
from kedge.stages.ppo.roles import load_roles
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint.state import Stateful, restore_module
from kedge.training.checkpoint.store import Checkpoint, newest_valid, open_checkpoint
from kedge_base.errors import ConfigError
from kedge_base.machine.invocation import as_argument
from kedge_base.machine.progress import Progress, say
from kedge_base.run_folder.output import CHECKPOINTS, CONFIG_FILE, MODEL_FOLDER, is_run, write_summary
from kedge_base.run_folder.record_format import CRITIC_CHECKS_FILE, read_config
from kedge_base.texts import counted
from kedge_inspect.page.checks import FIGURES

PROMPTS_AT_ONCE = 8


@dataclass(frozen=True, repr=False)
class CriticCheckResult(RunResult):
    """Result of a check of a critic.

    Attributes:
        folder: The run's folder.
        test: All figures.
        summary: Contents of `summary.json`.
    """

    test: PrefixTest
    summary: dict[str, Any]


@stage_function("evaluate")
def run_check_critic(
    config: Config, *, prompts: Sequence[Any] | None = None, reward: Rewards | None = None
) -> CriticCheckResult:
    """Check the critic `config.evaluate.critic` on `config.data.prompts`.

    A run's critic is checked with that run's policy, rewards and settings of PPO and sampling. Any other critic is
    checked with `config.model`, as at the start of PPO with this configuration.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        reward: Functions or models instead of the rewards.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any sampling.
    """
    found = find_critic(config, has_reward=reward is not None)
    run = open_run(found.config, "evaluate", in_memory={"data.prompts": prompts, "reward": reward})
    roles = load_roles(with_values(found.config, {"rollout.engine": "builtin"}), run)
    trainer = Trainer.of(found.config, run, roles)
    parts: dict[str, Stateful] = {"coefficients": trainer.coefficients}
    if not (config.reward or roles.missing_eos is None or roles.missing_eos.is_known):
        parts["missing EOS"] = roles.missing_eos  # its automatic score came from the run's own rewards
    found.restore(roles.actor_critic, parts)
    num_prompts, num_prefixes, num_continuations = config.ppo.critic_check.size
    chosen = roles.prompts.train[: config.evaluate.num_prompts or num_prompts]
    run.data.add("prompts", used=len(chosen))
    # Whitening scales the rewards of all continuations together, so they cannot be split.
    at_once = len(chosen) if found.config.ppo.whiten_rewards else PROMPTS_AT_ONCE
    samples: list[PrefixSample] = []
    with (
        measuring(run) as on_phase,
        Progress("critic", total=len(chosen)) as progress,
    ):
        say(roles.stop_tokens.line)
        on_phase("critic", 0, len(chosen))
        for start in range(0, len(chosen), at_once):
            part = sample_prefixes(
                trainer,
                chosen[start : start + at_once],
                num_prefixes=num_prefixes,
                num_continuations=num_continuations,
                policy_version=found.update,
                first_prompt=start,
            )
            samples.append(part)
            done = min(len(chosen), start + at_once)
            progress.update(done)
            on_phase("critic", done, len(chosen))
        sample = PrefixSample.joined(samples)
        test = sample.test()
        with RunLog(run.folder / CRITIC_CHECKS_FILE) as checks:
            checks.append(found.update, check_row(test, sample.listed()))
    summary = {
        "model": found.policy,
        "critic": str(config.evaluate.critic),
        **({} if roles.privileged is None else {"privileged": roles.privileged.template}),
        "reward": roles.reward.name,
        **{name: value for name, value in asdict(test).items() if name != "bins"},
    }
    write_summary(run.folder, summary)
    if run.ranks.is_first:
        _print(summary, test)
    say_results(run, "summary.json", {"num_prefixes": test.num_prefixes})
    return CriticCheckResult(run.shared_folder, test, summary)


def _print(summary: dict[str, Any], test: PrefixTest) -> None:
    rows: dict[str, list[Cell]] = {
        label.lower(): [*(name and getattr(test, name) for name in (own, prompt_mean, ceiling)), chance]
        for label, own, prompt_mean, ceiling, chance in FIGURES
    }
    title = (
        f"{counted(test.num_prefixes, 'prefix')} of responses to {counted(test.num_prompts, 'prompt')}, "
        f"{test.num_continuations:.3g} continuations of each, scored by {summary['reward']}"
    )
    if template := summary.get("privileged"):
        title += f"; the critic also reads {template!r}"
    print_table(title, ["figure", "critic", "prompt's mean", "perfect", "chance"], rows)
    print(f"Mean error {test.error:.3g} (prompt's mean return: {test.prompt_error:.3g}), bias {test.bias:.3g}")


OFF: Mapping[str, Any] = {
    "ppo.eval_every": None,
    "ppo.eval_patience": None,
    "ppo.critic_check": None,
    "ppo.ptx_coef": 0.0,
}
"""Settings that are switched off for a check, which does not need them."""

OF_THE_RUN = frozenset({"model", "adapter", "reward", "reward_functions", "rollout", "ppo"})
"""Sections that are taken from the run that trained the critic."""


@dataclass(frozen=True)
class FoundCritic:
    """A critic to check.

    Attributes:
        config: The configuration of PPO with this critic.
        policy: Name of the policy that earns the returns.
        update: Updates that the policy has completed.
        checkpoint: The weights of policy and critic; None if `config` names them.
    """

    config: Config
    policy: str
    update: int = 0
    checkpoint: Checkpoint | None = None

    def restore(self, actor_critic: ActorCritic, parts: Mapping[str, Stateful]) -> None:
        """Load the checkpoint's weights into the models, and restore other parts whose state it contains."""
        if self.checkpoint is not None:
            restore_module(actor_critic, self.checkpoint.tensors("actor_critic"))
            progress = self.checkpoint.state["progress"]
            for name in parts.keys() & progress.keys():
                parts[name].load_state_dict(progress[name])
        actor_critic.requires_grad_(False)


def find_critic(config: Config, *, has_reward: bool = False) -> FoundCritic:
    """Find the critic that `config.evaluate.critic` names.

    Raises:
        ConfigError: The run has no critic or plays episodes, or something is missing or contradicts the run.
        ModelError: The run, checkpoint or model does not exist.
        DataError: The checkpoint is damaged.
    """
    source = str(config.evaluate.critic)
    name, at, _ = source.rpartition("@")
    folder = next((Path(os.path.expanduser(each)) for each in (source, name) if each and is_run(Path(each))), None)
    stage = "" if folder is None else read_config(folder)[0].get("stage", "")
    if stage not in ("ppo", "critic"):
        folder = None
    trained = config if folder is None else load_config(folder / CONFIG_FILE)
    if trained.environment.source or config.environment.source:
        raise ConfigError(
            f"evaluate.critic={source}: a critic is checked by continuing responses from their middle, which an "
            "episode with environment.source cannot be"
        )
    if folder is None:
        return _saved(config, config, source, has_reward=has_reward)
    if config.model is not None and find_model(config.model) != (
        find_model(str(trained.model)) if stage == "critic" else find_model(source, in_shards=True)
    ):
        raise ConfigError(
            f"the critic of {source} predicts the returns of that run's policy; leave out model={config.model}"
        )
    checkpoint = None
    if stage == "ppo":
        if trained.ppo.resolved_critic == "none":
            raise ConfigError(
                f"evaluate.critic={source}: the run has no critic (ppo.advantage={trained.ppo.advantage})"
            )
        checkpoint = _checkpoint(folder, source, is_named=bool(at) and str(folder) != os.path.expanduser(source))
    # Scheduled settings take the values with which the checkpoint's weights sampled.
    trained = _at(trained, max(1, checkpoint.update if checkpoint else 0))
    kept = OF_THE_RUN - {"reward"} if config.reward else OF_THE_RUN
    merged = with_values(_at(config, 1), trained.model_dump(include=set(kept)))
    if checkpoint is None:
        return _saved(config, merged, source, has_reward=has_reward)
    return FoundCritic(with_values(merged, OFF), source, checkpoint.update, checkpoint)


def _saved(requested: Config, base: Config, source: str, *, has_reward: bool) -> FoundCritic:
    """Describe a critic saved in a separate folder, as at the start of PPO."""
    for name in ("model", "reward"):
        if not getattr(base, name) and not (name == "reward" and has_reward):
            how = as_argument(f"--{name}")
            raise ConfigError(f"evaluate.critic={source} is not a run of PPO: pass {how}, or set {name}")
    values = {**OFF, "ppo.critic": requested.ppo.critic, "ppo.critic_init": source}
    config = with_saved_critic(with_values(_at(base, 1), values))
    return FoundCritic(config, str(config.model))


def _at(config: Config, update: int) -> Config:
    """The configuration at an update, with schedules resolved, and without a reference that it does not need."""
    config = config_at(config, update)
    ppo = config.ppo if config.ppo.needs_reference else config.ppo.model_copy(update={"reference": None})
    return config.model_copy(update={"ppo": ppo, "schedules": {}})


def _checkpoint(folder: Path, source: str, *, is_named: bool) -> Checkpoint:
    """Open the checkpoint that the name means; for a run, its newest valid one."""
    if is_named:
        model = Path(find_model(source, in_shards=True))
        return open_checkpoint(model.parent if model.name == MODEL_FOLDER else model)
    found = newest_valid(folder / CHECKPOINTS, on_rejected=say)
    if found is None:
        raise ConfigError(
            f"evaluate.critic={source}: the run has no checkpoint, which would contain its critic "
            "(checkpoint.keep_last=true keeps the last one)"
        )
    return found
