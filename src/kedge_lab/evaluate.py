"""Evaluation: a policy's win rate against another policy or the references in the data; or how many prompts it solves.

    prompts ─▶ responses of both sides ─▶ judge ─▶ win rate with interval ─▶ judgments.jsonl, summary.json, report

    prompts ─▶ several responses to each ─▶ judge ─▶ pass@k, maj@k with intervals ─▶ judgments.jsonl, …

With an environment, a response is an episode, judged by its rewards.

Source: Stiennon figure 1 (win rates over references); Gao figure 1 (score over √KL); Chen et al. 2021 (arXiv
2107.03374) for pass@k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kedge.config import Config
from kedge.data import Prompt
from kedge.models import find_model
from kedge.rewards import RewardSpec
from kedge.runs.calls import RunResult
from kedge.runs.ending import say_results
from kedge.runs.inputs import check_columns, load_player, load_rows
from kedge.runs.run import Run, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import measuring
from kedge.stages.judges import load_judge
from kedge.stages.policy import Policy, load_policy, sampling_settings
from kedge_base.errors import ConfigError, DataError, RewardError
from kedge_base.intervals import Interval
from kedge_base.machine.invocation import as_argument
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import JUDGE_FILE
from kedge_base.run_folder.record_format import text_hash
from kedge_base.texts import counted, names_judge
from kedge_lab.evaluation.evaluator import Evaluator
from kedge_lab.evaluation.report import Evaluation, report
from kedge_lab.evaluation.solved import Solved, report_solved
from kedge_people.trace import labeled_prompts
from kedge_tasks.judge import read_usage


@dataclass(frozen=True, repr=False)
class EvaluateResult(RunResult):
    """Result of an evaluation.

    Attributes:
        folder: The run's folder.
        win_rate: Share of the prompts on which the policy's response is better; ties count half.
        summary: Contents of `summary.json`.
    """

    win_rate: Interval
    summary: dict[str, Any]


@dataclass(frozen=True, repr=False)
class PassResult(RunResult):
    """Result of an evaluation with several responses to each prompt.

    Attributes:
        folder: The run's folder.
        pass_at: By k, the share of prompts for which at least one of k responses is right.
        maj_at: By k, the share of prompts for which the most frequent answer of k responses is right; empty if the
            judge finds no answers.
        summary: Contents of `summary.json`.
    """

    pass_at: dict[int, Interval]
    maj_at: dict[int, Interval]
    summary: dict[str, Any]


def evaluate_or_check(config: Config, **given: Any) -> Any:
    """Run `kedge evaluate`: compare policies, measure pass@k, or check the critic that `evaluate.critic` names."""
    if config.evaluate.critic is None:
        return (run_evaluate if config.generate.num_responses == 1 else run_pass_at_k)(config, **given)
    from kedge_lab.check_critic import run_check_critic

    return run_check_critic(config, **given)


@stage_function("evaluate")
def run_evaluate(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    judge: RewardSpec | None = None,
    environment: Callable[[], Any] | None = None,
) -> EvaluateResult:
    """Compare `config.model` with `config.evaluate.against`, or with the references in the data, using a judge.

    One response per prompt is sampled with the settings of `config.generate`. The KL is measured on responses at
    `rollout.temperature`, as in training.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        judge: A function or reward model instead of `config.evaluate.judge`.
        environment: A class instead of `config.environment.source`; the responses are then episodes with it, and are
            judged by their rewards unless there is a judge.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any sampling.
    """
    settings = config.evaluate
    if settings.against is None and (environment is not None or config.environment.source is not None):
        raise ConfigError(
            f"episodes have no references to be compared with: pass {as_argument('--against')}, or "
            f"{as_argument('--samples', 'call kedge.pass_at_k')} to count those that are solved; kedge generate gives "
            "the mean score"
        )
    if settings.frontier and settings.against is None:
        raise ConfigError("evaluate.frontier needs evaluate.against, the policy that KL is measured from")
    named = config.generate.model_fields_set
    if settings.against is None and "num_responses" in named < type(config.generate).model_fields.keys():
        say(
            "one response to each prompt is compared with the reference in the data; pass@1 is measured with several: "
            f"{as_argument('--samples 2', 'kedge.pass_at_k')}"
        )
    run, evaluator, against = _opened(config, prompts, judge, environment)
    policy = evaluator.reader
    with measuring(run) as on_phase:
        evaluator = replace(evaluator, on_phase=on_phase)
        opponent = evaluator.references() if against is None else evaluator.sample(_announced(against))
        result = evaluator.compare(_announced(policy), opponent, against)
        if (win_rate := result.win_rate) is None:
            raise RewardError(f"the judge decided none of {counted(len(evaluator.prompts), 'pair')}")
        frontier = (_announced(load_policy(source, config, run)) for source in settings.frontier)
        others = [evaluator.compare(other, opponent, against) for other in frontier]
        on_phase("done", len(evaluator.prompts), len(evaluator.prompts))
        usage = read_usage(run.folder / JUDGE_FILE, config.judge.model_dump()["max_cost"])
        evaluation = Evaluation(evaluator.judge, result, opponent, settings.against or "references", others, usage)
        summary = report(evaluation, run.folder, is_shown=run.ranks.is_first)
    say_results(run, "summary.json", {"num_judged": summary["num_judged"]})
    return EvaluateResult(run.shared_folder, win_rate, summary)


@stage_function("evaluate")
def run_pass_at_k(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    judge: RewardSpec | None = None,
    environment: Callable[[], Any] | None = None,
) -> PassResult:
    """Measure how many prompts `config.model` solves with k responses, up to `config.generate.num_responses`.

    A response is right if the judge scores it 1 or more. `config.evaluate.against` and `frontier` are also measured, on
    the same prompts with the same random numbers.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        judge: A function or reward model instead of `config.evaluate.judge`.
        environment: As in `run_evaluate`.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any sampling.
    """
    num_samples = config.generate.num_responses
    if config.evaluate.judge_mode != "score":
        raise ConfigError(
            f"evaluate.judge_mode=pairwise compares two responses, but pass@{num_samples} counts right ones; use "
            "evaluate.judge_mode=score, or generate.num_responses=1"
        )
    if names_judge(str(judge or config.evaluate.judge)):
        raise ConfigError(
            f"pass@{num_samples} counts responses with a score of 1 or more, and a judge behind an API gives 1 to 10; "
            "use a verifier, or generate.num_responses=1"
        )
    run, evaluator, against = _opened(config, prompts, judge, environment)
    with measuring(run) as on_phase:
        repeated = [prompt for prompt in evaluator.prompts for _ in range(num_samples)]
        evaluator = replace(evaluator, prompts=repeated, on_phase=on_phase)
        others = (load_policy(source, config, run) for source in config.evaluate.frontier)
        policies = [evaluator.reader, *([] if against is None else [against])]
        solved = [Solved(each.source, evaluator.sample(_announced(each)), num_samples) for each in (*policies, *others)]
        on_phase("done", len(repeated), len(repeated))
        temperature = evaluator.sampling.temperature
        name = evaluator.judge.name
        summary = report_solved(solved, run.folder, judge=name, temperature=temperature, is_shown=run.ranks.is_first)
    say_results(run, "summary.json", {"num_responses": summary["num_responses"]})
    return PassResult(run.shared_folder, solved[0].pass_at, solved[0].maj_at, summary)


def _opened(
    config: Config,
    prompts: Sequence[Any] | None,
    judge: RewardSpec | None,
    environment: Callable[[], Any] | None,
) -> tuple[Run, Evaluator, Policy | None]:
    """Open the run; return it with the evaluator of the policy on the prompts, and the policy
    `config.evaluate.against`.
    """
    settings = config.evaluate
    in_memory = {"data.prompts": prompts, "evaluate.judge": judge, "environment.source": environment}
    run = open_run(config, "evaluate", in_memory=in_memory)
    policy = load_policy(str(config.model), config, run)
    against = None if settings.against is None else load_policy(settings.against, config, run)
    sampling = sampling_settings(config, num_responses=config.generate.num_responses)
    player = load_player(config, run, tokens=sampling.max_new_tokens, by_turn=False)
    room = policy.room(sampling.max_new_tokens, player=player)
    all_prompts = load_rows("prompts", config, run, policy.tokenizer, room=room)
    chosen = all_prompts[: settings.num_prompts]
    if len(chosen) < len(all_prompts):
        run.data.add("prompts", used=len(chosen), note="evaluate.num_prompts leaves out the rest")
    _check_unlabeled(config, chosen)
    evaluator = Evaluator(
        chosen,
        reader=policy,
        judge=load_judge(config, run, policy.tokenizer, player),
        sampling=sampling,
        kl_temperature=config.rollout.temperature,
        template=config.data.template,
        player=player,
    )
    check_columns(evaluator.judge.check, chosen)
    if against is not None:
        evaluator.check(against)
    for source in settings.frontier:
        evaluator.check(load_policy(source, config, run))  # not kept: one in memory at a time
    return run, evaluator, against


def _check_unlabeled(config: Config, prompts: Sequence[Prompt]) -> None:
    """Check that no policy has learned from labels of the prompts that it is judged on.

    Raises:
        DataError: One has, according to the records of its run and of those before.
    """
    settings = config.evaluate
    models = () if settings.labeled_prompts else (config.model, settings.against, *settings.frontier)
    for model in filter(None, models):
        found = labeled_prompts(Path(find_model(str(model))))
        same = [place for prompt in prompts if (place := found.get(text_hash(prompt.text)))]
        if same:
            raise DataError(
                f"{len(same)} of {len(prompts)} prompts were labeled, and {same[0]} was trained on the labels: choose "
                "others, or accept these with evaluate.labeled_prompts=true"
            )


def _announced(policy: Policy) -> Policy:
    """Load the policy and print where its responses end."""
    say(f"{policy.source}: {policy.stop_tokens.line}")
    return policy
