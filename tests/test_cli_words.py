"""The words of the command line: aliases, weights, texts as prompts, help, and what a shell completes."""

# ruff: noqa: F811

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.models import ArgumentInfo

from kedge.cli import app, main
from kedge.cli.options import Overrides, literal_prompts, weighted_rewards
from kedge.config import completions, full_name
from kedge_base.errors import ConfigError
from kedge_base.stage import stages
from tests.test_cli import COMMANDS, STAGES, calls, kedge  # noqa: F401


@pytest.mark.parametrize(
    ("stage", "arguments", "field", "value"),
    [
        ("sft", ["--policy", "m", "--demonstrations", "d"], "demonstrations", ["d"]),
        ("sft", ["--model", "m", "--data", "d"], "demonstrations", ["d"]),
        ("reward", ["--model", "m", "--comparisons", "c", "--comparisons", "d"], "comparisons", ["c", "d"]),
        ("reward", ["--model", "m", "--data", "c"], "comparisons", ["c"]),
    ],
)
def test_the_words_of_python_are_options(
    stage: str,
    arguments: list[str],
    field: str,
    value: Any,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kedge(monkeypatch, stage, *arguments, "num_epochs=3") == 0
    config = calls[0][1]
    assert (config.model, getattr(config.data, field)) == ("m", value)
    assert (config.sft if stage == "sft" else config.reward_model).num_epochs == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sft", "--data", "a", "--demonstrations=b"], "--demonstrations and --data are the same option; give one"),
        (["ppo", "--model", "a", "--policy", "b"], "--model and --policy are the same option; give one"),
        (["ppo", "--num_updates", "3"], "--num_updates is not an option; fields are set without dashes: num_u"),
        (["sft", "--dry-run"], "--dry-run is not an option; kedge plan sft says what a run will hold and how long"),
        (["ppo", "--num-updates=3"], "--num-updates is not an option; fields are set without dashes: num_u"),
        (["ppo", "--data", "d"], "--data is not an option; kedge ppo has --model, --prompts, --reward, --env"),
        (["ppo", "--reward-model=r"], "--reward-model is not an option; kedge ppo has --model, --prompts, --reward"),
        (["ppo", "policy=m"], "policy is not a setting of ppo; did you mean model?"),
        (["ppo", "--use_vllm", "true"], "use_vllm is TRL's name; here it is rollout.engine=vllm"),
        (["ppo", "--tools", "f.py:t"], "tools is TRL's name; here it is environment.source"),
        (["sft", "--train_dataset", "d"], "train_dataset is TRL's name; here it is data.demonstrations"),
        (["ppo", "mask_truncated_completions=true"], "mask_truncated_completions is TRL's name; here it is r"),
        (["ppo", "+trainer.val_before_train=False"], "trainer.val_before_train is verl's name; here it is ppo.eval_ev"),
        (["ppo", "--lr", "1e-6"], "lr is not a setting of ppo; did you mean ppo.learning_rate?"),
        (["sft", "epochs=3"], "epochs is not a setting of sft; did you mean sft.num_epochs?"),
        (["ppo", "batch_size=8"], "batch_size is a name of other libraries; here it is rollout.num_prompts"),
        (["ppo", "--algorithm", "grpo"], "algorithm is not a setting of ppo; did you mean preset?"),
        (["ppo", "--preset", "grpo", "small-cpu"], "small-cpu is a preset, and each needs its own --preset"),
        (["ppo", "--preset", "GRPO"], "preset 'GRPO' does not exist; did you mean grpo?"),
        (["ppo", "preset=grpo+small-cpu"], "preset 'grpo+small-cpu' does not exist; give --preset once for each"),
        (["grpo", "--model", "m"], "kedge has no command 'grpo'; it is a preset: kedge ppo --preset grpo"),
        (["config", "check"], "kedge config has no command 'check'; its commands are show, validate, explain"),
        (["prove", "runs/ppo"], "kedge has no command 'prove'; its commands are sft, reward, critic, ppo"),
        (["DPO"], "kedge has no command 'DPO'; in its place: kedge rlhf"),
        (["trpo"], "kedge has no command 'trpo'; it is a preset: kedge control --preset trpo"),
        (["docter", "runs/ppo"], "kedge has no command 'docter'; did you mean doctor?"),
        (["--quiet", "ppo"], "no such option: --quiet; see kedge -h"),
        (["doctor"], "missing argument 'RUN'; see kedge doctor -h"),
        (["config", "explain", "a", "b"], "got unexpected extra argument(s) (b); see kedge config explain -h"),
        (["watch", "runs", "--port", "70000"], "invalid value for '--port': "),
        (["plan", "ppo", "--eps_clip", "0.1"], "eps_clip is OpenRLHF's name; here it is ppo.clip_range"),
        (["sweep", "sft", "--num_epochs", "1,2"], "--num_epochs is not an option; fields are set without dashes: num"),
        (["plan", "--eps_clip", "0.1", "ppo"], "eps_clip is OpenRLHF's name; here it is ppo.clip_range"),
        (["plan", "--eps_clip", "0.1"], "no such option: --eps_clip (Possible options: --help); see kedge plan -h"),
        (["plan", "all", "ppo"], "kedge plan has no command 'all'; its commands are sft, reward, critic, ppo, rlhf"),
        (["sweep", "--seeds", "0", "ppo", "--model", "m"], "--seeds must be a number of seeds or a list"),
        (["sweep", "evaluate"], "kedge sweep has no command 'evaluate'; its commands are sft, reward, critic, ppo, c"),
        (["config", "schedule", "--preset", "classic-control"], "kedge config schedule is for PPO on language models"),
        (["config", "schedule", "control.env=CartPole-v1"], "kedge config schedule is for PPO on language models, not"),
        (["config", "validate", "run.yaml"], "run.yaml is not an override; write --config and the file"),
        (["rlhf", "--judge", "f.py:g"], "judge is not a setting of rlhf; did you mean rlhf.labeler?"),
        (["evaluate", "--labeler", "f.py:g"], "labeler is not a setting of evaluate; did you mean evaluate.judge?"),
        (["rlhf", "labeller=f.py:g"], "labeller is not a setting of rlhf; did you mean rlhf.labeler?"),
        (["ppo", "--eps_clip", "0.1"], "eps_clip is OpenRLHF's name; here it is ppo.clip_range"),
        (["rlhf", "--learning_rate", "1"], "learning_rate is a field of several sections; write ppo.learning_rate or"),
        (["ppo", *COMMANDS["ppo"], "--reward", "f.py:g=x"], "--reward f.py:g=x: what follows the = is a weight"),
        (["generate", "--model", "m", "--prompts", "Hi there", "--prompts", "p.jsonl"], "--prompts: 'Hi there' is a"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line(
    arguments: list[str],
    said: str,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kedge(monkeypatch, *arguments) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {said}")
    assert output.count("\n") == 1
    assert calls == []


def test_an_option_without_its_value_is_not_called_unknown(monkeypatch, capsys) -> None:
    assert kedge(monkeypatch, "reward", "--model") == 2
    assert "option '--model' requires an argument; see kedge reward -h" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_a_stages_options_are_those_of_its_plan_and_its_sweep(command: str) -> None:
    own = {"--resume", "--allow-changes", "--anyway"}  # of a run that has been, and of a run that is planned too large
    own |= {"--seed", "--push", "--strict"} if command == "sweep" else set()
    for stage in ("sft", "reward", "critic", "ppo"):
        run, other = (
            {option for each in _params(path) for option in each.opts} for path in ([stage], [command, stage])
        )
        assert run - own <= other


def _params(path: list[str]) -> list[Any]:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command.params


def test_rewards_have_weights(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kedge(monkeypatch, "ppo", "--model", "m", "--prompts", "p", "--reward", "f.py:g=2.0", "--reward", "rm")
    assert [(term.source, term.weight) for term in calls[0][1].reward] == [("f.py:g", 2.0), ("rm", 1.0)]


def test_a_path_may_contain_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    Path("lr=1/f.py").touch()
    assert weighted_rewards(["lr=1", "lr=1/f.py:g", "lr=1/f.py:g=0.5"]) == [
        "lr=1",
        "lr=1/f.py:g",
        {"source": "lr=1/f.py:g", "weight": 0.5},
    ]
    for wrong in ("f.py:g=", "=2", "f.py:g=nan"):
        with pytest.raises(ConfigError, match="is a weight and must be a number"):
            weighted_rewards([wrong])


@pytest.mark.parametrize(
    ("prompt", "is_text"),
    [
        ("Once upon a time", True),
        ("What?", True),
        ("Grüße!", True),
        ("hello", True),
        ("and so on ...", True),
        ("He/she?", True),
        ("reasoning-gym:chain_sum,size=10", False),
        ("folder:train", False),
        ("a/b/c", False),
        ("folder/", False),
        ("prompts.txt", False),
        ("org/name", False),
        ("org/name:config:train", False),
        ("prompts.jsonl", False),
        ("data/my prompts.jsonl", False),
        ("/no/such file", False),
        ("a file that exists", False),
    ],
)
def test_a_prompt_is_a_text_if_it_can_be_no_name(
    prompt: str, is_text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file that exists").touch()
    assert literal_prompts([prompt]) == ([prompt] if is_text else None)


def test_texts_reach_the_pipeline(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[Any] = []
    for stage in ("generate", "evaluate"):
        module, _, function = stages()[stage].run.partition(":")
        monkeypatch.setattr(sys.modules[module], function, lambda config, prompts: given.append(prompts))
        flags = ["--model", "m", "--prompts", "A boat", "--prompts", "A rope", "evaluate.judge=f.py:g"]
        assert kedge(monkeypatch, stage, *flags) == 0
        assert capsys.readouterr().err.startswith("--prompts 'A boat' and 1 more")
    assert given == [["A boat", "A rope"]] * 2


@pytest.mark.parametrize(
    "command", [[], ["config"], ["config", "explain"], *([stage] for stage in STAGES), ["watch"], ["plan", "ppo"]]
)
def test_help_is_short_of_types(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kedge", *command, "-h"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "Usage: kedge" in shown
    assert "bool>" not in shown
    assert "list[" not in shown


CRITICS = ("auto", "shared", "detached", "readout", "separate", "frozen_attention", "frozen", "none", "privileged")


@pytest.mark.parametrize(
    ("incomplete", "stage", "expected"),
    [
        ("num_up", "ppo", ["num_updates=", "num_updates=200"]),  # two, so that no shell adds a space behind `=`
        ("clip_range", "ppo", ["clip_range=", "clip_range_high="]),
        ("policy_loss=cl", "ppo", ["policy_loss=clipped"]),
        ("ppo.critic=", None, [f"ppo.critic={kind}" for kind in CRITICS]),
        ("runtime.strict=", None, ["runtime.strict=true", "runtime.strict=false"]),
        ("clip_range", "sft", []),
        ("num_pr", "rlhf", []),  # ambiguous
        ("nothing=", "ppo", []),
    ],
)
def test_what_a_shell_offers(incomplete: str, stage: str | None, expected: list[str]) -> None:
    assert [text for text, _ in completions(incomplete, stage)] == expected


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        ("kedge pp", "1", ["ppo"]),
        ("kedge ppo --pol", "2", ["--policy"]),
        ("kedge ppo num_up", "2", ["num_updates=", "num_updates=200"]),
        ("kedge ppo policy_loss = cl", "4", ["clipped"]),  # bash splits at `=`
    ],
)
def test_bash_completes(
    words: str, at: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kedge"])
    for name, value in {"COMP_WORDS": words, "COMP_CWORD": at, "_KEDGE_COMPLETE": "complete_bash"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == expected


def test_the_fields_in_the_help_are_settings_of_every_stage() -> None:
    [argument] = [each for each in get_args(Overrides) if isinstance(each, ArgumentInfo)]
    found = re.search(r"set: (\w+)=\w+, or ([\w.]+)=", str(argument.help))
    assert found
    assert {full_name(found[1], stage) for stage in stages()} == {found[2]}
