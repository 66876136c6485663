"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from kedge.config import PRESETS

__all__ = [
    "Changes",
    "ComparisonData",
    "Comparisons",
    "ConfigFile",
    "DemonstrationData",
    "Demonstrations",
    "Model",
    "Out",
    "Overrides",
    "PresetName",
    "Prompts",
    "ResumeFrom",
    "Reward",
    "Seed",
    "Strict",
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE", help="Fields to set, e.g. ppo.clip_range=0.1. See: kedge config explain."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")]
PresetName = Annotated[str | None, typer.Option("--preset", metavar="NAME", help=f"Preset: {', '.join(PRESETS)}.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model: a folder, a Hugging Face id, a run, or run@update or run@best."),
]
Demonstrations = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA", help="Demonstrations: .jsonl file, dataset folder or id. Repeatable."),
]
Comparisons = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Comparisons: .jsonl file, dataset folder or id. Repeatable.")
]
DemonstrationData = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="DATA", help="Demonstrations: .jsonl file, dataset folder or id. Repeatable."),
]
ComparisonData = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="DATA", help="Comparisons: .jsonl file, dataset folder or id. Repeatable."),
]
Prompts = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Prompts: .jsonl file, dataset folder or id. Repeatable.")
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REWARD", help="Reward model (folder or id) or function (file.py:name, module:name). Repeatable."
    ),
]
Out = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="New or empty folder for the run; by default runs/STAGE, runs/STAGE-2, ..."),
]
Seed = Annotated[int | None, typer.Option(help="Random seed; 0 by default.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Stop, instead of warning, if the results may be wrong.")]
ResumeFrom = Annotated[
    str | None,
    typer.Option("--resume", metavar="DIR|auto", help="Resume this run; auto: the run in --out, or start it there."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--allow-changes", metavar="FIELD", help="Field that may differ from the resumed run. Repeatable."),
]
