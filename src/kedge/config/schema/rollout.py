"""`rollout` and `environment`: sampling of responses, the score of responses without a stop token, and episodes."""

from functools import partial
from typing import Annotated, Literal

from annotated_types import Len
from pydantic import Field, field_validator

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import Parameters, Section, StringList, check, rewrite
from kedge.config.schema.update.former import with_parts


class VllmServers(Parameters):
    """A server that kedge starts in a separate environment, or servers that are already running."""

    servers: StringList = field([])
    """The Python of an environment with vLLM, in which kedge starts a server and ends it with the run; or the addresses
    of servers that are running, among which the prompts are shared out.

    Source: kedge: a separate environment, since vLLM pins its own torch and transformers
    Text: a file, or an address or a list of them
    """
    folder: str | None = None
    """Folder for the weights that the servers read; they must be able to read it; null is one in memory (/dev/shm) if
    there is room, else the run's own.

    Source: kedge
    Text: a folder
    """
    devices: str | None = None
    """GPUs of the server that kedge starts, as in CUDA_VISIBLE_DEVICES, such as 1 or 2,3; null leaves the choice to
    vLLM.

    Source: kedge
    Text: GPU numbers
    """
    memory: float = field(0.3, gt=0, le=1)
    """Share of the device's memory (on a CPU: of the machine's) that the server may use.

    Source: kedge: trainer and server often share a machine
    Too high: the trainer, or the server itself, runs out of memory
    Too low: few responses are sampled at a time, or the server does not start
    """
    args: StringList = field([])
    """Further arguments of the server that kedge starts, such as '--tensor-parallel-size 2'.

    Source: kedge: none
    """

    @property
    def python(self) -> str | None:
        """The Python that starts a server: the first entry that is not an address."""
        return next((each for each in self.servers if not each.startswith(("http://", "https://"))), None)

    @check
    def _check_one_kind(self) -> None:
        if len(self.servers) > 1 and self.python:
            raise ValueError(f"{self.python} is not an address such as http://localhost:8000")


TokenId = Annotated[int, Field(strict=True)]

MOST_RESPONSES = 1_000_000
"""Maximum number of responses sampled before a step; the largest published batches have some ten thousand."""


class EnvironmentConfig(Section):
    """Episodes of several turns with an environment or tools; rollout.max_new_tokens counts both sides."""

    source: str | None = None
    """The environment's class, `file.py:Class` or `package.module:Class`: with `reset(row, seed)` and `step(text)`, or
    with public methods that are tools; or an agent, `file.py:function` of a row and a client of OpenAI's; or an OpenEnv
    server, `openenv:URL`; null is a single turn.

    Source: kedge: a single turn
    Text: a class
    """
    max_turns: int = field(8, ge=1)
    """Turns of the policy in an episode; more end it.

    Source: kedge
    Too high: policies that never finish make long episodes
    Too low: the task cannot be solved in time
    """
    max_turn_tokens: int | None = field(None, ge=1)
    """Tokens of one turn of the policy: longer turns are cut there and answered; null is as many as are left of
    rollout.max_new_tokens.

    Source: kedge: turns end with a stop token
    Too high: policies that do not stop spend the whole episode on one turn
    Too low: turns are cut off before they end
    """
    timeout: float = field(30.0, gt=0)
    """Seconds that one call of an episode may take. A later answer ends the episode; a call that cannot be interrupted
    ends the run.

    Source: kedge
    Too high: a hanging environment blocks the run for this long
    Too low: slow answers end episodes
    """
    on_error: Literal["stop", "drop"] = "drop"
    """After a failed call (if it opens an episode, after a second one): stop the run, or drop the episode from the
    update. If all episodes of a batch fail, the run stops.

    Source: kedge: as a late answer
    """


class RolloutConfig(Section):
    """Sampling during PPO. Each update samples num_prompts × num_responses responses."""

    num_prompts: int = field(64, ge=1)
    """Prompts per update.

    Source: kedge: fits a laptop; the presets have the papers' 512
    Too high: updates are slow, and the same number of responses gives fewer of them
    Too low: the advantages, and so the steps, are noisy
    """
    num_responses: int = field(1, ge=1)
    """Responses per prompt in each update.

    Source: Ziegler, Stiennon, N+
    Too high: fewer different prompts for the same cost
    Too low: no harm in PPO, where the critic is the baseline; with two or three, the baseline of rloo or grpo is noisy
    """
    max_new_tokens: int = field(64, ge=1)
    """Maximum response length in tokens, including the stop token.

    Source: kedge: close to the 48 to 53 of the TL;DR papers
    Too high: time and memory go into rambling responses, and credit is spread over more tokens
    Too low: responses are cut off before they end
    """
    temperature: float = field(1.0, ge=1e-3)
    """Divides the logits, both in sampling and in every logprob of the policy and the reference.

    Source: InstructGPT; at 1 the trained policy is the one that is served. The TL;DR papers use 0.7
    Too high: responses become incoherent, and the policy learns from text it would never serve
    Too low: all responses to a prompt are alike, so there is nothing to learn from
    """
    stop_token: str | int | list[str | TokenId] | None = None
    """Token that ends a response, as text or as an id, or a list of such tokens; null is the tokenizer's EOS, the ids
    in the model's generation_config.json, and the token that ends a turn of its chat template.

    Source: N+; Ziegler stopped at a newline
    """
    missing_eos_score: (
        float
        | Literal["auto", "mask"]
        | Annotated[dict[Literal["subtract"], float | Literal["auto"]], Len(1, 1)]
        | None
    ) = field("auto")
    """Score of a response that has no stop token; null: its own; {subtract: 1}: subtracted from its score; mask: its
    score stays and counts in the baseline of its prompt, but PPO takes no step on it. Scores per token stay, and so
    does an environment's pay per turn, unless the estimator compares responses. auto: null if all rewards are
    functions; with a reward model −1, or the mean score of the first update's stopped responses minus the standard
    deviation of all scores, if lower; with {subtract: auto}, −1 or minus that standard deviation.

    Source: −1 in Stiennon and N+, whose scores have mean 0; kedge: lower where scores lie below −1, so that not
        stopping gains nothing. Reward models are not trained on cut-off text; functions can check for themselves. mask:
        DAPO's overlong filtering (arXiv 2503.14476, §3.4), for responses that could have been right; its soft penalty
        is the reward kedge.rewards.penalties:too_long
    Too high: cut-off responses pay off, and the policy learns to ramble
    Too low: the policy learns little but to stop, and stops too early
    """
    micro_batch_size: int | None = field(None, ge=1)
    """Responses sampled at once; null samples the whole update at once. Does not change the result.

    Source: kedge: the fastest, if memory suffices
    Too high: out of memory
    Too low: the device is underused
    """

    engine: Choice[Literal["builtin", "vllm"], Literal["vllm"], VllmServers] = field("builtin")
    """What samples the responses: kedge itself, or vLLM servers, which get the policy's weights after every update:
    {vllm: .vllm/bin/python}, or {vllm: {servers: .vllm/bin/python, memory: 0.5}}.

    Source: kedge: builtin needs nothing else and is exact in fp32; vllm is faster for large models on GPUs
    """
    max_staleness: int = field(0, ge=0)
    """Updates by which the weights that sample may be older than those that are trained: the responses of this many
    later updates are sampled and scored in the background during an update. 0: sampling and training take turns.

    Source: kedge: 0 is exact; 1 (one step off) hides the shorter of the two sides where both have devices of their own
    Too high: responses of an old policy: their importance weights are truncated, and an update learns less
    Too low: one of rollout and training always waits for the other
    """

    @property
    def vllm(self) -> VllmServers:
        """The servers of `engine=vllm`."""
        return self.engine.parameter or VllmServers()

    _read_former = rewrite(classmethod(partial(with_parts, section="rollout")))

    @check
    def _check_size(self) -> None:
        check_responses("rollout", self.num_prompts, self.num_responses)

    @field_validator("stop_token")
    @classmethod
    def _refuse_no_stop_token(cls, value: object) -> object:
        if value == []:
            raise ValueError("the list names no token; null stands for the model's own")
        return value

    @property
    def subtracts_missing_eos(self) -> bool:
        """True if `missing_eos_score` is subtracted from the score instead of replacing it."""
        return isinstance(self.missing_eos_score, dict)

    @property
    def masks_truncated(self) -> bool:
        """True if no step is taken on responses without a stop token."""
        return self.missing_eos_score == "mask"

    def eos_score(self, *, reward_model: bool) -> float | Literal["auto"] | None:
        """The score of a response without a stop token; None keeps its score, `auto` leaves it to the first update.

        Also None if these responses are masked.

        Args:
            reward_model: A reward with a nonzero weight is a reward model; otherwise `auto` is None.
        """
        score = self.missing_eos_score
        score = score["subtract"] if isinstance(score, dict) else score
        return None if score == "mask" or (score == "auto" and not reward_model) else score


def check_responses(section: str, num_prompts: int, num_responses: int) -> None:
    """Reject too many responses at a time, whose tables would not fit into memory.

    Raises:
        ValueError: There are over a million.
    """
    if num_prompts * num_responses > MOST_RESPONSES:
        raise ValueError(
            f"{section}.num_prompts × {section}.num_responses = {num_prompts * num_responses:,} responses; expected at "
            f"most {MOST_RESPONSES:,}"
        )
