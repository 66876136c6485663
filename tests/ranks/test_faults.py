"""A fault on one rank ends all of them, with the last whole update saved; the resumed run equals an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import kedge
from kedge.ranks.ranks import PATIENCE, Ranks, _group
from kedge_inspect.verify import verify_run
from tests.forking import forked_kedge
from tests.ranks.cases import PAIRS, PROMPTS, save_models
from tests.ranks.processes import started, torchrun
from tests.ranks.test_equality import assert_equal_runs

SETTINGS = {
    "num_updates": 4,
    "num_prompts": 4,
    "max_new_tokens": 8,
    "micro_batch_tokens": 40,
    "precision": "fp32",
    "missing_eos_score": None,
}


def command(folder: Path, *more: str) -> list[str]:
    """A run of PPO."""
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")
    given = ["--model", f"{folder}/models/policy", "--reward", f"{folder}/models/reward", "--prompts"]
    settings = [f"{name}={'null' if value is None else value}" for name, value in SETTINGS.items()]
    out = () if "--out" in more else ("--out", f"{folder}/run")
    return ["ppo", *given, f"{folder}/prompts.jsonl", *out, "device=cpu", *settings, *more]


def assert_resumes(folder: Path, count: int, *more: str) -> None:
    """Resume the run on some ranks, and compare it with one that was never interrupted."""
    resumed = [*command(folder, *more), "--resume", str(folder / "run")]
    if count == 1:
        code, *output = forked_kedge(*resumed)
    else:
        code, output = torchrun(count, "kedge", *resumed)
    assert code == 0, output
    assert verify_run(folder / "run")[0] == []
    whole = {"model": folder / "models" / "policy", "reward": folder / "models" / "reward", "device": "cpu"}
    ahead = {"max_staleness": 1} if "max_staleness=1" in more else {}
    kedge.ppo(prompts=folder / "prompts.jsonl", out=folder / "whole", **whole, **SETTINGS, **ahead)
    assert_equal_runs(folder / "whole", folder / "run")


def fault(folder: Path, rank: int, kind: str, *more: str) -> str:
    """Let a rank fail in update 3; the output of all."""
    save_models(folder / "models")
    code, output = torchrun(2, "tests.ranks.faulty", str(rank), "3", kind, *command(folder, *more))
    assert code != 0, output
    return output


def saved_updates(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("update-*"))


def test_a_killed_rank_costs_no_whole_update(tmp_path: Path) -> None:
    output = fault(tmp_path, 1, "SIGKILL")
    assert output.count("error: contact with another rank was lost") == 1, output
    assert saved_updates(tmp_path) == ["update-000002"]
    assert_resumes(tmp_path, 1)


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_and_they_resume(tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    arguments = command(tmp_path, "--resume", "auto", "checkpoint.every=1")
    code, output = torchrun(2, "tests.ranks.faulty", "0", "3", "SIGKILL", *arguments, restarts=1)
    assert code == 0, output
    whole = {"model": tmp_path / "models" / "policy", "reward": tmp_path / "models" / "reward", "device": "cpu"}
    kedge.ppo(prompts=tmp_path / "prompts.jsonl", out=tmp_path / "whole", **whole, **SETTINGS)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "kind", "line", "saved"),
    [
        (0, "exception", "ZeroDivisionError: a bug on one rank", 2),
        (1, "exception", "ZeroDivisionError: a bug on one rank", 2),
        (0, "user error", "error: the reward on one rank failed", 2),
        (1, "user error", "error: the reward on one rank failed", 2),
        (0, "out of memory", "error: out of memory during experience: 1024 TiB more", 2),
        (1, "out of memory", "error: out of memory during experience: 1024 TiB more", 2),
        (0, "SIGTERM", "interrupted after 2 of 4", 2),
        (1, "SIGTERM", "interrupted after 2 of 4", 2),
    ],
)
def test_every_fault_leaves_a_checkpoint(rank: int, kind: str, line: str, saved: int, tmp_path: Path) -> None:
    output = fault(tmp_path, rank, kind)
    assert output.count(line) == 1, output
    assert saved_updates(tmp_path) == [f"update-{saved:06d}"]
    assert_resumes(tmp_path, 3)


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_makes_the_passes_of_all_smaller(tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    arguments = command(tmp_path, "micro_batch_tokens=auto")
    code, output = torchrun(2, "tests.ranks.faulty", "1", "pass", "out of memory", *arguments)
    assert code == 0, output
    assert "it is repeated, and the run continues with passes of up to " in output
    whole = {"model": tmp_path / "models" / "policy", "reward": tmp_path / "models" / "reward", "device": "cpu"}
    settings = {**SETTINGS, "micro_batch_tokens": "auto"}
    kedge.ppo(prompts=tmp_path / "prompts.jsonl", out=tmp_path / "whole", **whole, **settings)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def sampling_command(stage: str, folder: Path, *more: str) -> list[str]:
    """`kedge generate`, or `kedge evaluate` with a reward model as judge."""
    given = ["--reward"] if stage == "generate" else ["--against", f"{folder}/models/other", "--judge"]
    texts = [word for prompt in PROMPTS for word in ("--prompts", prompt)]
    return [
        *[stage, "--model", f"{folder}/models/policy", *texts, *given, f"{folder}/models/reward"],
        *["--out", f"{folder}/run", "device=cpu", "precision=fp32", "generate.max_new_tokens=8", *more],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["generate", "evaluate"])
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("exception", "ZeroDivisionError: a bug on one rank"),
        ("user error", "error: the reward on one rank failed"),
        ("SIGKILL", "error: contact with another rank was lost"),
        ("SIGTERM", "interrupted after"),
    ],
)
def test_a_fault_while_sampling_ends_all_ranks(stage: str, kind: str, line: str, tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    command = sampling_command(stage, tmp_path, "generate.batch_size=2")
    code, output = torchrun(2, "tests.ranks.faulty", "1", "sampled", kind, *command)
    assert code != 0, output
    assert output.count(line) == 1, output
    assert not (tmp_path / "run" / "summary.json").exists()


CHAIN = {
    "ppo.num_updates": 2,
    "ppo.num_minibatches": 2,
    "rlhf.num_rounds": 2,
    "rlhf.num_prompts": 4,
    "rlhf.num_responses": 3,
    "rollout.num_prompts": 4,
    "rollout.max_new_tokens": 8,
    "rollout.missing_eos_score": None,
    "data.eval_fraction": 0,
    "runtime.precision": "fp32",
}


def chain_command(folder: Path, *more: str) -> list[str]:
    """Two rounds of `kedge rlhf`, with a reward model as labeler."""
    for name, rows in {"prompts": [{"prompt": text} for text in PROMPTS], "pairs": PAIRS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {**CHAIN, "rlhf.labeler": f"{folder}/models/reward"}
    data = ["--demonstrations", f"{folder}/models/texts.jsonl", "--comparisons", f"{folder}/pairs.jsonl"]
    return [
        *["rlhf", "--model", f"{folder}/models/policy", *data, "--prompts", f"{folder}/prompts.jsonl"],
        *[f"{name}={'null' if value is None else value}" for name, value in settings.items()],
        *["--out", f"{folder}/run", "device=cpu", *more],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kind", "line"),
    [
        ("2", "exception", "ZeroDivisionError: a bug on one rank"),
        ("2", "SIGTERM", "ppo: interrupted after 1 of 2"),  # before the first step of update 2
        ("sampled", "exception", "ZeroDivisionError: a bug on one rank"),
        ("sampled", "SIGKILL", "error: contact with another rank was lost"),
    ],
)
def test_a_chain_is_resumed_on_another_number_of_ranks(place: str, kind: str, line: str, tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    code, output = torchrun(2, "tests.ranks.faulty", "1", place, kind, *chain_command(tmp_path))
    assert code != 0, output
    assert output.count(line) == 1, output
    assert (tmp_path / "run" / "model" / "config.json").exists(), "the newest policy"
    assert not (tmp_path / "run" / "ppo-2").exists()
    code, output = torchrun(3, "kedge", *chain_command(tmp_path), "--resume", str(tmp_path / "run"))
    assert code == 0, output
    whole = {"demonstrations": tmp_path / "models" / "texts.jsonl", "comparisons": tmp_path / "pairs.jsonl"}
    common = {"model": tmp_path / "models" / "policy", "prompts": tmp_path / "prompts.jsonl", "device": "cpu"}
    kedge.rlhf(out=tmp_path / "whole", labeler=tmp_path / "models" / "reward", **whole, **common, **CHAIN)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_without_the_first_rank_the_last_scheduled_checkpoint_is_left(tmp_path: Path) -> None:
    fault(tmp_path, 0, "SIGKILL", "checkpoint.every=1")
    assert saved_updates(tmp_path)[-1] == "update-000002"
    assert_resumes(tmp_path, 2, "checkpoint.every=1")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_hanging_rank(rank: int, signum: signal.Signals, tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    with started(2, "tests.ranks.faulty", str(rank), "3", "hang", *command(tmp_path)) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "now hanging" in text:
                os.kill(process.pid, signum)
                break
        process.communicate()
    assert process.returncode != 0
    assert saved_updates(tmp_path) == ["update-000002"]
    assert_resumes(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "saved"), [("SIGTERM", 2), ("SIGKILL", 2), ("exception", 2)])
def test_a_run_with_sharded_weights_is_resumed_with_whole_ones_and_back(kind: str, saved: int, tmp_path: Path) -> None:
    fault(tmp_path, 1, kind, "checkpoint.every=1", "parallel=shard")
    assert saved_updates(tmp_path)[-1] == f"update-{saved:06d}"
    assert_resumes(tmp_path, 1, "checkpoint.every=1")
    fault(tmp_path, 1, kind, "checkpoint.every=1", "--out", str(tmp_path / "second"))
    code, output = torchrun(
        3, "kedge", *command(tmp_path, "checkpoint.every=1", "parallel=shard"), "--resume", str(tmp_path / "second")
    )
    assert code == 0, output
    assert_equal_runs(tmp_path / "whole", tmp_path / "second")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "saved"), [("SIGTERM", 2), ("exception", 2), ("user error", 2), ("SIGKILL", 2)])
def test_batches_that_were_sampled_ahead_are_saved(rank: int, kind: str, saved: int, tmp_path: Path) -> None:
    more = ("max_staleness=1", "checkpoint.every=1")
    fault(tmp_path, rank, kind, *more)
    assert saved_updates(tmp_path)[-1] == f"update-{saved:06d}"
    assert_resumes(tmp_path, 3, *more)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "saved"), [("SIGTERM", 2), ("exception", 2)])
def test_sharded_fine_tuning_is_resumed_with_whole_weights(kind: str, saved: int, tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    data = ["--model", f"{tmp_path}/models/policy", "--data", f"{tmp_path}/models/texts.jsonl", "--out"]
    command = ["sft", *data, f"{tmp_path}/run", "device=cpu", "precision=fp32", "batch_size=2", "checkpoint.every=1"]
    code, output = torchrun(2, "tests.ranks.faulty", "1", "step-3", kind, *command, "parallel=shard")
    assert code != 0, output
    assert saved_updates(tmp_path)[-1] == f"update-{saved:06d}"
    code, output = torchrun(3, "kedge", *command, "--resume", str(tmp_path / "run"))
    assert code == 0, output
    whole = {"model": tmp_path / "models" / "policy", "demonstrations": tmp_path / "models" / "texts.jsonl"}
    kedge.sft(out=tmp_path / "whole", device="cpu", precision="fp32", batch_size=2, **whole)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def test_background_work_waits_as_long_for_a_slow_rank_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a new group half an hour, less than a long rollout on the first rank takes."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the machine's host name may not resolve
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Ranks(count=2).apart()():
            group = cast(Any, _group.get())
            assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
    finally:
        dist.destroy_process_group()
