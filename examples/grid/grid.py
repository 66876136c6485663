"""Walks on a grid in text, and a small model that has seen careless ones: where the wind blows, and in a maze.

python examples/grid/grid.py windy              # the model, in runs/windy
kedge ppo --config examples/windy/run.yaml      # PPO: it learns to arrive in time

`grid.py maze` makes the model of examples/maze, where a door opens only with a key. A turn is one step, `l`, `r`, `u`
or `d`. The answer is the cell, such as `23` for the second column and third row, and `key` once that is held.
"""

import argparse
import random
import runpy
from functools import cache
from pathlib import Path

import kedge

GAMES = {
    "windy": {
        "prompt": "Walk to 51.",
        "map": ["....G", ".....", ".....", ".....", "....."],
        "wind": 0.2,
        "turns": 10,
        "care": 0.4,
    },
    "maze": {
        "prompt": "Get the key at 13, then walk to 54.",
        "map": ["...#.", ".#.#.", "K#.D.", "##.#G", "...#."],
        "nearest": 15,
        "turns": 24,
        "care": 0.6,
        "games": 1_500,
    },
    "corridor": {"prompt": "Walk to 91.", "map": ["#...#...G", ".........", "#...#...#"], "wind": 0.3, "turns": 12},
    "vault": {
        "prompt": "Get the key at 13, then walk to 41.",
        "map": ["..#G", ".#.D", "K#..", "...."],
        "nearest": 9,
        "turns": 14,
        "care": 0.4,
        "games": 1_500,
    },
}
"""By name: the prompt, the map (# is a wall, G the goal, K a key and D its door), the probability of a gust, which
pushes one cell down, the fewest steps from where a game starts, its turns, the share of the demonstrated steps that
lead nearer, where the others are in any direction, and the number of demonstrations. No example has the corridor and
the vault, on which `bench.preset` chooses settings."""
CALM, NEAREST, CARE, DEMONSTRATED = 0.0, 1, 0.5, 6_000

MOVES = {"l": (0, -1), "r": (0, 1), "u": (-1, 0), "d": (1, 0)}
GUESS = Path(__file__).parents[1] / "guess" / "guess.py"
SIZES = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "context_length": 192, "initializer_range": 0.05}


def prompt_row(name):
    """The prompt of a game, with the columns that the environment reads."""
    game = GAMES[name]
    columns = {"map": game["map"], "wind": game.get("wind", CALM), "nearest": game.get("nearest", NEAREST)}
    return {"prompt": [{"role": "user", "content": game["prompt"]}], **columns}


class Grid:
    """Says where the walker is; pays 1 on arrival."""

    def reset(self, row, seed):
        """Draw where to start, without the key."""
        self.map, self.wind, self.draw = tuple(row["map"]), row["wind"], random.Random(seed)
        far = [at for (at, has_key), left in steps_left(self.map).items() if not has_key and left >= row["nearest"]]
        self.at, self.has_key = self.draw.choice(sorted(far)), False
        return self.seen()

    def step(self, text):
        """Walk a step, and be pushed by a gust."""
        self.at, self.has_key = moved(self.map, self.at, self.has_key, text)
        if self.wind and self.draw.random() < self.wind:
            self.at, self.has_key = moved(self.map, self.at, self.has_key, "d")
        if tile(self.map, self.at) == "G":
            return kedge.Step(reward=1.0, terminated=True)
        return kedge.Step(self.seen())

    def seen(self):
        """The cell, and the key if it is held."""
        row, column = self.at
        return f"{column + 1}{row + 1}{' key' if self.has_key else ''}"


def tile(rows, at):
    """What is at a place; outside the map, a wall."""
    row, column = at
    return rows[row][column] if 0 <= row < len(rows) and 0 <= column < len(rows[row]) else "#"


def moved(rows, at, has_key, move):
    """The place after a step, and whether the key is held there. A step into a wall, or of no direction, stays."""
    down, right = MOVES.get(move, (0, 0))
    to = (at[0] + down, at[1] + right)
    if tile(rows, to) in ("#" if has_key else "#D"):
        to = at
    return to, has_key or tile(rows, to) == "K"


@cache
def steps_left(rows):
    """The fewest steps to the goal without wind, by place and whether the key is held."""
    places = [(row, column) for row, line in enumerate(rows) for column in range(len(line))]
    states = [(at, has_key) for at in places if tile(rows, at) != "#" for has_key in (False, True)]
    left = {state: 0 for state in states if tile(rows, state[0]) == "G"}
    for steps in range(1, len(states)):
        for state in states:
            if state not in left and any(left.get(moved(rows, *state, move)) == steps - 1 for move in MOVES):
                left[state] = steps
    return left


def careless_game(seed, row, turns, care):
    """The messages of a game: steps lead nearer, or in any direction."""
    draw = random.Random(f"steps {seed}")
    game = Grid()
    start = game.reset(row, seed)
    left = steps_left(game.map)
    messages = [{"role": "user", "content": f"{row['prompt'][0]['content']}\n{start}"}]
    for _ in range(turns):
        state = game.at, game.has_key
        nearer = [move for move in MOVES if left[moved(game.map, *state, move)] < left[state]]
        move = draw.choice(nearer if draw.random() < care else list(MOVES))
        messages.append({"role": "assistant", "content": move})
        answer = game.step(move)
        if answer.terminated:
            break
        messages.append({"role": "user", "content": answer.messages})
    return messages if answer.terminated else messages[:-1]


def main(folder, num_games=None, *, game="windy", **sft):
    """Train a model of 60,000 parameters on careless games, and write the prompts of new ones."""
    about, row = GAMES[game], prompt_row(game)
    care = about.get("care", CARE)
    numbers = range(num_games or about.get("games", DEMONSTRATED))
    games = [careless_game(f"game {number}", row, about["turns"], care) for number in numbers]
    runpy.run_path(str(GUESS))["train_start"](folder, games, [row], sizes=SIZES, **sft)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", nargs="?", choices=GAMES, default="windy", help="default: windy")
    game = parser.parse_args().game
    main(Path("runs") / game, game=game)
