"""`kedge label`: people compare, grade and correct responses."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kedge.cli.options import PresetName, Seed, names_and_overrides
from kedge.config import Config, load_config, with_values
from kedge_base.command import Command
from kedge_base.errors import ConfigError, DataError, RewardError
from kedge_base.machine.durable import replaced_folder
from kedge_base.run_folder.output import check_output, is_run, waiting_for, writing
from kedge_base.run_folder.record_format import read_json_lines
from kedge_base.texts import counted, names_judge, printable
from kedge_people.assignments import (
    AXES,
    Assignments,
    names_of,
    own_name,
    read_assignments,
    write_assignments,
)
from kedge_people.labels import (
    COMPARISONS_FILE,
    DEMONSTRATIONS_FILE,
    ITEMS_FILE,
    AnswerFile,
    Item,
    read_labels,
    write_data_sets,
    write_items,
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package."""
    app.command(cls=Command)(label)


def label(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|FOLDER",
            help="Models (folders or ids) whose responses are labeled, and fields to set, e.g. "
            "generate.temperature=0.7. Or a folder of labels, to continue it.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="Prompts: file, folder or id of a data set. Repeatable."),
    ] = None,
    responses_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="Label finished responses instead: rows of `kedge generate`, or comparisons. Repeatable; responses to "
            "the same prompt are compared.",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="New or empty folder for the labels.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts; 200 by default.")] = None,
    responses: Annotated[int | None, typer.Option(min=1, max=9, help="Responses to each prompt; 2 by default.")] = None,
    people: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Who labels, as in ana,ben; you by default. Each gets a link; openai:MODEL@URL is a judge.",
        ),
    ] = None,
    overlap: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the prompts that everybody gets; 0.2 by default.")
    ] = None,
    repeats: Annotated[
        float | None,
        typer.Option(min=0, max=0.5, help="Share of a person's prompts that is asked again later; 0.05 by default."),
    ] = None,
    axes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Also grade each response from 1 to 7 on these axes; stiennon: the four of Stiennon et al.",
        ),
    ] = None,
    select: Annotated[
        Literal["random", "gap", "uncertain", "hard"],
        typer.Option(help="All but random choose from twice as many prompts and responses, and need --scorer."),
    ] = "random",
    scorer: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Reward model that --select predicts with. Repeatable."),
    ] = None,
    not_in: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA", help="Leave out the prompts in this data, e.g. those of an evaluation. Repeatable."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Local port; that of the last time or a free one by default.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Only make the data sets of FOLDER again.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Only report how good the labels in FOLDER are: text, and labels.html.")
    ] = False,
    withdraw: Annotated[
        str | None, typer.Option(metavar="PERSON", help="Only withdraw this person's answers in FOLDER.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="ANSWER|PERSON", help="Only list the models that were trained on these answers in FOLDER."
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Folder of runs, for --withdraw and --trace.")] = Path(
        "runs"
    ),
    seed: Seed = None,
    preset: PresetName = None,
) -> None:
    """Compare, grade and correct responses in a browser on this machine, one link per person. Ctrl-C exits."""
    names, overrides = names_and_overrides(sources or ())
    making = {
        "--prompts": prompts,
        "--responses-from": responses_from,
        "--out": out,
        "--num-prompts": num_prompts,
        "--responses": responses,
        "--overlap": overlap,
        "--repeats": repeats,
        "--axes": axes,
        "--select": None if select == "random" else select,
        "--scorer": scorer,
        "--not-in": not_in,
        "--seed": seed,
        "--preset": preset,
        "FIELD=VALUE": [each for each in overrides if not each.startswith("judge.")],
    }
    reading = {"--write": write, "--report": report, "--withdraw": withdraw, "--trace": trace}
    asked = [option for option, value in reading.items() if value not in (None, False)]
    if asked and (people is not None or port is not None):
        raise ConfigError(f"{asked[0]} serves no page: leave out {'--port' if people is None else '--people'}")
    folder = _existing(names, asked, given=[option for option, value in making.items() if value not in (None, [])])
    joining = () if people is None else names_of(people, "--people")
    flags = {"data.prompts": prompts, "runtime.seed": seed}
    config = load_config(None, overrides, flags, preset, stage="generate")
    for judge in filter(names_judge, joining):
        from kedge.runs.judges import check_judge

        check_judge(judge, config)
    if folder is not None:
        if asked:
            _run_option(folder, write=write, report=report, withdraw=withdraw, trace=trace, runs=runs)
        else:
            _serve(folder, joining, port, config)
        return
    if out is None:
        raise ConfigError("--out is needed: the folder for the labels; or name an existing one, to continue it")
    folder = check_output(out)
    if bool(names) == bool(responses_from):
        raise ConfigError("give models that answer the prompts, or finished responses with --responses-from")
    if bool(prompts) != bool(names):
        raise ConfigError("models need --prompts" if names else "--prompts needs a model; --responses-from has its own")
    if scorer and select == "random":
        raise ConfigError("--scorer needs --select: gap, uncertain or hard")
    graded = AXES[axes] if axes in AXES else () if axes is None else names_of(axes, "--axes")
    seed = config.runtime.seed
    assignments = Assignments(
        seed=seed,
        overlap=0.2 if overlap is None else overlap,
        repeats=0.05 if repeats is None else repeats,
        axes=graded,
    )
    given = {"num_prompts": num_prompts or 200, "num_responses": responses or 2, "seed": seed, "not_in": not_in or ()}
    items = _items(config, names, responses_from, select, scorer or (), **given)
    with writing(folder), replaced_folder(folder) as part:  # all or nothing
        write_items(part, items)
        write_assignments(part, assignments)
    _serve(folder, joining, port, config)


def _existing(names: Sequence[str], asked: Sequence[str], given: Sequence[str]) -> Path | None:
    """Return the folder of labels that was named, or None if it has no labels yet.

    Raises:
        ConfigError: An option reads labels, and the folder has none; or one makes labels, and it already has some.
    """
    folder = Path(os.path.expanduser(names[0])) if len(names) == 1 else None
    if folder is None or not (folder / ITEMS_FILE).is_file():
        if asked:
            raise ConfigError(
                f"{asked[0]} needs a folder of labels, with {ITEMS_FILE}; {' '.join(names) or 'none'} is not"
            )
        return None
    if given:
        raise ConfigError(
            f"{folder} has its items and settings already: leave out {given[0]}, or choose another folder"
        )
    return folder


def _items(
    config: Config,
    names: Sequence[str],
    files: Sequence[str] | None,
    select: Literal["random", "gap", "uncertain", "hard"],
    scorers: Sequence[str],
    **given: Any,
) -> list[Item]:
    """Sample responses, or read finished ones; with `select`, choose among twice as many prompts and responses."""
    from kedge.runs.names import check_names

    for name in names:
        check_names(with_values(config, {"model": name}), "generate")
    count, size = given["num_prompts"], given["num_responses"]
    if select != "random":
        if size < 2:
            raise ConfigError(f"--select {select} compares responses; --responses must be at least 2")
        from kedge_people.select import check_choice

        check_choice(select, scorers)
    from kedge_people.items import read_items, sample_items

    wide = given if select == "random" else {**given, "num_prompts": 2 * count, "num_responses": 2 * size}
    items = read_items(files, **wide) if files else sample_items(config, names, **wide)
    if select == "random":
        return items
    from kedge_people.select import VALUES, choose, score_items

    scores = [score_items(items, name, template=config.data.template) for name in scorers]
    chosen = choose(items, scores, count, value=VALUES[select], num_responses=size, seed=given["seed"])
    if not chosen:
        raise DataError(f"no prompt has {size} different responses that the --scorer can read; lower --responses")
    if len(chosen) < (asked := min(count, len(items))):
        typer.echo(
            f"{len(chosen)} of {counted(asked, 'prompt')}: only these have {size} different responses that the "
            "--scorer can read; a lower --responses finds more",
            err=True,
        )
    return chosen


def _run_option(
    folder: Path, *, write: bool, report: bool, withdraw: str | None, trace: str | None, runs: Path
) -> None:
    """Run the options that replace serving the page."""
    if withdraw is not None:
        people = sorted({answer.person for answer in read_labels(folder).answers})
        if withdraw not in people:
            raise ConfigError(
                f"--withdraw {withdraw}: no answer is theirs; people with answers: {', '.join(people) or 'none'}"
            )
        from kedge_people.server import now

        with AnswerFile(folder) as file:
            file.withdraw(withdraw, now())
        write = True
        used = folder.parent / f"comparisons{folder.name.removeprefix('labels')}.jsonl"  # of a round of kedge rlhf
        rows = read_json_lines(used) if is_run(folder.parent) and used.is_file() else []
        if any(row["label"]["person"] == withdraw for row in rows if "label" in row):
            typer.echo(printable(f"{used} still has their answers: rounds of that run train on it; start a new run"))
    if write:
        write_answers(folder)
    for sought in filter(None, (withdraw, trace)):
        from kedge_people.trace import trace as find_models

        for line in find_models(folder, runs, sought):
            typer.echo(printable(line))
    if report:
        from kedge_people.quality import examine_labels
        from kedge_people.report import text_report, write_label_report

        quality = examine_labels(read_labels(folder))
        typer.echo(text_report(quality))
        typer.echo(printable(str(write_label_report(folder, quality))))


def _serve(folder: Path, joining: Sequence[str], port: int | None, config: Config) -> None:
    """Let the judges among the people answer, serve the page until Ctrl-C or SIGTERM, and make the data sets."""
    with AnswerFile(folder) as file:
        assignments = read_assignments(folder)
        people = joining or assignments.people or (own_name(),)
        assignments = assignments.dealt(read_labels(folder), people)
        write_assignments(folder, assignments)
        from kedge.training.runtime import Terminated, stopping
        from kedge_people.judges import ask_judges
        from kedge_people.server import label_server

        has_people = not all(map(names_judge, assignments.people))
        with suppress(KeyboardInterrupt, Terminated), stopping(at_once=True):
            try:
                ask_judges(folder, assignments, file, config)
            except RewardError as error:
                if not has_people:
                    raise
                typer.echo(printable(f"error: {error}"), err=True)
            if has_people:
                with label_server(folder, assignments, file, port=port) as server:
                    for name, url in server.urls.items():
                        typer.echo(f"{name}: {url}")
                    typer.echo("Only this machine can open these links. Ctrl-C ends, and writes the data sets.")
                    server.wait()
        write_answers(folder)


def write_answers(folder: Path) -> None:
    """Rewrite the data sets; print how many answers there are, and the commands that train on them."""
    labels = write_data_sets(folder)
    counts = Counter(answer.person for answer in labels.answers)
    answers = ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
    typer.echo(printable(f"Answers in {folder}: {answers}"))
    if (waiting := waiting_for(folder.parent)) and waiting.name == folder.name:
        typer.echo(printable(f"Next:    {shlex.join(['kedge', 'rlhf', '--resume', str(folder.parent)])}"))
        return
    first = next((item.models[0] for item in labels.items.values()), "")
    model = first if os.path.isdir(first) else "MODEL"
    # Rows of ties alone would be unusable otherwise.
    ties = any(len(answer.ranks) > 1 == len(set(answer.ranks)) for answer in labels.answers)
    more = ["reward_model.ties=davidson"] if ties else []
    for name, stage, last in ((COMPARISONS_FILE, "reward", more), (DEMONSTRATIONS_FILE, "sft", [])):
        path = folder / name
        if path.stat().st_size:
            call = ["kedge", stage, "--model", model, f"--{path.stem}", str(path), *last]
            typer.echo(printable(f"Next:    {shlex.join(call)}"))
    typer.echo(printable(f"Continue: {shlex.join(['kedge', 'label', str(folder)])}"))
