"""New comparisons for a further round: responses of the newest policy, ranked by the labeler."""

from __future__ import annotations

from pathlib import Path

from kedge.config import Config, with_values
from kedge.data import PromptStream
from kedge.runs.run import Run
from kedge.stages.evaluation.evaluator import collect_rankings
from kedge.stages.evaluation.policy import Sampling, load_policy
from kedge.stages.rlhf.folder import write_rows
from kedge.stages.rlhf.setup import RlhfInputs
from kedge.training.runtime import stream_seed
from kedge.training.stopping import stopping_together

__all__ = ["label_round"]


def label_round(config: Config, run: Run, inputs: RlhfInputs, policy: Path, number: int) -> Config:
    """Rank responses of a policy; the configuration of the round, with the rankings among its comparisons.

    Args:
        config: Configuration of the previous round.
        run: The run; its folder receives `comparisons-NUMBER.jsonl`.
        inputs: Prompts and labeler.
        policy: Folder of the newest policy.
        number: Number of the round, from 2.

    Raises:
        RewardError: The labeler failed, or preferred no response to another.
    """
    assert inputs.labeler is not None, "a further round has a labeler"
    settings, rollout, seed = config.rlhf, config.rollout, config.runtime.seed
    earlier = config.data.comparisons if settings.keep_comparisons else []
    path = run.shared_folder / f"comparisons-{number}.jsonl"
    told = with_values(config, {"data.comparisons": [*earlier, str(path)]})
    if run.ranks.first(path.exists):  # written before the run was resumed
        return told
    stream = PromptStream(inputs.prompts, seed=stream_seed(seed, "labelled", number))
    with stopping_together(run.ranks) as check_stop:
        rankings = collect_rankings(
            load_policy(str(policy), config, run),
            stream.next(min(settings.num_prompts, len(inputs.prompts))),
            inputs.labeler,
            # Sampled as in training, not as in evaluation: near temperature 0 all responses to a prompt are alike.
            Sampling(
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                batch_size=config.generate.batch_size,
                seed=stream_seed(seed, "labelled responses", number),
            ),
            num_responses=settings.num_responses,
            title=f"round {number}: sample to label",
            on_phase=lambda *_: check_stop(),
        )
    run.ranks.first(lambda: write_rows(path, rankings))
    return told
