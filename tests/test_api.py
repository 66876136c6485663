"""The Python function of each stage: accepted arguments and results."""

from __future__ import annotations

import functools
import json
import linecache
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import kedge
from kedge.config import load_config, parse_value
from kedge.data import read_rows
from kedge.models.sources import quiet_transformers
from kedge.rewards import RewardTerm
from kedge.runs.loaded_models import NamedModels
from kedge.stages.arguments import resolved_arguments
from kedge_base.errors import ConfigError, DataError, KedgeError, OutputError
from kedge_base.generators import random_state, restore_random_state
from kedge_base.stage import find_stage
from kedge_inspect.record import read_run
from tests.stages.ppo.test_ppo import metrics_without_times
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

PROMPTS = [f"Deck {number}:" for number in range(4)]
DEMONSTRATIONS = [{"prompt": prompt, "completion": " the sea"} for prompt in PROMPTS]
COMPARISONS = [{"prompt": prompt, "chosen": " the sea", "rejected": " rope"} for prompt in PROMPTS]
QUIET: dict[str, Any] = {"runtime": {"report": False}}
PPO: dict[str, Any] = {
    **QUIET,
    "num_updates": 1,
    "num_prompts": 4,
    "max_new_tokens": 6,
    "ppo.num_epochs": 1,
    "ppo.num_minibatches": 2,
}
FIVE: Any = 5
TEXT: Any = "8"
LISTED: Any = ["ppo"]
NOTHING: Any = None
COMPARED = ("reward/score_mean", "policy/loss", "value/loss", "objective/kl", "policy/entropy")


def count_letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("e")) for text in completions]


def loaded(folder: Path, kind: str) -> kedge.LoadedModel:
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    return kedge.LoadedModel(auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_policy(folder / "policy")
    save_tiny_policy(folder / "other", seed=1)
    save_tiny_reward_model(folder / "judge")
    return folder


def test_sft(models, tmp_path):
    result = kedge.sft(
        model=models / "policy",
        demonstrations=DEMONSTRATIONS,
        out=tmp_path / "run",
        batch_size=2,
        eval_fraction=0,
        **QUIET,
    )
    assert result.num_steps == 2
    AutoModelForCausalLM.from_pretrained(result.model)


def test_reward(models, tmp_path):
    result = kedge.reward(
        model=str(models / "policy"),
        comparisons=COMPARISONS,
        demonstrations=DEMONSTRATIONS,
        out=str(tmp_path / "run"),
        **{"data.eval_fraction": 0.25},
        **QUIET,
    )
    assert result.summary["num_comparisons"] == 3
    AutoModelForSequenceClassification.from_pretrained(result.model)


def test_ppo_with_a_function(models, tmp_path):
    result = kedge.ppo(
        policy=models / "policy",
        prompts=PROMPTS,
        reward=count_letters,
        out=tmp_path / "run",
        **{**PPO, "ppo.clip_range": 0.1, "seed": 5},
    )
    assert [row["update"] for row in result.metrics] == [1]
    assert load_config(result.folder / "config.yaml").ppo.clip_range == 0.1
    assert load_config(result.folder / "config.yaml").runtime.seed == 5
    AutoModelForCausalLM.from_pretrained(result.model)


def test_a_reward_that_was_changed_in_a_notebook_is_not_resumed_without_a_word(models, tmp_path, monkeypatch):
    def cell(number: int, text: str) -> Any:
        """What a cell of a notebook defines: its text is in the cache of lines alone."""
        name = f"<ipython-input-{number}>"
        names: dict[str, Any] = {"__name__": "__main__"}
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        exec(compile(text, name, "exec"), names)
        return names["score"]

    def run(reward: Any, **how: Any) -> None:
        settings = {**PPO, **how}
        kedge.ppo(model=models / "policy", prompts=PROMPTS, reward=reward, out=tmp_path / "run", **settings)

    text = "def score(completions):\n    return [float(len(text)) for text in completions]\n"
    changed = text.replace("float", "-float")
    run(cell(1, text), checkpoint={"keep_last": True})
    more = {"num_updates": 2, "checkpoint": {"keep_last": True}}
    with pytest.raises(ConfigError) as caught:
        run(cell(2, changed), **more, resume=True)
    assert "reward.code: the code has changed since the run started" in str(caught.value)
    assert str(caught.value).endswith("resume=['reward.code']")
    run(cell(3, changed), **more, resume=["reward.code"])


@pytest.mark.parametrize("way", [kedge.ppo, kedge.PpoTrainer])
@pytest.mark.parametrize("field", ["environment.source", "ppo.advantage", "ppo.policy_loss"])
def test_other_code_that_was_changed_in_a_notebook_is_not_resumed_either(models, tmp_path, monkeypatch, way, field):
    texts = {
        "environment.source": (
            "class G:\n def reset(self):\n  pass\n def step(self, text):\n  return 'x', 1.0, True, False\n"
        ),
        "ppo.advantage": "def G(rewards, mask, values):\n    return 1.0 * rewards - values, rewards\n",
        "ppo.policy_loss": "def G(log_ratios, advantages):\n    return -1.0 * log_ratios.exp() * advantages\n",
    }
    argument = {"environment.source": "environment", "ppo.advantage": "advantage", "ppo.policy_loss": "surrogate"}[
        field
    ]

    def run(number: int, text: str, **how: Any) -> None:
        name = f"<ipython-input-{number}>"
        names: dict[str, Any] = {"__name__": "__main__"}
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        exec(compile(text, name, "exec"), names)
        given = {**PPO, "reward": count_letters, argument: names["G"], "num_updates": number, **how}
        given = {"model": models / "policy", "prompts": PROMPTS, "out": tmp_path / "run", **given}
        if way is kedge.ppo:
            kedge.ppo(**given)
            return
        with kedge.PpoTrainer(**{**given, "num_updates": 4}) as trainer:
            trainer.update(trainer.sample())

    text = texts[field]
    run(1, text, checkpoint={"keep_last": True})
    run(2, text, checkpoint={"keep_last": True}, resume=True)
    with pytest.raises(ConfigError, match=rf"{field}\.code: the code has changed"):
        run(3, text.replace("1.0", "2.0"), checkpoint={"keep_last": True}, resume=True)


@pytest.mark.parametrize(("tasks", "is_said"), [("1", False), ("2", True), (None, False)])
def test_tasks_of_slurm_without_ranks_are_said(models, tmp_path, monkeypatch, capsys, tasks, is_said):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    if tasks is not None:
        monkeypatch.setenv("SLURM_NTASKS", tasks)
    kedge.generate(model=models / "policy", prompts=["The boat"], out=tmp_path / "run", max_new_tokens=2)
    said = "Slurm has 2 tasks: if each starts kedge, each is a separate run; torchrun makes them ranks of one"
    assert (said in capsys.readouterr().err) == is_said


def test_ppo_with_weighted_rewards_of_both_kinds(models, tmp_path):
    rewards = {count_letters: 0.5, str(models / "judge"): 2.0}
    result = kedge.ppo(
        model=models / "policy",
        prompts=PROMPTS,
        reward=rewards,
        out=tmp_path / "run",
        **{**PPO, "rollout.missing_eos_score": None},
    )
    [row] = result.metrics
    expected = 0.5 * row["score/count_letters"] + 2.0 * row["score/judge"]
    assert row["reward/score_mean"] == pytest.approx(expected, abs=1e-5)


def test_rlhf(models, tmp_path):
    result = kedge.rlhf(
        model=models / "policy",
        demonstrations=DEMONSTRATIONS,
        comparisons=COMPARISONS,
        prompts=PROMPTS,
        labeler=count_letters,
        out=tmp_path / "run",
        num_rounds=2,
        **{
            **{name: value for name, value in PPO.items() if name != "num_prompts"},
            "rollout.num_prompts": 4,
            "rlhf.num_responses": 4,
            "data.eval_fraction": 0,
        },
    )
    assert len(result.rounds) == 2
    AutoModelForCausalLM.from_pretrained(result.model)


def test_generate_and_evaluate(models, tmp_path):
    sampled = kedge.generate(
        model=models / "policy", prompts=PROMPTS, reward=[count_letters], out=tmp_path / "a", temperature=1.0, seed=2
    )
    assert [row["prompt"] for row in sampled.responses] == PROMPTS
    assert sampled.score is not None
    # The same policy samples the same responses for the judge.
    compared = kedge.evaluate(
        model=models / "policy",
        prompts=PROMPTS,
        judge=count_letters,
        against=models / "other",
        out=tmp_path / "b",
        temperature=1.0,
        seed=2,
    )
    assert compared.summary["score"]["value"] == pytest.approx(sampled.score.value)
    assert 0 <= compared.win_rate.low <= compared.win_rate.value <= compared.win_rate.high <= 1


def test_data_and_judges_may_be_files(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    Path("marks.py").write_text("def letters(completions):\n    return [t.count('e') for t in completions]\n")
    result = kedge.generate(model=models / "policy", prompts=Path("prompts.jsonl"), reward={"marks.py:letters": 2})
    assert result.folder == Path("runs/generate")
    config = load_config("runs/generate/config.yaml")
    assert config.data.prompts == ["prompts.jsonl"]
    assert [(term.source, term.weight) for term in config.reward] == [("marks.py:letters", 2.0)]


def test_each_kind_of_data_goes_where_it_belongs():
    for data, rows, sources in [
        ("a.jsonl", None, ["a.jsonl"]),
        (Path("a.jsonl"), None, ["a.jsonl"]),
        ([Path("a.jsonl"), Path("b.jsonl")], None, ["a.jsonl", "b.jsonl"]),
        (["Once"], ["Once"], []),
        ((text for text in ["Once"]), ["Once"], []),
    ]:
        config, objects = resolved_arguments(find_stage("ppo"), {"model": "m", "prompts": data})
        assert objects.get("prompts") == rows
        assert config.data.prompts == sources
    # A text cannot be a comparison, so texts are names of files.
    config, objects = resolved_arguments(find_stage("reward"), {"model": "m", "comparisons": ["a.jsonl", "org/name"]})
    assert not objects
    assert config.data.comparisons == ["a.jsonl", "org/name"]


def test_conversations_may_be_lists_of_messages():
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    asked = [{"role": "user", "content": "Once?"}]
    _, objects = resolved_arguments(find_stage("ppo"), {"model": "m", "prompts": [asked]})
    [prompt] = read_rows(objects["prompts"], "prompts", tokenizer=tokenizer).records
    assert "Once?" in prompt.text
    answered = [*asked, {"role": "assistant", "content": "Twice."}]
    _, objects = resolved_arguments(find_stage("sft"), {"model": "m", "demonstrations": [answered]})
    assert read_rows(objects["demonstrations"], "demonstrations", tokenizer=tokenizer).records


def test_each_kind_of_reward_goes_where_it_belongs():
    terms = [Path("rm"), RewardTerm("f.py:g", 0.5, {"window": 1}, "short")]
    config, objects = resolved_arguments(find_stage("ppo"), {"model": "m", "reward": terms})
    assert not objects
    first, second = config.reward
    assert (first.source, first.weight) == ("rm", 1.0)
    assert (second.source, second.weight, second.settings, second.name) == ("f.py:g", 0.5, {"window": 1}, "short")
    config, objects = resolved_arguments(find_stage("ppo"), {"model": "m", "reward": count_letters})
    assert objects["reward"] == [RewardTerm(count_letters)]
    assert config.reward == []
    _, objects = resolved_arguments(find_stage("ppo"), {"model": "m", "reward": {"rm": 1, count_letters: 2}})
    assert objects["reward"] == [RewardTerm("rm"), RewardTerm(count_letters, 2.0)]


def test_a_section_is_no_data_where_a_flag_has_its_name() -> None:
    config, objects = resolved_arguments(find_stage("sft"), {"model": "m", "data": {"max_length": 12}})
    assert (config.data.max_length, objects) == (12, {})


@pytest.mark.parametrize(
    ("call", "changed", "kind", "said"),
    [
        (
            kedge.ppo,
            {"policy": ("model", "tokenizer")},
            ConfigError,
            "policy must be a folder, .* not an object of type tuple",
        ),
        (kedge.ppo, {"reward": 3}, ConfigError, "reward must be a folder, a hub id, .* not an object of type int"),
        (
            kedge.ppo,
            {"reward": {count_letters: "much"}},
            ConfigError,
            "weight of a reward must be a number",
        ),
        (
            kedge.ppo,
            {"reward": []},
            ConfigError,
            "kedge ppo needs reward: pass reward=, or teacher= to distill, or set",
        ),
        (kedge.ppo, {"policy": None}, ConfigError, "kedge ppo needs model: pass model=, or set"),
        (kedge.evaluate, {"model": "m"}, ConfigError, "kedge evaluate needs evaluate.judge: pass judge=, or set"),
        (
            kedge.ppo,
            {"prompts": 3},
            DataError,
            "data.prompts must be a file, a hub id, a list of rows, a Dataset or a DataFrame, not int",
        ),
        (kedge.ppo, {"prompts": {"prompt": "a"}}, DataError, "not dict"),
        (kedge.ppo, {"prompts": []}, DataError, "has no rows"),
        (kedge.ppo, {"model": "m"}, ConfigError, "model and policy are two names of the same argument"),
        (kedge.ppo, {"data.prompts": ["p"], "prompts": "q"}, ConfigError, "data.prompts is given twice"),
        (kedge.ppo, {"data.prompts": ["p"]}, ConfigError, "data.prompts is given twice"),
        (
            kedge.evaluate,
            {"model": "m", "judge": count_letters, "evaluate.judge": "rm"},
            ConfigError,
            "evaluate.judge is given twice",
        ),
        (kedge.ppo, {"clip": 0.1}, ConfigError, "clip is not a setting of ppo; did you mean ppo.clip_range"),
        (kedge.ppo, {"eps_clip": 0.1}, ConfigError, "eps_clip is OpenRLHF's name; here it is ppo.clip_range"),
        (kedge.evaluate, {"model": "m", "judge": 3}, ConfigError, "judge must be a folder"),
        (kedge.evaluate, {"model": "m", "judge": "rm", "against": 3}, ConfigError, "against must be a folder"),
    ],
)
def test_mistakes_are_one_line(call, changed, kind, said, models, tmp_path):
    arguments: dict[str, Any] = {"prompts": PROMPTS, "out": tmp_path / "run"}
    if call is kedge.ppo:
        arguments |= {"policy": models / "policy", "reward": count_letters}
    with pytest.raises(kind, match=said) as caught:
        call(**{**arguments, **changed})
    assert isinstance(caught.value, KedgeError)
    assert "\n" not in str(caught.value)


def test_missing_data_are_named_as_the_function_takes_them() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"pass demonstrations=, or set"):
        kedge.sft(model="m", demonstrations=nothing)
    with pytest.raises(ConfigError, match=r"pass comparisons=, or set"):
        kedge.reward(model="m", comparisons=nothing)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kedge.preview_data(["a"], model=FIVE), "model must be a folder, a hub id or kedge.Loaded"),
        (lambda: kedge.preview_data(["a"], stage=LISTED), r"stage \['ppo'\] reads no data"),
        (lambda: kedge.preview_data(["a"], num_rows=-1), "num_rows must be a whole number of 1 or more; it is -1"),
        (lambda: kedge.preview_data(["a"], num_examples=TEXT), "num_examples must be a whole number of 0 "),
        (lambda: kedge.doctor(FIVE), "run must be a path, or the result of a run, not of type int"),
        (lambda: kedge.write_report("a", out=FIVE), "out must be a path"),
        (lambda: kedge.write_report(NOTHING), "run must be a path, .* not of type NoneType"),
        (lambda: kedge.push(FIVE, "a/b"), "model must be a path, .* not of type int"),
        (lambda: kedge.merge(LISTED, "b"), "adapter must be a path, .* not of type list"),
        (lambda: kedge.merge("a", FIVE), "out must be a path"),
        (lambda: read_run(FIVE), "run must be a path"),
        (
            lambda: kedge.pass_at_k(model="m", prompts="p", num_responses=TEXT),
            "num_responses must be .*'8'",
        ),
        (
            lambda: kedge.pass_at_k(model="m", prompts="p", num_responses=NOTHING),
            "num_responses must be .*None",
        ),
        (lambda: kedge.check_critic(critic=NOTHING, prompts="p"), "critic is missing"),
        (
            lambda: kedge.sft(model="m", demonstrations="d", resume=FIVE),
            "resume must be True, False, or a l.*5",
        ),
        (lambda: kedge.sft(model="m", demonstrations="d", resume=[FIVE]), r"resume must be .* it is \[5\]"),
        (lambda: kedge.sweep("ppo", {}), "nothing varies: .*, or several seeds"),
        (lambda: kedge.sweep("ppo", LISTED), r"fields must be a mapping .* it is \['ppo'\]"),
        (lambda: kedge.sweep("ppo", {"gamma": [1]}, num_random=TEXT), "num_random must be a whole number"),
        (lambda: kedge.sweep("ppo", {"gamma": [1]}, num_processes=0), "num_processes must be a whole number"),
        (lambda: kedge.sweep("ppo", {"gamma": [1]}, goal="up"), "goal max or min; they are None and 'up'"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_line(call: Callable[[], object], said: str):
    with pytest.raises(KedgeError, match=said):
        call()


def test_a_result_stands_for_its_folder(models, tmp_path):
    sft = kedge.sft(
        model=models / "policy",
        demonstrations=DEMONSTRATIONS,
        out=tmp_path / "run",
        adapter={"kind": "lora"},
        **QUIET,
    )
    assert kedge.doctor(sft) == kedge.doctor(sft.folder)
    assert kedge.write_report(sft) == sft.folder / "report.html"
    assert kedge.merge(sft, tmp_path / "merged") == tmp_path / "merged"
    assert read_run(sft) == read_run(str(sft.folder))
    with pytest.raises(ConfigError, match=r"an adapter on .* is of no use on the hub"):
        kedge.push(sft, "a/b")
    with pytest.raises(ConfigError, match="None is not a name on the hub"):
        kedge.push(models / "policy", NOTHING)


def test_a_preview_reads_with_the_tokenizer_of_a_loaded_model(models):
    policy = loaded(models / "policy", "policy")
    by_name = str(kedge.preview_data(PROMPTS, model=models / "policy"))
    assert str(kedge.preview_data(PROMPTS, model=policy)) == by_name
    assert str(kedge.preview_data(PROMPTS, model=(policy.model, policy.tokenizer))) == by_name
    assert "in tokens" in by_name


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (
            kedge.ppo,
            {"model": "m", "reward_funcs": count_letters, "train_dataset": ["a"]},
            "reward_funcs is TRL's name",
        ),
        (kedge.ppo, {"args": object(), "train_dataset": ["a"]}, "args is TRL's name; here: the configuration"),
        (
            kedge.sft,
            {"model": "m", "train_dataset": ["a"]},
            "train_dataset is TRL's name; here it is data.demonstrations",
        ),
        (
            kedge.reward,
            {"model": "m", "train_dataset": ["a"]},
            "train_dataset is TRL's name; here it is data.comparisons",
        ),
        (kedge.ppo, {"model": "m", "tools": [count_letters]}, "tools is TRL's name; here it is environment.source"),
    ],
)
def test_an_argument_of_trl_is_answered_even_where_ours_is_missing(call, given, said):
    with pytest.raises(ConfigError) as caught:
        call(**given)
    assert str(caught.value).startswith(said)


def test_a_sweep_gets_names_and_values(monkeypatch):
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "kedge_lab.sweep.run_sweep",
        lambda trials, stage, folder, **rest: seen.update(rest, trials=trials, at=folder),
    )
    kedge.sweep(
        "ppo",
        {"ppo.learning_rate": [1e-6, "3e-6"], "ppo.clip_range_high": [None]},
        model="m",
        prompts="p.jsonl",
        reward={"r.py:f": 0.5},
        seeds=[4, 5],
        num_updates=7,
        num_processes=3,
    )
    assert [trial.config.ppo.learning_rate for trial in seen["trials"]] == [1e-6, 1e-6, 3e-6, 3e-6]
    config = seen["trials"][1].config
    assert (config.model, config.runtime.seed, config.ppo.num_updates) == ("m", 5, 7)
    assert (config.reward[0].source, config.reward[0].weight, config.data.prompts) == ("r.py:f", 0.5, ["p.jsonl"])
    assert (seen["num_processes"], seen["at"]) == (3, Path("runs/sweep-ppo"))
    kedge.sweep("ppo", {"preset": ["grpo", "rloo"]}, model="m", prompts="p", reward="r", preset="small-cpu")
    assert [trial.config.preset for trial in seen["trials"]] == [["small-cpu", "grpo"], ["small-cpu", "rloo"]]
    with pytest.raises(KedgeError, match=r"separate processes: data\.prompts must be a file or folder"):
        kedge.sweep("ppo", {"ppo.num_epochs": [1, 2]}, model="m", prompts=["a text"], reward="r")
    with pytest.raises(KedgeError, match="out= is empty text"):
        kedge.sweep("ppo", {"ppo.num_epochs": [1, 2]}, model="m", prompts="p", reward="r", out="")
    with pytest.raises(KedgeError, match="a sweep runs sft, reward, critic, ppo, control, not 'rlhf'"):
        kedge.sweep("rlhf", {}, model="m")


def test_a_sweep_keeps_the_values_of_python(monkeypatch):
    monkeypatch.setattr("kedge_lab.sweep.run_sweep", lambda trials, *_, **__: trials)

    def swept(field: str, values: Any, **more: Any) -> Any:
        given: dict[str, Any] = {"model": "m", "prompts": "p", "reward": "r", **more}
        return kedge.sweep("ppo", {field: values}, **given)

    texts = ["\n", "null", None, "a: b", "[", "☃"]
    trials = swept("rollout.stop_token", texts)
    assert [trial.config.rollout.stop_token for trial in trials] == texts
    assert [parse_value(trial.values["rollout.stop_token"], "") for trial in trials] == texts
    assert [trial.config.model for trial in swept("model", [Path("m/a"), "m/b"])] == ["m/a", "m/b"]
    assert [trial.config.ppo.num_epochs for trial in swept("ppo.num_epochs", np.arange(1, 3))] == [1, 2]
    assert [trial.config.ppo.kl_coef for trial in swept("kl_coef", [np.float32(0.5)], seeds=np.int64(2))] == [0.5, 0.5]
    assert [trial.seed for trial in swept("gamma", [0.5], seeds=np.array([3, 5]))] == [3, 5]
    for field, values, more, said in (
        ("kl_coef", 0.1, {}, "kl_coef must be a list of values to try; it is 0.1"),
        ("kl_coef", "0.1,0.2", {}, "kl_coef must be a list of values to try; it is '0.1,0.2'"),
        ("reward", [count_letters], {}, "reward: the runs of a sweep are separate processes"),
        ("gamma", [1, 0.5], {"seeds": 1.5}, "seeds must be a number of seeds or a list of them; it is 1.5"),
        ("gamma", [1, 0.5], {"model": None}, "kedge ppo needs model"),
        ("gamma", [1, 0.5], {"data.prompts": "q"}, "data.prompts is given twice"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            swept(field, values, **more)
    with pytest.raises(ConfigError, match=r"ppo\.gamma is given twice"):
        kedge.sweep("ppo", {"gamma": [1, 0.5], "ppo.gamma": [1, 0.9]}, model="m", prompts="p", reward="r")


def test_runs_in_several_threads_are_those_of_a_run_alone(models, tmp_path):
    """transformers ties no weights in the whole process while it loads a model."""
    save_tiny_policy(tmp_path / "tied", "gpt2")

    def run(name: str) -> list[dict[str, Any]]:
        given: dict[str, Any] = {"model": tmp_path / "tied", "prompts": PROMPTS, "reward": count_letters, **PPO}
        kedge.ppo(out=tmp_path / name, **given, **{"ppo.critic": "separate"})
        return metrics_without_times(tmp_path / name)

    alone = run("alone")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, "abcd")) == [alone] * 4
    assert run("after") == alone


def test_a_forked_process_waits_for_no_thread_of_its_parent():
    may_end = threading.Event()

    def hold(begun: threading.Event) -> None:
        with quiet_transformers():
            begun.set()
            may_end.wait(30)

    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        pool.submit(hold, begun)
        begun.wait(30)
        if (child := os.fork()) == 0:
            signal.alarm(10)
            with quiet_transformers():
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        may_end.set()


@contextmanager
def modes_of_a_caller() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            yield
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert (torch.get_default_dtype(), torch.empty(()).device.type) == (torch.float64, "meta")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_the_same_whatever_modes_of_torch_its_caller_has_set(models, tmp_path, precision):
    """In bf16, the caller's autocast would keep copies of the weights from before each step."""
    ppo: dict[str, Any] = {**PPO, "precision": precision}

    def weights(out: Path) -> dict[str, bytes]:
        sft: dict[str, Any] = {"model": models / "policy", "demonstrations": DEMONSTRATIONS, **QUIET}
        sft["precision"] = precision
        result = kedge.sft(**sft, out=out / "sft", adapter={"kind": "lora"})
        kedge.merge(result.model, out / "merged")
        kedge.ppo(model=models / "policy", prompts=PROMPTS, reward=count_letters, out=out / "ppo", **ppo)
        with kedge.PpoTrainer(model=models / "policy", out=out / "loop", **ppo) as trainer:
            batch = trainer.sample(PROMPTS)
            trainer.update(batch, count_letters(batch.responses))
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}

    expected = weights(tmp_path / "usual")
    with modes_of_a_caller():
        found = weights(tmp_path / "unusual")
    assert found == expected


def test_what_the_caller_draws_next_does_not_depend_on_a_call(models, tmp_path):
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    before = random_state()
    expected = draws()
    restore_random_state(*before)
    kedge.sft(model=models / "policy", demonstrations=DEMONSTRATIONS, out=tmp_path / "run", **QUIET)
    assert draws() == expected


def test_loaded_models_are_saved_into_the_run_and_stay_as_they_are(models, tmp_path):
    policy, judge = (loaded(models / name, kind) for name, kind in (("policy", "policy"), ("judge", "judge")))
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    out = tmp_path / "run"
    pair = (judge.model, judge.tokenizer)
    result = kedge.ppo(policy=policy, prompts=PROMPTS, reward=[pair, count_letters], out=out, **PPO)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())
    names: dict[str, Any] = {"policy": models / "policy", "reward": [models / "judge", count_letters]}
    by_name = kedge.ppo(**names, prompts=PROMPTS, out=tmp_path / "named", **PPO)
    figures = [{key: value for key, value in each.metrics[0].items() if key in COMPARED} for each in (result, by_name)]
    assert figures[0] == figures[1]
    config = load_config(out / "config.yaml")
    assert config.model == str(out / "in_memory_models" / "model")
    assert kedge.ppo(policy=policy, prompts=PROMPTS, reward=[judge, count_letters], out=out, resume=True, **PPO).metrics

    other = loaded(models / "other", "policy")
    with pytest.raises(ConfigError, match="the model is not the one that the run started from"):
        kedge.ppo(policy=other, prompts=PROMPTS, reward=[judge, count_letters], out=out, resume=True, **PPO)


def test_a_run_is_not_resumed_with_another_tokenizer(models, tmp_path):
    given = loaded(models / "policy", "policy")
    run = tmp_path / "run"
    first = NamedModels(run / "in_memory_models", {"model": given})
    with first.saved():
        (run / "config.yaml").touch()
    given.tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)  # which it remembers, and saves
    with first.saved():
        pass
    for name, value in (("chat_template", "{{ messages }}"), ("eos_token", "<pad>")):
        before = getattr(given.tokenizer, name)
        setattr(given.tokenizer, name, value)
        with pytest.raises(ConfigError, match="the tokenizer is not the one that the run started from"), first.saved():
            pass
        setattr(given.tokenizer, name, before)
    with first.saved():
        pass
    given.tokenizer.add_tokens(["quay"])
    with pytest.raises(ConfigError, match="the tokenizer is not the one"), first.saved():
        pass


def test_a_mistake_with_a_loaded_model_leaves_nothing_behind(models, tmp_path):
    policy = loaded(models / "policy", "policy")
    out = tmp_path / "deep" / "run"
    with pytest.raises(KedgeError):
        kedge.sft(model=policy, demonstrations=DEMONSTRATIONS, out=out, batch_size=0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"not an object of type LlamaForCausalLM without its tokenizer$"):
        kedge.sft(model=policy.model, demonstrations=DEMONSTRATIONS, out=out, **QUIET)
    with pytest.raises(
        ConfigError, match=r"reward must be .*kedge\.LoadedModel.* not an object of type LlamaForCausalLM without its"
    ):
        kedge.ppo(policy="m", prompts=PROMPTS, reward=policy.model, out=out)
    with pytest.raises(ConfigError, match="LoadedModel: the model is of type TokenizersBackend; expected a transfor"):
        kedge.ppo(policy=(policy.tokenizer, policy.model), prompts=PROMPTS, reward="m", out=out)
    with pytest.raises(ConfigError, match=r"^judge must be .* without its tokenizer"):
        kedge.evaluate(model="m", against="m", prompts=PROMPTS, judge=policy.model, out=out)
    with pytest.raises(
        ConfigError, match="LoadedModel: the tokenizer is of type str; expected a transformers tokenizer"
    ):
        kedge.LoadedModel(policy.model, "gpt2")
    (out / "notes").mkdir(parents=True)
    with pytest.raises(OutputError, match="is not empty"):
        kedge.sft(model=policy, demonstrations=DEMONSTRATIONS, out=out, **QUIET)
    assert [path.name for path in out.iterdir()] == ["notes"]


def test_saving_a_loaded_model_draws_no_progress_bar(models, tmp_path, capfd):
    policy = loaded(models / "policy", "policy")
    capfd.readouterr()
    policy.save(tmp_path / "saved")
    assert capfd.readouterr() == ("", "")


def test_callbacks_see_every_update_and_can_stop_the_run(models, tmp_path):
    seen: list[kedge.Update] = []

    def stop_after_two(update: kedge.Update) -> None:
        seen.append(update)
        if update.number == 2:
            update.stop("two are enough")

    sizes = {**PPO, "num_updates": 5}
    names: dict[str, Any] = {"policy": models / "policy", "prompts": PROMPTS, "reward": count_letters}
    result = kedge.ppo(**names, out=tmp_path / "ppo", on_update=stop_after_two, **sizes)
    assert [(update.stage, update.number, update.num_updates) for update in seen] == [("ppo", 1, 5), ("ppo", 2, 5)]
    assert len(result.metrics) == 2
    assert seen[1].metrics["reward/score_mean"] == result.metrics[1]["reward/score_mean"]
    assert json.loads((tmp_path / "ppo" / "finished.json").read_text())["ended"] == "two are enough"
    saved = AutoModelForCausalLM.from_pretrained(result.model).state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in seen[1].model.state_dict().items())
    with pytest.raises(TypeError):
        seen[0].metrics["reward/score_mean"] = 0.0  # type: ignore[index]

    whole = {**QUIET, "data.eval_fraction": 0.0, "batch_size": 2, "on_update": seen.append, "model": models / "policy"}
    kedge.sft(demonstrations=DEMONSTRATIONS, out=tmp_path / "sft", num_epochs=2, **whole)
    kedge.reward(comparisons=COMPARISONS, out=tmp_path / "reward", **whole)
    stages = [(update.stage, update.number, update.num_updates) for update in seen[2:]]
    assert stages == [("sft", number, 4) for number in (1, 2, 3, 4)] + [("reward", number, 2) for number in (1, 2)]
    assert all("loss" in update.metrics for update in seen[2:])


async def awaited(update: kedge.Update) -> None:
    pass


def yielding(update: kedge.Update) -> Iterator[None]:
    yield


@pytest.mark.parametrize("call", [kedge.ppo, kedge.PpoTrainer])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "not of type int"),
        (awaited, "is async"),
        (functools.partial(awaited), "is async"),
        (yielding, "or a generator"),
    ],
)
def test_a_callback_that_would_never_run_is_refused(call: Callable[..., object], given: Any, said: str):
    with pytest.raises(ConfigError, match=f"on_update .*{said}"):
        call(model="absent", prompts=PROMPTS, on_update=given, **PPO)


def test_what_a_callback_raises_ends_the_run(models, tmp_path):
    def fail(update: kedge.Update) -> None:
        raise ZeroDivisionError("mine")

    names: dict[str, Any] = {"policy": models / "policy", "prompts": PROMPTS, "reward": count_letters}
    with pytest.raises(ZeroDivisionError, match="mine"):
        kedge.ppo(**names, out=tmp_path / "run", on_update=fail, **{**PPO, "num_updates": 2})
    assert (tmp_path / "run" / "model").is_dir()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["update-000001"]  # the update that it saw was complete


def test_rlhf_adds_reward_functions_to_the_model_that_it_trains(models, tmp_path):
    data: dict[str, Any] = {"demonstrations": DEMONSTRATIONS, "comparisons": COMPARISONS, "prompts": PROMPTS}
    sizes = {"ppo.num_updates": 1, "ppo.num_epochs": 1, "rollout.num_prompts": 4, "rollout.max_new_tokens": 6}
    small = {**QUIET, **sizes, "sft.num_epochs": 1, "reward_model.num_epochs": 1, "data.eval_fraction": 0.0}
    result = kedge.rlhf(model=models / "policy", **data, reward={count_letters: 0.5}, out=tmp_path / "run", **small)
    [row] = result.rounds[0].ppo.metrics
    assert {"score/count_letters", "score/model"} <= row.keys()
    with pytest.raises(KedgeError):
        kedge.rlhf(model=models / "policy", **data, reward=lambda nothing_here: [], out=tmp_path / "other", **small)
    assert not (tmp_path / "other").exists()


def test_completion_offers_the_functions() -> None:
    assert set(kedge.__all__) <= set(dir(kedge))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("GRPOTrainer", "it is a preset: kedge.ppo(..., preset='grpo')"),
        ("GRPOConfig", "it is a preset: kedge.ppo(..., preset='grpo')"),
        ("RLOOTrainer", "it is a preset: kedge.ppo(..., preset='rloo')"),
        ("dr_grpo", "it is a preset: kedge.ppo(..., preset='dr-grpo')"),
        ("PPOTrainer", "in its place: kedge.ppo(...) or kedge.PpoTrainer(...)"),
        ("PPOConfig", "in its place: kedge.ppo(...) or kedge.PpoTrainer(...)"),
        ("SFTTrainer", "in its place: kedge.sft(...)"),
        ("RewardConfig", "in its place: kedge.reward(...)"),
        ("DPOTrainer", "in its place: kedge.rlhf(...)"),
    ],
)
def test_a_class_of_another_library_names_the_call_for_it(name: str, advice: str) -> None:
    line = f"module 'kedge' has no attribute {name!r}; {advice}"
    with pytest.raises(ImportError) as caught:
        getattr(kedge, name)
    assert str(caught.value) == line
    with pytest.raises(ImportError) as caught:
        exec(f"from kedge import {name}")
    assert str(caught.value) == line


@pytest.mark.parametrize("name", ["Nonsense", "Config", "Trainer", "_GRPOTrainer", "__wrapped__"])
def test_another_name_is_an_attribute_error(name: str) -> None:
    assert not hasattr(kedge, name)
