"""The end of sampling in the background."""

from __future__ import annotations

import threading
from contextlib import closing, nullcontext
from typing import Any

import pytest

from kedge.rollout import BackgroundEngine


class Idle:
    """An engine that has nothing to send or end."""

    def publish(self, *_: Any) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def done_at_the_end(engine: BackgroundEngine, error: type[Exception] | None) -> list[str]:
    """The work that is done if the engine is closed while the second of two pieces has not started."""
    done: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> None:
        go_on.wait(10)
        done.append(name)

    def run() -> None:
        with closing(engine):
            engine.publish([], 0)
            for name in ("first", "second"):
                engine.start(lambda *_, name=name: work(name))
            threading.Timer(0.2, go_on.set).start()
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    return done


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_work_that_another_rank_may_have_started_is_done(error: type[Exception] | None) -> None:
    """It would wait for this rank for ever; after an error, the rank that ends is noticed."""
    alone = BackgroundEngine(Idle())  # type: ignore[arg-type]
    assert done_at_the_end(alone, error) == ["first"]
    of_several = BackgroundEngine(Idle(), lambda: nullcontext())  # type: ignore[arg-type]
    assert done_at_the_end(of_several, error) == (["first", "second"] if error is None else ["first"])
