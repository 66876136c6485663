"""The documentation is correct: commands parse, examples run, and everything it names exists."""

import json
import re
import shlex
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kedge.api
import kedge_control.stage.run
from kedge.cli import main
from kedge.config import Config, config_from_settings, load_config
from kedge.config.explain.describe import all_fields, find_field, section_type
from kedge.data import read_rows
from kedge.data.fields import Role
from kedge.rewards import FunctionReward, RewardTerm
from kedge.stages.judges import PairwiseJudge
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.run_folder.record_format import read_metrics
from kedge_base.stage import stages
from kedge_inspect.verify import Verification
from kedge_people.labels import Item, write_items
from tests.tasks.environments.worlds import Guess
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
}
SECTIONS = [name for name in Config.model_fields if section_type(name)]
OVERRIDE = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+=[^\s=]+")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a language, with their pages."""
    for page, text in PAGES.items():
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield page, match[1]


def spans(text: str) -> list[str]:
    """Inline code, without fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def commands() -> list[tuple[str, ...]]:
    lines = [line for _, block in blocks("bash") for line in block.splitlines()]
    lines += [span for text in PAGES.values() for span in spans(text)]
    return sorted({tuple(shlex.split(line, comments=True)) for line in lines if line.startswith("kedge ")})


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pipelines that do nothing, and the configuration files that the commands name, in a new working directory."""
    # First of all, because these import parts of the stages.
    monkeypatch.setattr("kedge_plan.plan.plan_machine", lambda *_, **__: "")
    monkeypatch.setattr("kedge.runs.names.check_names", lambda *_: None)
    monkeypatch.setattr("kedge.cli.stages.imported", lambda _: lambda *_, **__: None)
    monkeypatch.setattr("kedge_lab.demo.main.run_demo", lambda *_, **__: None)
    monkeypatch.setattr("kedge_inspect.diagnosis.examine_run", lambda folder, **_: {})
    monkeypatch.setattr("kedge_inspect.api.verify_run", lambda _: Verification([], ""))
    monkeypatch.setattr("kedge_inspect.api.service", lambda _: lambda *_: Verification([], ""))
    monkeypatch.setattr("kedge_inspect.report.write_report", lambda *_, **__: "report.html")
    monkeypatch.setattr("kedge_lab.sweep.run_sweep", lambda *_, **__: SimpleNamespace(failed=[]))
    # It would write to the home directory of whoever runs the tests.
    monkeypatch.setattr("typer.completion.install", lambda **_: ("bash", tmp_path / "kedge.sh"))
    page = nullcontext(SimpleNamespace(url="", wait=lambda: None))
    monkeypatch.setattr("kedge_inspect.live.has_run", lambda *_: True)
    monkeypatch.setattr("kedge_inspect.live.serve_run", lambda *_, **__: page)
    monkeypatch.setattr("kedge.runs.preview.preview_data", lambda *_, **__: "")
    monkeypatch.setattr("kedge_hub.pushing.push_model", lambda *_, **__: "")
    monkeypatch.setattr("kedge.models.saving.merge", lambda *_, **__: "")
    monkeypatch.setattr("kedge_lab.chat.load_chat", lambda *_, **__: None)
    monkeypatch.setattr("kedge_lab.chat.chat_on_terminal", lambda *_: None)
    monkeypatch.setattr("kedge_lab.chat.chat_server", lambda *_, **__: page)
    links = nullcontext(SimpleNamespace(urls={}, wait=lambda: None))
    items = [Item("1", "prompt", ("a", "b"), ("model", "model"))]
    monkeypatch.setattr("kedge_people.commands.check_output", lambda _: tmp_path / "new")
    monkeypatch.setattr("kedge_people.items.sample_items", lambda *_, **__: items)
    monkeypatch.setattr("kedge_people.server.label_server", lambda *_, **__: links)
    monkeypatch.setattr("kedge_people.trace.trace", lambda *_, **__: [])
    example = next(block for page, block in blocks("yaml") if page == "docs/configuration.md")
    (tmp_path / "run.yaml").write_text(example, encoding="utf-8")
    (tmp_path / "run_grpo.sh").write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4\n", encoding="utf-8"
    )
    (tmp_path / "ppo.yaml").write_text("total_episodes: 1000\n", encoding="utf-8")
    (tmp_path / "train.py").write_text("PPOConfig(total_episodes=1000)\n", encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
@pytest.mark.usefixtures("stand_ins")
def test_every_command_parses(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    mentioned = len(command) == 2 and command[1] in (
        *stages(),
        "data",
        "doctor",
        "label",
        "push",
        "report",
        "sweep",
        "verify",
        "watch",
    )
    mentioned = mentioned or command[1:] in (("plan",), ("launch",), ("merge",), ("config", "from-verl"))
    if command[1] == "label" and not mentioned and "--out" not in command:  # it continues a folder
        Path(command[2]).mkdir(parents=True)
        write_items(Path(command[2]), [Item("1", "prompt", ("a", "b"), ("model", "model"))])
    monkeypatch.setattr(sys, "argv", [*command, "--help"] if mentioned else list(command))
    if "-o" in command:
        Path(command[command.index("-o") + 1]).unlink()  # it is to be written
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_every_make_target_exists() -> None:
    lines = [line for _, block in blocks("bash") for line in block.splitlines() if line.startswith("make ")]
    named = {target for line in lines for target in shlex.split(line, comments=True)[1:]}
    named |= {span.removeprefix("make ") for text in PAGES.values() for span in spans(text) if span.startswith("make ")}
    assert named <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("example", [block for _, block in blocks("yaml")])
def test_every_yaml_example_loads(example: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(example, encoding="utf-8")
    assert load_config(path) != Config()


# The loops of docs/own-loop.md run in test_custom_loop.py, the environments in test_other_libraries.py, the scripts of
# docs/from-trl.md in test_from_trl.py.
RUN_ELSEWHERE = ("docs/own-loop.md", "docs/episodes.md", "docs/from-trl.md")


@pytest.mark.parametrize("example", [block for page, block in blocks("python") if page not in RUN_ELSEWHERE])
def test_every_python_example_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kedge.api, "imported", lambda _: lambda config, **_: SimpleNamespace(model=config.out))
    played = SimpleNamespace(policy=lambda: SimpleNamespace(begin_episode=lambda: None, act=lambda observation: 0))
    monkeypatch.setattr(kedge_control.stage.run, "run_control", lambda config, **_: played)
    monkeypatch.setattr("kedge_lab.sweep.run_sweep", lambda *_, **__: None)
    monkeypatch.setattr("kedge_inspect.api.diagnose_run", lambda folder, **_: [])
    names: dict[str, Any] = {}
    exec(compile(example, "example", "exec"), names)  # examples from this repository
    for value in list(names.values()):
        if not isinstance(value, types.FunctionType) or value.__module__ in sys.modules:
            continue
        if "columns" in value.__code__.co_varnames:  # a reward or a judge
            judge = PairwiseJudge(value) if "first" in value.__code__.co_varnames else FunctionReward(value)
            judge.check(["letter", "messages"])


def examples(heading: str) -> list[dict[str, Any]]:
    section = PAGES["docs/data.md"].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```json[ a-z]*\n(.*?)```", section, re.DOTALL)
    return [json.loads(line) for line in block.splitlines()]


@pytest.mark.parametrize(
    ("heading", "role"),
    [("Demonstrations", "demonstrations"), ("Comparisons", "comparisons"), ("Prompts", "prompts")],
)
def test_every_row_is_read(heading: str, role: Role) -> None:
    rows = examples(heading)
    table = read_rows(rows, role, tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    assert (len(table.records), table.rejected) == (len(rows), [])


def test_tldr_posts_are_read() -> None:
    [demonstration, comparison] = examples("TL;DR posts")
    rules: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "template": "tldr"}
    [prompt] = read_rows([demonstration], "prompts", **rules).records
    assert prompt.text.startswith("SUBREDDIT: r/sailing\n\nTITLE: My rope broke\n\nPOST: It broke.")
    assert read_rows([demonstration], "demonstrations", **rules).records[0].completion == " rope broke, send help"
    assert len(read_rows([comparison], "comparisons", **rules).records) == 1


@pytest.mark.parametrize("page", PAGES)
def test_every_field_exists_and_every_setting_is_possible(page: str) -> None:
    for span in spans(PAGES[page]):
        named = re.findall(rf"(?<![\w./])((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)(?![\w./]*\()", span)
        named = [name for name in named if not name.endswith((".py", ".md", ".yaml", ".json", ".jsonl"))]
        assert [name for name in named if find_field(name) is None] == [], span
        if all(OVERRIDE.fullmatch(part) for part in span.split()):
            load_config(overrides=span.split())


def table_rows(page: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in PAGES[page].splitlines() if re.match(r"\| \d+ \|", line)]


def test_the_list_of_details_has_all_ppo_options_with_their_defaults() -> None:
    options = [span for row in table_rows("docs/algorithm.md") for span in spans(row[2])]
    assert [option for option in options if load_config(overrides=[option]) != Config()] == []
    listed = {option.partition("=")[0] for option in options}
    assert {name for name, _ in all_fields() if name.startswith("ppo.")} <= listed


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"\s+", "-", heading.strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_file_function_and_test_exists(page: str) -> None:
    text = PAGES[page]
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    targets = [((ROOT / page).parent / file if file else ROOT / page, anchor) for file, _, anchor in links]
    assert [file for file, _ in targets if not file.exists()] == []
    assert [anchor for file, anchor in targets if anchor and anchor not in anchors(file.read_text("utf-8"))] == []
    for span in spans(text):
        if test := re.fullmatch(r"(?:tests/)?([\w/]*test_\w+\.py)::(\w+)", span):
            assert f"def {test[2]}(" in (ROOT / "tests" / test[1]).read_text(encoding="utf-8"), span
        elif owner := re.fullmatch(r"([\w/]+/\w+\.py):(\w+)", span):
            folder = ROOT / "src" if owner[1].startswith("kedge_control/") else ROOT / "src" / "kedge"
            source = (folder / owner[1]).read_text(encoding="utf-8")
            assert re.search(rf"^(def|class) {owner[2]}\b", source, re.MULTILINE), span
        elif re.fullmatch(r"(src|tests|docs)/[\w./-]+", span):
            assert (ROOT / span).exists(), span


def test_no_page_contains_an_absolute_path() -> None:
    assert [page for page, text in PAGES.items() if re.search(r"(?<![\w.])/(home|root|tmp|work|Users)\b", text)] == []


def numbered() -> dict[int, set[int]]:
    """The sections of the list of details, with their row numbers."""
    parts = re.split(r"^## (\d+)\. .*$", PAGES["docs/algorithm.md"], flags=re.MULTILINE)[1:]
    rows = [{int(number) for number in re.findall(r"^(?:\| (\d+) \||(\d+)\. )", part, re.MULTILINE)
             for number in number if number} for part in parts[1::2]]  # fmt: skip
    return dict(zip(map(int, parts[::2]), rows, strict=True))


def test_every_citation_in_the_source_has_its_row() -> None:
    known = numbered()
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    cited = re.findall(r"spec (§[^;\n]*)", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    found = re.findall(r"(?:§|–)(\d+)(?:\.(\d+))?", " ".join(cited))
    assert len(found) > 50
    # A bare number after a dash is a row of the preceding section.
    wrong = [(section, row) for section, row in found if row and int(row) not in known.get(int(section), set())]
    assert wrong == []


def first_column(section: str) -> set[str]:
    return {name for line in section.splitlines() if line.startswith("|") for name in spans(line.split("|")[1])}


def metric_tables(heading: str) -> list[str]:
    """The documentation of a stage's metrics: the table of all, and that of bad values which no rule finds."""
    section = PAGES["docs/metrics.md"].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return section.split("\n### Bad values that no rule finds\n")


def documented(heading: str) -> set[str]:
    return first_column(metric_tables(heading)[0])


def test_every_metric_of_ppo_says_what_a_bad_value_means() -> None:
    metrics, bad = metric_tables("PPO")
    unwatched = "\n".join(row for row in metrics.splitlines() if "(doctor.md#" not in row)
    assert first_column(unwatched) <= first_column(bad) <= documented("PPO")


def test_every_page_that_the_source_names_exists() -> None:
    """What kedge prints, and the origin of a default, may name a page."""
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".tsv")]
    named = {
        name
        for path in sources
        for name in re.findall(r"\b(?:docs|bench|handbook)/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    missing = {name for name in named if not (ROOT / name).is_file()}
    assert missing <= {"docs/spec.md"}  # of git-lfs


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("models") / "policy"))


ROWS = [{"prompt": f"Deck {number}:", "completion": " the sea", "chosen": " sea", "rejected": " rope rope"}
        for number in range(6)]  # fmt: skip


def measured(folder: Path) -> set[str]:
    return {name for row in read_metrics(folder) for name in row} - {"update"}


def settings(stage: str, policy: str, folder: Path, **more: Any) -> Config:
    return config_from_settings(stage, {"model": policy, "out": str(folder), "runtime.report": False, **more})


def test_every_ppo_metric_is_documented(policy: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "The tide went out."}\n', encoding="utf-8")
    small = {
        "num_updates": 1,
        "num_prompts": 2,
        "num_responses": 2,
        "max_new_tokens": 4,
        "ptx_coef": 1.0,
        "pretraining": str(texts),
    }

    def vowels(completions: list[str]) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in text)) for text in completions]

    judge = RewardTerm(save_tiny_reward_model(tmp_path / "model"), weight=0.0, name="judging")
    small["micro_batch_tokens"] = "auto"
    small["schedules"] = {"ppo.clip_range": {1: 0.2}}
    small |= {"positive_nll_coef": 0.1, "policy_loss": {"dual_clip": 3.0}}
    small |= {"missing_eos_score": {"subtract": 1.0}}  # with one score for all, no group would have spread
    small |= {"advantage": "rloo_critic", "critic": "separate", "critic_learning_rate": 1e-3, "num_critic_epochs": 2}
    small |= {"num_updates": 2, "value_warmup_updates": 1}
    small |= {"eval_every": 1, "evaluate.judge": str(tmp_path / "model")}
    small |= {"critic_check": 1, "ppo.critic_check.size": [32, 4, 4]}
    config = settings("ppo", policy, tmp_path / "run", **small)
    run_ppo(config, prompts=["The boat"], eval_prompts=["A sailor", "The crew"], reward=[vowels, judge])
    found = measured(tmp_path / "run")
    assert found >= {"score/vowels", "score/judging"}
    found = {re.sub("vowels|judging|ppo.clip_range", "NAME", name) for name in found}
    # On CUDA; with ppo.value_loss=hl_gauss; with ppo.advantage=remax.
    elsewhere = {"memory/device", "value/outside_support", "reward/greedy_mean"}
    # With ppo.advantage=spo.
    elsewhere |= {"prompt/known", "prompt/variance_saved"}
    # With rollout.engine=vllm.
    elsewhere |= {"policy/sampler_k3", "policy/sampler_share", "rollout/restarts", "time/restarts"}
    elsewhere |= {f"policy/sampler_{of}_p{percent}" for of in ("ratio", "response") for percent in ("01", "50", "99")}
    # With an advantage that compares the responses to a prompt.
    elsewhere |= {"group/single"}
    # With ppo.critic=frozen.
    elsewhere |= {"value/frozen"}
    # With data.draw={evenly: 3}.
    elsewhere |= {"prompt/resting"}
    # With ppo.num_epochs below 1.
    elsewhere |= {"policy/trained_share"}
    # With ppo.importance_mask.
    elsewhere |= {"policy/sampler_masked"}
    # With rollout.max_staleness=1.
    elsewhere |= {"policy/sampler_truncated", "time/waiting_for_rollout", "time/rollout_waiting"}
    elsewhere |= {"time/publish", "time/publish_write"}
    # With ppo.policy_loss=kl_penalty_adaptive.
    elsewhere |= {"policy/surrogate_kl_coef"}
    # With a function that gives reasons.
    elsewhere |= {"verdict/NAME/REASON", "eval/verdict/NAME/REASON"}
    elsewhere |= {"response/length_right", "response/length_wrong"}
    # With rollout.missing_eos_score=mask.
    elsewhere |= {"response/masked"}
    # With a reward model and runtime.frozen_dtype=int8.
    elsewhere |= {"reward/rounding_error"}
    # With an environment; the second two with tools.
    played = settings("ppo", policy, tmp_path / "played", num_updates=1, num_prompts=2, max_new_tokens=9)
    run_ppo(played, prompts=["The boat"], environment=Guess)
    of_episodes = ("episode/", "time/environment", "reward/environment")
    episodes = {name for name in measured(tmp_path / "played") if name.startswith(of_episodes)}
    assert len(episodes) == 11
    elsewhere |= episodes | {"tools/calls", "tools/failed"}
    # With an environment that replaces the history, and an agent that changes answers.
    elsewhere |= {"episode/contexts", "episode/changed"}
    assert found | elsewhere == documented("PPO")


def test_the_documented_unit_of_the_value_loss_is_the_default() -> None:
    [unit] = re.findall(r"^\| `value/loss` \|[^|]*\| ([^|]*) \|", metric_tables("PPO")[0], re.MULTILINE)
    assert Config().ppo.value_unit == "returns_std"
    assert unit == "variance of the update's returns; score² with `ppo.value_unit=score`"


def test_every_metric_of_the_supervised_stages_is_documented(policy: str, tmp_path: Path) -> None:
    half = {"data.eval_fraction": 0.5, "batch_size": 2, "micro_batch_tokens": "auto"}
    run_sft(settings("sft", policy, tmp_path / "sft", **half), demonstrations=ROWS)
    run_reward(settings("reward", policy, tmp_path / "reward", **half), comparisons=ROWS)
    assert measured(tmp_path / "sft") == documented("SFT")
    assert measured(tmp_path / "reward") == documented("Reward model")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_screen_says_what_has_run_where(page: str) -> None:
    head = " ".join(PAGES[page].partition("```")[0].split())
    assert "Tested on CPUs, as one process and as [several]" in head
    assert re.search(r"\[on one GPU\]\((docs/)?benchmarks\.md#on-a-gpu\)", head)
