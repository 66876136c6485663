"""Generation: a policy's responses to prompts, scored if a reward is given.

prompts ─▶ responses ─▶ scores ─▶ responses.jsonl, summary.json
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from kedge.config import Config
from kedge.errors import RewardError
from kedge.logs.json_lines import JsonLines, read_json_lines
from kedge.logs.progress import say
from kedge.logs.table import print_table
from kedge.rewards import Responses, ScoredTerms, Scores, WeightedReward
from kedge.rewards.source import free_names
from kedge.runs.ending import say_results
from kedge.runs.inputs import Rewards, configured_rewards, load_prompts, load_rewards, prompt_columns
from kedge.runs.out_of_memory import stage_function
from kedge.runs.run import open_run
from kedge.runs.shown_result import shows_its_run
from kedge.runs.training import measuring
from kedge.stages.evaluation.policy import SampledBatch, join_responses, load_policy, sampling_of
from kedge.stages.evaluation.report import verdict_lines
from kedge.system.intervals import Interval, score_interval
from kedge.system.output import RESPONSES_FILE, write_summary
from kedge.system.texts import printable

__all__ = ["GenerateResult", "run_generate"]

MOST_SHOWN = 4
"""Responses that are few enough to be printed."""


@shows_its_run
@dataclass(frozen=True, repr=False)
class GenerateResult:
    """Result of a generate run.

    Attributes:
        folder: The run's folder.
        summary: Contents of `summary.json`.
        score: Mean score with its confidence interval over prompts; None without a reward.
    """

    folder: Path
    summary: dict[str, Any]
    score: Interval | None

    @property
    def responses(self) -> list[dict[str, Any]]:
        """The rows of `responses.jsonl`."""
        return read_json_lines(self.folder / RESPONSES_FILE)


@stage_function("generate")
def run_generate(
    config: Config, *, prompts: Sequence[Any] | None = None, reward: Rewards | None = None
) -> GenerateResult:
    """Sample responses of `config.model` to `config.data.prompts`, and score them with `config.reward` if it is set.

    Each batch is written when it is complete, so an interrupted run keeps the responses sampled so far.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        reward: Functions or models instead of `config.reward`.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any sampling.
    """
    run = open_run(config, "generate", in_memory={"data.prompts": prompts, "reward": reward})
    sampling = sampling_of(config, num_responses=config.generate.num_responses)
    policy = load_policy(str(config.model), config, run)
    room = policy.room(sampling.max_new_tokens)
    distinct = load_prompts(config, run, policy.tokenizer, room=room, prompts=prompts)
    rewards = configured_rewards(config) if reward is None else reward
    scorer = None
    if rewards:
        scorer = load_rewards(rewards, config, run, policy.tokenizer)
        scorer.check(prompt_columns(distinct))

    repeated = [prompt for prompt in distinct for _ in range(config.generate.num_responses)]
    with measuring(run) as on_phase:
        say(policy.stop_tokens.line)
        if config.generate.num_responses > 1:
            say(
                f"{config.generate.num_responses} responses to each prompt at temperature {sampling.temperature:g} "
                "(generate.temperature)"
            )
        with closing(policy.sample(repeated, sampling, title="generate", on_phase=on_phase)) as batches:
            responses, scored = _write_scored(batches, scorer, run.folder)
    scores = None if scored is None else scored.totals()
    score = None if scores is None else _mean_score(scores, config)
    verdicts = {} if scored is None else scored.verdicts()
    summary = {
        "model": policy.source,
        "num_prompts": len(distinct),
        "num_responses": len(repeated),
        "num_distinct": len(set(responses.completions)),
        "length": mean(map(len, responses.response_ids)),
        "eos_rate": mean(map(float, responses.stopped)),
        **({} if scores is None else {"num_scored": sum(each is not None for each in scores)}),
        **({} if scorer is None or score is None else {"reward": scorer.name, "score": score.as_json()}),
        **({"verdicts": verdicts} if verdicts else {}),
    }
    write_summary(run.folder, summary)
    if run.ranks.is_first:
        print_table(
            f"{len(repeated)} responses in {run.folder / RESPONSES_FILE}",
            ["policy", "score", "different", "tokens", "stopped"],
            {policy.source: [score, summary["num_distinct"], summary["length"], summary["eos_rate"]]},
        )
        for line in verdict_lines(verdicts):
            say(line)
    if len(repeated) <= MOST_SHOWN:
        for completion in responses.completions:
            say(f"response: {printable(completion)}")
    say_results(config, run, RESPONSES_FILE, {"num_responses": len(repeated)})
    return GenerateResult(run.shared_folder, summary, score)


def _write_scored(
    batches: Iterable[SampledBatch], scorer: WeightedReward | None, folder: Path
) -> tuple[Responses, ScoredTerms | None]:
    """Score and write each batch; return all responses, and their scores if there is a reward."""
    parts: list[Responses] = []
    scored: list[ScoredTerms] = []
    with closing(JsonLines(folder / RESPONSES_FILE)) as lines:
        for sampled in batches:
            batch = sampled.responses
            terms = None if scorer is None else scorer.score_terms(batch)
            for row in _rows(batch, terms):
                lines.write(row)
            parts.append(batch)
            if terms is not None:
                scored.append(terms)
    return join_responses(parts), ScoredTerms.joined(scored) if scored else None


def _rows(responses: Responses, terms: ScoredTerms | None) -> Iterator[dict[str, Any]]:
    """Each response as a row with the columns of its prompt.

    A column with a name that is taken, such as a reference `completion`, becomes `given_<name>`.
    """
    own: dict[str, Sequence[Any]] = {
        "prompt": responses.prompts,
        "completion": responses.completions,
        "stopped": responses.stopped,
        **({} if terms is None else {"score": terms.totals()}),
    }
    if terms is not None and (reasons := terms.row_reasons()) is not None:
        own["reason"] = reasons
    names = free_names(responses.columns, own)
    columns = {**own, **{names[column]: entries for column, entries in responses.columns.items()}}
    for entries in zip(*columns.values(), strict=True):
        yield dict(zip(columns, entries, strict=True))


def _mean_score(scores: Scores, config: Config) -> Interval:
    """Mean over prompts of each prompt's mean score, since responses to one prompt are not independent."""
    size = config.generate.num_responses
    groups = (scores[start : start + size] for start in range(0, len(scores), size))
    scored = [known for group in groups if (known := [score for score in group if score is not None])]
    if not scored:
        raise RewardError(f"the reward scored none of {len(scores)} responses")
    return score_interval(scored)
