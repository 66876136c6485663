"""The whole demo in a few seconds, with too little training to learn anything."""

import json
from pathlib import Path

import pytest

import kedge
from kedge_base.errors import OutputError
from kedge_base.run_folder.record_format import read_metrics
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import GoldScores, sample_summaries
from kedge_lab.demo.main import collect_comparisons, run_demo, start_from_scratch
from kedge_lab.demo.world import Post, SummaryScores, World

SMALL = {
    "NUM_TOKENIZER_TEXTS": 60,
    "NUM_DEMONSTRATIONS": 40,
    "NUM_COMPARISONS": 30,
    "NUM_SAMPLED_COMPARISONS": 10,
    "NUM_NORMALIZATION": 8,
    "NUM_PROMPTS": 16,
    "NUM_HELD_OUT": 6,
    "NUM_CURVE_POSTS": 4,
    "CURVE_EVERY": 2,
}


@pytest.fixture
def small_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(recipe, name, value)
    for name, value in {"rollout.num_prompts": 8, "ppo.num_updates": 4, "ppo.num_epochs": 1}.items():
        monkeypatch.setitem(recipe.SETTINGS, name, value)
    for name, value in {"ppo.num_updates": 4, "ppo.num_epochs": 1}.items():
        monkeypatch.setitem(recipe.WITHOUT_KL_SETTINGS, name, value)


@pytest.mark.usefixtures("small_recipe")
def test_the_demo_runs_from_scratch_to_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_demo(tmp_path / "demo", seed=3)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["num_posts"] == 6
    for name in ("win_rate_over_sft", "win_rate_over_references"):
        assert 0 <= summary[name]["low"] <= summary[name]["value"] <= summary[name]["high"] <= 1
    assert set(summary["gold_quality"]) == {"sft", "ppo", "references"}
    assert 0 <= summary["reward_model_accuracy"] <= 1
    for curve in (summary["curves"][name] for name in ("ppo", "ppo-without-kl")):
        assert [point["update"] for point in curve] == [1, 2, 4]
    assert summary["kl"] == read_metrics(tmp_path / "demo" / "ppo")[-1]["objective/kl"]
    assert summary["explained_variance"] == read_metrics(tmp_path / "demo" / "ppo")[-1]["value/explained_variance"]
    assert summary["seconds"] > 0
    judged = [row["score/gold"] for row in read_metrics(tmp_path / "demo" / "ppo")]
    assert len(judged) == 4
    assert all(0 < score < 1 for score in judged)

    printed = capsys.readouterr().out
    for post in result.posts[:3]:
        assert post.title in printed
    assert "PPO policy" in printed


@pytest.mark.usefixtures("small_recipe")
def test_the_annotator_sees_both_people_and_the_policy(tmp_path: Path) -> None:
    world = start_from_scratch(tmp_path, 0)
    comparisons = collect_comparisons(world, tmp_path)
    assert SMALL["NUM_COMPARISONS"] < len(comparisons) <= SMALL["NUM_COMPARISONS"] + SMALL["NUM_SAMPLED_COMPARISONS"]
    assert all(comparison.prompt.endswith("TL;DR:") for comparison in comparisons)


@pytest.mark.usefixtures("small_recipe")
def test_summaries_are_drawn_by_seed_and_draw(tmp_path: Path) -> None:
    world = start_from_scratch(tmp_path, 0)
    posts = world.posts(3)
    again = sample_summaries(tmp_path, world, posts)
    assert sample_summaries(tmp_path, world, posts) == again
    assert sample_summaries(tmp_path, world, posts, draw=1) != again


def test_only_the_annotator_and_the_gold_evaluation_use_the_judge() -> None:
    source = Path(kedge.__file__).parent.parent
    users = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if _uses_the_judge(path)}
    assert users == {"kedge_lab/demo/world.py", "kedge_lab/demo/gold_evaluation.py"}


def _uses_the_judge(path: Path) -> bool:
    return "judge_summary" in path.read_text(encoding="utf-8")


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OutputError):
        run_demo(tmp_path)


def test_win_rates_and_gains_of_scores_made_by_hand() -> None:
    texts = ["", "", "", ""]
    full, half = SummaryScores(1, 1, 1, 1), SummaryScores(0.5, 1, 1, 1)
    better, worse = GoldScores(texts, [full, full, half, half]), GoldScores(texts, [half, full, half, full])
    assert better.win_rate_over(worse).value == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)
    best = GoldScores(texts, [full] * 4)
    assert best.gain_over(GoldScores(texts, [half] * 4)) == pytest.approx(
        {"coverage": 0.275, "accuracy": 0, "coherence": 0, "brevity": 0}
    )
    assert best.quality.value == pytest.approx(1)


def test_long_posts_are_cut_at_a_paragraph_and_keep_their_facts(tmp_path: Path) -> None:
    world = start_from_scratch(tmp_path, 1)
    whole, cut = 0, 0
    for post in world.posts(200):
        shown = world.prompt(post).text.partition("POST: ")[2].removesuffix("\n\nTL;DR:")
        assert post.text.startswith(shown)
        assert all(value in shown for value in _facts(post))
        cut += shown != post.text
        whole += shown == post.text
    assert cut > 5 < whole


def _facts(post: Post) -> list[str]:
    return list(post.facts.values())


def test_the_held_out_posts_are_others(tmp_path: Path) -> None:
    assert World(0, "held-out").posts(5) != World(0).posts(5)
