"""Generation: a policy's responses to prompts, scored if a reward is given; all of them, or the best of n.

prompts ─▶ responses ─▶ scores ─▶ best of each prompt's n ─▶ responses.jsonl, summary.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from kedge.config import Config
from kedge.logs.json_lines import JsonLines, as_rows
from kedge.logs.table import print_table
from kedge.rewards import Responses, ScoredTerms, Scores, WeightedReward
from kedge.rewards.source import free_names
from kedge.runs.calls import RunResult
from kedge.runs.ending import say_results
from kedge.runs.inputs import Rewards, check_columns, configured_rewards, load_player, load_rewards, load_rows
from kedge.runs.run import open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import measuring
from kedge.stages.judges import mean_score
from kedge.stages.policy import (
    SampledResponses,
    SamplingSettings,
    load_policy,
    sampling_settings,
    shares_of,
)
from kedge_base.errors import ConfigError, RewardError
from kedge_base.intervals import Interval
from kedge_base.machine.invocation import as_argument
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import RESPONSES_FILE, write_summary
from kedge_base.run_folder.record_format import read_json_lines
from kedge_base.texts import counted, printable
from kedge_lab.evaluation.report import endings_line, verdict_lines

MOST_SHOWN = 4
"""Maximum number of responses that are printed."""

ALIKE = 0.01
"""Temperature up to which most prompts get equal responses with any seed."""


@dataclass(frozen=True, repr=False)
class GenerateResult(RunResult):
    """Result of a generate run.

    Attributes:
        folder: The run's folder.
        summary: Contents of `summary.json`.
        score: Mean score of the rows with its confidence interval over prompts; None without a reward.
    """

    summary: dict[str, Any]
    score: Interval | None

    @property
    def responses(self) -> list[dict[str, Any]]:
        """The rows of `responses.jsonl`."""
        return read_json_lines(self.folder / RESPONSES_FILE)


@stage_function("generate")
def run_generate(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    environment: Callable[[], Any] | None = None,
) -> GenerateResult:
    """Sample responses of `config.model` to `config.data.prompts`, and score them with `config.reward` if it is set.

    Each batch is written when it is complete, so an interrupted run keeps the responses sampled so far. With
    `generate.best_of`, a prompt is written when all of its responses are scored: the best of them.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        reward: Functions or models instead of `config.reward`.
        environment: A class instead of `config.environment.source`; the responses are then episodes with it.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any sampling.
    """
    rewards = configured_rewards(config) if reward is None else reward
    best_of = config.generate.best_of
    size = best_of or config.generate.num_responses
    sampling = sampling_settings(config, num_responses=size)
    in_memory = {"data.prompts": prompts, "reward": reward, "environment.source": environment}
    run = open_run(config, "generate", in_memory=in_memory)
    player = load_player(config, run, tokens=sampling.max_new_tokens, by_turn=False)
    earned = (player.reward,) if player is not None and player.environment.is_scored else ()
    is_scored = bool(rewards or earned)
    if best_of is not None:
        _check_best_of(best_of, sampling, scores=is_scored)
    policy = load_policy(str(config.model), config, run)
    room = policy.room(sampling.max_new_tokens, player=player)
    distinct = load_rows("prompts", config, run, policy.tokenizer, room=room)
    scorer = None
    if player is not None:
        player.begin(policy.stop_tokens.ids, room, policy.model.sampling_length, policy.tokenizer, distinct[:1])
    if is_scored:
        scorer = load_rewards(rewards, config, run, policy.tokenizer, more=earned)
        check_columns(scorer.check, distinct)

    repeated = [prompt for prompt in distinct for _ in range(size)]
    with measuring(run) as on_phase:
        say(policy.stop_tokens.line)
        if size > 1:
            say(f"{size} responses to each prompt at temperature {sampling.temperature:g} (generate.temperature)")
        with closing(policy.sample(repeated, sampling, title="generate", on_phase=on_phase, player=player)) as batches:
            sampled = _write_scored(batches, scorer, run.folder, best_of)
    shown = {policy.source: sampled.score(size)}
    if best_of is not None:
        shown = {"one response": sampled.score(best_of)}
        sampled = sampled.best_of_each(best_of)
        shown[f"best of {best_of}"] = sampled.score(1)
    score = [*shown.values()][-1]
    summary = {
        "model": policy.source,
        "num_prompts": len(distinct),
        **sampled.summary(),
        **({} if scorer is None or score is None else {"reward": scorer.name, "score": score.as_json()}),
    }
    if best_of is not None and (of_one := shown["one response"]) is not None:
        summary |= {"best_of": best_of, "score_of_one": of_one.as_json(), "kl_bound": kl_of_best(best_of)}
    write_summary(run.folder, summary)
    if run.ranks.is_first:
        _print_summary(run.folder / RESPONSES_FILE, summary, shown, sampled.endings)
    if len(sampled.responses) <= MOST_SHOWN:
        for completion in sampled.responses.completions:
            say(f"response: {printable(completion)}")
    say_results(run, RESPONSES_FILE, {"num_responses": len(sampled.responses)})
    return GenerateResult(run.shared_folder, summary, score)


@dataclass(frozen=True)
class _Sampled:
    """Responses, their scores if anything scores them, and the endings of episodes."""

    responses: Responses
    scored: ScoredTerms | None
    endings: Sequence[str]

    def score(self, size: int) -> Interval | None:
        """Mean score over prompts of `size` responses each; `RewardError` if none has a score."""
        if self.scored is None:
            return None
        if (found := mean_score(self.scored.totals(), size)) is None:
            raise RewardError(f"the reward scored none of {counted(len(self.responses), 'response')}")
        return found

    def best_of_each(self, size: int) -> _Sampled:
        """The best of every `size` responses."""
        assert self.scored is not None
        totals = self.scored.totals()
        rows = [start + _best(totals[start : start + size]) for start in range(0, len(totals), size)]
        endings = [self.endings[row] for row in rows] if self.endings else []
        return _Sampled(self.responses.select(rows), self.scored.select(rows), endings)

    def summary(self) -> dict[str, Any]:
        """Their part of `summary.json`."""
        found: dict[str, Any] = {
            "num_responses": len(self.responses),
            "num_distinct": len(set(self.responses.completions)),
            "length": mean(map(len, self.responses.response_ids)),
            "eos_rate": mean(map(float, self.responses.stopped)),
        }
        if self.scored is not None:
            found["num_scored"] = sum(score is not None for score in self.scored.totals())
            found["verdicts"] = self.scored.verdicts()
        found["endings"] = shares_of(self.endings)
        return {name: value for name, value in found.items() if value != {}}


def _print_summary(
    file: Path, summary: Mapping[str, Any], shown: Mapping[str, Interval | None], endings: Sequence[str]
) -> None:
    rows = {name: [score, None, None, None] for name, score in shown.items()}
    rows[[*rows][-1]][1:] = [summary[name] for name in ("num_distinct", "length", "eos_rate")]
    header = ["policy", "score", "different", "tokens", "stopped"]
    print_table(f"{counted(summary['num_responses'], 'response')} in {file}", header, rows)
    if "best_of" in summary:
        say(f"best of {summary['best_of']}: at most {summary['kl_bound']:.3g} nats per response from the policy")
    for line in verdict_lines(summary.get("verdicts", {})):
        say(line)
    if endings:
        say(endings_line(endings))


def kl_of_best(number: int) -> float:
    """Bound on the KL of the best of n responses to the policy that samples them, nats per response.

    log n − (n − 1)/n,   nearly tight if responses rarely coincide

    Source: Stiennon, appendix G.3; Beirami et al. 2024 (arXiv 2401.01879), who show that it is a bound.
    """
    return math.log(number) - (number - 1) / number


def _check_best_of(best_of: int, sampling: SamplingSettings, *, scores: bool) -> None:
    """Check that best-of-n can distinguish responses.

    Raises:
        ConfigError: Nothing scores the responses, or they are all equal.
    """
    if not scores:
        raise ConfigError(
            f"generate.best_of={best_of} keeps the response that scores best, and needs "
            f"{as_argument('--reward or --environment')} (one that gives rewards)"
        )
    if sampling.temperature <= ALIKE:
        raise ConfigError(
            f"generate.best_of={best_of} compares different responses, and at temperature {sampling.temperature:g} "
            "nearly all responses to a prompt are equal; use e.g. generate.temperature=1"
        )


def _write_scored(
    batches: Iterable[SampledResponses], scorer: WeightedReward | None, folder: Path, best_of: int | None
) -> _Sampled:
    """Score each batch, and write its rows, or only the best of every `best_of` rows; return all responses."""
    endings: list[str] = []
    parts: list[Responses] = []
    scored: list[ScoredTerms] = []
    rows: list[dict[str, Any]] = []
    size = best_of or 1
    with closing(JsonLines(folder / RESPONSES_FILE)) as lines:
        for sampled in batches:
            batch = sampled.responses
            terms = None if scorer is None else scorer.score_terms(batch)
            endings += sampled.endings
            rows += _rows(batch, terms, sampled.endings)
            complete = len(rows) // size * size  # a prompt's responses can straddle two batches
            for start in range(0, complete, size):
                group = rows[start : start + size]
                lines.write(group[0 if best_of is None else _best([row["score"] for row in group])])
            rows = rows[complete:]
            parts.append(batch)
            if terms is not None:
                scored.append(terms)
    return _Sampled(Responses.joined(parts), ScoredTerms.joined(scored) if scored else None, endings)


def _best(scores: Scores) -> int:
    """The index of the highest score, the first one of a tie; 0 if no response has a score."""
    return max(range(len(scores)), key=lambda place: -math.inf if (score := scores[place]) is None else score)


def _rows(responses: Responses, terms: ScoredTerms | None, endings: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Make a row of each response, with the columns of its prompt.

    A column whose name is taken, such as a reference `completion`, becomes `given_<name>`.
    """
    own: dict[str, Sequence[Any]] = {
        "prompt": responses.prompts,
        "completion": responses.completions,
        "stopped": responses.stopped,
        **({} if terms is None else {"score": terms.totals()}),
        **({"ending": endings} if endings else {}),
    }
    if terms is not None and (reasons := terms.row_reasons()) is not None:
        own["reason"] = reasons
    names = free_names(responses.columns, own)
    columns = {**own, **{names[column]: entries for column, entries in responses.columns.items()}}
    return as_rows(columns)
