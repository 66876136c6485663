"""The live report of a run: it starts, grows, is damaged and mended, and its folder is never changed."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kedge.cli import main
from kedge_base.errors import DataError
from kedge_inspect.live import has_run, serve_run
from tests.inspect.runs import CONFIG, add, begin, metrics


def get(url: str, known: str = "") -> tuple[int, bytes]:
    place, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(place, timeout=20)
    connection.request("GET", f"/{path}", headers={"If-None-Match": known} if known else {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def test_the_page_grows_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("kedge_inspect.live.REBUILD_SHARE", 0)
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
        add(folder, "evaluations.jsonl", {"update": 2, "eval/score": 1.0})
        newer = json.loads(get(data, newer["version"])[1])
        assert [row["update"] for row in newer["runs"][0]["held_out"]["rows"]] == [2]
        (folder / "config.yaml").unlink()
        assert get(data, newer["version"])[0] == 503
        begin(folder, CONFIG)
        assert get(data, newer["version"])[0] == 200


JUDGING = {"update": 1, "phase": "judge", "done": 0, "total": 8, "seconds": 1.0}


@pytest.mark.parametrize(
    ("place", "name", "row", "seconds"),
    [
        (".", "metrics.jsonl", metrics(1), 60),
        (".", "config.yaml", None, 600),
        (".", "metrics.jsonl", metrics(1, **{"time/update": 30.0}), 90),
        ("ppo", "metrics.jsonl", metrics(1, **{"time/update": 30.0}), 90),
        (".", "progress.jsonl", JUDGING, 600),
    ],
    ids=["usual", "before the first update", "slow updates", "slow updates of a chain", "judge"],
)
def test_a_run_that_writes_nothing_more_is_shown_as_stopped(tmp_path, monkeypatch, place, name, row, seconds):
    monkeypatch.setattr("kedge_inspect.live.REBUILD_SHARE", 0)
    folder = begin(tmp_path / "run" / place)
    if row:
        add(folder, name, row)
    written = (folder / name).stat().st_mtime
    shown = []
    with serve_run(tmp_path / "run") as server:
        known = ""
        for later in (1, seconds - 1, seconds + 1, seconds + 100):
            monkeypatch.setattr(time, "time", lambda later=later: written + later)
            status, body = get(server.url + "data.json", known)
            if status == 200:
                data = json.loads(body)
                known = data["version"]
                shown.append([run["state"] for run in data["runs"]])
    assert shown == [["running"], ["stopped"]]


def test_watching_changes_nothing_and_serves_nothing_else(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    with serve_run(folder) as server:
        assert get(server.url)[0] == 200
        for name in ("index.html", "..%2f..%2fetc/passwd", "config.yaml", "data.json/", "/etc/passwd"):
            assert get(server.url + name) == (404, b"Not found.\n")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_chain_or_a_sweep_that_has_not_begun_is_waited_for(tmp_path):
    assert not has_run(tmp_path)
    begin(tmp_path / "sft", "# stage: sft\n")
    assert has_run(tmp_path)


def test_a_models_folder_is_not_waited_for(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="is the folder of a model, not of a run"):
        has_run(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")  # of another library, which saves the model beside its log
    assert has_run(tmp_path)


@pytest.mark.parametrize("command", ["watch", "report", "doctor"])
def test_a_folder_that_is_none_is_one_line(tmp_path, monkeypatch, capsys, command):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("none", "loop", "loop/within"):
        monkeypatch.setattr(sys, "argv", ["kedge", command, str(tmp_path / name)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert re.fullmatch(r"error: .*(does not exist|is not the folder of a run).*\n", captured.err)
        assert captured.out == ""


@pytest.fixture
def watched(tmp_path) -> Iterator[subprocess.Popen[str]]:
    add(begin(tmp_path / "run"), "metrics.jsonl", metrics(1))
    command = [sys.executable, "-m", "kedge", "watch", str(tmp_path / "run")]
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
