"""`kedge launch`: prints the command that starts a stage as several ranks, the same on every machine."""

from __future__ import annotations

import shlex
import socket
from typing import Annotated, Any

import typer

from kedge_base.command import Command
from kedge_base.errors import ConfigError
from kedge_base.stage import find_stage, stages

RANKED = [stage.name for stage in stages().values() if stage.is_ranked]
EXAMPLE = "kedge launch --nodes 2 --devices 8 -- ppo --model MODEL … --out runs/ppo"


class Launch(Command):
    """Split off the command after --."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in `Command`."""
        if "--" not in args and any(word in RANKED for word in args):
            raise ConfigError(f"kedge launch: write the command after --, as in {EXAMPLE}")
        return super().parse_args(ctx, args)


def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help=f"One of {', '.join(RANKED)}, with its options.")
    ],
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks per machine, one per GPU.")],
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of machines.")] = 1,
    head: Annotated[
        str | None, typer.Option(metavar="HOST", help="The machine where all meet; by default this one.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="A free port there; by default 29500.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Times to restart all ranks from the last checkpoint if one fails."),
    ] = 0,
) -> None:
    """Print the line that starts a stage as several ranks with torchrun."""
    stage = command[0]
    if stage not in RANKED:
        raise ConfigError(f"kedge {stage} runs as a single process; kedge launch starts one of {', '.join(RANKED)}")
    where = ["--standalone"]
    if nodes > 1:
        where = ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        where += ["--rdzv-endpoint", f"{head or socket.gethostname()}:{port or 29500}"]
    elif head or port:
        raise ConfigError("--head and --port say where several machines meet: add --nodes N, or leave them out")
    given = {word.partition("=")[0] for word in command[1:]}
    again: list[str] = []
    if max_restarts:
        if not find_stage(stage).resumes:
            raise ConfigError(f"kedge {stage} cannot be resumed, so it is not started again: leave out --max-restarts")
        if not given & {"--out", "out", "--resume"}:
            raise ConfigError("with --max-restarts the command needs --out DIR: a restart resumes the run there")
        where += ["--max-restarts", str(max_restarts)]
        again = [] if "--resume" in given else ["--resume", "auto"]
    # Standard output only has the command, so that it can be piped into a shell.
    typer.echo(f"on each of {nodes} machines:" if nodes > 1 else "on this machine:", err=True)
    words = ["torchrun", *where, "--nproc-per-node", str(devices), "-m", "kedge", *command, *again]
    typer.echo(shlex.join(words))
