"""Small over large: a small policy after PPO against larger ones that only imitate, in the demo's world.

`python -m bench.sizes` trains what is not there yet in bench/.work/sizes, a process and a thread for each seed, and
writes bench/results/sizes.json and the table of docs/results.md. The plan, written before the first run:

- The world is the demo's: posts without end, reference summaries of four authors, a noisy annotator, and a judge that
  knows the facts. Policies differ in size alone. All start from random weights and imitate the same 28,000 summaries,
  none of them twice; the learning rate falls with the width. At its limit such a policy writes like the references, so
  the large ones are compared with these as well.
- The reward model is the demo's, trained on samples of the policy of the demo's size. PPO is the demo's, with its
  penalty. Its learning rate falls with the width as well.
- What counts is how often a summary of a policy is better by the judge than one of the largest policy that imitates,
  on 512 posts that no run was trained on.
- Expected, as for Stiennon et al. 2020 and InstructGPT, whose 1.3B policy was preferred to GPT-3 of 175B: the policy
  of the demo's size wins against the one of thirty times its size, and what PPO gains grows with the size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.processes import BenchError, environment, fresh
from bench.tables import renewed
from kedge.models.untrained import save_untrained_llama
from kedge.rewards import RewardTerm
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.intervals import Interval, mean_interval
from kedge_base.run_folder.output import replace_file
from kedge_base.run_folder.record_format import read_json_lines
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import GoldScores, gold_judge, sample_summaries
from kedge_lab.demo.main import collect_comparisons, demo_config, rows, start_from_scratch
from kedge_lab.demo.world import Post, World

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "bench" / ".work" / "sizes"
RECORD: Final = ROOT / "bench" / "results" / "sizes.json"
PAGE: Final = ROOT / "docs" / "results.md"
SEEDS: Final = (0, 1, 2)
SIZES: Final = {"0.1": (16, 2), "0.3": (32, 2), "1": (64, 2), "3": (128, 2), "10": (256, 3), "30": (320, 4)}
"""Width and layers, by the size in demo policies; the last is not trained by PPO."""
OWN: Final = "1"
LARGEST: Final = "30"
DEMONSTRATIONS: Final = 28_000
POSTS: Final = 512
WIDE: Final = 256
"""From this width on, products are in bf16."""
QUIET: Final = {"runtime.report": False, "checkpoint.every.minutes": None}


def main() -> int:
    """Train what is missing and write the record. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.sizes", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS])
    parser.add_argument("--processes", type=int, default=2, help="seeds at a time")
    parser.add_argument("--page", action="store_true", help="write from the record, and train nothing")
    options = parser.parse_args()
    try:
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            seeds = [] if options.page else options.seeds
            for seed, found in zip(seeds, pool.map(measured, seeds), strict=True):
                record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
                replace_file(RECORD, [json.dumps({**record, str(seed): found}, indent=1).encode()])
        block = table(json.loads(RECORD.read_text(encoding="utf-8")))
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "sizes", block), encoding="utf-8")
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def measured(seed: int) -> dict[str, Any]:
    """The policies of a seed, by stage and size: parameters, loss of the imitation, quality, and wins."""
    folder = WORK / str(seed)
    world = world_of(folder / "start" / OWN, seed)
    imitating = {size: imitate(folder, world, size) for size in SIZES}
    reward = reward_model(folder, world, imitating[OWN])
    improved = {size: improve(folder, world, size, imitating[size], reward) for size in SIZES if size != LARGEST}
    posts = replace(world, split="held-out").posts(POSTS)
    texts = {"references": [" " + replace(world, split="held-out").reference(post) for post in posts]}
    for stage, models in (("sft", imitating), ("ppo", improved)):
        texts |= {f"{stage}/{size}": summaries(model, world, posts) for size, model in models.items()}
    scores = {name: GoldScores.of(posts, each) for name, each in texts.items()}
    return {
        name: {
            "quality": bounds(each.quality),
            "over_largest": bounds(each.win_rate_over(scores[f"sft/{LARGEST}"])),
            "over_references": bounds(each.win_rate_over(scores["references"])),
            **facts(folder / name),
        }
        for name, each in scores.items()
    }


def world_of(folder: Path, seed: int) -> World:
    """The world, with the start of the demo's size; the other sizes take its tokenizer."""
    shutil.rmtree(folder, ignore_errors=True)
    return start_from_scratch(folder, seed)


def imitate(folder: Path, world: World, size: str) -> Path:
    """The policy of a size after SFT."""
    width, layers = SIZES[size]
    start = folder / "start" / size
    if size != OWN and not start.is_dir():
        sizes = {"hidden_size": width, "num_layers": layers, "num_heads": 4, "context_length": 256}
        tokenizer = AutoTokenizer.from_pretrained(folder / "start" / OWN)
        save_untrained_llama(start, tokenizer, **sizes, initializer_range=width**-0.5, seed=world.seed)
    changes = {"sft.learning_rate": recipe.SETTINGS["sft.learning_rate"] * scale(size), **precision(size)}
    out = folder / "sft" / size
    if fresh(out):
        demonstrations = rows(world.demonstrations(DEMONSTRATIONS))
        run_sft(demo_config("sft", start, out, seed=world.seed, **QUIET, **changes), demonstrations=demonstrations)
    return out / "model"


def reward_model(folder: Path, world: World, policy: Path) -> Path:
    """The demo's reward model."""
    out = folder / "reward"
    if fresh(out):
        run_reward(
            demo_config("reward", policy, out, seed=world.seed, **QUIET),
            comparisons=rows(collect_comparisons(replace(world, split="comparisons"), policy)),
            demonstrations=rows(world.demonstrations(recipe.NUM_NORMALIZATION)),
        )
    return out / "model"


def improve(folder: Path, world: World, size: str, policy: Path, reward: Path) -> Path:
    """The policy of a size after PPO."""
    out = folder / "ppo" / size
    if fresh(out):
        changes = {"ppo.learning_rate": recipe.SETTINGS["ppo.learning_rate"] * scale(size), **precision(size)}
        prompts = replace(world, split="prompts")
        run_ppo(
            demo_config("ppo", policy, out, seed=world.seed, **QUIET, **changes),
            prompts=[{"text": each.text, **each.columns} for each in prompts.prompts(recipe.NUM_PROMPTS)],
            reward=[RewardTerm(str(reward)), RewardTerm(gold_judge(prompts), weight=0.0, name="gold")],
        )
    return out / "model"


def scale(size: str) -> float:
    """The factor of the demo's learning rates: they fall with the width, and stay for narrow models."""
    return min(1.0, SIZES[OWN][0] / SIZES[size][0])


def precision(size: str) -> dict[str, str]:
    """The precision of a size."""
    return {"runtime.precision": "bf16"} if SIZES[size][0] >= WIDE else {}


def summaries(model: Path, world: World, posts: list[Post]) -> list[str]:
    """A policy's summaries of held-out posts."""
    return sample_summaries(model, replace(world, split="held-out"), posts)


def facts(run: Path) -> dict[str, float]:
    """Parameters and held-out loss of a run; nothing for the references."""
    if not run.is_dir():
        return {}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    losses = [row["eval/loss"] for row in read_json_lines(run / "metrics.jsonl") if "eval/loss" in row]
    return {"parameters": model.num_parameters(), **({"loss": losses[-1]} if losses else {})}


def bounds(interval: Interval) -> list[float]:
    """An interval over posts, for the record."""
    return [interval.value, interval.low, interval.high]


def table(record: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The sizes before and after PPO: of one seed with the 95 % interval over posts, of two both, else Student's."""
    seeds = list(record.values())

    def of(name: str, figure: str) -> str:
        found = [seed[name][figure] for seed in seeds if name in seed]
        if not found:
            return "–"
        values = [value for value, _, _ in found]
        if len(found) == 2:  # two values give no interval worth the name
            return ", ".join(f"{value:.2f}" for value in values)
        mean = Interval(*found[0]) if len(found) == 1 else mean_interval(values)
        return str(Interval(mean.value, max(0.0, mean.low), min(1.0, mean.high)))

    lines = [
        f"| size | parameters | SFT: quality | over SFT of {LARGEST} | PPO: quality | over SFT of {LARGEST} | "
        "over the references |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        parameters = fmean(seed[f"sft/{size}"]["parameters"] for seed in seeds)
        cells = [of(f"{stage}/{size}", each) for stage in ("sft", "ppo") for each in ("quality", "over_largest")]
        lines.append(f"| {size} | {parameters:,.0f} | {' | '.join(cells)} | {of(f'ppo/{size}', 'over_references')} |")
    lines.append(f"| references | – | {of('references', 'quality')} | {of('references', 'over_largest')} | – | – | – |")
    return "\n".join(lines)


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())
