"""A PPO run's schedule in plain words, before it starts."""

from kedge.config.schema.root import Config

__all__ = ["schedule_in_words"]


def schedule_in_words(config: Config, num_prompts_available: int | None = None) -> str:
    """Say what the numbers of the configuration amount to: responses, tokens, optimiser steps.

    Args:
        config: the resolved configuration.
        num_prompts_available: prompts in the data, where they have been counted; tells the passes over them.
    """
    return "\n".join([*_update(config), *_run(config, num_prompts_available)])


def _update(config: Config) -> list[str]:
    rollout, ppo, responses = config.rollout, config.ppo, config.responses_per_update
    share = responses // ppo.num_minibatches
    return [
        "Each update",
        f"  samples {_count(rollout.num_responses, 'response')} for each of {_count(rollout.num_prompts, 'prompt')}: "
        f"{_count(responses, 'response')}, at most {_count(responses * rollout.max_new_tokens, 'new token')},",
        f"  then passes over them {_count(ppo.num_epochs, 'time')}, each time in "
        f"{_count(ppo.num_minibatches, 'minibatch')} of {_count(share, 'response')},",
        "  and takes one optimiser step per minibatch:",
        f"  {_count(ppo.num_epochs * ppo.num_minibatches, 'optimiser step')} per update"
        f"{', fewer when ppo.early_stop_kl is passed' if ppo.early_stop_kl else ''}.",
    ]


def _run(config: Config, num_prompts_available: int | None) -> list[str]:
    ppo, updates = config.ppo, config.ppo.num_updates
    prompts = updates * config.rollout.num_prompts
    lines = [
        f"The run makes {_count(updates, 'update')}: {_count(updates * config.responses_per_update, 'response')}, "
        f"at most {_count(updates * config.responses_per_update * config.rollout.max_new_tokens, 'new token')}, "
        f"{_count(updates * ppo.num_epochs * ppo.num_minibatches, 'optimiser step')}.",
    ]
    if ppo.value_warmup_updates:
        lines.append(f"Its first {_count(ppo.value_warmup_updates, 'update')} train the critic alone.")
    if num_prompts_available:
        lines.append(
            f"It takes {_count(prompts, 'prompt')} from the {num_prompts_available:,} that there are: "
            f"{prompts / num_prompts_available:.3g} passes over them."
        )
    return lines


def _count(number: int, noun: str) -> str:
    """A number and its noun: `1 response`, `2 minibatches`."""
    plural = f"{noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"
