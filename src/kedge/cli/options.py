"""The options that several commands share."""

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
    list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Fields to set, e.g. ppo.clip_range=0.1")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration, in YAML.")]
PresetName = Annotated[str | None, typer.Option("--preset", metavar="NAME", help=f"A recipe: {', '.join(PRESETS)}.")]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Folder or hub id of the model to start from.")]
Demonstrations = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Demonstrations: .jsonl file, folder or hub id. Repeatable.")
]
Comparisons = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Comparisons: .jsonl file, folder or hub id. Repeatable.")
]
DemonstrationData = Annotated[
    list[str] | None, typer.Option("--data", metavar="DATA", help="Demonstrations: .jsonl, folder or id. Repeatable.")
]
ComparisonData = Annotated[
    list[str] | None, typer.Option("--data", metavar="DATA", help="Comparisons: .jsonl, folder or id. Repeatable.")
]
Prompts = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Prompts: .jsonl file, folder or hub id. Repeatable.")
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REWARD", help="Reward model (folder, id) or function (file.py:name, module:name). Repeatable."
    ),
]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="New folder for the run; runs/STAGE by default.")]
Seed = Annotated[int | None, typer.Option(help="Seeds every random stream.")]
Strict = Annotated[
    bool | None, typer.Option("--strict", help="Stop where the run would only warn that its numbers are in doubt.")
]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="DIR|auto", help="Go on with this run; auto: with the one in --out, or begin it there."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--allow-changes", metavar="FIELD", help="What may differ from the run that is resumed. Repeatable."),
]
