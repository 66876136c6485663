"""`kedge plan`: estimates the memory and time of a stage on one machine, or of PPO on a cluster."""

from typing import Annotated, Any

import typer

from kedge.cli.command import Command
from kedge.cli.options import ConfigFile, PresetName
from kedge.cli.values import weighted_rewards
from kedge.config import STAGES, Config, initial_critic, load_config, preset_conflicts
from kedge.errors import ConfigError

__all__ = ["app"]

app = typer.Typer()

PLANNED = ("sft", "reward", "critic", "ppo", "rlhf")
"""The stages that can be planned for one machine."""
MACHINE, CLUSTER = "One machine", "A cluster (--cluster)"
CRITICS = ("shared", "separate", "none")

Data = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="As of the stage's own command.", rich_help_panel=MACHINE)
]


def _cluster(help: str, metavar: str = "N") -> Any:
    return typer.Option(metavar=metavar, help=help, rich_help_panel=CLUSTER)


@app.command(cls=Command)
def plan(
    stage: Annotated[
        str | None, typer.Argument(metavar="[STAGE]", help=f"Stage to plan for one machine: {', '.join(PLANNED)}.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="Fields to set, as of the stage's command.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Policy; only its config.json is read."),
    ] = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    prompts: Data = None,
    reward: Data = None,
    demonstrations: Data = None,
    comparisons: Data = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="h100, h200, a100, a100-40, 4090, m3-64, or a CPU with so much memory, cpu:24GiB; by default this "
            "machine.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0, help="Of the device, for the run's cost.", rich_help_panel=MACHINE),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also run two shallow models of full width for two updates, and extrapolate: slower, and exact.",
            rich_help_panel=MACHINE,
        ),
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Plan for a cluster of accelerators.", rich_help_panel=CLUSTER)
    ] = False,
    parameters: Annotated[str | None, _cluster("Number of parameters instead of --model: 7B, 350M.")] = None,
    prompt_tokens: Annotated[float, _cluster("Mean tokens of a prompt.")] = 512,
    longest_prompt: Annotated[float | None, _cluster("By default twice the mean.")] = None,
    response_tokens: Annotated[float, _cluster("Mean tokens of a response.")] = 512,
    longest_response: Annotated[
        float | None, _cluster("Where the sampler stops. By default three times the mean, and a wider band.")
    ] = None,
    batch: Annotated[int, _cluster("Responses per update, all prompts together.")] = 1024,
    card: Annotated[
        str, _cluster("H100, H200, H800, H20, A100, A800, MI300, GB200, or one with own figures.", "NAME")
    ] = "H100",
    card_flops: Annotated[float | None, _cluster("Own figure: dense bf16 peak.", "TFLOPS")] = None,
    card_bandwidth: Annotated[float | None, _cluster("Own figure: of its memory.", "TB/S")] = None,
    card_memory: Annotated[float | None, _cluster("Own figure.", "GB")] = None,
    card_link: Annotated[float | None, _cluster("Own figure: to the cards of the same machine.", "GB/S")] = None,
    card_network: Annotated[float | None, _cluster("Own figure: its share of the machine's network.", "GB/S")] = None,
    cards: Annotated[int | None, _cluster("Number of cards; by default 1, 2, 4, ... 512 are tried.")] = None,
    rollout_cards: Annotated[
        int | None, _cluster("Cards that only sample; 0: turns on all cards; default: tried.")
    ] = None,
    tensor_parallel: Annotated[int | None, _cluster("Cards of one server; default: 1, 2, 4 and 8 are tried.")] = None,
    staleness: Annotated[
        int | None, _cluster("0: synchronous, 1: one step off; default: both are tried.", "0|1")
    ] = None,
    epochs: Annotated[int, _cluster("PPO epochs per update.")] = 4,
    minibatches: Annotated[int, _cluster("Optimizer steps per epoch.")] = 1,
    critic: Annotated[
        str,
        typer.Option(
            metavar="CRITIC",
            help="For a cluster: shared (on the policy's trunk), separate or none. For a stage: a trained critic, as "
            "of kedge ppo.",
        ),
    ] = "shared",
    reference: Annotated[
        bool, typer.Option(help="Whether the KL to a reference is computed.", rich_help_panel=CLUSTER)
    ] = True,
    reward_parameters: Annotated[str | None, _cluster("Size of the reward model, 7B; by default a function.")] = None,
) -> None:
    """Estimate memory and time before anything is loaded: of a stage on one machine, or of PPO on a cluster."""
    if not cluster:
        named = None if critic in CRITICS else critic
        flags = {
            "model": model,
            "data.prompts": prompts,
            "data.demonstrations": demonstrations,
            "data.comparisons": comparisons,
            "reward": weighted_rewards(reward),
            **initial_critic(named),
        }
        resolved = _resolve(stage, config, overrides, flags, preset)
        from kedge.stages.planning.machine import plan_machine

        typer.echo(plan_machine(resolved, str(stage), device_name=device, price_per_hour=price_per_hour, probe=probe))
        return
    if stage is not None:
        raise ConfigError(f"--cluster plans PPO from a few numbers and takes no stage; leave out {stage!r}")
    if critic not in CRITICS:
        raise ConfigError(f"--critic is {critic!r}; with --cluster it is one of {', '.join(CRITICS)}")
    own = {"flops": card_flops, "bandwidth": card_bandwidth, "memory": card_memory, "link": card_link,
           "network": card_network}  # fmt: skip
    from kedge.plan import plan_cluster

    result = plan_cluster(
        model=model,
        parameters=parameters,
        prompt_tokens=prompt_tokens,
        longest_prompt=longest_prompt,
        response_tokens=response_tokens,
        longest_response=longest_response,
        responses=batch,
        card=card,
        own_figures={name: figure for name, figure in own.items() if figure is not None},
        cards=cards,
        rollout_cards=rollout_cards,
        tensor_parallel=tensor_parallel,
        staleness=staleness,
        epochs=epochs,
        minibatches=minibatches,
        critic=critic,  # pyright: ignore[reportArgumentType], checked above
        reference=reference,
        reward_parameters=reward_parameters,
    )
    typer.echo(str(result))


def _resolve(
    stage: str | None, file: Any, overrides: list[str] | None, flags: dict[str, Any], preset: list[str] | None
) -> Config:
    """The stage's configuration; data and rewards may be left out."""
    if stage is None:
        raise ConfigError(f"kedge plan needs a stage ({', '.join(PLANNED)}), or --cluster for a cluster")
    if stage not in PLANNED:
        known = "cannot be planned" if stage in STAGES else "is no stage"
        raise ConfigError(f"{stage!r} {known}; kedge plan takes {', '.join(PLANNED)}, and then FIELD=VALUE")
    resolved = load_config(file, overrides or (), flags, preset, stage=stage)
    if line := preset_conflicts(resolved, stage):
        typer.echo(line, err=True)
    if resolved.model is None and not (stage == "reward" and resolved.reward_model.base):
        raise ConfigError(f"kedge plan {stage} needs model: pass --model, or set it in the configuration")
    return resolved
