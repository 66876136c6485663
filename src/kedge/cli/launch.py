"""`kedge launch`: starts a stage as several ranks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kedge.cli.command import Command
from kedge.errors import ConfigError
from kedge.stages.stage import find_stage, stages

__all__ = ["app"]

app = typer.Typer()

RANKED = [stage.name for stage in stages().values() if stage.is_ranked]
EXAMPLE = "kedge launch --ray -- ppo --model MODEL … --out runs/ppo"
ANYWHERE = "anywhere"
"""The value of --ray without an address."""


class _Launch(Command):
    """What follows -- is a command of its own, and --ray may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in `Command`."""
        own, mark, stage = args, "", []
        if "--" in args:
            place = args.index("--")
            own, mark, stage = args[:place], "--", args[place + 1 :]
        elif any(word in RANKED for word in args):
            raise ConfigError(f"kedge launch: write the command after --, as in {EXAMPLE}")
        own = list(own)
        for index in reversed([index for index, word in enumerate(own) if word == "--ray"]):
            if index + 1 == len(own) or own[index + 1].startswith("-"):
                own.insert(index + 1, ANYWHERE)
        return super().parse_args(ctx, [*own, *([mark] if mark else []), *stage])


@app.command(cls=_Launch)
def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help=f"One of {', '.join(RANKED)}, with its options.")
    ],
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Print torchrun's line for N machines.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks per machine, one per GPU.")] = None,
    head: Annotated[
        str | None, typer.Option(metavar="HOST", help="The machine where all meet; by default this one.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="A free port there.")] = 29500,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Start one rank per device of a Ray cluster, again from the last checkpoint if one fails. Without an"
            " address: RAY_ADDRESS, otherwise Ray on this machine.",
        ),
    ] = None,
    actors: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of ranks; by default one per GPU of the cluster.")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="How often all are started again, 3 by default.")
    ] = None,
) -> None:
    """Start a stage as several ranks: with Ray, or print the line that starts them with torchrun."""
    if command[0] not in RANKED:
        raise ConfigError(
            f"kedge {command[0]} runs as a single process; kedge launch starts one of {', '.join(RANKED)}"
        )
    if "--dry-run" in command:
        raise ConfigError("--dry-run runs as a single process; start it without kedge launch")
    if (nodes is None) == (ray is None):
        raise ConfigError(f"kedge launch needs one of --nodes N and --ray, as in {EXAMPLE}")
    if ray is None:
        _refuse({"--actors": actors, "--max-restarts": max_restarts}, "--ray")
        if devices is None:
            raise ConfigError("--nodes needs --devices N: the number of ranks per machine, one per GPU")
        from kedge.system.launch.torchrun import torchrun_line

        # The line alone on standard output, so that it can be piped into a shell.
        typer.echo(f"on each of {nodes} machines:" if nodes and nodes > 1 else "on this machine:", err=True)
        return typer.echo(torchrun_line(command, nodes=nodes or 1, devices=devices, head=head, port=port))
    _refuse({"--devices": devices, "--head": head}, "--nodes")
    resumes = find_stage(command[0]).resumes
    if resumes and not any(word.partition("=")[0] in ("--out", "out", "--resume") for word in command[1:]):
        raise ConfigError("with --ray the command needs --out DIR: a restart resumes the run there")
    if not resumes and max_restarts:
        raise ConfigError(f"kedge {command[0]} cannot be resumed, so it is not started again: leave out --max-restarts")
    from kedge.system.launch.on_ray import launch_on_ray

    address = None if ray == ANYWHERE else ray
    restarts = (3 if resumes else 0) if max_restarts is None else max_restarts
    raise typer.Exit(launch_on_ray(command, address=address, actors=actors, max_restarts=restarts))


def _refuse(options: dict[str, object], other: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} needs {other}")
