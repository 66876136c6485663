"""`python -m bench.episodes MODEL`: what the turns of episodes cost the sampler.

Episodes of 2, 8 and 32 turns of 8 tokens, answered in some 20 tokens by an environment in a worker process, against one
turn of as many tokens. Afterwards episodes that end after 1 to 8 turns, and turns that end with a frequent token, after
1 to 32. `computed` are the tokens that the policy reads, per token that it has to read. Then the shares of an update of
PPO with as many turns, the second of a run.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import kedge
from bench.peers import model_folder
from bench.tables import Table
from kedge.data import Prompt, Rendered
from kedge.data.turns import TemplateTurns
from kedge.models import load_language_model, load_tokenizer, named_stop_tokens, own_stop_tokens, resolve_precision
from kedge.rollout import Sampler
from kedge.rollout.episodes import Limits
from kedge.rollout.player import Player
from kedge_tasks.environments import Step
from kedge_tasks.environments.client import Environment

TURN = 8
LONGEST = 32
ENDS = [".", ",", *(f"Ġ{word}" for word in ("the", "a", "and", "to", "of", "in"))]
REPLY = "Understood. What will the crew of the small boat do next?"


class Long:
    """Answers every turn."""

    def reset(self, row: dict[str, object], seed: int) -> None:
        """Do nothing."""

    def step(self, text: str) -> Step:
        """The same answer each time."""
        return Step(REPLY)


class Uneven(Long):
    """Ends after 1 to 8 turns."""

    def reset(self, row: dict[str, object], seed: int) -> None:
        """The seed decides how many."""
        self.left = seed % 8 + 1

    def step(self, text: str) -> Step:
        """The same answer until the end."""
        self.left -= 1
        return Step(REPLY, terminated=self.left == 0)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an instruction model with a chat template")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 8, 32])
    options = parser.parse_args()
    folder = model_folder(options.model)
    tokenizer = load_tokenizer(folder)
    model = load_language_model(folder, tokenizer=tokenizer, device="cpu")
    stops = (named_stop_tokens(tokenizer, None) or own_stop_tokens(tokenizer, model)).ids
    prompts = [
        Prompt(Rendered(""), {"messages": [{"role": "user", "content": f"Story {n}."}]}) for n in range(options.rows)
    ]
    precision = resolve_precision("auto", "cpu", width=model.causal.config.hidden_size)
    seconds_of_templates = [0.0]
    after = TemplateTurns.after

    def timed(*given: object) -> list[int]:
        started = time.perf_counter()
        try:
            return after(*given)  # pyright: ignore[reportArgumentType]
        finally:
            seconds_of_templates[0] += time.perf_counter() - started

    TemplateTurns.after = timed  # pyright: ignore[reportAttributeAccessIssue]
    updates = [update_row(Path(folder), options.rows, turns, seconds_of_templates) for turns in options.turns]
    read = [0]
    model.causal.get_input_embeddings().register_forward_hook(
        lambda _module, inputs, _output: read.append(inputs[0].numel())
    )
    rows: list[list[str]] = []
    for name, turns, longest in [*(("Long", count, TURN) for count in options.turns), ("Uneven", 8, TURN)] + [
        (name, 8, LONGEST) for name in ("Long", "Uneven")
    ]:
        room = turns * (longest + 40)
        environment = Environment(f"{Path(__file__)}:{name}", timeout=60.0)
        player = Player(environment, Limits(turns, room, longest), by_turn=True)
        player.begin(stops, None, None, tokenizer, prompts[:1])
        ends = [*stops, *map(tokenizer.convert_tokens_to_ids, ENDS)] if longest == LONGEST else stops
        sampler = Sampler(model, tokenizer.pad_token_id, ends, room, precision=precision)  # pyright: ignore[reportArgumentType]
        model.trunk.decoder([[1]], max_new_tokens=1, pad_id=0)  # tries out what the model can do
        read.clear()
        seeds = range(options.rows)
        seconds_of_templates[0] = 0.0
        started = time.perf_counter()
        rollout = sampler.generate((), seeds=seeds, dialogue=player.episodes(tokenizer, prompts, seeds))
        episodes = time.perf_counter() - started
        computed = sum(read) / int(rollout.prompt_mask.sum() + rollout.token_mask.sum() - options.rows)
        waited = player.metrics(rollout)["time/environment"]
        own = int(rollout.action_mask.sum(-1).max())
        opened = player.episodes(tokenizer, prompts, seeds).open(seeds)
        model.forbidden[list(stops)] = True  # as many tokens in one turn
        model.forbidden_ids = model.forbidden.nonzero().squeeze(1)
        one = Sampler(model, tokenizer.pad_token_id, stops, own, precision=precision)  # pyright: ignore[reportArgumentType]
        started = time.perf_counter()
        one.generate(opened, seeds=seeds)
        single = time.perf_counter() - started
        model.forbidden[list(stops)] = False
        model.forbidden_ids = model.forbidden.nonzero().squeeze(1)
        tokens = int(rollout.action_mask.sum())
        rows.append(
            [
                (f"{turns}" if name == "Long" else "1 to 8") + f" of {'1 to ' * (longest > TURN)}{longest}",
                f"{tokens:,} of {int(rollout.token_mask.sum()):,}",
                f"{episodes:.1f}",
                f"{100 * waited / episodes:.1f} %",
                f"{100 * seconds_of_templates[0] / episodes:.1f} %",
                f"{computed:.2f}",
                f"{tokens / episodes:.0f}",
                f"{own * options.rows / single:.0f}",
            ]
        )
        player.environment.close()
    header = ["turns", "own tokens", "seconds", "environment", "template", "computed", "own tokens/s", "in one turn"]
    print(f"{options.rows} rows, {precision}, {torch.get_num_threads()} threads, {os.uname().machine}\n")
    print(Table("Episodes", header, rows).markdown())
    header = ["turns", "an update, s", "sampling", "environment", "template"]
    print("\n" + Table("Shares of an update", header, updates).markdown())


def update_row(folder: Path, rows: int, turns: int, seconds_of_templates: list[float]) -> list[str]:
    """The seconds of an update with episodes of so many turns, and the shares of its parts."""
    templates: list[float] = []
    with TemporaryDirectory() as out:
        run = kedge.ppo(
            model=folder,
            prompts=[[{"role": "user", "content": f"Story {number}."}] for number in range(rows)],
            environment=f"{Path(__file__)}:Long",
            out=Path(out) / "run",
            on_update=lambda update: templates.append(seconds_of_templates[0]),
            **{
                "num_prompts": rows,
                "num_updates": 2,
                "environment.max_turns": turns,
                "environment.max_turn_tokens": TURN,
                "rollout.max_new_tokens": turns * (TURN + 40),
                "checkpoint.keep_last": False,
                "checkpoint.keep_best": "none",
                "report": False,
            },
        )
    last = run.metrics[-1]
    whole = last["time/update"]
    parts = last["time/rollout"], last["time/environment"], templates[1] - templates[0]
    return [f"{turns}", f"{whole:.1f}", *(f"{100 * part / whole:.1f} %" for part in parts)]


if __name__ == "__main__":
    main()
