"""The commands that read runs: none of them touches one."""

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer()

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or one that holds several stages'.")]

RunFolders = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="The runs' folders, or ones that hold several stages'.")
]


@app.command()
def doctor(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with a run, and what to try. Exit code 1 if something serious is."""
    from rich.console import Console

    from kedge.config import field_advice
    from kedge.inspect.diagnosis import diagnose_run
    from kedge.inspect.doctor import print_findings

    findings = diagnose_run(run, advice=field_advice)
    if as_json:
        typer.echo(json.dumps({"findings": [finding.as_json() for finding in findings]}, ensure_ascii=False, indent=2))
    else:
        print_findings(str(run), findings, Console(highlight=False))
    raise typer.Exit(any(finding.severity == "serious" for finding in findings))


@app.command()
def report(
    runs: RunFolders,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page; RUN/report.html by default.")
    ] = None,
) -> None:
    """Write a page that shows what a run did, or several over each other; also while they are at work."""
    from kedge.config import field_advice
    from kedge.inspect.report import write_report

    typer.echo(write_report(runs, out, advice=field_advice))


@app.command()
def watch(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve the run's page to this machine's browsers.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the page; a free one by default.")] = None,
) -> None:
    """Follow a run from another terminal, or in a browser, while it is at work. Ctrl-C ends it."""
    from contextlib import suppress

    from rich.console import Console

    from kedge.config import field_advice
    from kedge.errors import ConfigError
    from kedge.inspect.watch.watching import serve_run, watch_run

    if (port is not None and not web) or (once and web):
        raise ConfigError("--port goes with --web, and --once without it")
    with suppress(KeyboardInterrupt):
        if not web:
            watch_run(run, Console(highlight=False), once=once, advice=field_advice)
            return
        with serve_run(run, port=port or 0, advice=field_advice) as server:
            typer.echo(f"{server.url}\nThis machine alone can open it. Ctrl-C ends it.")
            server.wait()
