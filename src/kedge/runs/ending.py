"""Ends a stage: writes the report, and prints the doctor's findings, the results, and the next command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from kedge.config import Config, field_advice
from kedge.ranks import AdaptiveTokens
from kedge.runs.calls import Call, next_calls
from kedge.runs.run import Run
from kedge_base.errors import OutOfMemoryError, OutputError
from kedge_base.machine.invocation import is_command_line, is_first_rank
from kedge_base.machine.progress import say
from kedge_base.registry import service
from kedge_base.run_folder.output import (
    MODEL_FOLDER,
    REPORT_FILE,
    WAITING_FILE,
    checkpoint_folder,
    is_run,
    kept_checkpoints,
    replace_file,
)
from kedge_base.texts import printable

_in_chain: ContextVar[bool] = ContextVar("in_chain", default=False)
"""True if the stage is part of a chain, which prints how to continue itself."""


def leave_stage_report(config: Config, folder: Path, *, interrupted: bool | None) -> None:
    """Write the report of a stage that is about to end, unless `runtime.report` is off.

    Args:
        config: The configuration.
        folder: The run's folder.
        interrupted: The stage did not finish; None if it is still running.
    """
    if config.runtime.report and is_first_rank():
        ending = None if interrupted is None else "stopped" if interrupted else "finished"
        service("report")(folder, ending=ending, advice=field_advice)


@contextmanager
def chained() -> Iterator[None]:
    """Within this context, a stage does not print how to continue: the surrounding chain does."""
    token = _in_chain.set(True)
    try:
        yield
    finally:
        _in_chain.reset(token)


@contextmanager
def chain_report(run: Run) -> Iterator[None]:
    """Write one report for all stages that ran in the block, even if it fails, unless no stage was started."""
    try:
        with chained():
            yield
    finally:
        is_due = run.config.runtime.report and is_first_rank() and run.has_started
        if is_due and service("runs_in")(run.folder) != [run.folder]:
            service("report")(run.folder, advice=field_advice)


@contextmanager
def resumable(run: Run) -> Iterator[None]:
    """If the block is interrupted or fails and left something to resume, print the call that resumes the run."""
    folder = run.folder
    try:
        yield
    except BaseException as error:
        if run.has_started and not _in_chain.get() and is_run(folder):
            if isinstance(error, OutputError) and (kept := _newest_checkpoint(folder)):
                say(f"Saved last: {printable(str(kept))}")
            _say_resuming(run, error.settings if isinstance(error, OutOfMemoryError) else {})
        raise


def _say_resuming(run: Run, changes: Mapping[str, object]) -> None:
    """Print how to resume the run, with changed settings: the command only needs its folder."""
    if is_command_line():
        allowed = {"allow-changes": tuple(changes)} if changes else {}
        how = Call(run.stage, {"resume": (str(run.folder),), **allowed}, changes).shell()
    else:
        more = f", **{dict(changes)!r}" if changes else ""
        how = f"the same call of kedge.{run.stage} with out={str(run.folder)!r}, resume={list(changes) or True}{more}"
    say(f"Resume: {how}")


def end_stage(run: Run, results: Mapping[str, object]) -> None:
    """End a stage that produced a model: print the doctor's findings and how to continue, and push the model if
    configured.

    Args:
        run: The run.
        results: Its content of `finished.json`.

    Raises:
        PushError: The model was not pushed.
    """
    budget = run.micro_batch_tokens
    found = {"micro_batch_tokens": budget.tokens} if isinstance(budget, AdaptiveTokens) else {}
    if run.ranks.is_first:
        run.finish({**results, **found})
        say_findings(run.folder)
        say_next(run.config, run.folder, run.stage)
        publish(run)
    run.ranks.wait()  # so that the model is there on every rank


def publish(run: Run) -> None:
    """Push the model of a finished run, if configured, and print its address.

    Raises:
        PushError: The model was not pushed; the message has the command that repeats the push.
    """
    push = run.config.push
    if not push.repo:
        return
    flags = [f"--{name}" for name in ("private", "existing") if getattr(push, name)]
    address = service("push")(
        run.folder / MODEL_FOLDER,
        push.repo,
        private=push.private,
        existing=push.existing,
        again=shlex.join(["kedge", "push", str(run.folder), push.repo, *flags]),
    )
    say(f"pushed to {address}")


def say_next(config: Config, folder: Path, stage: str, *, start: str = "", judge: str = "") -> None:
    """Print the model, the report and the usual next calls; nothing for a stage of a chain.

    For the arguments see `next_calls`.
    """
    if _in_chain.get():
        return
    _say_files(folder, "Model", "model")
    for number, call in enumerate(next_calls(config, stage, folder, start=start, judge=judge)):
        say(f"{'        ' if number else 'Next:   '}{_written(call)}")


def end_waiting(run: Run, labels: Path, missing: int) -> None:
    """End a run that waits for labels: write which, and print how many are missing and how to continue."""
    if run.ranks.is_first:
        replace_file(run.folder / WAITING_FILE, [json.dumps({"labels": labels.name}).encode()])
        more = "1 more item" if missing == 1 else f"{missing} more items"
        say(f"Waiting for labels: {more} of {printable(str(labels))} must be answered")
        say(f"Label:  kedge label {printable(shlex.quote(str(labels)))}")
        _say_resuming(run, {})
    run.ranks.wait()


def say_results(run: Run, name: str, ending: Mapping[str, object]) -> None:
    """End a stage that produces no model: write its report, then print findings, results and the report's location.

    Args:
        run: The run.
        name: Name of the file with the results.
        ending: The content of the run's `finished.json`.
    """
    run.finish(ending)
    if run.ranks.is_first:
        leave_stage_report(run.config, run.folder, interrupted=False)
        say_findings(run.folder)
        _say_files(run.folder, "Result", name)
    run.ranks.wait()  # so that the results are there on every rank


def _say_files(folder: Path, label: str, name: str) -> None:
    """Print the location of a stage's result, and of its report if it has one."""
    say(f"{label + ':':<7} {printable(str(folder / name))}")
    if (folder / REPORT_FILE).is_file():
        say(f"Report: {printable(str(folder / REPORT_FILE))}")


def say_findings(folder: Path) -> None:
    """Print one line per warning or serious finding, and the verdict, including what could not be checked."""
    findings, verdict = service("findings")(folder, advice=field_advice)
    for line in findings:
        say(line)
    say(f"doctor: {verdict}")
    if findings:
        say(f"Run `kedge doctor {folder}` for explanations and remedies")


def _written(call: Call) -> str:
    return call.shell() if is_command_line() else call.python()


def _newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of the run, or of any stage of the chain."""
    places = [folder, *filter(Path.is_dir, folder.glob("*"))]
    kept = [checkpoint_folder(place, number) for place in places for number in kept_checkpoints(place)]
    return max(kept, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
