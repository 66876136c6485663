"""Checks that two checkouts train with bit-identical results, for refactorings.

    python -m tests.identity record after.json                                       # this checkout
    PYTHONPATH=../before/src python -m tests.identity record --old-names before.json # another checkout's source
    python -m tests.identity compare before.json after.json

or that a GPU trains as a CPU does, up to rounding:

    python -m tests.identity record cpu.json --with runtime.device=cpu runtime.precision=fp32
    python -m tests.identity record gpu.json --with runtime.device=cuda runtime.precision=fp32
    python -m tests.identity compare cpu.json gpu.json --within 1e-3

Each recording runs one or more commands on tiny random models, in about five seconds; names of recordings after the
files choose among them. It has every row of the logs, except times and memory, the results, and a hash of every
weight file. All of it runs on one thread. `demo` is recorded only if it is named (two minutes).

Names that a change gives to settings and metrics on purpose go into the tables below.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open

from tests.tiny import save_tiny_policy, save_tiny_reward_model

RENAMED: Mapping[str, str | None] = {"policy/optimiser_steps": "policy/optimizer_steps"}
"""Earlier metrics and entries of results with their current names; None if they were dropped."""

RENAMED_SETTINGS: Mapping[str, str] = {
    'ppo.value_loss={"hl_gauss":[-2,1,101]}': "ppo.value_loss=hl_gauss ppo.value_min=-2 ppo.value_max=1",
    'ppo.advantage={"n_step":3}': "ppo.advantage=n_step ppo.advantage_steps=3",
    "ppo.critic_check_size": "ppo.critic_check.size",
    "ppo.kl_in=score": "ppo.kl_scope=sequence",
}
"""Earlier settings, `name` or `name=value`, with what replaces them in the commands below."""

RENAMED_FILES = {"ppo-without-leash/": "ppo-without-kl/"}
"""Parts of the earlier paths of results, with their current names."""

MEASURED = ("time", "memory/", "tokens_per_second", "sampling_seconds")
"""Prefixes of metrics that differ between identical runs."""

RESULTS = ("*.jsonl", "summary.json", "*.safetensors")
NO_RESULTS = ("progress.jsonl", "receipt.jsonl")


def _ppo(*settings: str, reward: str = "reward.py:short") -> str:
    return " ".join(
        [
            f"ppo --model policy --prompts prompts.jsonl --reward {reward}",
            "rollout.num_prompts=8 rollout.max_new_tokens=10 rollout.micro_batch_size=4",
            "ppo.learning_rate=3e-3 ppo.num_epochs=2 ppo.num_updates=4",
            *settings,
        ]
    )


FP32 = "runtime.precision=fp32"
SHARED, SEPARATE = "ppo.critic=shared", "ppo.critic=separate ppo.value_warmup_updates=1"
SAMPLING = "rollout.max_new_tokens=8 rollout.missing_eos_score=null"
EVALUATE = "evaluate --model policy --prompts prompts.jsonl"

RUNS: Mapping[str, tuple[str, ...]] = {
    "sft": ("sft --model policy --data demonstrations.jsonl sft.batch_size=4 sft.learning_rate=1e-3",),
    "reward": ("reward --model policy --data comparisons.jsonl reward_model.batch_size=2",),
    "critic": (
        f"critic --model policy --prompts prompts.jsonl --reward reward.py:short {SAMPLING} rollout.num_prompts=5 "
        "critic.num_responses=2 critic.num_epochs=2 critic.batch_size=6 critic.learning_rate=1e-3",
    ),
    "shared": (_ppo(SHARED, FP32),),
    "separate": (_ppo(SEPARATE, FP32, reward="reward_model"),),
    "shared-bf16": (_ppo(SHARED, "runtime.precision=bf16"),),
    "separate-bf16": (_ppo(SEPARATE, "runtime.precision=bf16", reward="reward_model"),),
    "minibatches": (
        _ppo(
            f"{SHARED} ppo.num_minibatches=4 rollout.num_responses=2 runtime.micro_batch_tokens=48",
            "ppo.score_at=after_last ppo.entropy_coef=0.01 ppo.kl_in=loss ppo.kl_controller=ziegler",
            f"ppo.whiten_rewards=true {FP32}",
        ),
    ),
    "n-step": (
        _ppo(
            SEPARATE,
            'ppo.advantage={"n_step":3} ppo.policy_loss=kl_penalty_adaptive',
            f"ppo.aggregation=sequence ppo.num_minibatches=2 ppo.kl_in=score {FP32}",
            reward="reward_model",
        ),
    ),
    "histogram": (_ppo(SHARED, 'ppo.value_loss={"hl_gauss":[-2,1,101]} ppo.num_minibatches=2', FP32),),
    "critic-epochs": (
        _ppo(
            f"{SEPARATE} ppo.num_critic_epochs=3 ppo.num_updates=2 ppo.eval_every=2 data.eval_fraction=0.2",
            "ppo.critic_check=2 ppo.critic_check.size=[32,1,2]",
            f"checkpoint.keep_best=eval/score {FP32}",
            reward="reward_model",
        ),
    ),
    "lora": (_ppo(f"{SEPARATE} adapter.kind=lora adapter.rank=4 ppo.critic_init=policy", FP32),),
    "grpo": (_ppo("--preset grpo rollout.num_prompts=4 rollout.num_responses=4", FP32),),
    "vapo": (
        _ppo(
            "--preset vapo rollout.num_prompts=4 rollout.num_responses=2 ppo.num_minibatches=2 "
            "ppo.value_warmup_updates=1",
            FP32,
        ),
    ),
    "sao": (_ppo("--preset sao ppo.value_warmup_updates=1", FP32),),
    "rollback": (
        _ppo(
            f"{SHARED} ppo.on_nonfinite=rollback reward_functions.retries=0 checkpoint.every=1",
            FP32,
            reward="reward.py:broken_fourth",
        ),
    ),
    # The first command stops in update 3, and the next process starts from the checkpoint of update 2.
    "resume": (
        _ppo(f"{SEPARATE} reward_functions.retries=0 checkpoint.every=2", FP32, reward="reward.py:failing_fourth"),
        "ppo --resume runs/resume",
    ),
    "ranks": (_ppo(SHARED, "ppo.num_minibatches=2", FP32),),
    "shards": (_ppo(SEPARATE, "runtime.parallel=shard checkpoint.sharded_above=0 checkpoint.every=2", FP32),),
    "rlhf": (
        "rlhf --model policy --demonstrations demonstrations.jsonl --comparisons comparisons.jsonl "
        "--prompts prompts.jsonl rlhf.num_rounds=2 rlhf.num_prompts=6 rlhf.labeler=reward.py:short "
        "rollout.num_prompts=4 rollout.max_new_tokens=8 ppo.num_updates=2 sft.batch_size=4 reward_model.batch_size=2 "
        f"{FP32}",
    ),
    "generate": (
        "generate --model policy --prompts prompts.jsonl --reward reward_model generate.max_new_tokens=8 "
        "generate.num_responses=2 generate.batch_size=5 rollout.temperature=0.7",
    ),
    "evaluate": (f"{EVALUATE} --against other --judge reward_model generate.max_new_tokens=8",),
    "check-critic": (
        f"{EVALUATE} --critic reward_model --reward reward.py:short ppo.critic=separate {SAMPLING} "
        "ppo.critic_check.size=[64,2,3]",
    ),
    "control": (
        "control --env CartPole-v1 control.num_steps=64 control.num_envs=2 control.num_minibatches=4 "
        "control.total_steps=512",
    ),
    "demo": ("demo --seed 0",),
}
ON_TWO_RANKS = ("ranks", "shards")

WORDS = ("boat", "rope", "sail", "tide", "crew", "anchor", "sea", "wind")

REWARDS = """
calls = []

def short(completions):
    return [-len(text) / 10 for text in completions]

def broken_fourth(completions):
    calls.append(None)
    return [float("nan") if len(calls) == 4 else score for score in short(completions)]

def failing_fourth(completions):
    calls.append(None)
    assert len(calls) != 4
    return short(completions)
"""


def make_inputs(folder: Path) -> None:
    """Create models, data and reward functions, identical each time."""
    save_tiny_policy(folder / "policy")
    save_tiny_policy(folder / "other", seed=1)
    save_tiny_reward_model(folder / "reward_model", seed=1)
    texts = [f"The {one} and the {two}" for one in WORDS for two in WORDS if one != two]
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": text} for text in texts[:20]],
        "demonstrations": [{"prompt": text, "completion": f" {text.split()[-1]}."} for text in texts[:24]],
        "comparisons": [{"prompt": t, "chosen": f" {t[4:8]}", "rejected": f" no {t}"} for t in texts[:12]],
    }
    for name, entries in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in entries))
    (folder / "reward.py").write_text(REWARDS)


def record(out: Path, names: list[str], settings: list[str], *, old_names: bool) -> None:
    """Run the recordings, with these settings more, with the kedge that this interpreter imports; write the results."""
    names = names or [name for name in RUNS if name != "demo"]
    if "control" in names and find_spec("gymnasium") is None:
        names.remove("control")
        print("control        skipped: gymnasium is not installed")
    spec = find_spec("kedge")
    assert spec is not None
    assert spec.origin is not None
    # Also for the processes that it starts, in another folder.
    paths = [str(Path(spec.origin).parents[1].resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # Threads change how sums are rounded.
    torch.set_num_threads(1)
    os.environ.update(COLUMNS="120", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as work:
        make_inputs(Path(work))
        for name in names:
            start = _processor_seconds()
            commands = [" ".join([command, *(settings if "--resume" not in command else [])]) for command in RUNS[name]]
            *to_stop, last = map(_with_old_names, commands) if old_names else commands
            for command in to_stop:
                assert _run(name, command, Path(work)) != 0
            assert _run(name, last, Path(work)) == 0, (Path(work) / f"{name}.log").read_text()
            found[name] = dict(_findings(Path(work) / "runs" / name))
            print(f"{name:14} {_processor_seconds() - start:6.1f} s of a processor", flush=True)
    out.write_text(json.dumps(found, indent=1))


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _with_old_names(command: str) -> str:
    for old, new in RENAMED_SETTINGS.items():
        command = re.sub(rf"(?<!\S){re.escape(new)}(?=[=\s]|$)", old, command)
    return command


def _run(name: str, command: str, work: Path) -> int:
    """Exit code of a command; its output is in a file."""
    arguments = command.split() if "--resume" in command else [*command.split(), "--out", f"runs/{name}"]
    if name in ON_TWO_RANKS:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        with (work / f"{name}.log").open("w") as log:
            return subprocess.run([*torchrun, "kedge", *arguments], cwd=work, stdout=log, stderr=log).returncode
    if "runtime.device=cuda" in arguments:  # which a forked process cannot use
        with (work / f"{name}.log").open("a") as log:
            return subprocess.run(
                [sys.executable, "-m", "kedge", *arguments], cwd=work, stdout=log, stderr=log
            ).returncode
    # A fork: torch and transformers are imported already, which takes most of the time of a start.
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log = os.open(work / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(work)
    sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *sys.path]
    sys.argv = ["kedge", *arguments]
    code = 1
    try:
        runpy.run_module("kedge", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _findings(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every row of a log, result and weight file below a folder."""
    for path in sorted({path for pattern in RESULTS for path in folder.rglob(pattern)}):
        name = str(path.relative_to(folder))
        if path.name in NO_RESULTS or "checkpoints" in path.parts:
            continue
        if path.suffix == ".safetensors":
            yield name, _weights_hash(path)
        elif path.suffix == ".json":
            yield name, json.loads(path.read_text(encoding="utf-8"))
        else:
            for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n")):
                yield f"{name}:{number}", json.loads(line or "{}")


def _weights_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def compare(before: Path, after: Path, names: list[str], within: float) -> int:
    """Print the differences of each recording; return their number.

    Args:
        before: A recording.
        after: Another one.
        names: Those to compare; none for all.
        within: The relative difference of numbers that counts as none; above 0, weight files are not compared.
    """
    old, new = (json.loads(path.read_text()) for path in (before, after))
    total = 0
    for run in names or sorted({*old, *new}):
        ours, theirs = _flat(old.get(run, {})), _flat(new.get(run, {}))
        differing = sorted(name for name in {*ours, *theirs} if not _equal(ours.get(name), theirs.get(name), within))
        print(f"{run:14} {len(ours):6} figures and weight files, {len(differing)} differ")
        for name in differing[:5]:
            print(f"    {name}: {ours.get(name)} -> {theirs.get(name)}"[:200])
        total += len(differing) + (not ours)
    return total


def _equal(one: Any, other: Any, within: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(*pair, within) for pair in zip(one, other, strict=True))
    if within and isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=within, abs_tol=within)
    is_hash = within and all(isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in (one, other))
    return bool(is_hash) or one == other


def _flat(findings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for place, entry in findings.items():
        for old, new in RENAMED_FILES.items():
            place = place.replace(old, new)
        for name, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
            current = RENAMED.get(name, name)
            if current is not None and not name.startswith(MEASURED):
                flat[f"{place} {current}"] = value
    return flat


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--old-names", action="store_true", help="give settings the names of the older source")
    recording.add_argument("--with", nargs="+", default=[], metavar="FIELD=VALUE", dest="settings")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--within", type=float, default=0.0, help="relative difference that is none")
    for command in (recording, comparing):
        command.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    arguments = parser.parse_args()
    if unknown := {*arguments.runs} - {*RUNS}:
        parser.error(f"no such recording: {', '.join(sorted(unknown))}")
    if arguments.command == "record":
        record(arguments.out, arguments.runs, arguments.settings, old_names=arguments.old_names)
        return 0
    return min(compare(arguments.before, arguments.after, arguments.runs, arguments.within), 1)


if __name__ == "__main__":
    raise SystemExit(main())
