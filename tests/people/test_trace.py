"""From a label to the optimizer steps and the models that contain it."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kedge.config import load_config
from kedge.runs.data_log import DataLog, DataUsage
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge.training.supervised import loop
from kedge_base.errors import DataError
from kedge_base.run_folder.record_format import read_metrics
from kedge_lab.evaluate import run_evaluate
from kedge_people.labels import Answer, AnswerFile, Item, read_labels, write_data_sets, write_items
from kedge_people.trace import labeled_prompts, trace
from tests.tiny import save_tiny_policy, tiny_tokenizer

SETTINGS = ["runtime.report=false", "data.eval_fraction=0.2", "reward_model.batch_size=3", "reward_model.num_epochs=3"]
PLAIN = [{"prompt": f"Hull {number}:", "chosen": " sun and sea", "rejected": " rope rope"} for number in range(5)]


def label(folder: Path, *, better: int = 0, changed: str = "") -> Path:
    """Ten items, of which ana answers the even ones and ben the odd ones; ana corrects the first."""
    folder.mkdir(exist_ok=True)
    write_items(folder, [Item(str(n), f"Deck {n}:", (" sun", " rope rope"), ("m", "m")) for n in range(10)])
    (folder / "answers.jsonl").unlink(missing_ok=True)
    with AnswerFile(folder) as file:
        for number in range(10):
            best = 1 - better if str(number) == changed else better
            ranks = (1.0, 2.0) if best == 0 else (2.0, 1.0)
            edits = (" the sea", None) if number == 0 else ()
            person = "ben" if number % 2 else "ana"
            when = f"2026-03-0{1 + number % 9}T00:00:00Z"
            file.add(Answer(f"a{number}", str(number), person, when, 2.0, (0, 1), "ranked", ranks, edits=edits))
    write_data_sets(folder)
    return folder / "comparisons.jsonl"


def config_for(root: Path, out: str, *more: str, **flags: Any):
    if not (root / "base").exists():
        save_tiny_policy(root / "base")
    return load_config(
        None, [*SETTINGS, *more], {"model": str(root / "base"), "out": str(root / "runs" / out), **flags}
    )


def train(root: Path, out: str = "reward", *more: str, **given: Any):
    (root / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PLAIN))
    data = {"data.comparisons": [str(root / "plain.jsonl"), str(root / "labels" / "comparisons.jsonl")]}
    return run_reward(config_for(root, out, *more, **data), **given)


def steps_of(run: Path) -> dict[str, list[int]]:
    """By answer and source, the recorded steps."""
    rows = json.loads((run / "labels.json").read_text())["comparisons"]
    return {f"{row['answer']} {row['source']}": row["steps"] for row in rows}


@pytest.mark.parametrize("mix", [(), ("data.mix=[1, 3]",)])
def test_the_recorded_steps_are_those_whose_batches_held_the_row(tmp_path, monkeypatch, mix):
    label(tmp_path / "labels")
    held: list[list[tuple[list[int], ...]]] = []
    original = loop._take_step

    def record(objective, optimizer, examples, rows, settings):
        held.append([examples[row].rows for row in rows])
        return original(objective, optimizer, examples, rows, settings)

    monkeypatch.setattr(loop, "_take_step", record)
    run = train(tmp_path, "reward", *mix).folder
    found: dict[str, list[int]] = {}
    for step, batch in enumerate(held, 1):
        for rows in batch:
            texts = [str(tiny_tokenizer().decode(row)) for row in rows]
            if number := re.match(r"(?:<bos>)?Deck (\d):", texts[0]):
                source = "correction" if "the sea" in texts[0] else "ranking"
                found.setdefault(f"a{number[1]} {source}", []).append(step)
    recorded = steps_of(run)
    assert recorded.keys() == {*(f"a{number} ranking" for number in range(10)), "a0 correction"}
    assert {name: steps for name, steps in recorded.items() if steps} == found
    assert any(not steps for steps in recorded.values())  # held out
    assert any(steps for steps in recorded.values())


def test_another_answer_changes_exactly_the_recorded_steps(tmp_path):
    """With a learning rate of 0, a step's loss depends on its own rows alone."""
    frozen = ("reward_model.learning_rate=0", "reward_model.normalize=none")
    label(tmp_path / "labels")
    before = train(tmp_path, "before", *frozen).folder
    name = next(name for name, steps in steps_of(before).items() if len(steps) == 3 and "ranking" in name)
    label(tmp_path / "labels", changed=name[1])
    after = train(tmp_path, "after", *frozen).folder
    losses = [[row["loss"] for row in read_metrics(run)] for run in (before, after)]
    changed = [step for step, pair in enumerate(zip(*losses, strict=True), 1) if pair[0] != pair[1]]
    assert changed == steps_of(before)[name] == steps_of(after)[name]


def test_an_answer_is_traced_to_the_updates_of_ppo_wherever_the_runs_are(tmp_path):
    label(tmp_path / "labels")
    reward = train(tmp_path)
    answer = next(name for name, steps in steps_of(reward.folder).items() if steps)[:2]
    small = ["ppo.num_updates=2", "rollout.num_prompts=2", "rollout.max_new_tokens=3", "ppo.num_minibatches=1"]
    small += ["ppo.learning_rate=0.01", "rollout.missing_eos_score=null"]
    prompts = [{"prompt": row["prompt"]} for row in PLAIN]
    policy = run_ppo(config_for(tmp_path, "ppo", *small, reward=[{"source": str(reward.model)}]), prompts=prompts)
    weights = [each / "model.safetensors" for each in (tmp_path / "base", policy.model)]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    run_ppo(
        config_for(tmp_path, "later", *small, model=str(policy.model), reward=[{"source": str(reward.model)}]),
        prompts=prompts,
    )
    other = config_for(tmp_path, "other", *small)
    run_ppo(other, prompts=prompts, reward=lambda completions: [1.0] * len(completions))

    def told(root: Path, sought: str) -> list[str]:
        return [line.replace(str(root), "") for line in trace(tmp_path / "labels", root, sought)]

    lines = told(tmp_path / "runs", answer)
    person, when = ("ben", "ana")[int(answer[1]) % 2 == 0], f"2026-03-0{1 + int(answer[1]) % 9}T00:00:00Z"
    assert lines[0].startswith(f"answer {answer} ({person}, {when}): reward run /reward, optimizer steps ")
    assert lines[1:] == [
        "  its model is the reward of the ppo run /later, updates 1–2",
        "  its model is the reward of the ppo run /ppo, updates 1–2",
    ]
    moved = tmp_path / "moved" / "deep"
    shutil.copytree(tmp_path / "runs", moved)
    assert told(moved, answer) == lines
    shutil.move(moved / "reward", moved / "renamed")  # known by its weights
    assert told(moved, answer)[1:] == lines[1:]
    assert labeled_prompts(policy.model).keys() == labeled_prompts(reward.model).keys() != set()

    everything = told(tmp_path / "runs", "ana")
    assert everything[0].startswith("ana, 5 answers: reward run /reward, optimizer steps 1")
    with AnswerFile(tmp_path / "labels") as file:
        file.withdraw("ana", "2026-04-01T00:00:00Z")
    assert told(tmp_path / "runs", "ana") == everything  # the models still contain them
    assert {each.person for each in read_labels(tmp_path / "labels").answers} == {"ben"}
    with pytest.raises(DataError, match="no answer is by eve"):
        told(tmp_path / "runs", "eve")
    (tmp_path / "nowhere").mkdir()
    assert trace(tmp_path / "labels", tmp_path / "nowhere", "ben") == [
        f"no run in {tmp_path / 'nowhere'} has read answers of ben"
    ]


def test_a_folder_of_runs_that_does_not_exist_is_named(tmp_path):
    label(tmp_path / "labels")
    [line] = trace(tmp_path / "labels", tmp_path / "rnus", "ana")
    assert line.startswith(f"there is no folder {tmp_path / 'rnus'}")


def test_steps_that_an_interrupted_run_has_not_reached_are_left_out(tmp_path):
    label(tmp_path / "labels")

    def stop(update):
        if update.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callback=stop)
    planned = {step for name, steps in steps_of(tmp_path / "runs" / "reward").items() for step in steps}
    assert max(planned) > 2
    [line] = trace(tmp_path / "labels", tmp_path / "runs", "ana")
    assert line.endswith(("optimizer steps 1–2", "optimizer steps 1", "optimizer steps 2"))


def test_steps_before_a_withdrawal_stay_traced_when_the_run_goes_on_without(tmp_path):
    """The rows of ana are gone from the data of the resumed run, but not from the weights that it goes on with."""
    label(tmp_path / "labels")

    def stop(update):
        if update.number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callback=stop)
    before = steps_of(tmp_path / "runs" / "reward")
    with AnswerFile(tmp_path / "labels") as file:
        file.withdraw("ana", "2026-04-01T00:00:00Z")
    write_data_sets(tmp_path / "labels")
    run = train(tmp_path, resume=Resume(("data.comparisons",))).folder
    after = steps_of(run)
    for name, steps in before.items():
        done = [step for step in steps if step <= 4]
        assert [step for step in after.get(name, []) if step <= 4] == done
        assert int(name[1]) % 2 or after.get(name, []) == done  # ana's
    assert any(step > 4 for steps in after.values() for step in steps)


def test_labels_of_steps_that_are_trained_on_others_are_forgotten(tmp_path):
    usage, example = {"comparisons": DataUsage(("labels",), 2, 2)}, {"comparisons": []}

    def published(*steps: int, done: int = 0) -> list[list[int]]:
        label = {"answer": ["a0"], "person": "ana", "when": datetime(2026, 3, 1), "source": None, "prompt": "p"}
        labels = {"comparisons": {0: {**label, "steps": [*steps]}} if steps else {}}
        DataLog(usage, examples=example, labels=labels).publish(tmp_path, done)
        return [row["steps"] for row in json.loads((tmp_path / "labels.json").read_text())["comparisons"]]

    assert published(1, 5) == [[1, 5]]
    assert published(2, 4, done=3) == [[1, 4]]
    assert published() == []


def test_demonstrations_are_traced_and_their_prompts_refused_in_evaluations(tmp_path, monkeypatch):
    label(tmp_path / "labels")
    plain = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PLAIN]
    rows = [json.loads(line) for line in (tmp_path / "labels" / "demonstrations.jsonl").read_text().splitlines()]
    run = run_sft(config_for(tmp_path, "sft", "data.eval_fraction=0"), demonstrations=[*plain, *rows])
    [line] = trace(tmp_path / "labels", tmp_path / "runs", "a0")
    assert "sft run" in line
    asked = [{"prompt": "Deck 0:", "completion": " sun"}, {"prompt": "Hull 1:", "completion": " sun"}]

    def like(completions):
        return [float(len(text)) for text in completions]

    def evaluate(out: str, prompts: list[dict[str, str]], *more: str, model: Path = run.model):
        small = ["generate.max_new_tokens=3", *more]
        return run_evaluate(config_for(tmp_path, out, *small, model=str(model)), prompts=prompts, judge=like)

    [checkpoint] = (run.folder / "checkpoints").glob("update-*")
    for model in (run.model, checkpoint, checkpoint / "model"):
        with pytest.raises(DataError, match=r"1 of 2 prompts were labeled.*evaluate\.labeled_prompts=true"):
            evaluate("refused", asked, model=model)
    base = tmp_path / "base"
    for others in ([f"against={run.model}"], [f"against={base}", f"frontier=[{run.model}]"]):
        with pytest.raises(DataError, match="1 of 2 prompts were labeled"):
            evaluate("refused", asked, *(f"evaluate.{other}" for other in others), model=base)
    monkeypatch.chdir(checkpoint)
    with pytest.raises(DataError, match="1 of 2 prompts were labeled"):
        evaluate("refused", asked, model=Path("."))
    evaluate("others", asked[1:])
    evaluate("accepted", asked, "evaluate.labeled_prompts=true")


def test_runs_without_labels_write_none(tmp_path):
    run = run_reward(config_for(tmp_path, "reward"), comparisons=[{**row, "label": 1} for row in PLAIN])
    assert not (run.folder / "labels.json").exists()
