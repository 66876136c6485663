"""`python -m bench.cluster`: estimates the time and memory of a PPO update on a cluster, and chooses a layout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cluster import plan_cluster
from kedge_base.errors import KedgeError

OPTIONS: Mapping[str, tuple[Any, str]] = {
    "model": (str, "folder of a model, or a config.json"),
    "parameters": (str, "number of parameters instead: 7B, 350M"),
    "prompt-tokens": (float, "mean tokens of a prompt; 512"),
    "longest-prompt": (float, "by default twice the mean"),
    "response-tokens": (float, "mean tokens of a response; 512"),
    "longest-response": (float, "where the sampler stops; by default three times the mean, and a wider band"),
    "responses": (int, "responses per update, all prompts together; 1,024"),
    "card": (str, "H100, H200, H800, H20, A100, A800, MI300, GB200, or one with own figures"),
    "card-flops": (float, "own figure: dense bf16 peak, TFLOP/s"),
    "card-bandwidth": (float, "own figure: of its memory, TB/s"),
    "card-memory": (float, "own figure, GB"),
    "card-link": (float, "own figure: to the cards of the same machine, GB/s"),
    "card-network": (float, "own figure: its share of the machine's network, GB/s"),
    "cards": (int, "number of cards; by default 1, 2, 4, ... 512 are tried"),
    "rollout-cards": (int, "cards that only sample; 0: turns on all cards; by default both are tried"),
    "tensor-parallel": (int, "cards of one server; by default 1, 2, 4 and 8 are tried"),
    "staleness": (int, "0: synchronous, 1: one step off; by default both are tried"),
    "epochs": (int, "PPO epochs per update; 4"),
    "minibatches": (int, "optimizer steps per epoch; 1"),
    "reward-parameters": (str, "size of the reward model, 7B; by default a function"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    for name, (kind, meaning) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, help=meaning)
    parser.add_argument("--critic", choices=("shared", "separate", "none"), help="on the policy's trunk by default")
    parser.add_argument("--no-reference", dest="reference", action="store_const", const=False, help="no KL is computed")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    own = {name.removeprefix("card_"): given.pop(name) for name in [*given] if name.startswith("card_")}
    try:
        print(plan_cluster(**given, own_figures=own))
    except KedgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
