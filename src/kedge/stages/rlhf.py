"""Runs the three stages in a chain, with InstructGPT's loop around the last two.

    demonstrations ─▶ sft/ ─▶ comparisons ─▶ reward/ ─▶ prompts (─▶ critic/) ─▶ ppo/ ─▶ model/
                                  ▲                                              │
                                  └── rankings by the labeler ◀── its responses ─┘ (rounds 2, 3, …)

Without comparisons, round 1 first ranks responses of sft/.

Source: Stiennon figure 2; InstructGPT figure 2, §3.5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from kedge.config import Config, check_stage, metric_in_chain, with_values
from kedge.config.schedules import config_at
from kedge.data import Prompt, PromptStream
from kedge.logs.json_lines import plain_json
from kedge.logs.table import Cell, print_table
from kedge.models import load_scalar_model
from kedge.rewards import Responses, RewardSpec, RewardTerm, WeightedReward
from kedge.rewards.loading import terms_of
from kedge.runs.calls import TrainingResult
from kedge.runs.ending import chain_report, end_waiting, publish, resumable, say_next
from kedge.runs.frozen import loading_of, tokenizer_of
from kedge.runs.inputs import Rewards, check_columns, load_rewards, load_rows, rewards_of
from kedge.runs.run import Resume, Run, describe_in_memory, open_run
from kedge.runs.stage_function import stage_function
from kedge.runs.training import Callback
from kedge.stages.critic import CriticResult, run_critic
from kedge.stages.planned import PlannedMemory
from kedge.stages.policy import SamplingSettings, load_policy
from kedge.stages.ppo import PpoResult, run_ppo
from kedge.stages.ppo.ahead import check_ahead
from kedge.stages.ppo.critics import load_saved_critic
from kedge.stages.ppo.roles import check_roles
from kedge.stages.rankings import ranked_rows, unranked_rows
from kedge.stages.reward import RewardResult, run_reward
from kedge.stages.sft import SftResult, run_sft
from kedge.training.runtime import stopping, stream_seed
from kedge_base.errors import RewardError
from kedge_base.intervals import Interval
from kedge_base.machine.durable import copy_tree, replaced_folder
from kedge_base.registry import service
from kedge_base.run_folder.output import SUMMARY_FILE, is_run, replace_file, write_summary, writing
from kedge_base.run_folder.record_format import read_json_object
from kedge_base.stage import value_of
from kedge_base.texts import names_judge


@dataclass(frozen=True)
class Round:
    """A reward model and the policy trained against it, and the critic that was trained in between, if any."""

    reward: RewardResult
    ppo: PpoResult
    critic: CriticResult | None = None

    def summary(self) -> dict[str, Any]:
        """The round's entries in `summary.json`."""
        first, last = (self.ppo.metrics[0], self.ppo.metrics[-1]) if self.ppo.metrics else ({}, {})
        return {
            "reward_model": self.reward.summary,
            **({} if self.critic is None else {"critic": self.critic.summary}),
            "ppo": {
                "num_updates": len(self.ppo.metrics),
                "score_first": first.get("reward/score_mean"),
                "score_last": last.get("reward/score_mean"),
                "kl": last.get("objective/kl"),
            },
        }


@dataclass(frozen=True, repr=False)
class RlhfResult(TrainingResult):
    """Result of the chain.

    Attributes:
        folder: The run's folder, with one folder per stage.
        model: Folder of the newest policy, which plain transformers can load.
        sft: Result of fine-tuning.
        rounds: Results of the rounds of reward model and PPO.
        summary: Contents of `summary.json`; of a run that waits for labels, with their number as `missing_labels`.
    """

    sft: SftResult
    rounds: list[Round]
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RlhfResult:
        """The result of a finished chain."""
        rounds = list[Round]()
        for number in count(1):
            reward, critic, ppo = (folder / f"{name}{_suffix(number)}" for name in ("reward", "critic", "ppo"))
            if not is_run(ppo):
                break
            trained = CriticResult.read(critic) if is_run(critic) else None
            rounds.append(Round(RewardResult.read(reward), PpoResult.read(ppo), trained))
        return cls(folder, SftResult.read(folder / "sft"), rounds, dict(read_json_object(folder / SUMMARY_FILE)))


@stage_function("rlhf", RlhfResult.read)
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
    planned: Mapping[str, PlannedMemory] | None = None,
) -> RlhfResult:
    """Fine-tune `config.model`, train a reward model on comparisons, run PPO against it; repeat the last two in rounds.

    From round 2 on, or from round 1 on without comparisons, the labeler ranks responses of the newest policy,
    and a new reward model is trained on the rankings. With `rlhf.labeler=human`, the run ends there and waits for
    labels, unless they are there. Rewards in `config.reward`, such as a length penalty, are added to the reward
    model's score. With `rlhf.train_critic`, each round trains a critic between the two, and PPO starts from it.

    However the run ends, `model/` holds the newest policy.

    Args:
        config: The resolved configuration.
        demonstrations: Rows instead of `config.data.demonstrations`.
        comparisons: Rows instead of `config.data.comparisons`.
        prompts: Texts or rows instead of `config.data.prompts`.
        reward: Functions or models instead of `config.reward`.
        labeler: A function or reward model instead of `config.rlhf.labeler`.
        resume: Resume the run in the output folder: finished stages are kept, the current one continues. Start a
            new one otherwise.
        callback: Called after each update of each stage.
        planned: The planned memory of each stage, by name, which is compared with the process's peak.

    Raises:
        KedgeError: An input is missing, unreadable or does not fit; raised before any training.
        KeyboardInterrupt, Terminated: The run was interrupted; the newest policy is saved.
    """
    objects = {"data.demonstrations": demonstrations, "data.comparisons": comparisons, "data.prompts": prompts}
    objects |= {"reward": reward, "rlhf.labeler": labeler}
    run = open_run(config, "rlhf", in_memory=objects, resume=resume)
    all_prompts, ranker = check_inputs(config, run)
    with resumable(run), run.started(), chain_report(run), published_policy(run):
        if comparisons is not None:
            path = run.shared_folder / "comparisons.jsonl"
            run.ranks.first(lambda: write_rows(path, comparisons))
            config = with_values(config, {"data.comparisons": str(path)})

        def options(stage: str) -> dict[str, Any]:
            in_chain = resume and replace(resume, chain=run)
            return {"resume": in_chain, "callback": callback, "planned": (planned or {}).get(stage)}

        sft = run_sft(stage_config(config, run, "sft"), demonstrations=demonstrations, **options("sft"))
        config = with_values(config, {"reward_model.base": config.reward_model.base or str(sft.model)})

        rounds = list[Round]()
        missing = 0
        for number in range(1, config.rlhf.num_rounds + 1):
            policy = rounds[-1].ppo.model if rounds else sft.model
            if number > 1 or not config.data.comparisons:
                config, missing = label_round(config, run, all_prompts, ranker, policy, number)
                if missing:
                    break
            start = sft.model if config.rlhf.restart_policy else policy
            rounds.append(_train_round(config, run, _suffix(number), start, options))
        run.start()  # only now if the run was resumed with all stages finished

    summary = {"sft": {"num_steps": sft.num_steps, **sft.evaluation}, "rounds": [each.summary() for each in rounds]}
    if missing:
        end_waiting(run, run.shared_folder / f"labels{_suffix(len(rounds) + 1)}", missing)
        summary["missing_labels"] = missing
    else:
        _end(config, run, summary, start=sft.model, judge=rounds[-1].reward.model)
    return RlhfResult(run.shared_folder, sft, rounds, summary)


def _train_round(config: Config, run: Run, suffix: str, start: Path, options: Callable[[str], dict[str, Any]]) -> Round:
    """Train a reward model, the critic if configured, and the policy.

    Args:
        config: The round's configuration.
        run: The run; has rows and rewards that were passed from Python.
        suffix: The suffix of the stages' folders.
        start: Folder of the policy that the round starts from.
        options: Returns the further arguments of a stage.
    """
    demonstrations = run.objects.get("data.demonstrations")
    trained = run_reward(
        stage_config(config, run, f"reward{suffix}"), demonstrations=demonstrations, **options("reward")
    )
    scored = partial(scored_config, config, run, model=start, reward=trained.model)
    reward = run.objects.get("reward")
    given: Any = {
        "prompts": run.objects.get("data.prompts"),
        "reward": None if reward is None else [RewardTerm(str(trained.model)), *terms_of(reward)],
    }
    critic = None
    for_ppo = scored(f"ppo{suffix}")
    if config.rlhf.train_critic:
        critic = run_critic(scored(f"critic{suffix}"), **given, **options("critic"))
        for_ppo = with_critic(for_ppo, critic.model)
    return Round(trained, run_ppo(for_ppo, **given, **options("ppo")), critic)


def _end(config: Config, run: Run, summary: dict[str, Any], *, start: Path, judge: Path) -> None:
    """Write the summary, mark the chain as finished, print its rounds and the next command, and push the policy."""
    if run.ranks.is_first:
        run.sync()
        write_summary(run.folder, summary)
        run.finish({})
        print_rounds(run.folder, summary)
        say_next(config, run.folder, "rlhf", start=str(start), judge=str(judge))
        publish(run)
    run.ranks.wait()  # so that the newest policy is there on every rank


def _suffix(number: int) -> str:
    """The suffix of a round's folder names."""
    return "" if number == 1 else f"-{number}"


def check_inputs(config: Config, run: Run) -> tuple[list[Prompt], WeightedReward | None]:
    """Load and read the inputs of all stages, so that errors in any of them are found before hours of fine-tuning.

    Args:
        config: The resolved configuration.
        run: The run, opened.

    Returns:
        All prompts; and the labeler of responses, None for people or if none are labeled.

    Raises:
        KedgeError: A stage cannot run with this configuration; or an input cannot be read or does not fit the others.
    """
    is_labeled_first = not config.data.comparisons and "data.comparisons" not in run.objects
    named = {"data.comparisons": config.data.comparisons or "labels, still to be made"}
    _check_stages(with_values(config, {**named, **describe_in_memory(run.objects)}), run)
    check_ahead(config, run)
    existing = _with_existing_models(config, run)
    policy = load_policy(str(config.model), config, run)
    tokenizer = policy.tokenizer
    context = policy.model.context_length
    load_rows("demonstrations", config, run, tokenizer, room=context)
    base = existing.reward_model.base
    reader = tokenizer
    longest = context
    if base is not None:
        reader = tokenizer_of(config, base)
        trusted = config.runtime.trust_remote_code
        options: Any = {"device": run.device, "trust_remote_code": trusted, "init": "any", "ranks": run.ranks}
        longest = load_scalar_model(base, tokenizer=reader, **options).context_length
    if not is_labeled_first:
        load_rows("comparisons", config, run, reader, room=longest)
    room = policy.room(config.rollout.max_new_tokens)
    prompts = load_rows("prompts", config, run, tokenizer, room=room)
    # The trained reward model is added.
    scorer = load_rewards(rewards_of(config, run), config, run, tokenizer, may_be_empty=True)
    check_roles(existing, run, policy, scorer, prompts)
    if config.rlhf.train_critic and existing.critic.names_base:
        critic = with_critic(existing, Path(existing.critic.base))
        load_saved_critic(critic, tokenizer, loading_of(critic, run))
    if config.rlhf.num_rounds == 1 and not is_labeled_first:
        return prompts, None
    if config.rlhf.asks_people and "rlhf.labeler" not in run.objects:
        service("human_labels")  # raises if it is not installed
        return prompts, None
    named = run.objects.get("rlhf.labeler") or str(config.rlhf.labeler)
    if isinstance(named, str) and names_judge(named):
        named = RewardTerm(named, settings={"ranks": True})
    labeler = load_rewards(named, config, run, tokenizer)
    check_columns(labeler.check, prompts)
    return prompts, labeler


def _check_stages(config: Config, run: Run) -> None:
    """Run each stage's own checks of its configuration."""
    trained = {"model": Path(str(config.model)), "reward": run.shared_folder / "reward" / "model"}
    stages = {name: stage_config(config, run, name) for name in ("sft", "reward")}
    stages["ppo"] = scored_config(config, run, "ppo", **trained)
    if config.rlhf.train_critic:
        stages["critic"] = scored_config(config, run, "critic", **trained)
        stages["ppo"] = with_critic(stages["ppo"], run.shared_folder / "critic" / "model")
    for name, each in stages.items():
        check_stage(each, name)


def _with_existing_models(config: Config, run: Run) -> Config:
    """Return the configuration without models that the chain will produce, such as `ppo.reference=OUT/sft/model`."""
    without = {"reward_model.base": None, "critic.base": "auto", "ppo.reference": None, "evaluate.judge": None}
    folder = run.shared_folder.resolve()
    named = {name: Path(str(value_of(config, name))).expanduser().resolve() for name in without}
    return with_values(config, {name: without[name] for name, path in named.items() if path.is_relative_to(folder)})


def stage_config(config: Config, run: Run, name: str) -> Config:
    """Return the configuration of a stage, which writes to a subfolder of the run's folder."""
    keep_best = metric_in_chain(config, name.partition("-")[0])
    return with_values(
        config, {"out": str(run.shared_folder / name), "push.repo": None, "checkpoint.keep_best": keep_best}
    )


def scored_config(config: Config, run: Run, name: str, *, model: Path, reward: Path) -> Config:
    """Return the configuration of PPO or its critic's training, with the policy and the trained reward model before
    other rewards.

    Raises:
        ConfigError: The critic is initialized from the reward model, and there is more than one.
    """
    terms = [{"source": str(reward)}, *(term.model_dump() for term in config.reward)]
    return with_values(stage_config(config, run, name), {"model": str(model), "reward": terms})


def with_critic(config: Config, critic: Path) -> Config:
    """Return the configuration of PPO that starts from the trained critic.

    Raises:
        ConfigError: The other settings of PPO do not fit this kind of critic.
    """
    kind = config.critic.kind if config.ppo.critic == "auto" else config.ppo.critic
    return with_values(config, {"ppo.critic": kind, "ppo.critic_init": str(critic)})


def label_round(
    config: Config, run: Run, prompts: Sequence[Prompt], labeler: WeightedReward | None, policy: Path, number: int
) -> tuple[Config, int]:
    """Rank responses of a policy, and return the round's configuration with the rankings added to its comparisons; and
    the number of answers that are missing, if people rank them.

    Args:
        config: Configuration of the previous round.
        run: The run; its folder receives the rankings.
        prompts: All prompts.
        labeler: Ranks the responses; None for people.
        policy: Folder of the newest policy.
        number: Number of the round.

    Raises:
        RewardError: The labeler failed, or preferred no response to another.
    """
    settings = config.rlhf
    rollout = config_at(config, config.ppo.num_updates if number > 1 else 1).rollout
    seed = config.runtime.seed
    earlier = config.data.comparisons if settings.keep_comparisons else []
    path = run.shared_folder / f"comparisons{_suffix(number)}.jsonl"
    told = with_values(config, {"data.comparisons": [*earlier, str(path)]})
    if run.ranks.first(path.exists):  # the run was resumed after writing it
        return told, 0
    stream = PromptStream(prompts, seed=stream_seed(seed, "labelled", number))
    asked = stream.next(min(settings.num_prompts, len(prompts)))
    # Sampled as in training, not as in evaluation: near temperature 0 all responses to a prompt are alike.
    sampling = SamplingSettings(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        batch_size=config.generate.batch_size,
        seed=stream_seed(seed, "labelled responses", number),
    )
    with stopping(ranks=run.ranks, at_once=True) as stop:

        def sample() -> Responses:
            sampled = load_policy(str(policy), config, run).sample(
                [prompt for prompt in asked for _ in range(settings.num_responses)],
                sampling,
                title=f"round {number}: sample to label",
                on_phase=lambda *_: stop.raise_if_requested(),
            )
            return Responses.joined([each.responses for each in sampled])

        if labeler is not None:
            rankings, missing = ranked_rows(asked, sample(), labeler), 0
        else:
            run.start()
            rankings, missing = _ask_people(config, run, policy, asked, sample, number)
    run.start()
    if not missing:
        run.ranks.first(lambda: write_rows(path, rankings))
    return told, missing


def _ask_people(
    config: Config,
    run: Run,
    policy: Path,
    prompts: Sequence[Prompt],
    sample: Callable[[], Responses],
    number: int,
) -> tuple[list[dict[str, Any]], int]:
    """Return the comparisons that people made in the round's folder of labels, and how many answers are missing.

    Raises:
        RewardError: All have answered, and preferred no response to another.
    """
    folder = run.shared_folder / f"labels{_suffix(number)}"
    rows = list[dict[str, Any]]()
    if not run.ranks.first((folder / "items.jsonl").is_file):
        rows = [{**row, "model": policy.parent.name} for row in unranked_rows(prompts, sample())]
    labels = service("human_labels")
    found, missing = run.ranks.first(lambda: labels(folder, rows, least=config.rlhf.min_labels))
    if config.reward_model.ties == "drop":
        found = [row for row in found if len({*row["ranks"]}) > 1]
    if not missing and not found:
        raise RewardError(f"no answer in {folder} prefers a response to another; label more, and resume")
    return found, missing


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write rows as JSON lines, so that every stage's `config.yaml` can name its data."""
    lines = (json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False) for row in rows)
    replace_file(path, (f"{line}\n".encode("utf-8", "backslashreplace") for line in lines))


@contextmanager
def published_policy(run: Run) -> Iterator[None]:
    """Copy the newest policy to `model/` when the block ends, even with an error; `model/` is never incomplete.

    With several ranks, only the first has policies in its folder.
    """
    folder = run.folder
    try:
        yield
    finally:
        numbered = sorted(folder.glob("ppo-*/model"), key=lambda path: int(path.parent.name.removeprefix("ppo-")))
        policies = [path for path in (folder / "sft" / "model", folder / "ppo" / "model", *numbered) if path.is_dir()]
        if policies and run.has_started:
            model = folder / "model"  # a resumed run may have one with an older policy
            with writing(model), replaced_folder(model) as part:
                copy_tree(policies[-1], part)


def print_rounds(folder: Path, summary: dict[str, Any]) -> None:
    """Print a table with one row per round."""
    rows: dict[str, list[Cell]] = {}
    for number, each in enumerate(summary["rounds"], start=1):
        accuracy = each["reward_model"].get("accuracy")
        ppo = each["ppo"]
        agreement = None if accuracy is None else _interval(accuracy)
        critic = [_interval(each["critic"]["explained_variance"])] if "critic" in each else []
        rows[f"round {number}"] = [agreement, *critic, ppo["score_first"], ppo["score_last"], ppo["kl"]]
    explains = ["explained by the critic"] if "critic" in summary["rounds"][0] else []
    columns = ["", "reward-model accuracy", *explains, "score, first update", "score, last update", "KL"]
    print_table(f"The newest policy is in {folder / 'model'}", columns, rows)


def _interval(figures: dict[str, float | None]) -> Interval:
    """Read an interval from `summary.json`, where null is an unknown bound."""
    return Interval(**{name: math.nan if each is None else each for name, each in figures.items()})
