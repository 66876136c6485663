"""The stages of a chain with their configurations, before any of them has run."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.config import Config, with_values

__all__ = ["rlhf_stages"]


def rlhf_stages(config: Config) -> Iterator[tuple[str, Config]]:
    """The stages of a round with their configurations; each model has the shape of the one that it starts from."""
    scored = config if config.reward else with_values(config, {"reward": [config.reward_model.base or config.model]})
    yield "sft", config
    yield "reward", config
    if config.rlhf.train_critic:
        yield "critic", scored
        trained = {"ppo.critic": config.critic.kind, "ppo.critic_init": config.critic.base}
        scored = with_values(scored, trained)
    yield "ppo", scored
