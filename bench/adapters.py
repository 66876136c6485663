"""Adapters, measured: `python -m bench.adapters memory FOLDER PEER [ROUNDS]`, `learning FOLDER FILES`, `passes FOLDER`.

memory: peak memory and seconds per update of policy, critic, reference and reward model on one base, of four whole
models, and of TRL with an adapter on the policy, in turns. PEER is the Python of an environment with TRL 1.12.0, PEFT.

learning: the held-out score after equal updates with all weights and with adapters, on two tasks of the study. FILES
are the stories': a model's folder, JSON lines of stories and of held-out stories, and a lexicon.

passes: whether one pass over the rows of two adapters is faster than a pass for each. FOLDER stays empty.

Figures: bench/RESULTS.md.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors import safe_open

import kedge
from bench.recipe import Workload
from bench.study.stories_task import StoryFiles, stories_task
from bench.study.summaries_task import SUMMARIES
from bench.study.task import QUIET, Problem, start_folder
from bench.systems import Job, Machine, Measurement, Runner
from kedge_base.run_folder.record_format import EVALUATIONS_FILE, read_json_lines

RANK = 16
ROUNDS = 3
SEEDS = (0, 1, 2)
ADAPTED = ("adapter.kind=lora", f"adapter.rank={RANK}")
LORA_RATE = 10
"""Learning rates of adapters, as a multiple of those for all weights (Schulman et al., "LoRA Without Regret")."""


def memory(folder: Path, peer: Path, rounds: int = ROUNDS) -> None:
    """Print a row per system."""
    runner = Runner(folder, peer, Machine("cpu", 2))
    workload = Workload(size="L", hazard=0.0, max_response=32, num_prompts=32)
    facts = runner.facts(workload)
    at = runner.workload(workload)
    if not (at / "adapter").is_dir():
        save_reward_adapter(at / "policy", at / "adapter")
    few: dict[str, Any] = {"workload": workload, "batch": 8, "num_epochs": 1, "num_updates": 3, "num_dropped": 1}
    separate = ("ppo.critic=separate", "runtime.precision=fp32")
    jobs = {
        "four roles on one base": Job("ppo", settings=(*separate, *ADAPTED), reward="adapter", **few),
        "the same, activations recomputed": Job(
            "ppo", settings=(*separate, *ADAPTED, "runtime.activation_checkpointing=true"), reward="adapter", **few
        ),
        "four whole models": Job("ppo", settings=separate, **few),
        "TRL, adapter on the policy": Job("trl", rank=RANK, **few),
        "TRL, four whole models": Job("trl", **few),
    }
    print(f"{facts['parameters']:,} parameters, rank {RANK}, 8 responses of 32 tokens\n")
    found: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for seed in range(rounds):
        for name, job in jobs.items():
            found[name].append(runner.measure(job, seed=seed))
            print(f"<!-- {name}: {found[name][-1]} -->", flush=True)
    print("| | peak memory, GiB | s per update |\n|---|---|---|")
    for name, rows in found.items():
        print(f"| {name} | {median(r.peak_memory for r in rows):.2f} | {median(r.seconds for r in rows):.1f} |")


def save_reward_adapter(base: Path, folder: Path) -> None:
    """A reward model that is an adapter with random weights."""
    import peft
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=RANK, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(str(folder))


def learning(folder: Path, files: Sequence[Path]) -> None:
    """Print a row per task and kind of training."""
    tasks = {"summaries": SUMMARIES, **({"stories": stories_task(StoryFiles(*files))} if files else {})}
    print("| task | trained | share of the weights | held-out score before | after, by seed | share of the gain |")
    print("|---|---|---|---|---|---|")
    for name, task in tasks.items():
        problem = task.problem(start_folder(name, task, folder))
        gains: dict[str, list[float]] = {}
        for kind in ("all weights", "adapters"):
            runs = [train(name, problem, folder / f"{name}-{kind.split()[0]}-{seed}", kind, seed) for seed in SEEDS]
            gains[kind] = [after - before for before, after, _ in runs]
            kept = fmean(gains[kind]) / fmean(gains["all weights"])
            after = ", ".join(f"{each[1]:.3f}" for each in runs)
            print(f"| {name} | {kind} | {runs[0][2]:.1%} | {runs[0][0]:.3f} | {after} | {kept:.0%} |", flush=True)


SETTINGS: dict[str, dict[str, Any]] = {
    "summaries": {
        "rollout.num_prompts": 128,
        "rollout.max_new_tokens": 40,
        "rollout.temperature": 0.7,
        "data.max_prompt_tokens": 136,
        "ppo.learning_rate": 3e-4,
        "ppo.critic_learning_rate": 2e-3,
        "ppo.kl_coef": 0.1,
        "ppo.num_updates": 16,
    },
    "stories": {
        "rollout.num_prompts": 128,
        "rollout.max_new_tokens": 48,
        "rollout.missing_eos_score": None,
        "data.max_prompt_tokens": 48,
        "ppo.learning_rate": 2e-4,
        "ppo.critic_learning_rate": 1e-3,
        "ppo.kl_coef": 0.005,
        "ppo.num_updates": 24,
    },
}
"""As in the study and the demo."""


def train(name: str, problem: Problem, out: Path, kind: str, seed: int) -> tuple[float, float, float]:
    """The held-out scores before and after a run, and the share of weights that it trained."""
    settings: dict[str, Any] = {
        **QUIET,
        **SETTINGS[name],
        "ppo.critic": "separate",
        "ppo.value_warmup_updates": 2,
        "ppo.num_epochs": 2,
        "ppo.num_minibatches": 4,
        "ppo.eval_every.num_prompts": len(problem.held_out),
        "runtime.precision": "fp32",
        "runtime.seed": seed,
    }
    settings["ppo.eval_every"] = settings["ppo.num_updates"]
    if kind == "adapters":
        settings |= {"adapter.kind": "lora", "adapter.rank": RANK}
        for rate in ("ppo.learning_rate", "ppo.critic_learning_rate"):
            settings[rate] *= LORA_RATE
    result = kedge.ppo(
        model=problem.model,
        prompts=problem.prompts,
        eval_prompts=problem.held_out,
        reward=problem.reward,
        out=out,
        **settings,
    )
    scores = [float(each[problem.score]) for each in read_json_lines(out / EVALUATIONS_FILE)]
    share = 1.0 if kind == "all weights" else count(result.model) / count(problem.model)
    shutil.rmtree(out)
    return scores[0], scores[-1], share


def passes(width: int = 768, inner: int = 2048, num_layers: int = 6) -> None:
    """Print seconds of forward and backward passes of linear layers with two adapters, on one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shapes = [(inner, width), (width, inner)] * num_layers
    base = [torch.randn(shape) * 0.02 for shape in shapes]
    pairs = [
        [
            ((torch.randn(RANK, ins) * 0.02).requires_grad_(), torch.zeros(outs, RANK).requires_grad_())
            for outs, ins in shapes
        ]
        for _ in range(2)
    ]

    def run(states: torch.Tensor, adapters: Sequence[Any]) -> None:
        """Each adapter has an equal share of the rows."""
        size = len(states) // len(adapters)
        for place, weight in enumerate(base):
            parts = states.split(size)
            added = [(part @ own[place][0].T) @ own[place][1].T for part, own in zip(parts, adapters, strict=True)]
            states = (states @ weight.T + torch.cat(added)).tanh()
        states.square().sum().backward()

    print("| tokens per adapter | two passes, s | one pass, s | ratio |\n|---|---|---|---|")
    for tokens in (16, 128, 1024, 4096):
        rows = torch.randn(tokens, width)
        apart = []
        together = []
        for _ in range(5):
            start = time.process_time()
            for own in pairs:
                run(rows, [own])
            middle = time.process_time()
            run(torch.cat([rows, rows]), pairs)
            apart.append(middle - start)
            together.append(time.process_time() - middle)
        print(f"| {tokens:,} | {min(apart):.3f} | {min(together):.3f} | {min(apart) / min(together):.2f} |", flush=True)


def count(folder: Path) -> int:
    """The numbers in a folder's weights."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    return total


if __name__ == "__main__":
    part, work, *rest = sys.argv[1:]
    work_folder = Path(work)
    work_folder.mkdir(parents=True, exist_ok=True)
    if part == "memory":
        memory(work_folder, Path(rest[0]), *map(int, rest[1:]))
    elif part == "passes":
        passes()
    else:
        learning(work_folder, [Path(each) for each in rest])
