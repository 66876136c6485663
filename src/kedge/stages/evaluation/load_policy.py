"""Loads policies for sampling, and their sampling settings."""

from __future__ import annotations

from dataclasses import replace

from kedge.config import Config
from kedge.runs.frozen import freeze_models
from kedge.runs.run import Run
from kedge.stages.evaluation.policy import Policy, Sampling, load_frozen_policy
from kedge.training.runtime import stream_seed

__all__ = ["load_policy", "sampling_of"]


def load_policy(source: str, config: Config, run: Run) -> Policy:
    """Load a policy to sample from, on the run's device.

    Raises:
        ModelError: The policy cannot be loaded or sharded, or has no such stop token.
    """
    policy = load_frozen_policy(
        source,
        device=run.device,
        precision=run.precision,
        stop_token=config.rollout.stop_token,
        trust_remote_code=config.runtime.trust_remote_code,
        chat_template=config.data.chat_template if source == str(config.model) else None,
        ranks=run.ranks,
    )
    freeze_models([policy.model], config, run, can_rest=False)
    return replace(policy, precision="bf16") if policy.model.holds_bf16 else policy


GREEDY = 0.01
"""Temperature of the only response to a prompt: practically greedy, as in N+."""


def sampling_of(config: Config, *, num_responses: int = 1) -> Sampling:
    """The sampling settings of `config.generate`.

    Args:
        config: The configuration.
        num_responses: Responses to each prompt: several are to differ.
    """
    temperature = config.generate.temperature
    if temperature is None:
        temperature = GREEDY if num_responses == 1 else config.rollout.temperature
    return Sampling(
        max_new_tokens=config.generate.max_new_tokens or config.rollout.max_new_tokens,
        temperature=temperature,
        batch_size=config.generate.batch_size,
        seed=stream_seed(config.runtime.seed, "answers"),
    )
