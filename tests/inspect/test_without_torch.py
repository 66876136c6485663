"""A run's folder is inspected in a process without torch, transformers, numpy and kedge's training code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.logs.record_format import DETAILS_FILE, EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE
from tests.inspect.runs import add, begin, metrics, sample

LIBRARIES = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "pyarrow",
    "huggingface_hub",
    "pydantic",
)
TRAINING = ("algorithm", "data", "models", "training", "rollout", "rewards", "environments", "config", "runs", "stages")
TRAINED = {
    "ppo": "# stage: ppo\n\nppo:\n  num_updates: 12\nreward:\n- {source: gold, weight: 1.0}\n",
    "sft": "# stage: sft\n\nsft:\n  batch_size: 8\n",
}

INSPECT = """
import json, sys, urllib.request
from pathlib import Path

sys.modules |= dict.fromkeys(json.loads(sys.argv[2]))  # importing one of them raises ModuleNotFoundError

from kedge.inspect.diagnosis import examine_run
from kedge.inspect.live import serve_run
from kedge.inspect.report import collect_page, write_report

folder = Path(sys.argv[1])
page = collect_page([folder])
del page["written"]  # the present minute
with serve_run(folder) as server:
    live = urllib.request.urlopen(server.url).read().decode()
print(json.dumps({
    "doctor": {name: each.as_json() for name, each in examine_run(folder).items()},
    "page": page,
    "report": write_report([folder]).read_text().splitlines()[1],
    "watch": live.splitlines()[1],
    "imported": sorted({name.partition(".")[0] for name, module in sys.modules.items() if module}),
}))
"""


@pytest.mark.parametrize("stage", TRAINED)
def test_doctor_report_and_watch_show_the_same_without_torch(tmp_path, stage):
    folder = begin(tmp_path / "run", TRAINED[stage])
    add(folder, METRICS_FILE, *(metrics(update, loss=1 / update) for update in range(1, 13)))
    if stage == "ppo":
        add(folder, SAMPLES_FILE, sample(12, "sails", tokens=["sails"]))
        add(folder, EVALUATIONS_FILE, {"update": 12, "eval/score": 1.5})
        add(folder, DETAILS_FILE, {"update": 12, "scores": [0.0, 1.0, 2.0], "lengths": [1.0, 2.0], "epochs": []})
    whole = inspect(folder)
    alone = inspect(folder, *LIBRARIES, *(f"kedge.{name}" for name in TRAINING))
    assert alone["report"] == alone["watch"] == "<!-- kedge report -->"
    assert not set(LIBRARIES) & set(whole.pop("imported"))
    del alone["imported"]
    assert alone == whole
    [examined] = alone["doctor"].values()
    assert examined["checks"] or examined["not_judged"]
    [run] = alone["page"]["runs"]
    beginning = {"ppo": "PPO is at update 12 of 12: the score rose", "sft": "Fine-tuning is at step 12: the loss fell"}
    assert run["sentences"][0].startswith(beginning[stage])


def inspect(folder: Path, *missing: str) -> dict[str, Any]:
    """What doctor, report and watch show of a run, in a process without some modules."""
    (folder / "report.html").unlink(missing_ok=True)
    ran = subprocess.run(
        [sys.executable, "-c", INSPECT, folder, json.dumps(missing)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
