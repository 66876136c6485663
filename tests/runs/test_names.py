"""A wrong name of an input is reported before anything is loaded, planned or hashed, by every stage."""

from __future__ import annotations

import json
import sys

import pytest

import kedge
from kedge.cli import main
from kedge.config import config_from_settings, load_config
from kedge.errors import ConfigError, KedgeError, RewardError
from kedge.runs.names import _names, check_names
from kedge.stages.sweep import plan_trials, run_sweep
from kedge.system.importing import check_named, find_named
from kedge.system.stage import find_stage
from tests.tiny import save_tiny_policy

ROWS = {
    "prompts": [{"prompt": "one"}, {"prompt": "two"}],
    "demonstrations": [{"prompt": "one", "completion": " two"}] * 4,
    "comparisons": [{"prompt": "one", "chosen": " two", "rejected": " three"}] * 4,
}
FUNCTIONS = """
RAN = open(__file__ + ".ran", "w").close()

def letters(completions):
    return [float(len(each)) for each in completions]

def mean(rewards, mask, **_):
    return rewards, rewards

class Game:
    pass
"""
NEEDS = {
    "sft": ("demonstrations",),
    "reward": ("comparisons",),
    "critic": ("prompts", "reward"),
    "ppo": ("prompts", "reward"),
    "rlhf": ("demonstrations", "comparisons", "prompts"),
    "generate": ("prompts",),
    "evaluate": ("prompts", "judge"),
}


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """The valid values of all names, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    save_tiny_policy(tmp_path / "policy")
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    files = {name: f"{name}.jsonl" for name in ROWS}
    return {"model": "policy", "reward": "mine.py:letters", "judge": "mine.py:letters", **files}


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, planned or hashed so far."""
    found = []

    for kind in (
        "transformers.AutoTokenizer.from_pretrained",
        "kedge.models.pretrained._load_weights",
        "kedge.runs.run.input_hashes",
        "kedge.stages.planning.before.is_small",
        "kedge.stages.planning.plan.count_stage",
    ):
        monkeypatch.setattr(kind, lambda *_, kind=kind, **__: found.append(kind) or pytest.fail(kind))
    return found


SCORED = ("critic", "ppo", "rlhf", "generate")
WRONG = [
    *((stage, {"model": "./polciy"}, "no such folder") for stage in NEEDS),
    *((stage, {name: f"{name}s.jsonl"}, "no such file") for stage, names in NEEDS.items() for name in names[:3]
      if name in ROWS),
    *((stage, {"reward": "mine.py:leters"}, "did you mean 'letters'") for stage in SCORED),
    *((stage, {"reward": "mime.py:letters"}, "does not exist") for stage in SCORED),
    ("ppo", {"reward": "kedge.rewards.verify:gsm9k"}, "did you mean 'gsm8k'"),
    ("ppo", {"reward": "kedge.rewards.verfy:gsm8k"}, "there is no module 'kedge.rewards.verfy'"),
    ("ppo", {"reward": "./rm"}, "no such folder"),
    ("ppo", {"reward": ["mine.py:letters", "./rm"]}, "no such folder"),
    ("ppo", {"environment": "mine.py:Gane"}, "did you mean 'Game'"),
    ("generate", {"environment": "mine.py:Gane"}, "did you mean 'Game'"),
    ("evaluate", {"environment": "mine.py:Gane", "against": "policy"}, "did you mean 'Game'"),
    ("ppo", {"advantage": "mine.py:maen"}, "did you mean 'mean'"),
    ("ppo", {"ppo.policy_loss": "mine.py:maen"}, "did you mean 'mean'"),
    ("ppo", {"teacher": "./teecher"}, "no such folder"),
    ("ppo", {"critic": "./kritic"}, "no such folder"),
    ("ppo", {"eval_prompts": "held.jsonl", "eval_every": 1}, "no such file"),
    ("ppo", {"data.pretraining": "texts.jsonl", "ptx_coef": 0.1}, "no such file"),
    ("ppo", {"eval_every": 1, "evaluate.judge": "mine.py:leters"}, "did you mean 'letters'"),
    ("critic", {"critic.base": "./base"}, "no such folder"),
    ("reward", {"reward_model.base": "./base"}, "no such folder"),
    ("reward", {"demonstrations": "demos.jsonl"}, "no such file"),
    ("rlhf", {"reward_model.base": "./base"}, "no such folder"),
    ("rlhf", {"num_rounds": 2, "labeler": "mine.py:leters"}, "did you mean 'letters'"),
    ("rlhf", {"ppo.reference": "./teecher"}, "no such folder"),
    ("evaluate", {"judge": "mine.py:leters"}, "did you mean 'letters'"),
    ("evaluate", {"judge": "./judge"}, "no such folder"),
    ("evaluate", {"against": "./other"}, "no such folder"),
    ("evaluate", {"against": "policy", "evaluate.frontier": ["./other"]}, "no such folder"),
    ("evaluate", {"critic": "./kritic", "reward": "mine.py:letters"}, "no such folder"),
    ("evaluate", {"generate.num_responses": 2, "judge": "mine.py:leters"}, "did you mean 'letters'"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "wrong", "line"), WRONG, ids=lambda value: str(value)[:40])
def test_nothing_is_loaded_for_a_wrong_name(inputs, loads, tmp_path, stage, wrong, line):
    given = {name: inputs[name] for name in ("model", *NEEDS[stage])} | wrong
    if "critic" in wrong and stage == "evaluate":
        del given["judge"]
        call = kedge.check_critic
    else:
        call = getattr(kedge, stage)
    with pytest.raises(KedgeError, match=line):
        call(**given, out="run")
    assert loads == []
    assert not (tmp_path / "mine.py.ran").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stage", "flags"),
    [(stage, [f"--{name}"]) for stage, names in NEEDS.items() for name in ("model", *names)]
    + [("evaluate", ["--against"]), ("ppo", ["--critic"]), ("ppo", ["--teacher"]), ("plan ppo", ["--prompts"])],
    ids=str,
)
def test_the_commands_look_names_up_before_the_plan(inputs, loads, monkeypatch, capsys, stage, flags):
    given = {f"--{name}": inputs[name] for name in ("model", *NEEDS[stage.split()[-1]])}
    given |= dict.fromkeys(flags, "./nowhere.jsonl" if flags[0].strip("-") in ROWS else "./nowhere")
    line = [part for flag, value in given.items() for part in (flag, value)]
    monkeypatch.setattr(sys, "argv", ["kedge", *stage.split(), *line])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no such f" in capsys.readouterr().err
    assert loads == []


@pytest.mark.parametrize("stage", NEEDS)
def test_right_names_are_found(inputs, stage):
    given = {name: inputs[name] for name in ("model", *NEEDS[stage])}
    names = {"prompts": "data.prompts", "demonstrations": "data.demonstrations", "comparisons": "data.comparisons"}
    names |= {"judge": "evaluate.judge"}
    settings = {names.get(name, name): value for name, value in given.items()}
    check_names(config_from_settings(stage, settings), stage)


def test_a_chain_does_not_look_for_what_it_makes(inputs):
    given = {"model": "policy", **{f"data.{name}": inputs[name] for name in ROWS}}
    made = {"out": "chain", "ppo.reference": "chain/sft/model", "evaluate.judge": "chain/reward/model"}
    check_names(config_from_settings("rlhf", given | made), "rlhf")
    with pytest.raises(KedgeError, match="no such folder"):
        check_names(config_from_settings("rlhf", given | made | {"out": "other"}), "rlhf")


def test_words_for_a_critic_are_not_looked_up_but_a_folder_of_that_name_is():
    config = load_config(None, ["ppo.critic_init=policy", "critic.base=reward"], {"model": "policy"})
    for stage in ("ppo", "critic"):
        found = dict(_names(config, find_stage(stage)))
        assert found["model"] == "policy"
        assert not {"ppo.critic_init", "critic.base"} & found.keys()


def test_a_chat_template_is_looked_for_among_the_tokenizers_own(inputs):
    given = {"model": "policy", "data.demonstrations": inputs["demonstrations"]}
    check_names(config_from_settings("sft", {**given, "data.chat_template": "chatml"}), "sft")
    for name in ("chatlm", "my.jinja"):
        with pytest.raises(ConfigError, match=rf"data\.chat_template={name} cannot be read: No such file"):
            check_names(config_from_settings("sft", {**given, "data.chat_template": name}), "sft")


def test_a_sweep_looks_names_up_before_its_first_run(inputs, loads, tmp_path):
    def resolve(values):
        settings = {"model": "policy", "data.prompts": "promts.jsonl", "reward": inputs["reward"], **values}
        return load_config(None, [], settings, stage="ppo")

    trials = plan_trials({"ppo.learning_rate": ["1e-3", "1e-4"]}, [0], resolve)
    with pytest.raises(KedgeError, match=r"promts\.jsonl: no such file"):
        run_sweep(trials, "ppo", tmp_path / "sweep")
    assert loads == []
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("text", "name", "is_left"),
    [
        ("from other import *", "f", True),
        ("def __getattr__(name): return len", "f", True),
        ("globals()['f'] = len", "f", True),
        ("if True:\n    def f(completions): ...", "f", True),
        ("from os.path import join as f", "f", True),
        ("import os.path", "os.getcwd", True),
        ("# f is made elsewhere", "f", True),
        ("f = g = len", "g", True),
        ("(f := len)", "f", True),
        ("class Own:\n    def f(self): ...", "Own.f", True),
        ("def g(completions): ...", "f", False),
        ("", "f", False),
        ("class Own:\n    def g(self): ...", "Owen.g", False),
    ],
)
def test_only_what_is_certain_is_refused(tmp_path, text, name, is_left):
    (tmp_path / "mine.py").write_text(text)
    spec = f"{tmp_path / 'mine.py'}:{name}"
    if is_left:
        check_named(spec, word="reward", error=RewardError)
        return
    with pytest.raises(RewardError) as early:
        check_named(spec, word="reward", error=RewardError)
    with pytest.raises(RewardError) as late:
        find_named(spec, word="reward", error=RewardError)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("spec", ["os.path:join", "math:sqrt", "json.decoder:f", "__main__:f", "mypackage.inner:f"])
def test_packages_are_not_imported(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text("raise RuntimeError")
    check_named(spec, word="reward", error=RewardError)
    assert "mypackage" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mypakcage.inner:f", "there is no module 'mypakcage'"),
        ("rewards.py", "is not the name of a function"),
        (":f", "is not the name of a function"),
        ("kedge.rewards.verify:gsm9k", "did you mean 'gsm8k'"),
        ("kedge.reward.verify:gsm8k", "there is no module 'kedge.reward'"),
        ("./none/mine.py:f", "does not exist"),
    ],
)
def test_a_wrong_module_is_refused(spec, said):
    with pytest.raises(RewardError, match=said):
        check_named(spec, word="reward", error=RewardError)
