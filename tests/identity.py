"""Checks that two checkouts train with bit-identical results, for refactorings.

    python -m tests.identity record after.json                                 # this checkout
    PYTHONPATH=../before/src python -m tests.identity record before.json       # another checkout's source
    python -m tests.identity compare before.json after.json

Runs every stage briefly on tiny random models through the command line, with `--demo` also the demo (two minutes).
Records all rows of the logs, except times and memory, and a hash of every weight file. Both recordings need the same
number of threads (OMP_NUM_THREADS), which changes the rounding of the demo's sums.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open

from tests.tiny import save_tiny_policy, save_tiny_reward_model

MEASURED = ("time/", "memory/", "tokens_per_second")
"""Prefixes of metrics that differ between identical runs."""

RENAMED = {"policy/optimiser_steps": "policy/optimizer_steps"}
"""Metrics of earlier versions, with their current names."""

RENAMED_FOLDERS = {"ppo-without-leash/": "ppo-without-kl/"}
"""Folders of earlier versions, with their current names."""

LOGS = ("metrics.jsonl", "details.jsonl", "samples.jsonl")

PPO = (
    "ppo --model policy --prompts prompts.jsonl --reward {reward} rollout.num_prompts=8 rollout.max_new_tokens=10 "
    "rollout.micro_batch_size=4 ppo.learning_rate=3e-3 ppo.num_epochs=2 ppo.num_updates=4 {more}"
)
SHARED, MODEL, FUNCTION = "ppo.critic=shared", "reward_model", "reward.py:short"
SEPARATE = "ppo.critic=separate ppo.value_warmup_updates=1"
RUNS: Mapping[str, str] = {
    "sft": "sft --model policy --data demonstrations.jsonl sft.batch_size=4 sft.learning_rate=1e-3",
    "reward": "reward --model policy --data comparisons.jsonl reward_model.batch_size=2",
    "shared": PPO.format(reward=FUNCTION, more=f"{SHARED} runtime.precision=fp32"),
    "separate": PPO.format(reward=MODEL, more=f"{SEPARATE} runtime.precision=fp32"),
    "shared-bf16": PPO.format(reward=FUNCTION, more=f"{SHARED} runtime.precision=bf16"),
    "separate-bf16": PPO.format(reward=MODEL, more=f"{SEPARATE} runtime.precision=bf16"),
    "minibatches": PPO.format(
        reward=FUNCTION,
        more=f"{SHARED} ppo.num_minibatches=4 rollout.num_responses=2 runtime.micro_batch_tokens=48 "
        "ppo.score_at=after_last ppo.entropy_coef=0.01 ppo.kl_in=loss ppo.kl_controller=ziegler "
        "ppo.whiten_rewards=true runtime.precision=fp32",
    ),
    "n-step": PPO.format(
        reward=MODEL,
        more=f"{SEPARATE} ppo.advantage=n_step ppo.advantage_steps=3 ppo.policy_loss=kl_penalty_adaptive "
        "ppo.aggregation=sequence ppo.num_minibatches=2 ppo.kl_scope=sequence runtime.precision=fp32",
    ),
    "rlhf": "rlhf --model policy --demonstrations demonstrations.jsonl --comparisons comparisons.jsonl "
    "--prompts prompts.jsonl rlhf.num_rounds=2 rlhf.num_prompts=6 rlhf.labeler=reward.py:short rollout.num_prompts=4 "
    "rollout.max_new_tokens=8 ppo.num_updates=2 sft.batch_size=4 reward_model.batch_size=2 runtime.precision=fp32",
}
DEMO = "demo --seed 0"

WORDS = ("boat", "rope", "sail", "tide", "crew", "anchor", "sea", "wind")


def make_inputs(folder: Path) -> None:
    """Create models, data and a reward function, identical each time."""
    save_tiny_policy(folder / "policy")
    save_tiny_reward_model(folder / "reward_model", seed=1)
    texts = [f"The {one} and the {two}" for one in WORDS for two in WORDS if one != two]
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": text} for text in texts[:20]],
        "demonstrations": [{"prompt": text, "completion": f" {text.split()[-1]}."} for text in texts[:24]],
        "comparisons": [{"prompt": t, "chosen": f" {t[4:8]}", "rejected": f" no {t}"} for t in texts[:12]],
    }
    for name, entries in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in entries))
    (folder / "reward.py").write_text("def short(completions):\n    return [-len(text) / 10 for text in completions]\n")


def record(out: Path, *, demo: bool) -> None:
    """Run everything with the kedge that this interpreter imports, and write the results."""
    runs = {**RUNS, **({"demo": DEMO} if demo else {})}
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as work:
        make_inputs(Path(work))
        for name, command in runs.items():
            arguments = [sys.executable, "-m", "kedge", *command.split(), "--out", f"runs/{name}"]
            subprocess.run(arguments, cwd=work, env=os.environ | {"COLUMNS": "120"}, check=True)
            found[name] = dict(_findings(Path(work) / "runs" / name))
    out.write_text(json.dumps(found, indent=1))


def _findings(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every row of a log and every weight file below a folder."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in LOGS:
            for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n")):
                yield f"{name}:{number}", _without_times(json.loads(line or "{}"))
        elif path.suffix == ".safetensors" and "checkpoints" not in path.parts:
            yield name, _weights_hash(path)


def _without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if not name.startswith(MEASURED)}
    return {RENAMED.get(name, name): value for name, value in kept.items()}


def _weights_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def compare(before: Path, after: Path) -> int:
    """Print the differences of each run; return their number."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    total = 0
    for run in sorted({*old, *new}):
        ours, theirs = _flat(old.get(run, {})), _flat(new.get(run, {}))
        differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        print(f"{run:14} {len(ours):6} figures and weight files, {len(differing)} differ")
        for name in differing[:5]:
            print(f"    {name}: {ours.get(name)} -> {theirs.get(name)}"[:200])
        total += len(differing)
    return total


def _flat(findings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{_current(place)} {name}": value
        for place, entry in findings.items()
        for name, value in (entry.items() if isinstance(entry, dict) else [("", entry)])
    }


def _current(place: str) -> str:
    for old, new in RENAMED_FOLDERS.items():
        place = place.replace(old, new)
    return place


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--demo", action="store_true")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.out, demo=arguments.demo)
        return 0
    return min(compare(arguments.before, arguments.after), 1)


if __name__ == "__main__":
    raise SystemExit(main())
