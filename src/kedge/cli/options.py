"""Options that several commands share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from kedge.cli.completion import complete_override
from kedge.config import CONTROL_PRESETS, LANGUAGE_PRESETS, PRESETS

__all__ = [
    "AnyPreset",
    "Anyway",
    "Changes",
    "ComparisonData",
    "Comparisons",
    "ConfigFile",
    "ControlPreset",
    "DemonstrationData",
    "Demonstrations",
    "DryRun",
    "Model",
    "Out",
    "Overrides",
    "PresetName",
    "PromptTexts",
    "Prompts",
    "Push",
    "ResumeFrom",
    "Reward",
    "Seed",
    "Strict",
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields to set: num_updates=50, or ppo.num_updates=50 where several sections have the name. See: kedge "
        "config explain.",
        autocompletion=complete_override,
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")]


def _preset_of(names: Iterable[str]) -> OptionInfo:
    about = "Repeatable; merged in order, the later one counts."
    return typer.Option("--preset", metavar="NAME", help=f"Preset: {', '.join(names)}. {about}")


PresetName = Annotated[list[str] | None, _preset_of(LANGUAGE_PRESETS)]
ControlPreset = Annotated[list[str] | None, _preset_of(CONTROL_PRESETS)]
AnyPreset = Annotated[list[str] | None, _preset_of(PRESETS)]
Environment = Annotated[
    str | None,
    typer.Option(
        "--env", metavar="ENV", help="Environment: an id of Gymnasium, module:Id, or a function (file.py:name)."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--policy",
        metavar="MODEL",
        help="Model: a folder, a Hugging Face id, a run, or run@update or run@best.",
    ),
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
    typer.Option(
        "--demonstrations",
        "--data",
        metavar="DATA",
        help="Demonstrations: .jsonl file, dataset folder or id. Repeatable.",
    ),
]
ComparisonData = Annotated[
    list[str] | None,
    typer.Option(
        "--comparisons", "--data", metavar="DATA", help="Comparisons: .jsonl file, dataset folder or id. Repeatable."
    ),
]
Prompts = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Prompts: .jsonl file, dataset folder or id. Repeatable.")
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts", metavar="DATA|TEXT", help="Prompts: .jsonl file, dataset folder or id; or one text. Repeatable."
    ),
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REWARD[=WEIGHT]",
        help="Reward model (folder or id) or function (file.py:name, module:name), optionally with a weight: "
        "file.py:name=0.5. Repeatable.",
    ),
]
Critic = Annotated[
    str | None,
    typer.Option(
        metavar="CRITIC", help="Trained critic to start from: a run of kedge critic, or a model (folder or id)."
    ),
]
Out = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="New or empty folder for the run; by default runs/STAGE, runs/STAGE-2, ..."),
]
Push = Annotated[
    str | None, typer.Option(metavar="ORG/NAME", help="Push the finished model to this repository on the hub.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed; 0 by default.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Stop, instead of warning, if the results may be wrong.")]
ResumeFrom = Annotated[
    str | None,
    typer.Option("--resume", metavar="DIR|auto", help="Resume this run; auto: the run in --out, or start it there."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--allow-changes", metavar="FIELD", help="Field that may differ from the resumed run. Repeatable."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Load and check everything, time a few rows, print an estimate; write nothing."),
]
Anyway = Annotated[
    bool, typer.Option("--anyway", help="Start even if the plan says that the run cannot fit into memory.")
]
