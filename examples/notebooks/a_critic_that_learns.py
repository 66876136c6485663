# %% [markdown]
# # A critic that learns
#
# PPO's critic predicts, before each token, how much reward is still to come. If its predictions are good, a token is
# praised or blamed for what happened *after* it was chosen, compared with what was to be expected. If they are not,
# every token of a response gets the raw score, with all its luck.
#
# This notebook trains a small policy with PPO on a game of dice, watches its critic learn, looks at the values along
# an episode, and then breaks the critic on purpose, to see what `kedge doctor` says. It takes about a minute on two
# cores and needs no network: the model is made here.
#
# For the arithmetic of a single update, see [One token through an update](one_token.ipynb).

# %%
import contextlib
import io
import json
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kedge
from kedge.algorithm import explained_variance


def new_folder():
    """An empty folder for a run."""
    return Path(tempfile.mkdtemp(prefix="kedge-"))


def quiet():
    """Hide what a run prints; its progress is still shown."""
    return contextlib.redirect_stdout(io.StringIO())


# %% [markdown]
# ## The game
#
# *Pig*: roll a die as often as you like, and add up what you roll. `hold` ends the game and pays the total, in tens.
# A 1 ends it, too, and pays nothing. So does any other word: the policy has to learn to say `roll` or `hold`.
#
# An environment is a class with `reset` and `step`. The policy and the environment take turns, and the policy is
# trained on its own tokens only.


# %%
class Pig:
    """One game; the seed decides the dice."""

    def reset(self, row, seed):
        """Start."""
        self.dice = random.Random(seed)
        self.total = 0

    def step(self, text):
        """Answer a turn of the policy."""
        if text.strip() == "hold":
            return kedge.Step(reward=self.total / 10, terminated=True)
        rolled = self.dice.randint(1, 6)
        if rolled == 1 or text.strip() != "roll":
            return kedge.Step(terminated=True)
        self.total += rolled
        return kedge.Step(str(self.total))


# %% [markdown]
# ## A model that knows the words
#
# A tokenizer with one token per word, and a Llama with two layers of width 32. It is random, so first it imitates
# careless games, in which every third word is `hold`, whatever the total.

# %%
words = ["<pad>", "<end>", "<unk>", "play", "roll", "hold", *map(str, range(73))]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", padding_side="left")
tokenizer.chat_template = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ ' <end> ' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=words.index("<end>"),
    pad_token_id=words.index("<pad>"),
)
untrained = kedge.LoadedModel(LlamaForCausalLM(config), tokenizer)


def careless_game(seed):
    """The messages of a game."""
    draw, game = random.Random(f"words {seed}"), Pig()
    game.reset({}, seed)
    messages = [{"role": "user", "content": "play"}]
    for _ in range(10):
        word = draw.choice(["roll", "roll", "hold"])
        messages.append({"role": "assistant", "content": word})
        answer = game.step(word)
        if answer.terminated:
            break
        messages.append({"role": "user", "content": answer.messages})
    return {"messages": messages if answer.terminated else messages[:-1]}


with quiet():
    start = kedge.sft(
        model=untrained,
        demonstrations=[careless_game(seed) for seed in range(1500)],
        out=new_folder(),
        preset="small-cpu",
        num_epochs=2,
        learning_rate=4e-3,
        **{"runtime.report": False},
    )
for message in careless_game(3)["messages"]:
    print(f"{message['role']:9} {message['content']}")

# %% [markdown]
# ## PPO, with a critic of its own
#
# The loop that kedge would run by itself: sample a batch of games, update on it. `update` returns the figures of the
# update. The critic is a second model (`ppo.critic=separate`) that starts as a copy of the policy with a new head.

# %%
games = [{"prompt": [{"role": "user", "content": "play"}], "number": number} for number in range(8000)]


def train(num_updates, critic_learning_rate):
    """The figures of each update, and the folder of the run."""
    settings = {
        "preset": "small-cpu",
        "num_updates": num_updates,
        "num_prompts": 256,
        "max_new_tokens": 48,
        "num_epochs": 2,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "kl_coef": 0.01,
        "missing_eos_score": None,
        "ppo.critic": "separate",
        "ppo.critic_learning_rate": critic_learning_rate,
        "ppo.num_critic_epochs": 2,
        "environment.max_turns": 12,
        "environment.max_turn_tokens": 2,  # a word and its end
        "runtime.report": False,
        "runtime.num_samples": 64,
        "runtime.num_fixed_prompts": 0,
    }
    rows, out = [], new_folder()
    with (
        quiet(),
        kedge.PpoTrainer(model=start.model, environment=Pig, prompts=games, out=out, **settings) as trainer,
    ):
        for _ in trainer.updates():
            rows.append(trainer.update(trainer.sample()))
    return rows, out


rows, healthy = train(num_updates=30, critic_learning_rate=1e-2)
for row in rows[::5] + rows[-1:]:
    print(
        f"update {row['update']:2}: {row['reward/score_mean']:.2f} tens per game, "
        f"explained variance {row['value/explained_variance']:.2f}"
    )

# %% [markdown]
# ## Explained variance
#
# The **return** of a token is what was really still to come. **Explained variance** is the share of the returns'
# variance that the critic's values explain, on games that it has not been trained on:
#
# $$ 1 - \frac{\text{Var}(\text{return} - \text{value})}{\text{Var}(\text{return})} $$
#
# 1 is a perfect prediction, 0 no better than a constant. It starts at 0, because the head of the critic is new, and
# it rises while the policy is changing: the critic has to follow a moving target.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.5, 2.6))
updates = [row["update"] for row in rows]
axes[0].plot(updates, [row["reward/score_mean"] for row in rows], color="tab:blue")
axes[0].axhline(0.814, color="0.6", linewidth=0.8)
axes[0].annotate("holding at 20", (1, 0.814), (0, -10), textcoords="offset points", fontsize=8)
axes[0].set_title("tens per game")
axes[1].plot(updates, [row["value/explained_variance"] for row in rows], color="tab:orange")
axes[1].axhline(0, color="0.6", linewidth=0.8)
axes[1].set_title("explained variance")
for axis in axes:
    axis.set_xlabel("update")
plt.show()

# %% [markdown]
# ## Values along an episode
#
# `samples.jsonl` in the run's folder has some games of each update with the values of all tokens. Before each turn
# the policy has read its total. We collect, for the last ten updates, the value before each turn and the return that
# followed.


# %%
def turns_of(game):
    """For each turn of a game: the total before it, the critic's value, and the return."""
    totals = {place: int(text.split()[-1]) for place, text in game.get("foreign", [])}
    first_tokens = [turn[0] for turn in game["turns"]]
    return [(totals.get(at, 0), game["values"][at], sum(game["rewards"][at:])) for at in first_tokens]


samples = [json.loads(line) for line in (healthy / "samples.jsonl").read_text().splitlines()]
late = [game for game in samples if game["update"] > 20]
held = max((game for game in late if game["score"] > 0), key=lambda game: len(game["turns"]))
lost = max((game for game in late if game["score"] == 0), key=lambda game: len(game["turns"]))

figure, axes = plt.subplots(1, 2, figsize=(8.5, 2.6), sharey=True)
for axis, game, name in zip(axes, (held, lost), ("a game that paid", "a game that ended with a 1")):
    played = turns_of(game)
    axis.plot([value for _, value, _ in played], "o-", color="tab:orange", label="value before the turn")
    axis.plot([total / 10 for total, _, _ in played], ".--", color="0.6", label="total so far, in tens")
    axis.axhline(game["score"], color="tab:blue", linewidth=0.8, label="what the game paid")
    axis.set_xlabel("turn")
    axis.set_title(name)
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# The value rises with the total. In the second game, the last `roll` was followed by a 1. The advantage of a turn is
# its return minus the value before it (kedge's default has λ = 1), so the last turn is blamed most, and the first
# one, of which less was expected, least. Was `roll` a mistake? One game cannot tell, but the mean over many can, and
# the critic makes that mean less noisy.
#
# ## How good could a critic be?
#
# Nobody can predict dice. The best prediction of a return is the mean of all returns that followed the same total,
# which we can measure. Its explained variance is a ceiling for any critic of this game.

# %%
found = [turn for game in late for turn in turns_of(game)]
by_total = defaultdict(list)
for total, value, paid in found:
    by_total[total].append((value, paid))
means = {total: fmean(paid for _, paid in turns) for total, turns in by_total.items()}


def explained(predictions):
    """The share of the returns' variance that predictions explain."""
    returns = torch.tensor([[paid for _, _, paid in found]])
    return float(explained_variance(torch.tensor([predictions]), returns, torch.ones_like(returns, dtype=torch.bool)))


by_critic = explained([value for _, value, _ in found])
by_means = explained([means[total] for total, _, _ in found])
print(f"explained variance: the critic {by_critic:.2f}, the mean return after the same total {by_means:.2f}")

often = sorted(total for total, turns in by_total.items() if len(turns) >= 10)
figure, axis = plt.subplots(figsize=(6, 2.8))
axis.plot(often, [means[total] for total in often], "o", color="tab:blue", label="mean return that followed")
axis.plot(often, [fmean(value for value, _ in by_total[total]) for total in often], color="tab:orange", label="value")
axis.set_xlabel("total before the turn")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# So a low explained variance need not be a bad critic: here most of the variance is luck. What a critic can know
# depends on the task, which is why it has to be measured ([A critic that learns](../../docs/critic.md) has the
# measurements).
#
# ## The doctor's opinion
#
# `kedge doctor FOLDER`, in Python `kedge.doctor`, looks for known problems in a run's figures.


# %%
def opinion(folder):
    """Print the findings about a run."""
    findings = kedge.doctor(folder)
    for finding in findings:
        print(f"{finding.severity}: {finding.rule}\n  {finding.seen}")
    if not any(finding.severity == "serious" for finding in findings):
        print("nothing serious")
    return [finding.rule for finding in findings if finding.severity == "serious"]


serious = opinion(healthy)

# %% [markdown]
# ## A broken critic
#
# Now the same run with a learning rate of 10⁻⁷ for the critic, a hundred-thousandth of what it needs. The score rises
# all the same for a while, so that a look at the score alone would not show it.

# %%
broken_rows, broken = train(num_updates=16, critic_learning_rate=1e-7)
print(f"tens per game: {broken_rows[0]['reward/score_mean']:.2f} to {broken_rows[-1]['reward/score_mean']:.2f}")
broken_serious = opinion(broken)

# %%
[dead_critic] = [finding for finding in kedge.doctor(broken) if finding.rule == "dead_critic"]
print(dead_critic.means)

# %% [markdown]
# ## What this notebook claims
#
# Dice and rounding differ between machines, so these are bounds and not the exact figures. The cell fails if one of
# them does not hold.

# %%
last_ten = fmean(row["value/explained_variance"] for row in rows[-10:])
assert last_ten > 0.08, last_ten  # the critic learns
assert by_critic > 0.4 * by_means, (by_critic, by_means)  # and knows a good part of what can be known
assert fmean(row["reward/score_mean"] for row in rows[-5:]) > 0.35  # the policy learns
assert serious == []
assert abs(broken_rows[-1]["value/explained_variance"]) < 0.02
assert broken_serious == ["dead_critic"]
print("all hold")

# %% [markdown]
# Try: `ppo.critic` set to `shared`, a head on the policy instead of a second model; a critic's rate of 0.5;
# `ppo.gae_lambda` of 0.9. The next notebook, [A game with tools](a_game_with_tools.ipynb), asks which *turn* deserves
# the credit.
