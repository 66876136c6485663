"""The commands `kedge demo`, `kedge chat` and `kedge sweep`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kedge.cli.options import (
    Out,
    PresetName,
    Reward,
    Seed,
    names_and_overrides,
    parameter,
    settings_of,
    weighted_rewards,
)
from kedge.cli.stages import add_group, settings_parameters
from kedge.config import Config, check_stage, full_name, load_config
from kedge.runs.claim import claim_free_folder, claims
from kedge_base.command import Command, RunCommand, RunGroup
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import check_creatable, check_output
from kedge_base.stage import Stage, stages
from kedge_lab.demo.recipe import DURATION
from kedge_people.assignments import checked_name, own_name
from kedge_people.commands import write_answers


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package; those of its stages come from their descriptions."""
    app.command(cls=RunCommand, help=ABOUT)(demo)
    app.command(cls=Command)(chat)
    about = "Run a stage with several values per field (FIELD=A,B,C) and several seeds, and compare the results."
    swept = [stage for stage in stages().values() if stage.is_swept]
    told = ((stage, f"Sweep `kedge {stage.name}`, whose options it takes.", _sweep_of(stage)) for stage in swept)
    add_group(app, RunGroup, "sweep", about, told)


ABOUT = f"Train a tiny summarizer from scratch with SFT, reward model and PPO, and evaluate it: {DURATION}."


def demo(out: Out = None, seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0) -> None:
    """Run the demo."""
    with claims():
        folder = claim_free_folder(Path("runs") / "demo") if out is None else check_output(out)
        from kedge_lab.demo.main import run_demo

        run_demo(folder, seed)


def chat(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [MODEL]",
            help="One or two models (folder or id), and fields to set, e.g. runtime.device=cpu.",
        ),
    ],
    reward: Reward = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 by default.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum length of an answer in tokens; 64 by default.")
    ] = None,
    seed: Seed = None,
    form: Annotated[
        Literal["auto", "conversation", "text", "tldr"],
        typer.Option(help="How your text becomes a prompt; auto: as in the model's training, or by its chat template."),
    ] = "auto",
    web: Annotated[bool, typer.Option("--web", help="Chat in a browser on this machine instead.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --web; a free one by default.")] = None,
    labels: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --web: take thumbs and corrections into this folder of labels."),
    ] = None,
    person: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Name of the person who labels; your login name by default."),
    ] = None,
    preset: PresetName = None,
) -> None:
    """Chat with a model, or with two side by side, with a reward's scores beside the answers."""
    names, overrides = names_and_overrides(models)
    for flag, value, needed in (("--port", port, web), ("--labels", labels, web)):
        if value is not None and not needed:
            raise ConfigError(f"{flag} needs --web")
    if labels == "":
        raise ConfigError("--labels is empty text; give a folder's name, or . for the current folder")
    if person is not None and labels is None:
        raise ConfigError("--as needs --labels")
    if len(names) not in (1, 2):
        raise ConfigError(f"kedge chat needs one or two models, not {len(names)}")
    flags = {
        "generate.temperature": temperature,
        "generate.max_new_tokens": max_new_tokens,
        "runtime.seed": seed,
        "reward": weighted_rewards(reward),
    }
    config = load_config(None, overrides, flags, preset, stage="generate")
    from kedge_lab.chat import chat_on_terminal, chat_server, load_chat
    from kedge_people.corrections import Corrections

    name = own_name() if person is None else checked_name(person, "--as")
    with nullcontext() if labels is None else Corrections(labels, name) as corrections:
        loaded = load_chat(config, names, form=None if form == "auto" else form)
        if not web:
            chat_on_terminal(loaded)
            return
        with suppress(KeyboardInterrupt), chat_server(loaded, port=port or 0, corrections=corrections) as server:
            typer.echo(f"{server.url}\nOnly this machine can open it. Ctrl-C exits.")
            server.wait()
        if corrections is not None:
            write_answers(corrections.folder)


OF_SWEEP = (
    parameter(
        "seeds",
        Annotated[
            str | None,
            typer.Option(
                metavar="N|LIST", help="Number of seeds, or seeds: 3, or 0,7,42; by default that of runtime.seed."
            ),
        ],
    ),
    parameter(
        "random",
        Annotated[
            int | None,
            typer.Option(min=1, metavar="N", help="Draw N settings, from lists and from ranges LOW..HIGH."),
        ],
    ),
    parameter(
        "jobs",
        Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one per core, or one on a GPU.")],
    ),
    parameter("metric", Annotated[str | None, typer.Option(help="Metric to compare the runs by.")]),
    parameter(
        "goal",
        Annotated[str | None, typer.Option(metavar="max|min", help="Look for the highest or the lowest value.")],
    ),
)
"""The options that only a sweep has."""


def _sweep_of(stage: Stage) -> Callable[..., None]:
    def sweep(**given: Any) -> None:
        if given["goal"] not in (None, "max", "min"):
            raise ConfigError(f"--goal must be max or min; it is {given['goal']}")
        from kedge_lab.sweep import RANGE, plan_trials, run_sweep, split_override

        split = [(override, *split_override(override)) for override in given["overrides"] or ()]
        swept = {field: values for _, field, values in split if len(values) > 1 or RANGE.fullmatch(values[0])}
        fixed = [override for override, field, _ in split if field not in swept]
        flags = settings_of(stage.flags, given)

        def resolve(values: Mapping[str, Any]) -> Config:
            settings = [f"{field}={value}" for field, value in values.items()]
            resolved = load_config(given["config"], [*fixed, *settings], flags, given["preset"], stage=stage.name)
            check_stage(resolved, stage.name)
            return resolved

        folder = check_creatable(f"runs/sweep-{stage.name}" if given["out"] is None else given["out"])
        trials = plan_trials(swept, _seeds(given["seeds"]), resolve, num_random=given["random"])
        set_once = [full_name(field, stage.name) for _, field, _ in split]
        set_once += [field for field, value in flags.items() if value is not None]
        for field in swept:
            if set_once.count(full_name(field, stage.name)) > 1:
                raise ConfigError(f"{field} is swept, and is set once more, by a flag or as a field; keep one")
        result = run_sweep(
            trials, stage.name, folder, num_processes=given["jobs"], metric=given["metric"], goal=given["goal"]
        )
        raise typer.Exit(1 if result.failed else 0)

    parameters = [*settings_parameters(stage), *OF_SWEEP]
    sweep.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return sweep


def _seeds(text: str | None) -> list[int] | None:
    """The seeds of `3` (0, 1, 2) or of `0,7,42`; None if none are given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
        raise ConfigError(f"--seeds must be a number of seeds or a list of them (3, or 0,7,42); it is {text}")
    return list(range(int(parts[0]))) if len(parts) == 1 else [int(part) for part in parts]
