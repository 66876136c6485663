"""Watching a run: it starts, grows, is cut back, is resumed and finishes, and its folder is never changed."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from kedge.cli import main
from kedge.errors import DataError
from kedge.inspect.doctor import Examination
from kedge.inspect.record import read_run
from kedge.inspect.watch import Follower, watching
from kedge.inspect.watch.watching import serve_run, watch_run
from kedge.logs.json_lines import truncate_rows
from tests.inspect.watch.runs import CONFIG, add, begin, metrics, sample


class Script:
    """Steps to take between two reads of the folder, and the frames that the terminal shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self.frames: list[str] = []
        self._steps = iter(steps)
        monkeypatch.setattr(watching, "REDRAW_INTERVAL", 1e9)
        monkeypatch.setattr(watching.time, "sleep", lambda seconds: next(self._steps)())
        monkeypatch.setattr(Live, "update", lambda live, renderable, *, refresh: self._show(renderable))
        self.written = StringIO()
        self.console = Console(force_terminal=True, width=100, height=50, file=self.written, color_system=None)

    def _show(self, renderable: object) -> None:
        frame = Console(width=100, file=StringIO(), record=True, color_system=None)
        frame.print(renderable)
        self.frames.append(frame.export_text())


def finish(folder: Path) -> None:
    (folder / "finished.json").write_text('{"stage": "ppo", "updates": 4}')


def scores(frames: list[str]) -> list[str]:
    return [found[1] if (found := re.search(r"^score +([\d.]+)", frame, re.MULTILINE)) else "" for frame in frames]


def test_a_run_is_shown_from_before_its_start_to_its_end(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    half = "".join(json.dumps(metrics(update)) + "\n" for update in (1, 2, 3)) + '{"update": 4, "rew'
    script = Script(
        monkeypatch,
        lambda: begin(folder),
        lambda: add(folder, "metrics.jsonl", metrics(1), metrics(2), metrics(3)),
        lambda: (folder / "metrics.jsonl").write_text(half),  # the run is killed in a row
        lambda: truncate_rows(folder / "metrics.jsonl", 2),  # and resumed
        lambda: add(folder, "metrics.jsonl", metrics(3), metrics(4)),
        lambda: finish(folder),
    )
    watch_run(folder, script.console)
    waiting, begun, *later = script.frames
    assert " ".join(waiting.split()) == f"{folder} has no run yet: waiting for one to start"
    assert "no metrics yet" in begun
    assert scores(later) == ["0.750", "0.500", "1.00", "1.00"]  # half a row is nothing new
    assert "● running" in later[-2]
    assert "■ finished" in later[-1]
    # The screen is restored, and the last frame stays.
    assert "■ finished" in script.written.getvalue().split("\x1b[?1049l")[-1]


def test_the_active_stage_is_shown_until_the_chain_ends(tmp_path, monkeypatch):
    chain = begin(tmp_path / "chain", "# stage: rlhf\n")
    begin(chain / "sft", "# stage: sft\n")
    add(chain / "sft", "metrics.jsonl", {"update": 1, "loss": 0.5})
    hour_ago = time.time() - 3600
    script = Script(
        monkeypatch,
        lambda: [os.utime(path, (hour_ago, hour_ago)) for path in (chain / "sft").iterdir()] + [finish(chain / "sft")],
        lambda: begin(chain / "ppo"),
        lambda: add(chain / "ppo", "metrics.jsonl", metrics(1)),
        lambda: finish(chain / "ppo"),
        lambda: finish(chain),
    )
    watch_run(chain, script.console)
    assert [frame.split()[0] for frame in script.frames] == ["sft", "sft", "ppo", "ppo", "ppo"]


def test_damage_is_reported_once_it_lasts(tmp_path, monkeypatch):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    (folder / "summary.json").write_text('{"accu')
    monkeypatch.setattr(watching, "PATIENCE", 0.05)
    script = Script(
        monkeypatch,
        lambda: (folder / "summary.json").write_text("{}"),  # it was in the middle of a write
        lambda: (folder / "summary.json").write_text("{"),
        *[lambda: wait(0.03)] * 3,
    )
    with pytest.raises(DataError, match=r"summary\.json' is damaged"):
        watch_run(folder, script.console)
    assert scores(script.frames) == ["0.250"]


def wait(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    sleep(seconds)


def test_watching_changes_nothing(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    watch_run(folder, Console(file=StringIO()))
    with serve_run(folder) as server:
        get(server.url)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def kedge(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kedge", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_one_frame_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    add(folder, "samples.jsonl", sample(1, "[bold]as it is[/bold]"))
    assert kedge(monkeypatch, "watch", str(folder)) == 0
    out = capsys.readouterr().out
    assert "▶ [bold]as it is[/bold]" in out
    assert "\x1b" not in out
    assert kedge(monkeypatch, "watch", str(folder), "--once") == 0
    assert capsys.readouterr().out.count("▶") == 1


@pytest.mark.parametrize("options", [[], ["--once"], ["--web"]])
def test_a_folder_without_a_run_is_one_line(tmp_path, monkeypatch, capsys, options):
    for folder in (tmp_path / "none", tmp_path):
        assert kedge(monkeypatch, "watch", str(folder), *options) == 2
        captured = capsys.readouterr()
        assert re.fullmatch(r"error: .*(does not exist|is not the folder of a run).*\n", captured.err)
        assert captured.out == ""


@pytest.mark.parametrize("options", [["--port", "8080"], ["--once", "--web"]])
def test_options_that_do_not_go_together(tmp_path, monkeypatch, capsys, options):
    assert kedge(monkeypatch, "watch", str(tmp_path), *options) == 2
    assert capsys.readouterr().err == "error: --port needs --web, and --once cannot be combined with --web\n"


def get(url: str, known: str = "") -> tuple[int, bytes]:
    place, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(place, timeout=20)
    connection.request("GET", f"/{path}", headers={"If-None-Match": known} if known else {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def test_the_page_grows_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("kedge.inspect.watch.server.REBUILD_SHARE", 0)
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    with serve_run(folder) as server:
        status, page = get(server.url)
        assert status == 200
        [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.decode(), re.DOTALL)
        first = json.loads(text)
        assert first["live"] == "/" + server.url.split("/", 3)[3] + "data.json"
        data = server.url + "data.json"
        assert get(data, first["version"]) == (304, b"")
        add(folder, "metrics.jsonl", metrics(2))
        newer = json.loads(get(data, first["version"])[1])
        assert [run["curves"]["update"] for run in newer["runs"]] == [[1, 2]]
        assert get(data, newer["version"])[0] == 304
        (folder / "config.yaml").unlink()
        assert get(data, newer["version"])[0] == 503
        begin(folder, CONFIG)
        assert get(data, newer["version"])[0] == 200


@pytest.fixture
def watched(tmp_path) -> Iterator[subprocess.Popen[str]]:
    add(begin(tmp_path / "run"), "metrics.jsonl", metrics(1))
    command = [sys.executable, "-m", "kedge", "watch", str(tmp_path / "run"), "--web"]
    # A shell's background jobs ignore Ctrl-C, and so would their children.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        yield process
        process.kill()


def test_ctrl_c_ends_it_quietly(watched):
    assert watched.stdout is not None
    url = watched.stdout.readline().strip()
    assert watched.stdout.readline() == "Only this machine can open it. Ctrl-C exits.\n"
    assert get(url)[0] == 200
    watched.send_signal(signal.SIGINT)
    out, err = watched.communicate(timeout=20)
    assert (watched.returncode, out, err) == (0, "", "")


def test_metrics_of_an_earlier_version_are_read_under_their_current_names(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1, **{"policy/optimiser_steps": 16}))
    add(folder, "metrics.jsonl", metrics(2, **{"policy/optimizer_steps": 8}))
    for record in (read_run(folder), Follower(folder, lambda _: Examination((), 0)).look().record):
        assert record.series("policy/optimizer_steps") == ([1, 2], [16.0, 8.0])
        assert record.series("policy/optimiser_steps") == ([], [])
