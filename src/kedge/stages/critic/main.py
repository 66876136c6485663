"""Train a critic before PPO: sample the policy's responses, score them, and fit the critic to their returns.

    prompts ─▶ train / held-out split ─▶ responses of the policy ─▶ scores ─▶ returns G_t, as in PPO's first update
            ─▶ head: least squares on the trunk's states ─▶ separate critic: ½(G − V)², all weights
            ─▶ explained variance on held-out prompts ─▶ model/

An untrained critic costs every PPO run some updates on wrong advantages; training it beforehand costs this once.

Source: VC-PPO (arXiv 2503.01491) and VAPO (2504.05118): value pretraining on Monte Carlo returns; LP-FT (2202.10054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.config import Config
from kedge.models import save_policy, save_scalar_model
from kedge.runs.inputs import Rewards
from kedge.runs.run import Resume, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import Callback, running
from kedge.stages.critic.sampling import load_critic_inputs, sample_returns
from kedge.stages.planned import PlannedMemory
from kedge.stages.supervised import EndedResult, Trained, train_model
from kedge.training.supervised.loop import count_steps
from kedge.training.supervised.returns import measure_explained, train_critic


@dataclass(frozen=True, repr=False)
class CriticResult(EndedResult):
    """Result of training a critic.

    Attributes:
        folder: The run's folder.
        model: Folder of the critic: a sequence classifier with one label, or the policy plus a value head.
        summary: Contents of `summary.json`: explained variance on held-out prompts, returns, responses.
    """

    summary: dict[str, Any]


@stage_function("critic", CriticResult.read)
def run_critic(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: PlannedMemory | None = None,
) -> CriticResult:
    """Train a critic on the returns of `config.model`'s responses to `config.data.prompts`, scored by `config.reward`.

    The responses are kept in the run's folder. A resumed run samples only the missing ones.

    Args:
        config: The resolved configuration.
        prompts: Texts or rows instead of `config.data.prompts`.
        eval_prompts: Texts or rows instead of `config.data.eval_prompts`.
        reward: Functions or models instead of `config.reward`.
        resume: Resume the run in the output folder; start a new one otherwise.
        callback: Called after each optimizer step.
        planned: The planned memory, which is compared with the measured peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before anything is sampled.
        KeyboardInterrupt, Terminated: The run was interrupted; responses and critic are saved.
    """
    in_memory = {"data.prompts": prompts, "data.eval_prompts": eval_prompts, "reward": reward}
    run = open_run(config, "critic", in_memory=in_memory, resume=resume)
    inputs = load_critic_inputs(config, run)
    roles = inputs.roles
    critic = roles.actor_critic.critic
    with running(run) as ending:
        sampled = sample_returns(inputs, run)
        loss = inputs.loss(sampled.returns, sampled.train_rows)
        num_steps = 1  # a head on the policy's trunk is fitted in closed form
        if critic is not None:
            settings = config.critic
            num_steps = count_steps(
                len(sampled.train_rows), num_epochs=settings.num_epochs, batch_size=settings.batch_size
            )

        def train(**training: Any) -> Trained:
            held_out = sampled.held_out_rows
            outcome = train_critic(loss, sampled.train_rows, held_out=held_out, **training)
            passes = {"micro_batch_tokens": run.micro_batch_tokens, "ranks": run.ranks}
            summary = {
                "kind": config.critic.kind,
                "num_steps": outcome.num_steps,
                "measured_on": "held-out prompts" if held_out else "training prompts",
                **measure_explained(loss, held_out or sampled.train_rows, **passes),
                **sampled.summary(),
            }
            return Trained(outcome, _facts(summary), {"summary": summary})

        ending |= train_model(
            run,
            train,
            partial(
                save_policy,
                roles.actor_critic.policy,
                roles.tokenizer,
                stop_tokens=roles.stop_tokens.ids,
                temperature=config.rollout.temperature,
            )
            if critic is None
            else partial(save_scalar_model, critic, roles.tokenizer),
            roles.actor_critic.policy.causal if critic is None else critic.classifier,
            tokenizer=roles.tokenizer,
            prompts=[prompt.text for prompt in roles.prompts.train],
            num_steps=num_steps,
            shown=("loss", "explained_variance", "eval/explained_variance"),
            callback=callback,
            planned=planned,
            trained=roles.actor_critic.policy.value_head if critic is None else critic.classifier,
        )
    return CriticResult.read(run.shared_folder)


def _facts(summary: Mapping[str, Any]) -> dict[str, object]:
    """The results as rows of the model card."""
    explained = summary["explained_variance"]
    limits = "" if explained["low"] is None else f" ({explained['low']:.2f}–{explained['high']:.2f})"
    return {
        "optimizer steps": summary["num_steps"],
        f"explained variance, {summary['measured_on']}": f"{explained['value']:.2f}{limits}",
        "responses": summary["num_responses"],
        "mean and standard deviation of the returns": f"{summary['returns_mean']:.3g}, {summary['returns_std']:.3g}",
    }
