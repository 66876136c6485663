"""Two rounds of `kedge rlhf` labeled by a simulated person in the demo's world: `python -m bench.labels.rounds SEED`.

The person ranks four summaries of each of 150 posts by the gold judge's quality with Gumbel noise, which is the demo's
annotator for several responses. Afterwards the gold judge scores the policies on other posts; and a control, for which
PPO goes on with the reward model of round 1 instead.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.labels.select import fine_tuned
from kedge.runs.ending import chained
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.rlhf import run_rlhf
from kedge_lab.demo.gold_evaluation import GoldScores, sample_summaries
from kedge_lab.demo.main import demo_config, rows
from kedge_lab.demo.world import ANNOTATOR_LAPSE_RATE, ANNOTATOR_TEMPERATURE, World, judge_summary
from kedge_people.labels import Answer, AnswerFile, read_labels

RECORD: Final = Path(__file__).parents[1] / "results" / "labels_rounds.jsonl"
DEMONSTRATIONS: Final = 320
COMPARISONS: Final = 300
PROMPTS: Final = 512
TESTED: Final = 256
SETTINGS: Final[dict[str, Any]] = {
    "rlhf.num_rounds": 2,
    "rlhf.labeler": "human",
    "rlhf.num_prompts": 150,
    "sft.learning_rate": 3e-4,  # the policy is fine-tuned already
    "reward_model.num_epochs": 2,
    "ppo.num_updates": 10,
    "rollout.num_prompts": 64,
    "runtime.report": False,
}

PPO: Final = {name: value for name, value in SETTINGS.items() if name.startswith(("ppo.", "rollout.", "runtime."))}


def label(folder: Path, world: World, seed: int) -> None:
    """Answer all items of a folder."""
    labels = read_labels(folder)
    posts = {world.render(post): post for post in world.posts(PROMPTS)}
    draw = random.Random(f"person {seed}")
    with AnswerFile(folder) as file:
        for item in labels.items.values():
            post = posts[str(item.prompt)]
            noisy = [
                judge_summary(post, text).quality - ANNOTATOR_TEMPERATURE * math.log(-math.log(draw.random()))
                for text in item.responses
            ]
            if draw.random() < ANNOTATOR_LAPSE_RATE:
                draw.shuffle(noisy)
            ranks = tuple(float(sorted(noisy, reverse=True).index(each) + 1) for each in noisy)
            order = tuple(range(len(ranks)))
            file.add(Answer(item.id, item.id, "simulated", "2026-01-01T00:00:00Z", 5.0, order, "ranked", ranks))


@chained()
def measure(seed: int, folder: Path) -> dict[str, Any]:
    """Gold quality of the policies."""
    world, policy = fine_tuned()
    prompts = replace(world, split=f"prompts-{seed}")
    asked = [{"text": each.text, **each.columns} for each in prompts.prompts(PROMPTS)]
    given: dict[str, Any] = {
        "demonstrations": rows(world.demonstrations(DEMONSTRATIONS)),
        "comparisons": rows(replace(world, split=f"comparisons-{seed}").comparisons(COMPARISONS)),
        "prompts": asked,
    }
    config = demo_config("rlhf", policy, folder / "run", seed=seed, **SETTINGS)
    run_rlhf(config, **given)
    label(folder / "run" / "labels-2", prompts, seed)
    result = run_rlhf(config, **given, resume=Resume())
    first, second = result.rounds
    control = run_ppo(
        demo_config("ppo", first.ppo.model, folder / "control", seed=seed, **PPO),
        prompts=asked,
        reward=first.reward.model,
    )
    held_out = replace(world, split=f"held-out-{seed}")
    posts = held_out.posts(TESTED)
    models = {
        "sft": result.sft.model,
        "round 1": first.ppo.model,
        "round 2": second.ppo.model,
        "round 2 with the reward model of round 1": control.model,
    }
    found = {
        name: GoldScores.of(posts, sample_summaries(model, held_out, posts)).quality for name, model in models.items()
    }
    accuracy = [each.reward.summary["accuracy"]["value"] for each in result.rounds]
    return {"seed": seed, "quality": {name: each.as_json() for name, each in found.items()}, "accuracy": accuracy}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            outcome = measure(int(name), Path(work))
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
