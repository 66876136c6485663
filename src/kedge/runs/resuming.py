"""Resuming a run: the same settings and inputs, settings that only make it longer, and runs that have finished."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from kedge.config import Config, changed_settings, differences, effective_settings, load_config
from kedge.errors import ConfigError, DataError
from kedge.inspect.record import read_config, read_json_object
from kedge.logs.progress import say
from kedge.models.card import CARD, public_settings
from kedge.runs.fingerprint import changed_inputs, lost_inputs
from kedge.system.invocation import as_argument, is_command_line
from kedge.system.output import CHECKPOINTS, CONFIG_FILE, FINISHED_FILE, MODEL_FOLDER, is_run, replace_file
from kedge.system.stage import Stage, find_stage, value_of
from kedge.training.checkpoint.files import FileRecord, record_file, record_files
from kedge.training.checkpoint.store import Checkpoint, newest_valid
from kedge.training.runtime import available_cores, set_threads


def lengthening(folder: Path, config: Config, stage: str) -> list[str]:
    """The fields by which a configuration makes the run in a folder longer, without any other effect on its past."""
    described = find_stage(stage)
    if not described.length or not is_run(folder):
        return []
    saved = load_config(folder / CONFIG_FILE)
    length = described.length
    longer = [length] if value_of(config, length) > value_of(saved, length) else []
    return longer + [name for name in described.bounds if _is_looser(value_of(saved, name), value_of(config, name))]


def check_extension(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Check that the final state of a finished run was kept; nothing for a run that has not finished.

    Raises:
        ConfigError: It was not.
    """
    ending = read_json_object(folder / FINISHED_FILE)
    last = ending.get("updates")
    if ending and (checkpoint is None or checkpoint.update != last):
        kept = "no checkpoint" if checkpoint is None else f"only that of update {checkpoint.update}"
        raise ConfigError(
            f"{folder} cannot be extended: it finished after update {last}, but {kept} was kept "
            "(checkpoint.keep_last=true keeps the last one)"
        )


def describe_extension(
    config: Config, stage: str, done: int, *, is_longer: bool = True, changes: Collection[str] = ()
) -> str:
    """Describe the effect of a longer run on its schedules.

    Args:
        config: The configuration to resume with.
        stage: The stage.
        done: Updates, or optimizer steps, so far.
        is_longer: Its length has grown; False if only limits that end it early have.
        changes: What else is allowed to differ from now on.
    """
    described = find_stage(stage)
    so_far = f"The run continues after {described.unit} {done}"
    stretched = list[str]()
    if is_longer:
        stretched = _stretched(config, described) if described.stretched is None else described.stretched(config)
    effects = [f"Stretched to the new length: {', '.join(stretched)}."] if stretched else []
    effects += [f"Allowed to change: {', '.join(changes)}."] if changes else []
    if effects:
        return f"{so_far}. {' '.join(effects)} The result is not that of a run that was this long from the start."
    evaluations = value_of(config, described.evaluations)
    if described.unit == "update":
        additional = evaluations and done % evaluations
        condition = f"; the evaluation after update {done} is an additional one" if additional else ""
    else:
        condition = ", if the batch size divides the rows"
        condition += "; the evaluations so far were at other steps than that run's" if evaluations else ""
    return f"{so_far}, bit for bit as if it had always been this long{condition}."


def _stretched(config: Config, stage: Stage) -> list[str]:
    """The schedules, and the sampling ahead, that are planned over the whole run."""
    [section] = stage.trains
    settings = value_of(config, section)
    adapts_kl = section == "ppo" and config.ppo.kl_controller.name != "fixed"
    return [
        *([] if settings.decay == "constant" else [f"the {settings.decay} decay of the learning rate"]),
        *(["its warm-up"] if settings.warmup_fraction else []),
        *(["the KL controller's horizon"] if adapts_kl else []),
        # The old end had nothing sampled beyond it: the next update's weights sample for it themselves.
        *(["sampling ahead"] if section == "ppo" and config.rollout.max_staleness else []),
    ]


def _is_looser(saved: float | None, now: float | None) -> bool:
    return saved is not None and (now is None or now > saved)


T = TypeVar("T")

THREADS = "threads"
"""The name of the number of threads in the facts of `config.yaml`."""

CHANGED = "changed"
"""The name of what was changed during the run in the facts of `config.yaml`."""

DATE = "date"
"""The name of the start day in the facts of `config.yaml`; some chat templates write the day."""


class RunFinished(Exception):
    """Raised where a run is opened that has finished: its stage returns the result that it left.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} has finished")
        self.folder = folder


def check_same_stage(folder: Path, stage: str) -> None:
    """Check that a folder has no run of another stage (`ConfigError` if it has)."""
    trained = read_config(folder)[0].get("stage", stage) if is_run(folder) else stage
    if trained != stage:
        raise ConfigError(f"{folder} is a run of kedge {trained}, not of {stage}")


def check_finished(
    config: Config, folder: Path, fingerprint: Mapping[str, str], *, stage: str, allowed: Collection[str] = ()
) -> None:
    """Check that a finished run is asked for with its own settings and inputs; only its length may be less.

    Args:
        config: The configuration to resume with.
        folder: The run's folder.
        fingerprint: Hashes of the inputs.
        stage: The run's stage.
        allowed: Dotted names of settings, inputs or whole sections that may differ.

    Raises:
        ConfigError: Something differs; the line names it.
    """
    described = find_stage(stage)
    own = [name for name in (described.length, *described.bounds) if name]
    changes = _changes(config, folder, (*own, *allowed)) + changed_since(folder, fingerprint, allowed=allowed)
    if changes:
        other = "; ".join(changes)
        raise ConfigError(
            f"{folder} has finished, with other settings ({other}); choose another {as_argument('--out')}"
        )


def changed_since(folder: Path, fingerprint: Mapping[str, str], *, allowed: Collection[str] = ()) -> list[str]:
    """One line per input that has changed since a run finished; arguments as in `check_finished`.

    Inputs that are gone are not compared.
    """
    saved = _ending(folder).get(INPUTS, {})
    recorded = {name: each for name, each in saved.items() if name in fingerprint}
    return changed_inputs(recorded, {name: fingerprint[name] for name in recorded}, allowed=allowed)


def check_unchanged(
    config: Config,
    folder: Path,
    fingerprint: Mapping[str, str],
    checkpoint: Checkpoint | None,
    allowed: tuple[str, ...],
) -> None:
    """Check that a run is resumed with its own settings and inputs.

    Args:
        config: The configuration to resume with.
        folder: The run's folder.
        fingerprint: Hashes of the inputs.
        checkpoint: The checkpoint to resume from, if any.
        allowed: Dotted names of settings, inputs or whole sections that may differ.

    Raises:
        ConfigError: Something differs; the line names it.
    """
    changes = _changes(config, folder, allowed)
    if checkpoint is not None:
        recorded = checkpoint.manifest.fingerprint
        changed = [re.split(r"[:\[]", change)[0] for change in changes]
        if lost := lost_inputs(config, recorded, fingerprint, allowed=[*allowed, *changed]):
            raise ConfigError(f"{folder} cannot be resumed, because {lost[0]}")
        changes += changed_inputs(recorded, fingerprint, allowed=allowed)
    if changes:
        because = f"{folder} cannot be resumed, because {'; '.join(changes)}"
        fields = dict.fromkeys(change.split(":")[0] for change in changes)
        options = " ".join(f"--allow-changes {field}" for field in fields)
        names = options if is_command_line() else f"resume={list(fields)!r}"
        raise ConfigError(f"{because}. If this is intended: {names}")


def _changes(config: Config, folder: Path, allowed: Collection[str]) -> list[str]:
    """One line per setting that differs from those of the run in a folder."""
    return changed_settings(*_before_and_now(config, folder), allowed=allowed)


def _before_and_now(config: Config, folder: Path) -> list[dict[str, Any]]:
    """The settings of the run in a folder, and those to resume it with."""
    both = (load_config(folder / CONFIG_FILE), config)
    pairs = zip(effective_settings(*both), both, strict=True)
    return [_placed(settings, each.out, folder) for settings, each in pairs]


def changes_so_far(config: Config, folder: Path, stage: str, done: int) -> str:
    """Describe what was changed during the run in a folder, and when; empty if nothing was.

    Args:
        config: The configuration to resume it with.
        folder: The run's folder.
        stage: Its stage.
        done: Updates, or optimizer steps, so far; 0 if it starts over.
    """
    if not done:
        return ""
    earlier = read_config(folder)[0].get(CHANGED)
    saved, current = (public_settings(each) for each in _before_and_now(config, folder))
    changes = [f"{name} from {value} to {now}" for name, value, now in differences(saved, current)]
    since = [f"after {find_stage(stage).unit} {done} {', '.join(changes)}"] if changes else []
    return "; ".join([*([earlier] if earlier else []), *since])


def threads_before(folder: Path) -> int | None:
    """The number of threads that the run in a folder had on the CPU; None if unknown, or if there are fewer cores.

    Another number changes the order of sums, and with it the last digits of every result.
    """
    before = read_config(folder)[0].get(THREADS, "")
    now = set_threads()
    cores = available_cores()
    if not before.isascii() or not before.isdigit() or int(before) == now:
        return None
    if int(before) > cores:
        say(f"The run had {before} threads, and there are {cores} cores: the last digits of its results will differ")
        return None
    say(f"The run goes on with {before} threads, as before, in place of {now}; runtime.num_threads changes them")
    return int(before)


def date_before(folder: Path) -> str | None:
    """The day on which the run in a folder started, as `2026-02-28`; None without a run, or if it is not known."""
    try:
        return str(date.fromisoformat(read_config(folder)[0].get(DATE, ""))) if is_run(folder) else None
    except (DataError, ValueError):
        return None


def _placed(settings: T, out: str | None, folder: Path) -> T:
    """Settings in which paths inside the folder of the run's chain do not depend on where that folder is, or how its
    name is written: a chain's stages name each other's models and data.
    """
    chain = os.path.join(os.path.dirname(os.path.expanduser(out or "")), "")
    if not chain or not is_run(folder.resolve().parent):
        return settings

    def placed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: placed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [placed(each) for each in value]
        return f"CHAIN/{value.removeprefix(chain)}" if isinstance(value, str) and value.startswith(chain) else value

    return placed(settings)


FILES = "model_files"
INPUTS = "inputs"


def mark_finished(folder: Path, stage: str, summary: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
    """Write `finished.json`: the summary, and records of the model's files, which are on the disk by then.

    Raises:
        OutputError: It cannot be written.
    """
    model = folder / MODEL_FOLDER
    records = record_files(model) if find_stage(stage).makes_model else {}
    files = {name: asdict(record) for name, record in records.items()}
    content = {"stage": stage, **summary, INPUTS: dict(fingerprint), **({FILES: files} if files else {})}
    replace_file(folder / FINISHED_FILE, [json.dumps(content, indent=2).encode()])


def finished_run(config: Config) -> Path | None:
    """The output folder if its run has finished and the configuration does not lengthen it, else None.

    A run with a damaged model has not finished: its end is repeated from a checkpoint.

    Raises:
        DataError: `finished.json` is damaged, or the model, and the run has no checkpoint.
    """
    folder = None if config.out is None else Path(os.path.expanduser(config.out))
    if folder is None or not (folder / FINISHED_FILE).is_file():
        return None
    [stage] = read_ending(folder, "stage")
    if lengthening(folder, config, stage):
        return None
    if not find_stage(stage).makes_model or (problem := damage(folder)) is None:
        return folder
    if find_stage(stage).length and newest_valid(folder / CHECKPOINTS, on_rejected=say) is None:
        raise DataError(
            f"{problem}, and {folder} has no checkpoint to repeat it from; train again, in another "
            f"{as_argument('--out')}"
        )
    say(f"{problem}: the end of the run is repeated")
    return None


def damage(folder: Path) -> str | None:
    """The damage to the model of a finished run, or of a stage of a chain, in words; None if it is whole.

    Weights must match byte for byte. Other files may have been edited, but not be missing, empty, or invalid JSON.
    """
    for run in (folder, *sorted(ending.parent for ending in folder.glob(f"*/{FINISHED_FILE}"))):
        model = run / MODEL_FOLDER
        if not model.is_dir():
            return f"{model} is missing"
        found = sorted(path for path in model.rglob("*") if path.is_file())
        recorded = {model / name: FileRecord(**record) for name, record in (_ending(run).get(FILES) or {}).items()}
        for path in dict.fromkeys([*recorded, *found]):
            if path.name != CARD and (problem := _problem(path, recorded.get(path))):
                return f"{path} is {problem}"
    return None


def _problem(path: Path, recorded: FileRecord | None) -> str | None:
    """The damage to a file of a model, in words; None if it is whole, or was not there when the run finished."""
    try:
        if path.suffix == ".safetensors":
            return None if recorded is None or record_file(path) == recorded else "damaged"
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        return "empty" if recorded and recorded.size and not path.stat().st_size else None
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, RecursionError):
        return "damaged"


def _ending(folder: Path) -> Mapping[str, Any]:
    """The content of `finished.json`; empty if it is damaged."""
    with suppress(DataError):
        return read_json_object(folder / FINISHED_FILE)
    return {}


def read_ending(folder: Path, *names: str) -> list[Any]:
    """Values from the summary written by `mark_finished`.

    Raises:
        DataError: The file is damaged.
    """
    ending = _ending(folder)
    if missing := [name for name in names if name not in ending]:
        raise DataError(
            f"{folder / FINISHED_FILE} is damaged ({missing[0]} is missing); delete it, and "
            f"{as_argument('--resume', 'resume=True')} repeats the run's last steps"
        )
    return [ending[name] for name in names]
