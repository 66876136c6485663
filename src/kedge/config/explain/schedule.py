"""The schedule of a run in plain English."""

from math import ceil

from kedge.config.schedules import count_epochs
from kedge.config.schema.root import Config
from kedge_base.texts import counted

SMALL_SHARE = 0.2
"""If a smaller share of the score reaches the first token without the critic, the schedule mentions λ."""


def schedule_in_words(config: Config, num_prompts_available: int | None = None, num_held_out: int | None = None) -> str:
    """Describe the size of a PPO run: responses, tokens, optimizer steps.

    Args:
        config: The resolved configuration.
        num_prompts_available: Prompts in the data, if known; adds the number of passes over them.
        num_held_out: Held-out prompts, if known.
    """
    return "\n".join([*_update(config), *_run(config, num_prompts_available, num_held_out)])


def _update(config: Config) -> list[str]:
    rollout, loop, responses = config.rollout, config.ppo, config.responses_per_update
    share = responses // loop.num_minibatches
    passes = f"makes {counted(ceil(loop.num_epochs), 'pass')} over them"
    if loop.num_epochs < 1:
        share = max(1, round(loop.num_epochs * share))
        passes = f"makes a pass over {share * loop.num_minibatches:,} of them, chosen at random"
    return [
        "Each update",
        f"  samples {counted(rollout.num_responses, 'response')} for each of {counted(rollout.num_prompts, 'prompt')}: "
        f"{counted(responses, 'response')}",
        f"  of at most {counted(rollout.max_new_tokens, 'token')} each (rollout.max_new_tokens), "
        f"{counted(responses * rollout.max_new_tokens, 'token')} in all,",
        *_baseline(config),
        *_left_out(config),
        f"  {passes}, each in {counted(loop.num_minibatches, 'minibatch')} of {counted(share, 'response')},",
        "  and takes one optimizer step per minibatch:",
        f"  {counted(ceil(loop.num_epochs) * loop.num_minibatches, 'optimizer step')} per update"
        f"{', fewer if ppo.early_stop_kl is exceeded' if loop.early_stop_kl else ''}.",
        *_critic_passes(config),
    ]


def _baseline(config: Config) -> list[str]:
    """Describe the additional greedy responses of ReMax."""
    if config.ppo.estimator_facts.baseline != "greedy":
        return []
    return ["  samples one more response for each prompt, the greedy one, whose score is the baseline,"]


def _critic_passes(config: Config) -> list[str]:
    """Describe the passes that train only the critic."""
    passes = config.ppo.critic_passes - 1
    if passes < 1:
        return []
    number = counted(_critic_steps(config, 1), "optimizer step")
    return [f"  After each pass the critic makes {passes} more alone: another {number} per update."]


def _left_out(config: Config) -> list[str]:
    """Describe how prompts whose responses all have equal scores are treated."""
    groups = config.ppo.constant_groups.name
    if groups == "keep":
        return []
    lines = ["  leaves out the prompts whose responses all score the same,"]
    if groups == "resample":
        rounds = counted(config.ppo.max_resamples, "additional round")
        lines.append(f"  samples others in their place, in at most {rounds},")
    return lines


def _run(config: Config, num_prompts_available: int | None, num_held_out: int | None) -> list[str]:
    loop = config.ppo
    updates = loop.num_updates
    prompts = updates * config.rollout.num_prompts
    # The number of responses that replace groups without spread is not known beforehand.
    resamples = loop.constant_groups.name == "resample"
    lines = [
        f"The run makes {counted(updates, 'update')}: {counted(updates * config.responses_per_update, 'response')}"
        f"{' to train on' if resamples else ''}, "
        f"at most {counted(updates * config.responses_per_update * config.rollout.max_new_tokens, 'new token')}, "
        f"{counted(count_epochs(config, updates) * loop.num_minibatches, 'optimizer step')}"
        f"{'; more responses are sampled in the additional rounds' if resamples else ''}.",
    ]
    if extra := _critic_steps(config, updates):
        lines.append(f"The further passes of the critic take another {counted(extra, 'optimizer step')}.")
    if warmup := loop.value_warmup_updates.at_most:
        lines.append(_warmup(config, warmup))
    if loop.resolved_critic == "separate":
        lines.append(_critic_cost(config))
    lines += _reach(config)
    if loop.resolved_critic == "none":
        lines.append(f"No critic is loaded or trained: ppo.advantage={loop.estimator} needs none.")
    for field, points in config.schedules.items():
        changes = ", ".join(f"{value:g} at update {update}" for update, value in sorted(points.items()))
        lines.append(f"{field} is scheduled: {changes}{', linear in between' if len(points) > 1 else ''}.")
    lines += [*_evaluation(config, num_held_out), *_critic_checks(config, num_held_out)]
    if num_prompts_available:
        least = "at least " if resamples else ""
        passes = _number(prompts / num_prompts_available)
        lines.append(
            f"It uses {least}{counted(prompts, 'prompt')} from the {num_prompts_available:,} available: "
            f"{passes} {'pass' if passes == '1' else 'passes'} over them."
        )
    return lines


def _reach(config: Config) -> list[str]:
    """Say how little of a score reaches the first token through GAE without the critic."""
    advantages, length, unit = config.ppo, config.rollout.max_new_tokens, "tokens"
    if advantages.credit == "turn":
        length, unit = config.environment.max_turns if config.environment.source else 1, "turns"
    if not advantages.estimator_facts.decays_by_lambda or not isinstance(advantages.gae_lambda, float):
        return []
    share = (advantages.gamma * advantages.gae_lambda) ** (length - 1)
    if share >= SMALL_SHARE:
        return []
    return [
        f"With ppo.gae_lambda={advantages.gae_lambda:g}, {share:.1%} of a score at the end of {length:,} {unit} "
        "reaches the first of them directly, and the rest only as far as the critic foresees it: ppo.gae_lambda=1 "
        "suits a critic that explains little (bench/study/RESULTS.md)."
    ]


def _critic_steps(config: Config, num_updates: int) -> int:
    """Describe the optimizer steps of the passes that train only the critic."""
    loop = config.ppo
    return count_epochs(config, num_updates) * loop.num_minibatches * max(0, loop.critic_passes - 1)


def _critic_cost(config: Config) -> str:
    """Describe the cost of a separate critic per update, and how to check that it is worth it.

    A forward pass is a third of a step of supervised fine-tuning: sampling, the reference and the critic's values take
    one each. Every pass over the responses is a step for each model that it trains.
    """
    ppo = config.ppo
    critic = 1 / 3 + ppo.num_epochs * ppo.critic_passes
    others = (1 + ppo.needs_reference) / 3 + ppo.num_epochs
    advice = [
        *([] if ppo.critic_check.every else ["ppo.critic_check measures what it sees"]),
        *([] if ppo.names_critic else ["one that kedge critic has trained before PPO sees more"]),
    ]
    further = f": {', and '.join(advice)}" if advice else ""
    return (
        f"The separate critic takes {critic:.1f} of the {critic + others:.1f} steps of supervised fine-tuning that an "
        f"update costs, with models of one size and without a reward model. It does not always earn that"
        f"{further}; docs/family.md says when."
    )


def _warmup(config: Config, warmup: int) -> str:
    ppo = config.ppo
    until, others = ppo.value_warmup_updates.until, counted(ppo.num_policy_updates, "update")
    steps = count_epochs(config, warmup) * ppo.num_minibatches * min(1, ppo.critic_passes)
    steps += _critic_steps(config, warmup)
    first = f"{counted(warmup, 'update')} ({counted(steps, 'optimizer step')})"
    if until is None:
        return (
            f"Only the critic is trained in the first {first}. The learning-rate schedule and the "
            f"controllers cover the {others} after them."
        )
    return (
        f"Only the critic is trained until it explains {until:g} of the variance of new returns, for at most "
        f"{first}. The learning-rate schedule and the controllers cover the updates after them, at "
        f"least {others}."
    )


def _evaluation(config: Config, num_held_out: int | None) -> list[str]:
    """Describe the evaluations on held-out prompts, and their cost."""
    evaluation, updates = config.ppo.eval_every, config.ppo.num_updates
    if evaluation.updates is None:
        return []
    number = 1 + -(-updates // evaluation.updates)
    prompts = min(evaluation.num_prompts, num_held_out or evaluation.num_prompts)
    responses, most = number * prompts, "at most " if num_held_out is None else ""
    share = responses / max(1, updates * config.responses_per_update)
    judged = "scored and compared with the start's by the judge" if config.evaluate.judge else "scored"
    return [
        f"{most.capitalize()}{counted(prompts, 'held-out prompt')} are answered before the first update, every "
        f"{counted(evaluation.updates, 'update')} and at the end, and the responses are {judged}: "
        f"{counted(number, 'evaluation')}, {most}{counted(responses, 'response')} ({_share(share)} those trained on)."
    ]


def _critic_checks(config: Config, num_held_out: int | None) -> list[str]:
    """Describe the checks of the critic, and their cost."""
    check, updates = config.ppo.critic_check, config.ppo.num_updates
    if check.every is None:
        return []
    number = 1 + -(-updates // check.every)
    most, per_prompt, continuations = check.size
    prompts = min(most, num_held_out or most)
    prefixes = prompts * per_prompt
    responses = number * (prefixes + (prefixes + prompts) * continuations)
    share = responses / max(1, updates * config.responses_per_update)
    return [
        f"The critic is checked before the first update, every {counted(check.every, 'update')} and at the end: "
        f"up to {counted(prefixes, 'prefix')} of responses to {counted(prompts, 'held-out prompt')}, "
        f"{counted(continuations, 'continuation')} of each: {counted(number, 'check')}, at most "
        f"{counted(responses, 'response')} ({_share(share)} those trained on)."
    ]


def _share(share: float) -> str:
    """Format a fraction of the responses as a percentage, a multiple as a factor."""
    return f"{share:.1%} of" if share < 1 else f"{_number(share)} times"


def _number(value: float) -> str:
    """Format a positive number with three significant digits: `1.05`, `2`, `1,000`."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
