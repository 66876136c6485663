"""Runs of PPO on episodes of several turns."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.rollout.episodes import Episodes
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.trainer import Trainer
from kedge_base.errors import ConfigError, DataError, EnvError, RewardError
from kedge_base.importing import find_named
from kedge_base.run_folder.record_format import EVALUATIONS_FILE, read_json_lines, read_samples
from kedge_inspect.doctor import diagnose
from kedge_inspect.page.responses import shown_responses
from kedge_inspect.record import read_run
from tests.data.test_chat import R1, Family
from tests.data.test_turns import UNREAD, calling
from tests.forking import fork_context, forked_kedge
from tests.lab.evaluation.speakers import save_speaker
from tests.stages.ppo.test_ppo import configure, copies_at, metrics_without_times
from tests.tasks.environments import worlds
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

GAMES = [f"Game {number}. " for number in range(12)]
GUESS = f"{worlds.__file__}:Guess"
ROOMS = f"{worlds.__file__}:Rooms"
EPISODES = {
    "max_new_tokens": 40,
    "environment.source": GUESS,
    "environment.max_turns": 3,
    "environment.max_turn_tokens": 5,
    "missing_eos_score": None,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def weights(folder: Path):
    return load_file(folder / "model" / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    assert metrics_without_times(one) == metrics_without_times(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


def test_a_run_needs_no_other_reward_and_says_how_its_episodes_went(tmp_path, policy):
    rows = run_ppo(configure(policy, tmp_path / "run", **EPISODES), prompts=GAMES).metrics
    for row in rows:
        assert row["reward/score_mean"] == pytest.approx(row["score/Guess"], abs=1e-6)
        assert 0.25 <= row["score/Guess"] <= 1.75
        assert 1 <= row["episode/turns"] <= 3
        assert row["episode/completed"] + row["episode/max_turns"] == pytest.approx(1)
        assert row["response/length"] < row["episode/length"]
        assert row["time/environment"] > 0


@pytest.mark.parametrize("way", ["ppo", "own loop", "generate"])
def test_a_row_reaches_an_environment_as_it_was_read(tmp_path, policy, way):
    """A reward function gets None for a column that other rows have; an environment can tell that from its own None."""
    rows = [{"prompt": "One. ", "most": 3}, {"prompt": "Two. "}, {"prompt": "Three. ", "most": None}]
    opened = []
    scored = set()

    class Recording(worlds.Tuple):
        def reset(self, row):
            opened.append(dict(row))

    def reward(completions, most, **columns):
        scored.update(zip(columns["prompts"], most, strict=True))
        return [0.0] * len(completions)

    given = {"model": policy, "environment": Recording, "max_new_tokens": 8, "max_turns": 1, "out": tmp_path / "run"}
    training = {"num_prompts": 3, "num_updates": 1, "num_minibatches": 1, "missing_eos_score": None}
    if way == "generate":
        kedge.generate(prompts=rows, reward=reward, **given)
    elif way == "ppo":
        kedge.ppo(prompts=rows, reward=reward, **given, **training)
    else:
        with kedge.PpoTrainer(reward=reward, **given, **training) as trainer:
            trainer.update(trainer.sample(rows))
    assert all(row in rows for row in opened)
    assert all(row in opened for row in rows)
    assert scored == {("One. ", 3), ("Two. ", None), ("Three. ", None)}


class HalfCut:
    """Pays 5 for each of two turns, and after the first one cuts every other episode off."""

    def reset(self, row, seed):
        self.turns = 0
        self.cut = seed % 2 == 0

    def step(self, text):
        self.turns += 1
        return kedge.Step("", 5.0, terminated=self.turns == 2, truncated=self.cut)


def to_go(rewards, mask, values):
    returns = rewards.flip(-1).cumsum(-1).flip(-1)
    return returns - values, returns


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("advantage", [None, to_go])
def test_a_cut_off_episode_has_the_value_of_its_end_in_the_first_update_as_well(
    tmp_path, policy, critic, advantage, monkeypatch
):
    """A new critic's values start from the returns of the episodes that ended, before the value of any is read."""
    found = []
    monkeypatch.setattr(Trainer, "improve", lambda self, experience, improve=Trainer.improve, **given: (
        found.append(experience), improve(self, experience, **given)
    )[1])  # fmt: skip
    plain = {"whiten_advantages": False, "kl_coef": 0.0, "num_prompts": 12, "num_updates": 1, "ppo.critic": critic}
    config = configure(policy, tmp_path / "run", **EPISODES | {"environment.source": None} | plain)
    run_ppo(config, prompts=GAMES, environment=HalfCut, advantage=advantage)
    [experience] = found
    cut, mask = experience.rollout.cut_off, experience.action_mask
    assert cut.any()
    assert not cut.all()
    mean = float(experience.returns[~cut][mask[~cut]].mean())
    assert 5 < mean < 10
    assert experience.returns[cut][mask[cut]].tolist() == pytest.approx([5 + mean] * int(mask[cut].sum()), rel=1e-4)


@pytest.mark.parametrize("family", [{}, {"advantage": "rloo", "num_responses": 2, "num_prompts": 2}])
def test_the_penalty_for_no_stop_token_is_for_episodes_that_a_limit_ended(tmp_path, policy, family):
    settings = EPISODES | family | {"environment.max_turn_tokens": 2, "missing_eos_score": -7.0, "num_updates": 1}
    settings |= {"environment.source": None, "kl_coef": 0.0}
    [row] = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES, environment=Pays).metrics
    assert row["episode/completed"] == 1
    assert row["response/eos_rate"] < 1
    assert row["reward/score_mean"] == 5


class Pays:
    """Ends after one turn, whatever is said, and pays 5."""

    def reset(self, row, seed):
        return None

    def step(self, text):
        return kedge.Step("", 5.0, terminated=True)


def test_samples_have_both_sides_and_how_the_episode_ended(tmp_path, policy):
    more = {"num_samples": 8, "num_fixed_prompts": 1, "eval_every": 1, "ppo.eval_every.num_prompts": 2}
    settings = EPISODES | more | {"environment.max_turns": 2, "environment.max_turn_tokens": 3}
    run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES)
    samples = read_samples(tmp_path / "run")
    scores = {("completed", False): 1.0, ("completed", True): 1.25, ("max_turns", True): 0.5}
    for sample in samples:
        [place, said] = sample.get("foreign", [[0, ""]])[0]
        assert (said == "no.\n") == ("foreign" in sample)
        assert sample["score"] == scores[sample["ending"], "foreign" in sample]
        assert sample["prompt"].startswith("Game ")
        assert sample["prompt"].endswith(". From 1 to 5.\n"), "what reset says belongs to it"
        tokens = sample["tokens"]
        assert len(sample["values"]) == len(tokens) <= 6
        told = tokens[:-1] if sample["stopped"] else tokens
        assert sample["response"] == "".join([*told[:place], said, *told[place:]])
        if place and sample["update"] == 1:  # while the policy is the reference
            assert sample["rewards"][place - 1] == pytest.approx(0.25, abs=1e-5)
    assert any("foreign" in sample for sample in samples)
    shown = shown_responses(read_run(tmp_path / "run"), most_bytes=10**6)["prompts"]
    assert {row["turns"] for prompt in shown for row in prompt["responses"]} <= {1, 2}
    [evaluation, *_] = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    for each in evaluation["responses"]:
        assert each["length"] <= 6
        assert "no.\n" in each["completion"]


@pytest.mark.parametrize(
    ("tokens", "names"), [(40, set()), (14, {"truncated_at_cap", "too_few_eos"})], ids=["room", "tight"]
)
def test_the_doctor_takes_turns_that_are_answered_for_no_cut_off_responses(tmp_path, policy, tokens, names):
    settings = EPISODES | {"num_updates": 4, "max_new_tokens": tokens}
    rows = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES).metrics
    assert rows[-1]["response/eos_rate"] < 0.5, "turns of a random policy reach their limit"
    found = {finding.rule for finding in diagnose(read_run(tmp_path / "run"))}
    assert found & {"truncated_at_cap", "too_few_eos"} == names


def test_a_reward_function_is_added_and_reads_the_whole_episode(tmp_path, policy):
    def answered(completions, prompts, **_):
        assert all(text.endswith(". From 1 to 5.\n") for text in prompts), "what reset says belongs to it"
        return [float(text.count("no.\n")) for text in completions]

    settings = EPISODES | {"environment.max_turns": 2, "environment.max_turn_tokens": 1}
    rows = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES, reward=answered).metrics
    for row in rows:
        assert row["score/answered"] > 0.5
        assert row["reward/score_mean"] == pytest.approx(row["score/answered"] + row["score/Guess"], abs=1e-6)


@pytest.mark.parametrize("more", [{"adapter.kind": "lora"}, {"ppo.critic": {"privileged": ["secret"]}},
                                  {"environment.source": ROOMS, "environment.max_turns": 4, "max_new_tokens": 80}],
                         ids=["lora", "privileged", "contexts"])  # fmt: skip
def test_a_resumed_run_plays_the_same_episodes(tmp_path, policy, more):
    """As do the runs whose episodes fail, below, with more estimators and sampling ahead."""
    settings = EPISODES | {"num_updates": 3, "checkpoint.every": 1, **more}
    copies = copies_at(2, tmp_path / "whole", tmp_path / "stopped")
    run_ppo(configure(policy, tmp_path / "whole", **settings), prompts=GAMES, on_update=copies)
    run_ppo(configure(policy, tmp_path / "stopped", **settings), prompts=GAMES, resume=Resume())
    if "adapter.kind" in more:
        assert metrics_without_times(tmp_path / "whole") == metrics_without_times(tmp_path / "stopped")
    else:
        assert_same(tmp_path / "whole", tmp_path / "stopped")
    changed = [row["reward/score_mean"] for row in metrics_without_times(tmp_path / "whole")]
    assert len(set(changed)) > 1


def test_an_episode_may_be_longer_than_the_context_of_the_model(tmp_path, policy):
    """The tests' models read 256 tokens, and twelve turns with their answers are more."""
    settings = EPISODES | {
        "environment.source": ROOMS,
        "environment.max_turns": 20,
        "environment.max_turn_tokens": 20,
        "max_new_tokens": 900,
        "num_updates": 1,
    }
    [row] = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES).metrics
    assert row["episode/length"] > 256
    assert row["episode/completed"] == 1
    assert row["episode/contexts"] == 6
    assert row["episode/turns"] == 12
    for sample in read_samples(tmp_path / "run"):
        assert len(sample["turns"]) == 12
        assert sum(after < before for before, after, *_ in sample["turns"]) == 5  # each of the others begins a context
    assert row["policy/first_ratio_max"] == pytest.approx(1, abs=1e-4)
    del settings["environment.max_turn_tokens"]
    with pytest.raises(ConfigError, match=r"max_new_tokens=900 leaves no room for a prompt: the policy reads at most"):
        run_ppo(configure(policy, tmp_path / "other", **settings), prompts=GAMES)


def test_an_episode_without_notes_ends_where_its_context_is_full(tmp_path, policy):
    class Talks:
        def reset(self, row, seed): ...

        def step(self, text):
            return kedge.Step("and on, and on, and on. ")

    settings = EPISODES | {"environment.source": None, "environment.max_turns": 90, "max_new_tokens": 900}
    config = configure(policy, tmp_path / "run", **settings, **{"num_updates": 1})
    [row] = run_ppo(config, prompts=GAMES, environment=Talks).metrics
    assert row["episode/context_overflow"] == 1
    assert row["episode/length"] < 256


def test_a_template_that_drops_thoughts_trains(tmp_path):
    """Each turn reads the conversation as the template writes it, and old log probabilities are those of sampling."""
    policy = save_tiny_policy(tmp_path / "thinker", tokenizer=Family(R1, "<eos>", ("<A>", "<U>")).tokenizer())
    rows = [{"prompt": [{"role": "user", "content": f"Game {number}."}]} for number in range(8)]
    settings = EPISODES | {"environment.source": f"{worlds.__file__}:Guess", "max_new_tokens": 100, "num_updates": 2}
    result = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=rows)
    for row in result.metrics:
        assert row["episode/contexts"] > 1
        assert row["policy/first_ratio_max"] == pytest.approx(1, abs=1e-4)


KILLER = """
import os
import signal
from pathlib import Path

opened = 0


def opens():
    global opened
    opened += 1


def kills():
    # Kills the run in an episode of its fourth batch, if a file has the number of its process.
    run = Path(__file__).with_name("run.pid")
    if run.exists() and opened > 1 + 3 * 4:  # the first one is tried
        os.kill(int(run.read_text()), signal.SIGKILL)
"""
KILLER_GAME = """

class Killer(Guess):
    def reset(self, row, seed):
        opens()
        self.turns = 0
        return super().reset(row, seed)

    def step(self, text):
        self.turns += 1
        if self.turns == 2:
            kills()
        return super().step(text)
"""
NOTES = """
async def run(row, client):
    ask = client.chat.completions.create
    first = [{"role": "user", "content": row["prompt"] + "Write notes."}]
    notes = (await ask(model="policy", messages=first, max_tokens=4)).choices[0].message.content
    second = [{"role": "system", "content": "Play."}, {"role": "user", "content": f"Notes: {notes}"}]
    answer = (await ask(model="policy", messages=second)).choices[0].message.content
    return [len(set(notes)) / 10, sum(map(answer.count, "aeiou")) / 4]
"""

KILLER_AGENT = NOTES.replace(":\n", ":\n    opens()\n", 1).replace("    second =", "    kills()\n    second =")


def killed_run(config, pid: Path) -> None:
    pid.write_text(str(os.getpid()))
    run_ppo(config, prompts=GAMES)


def test_the_calls_of_an_agent_are_trained_on_as_they_were_sampled(tmp_path, policy, monkeypatch):
    pytest.importorskip("openai")
    pytest.importorskip("aiohttp")
    (tmp_path / "agent.py").write_text(NOTES)
    settings = {**EPISODES, "environment.source": f"{tmp_path}/agent.py:run", "num_prompts": 4, "num_minibatches": 2}
    sampled: dict[int, list[int]] = {}
    answer = Episodes.answer

    def spied(self, said):
        for row, ids in said.items():
            sampled.setdefault(self._played[row].number, []).extend(ids)
        return answer(self, said)

    monkeypatch.setattr(Episodes, "answer", spied)
    more = {"num_updates": 10, "learning_rate": 1e-3, "report": False, "num_fixed_prompts": 0}
    with kedge.PpoTrainer(model=policy, prompts=GAMES, out=tmp_path / "run", **settings, **more) as trainer:
        for _ in range(10):
            sampled.clear()
            batch = trainer.sample()
            rollout = batch.rollout
            rows = zip(rollout.response_ids, rollout.action_mask, strict=True)
            trained = [ids[own].tolist() for ids, own in rows]
            assert sorted(trained) == sorted(sampled.values())
            metrics = trainer.update(batch)
            assert metrics["policy/first_ratio_max"] == pytest.approx(1, abs=1e-4)
            assert (metrics["episode/turns"], metrics["episode/contexts"], metrics["episode/completed"]) == (2, 2, 1)


@pytest.mark.parametrize(("kind", "staleness"), [("Killer", 0), ("run", 1)])
def test_a_run_killed_in_mid_episode_resumes_to_the_bit(tmp_path, policy, kind, staleness):
    """Also with an agent, between its two requests."""
    source = Path(worlds.__file__).read_text() + KILLER + KILLER_GAME
    if kind == "run":
        pytest.importorskip("openai")
        pytest.importorskip("aiohttp")
        source = KILLER + KILLER_AGENT
    world = tmp_path / "killer.py"
    world.write_text(source)
    more = {"num_updates": 4, "checkpoint.every": 1, "max_staleness": staleness, "max_new_tokens": 100}
    settings = EPISODES | {"environment.source": f"{world}:{kind}", **more}
    run_ppo(configure(policy, tmp_path / "whole", **settings), prompts=GAMES)
    killed = configure(policy, tmp_path / "killed", **settings)
    process = fork_context().Process(target=killed_run, args=(killed, tmp_path / "run.pid"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert 1 <= len(metrics_without_times(tmp_path / "killed")) <= 3, "in the fourth batch"
    (tmp_path / "run.pid").unlink()
    run_ppo(killed, prompts=GAMES, resume=Resume())
    assert_same(tmp_path / "whole", tmp_path / "killed")
    assert [row["update"] for row in metrics_without_times(tmp_path / "whole")] == [1, 2, 3, 4]


def test_the_episodes_of_a_group_start_alike(tmp_path, policy):
    """The secret of both responses to a prompt is the same, and other prompts have others."""
    secrets = []

    class Noting(worlds.Guess):
        def reset(self, row, seed):
            text = super().reset(row, seed)
            secrets.append((row["prompt"], seed))
            return text

    settings = EPISODES | {"num_responses": 2, "environment.source": None, "num_updates": 1}
    run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES, environment=Noting)
    played = secrets[1:]  # the first one is tried when the environment is loaded
    assert len(played) == 8
    assert len(set(played)) == 4


def test_a_class_and_its_name_are_the_same_environment(tmp_path, policy):
    named = configure(policy, tmp_path / "named", **EPISODES)
    run_ppo(named, prompts=GAMES)
    settings = {name: value for name, value in EPISODES.items() if name != "environment.source"}
    kedge.ppo(
        model=policy, prompts=GAMES, environment=worlds.Guess, out=tmp_path / "given", num_updates=2, num_prompts=4,
        num_minibatches=2, num_epochs=2, learning_rate=1e-3, report=False, num_fixed_prompts=0, **settings,
    )  # fmt: skip
    assert_same(tmp_path / "named", tmp_path / "given")


def test_an_episode_does_not_open_with_token_ids(tmp_path, policy):
    """They would be decoded and encoded again, and have no row for the environment."""
    sizes = {"num_prompts": 2, "max_new_tokens": 20, "num_updates": 1, "report": False}
    with kedge.PpoTrainer(model=policy, environment=worlds.Guess, out=tmp_path / "run", **sizes) as trainer:
        for ask in (trainer.sample, trainer.generate):
            with pytest.raises(
                DataError, match=r"^prompt 1 is token ids, and an episode of Guess opens with a text, row"
            ):
                ask(["The boat", [3, 4, 5]])
        assert len(trainer.generate(["The boat"])) == 1


def test_an_answer_without_a_call_ends_an_episode_with_tools(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE), extra_rows=20)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": n + 1} for n in range(4)]
    settings = EPISODES | {"environment.source": None, "max_new_tokens": 20}
    result = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=rows, environment=worlds.Adder)
    assert result.metrics[-1]["episode/completed"] == 1  # a random policy calls no tool
    assert result.metrics[-1]["tools/calls"] == 0
    assert "tools/failed" not in result.metrics[-1]
    assert result.metrics[-1]["score/Adder"] == 0


def test_a_policy_that_calls_a_tool_reads_its_results(tmp_path):
    """It says one token, which is a call, until the limit of turns; each result is between two of its tokens."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.add_tokens(["<add>6</add>"])
    policy = save_speaker(tmp_path / "policy", "<add>6</add>", tokenizer=tokenizer)
    rows = [{"prompt": [{"role": "user", "content": f"Game {number}"}]} for number in range(4)]
    adder = {"environment.source": f"{worlds.__file__}:Adder", "environment.max_turn_tokens": 1}
    settings = EPISODES | adder | {"max_new_tokens": 60, "learning_rate": 0.0}
    result = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=rows)
    for row in result.metrics:
        assert row["tools/calls"] == 3
        assert row["tools/failed"] == 0
        assert row["episode/max_turns"] == 1
        assert row["response/length"] == 3
    [sample, *_] = read_samples(tmp_path / "run")
    assert sample["tokens"] == ["<add>6</add>"] * 3
    assert [text.count("<|tool|>\n7\n") for _, text in sample["foreign"]] == [1, 1]


def test_a_run_says_once_that_the_calls_of_the_template_are_not_read(tmp_path, capsys):
    tokenizer = calling(UNREAD["like Python"]).tokenizer()
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer, extra_rows=20)
    rows = [{"prompt": [{"role": "user", "content": f"Game {number}"}]} for number in range(4)]
    more = {"environment.source": None, "num_updates": 1, "eval_every": 1, "ppo.eval_every.num_prompts": 2}
    run_ppo(configure(policy, tmp_path / "run", **EPISODES | more), prompts=rows, environment=worlds.Adder)
    line = "Adder: the chat template shows tools, but writes no call that kedge reads; "
    assert capsys.readouterr().err.count(line) == 1
    [sample, *_] = read_samples(tmp_path / "run")
    assert 'write its arguments as JSON in a tag with its name, such as <add>{"a": 1}</add>' in sample["prompt"]


def test_a_failing_environment_ends_the_run_with_one_line_and_the_policy_saved(tmp_path, policy):
    world = tmp_path / "late.py"
    world.write_text(
        Path(worlds.__file__).read_text()
        + "\n\nclass Late(Guess):\n    count = 0\n\n    def step(self, text):\n        Late.count += 1\n"
        "        if Late.count > 20:\n            raise OSError('the line parted')\n        return super().step(text)\n"
    )
    settings = EPISODES | {"environment.source": f"{world}:Late", "num_updates": 50}
    with pytest.raises(
        EnvError, match=r"^Late raised OSError: the line parted \(late.py:\d+\): it failed in all episodes"
    ):
        run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert "Traceback" in (tmp_path / "run" / "reward.log").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 1


FLAKY = """

class Flaky(Guess):
    # Fails in every fifth episode, by its row.

    def reset(self, row, seed):
        self.fails = row["prompt"] in ("Game 2. ", "Game 7. ")
        if row["prompt"] == "Game 5. ":
            raise ConnectionResetError("no sandbox is free")
        return super().reset(row, seed)

    def step(self, text):
        if self.fails:
            raise ConnectionResetError("the connection was reset")
        return super().step(text)
"""


@pytest.mark.parametrize("more", [{}, {"preset": "grpo", "num_responses": 2}, {"advantage": "remax"},
                                  {"max_staleness": 1}], ids=["ppo", "grpo", "remax", "stale"])  # fmt: skip
def test_failed_episodes_are_dropped_and_counted(tmp_path, policy, more):
    """By hand: three of the twelve prompts fail. A resumed run is the same."""
    world = tmp_path / "flaky.py"
    world.write_text(Path(worlds.__file__).read_text() + FLAKY)
    sizes = {"num_prompts": 6, "num_updates": 2, "checkpoint.every": 1}
    settings = EPISODES | {"environment.source": f"{world}:Flaky"} | sizes | more
    copies = copies_at(2, tmp_path / "run", tmp_path / "stopped")
    result = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES, on_update=copies)
    size = settings.get("num_responses", 1)
    assert sum(row["reward/unscored"] for row in result.metrics) == 3 * size
    given_up = 3 * size * (1 + ("remax" in str(more)))
    assert sum(row["reward/environment_given_up"] for row in result.metrics) == given_up
    assert sum(row["episode/failed"] for row in result.metrics) == pytest.approx(3 / 6)
    for row in result.metrics:
        assert row["reward/score_mean"] == pytest.approx(row["score/Flaky"], abs=1e-6)
    log = (tmp_path / "run" / "reward.log").read_text()
    assert "no sandbox is free" in log
    found = {finding.rule for finding in diagnose(read_run(tmp_path / "run"))}
    assert "reward_function_failing" in found
    run_ppo(configure(policy, tmp_path / "stopped", **settings), prompts=GAMES, resume=Resume())
    assert_same(tmp_path / "run", tmp_path / "stopped")


def test_a_failed_call_may_stop_the_run(tmp_path, policy):
    world = tmp_path / "flaky.py"
    world.write_text(Path(worlds.__file__).read_text() + FLAKY)
    settings = EPISODES | {"environment.source": f"{world}:Flaky", "environment.on_error": "stop", "num_updates": 3}
    with pytest.raises(EnvError, match=r"^Flaky raised ConnectionResetError: .* \(flaky.py:\d+\)$"):
        run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES)


DRAWING = """

class Drawing(Guess):
    # Draws with libraries that are imported in the middle of a call, and in its constructor: which episodes an instance
    # has had depends on where the run was resumed.

    def __init__(self):
        import numpy

        self.luck = numpy.random.rand()

    def step(self, text):
        import numpy
        import torch

        luck = self.luck + numpy.random.rand() + torch.rand(1).item() + random.random()
        return Step("no.\\n", reward=luck)


class Drawn:
    # Tools without reset: each episode has a new one.

    def __init__(self):
        import numpy

        self.luck = numpy.random.rand() + random.random()

    def get_reward(self):
        import numpy

        return self.luck + numpy.random.rand()

    def ask(self) -> str:
        "Ask."
        return ""
"""


@pytest.mark.parametrize(("name", "local"), [("Drawing", False), ("Drawn", True)])
def test_a_resumed_run_draws_the_same_numbers_in_libraries_that_are_imported_in_a_call(tmp_path, name, local):
    world = tmp_path / "drawing.py"
    world.write_text(Path(worlds.__file__).read_text() + DRAWING)
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    rows = [{"prompt": [{"role": "user", "content": game}]} for game in GAMES]
    settings = EPISODES | {"environment.source": f"{world}:{name}", "num_updates": 3, "checkpoint.every": 1}
    more = {}
    if local:
        more["environment"] = find_named(settings.pop("environment.source"), word="environment", error=EnvError)
    copies = copies_at(2, tmp_path / "whole", tmp_path / "stopped")
    run_ppo(configure(policy, tmp_path / "whole", **settings), prompts=rows, on_update=copies, **more)
    run_ppo(configure(policy, tmp_path / "stopped", **settings), prompts=rows, resume=Resume(), **more)
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    paid = [row["score/" + name] for row in metrics_without_times(tmp_path / "whole")]
    assert len(set(paid)) == 3


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["environment.max_turn_tokens=99"], "environment.max_turn_tokens=99 is more than an episode has"),
        (["critic_check=1"], "ppo.critic_check continues responses from their middle"),
        ([f"environment.source={worlds.__file__}:Nothing"], "Nothing is not an environment"),
        (
            [f"environment.source={worlds.__file__}:Unscored"],
            "nothing scores the episodes of Unscored: add get_reward",
        ),
        (["environment.source=nowhere.py:A"], "environment file 'nowhere.py' does not exist"),
        (["environment.max_turns=0"], "environment.max_turns"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_made(tmp_path, policy, given, line):
    (tmp_path / "games.jsonl").write_text("".join(json.dumps({"prompt": game}) + "\n" for game in GAMES))
    done = forked_kedge(
        "ppo", "--model", policy, "--prompts", "games.jsonl", "--out", "run", "max_new_tokens=40",
        *([] if any("source" in each for each in given) else ["--environment", GUESS]), *given, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_reward_and_environment_the_line_names_the_reward(policy, tmp_path):
    with pytest.raises(ConfigError, match="reward"):
        run_ppo(configure(policy, tmp_path / "run"), prompts=GAMES)


def test_a_loop_of_your_own_plays_episodes_too(tmp_path, policy):
    """The same updates as `kedge.ppo`'s, sampled in the loop."""
    settings = {"num_updates": 2, "num_prompts": 4, "num_minibatches": 2, "num_epochs": 2, "learning_rate": 1e-3,
                "report": False, "num_fixed_prompts": 0, **EPISODES}  # fmt: skip
    with kedge.PpoTrainer(model=policy, prompts=GAMES, out=tmp_path / "loop", **settings) as trainer:
        for _ in range(2):
            batch = trainer.sample()
            metrics = trainer.update(batch)
    assert metrics["episode/turns"] >= 1
    run_ppo(configure(policy, tmp_path / "run", **EPISODES), prompts=GAMES)
    assert_same(tmp_path / "loop", tmp_path / "run")


def test_a_loop_of_your_own_scores_an_environment_that_does_not(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE), extra_rows=20)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}]} for n in range(4)]
    settings = {"num_prompts": 2, "report": False, "environment.max_turns": 3, "max_new_tokens": 20}
    with kedge.PpoTrainer(
        model=policy, prompts=rows, environment=worlds.Unscored, out=tmp_path / "loop", **settings
    ) as trainer:
        batch = trainer.sample()
        with pytest.raises(RewardError, match="scores are missing"):
            trainer.update(batch)
        assert trainer.update(batch, [1.0, 3.0])["reward/score_mean"] == 2


INTERRUPTING = """
import os, signal, time
from pathlib import Path
from tests.tasks.environments.worlds import Guess

class Interrupting(Guess):
    def step(self, text):
        if (press := Path(__file__).with_name("press")).exists():
            press.unlink()
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        return super().step(text)
"""


def test_a_loop_goes_on_after_an_interrupt_of_an_environment_in_its_own_process(tmp_path, policy):
    """The process is started again for the next batch, which is the one that the loop would have had."""
    source = tmp_path / "worlds.py"
    source.write_text(INTERRUPTING)
    settings = {"num_updates": 2, "num_prompts": 4, "num_minibatches": 1, **EPISODES}
    settings |= {"environment.source": f"{source}:Interrupting"}
    sampled = []
    for folder in ("whole", "interrupted"):
        with kedge.PpoTrainer(model=policy, prompts=GAMES, out=tmp_path / folder, **settings) as trainer:
            for update in trainer.updates():
                if folder == "interrupted" and update == 2:
                    (tmp_path / "press").touch()
                    with pytest.raises(KeyboardInterrupt):
                        trainer.sample()
                sampled.append(trainer.sample())
                trainer.update(sampled[-1])
    assert sampled[1].response_ids == sampled[3].response_ids
    assert_same(tmp_path / "whole", tmp_path / "interrupted")


def test_a_lower_limit_of_one_batch_ends_its_episodes(tmp_path, policy):
    settings = {"num_updates": 1, "num_prompts": 4, "report": False, "num_fixed_prompts": 0, **EPISODES}
    with kedge.PpoTrainer(model=policy, prompts=GAMES, out=tmp_path / "loop", **settings) as trainer:
        batch = trainer.sample(max_new_tokens=7)
        assert {len(ids) for ids in batch.response_ids} <= set(range(1, 8))
        assert batch.rollout.ending is not None
        assert batch.rollout.response_ids.shape[1] == 7
        assert len(trainer.generate(["Game 3. "], greedy=True)) == 1
        trainer.update(batch)


def test_a_schedule_of_the_length_is_that_of_episodes(tmp_path, policy):
    settings = EPISODES | {"schedules": {"rollout.max_new_tokens": {"1": 7, "2": 40}}}
    rows = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES).metrics
    assert rows[0]["episode/length"] <= 7 < rows[1]["episode/length"]


def test_greedy_episodes_start_as_those_that_they_are_compared_with(tmp_path, policy):
    """In every round of sampling."""
    opened = []

    class Flat(worlds.Guess):
        """All episodes score the same, so that more groups are sampled."""

        def reset(self, row, seed):
            opened.append((row["prompt"], seed))

        def step(self, text):
            return kedge.Step(terminated=True)

    settings = EPISODES | {
        "environment.source": None, "advantage": "remax", "critic": "none", "num_responses": 2, "num_updates": 1,
        "constant_groups": {"resample": 1},
    }  # fmt: skip
    run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES, environment=Flat)
    played = opened[1:]
    assert len(played) == 2 * (8 + 4)
    for first in (0, 12):
        assert set(played[first : first + 8]) == set(played[first + 8 : first + 12])
