"""The three stages in a chain, and InstructGPT's loop around the last two.

    demonstrations ─▶ sft/ ─▶ comparisons ─▶ reward/ ─▶ prompts (─▶ critic/) ─▶ ppo/ ─▶ model/
                                  ▲                                              │
                                  └── rankings by the labeler ◀── its responses ─┘ (rounds 2, 3, …)

Source: Stiennon figure 2; InstructGPT figure 2, §3.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kedge.config import Config, with_values
from kedge.rewards import RewardSpec
from kedge.runs.ending import chain_report, publish, resumable, say_next
from kedge.runs.inputs import Rewards
from kedge.runs.out_of_memory import ends_in_one_line
from kedge.runs.run import Resume, open_run
from kedge.runs.training import Callback
from kedge.stages.critic import run_critic
from kedge.stages.planning.report import MachinePlan
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.rlhf.folder import published_policy, write_rows
from kedge.stages.rlhf.labeling import label_round
from kedge.stages.rlhf.result import RlhfResult, Round, print_rounds, summarize
from kedge.stages.rlhf.setup import check_inputs, scored_config, stage_config, with_critic, with_trained
from kedge.stages.sft import run_sft
from kedge.system.output import write_summary

__all__ = ["RlhfResult", "run_rlhf"]


@ends_in_one_line("rlhf")
def run_rlhf(
    config: Config,
    *,
    demonstrations: Sequence[Any] | None = None,
    comparisons: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    labeler: RewardSpec | None = None,
    resume: Resume | None = None,
    callback: Callback | None = None,
    planned: Mapping[str, MachinePlan] | None = None,
) -> RlhfResult:
    """Fine-tune `config.model`, train a reward model on comparisons, run PPO against it; the last two in rounds.

    From round 2 on, the labeler ranks responses of the newest policy, and a new reward model is trained on the
    rankings. Rewards in `config.reward`, such as a length penalty, are added to the reward model's. With
    `rlhf.train_critic`, each round trains a critic between the two, and PPO starts from it.

    However the run ends, `model/` holds the newest policy.

    Args:
        config: The resolved configuration.
        demonstrations: Rows in place of `config.data.demonstrations`.
        comparisons: Rows in place of `config.data.comparisons`.
        prompts: Texts or rows in place of `config.data.prompts`.
        reward: Functions or models in place of `config.reward`.
        labeler: A function or reward model instead of `config.rlhf.labeler`.
        resume: Resume the run in the output folder: finished stages are kept, the current one continues. Start the run
            if there is none.
        callback: Called after each update of each stage.
        planned: What each stage should hold, by its name, to be compared with what the process held until its end.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; one line, before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the newest policy is saved.
    """
    data = {"data.demonstrations": demonstrations, "data.comparisons": comparisons, "data.prompts": prompts}
    run = open_run(config, "rlhf", in_memory={**data, "reward": reward, "rlhf.labeler": labeler}, resume=resume)
    inputs = check_inputs(
        config,
        run,
        demonstrations=demonstrations,
        comparisons=comparisons,
        prompts=prompts,
        reward=reward,
        labeler=labeler,
    )
    with (
        resumable(config, run.folder, "rlhf"),
        run.started(),
        chain_report(config, run.folder),
        published_policy(run.folder),
    ):
        if comparisons is not None:
            path = run.shared_folder / "comparisons.jsonl"
            run.ranks.first(lambda: write_rows(path, comparisons))
            config = with_values(config, {"data.comparisons": str(path)})

        then: Any = {"resume": resume, "callback": callback}
        plans: Mapping[str, MachinePlan] = planned or {}
        sft = run_sft(stage_config(config, run, "sft"), demonstrations=demonstrations, planned=plans.get("sft"), **then)
        config = with_values(config, {"reward_model.base": config.reward_model.base or str(sft.model)})

        policy, rounds = sft.model, list[Round]()
        for number in range(1, config.rlhf.num_rounds + 1):
            suffix = "" if number == 1 else f"-{number}"
            if number > 1:
                config = label_round(config, run, inputs, policy, number)
            for_reward = stage_config(config, run, f"reward{suffix}")
            trained = run_reward(for_reward, demonstrations=demonstrations, planned=plans.get("reward"), **then)
            start = sft.model if config.rlhf.restart_policy else policy
            scored = partial(scored_config, config, run, model=start, reward=trained.model)
            given: Any = {"prompts": prompts, "reward": None if reward is None else with_trained(trained.model, reward)}
            critic, for_ppo = None, scored(f"ppo{suffix}")
            if config.rlhf.train_critic:
                critic = run_critic(scored(f"critic{suffix}"), planned=plans.get("critic"), **given, **then)
                for_ppo = with_critic(for_ppo, critic.model)
            ppo = run_ppo(for_ppo, planned=plans.get("ppo"), **given, **then)
            rounds.append(Round(trained, ppo, critic))
            policy = ppo.model

    summary = summarize(sft, rounds)
    if run.ranks.is_first:
        run.sync()
        write_summary(run.folder, summary)
        run.finish({})
        print_rounds(run.folder, summary)
        say_next(config, run.folder, "rlhf", start=str(sft.model), judge=str(rounds[-1].reward.model))
        publish(config, run.folder)
    run.ranks.wait()  # so that the newest policy is there on every rank
    return RlhfResult(run.shared_folder, sft, rounds, summary)
