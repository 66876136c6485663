"""Checks a finished critic: its values of prefixes against what the policy goes on to earn from there.

    prompts ─▶ responses ─▶ prefixes ─▶ continuations ─▶ returns to go ─▶ critic_checks.jsonl, summary.json, report
                                └─────▶ V(prefix) ──────────▲

Source: VinePPO (arXiv 2410.01679), section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedge.algorithm.prefix_test import PrefixTest
from kedge.config import Config, with_values
from kedge.errors import UnscoredError
from kedge.logs.critic_checks import check_row
from kedge.logs.evaluations import CRITIC_CHECKS_FILE, EvaluationsLog
from kedge.logs.phases import PhaseLog
from kedge.logs.progress import Progress, say
from kedge.logs.table import Cell, print_table
from kedge.runs.ending import say_results
from kedge.runs.inputs import Rewards
from kedge.runs.out_of_memory import ends_in_one_line
from kedge.runs.run import open_run
from kedge.runs.shown_result import shows_its_run
from kedge.stages.ppo.finished_critic import find_critic
from kedge.stages.ppo.prefixes import NOTHING_TO_CHECK, PrefixSample, sample_prefixes
from kedge.stages.ppo.roles import load_roles
from kedge.stages.ppo.settings import coefficients_of, value_warmup_of
from kedge.stages.ppo.steps import PpoSteps
from kedge.system.output import write_summary
from kedge.training.stopping import stopping_together

__all__ = ["CriticCheckResult", "run_check_critic"]

PROMPTS_AT_ONCE = 8


@shows_its_run
@dataclass(frozen=True, repr=False)
class CriticCheckResult:
    """Result of a check of a critic.

    Attributes:
        folder: The run's folder.
        test: All figures.
        summary: Contents of `summary.json`.
    """

    folder: Path
    test: PrefixTest
    summary: dict[str, Any]


@ends_in_one_line("evaluate")
def run_check_critic(
    config: Config, *, prompts: Sequence[Any] | None = None, reward: Rewards | None = None
) -> CriticCheckResult:
    """Check the critic `config.evaluate.critic` on `config.data.prompts`.

    The critic of a run is checked with the run's policy, rewards and settings of PPO and sampling. Another one is
    checked with `config.model`, as it is at the start of PPO with this configuration.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows in place of `config.data.prompts`.
        reward: Functions or models in place of the rewards.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; one line, before any sampling.
    """
    found = find_critic(config, has_reward=reward is not None)
    run = open_run(found.config, "evaluate", in_memory={"data.prompts": prompts, "reward": reward})
    roles = load_roles(with_values(found.config, {"rollout.engine": "builtin"}), run, prompts=prompts, reward=reward)
    coefficients = coefficients_of(found.config)
    found.restore(roles.actor_critic, {"coefficients": coefficients, "missing EOS": roles.missing_eos})
    steps, settings = PpoSteps(found.config, run, roles, value_warmup_of(found.config)), config.evaluate
    chosen = roles.prompts[: settings.critic_prompts]
    run.data.add("prompts", used=len(chosen))
    # The unit of whitened rewards is that of all continuations together.
    at_once = len(chosen) if found.config.ppo.whiten_rewards else PROMPTS_AT_ONCE
    parts: list[PrefixSample] = []
    with (
        run.started(),
        stopping_together(run.ranks) as check_stop,
        closing(PhaseLog(run.folder)) as log,
        Progress("critic", total=len(chosen)) as progress,
    ):
        say(roles.stop_tokens.line)
        log.write("critic", 0, len(chosen))
        for start in range(0, len(chosen), at_once):
            check_stop()
            part = sample_prefixes(
                steps,
                chosen[start : start + at_once],
                coefficients,
                num_prefixes=settings.critic_prefixes,
                num_continuations=settings.critic_continuations,
                policy_version=found.update,
                first_prompt=start,
            )
            parts.append(part)
            done = min(len(chosen), start + at_once)
            log.write("critic", done, len(chosen))
            progress.update(done)
        sample = PrefixSample.joined(parts)
        if not sample.num:
            raise UnscoredError(f"the critic cannot be checked: {NOTHING_TO_CHECK}")
        test = sample.test(confidence=settings.confidence)
        with EvaluationsLog(run.folder, CRITIC_CHECKS_FILE) as checks:
            checks.write(found.update, check_row(test, sample.listed()))
    summary = {
        "model": found.policy,
        "critic": str(config.evaluate.critic),
        "reward": roles.reward.name,
        **_figures(test),
    }
    write_summary(run.folder, summary)
    if run.ranks.is_first:
        _print(summary, test)
    run.finish({"num_prefixes": test.num_prefixes})
    say_results(found.config, run, "summary.json")
    return CriticCheckResult(run.shared_folder, test, summary)


def _figures(test: PrefixTest) -> dict[str, Any]:
    return {name: value for name, value in asdict(test).items() if name != "bins"}


def _print(summary: dict[str, Any], test: PrefixTest) -> None:
    rows: dict[str, list[Cell]] = {
        "ordered pairs, different prompts": [test.pairs_across, test.prompt_pairs_across, test.ceiling_across, 0.5],
        "ordered pairs, same prompt": [test.pairs_within, None, test.ceiling_within, 0.5],
        "explained variance": [test.explained_variance, test.prompt_explained_variance, test.ceiling_explained, 0.0],
        "rank correlation": [test.rank_correlation, None, None, 0.0],
        "rank correlation, same prompt": [test.rank_correlation_within, None, None, 0.0],
    }
    title = (
        f"{test.num_prefixes} prefixes of responses to {test.num_prompts} prompts, "
        f"{test.num_continuations:.3g} continuations of each, scored by {summary['reward']}"
    )
    print_table(title, ["figure", "critic", "prompt's mean", "perfect", "chance"], rows)
    print(f"Mean error {test.error:.3g} (prompt's mean return: {test.prompt_error:.3g}), bias {test.bias:.3g}")
