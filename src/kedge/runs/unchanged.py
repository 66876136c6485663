"""Checks that a resumed run has its settings, models and data, and keeps its number of threads and its date."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from kedge.config import Config, changed_settings, effective_settings, load_config
from kedge.errors import ConfigError, DataError
from kedge.inspect.record import read_config
from kedge.logs.progress import say
from kedge.runs.fingerprint import changed_inputs
from kedge.system.output import CONFIG_FILE, is_run
from kedge.training.checkpoint.store import Checkpoint
from kedge.training.runtime import available_cores, set_threads

__all__ = ["DATE", "THREADS", "check_unchanged", "date_before", "threads_before"]

T = TypeVar("T")

THREADS = "threads"
"""The fact in `config.yaml` that tells a run's number of threads."""

DATE = "date"
"""The fact in `config.yaml` that tells the day on which a run started, which some chat templates write."""

CRITIC = "ppo.critic"
"""Decides which weights a checkpoint has, so a run cannot go on with another. Earlier versions trained a critic also
where `ppo.advantage` needs none, e.g. with `to_go`."""


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
    before = load_config(folder / CONFIG_FILE)
    saved, current = (_placed(effective_settings(each), each.out, folder) for each in (before, config))
    changes = changed_settings(saved, current, allowed=allowed)
    if checkpoint is not None:
        changes += changed_inputs(checkpoint.manifest.fingerprint, fingerprint, allowed=allowed)
    if changes:
        because = f"{folder} cannot be resumed, because {'; '.join(changes)}"
        if any(change.startswith(f"{CRITIC}:") for change in changes):
            critic = saved["ppo"]["critic"]
            raise ConfigError(f"{because}. It was trained with {CRITIC}={critic}: resume it with that setting")
        names = " ".join(f"--allow-changes {change.split(':')[0]}" for change in changes)
        raise ConfigError(f"{because}. If this is intended: {names}")


def threads_before(folder: Path) -> int | None:
    """The number of threads that the run in a folder had on the CPU; None if unknown, or if there are fewer cores.

    Another number changes the order of sums, and with it the last digits of every result.
    """
    before = read_config(folder)[0].get(THREADS, "")
    now, cores = set_threads(), available_cores()
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
