"""The command line: what it passes to the stages, how it fails, and that help is instant."""

import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kedge.cli import main
from kedge.config import PRESETS, Config, load_config, presets_of, resolved_yaml, with_values
from kedge.config.explain.describe import section_type
from kedge_base.errors import ConfigError, ModelError
from kedge_base.packages import PACKAGES
from kedge_base.stage import find_stage, stages
from kedge_base.version import __version__

STAGES = ("sft", "reward", "critic", "ppo", "control", "rlhf", "generate", "evaluate")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace the stages by functions that record their calls."""
    recorded: list[Any] = []
    for stage in STAGES:
        name, _, function = stages()[stage].run.partition(":")
        module = types.ModuleType(name)
        setattr(module, function, lambda config, stage=stage, **_: recorded.append((stage, config)))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("kedge.runs.names.check_names", lambda *_: None)
    # Before a run it is planned, from the stages' own modules.
    before = types.ModuleType("kedge_plan.before")
    setattr(before, "plan_before", lambda *_, **__: None)  # noqa: B010
    setattr(before, "plan_chain_before", lambda *_, **__: {})  # noqa: B010
    monkeypatch.setitem(sys.modules, before.__name__, before)
    demo = types.ModuleType("kedge_lab.demo.main")
    setattr(demo, "run_demo", lambda out, seed: recorded.append(("demo", out, seed)))  # noqa: B010
    monkeypatch.setitem(sys.modules, demo.__name__, demo)
    monkeypatch.chdir(tmp_path)
    return recorded


def kedge(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kedge", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


COMMANDS = {
    "sft": ["--model", "m", "--data", "d.jsonl"],
    "reward": ["--model", "m", "--data", "c.jsonl"],
    "critic": ["--model", "m", "--prompts", "p.jsonl", "--reward", "rm"],
    "ppo": ["--model", "m", "--prompts", "p.jsonl", "--reward", "rm", "--reward", "f.py:g"],
    "control": ["--env", "CartPole-v1"],
    "rlhf": ["--model", "m", "--demonstrations", "d", "--comparisons", "c", "--prompts", "p", "--reward", "f.py:g"],
    "generate": ["--model", "m", "--prompts", "p", "--reward", "f.py:g"],
    "evaluate": ["--model", "m", "--prompts", "p", "--against", "other", "--judge", "rm"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_gets_its_configuration(stage: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*COMMANDS[stage], "--seed", "7", "--out", "run"]
    assert kedge(monkeypatch, stage, *flags, "ppo.clip_range=0.1") == 0
    [(called, config)] = calls
    assert called == stage
    assert isinstance(config, Config)
    started_from = config.control.env if stage == "control" else config.model
    assert started_from == ("CartPole-v1" if stage == "control" else "m")
    assert (config.runtime.seed, config.out, config.ppo.clip_range) == (7, "run", 0.1)


@pytest.mark.parametrize("stage", ["sft", "reward", "critic", "ppo", "rlhf"])
def test_every_stage_that_trains_can_be_strict(stage: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in ([], ["--strict"], ["runtime.strict=true"]):
        kedge(monkeypatch, stage, *COMMANDS[stage], *flags)
    assert [config.runtime.strict for _, config in calls] == [False, True, True]


def test_data_means_what_the_stage_learns_from(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("sft", "reward", "ppo", "evaluate"):
        kedge(monkeypatch, stage, *COMMANDS[stage])
    sft, reward, ppo, evaluate = (config for _, config in calls)
    assert sft.data.demonstrations == ["d.jsonl"]
    assert reward.data.comparisons == ["c.jsonl"]
    assert [term.source for term in ppo.reward] == ["rm", "f.py:g"]
    assert (evaluate.evaluate.against, evaluate.evaluate.judge) == ("other", "rm")


@pytest.mark.parametrize("stage", ["ppo", "rlhf", "generate"])
def test_every_stage_that_scores_takes_rewards(stage: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kedge(monkeypatch, stage, *COMMANDS[stage], "--reward", "g.py:h") == 0
    assert [term.source for term in calls[0][1].reward][-2:] == ["f.py:g", "g.py:h"]


def test_file_preset_overrides_and_flags_together(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text("model: from-file\ndata: {prompts: p}\nreward: rm\nppo: {kl_coef: 0.3, gamma: 0.9}\n")
    arguments = ["--config", "run.yaml", "--preset", "ziegler", "ppo.gamma=0.8", "--model", "from-flag"]
    assert kedge(monkeypatch, "ppo", *arguments) == 0
    [(_, config)] = calls
    assert (config.model, config.ppo.kl_coef, config.ppo.gamma) == ("from-flag", 0.3, 0.8)
    assert config.ppo.kl_control.horizon == 10_000


def test_several_presets_are_merged_and_their_conflicts_said(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    presets = ["--preset", "grpo", "--preset", "small-cpu"]
    assert kedge(monkeypatch, "ppo", *COMMANDS["ppo"], *presets, "rollout.num_prompts=8") == 0
    [(_, config)] = calls
    values = (config.ppo.advantage.name, config.ppo.learning_rate, config.rollout.num_prompts)
    assert values == ("grpo", 1e-4, 8)
    line = "presets differ, and the later one counts: ppo.num_epochs=4 as in small-cpu (1 in grpo)\n"
    for command in ("show", "validate", "schedule"):
        assert kedge(monkeypatch, "config", command, *presets, "rollout.num_prompts=8") == 0
        assert capsys.readouterr().err == line


def test_entry_points_of_an_earlier_version_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clone that was pulled and not installed again lacks the commands of other packages."""
    monkeypatch.setattr("kedge.cli.command.registered", lambda group: {})
    assert kedge(monkeypatch, "doktor", "runs/ppo") == 2
    assert "kedge is installed in part: install it again, with pip" in capsys.readouterr().err


def test_a_resumed_run_takes_no_further_preset(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(
        resolved_yaml(load_config(None, ["model=m", "prompts=p", "reward=rm"], preset="small-cpu", stage="ppo"))
    )
    assert kedge(monkeypatch, "ppo", "--resume", "run", "--preset", "grpo") == 2
    assert capsys.readouterr().err.startswith("error: preset grpo would have no effect: run/config.yaml sets all of")
    assert kedge(monkeypatch, "ppo", "--resume", "run", "--preset", "small-cpu") == 0
    assert calls[0][1].preset == ["small-cpu"]
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert kedge(monkeypatch, "ppo", "--resume=~/run") == 0
    assert kedge(monkeypatch, "ppo", "--config=~/run/config.yaml", "--out", "other") == 0
    assert [config.out for _, config in calls[1:]] == ["~/run", "other"]
    assert kedge(monkeypatch, "ppo", "--resume", "run", "--out", "./run") == 0
    for other in (["--out", "other"], ["out=other"]):
        assert kedge(monkeypatch, "ppo", "--resume", "run", *other) == 2
        said = capsys.readouterr().err
        assert said == "error: --resume run continues the run in its folder, not in other; leave out --out\n"


def test_a_moved_run_starts_from_the_models_in_its_folder(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("moved").mkdir()
    models = [f"runs/old/in_memory_models/{name}" for name in ("model", "reward")]
    started = load_config(None, [f"model={models[0]}", "out=runs/old", "data.prompts=[runs/old.jsonl]"])
    started = with_values(started, {"reward": [models[1], "runs/other/reward"]})
    Path("moved/config.yaml").write_text("# stage: ppo\n" + resolved_yaml(started))
    for resume in (["--resume", "./moved"], ["--config", "moved/config.yaml", "--out", "./moved", "--resume", "auto"]):
        assert kedge(monkeypatch, "ppo", *resume) == 0
        config = calls[-1][1]
        assert config.model == "./moved/in_memory_models/model"
        assert [each.source for each in config.reward] == ["./moved/in_memory_models/reward", "runs/other/reward"]
        assert (config.out, config.data.prompts) == ("./moved", ["runs/old.jsonl"])


def test_a_run_of_another_stage_is_named_before_what_this_stage_needs(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("# stage: sft\n" + resolved_yaml(load_config(None, ["model=m", "out=run"])))
    for resume in (["--resume", "run"], ["--resume", "auto", "--model", "m", "--out", "run"]):
        assert kedge(monkeypatch, "ppo", *resume) == 2
        assert capsys.readouterr().err == "error: run is a run of kedge sft, not of ppo\n"


def test_without_out_the_run_claims_a_folder_and_a_taken_one_is_refused_at_once(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge(monkeypatch, "sft", *COMMANDS["sft"]) == 0
    assert calls[-1][1].out is None  # two runs that start at once: tests/runs/test_claim.py
    Path("taken").mkdir()
    Path("taken/metrics.jsonl").touch()
    assert kedge(monkeypatch, "sft", *COMMANDS["sft"], "--out", "taken") == 2
    assert capsys.readouterr().err == "error: taken is not empty; choose another --out, or empty it\n"


def test_demo_takes_folder_and_seed(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kedge(monkeypatch, "demo", "--out", "d", "--seed", "2") == 0
    assert calls == [("demo", Path("d"), 2)]


@pytest.mark.parametrize("stage", [*STAGES, "demo"])
def test_a_folder_that_holds_something_is_refused(
    stage: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/kept").touch()
    assert kedge(monkeypatch, stage, *COMMANDS.get(stage, []), "--out", "run") == 2
    assert capsys.readouterr().err == "error: run is not empty; choose another --out, or empty it\n"
    assert calls == []


@pytest.mark.parametrize("stage", [*STAGES, "demo"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(
    stage: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge(monkeypatch, stage, *COMMANDS.get(stage, []), "--out", "/dev/null/run") == 2
    assert capsys.readouterr().err == "error: /dev/null/run cannot be created: /dev/null is not a folder\n"
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ppo"], "kedge ppo needs model: pass --model, or set it in the configuration"),
        (["ppo", "--model", "m"], "kedge ppo needs data.prompts: pass --prompts,"),
        (["ppo", "--model", "m", "--prompts", "p"], "kedge ppo needs reward: pass --reward,"),
        (["reward", "--model", "m"], "kedge reward needs data.comparisons: pass --comparisons,"),
        (
            ["rlhf", "--model", "m", "--demonstrations", "d"],
            "kedge rlhf needs data.comparisons: pass --comparisons, or rlhf.labeler to compare responses first, or set",
        ),
        (["sft", "--model", "m"], "kedge sft needs data.demonstrations: pass --demonstrations,"),
        (["evaluate", "--model", "m", "--prompts", "p"], "kedge evaluate needs evaluate.judge: pass --judge,"),
        (["ppo", *COMMANDS["ppo"], "ppo.ptx_coef=27.8"], "ppo.ptx_coef=27.8 needs texts: set data.pretraining"),
        (["rlhf", *COMMANDS["rlhf"], "rlhf.num_rounds=2"], "rlhf.num_rounds=2 needs rlhf.labeler"),
        (["ppo", "ppo.clip=1"], "ppo.clip is not a field; did you mean ppo.clip_range?"),
        (["ppo", "--config", "none.yaml"], "none.yaml: cannot be read"),
        (["sft", "--preset", "best"], "preset 'best' does not exist"),
        (["sft", "--preset", "grpo,small-cpu"], "preset 'grpo,small-cpu' does not exist; give --preset once for each"),
        (["sft", "--config", "a.yaml", "--config=b.yaml"], "--config is given twice; give it once"),
        (["sft", *COMMANDS["sft"], "--policy", "other"], "--model and --policy are the same option; give one of them"),
        (["plan", "sft", "--model", "a", "--model", "b"], "--model is given twice; give it once"),
        (["sweep", "ppo", *COMMANDS["ppo"], "data.prompts=a,b"], "data.prompts is swept, and is set once more"),
        (["sweep", "ppo", *COMMANDS["ppo"], "ppo.reference=../base"], "nothing varies"),
        (["sweep", "ppo", *COMMANDS["ppo"], "gamma=0,1", "ppo.gamma=0,1"], "gamma is swept, and is set once more"),
        (["sweep", "ppo", *COMMANDS["ppo"], "gamma=0,1", "gamma=0,1"], "gamma is swept, and is set once more"),
        (["sweep", "ppo", *COMMANDS["ppo"], "gamma=0,1", "ppo.gamma=1"], "gamma is swept, and is set once more"),
        (["sweep", "ppo", *COMMANDS["ppo"], "gamma=0,1", "--out", ""], "--out is empty text; give a folder's name"),
        (["chat", "m", "--web", "--labels", ""], "--labels is empty text; give a folder's name"),
        (["config", "explain", "ppo.clipp"], "ppo.clipp is not a field"),
        (["config", "validate", "--stage", "dpo"], "stage 'dpo' does not exist"),
        (["config", "presets", "best"], "preset 'best' does not exist"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kedge(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {said}")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert calls == []


def test_a_reward_models_base_stands_in_for_the_model(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kedge(monkeypatch, "reward", "--data", "c", "reward_model.base=b") == 0
    assert calls[0][1].reward_model.base == "b"


@pytest.mark.parametrize(("error", "status"), [(ModelError("no weights in m"), 2), (KeyboardInterrupt(), 130)])
def test_how_a_pipeline_ends(
    error: BaseException, status: int, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Config, **_: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["kedge.stages.sft"], "run_sft", fail)
    assert kedge(monkeypatch, "sft", *COMMANDS["sft"]) == status


def test_a_defect_keeps_its_traceback(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Config, **_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["kedge.stages.sft"], "run_sft", fail)
    monkeypatch.setattr(sys, "argv", ["kedge", "sft", *COMMANDS["sft"]])
    with pytest.raises(ZeroDivisionError):
        main()


def test_an_unknown_flag_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kedge(monkeypatch, "ppo", "--bogus") == 2


@pytest.mark.parametrize(
    ("command", "listed"),
    [(["ppo"], presets_of("ppo")), (["control"], presets_of("control")), (["config", "show"], PRESETS)],
    ids=["ppo", "control", "config show"],
)
def test_the_help_lists_the_presets_that_the_command_takes(command, listed, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "2000")
    assert kedge(monkeypatch, *command, "--help") == 0
    assert f"Preset: {', '.join(listed)}." in capsys.readouterr().out


@pytest.mark.parametrize("command", [[name] for name in stages()] + [["plan", "ppo"], ["sweep", "ppo"]], ids="-".join)
def test_the_help_lists_the_sections_that_the_command_reads(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "2000")
    assert kedge(monkeypatch, *command, "--help") == 0
    shown = capsys.readouterr().out
    listed = re.search(r"kedge config explain SECTION, for ([\w, ]+)\.", shown)[1].split(", ")
    assert {name for group in find_stage(command[-1]).sections for name in group} <= {*listed}
    assert ("judge" in listed) == ("openai:MODEL@URL" in shown)
    assert all(section_type(name) for name in listed)


def test_presets_are_listed_in_columns(monkeypatch, capsys):
    assert kedge(monkeypatch, "config", "presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index(preset.about) for line, preset in zip(lines, PRESETS.values(), strict=True)}) == 1


def test_config_show_prints_what_config_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge(monkeypatch, "config", "show", "--preset", "ziegler", "ppo.learning_rate=3e-6") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["ppo"]["learning_rate"] == 3e-6
    assert shown["ppo"]["kl_controller"]["ziegler"]["target"] == 6
    assert Config.model_validate(shown).preset == ["ziegler"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], f"kedge {__version__}"),
        (["config", "validate", "--preset", "tldr-n+"], "The configuration is valid."),
        (["config", "explain", "ppo.kl_coef"], "score per nat"),
        (["config", "explain"], "rollout"),
        (["config", "schedule", "--num-prompts", "100"], "passes over them"),
        (["config", "schedule", "--num-prompts", "100", "model=m", "data.prompts=p.jsonl"], "passes over them"),
        (["config", "schedule", "--num-prompts", "100", "evaluate.judge=f.py:g"], "passes over them"),
        (["config", "presets"], "small-cpu"),
        (["config", "presets", "stiennon"], "ppo.learning_rate: 1.5e-05"),
    ],
)
def test_what_is_printed(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge(monkeypatch, *arguments) == 0
    assert said in capsys.readouterr().out


WORKERS = sorted(
    {
        name
        for package in PACKAGES
        for path in (Path(__file__).parents[1] / "src" / package).rglob("*.py")
        for name in re.findall(r'WorkerProcess\("([\w.]+)"', path.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize("name", ["kedge.cli", *WORKERS])
def test_what_starts_often_imports_no_torch(name: str) -> None:
    code = f"import sys, {name}; print({{'torch', 'transformers', 'datasets', 'numpy'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
    assert len(WORKERS) == 3


def test_nothing_is_collected_at_the_exit_because_that_takes_long_with_torch() -> None:
    cycle = "class Cycle:\n    def __del__(self): print('collected')\ncycle = Cycle(); cycle.self = cycle; del cycle"
    code = (
        f"import gc, sys; gc.disable()\n{cycle}\nfrom kedge.cli import main; sys.argv = ['kedge', '--version']; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("kedge ")
    assert "collected" not in result.stdout


def test_the_real_command() -> None:
    command = [sys.executable, "-m", "kedge"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert all(name in helped.stdout for name in (*STAGES, "config", "demo"))
    failed = subprocess.run(
        [*command, "config", "show", "ppo.clip_range=-1"], capture_output=True, text=True, check=False
    )
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "error: ppo.clip_range must be a number > 0 and < 1; it is -1\n"


def test_a_trained_critic_is_what_ppo_starts_from(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`critic` is a section, a field of PPO and an option; a folder may have the name of a kind as well."""
    for flags in (["--critic", "runs/critic"], ["--critic", "separate"], ["critic=separate"]):
        kedge(monkeypatch, "ppo", *COMMANDS["ppo"], *flags)
    kedge(monkeypatch, "critic", *COMMANDS["critic"], "kind=shared", "gamma=0.9", "num_responses=3")
    first, second, third, stage = (config for _, config in calls)
    assert (first.ppo.critic_init, first.ppo.critic) == ("runs/critic", "auto")
    assert second.ppo.critic == third.ppo.critic == "separate"
    found = (stage.critic.kind, stage.ppo.gamma, stage.critic.num_responses, stage.rollout.num_responses)
    assert found == ("shared", 0.9, 3, 1)
    Path("separate").mkdir()
    assert kedge(monkeypatch, "ppo", *COMMANDS["ppo"], "--critic", "separate") == 2


def test_a_sweep_of_control_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(trials: Any, stage: str, *_: Any, **__: Any) -> Any:
        seen.append((stage, [(dict(each.values), each.config.control.env) for each in trials]))
        return SimpleNamespace(failed=[])

    monkeypatch.setattr("kedge_lab.sweep.run_sweep", run)
    assert (
        kedge(monkeypatch, "sweep", "control", "--env", "CartPole-v1", "learning_rate=1e-3,3e-4", "--seeds", "1") == 0
    )
    assert seen == [("control", [({"learning_rate": rate}, "CartPole-v1") for rate in ("1e-3", "3e-4")])]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WORLD_SIZE", "two", "at least 1"),
        ("WORLD_SIZE", "-2", "at least 1"),
        ("RANK", "1.5", "from 0 to 1"),
        ("RANK", "2", "from 0 to 1"),
        ("LOCAL_RANK", "a", "at least 0"),
        ("MASTER_PORT", "99999", "from 1 to 65535"),
    ],
)
def test_variables_of_a_rank_that_are_wrong_are_one_line_which_torchrun_repeats(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    expected: str,
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), name: value}
    for each in given.items():
        monkeypatch.setenv(*each)
    assert kedge(monkeypatch, "ppo", "--model", "m") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: the environment variable {name} is {value!r}; expected a whole number {expected}, ")
    assert line.count("\n") == 1
    if name != "WORLD_SIZE":
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

        failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
        assert f"traceback : {line}" in str(ChildFailedError("kedge", {0: failure}))


def test_more_ranks_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.ranks import start

    for each in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(*each)
    monkeypatch.setattr(start.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(start.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match="LOCAL_RANK is 2, and the last GPU of this machine is number 1: start one rank per"
    ):
        start.join_ranks()


def test_a_removed_current_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert kedge(monkeypatch, "config", "presets") == 2
    assert capsys.readouterr().err == "error: the current folder has been removed; change to another one\n"


def test_no_folder_for_temporary_files_is_one_line(tmp_path: Path) -> None:
    """A read-only root: a library asks for the folder when it is imported."""
    script = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/nowhere']; "
    script += "from kedge.cli import main; main()"
    command = [sys.executable, "-c", script, "generate", "--model", "m", "--prompts", "A boat.", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    line = "error: no folder for temporary files can be written; set TMPDIR to one\n"
    assert (done.returncode, done.stderr[-len(line) :]) == (2, line)
    assert "Traceback" not in done.stderr
