"""The judge of an evaluation, as the configuration names it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.errors import ConfigError
from kedge.evaluation.judges import Judge, PairJudge, ScoreJudge
from kedge.rewards import RewardSpec, names_function
from kedge.rewards.pairwise import PairwiseJudge
from kedge.runs.load_rewards import load_rewards
from kedge.runs.run import Run

__all__ = ["load_judge"]


def load_judge(given: RewardSpec | None, config: Config, run: Run, tokenizer: PreTrainedTokenizerBase) -> Judge:
    """The judge that the configuration names.

    Args:
        given: A function or model in place of `config.evaluate.judge`.
        config: Names the judge and its mode.
        run: Where models live.
        tokenizer: In whose tokens the responses come.

    Raises:
        ConfigError: A reward model is to judge pairs.
        RewardError: A function that cannot be loaded or has the wrong signature.
        ModelError: A reward model that cannot be loaded.
    """
    judge = str(config.evaluate.judge) if given is None else given
    if config.evaluate.judge_mode == "score":
        scorer = load_rewards(judge, config, run, tokenizer)
        return ScoreJudge(scorer)
    if not callable(judge) and not names_function(str(judge)):
        raise ConfigError(
            f"evaluate.judge_mode=pairwise needs a function as judge; {str(judge)!r} is a reward model, which scores"
        )
    return PairJudge(PairwiseJudge(judge if callable(judge) else str(judge)))
