"""Pushes a run's model to the hub, as configured: checked before the training, done after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from kedge.config import Config
from kedge.logs.progress import say
from kedge.models.pretrained import base_source
from kedge.models.pushing import check_base, check_push, push_folder
from kedge.system.output import MODEL_FOLDER

__all__ = ["check_publishing", "publish"]


def check_publishing(config: Config) -> None:
    """Check that the model of a run can be pushed, if that is configured (`ConfigError` if not)."""
    if config.push.repo:
        check_push(config.push.repo, existing=config.push.existing)
        if config.adapter.kind != "none" and config.model is not None:
            check_base(base_source(config.model))


def publish(config: Config, folder: Path) -> None:
    """Push the model of a finished run, if that is configured, and print its address.

    Raises:
        PushError: It was not pushed; the line has the command that repeats the push.
    """
    if not config.push.repo:
        return
    flags = [*(["--private"] if config.push.private else []), *(["--existing"] if config.push.existing else [])]
    address = push_folder(
        folder / MODEL_FOLDER,
        config.push.repo,
        private=config.push.private,
        existing=config.push.existing,
        again=shlex.join(["kedge", "push", str(folder), config.push.repo, *flags]),
    )
    say(f"pushed to {address}")
