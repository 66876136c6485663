"""The critic, before PPO: sample the policy's responses, score them, and fit a critic to their returns.

    prompts ─▶ train / held-out split ─▶ responses of the policy ─▶ scores ─▶ returns G_t, as in PPO's first update
            ─▶ head: least squares on the trunk's states ─▶ separate critic: ½(G − V)², all weights
            ─▶ explained variance on held-out prompts ─▶ model/

PPO pays for the critic's first steps in every run, with updates that follow its errors; here it is paid for once.

Source: VC-PPO (arXiv 2503.01491) and VAPO (2504.05118): value pretraining on Monte Carlo returns; LP-FT (2202.10054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.config import Config
from kedge.models import save_policy, save_scalar_model
from kedge.runs.inputs import Rewards
from kedge.runs.out_of_memory import stage_function
from kedge.runs.resuming import read_ending
from kedge.runs.run import Resume, Run, open_run
from kedge.runs.shown_result import shows_its_run
from kedge.runs.stage_card import stage_card
from kedge.runs.training import Callback, end_training, running, supervised_loop
from kedge.stages.critic.inputs import CriticInputs, load_critic_inputs
from kedge.stages.critic.sampling import Sampled, sample_returns
from kedge.stages.planning.report import MachinePlan, compared
from kedge.system.output import write_summary
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.supervised.loop import Outcome, StepCallback, count_steps
from kedge.training.supervised.returns import ReturnsLoss, measure_explained, with_explained
from kedge.training.supervised.returns_fit import train_critic

__all__ = ["CriticResult", "run_critic"]


@shows_its_run
@dataclass(frozen=True, repr=False)
class CriticResult:
    """Result of the training of a critic.

    Attributes:
        folder: The run's folder.
        summary: Contents of `summary.json`: explained variance on held-out prompts, returns, responses.
    """

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> CriticResult:
        """The result of a finished run."""
        return cls(folder, *read_ending(folder, "summary"))

    @property
    def model(self) -> Path:
        """Folder of the critic: a sequence classifier with one label, or the policy with a value head beside it."""
        return self.folder / "model"


@stage_function("critic", CriticResult.read)
def run_critic(
    config: Config,
    *,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: MachinePlan | None = None,
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
        planned: Memory that it should hold, to be compared with the measured peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before anything is sampled.
        KeyboardInterrupt, Terminated: The run was interrupted; responses and critic are saved.
    """
    in_memory = {"data.prompts": prompts, "data.eval_prompts": eval_prompts, "reward": reward}
    run = open_run(config, "critic", in_memory=in_memory, resume=resume)
    inputs = load_critic_inputs(config, run, prompts=prompts, eval_prompts=eval_prompts, reward=reward)
    save = partial(_save, config, run, inputs)
    with running(config, run) as ending:
        sampled = sample_returns(inputs, run)
        loss = inputs.loss(sampled.returns, sampled.train_rows)
        num_steps = _num_steps(config, sampled)
        shown = ("loss", "explained_variance", "eval/explained_variance")
        model = CheckpointModel(
            inputs.saved, lambda folder, step, weights: save(folder, weights, facts={"steps": step})
        )
        given: Any = {"tokenizer": inputs.roles.tokenizer, "callback": callback, "trained": inputs.trained}
        with supervised_loop(config, run, num_steps, model=model, shown=shown, **given) as training:
            training["on_step"] = _explaining(training["on_step"])
            outcome = train_critic(
                loss,
                sampled.train_rows,
                held_out=sampled.held_out_rows,
                **training,
                **config.training_of("critic"),
            )
            run.sync()
            summary = _write_summary(config, run, sampled, loss, outcome)
            save_last = partial(save, facts=_facts(summary), ended=True)
            end_training(config, run, outcome, module=inputs.saved, save=save_last)
        ending |= {**training["loop"].summary(), "summary": summary, **compared(planned, run.device)}
    return CriticResult(run.shared_folder, summary)


def _num_steps(config: Config, sampled: Sampled) -> int:
    """Optimizer steps; one for a head on the policy's trunk, which is fitted in closed form."""
    settings = config.critic
    if settings.kind == "shared":
        return 1
    return count_steps(len(sampled.train_rows), num_epochs=settings.num_epochs, batch_size=settings.batch_size)


def _explaining(on_step: StepCallback) -> StepCallback:
    return lambda step, metrics: on_step(step, with_explained(metrics))


def _write_summary(config: Config, run: Run, sampled: Sampled, loss: ReturnsLoss, outcome: Outcome) -> dict[str, Any]:
    """Measure the critic on the held-out prompts, or on the training prompts without any, and write `summary.json`."""
    rows = sampled.held_out_rows or sampled.train_rows
    explained = measure_explained(loss, rows, micro_batch_tokens=run.micro_batch_tokens, ranks=run.ranks)
    summary = {
        "kind": config.critic.kind,
        "num_steps": outcome.num_steps,
        "measured_on": "held-out prompts" if sampled.held_out_rows else "training prompts",
        **explained.summary(),
        **sampled.summary(),
    }
    write_summary(run.folder, summary)
    return summary


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


def _save(
    config: Config,
    run: Run,
    inputs: CriticInputs,
    folder: Path,
    weights: dict[str, Tensor] | None,
    *,
    facts: Mapping[str, object],
    ended: bool = False,
) -> Path:
    roles = inputs.roles
    prompts = [prompt.text for prompt in roles.prompts]
    card = stage_card(config, run, facts, tokenizer=roles.tokenizer, prompts=prompts, ended=ended)
    critic = roles.actor_critic.critic
    if critic is not None:
        return save_scalar_model(critic, roles.tokenizer, folder, card=card, weights=weights, final=ended)
    return save_policy(
        roles.actor_critic.policy,
        roles.tokenizer,
        folder,
        card=card,
        stop_tokens=roles.stop_tokens.ids,
        temperature=config.rollout.temperature,
        weights=weights,
        final=ended,
    )
