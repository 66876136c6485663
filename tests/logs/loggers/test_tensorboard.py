"""TensorBoard, read back by TensorBoard."""

from __future__ import annotations

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.logs.loggers.logging_run import SAMPLE, log_run


def test_a_resumed_run_is_one_course_without_repetition(tmp_path):
    log_run(tmp_path, "tensorboard", range(1, 5))
    log_run(tmp_path, "tensorboard", range(3, 7))
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(log.Tags()["scalars"]) == {"reward/score_mean", "score/brief.py:length"}
    scores = [(event.step, event.value) for event in log.Scalars("reward/score_mean")]
    assert scores == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.25), (6, 1.5)]
    for name in ("samples", "fixed_samples"):
        assert [event.step for event in log.Tensors(f"{name}/text_summary")] == [1, 2, 3, 4, 5, 6]


def test_what_a_kill_left_beyond_the_record_is_shown_once(tmp_path):
    """The process was killed after it wrote update 4, and before kedge noted that it had."""
    log_run(tmp_path, "tensorboard", range(1, 5))
    state = json.loads((tmp_path / "loggers.json").read_text())
    (tmp_path / "loggers.json").write_text(json.dumps({**state, "told": {"tensorboard": 3}, "closed": {}}))
    log_run(tmp_path, "tensorboard", range(3, 7))
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("reward/score_mean", "score/brief.py:length"):  # TensorBoard itself never purges texts
        assert [event.step for event in log.Scalars(name)] == [1, 2, 3, 4, 5, 6]


def test_model_output_stays_as_it_is(tmp_path):
    log_run(tmp_path, "tensorboard", range(1, 2))
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = log.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    # A block by indentation: no line of a response can end it.
    assert text.count("\n    ```\n    # left <b>port</b>") == 2
    assert "response, score 1.5" in text
    assert SAMPLE.prompt in text
    [settings] = log.Tensors("settings/text_summary")
    assert '"clip_range": 0.2' in settings.tensor_proto.string_val[0].decode()


def test_rows_are_there_while_the_run_is_at_work(tmp_path):
    from kedge.logs.loggers import LoggedRun
    from kedge.logs.loggers.tensorboard import TensorBoardLogger

    logger = TensorBoardLogger(LoggedRun(tmp_path, "ppo", "tides", "01234567", {}))
    logger.write(1, {"policy/loss": 0.5})
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    logger.close()
    assert [event.value for event in log.Scalars("policy/loss")] == [0.5]
