"""The commands that train, sample and evaluate."""

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.command import Command
from kedge.cli.options import (
    Anyway,
    Changes,
    ComparisonData,
    Comparisons,
    ConfigFile,
    ControlPreset,
    Critic,
    DemonstrationData,
    Demonstrations,
    DryRun,
    Environment,
    Model,
    Out,
    Overrides,
    PresetName,
    Prompts,
    PromptTexts,
    Push,
    ResumeFrom,
    Reward,
    Seed,
    Strict,
)
from kedge.cli.resolving import resolve, resume_from, time_dry_run
from kedge.cli.values import IN_MEMORY, announced, literal_prompts, weighted_rewards
from kedge.config import initial_critic
from kedge.errors import ConfigError
from kedge.runs.claim import claim_free_folder, claims
from kedge.stages.demo.recipe import DURATION
from kedge.system.output import check_output

__all__ = ["app"]

app = typer.Typer()


@app.command(cls=Command)
def sft(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    data: DemonstrationData = None,
    out: Out = None,
    seed: Seed = None,
    push: Push = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
    dry_run: DryRun = False,
    anyway: Anyway = False,
) -> None:
    """Fine-tune a language model on demonstrations."""
    flags = {
        "model": model,
        "data.demonstrations": data,
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
        "push.repo": push,
    }
    resolved = resolve("sft", config, overrides, flags, preset, resume)
    if dry_run:
        return time_dry_run(resolved, "sft", resume)
    resumed = resume_from(resolved, "sft", resume, allow_changes)
    from kedge.stages.planning.before import plan_before
    from kedge.stages.sft import run_sft

    run_sft(resolved, resume=resumed, planned=plan_before(resolved, "sft", anyway=anyway))


@app.command(cls=Command)
def reward(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    data: ComparisonData = None,
    demonstrations: Demonstrations = None,
    out: Out = None,
    seed: Seed = None,
    push: Push = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
    dry_run: DryRun = False,
    anyway: Anyway = False,
) -> None:
    """Train a reward model on comparisons. Its mean score on the demonstrations, if given, is set to 0."""
    flags = {
        "model": model,
        "data.comparisons": data,
        "data.demonstrations": demonstrations,
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
        "push.repo": push,
    }
    resolved = resolve("reward", config, overrides, flags, preset, resume)
    if dry_run:
        return time_dry_run(resolved, "reward", resume)
    resumed = resume_from(resolved, "reward", resume, allow_changes)
    from kedge.stages.planning.before import plan_before
    from kedge.stages.reward import run_reward

    run_reward(resolved, resume=resumed, planned=plan_before(resolved, "reward", anyway=anyway))


@app.command(cls=Command)
def critic(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: Prompts = None,
    reward: Reward = None,
    out: Out = None,
    seed: Seed = None,
    push: Push = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
    dry_run: DryRun = False,
    anyway: Anyway = False,
) -> None:
    """Train a critic for PPO on the returns of the policy's responses, so that PPO need not begin without one."""
    flags = {
        "model": model,
        "data.prompts": prompts,
        "reward": weighted_rewards(reward),
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
        "push.repo": push,
    }
    resolved = resolve("critic", config, overrides, flags, preset, resume)
    if dry_run:
        return time_dry_run(resolved, "critic", resume)
    resumed = resume_from(resolved, "critic", resume, allow_changes)
    from kedge.stages.critic import run_critic
    from kedge.stages.planning.before import plan_before

    run_critic(resolved, resume=resumed, planned=plan_before(resolved, "critic", anyway=anyway))


@app.command(cls=Command)
def ppo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: Prompts = None,
    reward: Reward = None,
    critic: Critic = None,
    out: Out = None,
    seed: Seed = None,
    push: Push = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
    dry_run: DryRun = False,
    anyway: Anyway = False,
) -> None:
    """Train a policy with PPO on one or more rewards: reward models and functions."""
    flags = {
        "model": model,
        "data.prompts": prompts,
        "reward": weighted_rewards(reward),
        **initial_critic(critic),
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
        "push.repo": push,
    }
    resolved = resolve("ppo", config, overrides, flags, preset, resume)
    if dry_run:
        return time_dry_run(resolved, "ppo", resume)
    resumed = resume_from(resolved, "ppo", resume, allow_changes)
    from kedge.stages.planning.before import plan_before
    from kedge.stages.ppo import run_ppo

    run_ppo(resolved, resume=resumed, planned=plan_before(resolved, "ppo", anyway=anyway))


@app.command(cls=Command)
def rlhf(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    demonstrations: Demonstrations = None,
    comparisons: Comparisons = None,
    prompts: Prompts = None,
    reward: Reward = None,
    out: Out = None,
    seed: Seed = None,
    push: Push = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
    dry_run: DryRun = False,
    anyway: Anyway = False,
) -> None:
    """Run SFT, reward modeling and PPO, once or in rounds. Each --reward is added to the reward model's score.

    rlhf.train_critic=true trains a critic before PPO.
    """
    flags = {
        "model": model,
        "data.demonstrations": demonstrations,
        "data.comparisons": comparisons,
        "data.prompts": prompts,
        "reward": weighted_rewards(reward),
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
        "push.repo": push,
    }
    resolved = resolve("rlhf", config, overrides, flags, preset, resume)
    if dry_run:
        return time_dry_run(resolved, "rlhf", resume)
    resumed = resume_from(resolved, "rlhf", resume, allow_changes)
    from kedge.stages.planning.before import plan_chain_before
    from kedge.stages.rlhf import run_rlhf

    run_rlhf(resolved, resume=resumed, planned=plan_chain_before(resolved, anyway=anyway))


@app.command(cls=Command)
def control(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: ControlPreset = None,
    env: Environment = None,
    out: Out = None,
    seed: Seed = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
) -> None:
    """Train a policy with PPO (or TRPO) in an environment of Gymnasium."""
    flags = {"control.env": env, "out": out, "runtime.seed": seed}
    resolved = resolve("control", config, overrides, flags, preset, resume)
    resumed = resume_from(resolved, "control", resume, allow_changes)
    from kedge.stages.control import run_control

    run_control(resolved, resume=resumed)


@app.command(cls=Command)
def generate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: PromptTexts = None,
    reward: Reward = None,
    out: Out = None,
    seed: Seed = None,
) -> None:
    """Write a model's responses to prompts, with their scores if a reward is given."""
    texts = literal_prompts(prompts)
    flags = {
        "model": model,
        "data.prompts": IN_MEMORY if texts else prompts,
        "reward": weighted_rewards(reward),
        "out": out,
        "runtime.seed": seed,
    }
    resolved = resolve("generate", config, overrides, flags, preset)
    from kedge.stages.generate import run_generate

    run_generate(resolved, prompts=announced(texts))


@app.command(cls=Command)
def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: PromptTexts = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Policy to compare with; the references in the data by default.")
    ] = None,
    critic: Annotated[
        str | None,
        typer.Option(metavar="CRITIC", help="Check this critic instead: a run, or a trained critic (folder or id)."),
    ] = None,
    reward: Reward = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="JUDGE", help="Judge: a reward model (folder or id) or a function (file.py:name)."),
    ] = None,
    out: Out = None,
    seed: Seed = None,
) -> None:
    """Measure the win rate of a policy against another policy or the references; or check a critic (--critic)."""
    texts = literal_prompts(prompts)
    flags = {
        "model": model,
        "data.prompts": IN_MEMORY if texts else prompts,
        "evaluate.against": against,
        "evaluate.judge": judge,
        "evaluate.critic": critic,
        "reward": weighted_rewards(reward),
        "out": out,
        "runtime.seed": seed,
    }
    resolved = resolve("evaluate", config, overrides, flags, preset)
    if resolved.evaluate.critic is not None:
        from kedge.stages.check_critic import run_check_critic

        run_check_critic(resolved, prompts=announced(texts))
        return
    if reward:
        raise ConfigError("--reward scores the responses of --critic; a comparison takes --judge")
    from kedge.stages.evaluate import run_evaluate

    run_evaluate(resolved, prompts=announced(texts))


@app.command(
    cls=Command,
    help=f"Train a tiny summarizer from scratch with SFT, reward model and PPO, and evaluate it: {DURATION}.",
)
def demo(out: Out = None, seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0) -> None:
    """Run the demo."""
    with claims():
        folder = claim_free_folder(Path("runs") / "demo") if out is None else check_output(out)
        from kedge.stages.demo.main import run_demo

        run_demo(folder, seed)
