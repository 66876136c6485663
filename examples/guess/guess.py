"""Guess a number in few turns: the game, and a small model that has seen it played carelessly.

python examples/guess/guess.py                  # the model, in runs/guess
kedge ppo --config examples/guess/run.yaml      # PPO: it learns to halve what is left

`guess.py ranges` makes the model of examples/ranges, where the prompt says how large the number can be, `guess.py
numbered` a model of the same game in which no prompt recurs, since the games are numbered, and `guess.py liar` that of
examples/liar, where one answer in ten is a lie.
"""

import argparse
import json
import random
from pathlib import Path

import kedge

GAMES = {
    "guess": {"ranges": (15,), "turns": 4},  # halving what is left finds every number up to 15 in four turns
    "ranges": {"ranges": (3, 7, 15, 31, 63), "turns": 5},  # it finds 31 of the 63 in five
    "numbered": {"ranges": (3, 7, 15, 31, 63), "turns": 5, "prompts": 10_000},
    "liar": {"ranges": (63,), "turns": 7, "lies": 0.1},
    "tens": {"ranges": (5, 10, 20, 40), "turns": 4},
}
"""By name: the largest numbers, the turns of a game, the share of answers that are lies, and how many prompts there are
if each has a number. No example has the tens, on which `bench.preset` chooses settings."""
CARE = 0.5
"""Share of the demonstrated guesses that heed the answers so far; the others are any number."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)
SIZES = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "context_length": 64, "initializer_range": 0.05}


def prompt_row(most, begin="Guess", **more):
    """The prompt of a game with numbers from 1 to `most`, and further columns."""
    return {"prompt": [{"role": "user", "content": f"{begin} my number, from 1 to {most}."}], "most": most, **more}


def numbered_row(number, most):
    """The prompt of a game that has a number itself."""
    return prompt_row(most, f"Game {number}: guess")


class Guess:
    """Says whether the number is higher or lower than a guess, or lies; pays 1 when it is found."""

    lies = 0.0

    def reset(self, row, seed):
        """Draw a number."""
        self.draw = random.Random(seed)
        self.secret = self.draw.randint(1, row["most"])
        self.lies = row.get("lies", 0.0)

    def step(self, text):
        """Answer a guess."""
        guess = int(text) if text.isascii() and text.isdigit() else 0
        if guess == self.secret:
            return kedge.Step(reward=1.0, terminated=True)
        is_lie = self.lies > 0 and self.draw.random() < self.lies
        return kedge.Step("higher" if (guess < self.secret) != is_lie else "lower")


def careless_game(seed, row, turns):
    """The messages of a game: guesses are drawn from the numbers that are left, or from all of them."""
    draw = random.Random(f"guesses {seed}")
    game = Guess()
    game.reset(row, seed)
    low, high = 1, row["most"]
    messages = [*row["prompt"]]
    for _ in range(turns):
        heeds = draw.random() < CARE and low <= high  # after a lie, nothing may be left
        guess = draw.randint(low, high) if heeds else draw.randint(1, row["most"])
        messages.append({"role": "assistant", "content": str(guess)})
        answer = game.step(str(guess))
        if answer.terminated:
            break
        messages.append({"role": "user", "content": answer.messages})
        low, high = (max(low, guess + 1), high) if answer.messages == "higher" else (low, min(high, guess - 1))
    return messages if answer.terminated else messages[:-1]


def main(folder, num_games=12_000, *, game="guess", **sft):
    """Train a model on careless games, and write the prompts of new ones."""
    about = GAMES[game]
    more = {name: about[name] for name in ("lies",) if name in about}
    rows = [prompt_row(most, **more) for most in about["ranges"]]
    seen = rows
    if num_prompts := about.get("prompts"):
        numbered = [numbered_row(number, rows[number % len(rows)]["most"]) for number in range(2 * num_prompts)]
        rows, seen = numbered[:num_prompts], numbered[num_prompts:]
    games = [careless_game(f"game {number}", seen[number % len(seen)], about["turns"]) for number in range(num_games)]
    train_start(folder, games, rows, **sft)


def train_start(folder, games, rows, *, sizes=SIZES, **sft):
    """Train a model of 60,000 parameters on games, each a list of messages, and write the prompts, at least 512."""
    from kedge.models.untrained import save_untrained_llama, train_tokenizer

    texts = [message["content"] for game in games for message in game]
    tokenizer = train_tokenizer(texts, vocab_size=400)  # one token for each number and answer
    tokenizer.chat_template = CHAT_TEMPLATE
    save_untrained_llama(folder / "untrained", tokenizer, **sizes, seed=0)
    settings = {"preset": "small-cpu", "learning_rate": 4e-3, "num_epochs": 2, **sft}
    demonstrations = [{"messages": messages} for messages in games]
    kedge.sft(model=folder / "untrained", demonstrations=demonstrations, out=folder / "start", **settings)
    prompts = (rows[number % len(rows)] for number in range(max(512, len(rows))))
    (folder / "games.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", nargs="?", choices=GAMES, default="guess", help="default: guess")
    game = parser.parse_args().game
    main(Path("runs") / game, game=game)
