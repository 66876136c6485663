"""The commands that inspect runs, read-only."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.command import Command
from kedge.system.texts import printable

__all__ = ["app"]

app = typer.Typer()

RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The run's folder, or a folder with the runs of several stages or of a sweep."),
]

RunFolders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="The runs' folders, or folders with the runs of several stages or of a sweep."),
]


@app.command(cls=Command)
def doctor(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find problems in a run and suggest fixes. Exits with 1 if a finding is serious."""
    from rich.console import Console

    from kedge.config import field_advice
    from kedge.inspect.diagnosis import examine_run
    from kedge.inspect.doctor import merge, print_examinations

    examined = examine_run(run, advice=field_advice)
    findings = merge(examined.values()).findings
    if as_json:
        typer.echo(json.dumps(merge(examined.values()).as_json(), ensure_ascii=False, indent=2))
    else:
        print_examinations(examined, Console(highlight=False))
    raise typer.Exit(any(finding.severity == "serious" for finding in findings))


@app.command(cls=Command)
def report(
    runs: RunFolders,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file; RUN/report.html by default.")] = None,
) -> None:
    """Write an HTML report of one run, or a comparison of several. Also works while they are running."""
    from kedge.config import field_advice
    from kedge.inspect.report import write_report

    typer.echo(printable(str(write_report(runs, out, advice=field_advice))))


@app.command(cls=Command)
def watch(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Show the run in a browser on this machine instead.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --web; a free one by default.")] = None,
) -> None:
    """Follow a run live, from another terminal or in a browser. Ctrl-C exits."""
    from contextlib import suppress

    from rich.console import Console

    from kedge.config import field_advice
    from kedge.errors import ConfigError
    from kedge.inspect.watch.watching import serve_run, watch_run

    if (port is not None and not web) or (once and web):
        raise ConfigError("--port needs --web, and --once cannot be combined with --web")
    with suppress(KeyboardInterrupt):
        if not web:
            watch_run(run, Console(highlight=False), once=once, advice=field_advice)
            return
        with serve_run(run, port=port or 0, advice=field_advice) as server:
            typer.echo(f"{server.url}\nOnly this machine can open it. Ctrl-C exits.")
            server.wait()
