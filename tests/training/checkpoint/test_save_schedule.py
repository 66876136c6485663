"""The schedule of checkpoints."""

from __future__ import annotations

from kedge.training.checkpoint.loop import SaveSchedule


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_every_n_updates():
    schedule = SaveSchedule(every=3, every_minutes=None)
    assert [update for update in range(1, 10) if schedule.is_due(update)] == [3, 6, 9]


def test_every_m_minutes_since_the_last_save():
    clock = Clock()
    schedule = SaveSchedule(every=None, every_minutes=2, clock=clock)
    clock.seconds += 119
    assert not schedule.is_due(1)
    clock.seconds += 1
    assert schedule.is_due(2)
    schedule.saved()
    assert not schedule.is_due(3)
    clock.seconds += 120
    assert schedule.is_due(4)


def test_whichever_comes_first_and_never_without_either():
    clock = Clock()
    both = SaveSchedule(every=2, every_minutes=1, clock=clock)
    neither = SaveSchedule(every=None, every_minutes=None, clock=clock)
    assert [both.is_due(update) for update in (1, 2)] == [False, True]
    clock.seconds += 60
    assert both.is_due(3)
    assert not neither.is_due(1000)
