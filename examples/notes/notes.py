"""Remember the largest of many numbers with notes: a game that is longer than the context of the model.

python examples/notes/notes.py                  # the model, in runs/notes
kedge ppo --config examples/notes/run.yaml      # PPO: it learns to write down the larger number

A turn reads the task, what the policy wrote in its last turn, and the next number; it does not read the history.
"""

import random
import runpy
from pathlib import Path

import kedge

TASK = "Note the largest number."
NUMBERS, LARGEST = 16, 40
CARE = 0.85
"""Share of the demonstrated notes that are right; the others have the smaller number."""
GUESS = Path(__file__).parents[1] / "guess" / "guess.py"
SIZES = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "context_length": 32, "initializer_range": 0.05}


def task(note, number):
    """What a turn reads after the first one."""
    return f"{TASK}\nNoted: {note}. Next: {number}."


class Notes:
    """Shows numbers one by one, each with the note that the policy wrote; pays 1 if the last note is the largest."""

    def reset(self, row, seed):
        """Draw the numbers."""
        draw = random.Random(seed)
        self.numbers = [draw.randint(1, LARGEST) for _ in range(NUMBERS)]
        self.shown = 1
        return f"Noted: 0. Next: {self.numbers[0]}."

    def step(self, text):
        """Take a note; a new context has it, and the next number."""
        if self.shown == NUMBERS:
            return kedge.Step(reward=float(text == str(max(self.numbers))), terminated=True)
        self.shown += 1
        return kedge.Step(context=task(text, self.numbers[self.shown - 1]))


def careless_turn(number):
    """A turn with the larger number as its note, or the smaller one."""
    draw = random.Random(f"turn {number}")
    noted, shown = draw.randint(0, LARGEST), draw.randint(1, LARGEST)
    note = max(noted, shown) if draw.random() < CARE else min(noted, shown)
    return [{"role": "user", "content": task(noted, shown)}, {"role": "assistant", "content": str(note)}]


def main(folder, num_turns=24_000, **sft):
    """Train a model of 60,000 parameters on careless turns, and write the prompts of games."""
    row = {"prompt": [{"role": "user", "content": TASK}]}
    turns = [careless_turn(number) for number in range(num_turns)]
    runpy.run_path(str(GUESS))["train_start"](folder, turns, [row], sizes=SIZES, **sft)


if __name__ == "__main__":
    main(Path("runs") / "notes")
