"""Loads a reward: a model folder or id, a function, or several of them with weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedTokenizerBase

from kedge.models import Precision, load_scalar_model, load_tokenizer
from kedge.models.loading import Bases
from kedge.ranks import ALONE, PassTokens, Ranks
from kedge.rewards.function import FunctionReward, load_function
from kedge.rewards.model import ModelReward
from kedge.rewards.source import RewardSource
from kedge.rewards.weighted import CallLimits, GuardedReward, WeightedReward
from kedge.rewards.worker.client import RemoteFunction
from kedge_base.errors import RewardError
from kedge_base.term_names import is_function, source_name
from kedge_base.texts import names_judge

RewardSpec: TypeAlias = "str | Path | Callable[..., Any]"
"""A reward model's folder or hub id, `path/to/file.py:function`, `package.module:function`, `openai:MODEL@URL`, or a
function.
"""

JUDGE_FUNCTION = "kedge_tasks.judge:score"
"""The function that scores with a judge behind an API."""


@dataclass(frozen=True)
class RewardTerm:
    """One term of a weighted reward.

    Attributes:
        reward: the reward model or function.
        weight: the factor of its scores in the sum.
        settings: keyword arguments for a function, such as `{"window": 0.5}` for `kedge.rewards.penalties:too_long`;
            for a judge behind an API, those of `kedge_tasks.judge.score`.
        name: its name in metrics and messages; the function's or the folder's name by default.
    """

    reward: RewardSpec
    weight: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None


def terms_of(rewards: RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm]) -> list[RewardTerm]:
    """One reward or several as terms, with weight 1 unless in a `RewardTerm`."""
    given = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    return [each if isinstance(each, RewardTerm) else RewardTerm(each) for each in given]


def load_reward(
    terms: RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm],
    *,
    policy_tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    micro_batch_tokens: PassTokens = None,
    precision: Precision = "fp32",
    limits: CallLimits | None = None,
    log: Path | None = None,
    bases: Bases | None = None,
    ranks: Ranks = ALONE,
    more: Sequence[RewardSource] = (),
    may_be_empty: bool = False,
) -> WeightedReward:
    """Load one reward, or several, as a weighted sum.

    A text is a function if a Python name follows its last colon and no folder has that name, else a reward model. A
    function given by name runs in a worker process, a Python object in this process. Functions are loaded before
    models, which take longer.

    Args:
        terms: One reward or several, with weight 1 unless in a `RewardTerm`.
        policy_tokenizer: The policy's, to determine which ids have the same meaning in a reward model.
        device: The device of the reward models.
        trust_remote_code: Allow a model folder's own Python code to run.
        micro_batch_tokens: Tokens per forward pass of a reward model; None for all responses at once.
        precision: Number format of a reward model's matrix products.
        limits: Limits on functions' calls, and how failed calls are handled.
        log: The file for the output of functions in worker processes.
        bases: Source of the weights of reward models' bases.
        ranks: Ranks that divide the models' passes among them; functions run on the first.
        more: Existing sources to add, with weight 1.
        may_be_empty: See `WeightedReward`.

    Raises:
        RewardError: A function that cannot be loaded or has the wrong signature; settings for a model.
        ModelError: A reward model that cannot be loaded.
    """
    wanted = terms_of(terms)
    functions = {
        place: _load_function(
            term,
            limits or CallLimits(),
            log,
            ranks,
            skips_missing=bool(more) or any(other.weight for other in wanted if other is not term),
        )
        for place, term in enumerate(wanted)
        if callable(term.reward) or is_function(str(term.reward))
    }

    def load_model(term: RewardTerm) -> ModelReward:
        if term.settings:
            raise RewardError(f"reward {str(term.reward)!r} is a model and takes no settings; only functions do")
        source = cast("str | Path", term.reward)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        model = load_scalar_model(
            source,
            tokenizer=tokenizer,
            device=device,
            trust_remote_code=trust_remote_code,
            bases=bases,
            ranks=ranks,
        )
        return ModelReward(
            model,
            tokenizer,
            policy_tokenizer,
            name=term.name or source_name(str(source)),
            skip_too_long=not term.weight,
            micro_batch_tokens=micro_batch_tokens,
            precision=precision,
            ranks=ranks,
        )

    return WeightedReward(
        [(functions.get(place) or load_model(term), term.weight) for place, term in enumerate(wanted)]
        + [(source, 1.0) for source in more],
        may_be_empty=may_be_empty,
    )


def _load_function(
    term: RewardTerm, limits: CallLimits, log: Path | None, ranks: Ranks, *, skips_missing: bool
) -> GuardedReward:
    loaded: list[FunctionReward | RemoteFunction] = []

    def load() -> str:
        loaded.append(_function(term, limits, log, skips_missing=skips_missing))
        return loaded[0].name

    name = ranks.first(load)
    return GuardedReward(loaded[0] if loaded else None, limits, ranks, name=name)


def _function(
    term: RewardTerm, limits: CallLimits, log: Path | None, *, skips_missing: bool
) -> FunctionReward | RemoteFunction:
    if isinstance(term.reward, str) and names_judge(term.reward):
        name = term.name or source_name(term.reward)
        term = RewardTerm(JUDGE_FUNCTION, term.weight, {**term.settings, "judge": term.reward}, name)
    # A closure cannot be sent to another process, and Windows has no process groups.
    if callable(term.reward) or os.name != "posix":
        function = term.reward if callable(term.reward) else load_function(str(term.reward))
        return FunctionReward(function, name=term.name, settings=term.settings, skips_missing=skips_missing)
    return RemoteFunction(
        str(term.reward),
        name=term.name,
        settings=term.settings,
        limits=limits,
        log=log,
        skips_missing=skips_missing,
    )
