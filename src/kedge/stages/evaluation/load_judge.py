"""Loads the judge of an evaluation."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.errors import ConfigError
from kedge.rewards import RewardSpec, names_function
from kedge.rewards.pairwise import PairwiseJudge
from kedge.runs.inputs import load_rewards
from kedge.runs.run import Run
from kedge.stages.evaluation.judges import Judge, PairJudge, ScoreJudge

__all__ = ["load_judge"]


def load_judge(given: RewardSpec | None, config: Config, run: Run, tokenizer: PreTrainedTokenizerBase) -> Judge:
    """Load `config.evaluate.judge`.

    Args:
        given: A function or model in place of `config.evaluate.judge`.
        config: Names the judge and its mode.
        run: Device and precision of models, and the ranks that share them.
        tokenizer: Tokenizer of the responses.

    Raises:
        ConfigError: The mode is pairwise and the judge is a reward model.
        RewardError: The function cannot be loaded or has the wrong signature.
        ModelError: The reward model cannot be loaded.
    """
    judge = str(config.evaluate.judge) if given is None else given
    if config.evaluate.judge_mode == "score":
        scorer = load_rewards(judge, config, run, tokenizer)
        return ScoreJudge(scorer)
    if not callable(judge) and not names_function(str(judge)):
        raise ConfigError(f"evaluate.judge_mode=pairwise needs a function as judge; {str(judge)!r} is a reward model")
    return PairJudge(PairwiseJudge(judge if callable(judge) else str(judge), ranks=run.ranks))
