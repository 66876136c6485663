"""`kedge plan`: estimates the time and memory of PPO on a cluster."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.command import Command
from kedge.errors import ConfigError

__all__ = ["app"]

app = typer.Typer()


class CriticKind(str, Enum):
    """As `ppo.critic`."""

    shared = "shared"
    separate = "separate"
    none = "none"


Size = Annotated[str | None, typer.Option(metavar="N", help="Its number of parameters instead of --model: 7B, 350M.")]


@app.command(cls=Command)
def plan(
    cluster: Annotated[bool, typer.Option("--cluster", help="Plan for a cluster of accelerators.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Policy: a folder with a config.json, or that file.")
    ] = None,
    parameters: Size = None,
    prompt_tokens: Annotated[float, typer.Option(metavar="N", help="Mean tokens of a prompt.")] = 512,
    longest_prompt: Annotated[float | None, typer.Option(metavar="N", help="By default twice the mean.")] = None,
    response_tokens: Annotated[float, typer.Option(metavar="N", help="Mean tokens of a response.")] = 512,
    longest_response: Annotated[
        float | None,
        typer.Option(metavar="N", help="Where the sampler stops. By default three times the mean, and a wider band."),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Responses per update, all prompts together.")] = 1024,
    card: Annotated[
        str,
        typer.Option(metavar="NAME", help="H100, H200, H800, H20, A100, A800, MI300, GB200, or one with own figures."),
    ] = "H100",
    card_flops: Annotated[float | None, typer.Option(metavar="TFLOPS", help="Own figure: dense bf16 peak.")] = None,
    card_bandwidth: Annotated[float | None, typer.Option(metavar="TB/S", help="Own figure: of its memory.")] = None,
    card_memory: Annotated[float | None, typer.Option(metavar="GB", help="Own figure.")] = None,
    card_link: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Own figure: to the cards of the same machine.")
    ] = None,
    card_network: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Own figure: its share of the machine's network.")
    ] = None,
    cards: Annotated[
        int | None, typer.Option(metavar="N", help="Number of cards; by default 1, 2, 4, ... 512 are tried.")
    ] = None,
    rollout_cards: Annotated[
        int | None, typer.Option(metavar="N", help="Cards that only sample; 0: turns on all cards; default: tried.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Cards of one server; default: 1, 2, 4 and 8 are tried.")
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(metavar="0|1", help="0: synchronous, 1: one step off; default: both are tried.")
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="N", help="PPO epochs per update.")] = 4,
    minibatches: Annotated[int, typer.Option(metavar="N", help="Optimizer steps per epoch.")] = 1,
    critic: Annotated[
        CriticKind, typer.Option(help="On the policy's trunk, a model of its own, or none.")
    ] = CriticKind.shared,
    reference: Annotated[bool, typer.Option(help="Whether the KL to a reference is computed.")] = True,
    reward_parameters: Annotated[
        str | None, typer.Option(metavar="N", help="Size of the reward model, 7B; by default a function.")
    ] = None,
) -> None:
    """Estimate an update's time by phase, memory and bottleneck on a cluster; choose the cheapest layout that fits."""
    if not cluster:
        raise ConfigError(
            "kedge plan plans for clusters: add --cluster; for this machine, kedge ppo --dry-run times a few rows"
        )
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
        critic=critic.value,
        reference=reference,
        reward_parameters=reward_parameters,
    )
    typer.echo(str(result))
