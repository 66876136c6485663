"""Two rounds of `kedge rlhf` labeled by a simulated person in the demo's world: `python -m bench.labels.rounds SEED`.

The person ranks four summaries of each of 150 posts by the gold judge's quality with Gumbel noise, which is the demo's
annotator for several responses, over the addresses of the page. Afterwards the gold judge scores the policies on other
posts; and a control, for which PPO goes on with the reward model of round 1 instead. One answer is traced.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
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
from kedge_people.assignments import read_assignments, write_assignments
from kedge_people.labels import AnswerFile, read_labels
from kedge_people.server import label_server
from kedge_people.trace import trace

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
    """Answer all items of a folder, as the page of `kedge label` does."""
    posts = {world.render(post): post for post in world.posts(PROMPTS)}
    draw = random.Random(f"person {seed}")
    with AnswerFile(folder) as file:
        assignments = read_assignments(folder).dealt(read_labels(folder), ["simulated"])
        write_assignments(folder, assignments)
        with label_server(folder, assignments, file) as server:
            url = server.urls["simulated"]
            state = sent(f"{url}question/0")
            while question := state["question"]:
                answer = {"id": f"answer-{state['done']:03}", "question": question["id"], "verdict": "ranked"}
                qualities = [judge_summary(posts[question["prompt"]], text).quality for text in question["responses"]]
                answer |= {"ranks": ranks_of(qualities, draw), "seconds": 5.0}
                state = sent(f"{url}answer", answer)


def ranks_of(qualities: Sequence[float], draw: random.Random) -> list[int]:
    """The demo's annotator for several responses: a ranking by quality with Gumbel noise, and lapses."""
    noisy = [quality - ANNOTATOR_TEMPERATURE * math.log(-math.log(draw.random())) for quality in qualities]
    if draw.random() < ANNOTATOR_LAPSE_RATE:
        draw.shuffle(noisy)
    return [sorted(noisy, reverse=True).index(each) + 1 for each in noisy]


def sent(url: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Get a question, or send an answer."""
    origin = "/".join(url.split("/", 3)[:3])
    body = None if values is None else json.dumps(values).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "Origin": origin})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


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
    labels = folder / "run" / "labels-2"
    traced = trace(labels, folder, read_labels(labels).answers[0].id)
    print("\n".join(line.replace(str(folder), "runs") for line in traced))
    return {"seed": seed, "quality": {name: each.as_json() for name, each in found.items()}, "accuracy": accuracy}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            outcome = measure(int(name), Path(work))
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
