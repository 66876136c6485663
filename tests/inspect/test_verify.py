"""`kedge verify`: whatever is changed in a run's folder after the run is found and named."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kedge.config import Config, config_from_settings
from kedge.runs.receipt import Receipt
from kedge.runs.run import Resume
from kedge.runs.training import Update
from kedge.stages.ppo import run_ppo
from kedge_base.command import Group, new_app
from kedge_base.errors import DataError
from kedge_base.run_folder.receipt import Recorded, read_lines
from kedge_inspect.commands import add_commands
from kedge_inspect.verify import LIMITS, verify_run
from tests.forking import fork_context
from tests.inspect.damage import DAMAGES
from tests.inspect.test_without_torch import LIBRARIES
from tests.tiny import save_tiny_policy

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time", "The tide", "The sun"]
REWARD = """
def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]
"""


def prepare(root: Path) -> Path:
    """A folder with what a run reads."""
    save_tiny_policy(root / "policy")
    (root / "prompts.jsonl").write_text("".join(f'{{"prompt": "{each}"}}\n' for each in PROMPTS))
    (root / "reward.py").write_text(REWARD)
    return root


def config_in(root: Path, out: str = "run", **more: object) -> Config:
    settings = {
        "model": str(root / "policy"),
        "out": str(root / out),
        "prompts": [str(root / "prompts.jsonl")],
        "reward": f"{root}/reward.py:vowels",
        "num_updates": 6,
        "num_prompts": 4,
        "num_epochs": 2,
        "max_new_tokens": 8,
        "learning_rate": 1e-3,
        "checkpoint.every": 2,
        "checkpoint.keep": 2,
        "report": False,
        "runtime.device": "cpu",
    }
    return config_from_settings("ppo", settings | more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = prepare(tmp_path_factory.mktemp("verify"))
    eval_prompts = {"eval_prompts": [str(root / "prompts.jsonl")], "ppo.eval_every": 3}
    run_ppo(config_in(root, **eval_prompts))
    run_ppo(config_in(root, "other", seed=1, **eval_prompts))
    return root


def faults(run: Path) -> list[str]:
    return verify_run(run)[0]


def verified(*arguments: object) -> tuple[int, list[str]]:
    """Exit code and output of the command, as it is without the package that trains."""
    app = new_app(Group)
    add_commands(app)
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return result.exit_code, result.output.splitlines()


def test_a_run_that_nobody_changed_is_as_its_receipt_says(finished):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    code, (line, limits) = verified(finished / "run")
    assert code == 0
    assert "compared 6 updates, 3 checkpoints, " in line  # the best one is kept, too
    assert "and 7 of 7 files that the run read" in line
    assert limits == LIMITS
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def test_a_run_is_verified_wherever_it_is_moved_with_its_data(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "moved")
    assert verify_run(tmp_path / "moved" / "run") == verify_run(finished / "run")
    shutil.copytree(finished / "run", tmp_path / "alone")
    assert "0 of 7 files that the run read" in verify_run(tmp_path / "alone")[1]
    assert faults(tmp_path / "alone") == []


@pytest.mark.parametrize("place", [".", "run"])
def test_a_run_is_verified_by_a_relative_path(finished, monkeypatch, place):
    whole = verify_run(finished / "run")
    monkeypatch.chdir(finished if place == "run" else finished / "run")
    assert verify_run(Path(place)) == whole
    assert not whole[0]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_kind_of_change_is_named(finished, tmp_path, damage):
    check_damage(finished, tmp_path, damage, seed=1)


@pytest.mark.slow
def test_two_hundred_random_changes_are_named(finished, tmp_path):
    for seed in range(200):
        check_damage(finished, tmp_path / str(seed), DAMAGES[seed % len(DAMAGES)], seed)


def check_damage(finished: Path, place: Path, damage, seed: int) -> None:
    shutil.copytree(finished, place, dirs_exist_ok=True)
    named = damage(place, random.Random(seed))
    found = faults(place / "run")
    assert any(line.startswith(named) for line in found), (seed, named, found)
    assert verified(place / "run")[0] == 1
    shutil.rmtree(place)


@pytest.mark.slow
def test_the_receipt_takes_less_than_a_hundredth_of_an_update(tmp_path, monkeypatch):
    spent = []
    add = Receipt.add

    def timed(self: Receipt, update: int, **saved: bool) -> None:
        before = time.perf_counter()
        add(self, update, **saved)
        spent.append(time.perf_counter() - before)

    monkeypatch.setattr(Receipt, "add", timed)
    rows = run_ppo(config_in(prepare(tmp_path), num_updates=60, **{"checkpoint.every": 100})).metrics
    share = statistics.median(spent) / statistics.median(row["time/update"] for row in rows)
    print(f"{1e3 * statistics.median(spent):.2f} ms, {share:.2%} of an update")
    assert share < 0.01


def test_a_receipt_of_another_run_names_everything(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "both")
    shutil.copyfile(finished / "other" / "receipt.jsonl", tmp_path / "both" / "run" / "receipt.jsonl")
    found = faults(tmp_path / "both" / "run")
    assert sum(line.startswith("metrics.jsonl: row") for line in found) == 6
    assert {"finished.json was changed", "model/model.safetensors was changed"} <= {*found}


def test_users_mistakes_are_one_line(finished, tmp_path):
    for folder in (tmp_path, tmp_path / "nothing", finished / "prompts.jsonl"):
        with pytest.raises(DataError, match=r"has no receipt\.jsonl"):
            verify_run(folder)
    shutil.copytree(finished / "run", tmp_path / "run")
    (tmp_path / "run" / "receipt.jsonl").write_text("[]\n{}\n\n", "utf-8")
    assert faults(tmp_path / "run")[-1] == "receipt.jsonl does not say how the run started"


ALONE = """
import json, sys
from pathlib import Path

sys.modules |= dict.fromkeys(json.loads(sys.argv[2]))  # importing one of them raises ModuleNotFoundError

from kedge_inspect.verify import verify_run

print(json.dumps(verify_run(Path(sys.argv[1]))))
"""


def test_a_run_is_verified_without_torch(finished):
    missing = json.dumps([*LIBRARIES, "kedge"])
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, finished / "run", missing], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert tuple(json.loads(ran.stdout)) == verify_run(finished / "run")


def test_a_run_without_a_receipt_gets_one_when_it_is_resumed(tmp_path):
    root = prepare(tmp_path)
    stopped(config_in(root), at=4)
    (root / "run" / "receipt.jsonl").unlink()
    with pytest.raises(DataError, match=r"no run of this version of kedge trained there, or it was removed"):
        verify_run(root / "run")
    run_ppo(config_in(root), resume=Resume())
    found, summary = verify_run(root / "run")
    assert not found
    assert "compared 6 updates" in summary
    assert "updates up to 4 as a later start found them" in summary


class Stopped(Exception):
    pass


def stopped(config: Config, at: int, resume: Resume | None = None) -> None:
    """Let a callback stop a run."""

    def stop(update: Update) -> None:
        if update.number == at:
            raise Stopped

    with pytest.raises(Stopped):
        run_ppo(config, callback=stop, resume=resume)


def lines_of(run: Path) -> list[dict]:
    return [line for line, _ in read_lines(run / "receipt.jsonl") if line is not None]


def test_one_checkpoint_is_counted_as_one(tmp_path):
    root = prepare(tmp_path)
    stopped(config_in(root), at=1)
    assert ", 1 checkpoint, " in verify_run(root / "run").summary


def test_starts_stay_in_the_chain(tmp_path):
    root = prepare(tmp_path)
    run = root / "run"
    stopped(config_in(root), at=3)
    assert faults(run) == []
    shutil.rmtree(run / "checkpoints" / "update-000003")
    assert faults(run) == ["checkpoints/update-000003/manifest.json is missing"]
    stopped(config_in(root), at=5, resume=Resume())  # from update 2, older than the last one
    assert faults(run) == []
    run_ppo(config_in(root), resume=Resume())
    run_ppo(config_in(root, num_updates=8), resume=Resume())
    found, summary = verify_run(run)
    assert not found
    assert "compared 8 updates" in summary
    assert [line["start"] for line in lines_of(run) if "start" in line] == [0, 2, 5, 6]
    updates = [line["update"] for line in lines_of(run) if "trained" in line]
    assert updates == [1, 2, 3, 3, 4, 5, 6, 7, 8]
    trained = [(line["update"], line["trained"]) for line in lines_of(run) if "trained" in line]
    assert len({*trained}) == 8  # the third update, made twice, was the same both times


def test_a_change_between_two_starts_is_named(tmp_path):
    root = prepare(tmp_path)
    stopped(config_in(root), at=4)
    metrics = root / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"update": 2,', '"update": 2, "policy/new": 1,'))
    run_ppo(config_in(root), resume=Resume())
    assert faults(root / "run") == ["metrics.jsonl: row 2 (update 2) was changed"]


@pytest.mark.parametrize("cut", [1, 40])
def test_a_last_line_that_is_cut_off_is_named_and_mended_by_a_resume(tmp_path, cut):
    root = prepare(tmp_path)
    run = root / "run"
    stopped(config_in(root), at=3)
    receipt = run / "receipt.jsonl"
    lines = receipt.read_bytes().splitlines(keepends=True)[:-2]
    receipt.write_bytes(b"".join(lines)[:-cut])
    found = faults(run)
    assert found[0] == f"receipt.jsonl: line {len(lines)} was changed, or a line before it"
    assert "metrics.jsonl: row 3 is not in the receipt" in found
    run_ppo(config_in(root), resume=Resume())
    assert faults(run) == []
    assert [line["start"] for line in lines_of(run) if "start" in line] == [0, 3]


def test_a_run_that_is_killed_again_and_again_has_one_chain(tmp_path):
    root = prepare(tmp_path)
    config = config_in(root, num_updates=10)
    context, chooser = fork_context(), random.Random(0)
    for _ in range(3):
        told, telling = context.Pipe(duplex=False)
        process = context.Process(target=run_and_tell, args=(config, telling))
        process.start()
        for _ in range(chooser.randint(2, 4)):
            assert told.poll(60), "no update came"
            told.recv()
        time.sleep(chooser.uniform(0.0, 0.03))
        process.kill()
        process.join()
        assert all(line is not None for line, _ in [*read_lines(root / "run" / "receipt.jsonl")][:-1])
    run_ppo(config, resume=Resume())
    assert faults(root / "run") == []
    assert len(Recorded.of(read_lines(root / "run" / "receipt.jsonl")).trained) == 10


def run_and_tell(config: Config, telling: Connection) -> None:
    run_ppo(config, resume=Resume(), on_update=lambda update, _: telling.send(update))


def test_a_checkpoint_that_cannot_be_read_does_not_stop_a_run(tmp_path):
    root = prepare(tmp_path)
    stopped(config_in(root), at=4)
    (root / "run" / "checkpoints" / "update-000002" / "manifest.json").unlink()
    stopped(config_in(root, **{"checkpoint.keep": 5}), at=5, resume=Resume())
    assert {line[:25] for line in faults(root / "run")} == {"checkpoints/update-000002"}
    run_ppo(config_in(root), resume=Resume())  # which keeps two checkpoints
    assert faults(root / "run") == []
