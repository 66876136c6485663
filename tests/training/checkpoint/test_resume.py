"""A run that ends at any time is saved as it was after its last complete step, or not saved again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kedge.training.checkpoint import state as state_module
from kedge.training.checkpoint.loop import CheckpointedLoop, SaveSchedule
from kedge.training.checkpoint.state import RunState, TrainingState
from kedge.training.checkpoint.store import Checkpoint, newest_valid
from kedge.training.runtime import Stopping, Terminated, listening
from kedge_base.errors import DataError, OutputError
from tests.training.checkpoint.saver import names, refuse


class Walk:
    """A run of the least kind: it draws, counts its draws, and adds them to one weight."""

    def __init__(self, folder: Path, *, every: int | None = None, found: Checkpoint | None = None) -> None:
        self.model, self.draws, self.asked = nn.Linear(1, 1, bias=False), 0, Stopping()
        nn.init.zeros_(self.model.weight)
        torch.manual_seed(0)
        self.loop = CheckpointedLoop(
            RunState(folder, kind="ppo", fingerprint={}, keep=2, found=found),
            schedule=SaveSchedule(every=every, every_minutes=None),
            stop=self.asked,
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loop.restore(TrainingState({"model": self.model}, optimizer, {"draws": self}))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["count"]

    def draw(self) -> torch.Tensor:
        self.draws += 1
        return torch.rand(())

    def step(self) -> None:
        drawn = self.draw()
        self.loop.begin_changes()
        with torch.no_grad():
            self.model.weight += drawn


class BrokenOffError(Exception):
    """Something ends the run."""


def newest(folder: Path) -> Checkpoint | None:
    return newest_valid(folder, on_rejected=refuse)


def walk(run: Walk, num_steps: int, *, ctrl_c_in: int | None = None, changing: bool = False) -> float:
    with run.loop:
        for step in run.loop.steps(num_steps):
            if step == ctrl_c_in:
                if changing:
                    run.loop.begin_changes()  # the step's own call is then that of a second optimizer step
                run.asked.request(signal.SIGINT)
            run.step()
    return run.model.weight.item()


def break_off(folder: Path, *, in_step: int, changing: bool, error: type[BaseException] = BrokenOffError) -> None:
    """A run that ends in the middle of a step: after it has drawn, and maybe after its weights have begun to move."""

    def take_steps() -> None:
        run = Walk(folder)
        with run.loop:
            for step in run.loop.steps(5):
                if step == in_step and not changing:
                    run.draw()
                else:
                    run.step()
                if step == in_step:
                    raise error

    with pytest.raises(error):
        take_steps()


def test_a_step_that_is_dropped_is_taken_again_from_where_it_began(tmp_path):
    whole = walk(Walk(tmp_path / "whole"), 5)
    break_off(tmp_path / "split", in_step=3, changing=False)
    found = newest(tmp_path / "split")
    assert found is not None
    assert (found.update, found.state["progress"]["draws"]) == (2, {"count": 2})
    assert walk(Walk(tmp_path / "split", found=found), 5) == whole


def test_half_a_step_is_never_saved(tmp_path):
    break_off(tmp_path, in_step=3, changing=True)
    assert newest(tmp_path) is None


def test_a_run_that_the_disk_has_ended_does_not_ask_it_again(tmp_path):
    break_off(tmp_path, in_step=3, changing=False, error=OutputError)
    assert newest(tmp_path) is None


def test_a_run_without_a_whole_step_leaves_no_checkpoint(tmp_path):
    break_off(tmp_path, in_step=1, changing=False)
    assert newest(tmp_path) is None


def test_saved_when_it_is_due_and_not_at_the_end(tmp_path):
    walk(Walk(tmp_path, every=2), 6)
    assert names(tmp_path) == ["update-000002", "update-000004"]


@pytest.mark.parametrize(
    ("ctrl_c_in", "changing", "saved"),
    [
        pytest.param(3, False, 2, id="before the weights change"),
        pytest.param(3, True, 3, id="while they change"),
        pytest.param(1, False, 1, id="in the first step, before which there is nothing to save"),
    ],
)
def test_a_run_that_is_asked_to_stop_is_saved_and_resumes_as_if_it_had_not(tmp_path, ctrl_c_in, changing, saved):
    whole = walk(Walk(tmp_path / "whole"), 5)
    with pytest.raises(KeyboardInterrupt):
        walk(Walk(tmp_path / "split"), 5, ctrl_c_in=ctrl_c_in, changing=changing)
    found = newest(tmp_path / "split")
    assert found is not None
    assert found.update == saved
    assert walk(Walk(tmp_path / "split", found=found), 5) == whole


def test_a_stop_that_is_asked_for_does_not_save_the_weights_that_a_rollback_replaces(tmp_path):
    run = Walk(tmp_path, every=2)

    def take_steps() -> None:
        with run.loop:
            for step in run.loop.steps(5):
                run.step()
                if step == 3:
                    run.model.weight.data.fill_(torch.nan)
                    run.asked.request(signal.SIGINT)
                    run.loop.roll_back(on_rejected=refuse)

    with pytest.raises(KeyboardInterrupt):
        take_steps()
    found = newest(tmp_path)
    assert found is not None
    assert found.tensors("model")["weight"].isfinite()


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_signal_while_a_checkpoint_is_written_does_not_cut_it_short(tmp_path, monkeypatch, breaks_off):
    """A due checkpoint, or that of a run which another error ends, as where a rank is lost and torchrun stops all."""
    save = state_module.save_checkpoint
    written: list[int] = []

    def slow(folder: Path, **what: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.6)
        written.append(what["update"])
        return save(folder, **what)

    monkeypatch.setattr(state_module, "save_checkpoint", slow)
    run = Walk(tmp_path, every=None if breaks_off else 2)

    def stopped() -> None:
        with listening(run.asked, 0.2), run.loop:
            for step in run.loop.steps(4):
                if breaks_off and step == 3:
                    raise BrokenOffError
                run.step()

    with pytest.raises(BrokenOffError if breaks_off else Terminated):
        stopped()
    assert written == [2]
    assert names(tmp_path) == ["update-000002"]


def test_the_disk_has_the_rows_before_the_checkpoint_that_knows_of_them(tmp_path, monkeypatch):
    order: list[str] = []
    save = state_module.save_checkpoint

    class Log:
        def sync(self) -> None:
            order.append("rows")

    def note(folder: Path, **what: Any) -> Path:
        order.append(f"checkpoint {what['update']}")
        return save(folder, **what)

    monkeypatch.setattr(state_module, "save_checkpoint", note)
    run = Walk(tmp_path, every=1)
    run.loop.sync_before_saving(Log())
    walk(run, 3)
    assert order == ["rows", "checkpoint 1", "rows", "checkpoint 2"]


def test_a_checkpoint_without_the_state_of_a_part_is_refused_in_one_line(tmp_path):
    walk(Walk(tmp_path, every=1), 2)
    run = Walk(tmp_path / "other")
    loop = CheckpointedLoop(
        RunState(tmp_path, kind="ppo", fingerprint={}, keep=2, found=newest(tmp_path)),
        schedule=SaveSchedule(every=None, every_minutes=None),
        stop=run.asked,
    )
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.raises(DataError, match=r"the checkpoint has no state of new part: .* another version"):
        loop.restore(TrainingState({"model": run.model}, optimizer, {"draws": run, "new part": run}))
