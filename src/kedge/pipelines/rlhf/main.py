"""The three stages in a chain, and InstructGPT's loop around the last two.

    demonstrations ─▶ sft/ ─▶ comparisons ─▶ reward/ ─▶ prompts ─▶ ppo/ ─▶ model/
                                  ▲                                 │
                                  └─ rankings by the labeller ◀─ its responses (round 2, 3, …)

Source: Stiennon figure 2; InstructGPT figure 2, §3.5.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.algorithm.statistics import Interval
from kedge.config import Config, with_values
from kedge.data import PromptStream
from kedge.evaluation.labeling import collect_rankings
from kedge.evaluation.policy import Sampling
from kedge.logs.json_lines import plain_json
from kedge.logs.table import Cell, print_table
from kedge.output import replace_file
from kedge.pipelines.ppo import PpoResult, run_ppo
from kedge.pipelines.reward import RewardResult, run_reward
from kedge.pipelines.rlhf.setup import RlhfInputs, check_inputs, ppo_config, stage_config
from kedge.pipelines.sft import SftResult, run_sft
from kedge.rewards import RewardSpec
from kedge.runs.ending import chain_report
from kedge.runs.load_policy import load_policy
from kedge.runs.run import Resume, Run, open_run
from kedge.training.runtime import stream_seed

__all__ = ["RlhfResult", "Round", "run_rlhf"]


@dataclass(frozen=True)
class Round:
    """One reward model, and the policy that was trained against it."""

    reward: RewardResult
    ppo: PpoResult

    def summary(self) -> dict[str, Any]:
        """Its figures."""
        first, last = (self.ppo.metrics[0], self.ppo.metrics[-1]) if self.ppo.metrics else ({}, {})
        return {
            "reward_model": self.reward.summary,
            "ppo": {
                "num_updates": len(self.ppo.metrics),
                "score_first": first.get("reward/score_mean"),
                "score_last": last.get("reward/score_mean"),
                "kl": last.get("objective/kl"),
            },
        }


@dataclass(frozen=True)
class RlhfResult:
    """What the chain leaves.

    Attributes:
        folder: The run's folder, with one folder per stage.
        sft: The fine-tuning.
        rounds: What came after it.
        summary: What `summary.json` holds.
    """

    folder: Path
    sft: SftResult
    rounds: list[Round]
    summary: dict[str, Any]

    @property
    def model(self) -> Path:
        """The newest policy's folder, which plain transformers loads."""
        return self.folder / "model"


def run_rlhf(
    config: Config,
    *,
    demonstrations: Sequence[Any] | None = None,
    comparisons: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    labeller: RewardSpec | None = None,
    resume: Resume | None = None,
) -> RlhfResult:
    """Fine-tune `config.model`, train a reward model on comparisons, run PPO against it; the last two in rounds.

    From round 2 on the labeller ranks responses of the newest policy, and the reward model is trained anew on them.
    Rewards in `config.reward` (a length penalty) are added to the reward model's.

    However the run ends, `model/` is the newest policy that there is.

    Args:
        config: The resolved configuration.
        demonstrations: Rows that take the place of `config.data.demonstrations`.
        comparisons: Rows that take the place of `config.data.comparisons`.
        prompts: Texts or rows that take the place of `config.data.prompts`.
        labeller: A function or reward model that takes the place of `config.rlhf.labeller`.
        resume: Go on with the run in the output folder: stages that have ended stay, the one in work goes on. Where
            there is no run, begin it.

    Raises:
        KedgeError: What is missing, cannot be read or does not fit, in one line, before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the newest policy is saved.
    """
    data = {"data.demonstrations": demonstrations, "data.comparisons": comparisons, "data.prompts": prompts}
    run = open_run(config, "rlhf", given={**data, "rlhf.labeller": labeller}, resume=resume)
    inputs = check_inputs(
        config, run, demonstrations=demonstrations, comparisons=comparisons, prompts=prompts, labeller=labeller
    )
    with run.started(), chain_report(config, run.folder), _published(run.folder):
        if comparisons is not None:
            path = _write_rows(run.folder / "comparisons.jsonl", comparisons)
            config = with_values(config, {"data.comparisons": path})
        sft = run_sft(stage_config(config, run, "sft"), demonstrations=demonstrations, resume=resume)
        config = with_values(config, {"reward_model.base": config.reward_model.base or str(sft.model)})
        newest, rounds = sft.model, list[Round]()
        for number in range(1, config.rlhf.num_rounds + 1):
            suffix = "" if number == 1 else f"-{number}"
            if number > 1:
                config = _label(config, run, inputs, newest, number)
            reward = run_reward(
                stage_config(config, run, f"reward{suffix}"), demonstrations=demonstrations, resume=resume
            )
            start = sft.model if config.rlhf.restart_policy else newest
            ppo = run_ppo(
                ppo_config(config, run, f"ppo{suffix}", model=start, reward=reward.model),
                prompts=prompts,
                resume=resume,
            )
            rounds.append(Round(reward, ppo))
            newest = ppo.model
    summary = {"sft": {"num_steps": sft.num_steps, **sft.evaluation}, "rounds": [each.summary() for each in rounds]}
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    run.finish({})
    _print(run.folder, summary)
    return RlhfResult(run.folder, sft, rounds, summary)


def _label(config: Config, run: Run, inputs: RlhfInputs, policy: Path, number: int) -> Config:
    """The next round's configuration: with the labeller's rankings of the newest policy's responses."""
    assert inputs.labeller is not None, "a further round has a labeller"
    settings, rollout, seed = config.rlhf, config.rollout, config.runtime.seed
    earlier = config.data.comparisons if settings.keep_comparisons else []
    path = run.folder / f"comparisons-{number}.jsonl"
    if path.exists():  # the run has been here before it was resumed
        return with_values(config, {"data.comparisons": [*earlier, str(path)]})
    stream = PromptStream(inputs.prompts, seed=stream_seed(seed, "labelled", number))
    rankings = collect_rankings(
        load_policy(str(policy), config, run),
        stream.next(min(settings.num_prompts, len(inputs.prompts))),
        inputs.labeller,
        # As in training, not as in evaluation: near temperature 0 all responses to a prompt are alike.
        Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            batch_size=config.generate.batch_size,
            seed=stream_seed(seed, "labelled responses", number),
        ),
        num_responses=settings.num_responses,
        title=f"round {number}: sample to label",
    )
    return with_values(config, {"data.comparisons": [*earlier, _write_rows(path, rankings)]})


def _write_rows(path: Path, rows: Sequence[Any]) -> str:
    """Rows as a file, so that every stage's `config.yaml` names all that it read."""
    lines = (json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False) for row in rows)
    replace_file(path, (f"{line}\n".encode("utf-8", "backslashreplace") for line in lines))
    return str(path)


@contextmanager
def _published(folder: Path) -> Iterator[None]:
    """Copy the newest policy to `model/`, however the block ends; it appears only once it is complete."""
    try:
        yield
    finally:
        numbered = sorted(folder.glob("ppo-*/model"), key=lambda path: int(path.parent.name.removeprefix("ppo-")))
        policies = [path for path in (folder / "sft" / "model", folder / "ppo" / "model", *numbered) if path.is_dir()]
        if policies:
            shutil.rmtree(folder / "model.part", ignore_errors=True)
            part = shutil.copytree(policies[-1], folder / "model.part")
            shutil.rmtree(folder / "model", ignore_errors=True)  # an older policy's, of a run that was resumed
            part.rename(folder / "model")


def _print(folder: Path, summary: dict[str, Any]) -> None:
    rows: dict[str, list[Cell]] = {}
    for number, each in enumerate(summary["rounds"], start=1):
        accuracy, ppo = each["reward_model"].get("accuracy"), each["ppo"]
        agreement = None if accuracy is None else Interval(**accuracy)
        rows[f"round {number}"] = [agreement, ppo["score_first"], ppo["score_last"], ppo["kl"]]
    columns = ["", "reward-model accuracy", "score, first update", "score, last update", "KL"]
    print_table(f"The newest policy is in {folder / 'model'}", columns, rows)
