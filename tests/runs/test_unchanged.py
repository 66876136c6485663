"""A resumed run keeps its number of threads, where there are as many cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kedge.logs.run_folder import write_config
from kedge.runs import resuming
from kedge.runs.resuming import THREADS, threads_before


def test_the_number_of_threads_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = torch.get_num_threads()
    monkeypatch.setattr(resuming, "available_cores", lambda: now + 1)
    for before, kept in (({}, None), ({THREADS: now}, None), ({THREADS: now + 1}, now + 1), ({THREADS: "many"}, None)):
        write_config(tmp_path, "ppo: {}", before)
        assert threads_before(tmp_path) == kept
    assert f"continues with {now + 1} threads, as before, instead of {now}" in capsys.readouterr().err
    write_config(tmp_path, "ppo: {}", {THREADS: now + 2})
    assert threads_before(tmp_path) is None
    assert f"had {now + 2} threads, and there are {now + 1} cores" in capsys.readouterr().err
