"""How every stage begins and what it shows on its way: a folder, a device, a row of metrics per step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kedge.config import (
    Config,
    changed_settings,
    check_stage,
    choose_output,
    load_config,
    resolved_yaml,
    with_values,
)
from kedge.errors import ConfigError, DataError
from kedge.logs.loggers import check_loggers
from kedge.logs.progress import say
from kedge.logs.run_folder import create_run_folder, discard_run_folder, write_config
from kedge.models import model_width, resolve_precision
from kedge.output import CONFIG_FILE, DIAGNOSTIC_FILES, FINISHED_FILE, REJECTED_FILE, is_run, replace_file, writing
from kedge.runs.fingerprint import changed_inputs, fingerprint
from kedge.runs.in_memory import describe_in_memory
from kedge.training.checkpoint.resume import CHECKPOINTS
from kedge.training.checkpoint.store import Checkpoint, newest_valid
from kedge.training.runtime import (
    keep_freed_memory,
    resolve_device,
    seed_everything,
    set_threads,
    use_deterministic_kernels,
)

__all__ = ["REJECTED_FILE", "Resume", "Run", "finished_run", "open_run", "read_ending"]


@dataclass(frozen=True)
class Resume:
    """The run in the output folder, if there is one, is to go on.

    Attributes:
        allow_changes: Dotted names of settings, models or data, or of whole sections, that may have changed since.
    """

    allow_changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """Where a stage runs and writes.

    Attributes:
        folder: The run's folder; `start` makes it.
        stage: Which one runs.
        device: Where the models live.
        precision: Number format of the matrix products.
        config_text: What `config.yaml` will hold.
        facts: What stands above it: the stage, the device and the versions that ran.
        inputs: Hashes of what it is made from; see `fingerprint`.
        resumed: It was begun before, in this folder.
        checkpoint: Where it goes on from; None begins anew.
    """

    folder: Path
    stage: str
    device: torch.device
    precision: Literal["fp32", "bf16"]
    config_text: str
    facts: Mapping[str, object]
    inputs: Mapping[str, str]
    resumed: bool = False
    checkpoint: Checkpoint | None = None

    def start(self) -> None:
        """Make the folder, with `config.yaml` in it: everything is loaded and fits, the work begins.

        A mistake that shows before this leaves nothing behind, so that its mended command can be run again as it is.

        Raises:
            OutputError: The folder cannot be made, or something was put into it since the run was opened.
        """
        if not self.resumed:
            create_run_folder(self.folder)
        write_config(self.folder, self.config_text, self.facts)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Note that the run has come to its end, and what it came to."""
        replace_file(self.folder / FINISHED_FILE, [json.dumps({"stage": self.stage, **summary}, indent=2).encode()])

    def abandon(self) -> None:
        """Take back what `start` made, if the work has left nothing: no row of a log, and no file beside them.

        The same command, mended, can then be run again as it is. Rejected rows stay.
        """
        discard_run_folder(self.folder)

    @contextmanager
    def started(self) -> Iterator[None]:
        """`start` for a block of work; `abandon` where it ends by an error.

        Raises:
            OutputError: As `start`.
        """
        self.start()
        try:
            yield
        except BaseException:  # Ctrl-C, too: whatever ends the work, it is raised again
            self.abandon()
            raise


def open_run(
    config: Config, stage: str, *, given: Mapping[str, object] | None = None, resume: Resume | None = None
) -> Run:
    """Check what the stage needs and that its folder is free, set up the machine, and seed it.

    Args:
        config: The resolved configuration.
        stage: Which one runs: its name names the folder, too, unless `out` does.
        given: What Python handed over in place of configured fields, by dotted name; None where it did not.
        resume: Go on with the run in the output folder; where there is none, begin it.

    Raises:
        ConfigError: A field that the stage needs is missing, a logger is not installed, the device is not there, or the
            run that is to be resumed was made under another configuration, from another model or other data.
        OutputError: The folder holds something already, or cannot be made.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    config = with_values(config, describe_in_memory(given)) if given else config
    check_stage(config, stage)
    check_loggers(config.runtime.loggers)
    resumed = resume is not None and config.out is not None and is_run(Path(config.out))
    folder = Path(os.path.expanduser(str(config.out))) if resumed else choose_output(config.out, stage)
    inputs, checkpoint = fingerprint(config, given), None
    if resume is not None and resumed:
        checkpoint = newest_valid(folder / CHECKPOINTS, on_rejected=say)
        _check_unchanged(config, folder, inputs, checkpoint, resume)
    device = resolve_device(config.runtime.device)
    source = config.reward_model.base or config.model if stage == "reward" else config.model
    width = model_width(str(source), trust_remote_code=config.runtime.trust_remote_code)
    precision = resolve_precision(config.runtime.precision, device, width=width)
    keep_freed_memory()
    set_threads(config.runtime.num_threads)
    seed_everything(config.runtime.seed)
    if config.runtime.deterministic and device.type == "cuda":
        use_deterministic_kernels()
    facts = {"stage": stage, "device": device, "precision": precision}
    # What an earlier run ended at; this run begins anew.
    for path in () if resumed else (folder / name for name in sorted(DIAGNOSTIC_FILES)):
        with writing(path):
            path.unlink(missing_ok=True)
    return Run(folder, stage, device, precision, resolved_yaml(config), facts, inputs, resumed, checkpoint)


def finished_run(config: Config) -> Path | None:
    """The output folder, if the run in it has come to its end."""
    folder = None if config.out is None else Path(os.path.expanduser(config.out))
    return folder if folder and (folder / FINISHED_FILE).is_file() else None


def read_ending(folder: Path, *names: str) -> list[Any]:
    """What `Run.finish` noted under these names.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / FINISHED_FILE
    try:
        ending = json.loads(path.read_bytes())
        return [ending[name] for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged; without it, --resume takes the run's last steps again") from error


def _check_unchanged(
    config: Config, folder: Path, inputs: Mapping[str, str], checkpoint: Checkpoint | None, resume: Resume
) -> None:
    """Refuse to go on with a run as if it were another."""
    saved = load_config(folder / CONFIG_FILE).model_dump(mode="json")
    changes = changed_settings(saved, config.model_dump(mode="json"), allowed=resume.allow_changes)
    if checkpoint is not None:
        changes += changed_inputs(checkpoint.manifest.fingerprint, inputs, allowed=resume.allow_changes)
    if changes:
        names = " ".join(f"--allow-changes {change.split(':')[0]}" for change in changes)
        raise ConfigError(f"{folder} cannot go on as it began: {'; '.join(changes)}. If that is meant: {names}")
