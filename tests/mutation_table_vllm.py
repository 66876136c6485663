"""Mutations of the engine that samples on vLLM servers."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["VLLM"]

ENGINE = "tests/rollout/vllm/test_engine.py"

VLLM = (
    Mutation(
        "tied-weights-sent-once",
        "models/language.py",
        "in self._causal.state_dict().items():",
        "in self._causal.named_parameters():",
        f"{ENGINE}::test_a_run_samples_on_the_server_and_sends_it_every_version_of_the_weights",
    ),
    Mutation(
        "prefixes-cached-by-former-weights",
        "rollout/vllm/engine.py",
        "seed=seed, salt=version)",
        "seed=seed, salt=self._run)",
        f"{ENGINE}::test_a_run_samples_on_the_server_and_sends_it_every_version_of_the_weights",
    ),
    Mutation(
        "weights-not-sent-after-a-rollback",
        "stages/ppo/engines.py",
        "return {} if self._version == version else",
        "return {} if self._version is not None else",
        f"{ENGINE}::test_weights_that_were_rolled_back_are_sent_before_the_next_rollout",
    ),
    Mutation(
        "server-started-again-without-weights",
        "rollout/vllm/fleet.py",
        "gone = self._send(member)",
        "gone = None",
        "tests/rollout/vllm/test_fleet.py::test_a_server_that_is_killed_is_started_again_with_the_current_weights",
    ),
)
