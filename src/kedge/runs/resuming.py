"""Checks for resuming a run: settings and inputs must be unchanged, except settings that only make it longer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from kedge.config import (
    Config,
    changed_settings,
    differences,
    effective_settings,
    evaluations_of,
    load_config,
    with_values,
)
from kedge.models.origin import CARD, public_settings
from kedge.ranks import Ranks
from kedge.runs.fingerprint import changed_inputs, lost_inputs
from kedge.runs.receipt import Receipt
from kedge.training.checkpoint.files import FileRecord, record_file, record_files
from kedge.training.checkpoint.store import Checkpoint, newest_valid
from kedge.training.runtime import set_threads
from kedge_base.errors import ConfigError, DataError
from kedge_base.machine.control_groups import available_cores
from kedge_base.machine.invocation import as_argument, is_command_line
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import (
    CHECKPOINTS,
    CONFIG_FILE,
    FINISHED_FILE,
    MODEL_FOLDER,
    is_run,
    kept_checkpoints,
    replace_file,
)
from kedge_base.run_folder.record_format import read_config, read_json_object
from kedge_base.stage import Stage, find_stage, value_of


def lengthening(folder: Path, config: Config, stage: Stage) -> list[str]:
    """Return the fields with which a configuration makes the run in a folder longer, without affecting its past."""
    if not stage.length or not is_run(folder):
        return []
    saved = load_config(folder / CONFIG_FILE)
    length = stage.length
    longer = [length] if value_of(config, length) > value_of(saved, length) else []
    return longer + [name for name in stage.bounds if _is_looser(value_of(saved, name), value_of(config, name))]


def checkpoint_to_resume(
    config: Config,
    folder: Path,
    fingerprint: Mapping[str, str],
    *,
    stage: Stage,
    allowed: Sequence[str],
    ranks: Ranks,
) -> Checkpoint | None:
    """Return the newest valid checkpoint of the run in a folder, if it may be restored; None for a run without
    checkpoints.

    The settings and inputs must be those of the run. A run can only be extended from its last state.

    Args:
        config: The configuration to resume with.
        folder: The run's folder.
        fingerprint: Hashes of the inputs.
        stage: The run's stage.
        allowed: Dotted names of settings, inputs or whole sections that may differ.
        ranks: The processes of the run.

    Raises:
        DataError: No checkpoint is valid, or the newest belongs to another stage.
        ConfigError: Something differs, or the last state of a run to extend was not kept; the message says which.
    """
    checkpoint = newest_valid(folder / CHECKPOINTS, on_rejected=say, ranks=ranks)
    if checkpoint is None and any(kept_checkpoints(folder)):
        raise DataError(
            f"{folder / CHECKPOINTS} has no whole checkpoint; to train from the start and lose what is left of them, "
            "delete that folder"
        )
    if checkpoint is not None and checkpoint.manifest.kind != stage.name:
        raise DataError(f"{checkpoint.folder} is a checkpoint of kedge {checkpoint.manifest.kind}, not of {stage.name}")
    longer = lengthening(folder, config, stage)
    _check_unchanged(config, folder, checkpoint and checkpoint.manifest.fingerprint, fingerprint, [*allowed, *longer])
    if longer:
        done = checkpoint.update if checkpoint else 0
        ending = read_json_object(folder / FINISHED_FILE)
        if ending and (checkpoint is None or done != ending.get("updates")):
            raise ConfigError(
                f"{folder} cannot be extended: it finished after update {ending.get('updates')}, but "
                f"{'no checkpoint' if checkpoint is None else f'only that of update {done}'} was kept "
                "(checkpoint.keep_last=true keeps the last one)"
            )
        say(describe_extension(config, stage, done, is_longer=stage.length in longer, changes=allowed))
    return checkpoint


def _check_unchanged(
    config: Config,
    folder: Path,
    recorded: Mapping[str, str] | None,
    fingerprint: Mapping[str, str],
    allowed: Sequence[str],
) -> None:
    """Check that a run is resumed with its own settings and with the inputs that its checkpoint records, if any."""
    changes = _changes(config, folder, allowed)
    if recorded is not None:
        changed = [re.split(r"[:\[]", change)[0] for change in changes]
        if lost := lost_inputs(config, recorded, fingerprint, allowed=[*allowed, *changed]):
            raise ConfigError(f"{folder} cannot be resumed, because {lost[0]}")
        changes += changed_inputs(recorded, fingerprint, allowed=allowed)
    if changes:
        fields = dict.fromkeys(field for change in changes for field in re.findall(r"^\w+(?:\.\w+)?", change))
        names = (
            " ".join(f"--allow-changes {field}" for field in fields)
            if is_command_line()
            else f"resume={list(fields)!r}"
        )
        raise ConfigError(f"{folder} cannot be resumed, because {'; '.join(changes)}. If this is intended: {names}")


def describe_extension(
    config: Config, stage: Stage, done: int, *, is_longer: bool = True, changes: Collection[str] = ()
) -> str:
    """Describe the effect of a longer run on its schedules.

    Args:
        config: The configuration to resume with.
        stage: The stage.
        done: Updates, or optimizer steps, so far.
        is_longer: Its length has grown; False if only its early-stopping limits have.
        changes: Other allowed changes, which apply from now on.
    """
    so_far = f"The run continues after {stage.unit} {done}"
    stretched = list[str]()
    if is_longer:
        stretched = _stretched(config, stage) if stage.stretched is None else stage.stretched(config)
    effects = [f"Stretched to the new length: {', '.join(stretched)}."] if stretched else []
    effects += [f"Allowed to change: {', '.join(changes)}."] if changes else []
    if effects:
        return f"{so_far}. {' '.join(effects)} The result is not that of a run that was this long from the start."
    evaluations = evaluations_of(config, stage)
    if stage.unit == "update":
        additional = evaluations and done % evaluations
        condition = f"; the evaluation after update {done} is an additional one" if additional else ""
    else:
        condition = ", if the batch size divides the rows"
        condition += "; the evaluations so far were at other steps than that run's" if evaluations else ""
    return f"{so_far}, with bit-identical results as if it had always been this long{condition}."


def _stretched(config: Config, stage: Stage) -> list[str]:
    """List the schedules, and the sampling ahead, that span the whole run."""
    [section] = stage.trains
    settings = value_of(config, section)
    return [
        *([] if settings.decay == "constant" else [f"the {settings.decay} decay of the learning rate"]),
        *(["its warm-up"] if settings.warmup_fraction else []),
        *(["the KL controller's horizon"] if section == "ppo" and config.ppo.kl_controller.name != "fixed" else []),
        # Nothing was sampled ahead beyond the old end, so the next update samples with its own weights.
        *(["sampling ahead"] if stage.unit == "update" and config.rollout.max_staleness else []),
    ]


def _is_looser(saved: float | None, now: float | None) -> bool:
    return saved is not None and (now is None or now > saved)


T = TypeVar("T")

THREADS = "threads"
"""Key of the number of threads in the facts of `config.yaml`."""

CHANGED = "changed"
"""Key of the changes during the run in the facts of `config.yaml`."""

DATE = "date"
"""Key of the start date in the facts of `config.yaml`; some chat templates contain the date."""


@dataclass(eq=False)
class RunFinished(Exception):
    """Raised when opening a finished run, whose stage then returns the stored result.

    Attributes:
        folder: The run's folder.
    """

    folder: Path


def check_same_stage(folder: Path, stage: str) -> None:
    """Check that a folder has no run of another stage (`ConfigError` if it does)."""
    trained = read_config(folder)[0].get("stage", stage) if is_run(folder) else stage
    if trained != stage:
        raise ConfigError(f"{folder} is a run of kedge {trained}, not of {stage}")


def check_finished(
    config: Config, folder: Path, fingerprint: Mapping[str, str], *, stage: Stage, allowed: Collection[str]
) -> None:
    """Check that a finished run is resumed with its own settings and inputs; only its length may be smaller.

    Args:
        config: The configuration to resume with.
        folder: The run's folder.
        fingerprint: Hashes of the inputs.
        stage: The run's stage.
        allowed: Dotted names of settings, inputs or whole sections that may differ.

    Raises:
        ConfigError: Something differs; the message says what.
    """
    extending = (stage.length, *stage.bounds)
    changes = _changes(config, folder, (*extending, *allowed)) + changed_since(folder, fingerprint, allowed=allowed)
    if changes:
        raise ConfigError(
            f"{folder} has finished, with other settings ({'; '.join(changes)}); choose another {as_argument('--out')}"
        )


def changed_since(folder: Path, fingerprint: Mapping[str, str], *, allowed: Collection[str] = ()) -> list[str]:
    """One line per input that has changed since a run finished; arguments as in `check_finished`.

    Missing inputs are not compared.
    """
    saved = _ending(folder).get(INPUTS, {})
    recorded = {name: each for name, each in saved.items() if name in fingerprint}
    return changed_inputs(recorded, {name: fingerprint[name] for name in recorded}, allowed=allowed)


def _changes(config: Config, folder: Path, allowed: Collection[str]) -> list[str]:
    """One line per setting that differs from those of the run in a folder."""
    return changed_settings(*_before_and_now(config, folder), allowed=allowed)


def _before_and_now(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Return the settings of the run in a folder, and those to resume it with."""
    both = (load_config(folder / CONFIG_FILE), config)
    pairs = zip(effective_settings(*both), both, strict=True)
    return [_placed(settings, each.out, folder) for settings, each in pairs]


def changes_so_far(config: Config, folder: Path, stage: Stage, done: int) -> str:
    """Describe the settings changed during the run in a folder, and when; empty without changes.

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
    since = [f"after {stage.unit} {done} {', '.join(changes)}"] if changes else []
    return "; ".join(filter(None, [earlier, *since]))


def threads_before(folder: Path) -> int | None:
    """Return the number of CPU threads of the run in a folder; None if unknown, or if there are fewer cores.

    Another number changes the order of summation, and thus the last digits of every result.
    """
    before = read_config(folder)[0].get(THREADS, "")
    now = set_threads()
    if not re.fullmatch("[0-9]+", before) or int(before) == now:
        return None
    if int(before) > (cores := available_cores()):
        say(f"The run had {before} threads, and there are {cores} cores: the last digits of its results will differ")
        return None
    say(f"The run continues with {before} threads, as before, instead of {now}; runtime.num_threads changes them")
    return int(before)


def date_before(folder: Path) -> str | None:
    """Return the date on which the run in a folder started, as `2026-02-28`; None without a run, or if unknown."""
    try:
        return str(date.fromisoformat(read_config(folder)[0].get(DATE, ""))) if is_run(folder) else None
    except (DataError, ValueError):
        return None


def in_place(config: Config, folder: Path) -> Config:
    """Replace paths into the former folder of a moved run, or of its chain, with paths into the present one."""
    before = load_config(folder / CONFIG_FILE).out
    return with_values(config, _placed(config.model_dump(), before, folder, here=_place(config.out, folder)))


def _place(out: str | None, folder: Path) -> str:
    """The path of a run's folder, or of its chain's, ending with a separator."""
    whole = os.path.expanduser(out or "")
    return os.path.join(os.path.dirname(whole) if is_run(folder.resolve().parent) else whole, "")


def _placed(settings: T, out: str | None, folder: Path, here: str = "HERE/") -> T:
    """Replace the path of the run's or the chain's folder with a placeholder throughout `settings`.

    A run can start from models that are saved in its folder, and the stages of a chain refer to each other's models and
    data. With the placeholder, their settings compare equal after the folder is moved or its path is spelled
    differently.
    """
    place = _place(out, folder)

    def placed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: placed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [placed(each) for each in value]
        return f"{here}{value.removeprefix(place)}" if isinstance(value, str) and value.startswith(place) else value

    return placed(settings) if place else settings


FILES = "model_files"
INPUTS = "inputs"


def mark_finished(
    folder: Path, stage: str, summary: Mapping[str, Any], fingerprint: Mapping[str, str], receipt: Receipt
) -> None:
    """Write `finished.json`: the summary, and records of the model's files, which have been written to disk.

    Args:
        folder: The run's folder.
        stage: Its stage.
        summary: Its results.
        fingerprint: Hashes of its inputs.
        receipt: Its receipt, which ends before.

    Raises:
        OutputError: It cannot be written.
    """
    records = record_files(folder / MODEL_FOLDER) if find_stage(stage).makes_model else {}
    files = {name: asdict(record) for name, record in records.items()}
    content = {"stage": stage, **summary, INPUTS: dict(fingerprint), **({FILES: files} if files else {})}
    text = json.dumps(content, indent=2).encode()
    receipt.end(text, {f"{MODEL_FOLDER}/{name}": record.sha256 for name, record in records.items()})
    replace_file(folder / FINISHED_FILE, [text])


def finished_run(config: Config) -> Path | None:
    """Return the output folder if its run has finished and the configuration does not extend it, else None.

    A run with a damaged model has not finished: its end is repeated from a checkpoint.

    Raises:
        DataError: `finished.json` or the model is damaged, and the run has no checkpoint.
    """
    folder = None if config.out is None else Path(os.path.expanduser(config.out))
    if folder is None or not (folder / FINISHED_FILE).is_file():
        return None
    stage = find_stage(*read_ending(folder, "stage"))
    if lengthening(folder, config, stage):
        return None
    if not stage.makes_model or (problem := damage(folder)) is None:
        return folder
    if stage.length and newest_valid(folder / CHECKPOINTS, on_rejected=say) is None:
        raise DataError(
            f"{problem}, and {folder} has no checkpoint to repeat it from; train again, in another "
            f"{as_argument('--out')}"
        )
    say(f"{problem}: the end of the run is repeated")
    return None


def damage(folder: Path) -> str | None:
    """Describe the damage to the model of a finished run, or of a stage of a chain; None if it is intact.

    Weights must match byte for byte. Other files may have been edited, but not be missing, empty, or invalid JSON.
    """
    for run in (folder, *sorted(ending.parent for ending in folder.glob(f"*/{FINISHED_FILE}"))):
        model = run / MODEL_FOLDER
        if not model.is_dir():
            return f"{model} is missing"
        recorded = {model / name: FileRecord(**record) for name, record in (_ending(run).get(FILES) or {}).items()}
        for path in dict.fromkeys([*recorded, *sorted(path for path in model.rglob("*") if path.is_file())]):
            if path.name != CARD and (problem := _problem(path, recorded.get(path))):
                return f"{path} is {problem}"
    return None


def _problem(path: Path, recorded: FileRecord | None) -> str | None:
    """Describe the damage to a file of a model; None if it is intact, or did not exist when the run finished."""
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
    """Read values from the summary that `mark_finished` wrote.

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
