"""The commands that inspect runs, read-only."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kedge_base.command import Command
from kedge_base.registry import loaded
from kedge_base.run_folder.output import waiting_for
from kedge_base.texts import printable


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package."""
    for function in (doctor, report, verify, watch):
        app.command(cls=Command)(function)


def _path(text: str) -> Path:
    """Make a path; the shell does not expand the `~` of `--out=~/page.html`."""
    return Path(os.path.expanduser(text))


def field_advice() -> Any:
    """Return the function that explains the effect of a field's value; without the training package, it returns empty
    texts.
    """
    from kedge_inspect.doctor import no_advice

    return loaded("kedge.advice", "fields") or no_advice


RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The run's folder, or a folder with the runs of several stages or of a sweep. Or a log of TRL, verl, "
        "OpenRLHF or Stable-Baselines3: trainer_state.json or a folder with it, TensorBoard's or W&B's files, JSON "
        "lines, CSV.",
        parser=_path,
    ),
]

RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="The runs' folders, or folders with the runs of several stages or of a sweep. Or logs of TRL, verl, "
        "OpenRLHF or Stable-Baselines3.",
        parser=_path,
    ),
]


Library = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The library that wrote a log, if its content does not say: trl-ppo, trl-grpo, trl-rloo, trl-sft, "
        "trl-reward, verl, openrlhf, openrlhf-sft, openrlhf-reward, sb3-ppo.",
    ),
]

Settings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The settings of another library's run, in YAML or JSON, such as .hydra/config.yaml of verl. They decide "
        "what some metrics mean, and what to change.",
        parser=_path,
    ),
]


def doctor(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    library: Library = "",
    settings: Settings = None,
) -> None:
    """Find problems in a run and suggest fixes. Exits with 1 if a finding is serious."""
    from rich.console import Console

    from kedge_inspect.abroad.runs import Origin
    from kedge_inspect.diagnosis import examine_run
    from kedge_inspect.doctor import merge, print_examinations

    examined = examine_run(run, advice=field_advice(), origin=Origin(library, settings))
    merged = merge(examined.values())
    if as_json:
        typer.echo(json.dumps(merged.as_json(), indent=2))
    else:
        print_examinations(examined, Console(highlight=False))
        if labels := waiting_for(run):
            typer.echo(printable(f"Waiting for labels: kedge label {labels}, then resume the run"))
    raise typer.Exit(any(finding.severity == "serious" for finding in merged.findings))


def report(
    runs: RunFolders,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file; RUN/report.html by default.", parser=_path)
    ] = None,
    library: Library = "",
    settings: Settings = None,
) -> None:
    """Write an HTML report of one run, or a comparison of several. Also works while they are running."""
    from kedge_inspect.abroad.runs import Origin
    from kedge_inspect.report import write_report

    origin = Origin(library, settings)
    typer.echo(printable(str(write_report(runs, out, advice=field_advice(), origin=origin))))


def verify(
    run: RunFolder,
    update: Annotated[
        int | None,
        typer.Option(
            min=1, help="Make this update again from the last checkpoint before it, or the start, and compare."
        ),
    ] = None,
) -> None:
    """Check that a run's folder is as the run left it, with its receipt. Exits with 1 if something differs."""
    from kedge_inspect.api import verify as verify_runs
    from kedge_inspect.verify import LIMITS

    found = verify_runs(run, update=update)
    for folder, (differences, summary) in found.items():
        for line in (*differences, summary):
            typer.echo(printable(f"{folder}: {line}"))
    typer.echo(LIMITS)
    raise typer.Exit(any(each.differences for each in found.values()))


def watch(
    run: RunFolder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; a free one by default.")] = 0,
    library: Library = "",
    settings: Settings = None,
) -> None:
    """Follow a run in a browser on this machine: its report, kept up to date. Ctrl-C exits."""
    import time
    from contextlib import suppress

    from kedge_inspect.abroad.runs import Origin
    from kedge_inspect.live import has_run, serve_run

    with suppress(KeyboardInterrupt):
        if not has_run(run):
            typer.echo(printable(f"{run} has no run yet: waiting for one to start"), err=True)
            while not has_run(run):
                time.sleep(1.0)
        origin = Origin(library, settings)
        with serve_run(run, port=port, advice=field_advice(), origin=origin) as server:
            typer.echo(f"{server.url}\nOnly this machine can open it. Ctrl-C exits.")
            server.wait()
