"""Starting ranks, ending them together, and starting them again: with a stand-in for the machines."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from kedge.system.launch.child import Child
from kedge.system.launch.seats import News, Place, in_order_of_ranks, rank_variables
from kedge.system.launch.supervise import Output, Patience, supervise

COMMAND = ["ppo", "--out", "run"]
AT_ONCE = Patience(alone=0.05, asked=0.05, between=0.001)


class Machines:
    """Two ranks without processes; `plan` gives, per start, what each tells at every look, the last one forever."""

    def __init__(self, *plan: Sequence[Sequence[News]], obey: int | None = signal.SIGTERM) -> None:
        self.plan, self.obey = list(plan), obey
        self.places = [Place("a", "10.0.0.1"), Place("a", "10.0.0.1")]
        self.commands: list[list[str]] = []
        self.variables: list[Mapping[str, str]] = []
        self.signals: list[int] = []
        self.is_open = False

    @contextmanager
    def open(self) -> Iterator[Machines]:
        assert not self.is_open
        self.is_open, self.looks, self.received = True, 0, 0
        yield self
        self.is_open = False

    def free_port(self) -> int:
        return 1234

    def start(self, command: Sequence[str], variables: Sequence[Mapping[str, str]], folder: str) -> None:
        self.commands.append(list(command))
        self.variables = list(variables)
        self.now = self.plan.pop(0)

    def news(self) -> list[News]:
        told = [each[min(self.looks, len(each) - 1)] for each in self.now]
        self.looks += 1
        obeys = self.received and self.received in (self.obey, signal.SIGKILL)
        return [News(status=-self.received) if obeys and not news.has_ended else news for news in told]

    def end(self, signum: int) -> None:
        self.signals.append(signum)
        self.received = signum


RUNS, DONE = News(), News(status=0)


def run(machines: Machines, stop: Callable[[], int | None] = lambda: None, **more: Any) -> tuple[int, str]:
    """Exit status, and what the launcher says."""
    errors = BytesIO()
    settings: dict[str, Any] = {"command": COMMAND, "max_restarts": 2, **more}
    status = supervise(
        machines.open,
        folder=".",
        variables={"OMP_NUM_THREADS": "1"},
        stop=stop,
        output=Output(BytesIO(), errors),
        patience=AT_ONCE,
        **settings,
    )
    return status, errors.getvalue().decode()


def test_ranks_that_end_well_start_once() -> None:
    machines = Machines([[RUNS, DONE], [DONE]])
    assert run(machines) == (0, "")
    assert (machines.commands, machines.signals) == ([COMMAND], [])
    assert [each["OMP_NUM_THREADS"] + each["RANK"] for each in machines.variables] == ["10", "11"]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (News(status=-9), "rank 1 was ended by SIGKILL"),
        (News(status=1), "rank 1 failed with exit code 1"),
        (News(is_lost=True), "rank 1 and the process that started it are gone"),
    ],
)
def test_after_a_failure_all_start_again(failure: News, said: str) -> None:
    # The first rank notices, and ends by itself with exit code 3, which is not the cause.
    machines = Machines([[RUNS, RUNS, News(status=3)], [RUNS, failure]], [[DONE], [DONE]])
    assert run(machines) == (0, f"{said}; all start again from the last checkpoint (restart 1 of 2)\n")
    assert machines.commands == [COMMAND, [*COMMAND, "--resume", "auto"]]
    assert machines.signals == []


def test_a_rank_that_does_not_notice_is_ended() -> None:
    machines = Machines([[RUNS], [News(status=-9)]], [[DONE], [DONE]], obey=None)
    assert run(machines)[0] == 0
    assert machines.signals == [signal.SIGTERM, signal.SIGKILL]


def test_restarts_are_bounded() -> None:
    machines = Machines(*[[[News(status=3)], [News(status=-9)]]] * 3)
    status, said = run(machines)
    assert (status, len(machines.commands)) == (1, 3)
    assert said.splitlines()[-1] == "error: rank 1 was ended by SIGKILL; given up after 2 restarts"


def test_a_user_error_is_not_repeated() -> None:
    # The first rank loses contact before the second one, whose error it is, has ended.
    machines = Machines([[News(status=3)], [RUNS, RUNS, News(errors=b"error: no such file\n", status=2)]])
    assert run(machines) == (2, "rank 1: error: no such file\n")
    assert machines.signals == []


def test_a_resumed_run_is_resumed_as_it_was() -> None:
    machines = Machines([[News(status=1)], [News(status=1)]], [[DONE], [DONE]])
    command = ["ppo", "--resume", "runs/ppo"]
    assert run(machines, command=command)[0] == 0
    assert machines.commands == [command, command]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_once_without_a_restart(signum: signal.Signals) -> None:
    machines = Machines([[RUNS], [RUNS]])
    assert run(machines, stop=lambda: signum) == (128 + signum, "")
    assert machines.signals == [signal.SIGTERM]


def test_output_of_the_first_rank_and_errors_of_the_others() -> None:
    shown, errors = BytesIO(), BytesIO()
    output = Output(shown, errors)
    output.show(0, News(b"update 1", b"a warning\n"))
    output.show(1, News(b"update 1", b"half a "))
    output.show(1, News(b"", b"line\nand a rest", status=1))
    assert shown.getvalue() == b"update 1"
    assert errors.getvalue() == b"a warning\nrank 1: half a line\nrank 1: and a rest\n"


def test_ranks_of_a_machine_are_neighbors_and_see_all_of_its_gpus() -> None:
    scattered = [
        Place("b", "10.0.0.2", ("1",), ("CUDA_VISIBLE_DEVICES",)),
        Place("a", "10.0.0.1", ("10",), ("CUDA_VISIBLE_DEVICES",)),
        Place("b", "10.0.0.2", ("0",), ("CUDA_VISIBLE_DEVICES",)),
        Place("a", "10.0.0.1", ("9",), ("CUDA_VISIBLE_DEVICES",)),
    ]
    order = in_order_of_ranks(scattered)
    assert order == [2, 0, 3, 1]
    variables = rank_variables([scattered[index] for index in order], 1234)
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "1234"}
    own = [("0", "0", "0,1"), ("1", "1", "0,1"), ("2", "0", "9,10"), ("3", "1", "9,10")]
    assert variables == [
        {**shared, "RANK": rank, "LOCAL_RANK": local, "CUDA_VISIBLE_DEVICES": devices} for rank, local, devices in own
    ]


def test_a_child_tells_what_it_writes_and_how_it_ends(tmp_path: Path) -> None:
    child = Child(["plan"], {"COLUMNS": "80"}, str(tmp_path))
    told = [child.news()]
    while not told[-1].has_ended:
        time.sleep(0.01)
        told.append(child.news())
    assert told[-1].status == 2
    assert b"".join(news.errors for news in told).startswith(b"error: ")
