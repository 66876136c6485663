"""Plays episodes of several turns, with an environment as the other side of the policy's conversations."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import ENDINGS, Rollout
from kedge.data import Prompt, Rendered
from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.turns import PlainTurns, TemplateTurns, ToolUse, Turns
from kedge.rollout.privileged import PrivilegedText
from kedge_base.errors import DataError, EnvError
from kedge_base.thoughts import opened_thought
from kedge_base.workers.codec import own_copy

CUT_OFF = ("truncated", "context_overflow", "timeout")
"""Endings from outside the task: the final state has a value, which the critic estimates."""

FAILED = ENDINGS.index("failed")
LONGEST_MARK = 40
"""Number of final tokens in which the tag of a thought is looked for."""

_NUMBERS = itertools.count()

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Limits:
    """The limits of an episode.

    Attributes:
        turns: Turns of the policy.
        tokens: Tokens of both sides after the prompt.
        turn_tokens: Tokens of one turn of the policy; None for all remaining tokens.
        prompt_tokens: Tokens that it may open with; None for no limit.
        on_error: The effect of a failed call: the run ends, or the episode has no score.
    """

    turns: int
    tokens: int
    turn_tokens: int | None = None
    prompt_tokens: int | None = None
    on_error: Literal["stop", "drop"] = "drop"


@dataclass
class _State:
    """An episode that is being played.

    `opening` is the tag of a thought that was opened for the policy's turn; parsing tool calls needs it.
    """

    number: int
    length: int = 0
    turns: int = 0
    calls: int = 0
    errors: int = 0
    ending: str = ""
    opening: str = ""
    rewards: dict[int, float] = field(default_factory=dict)
    privileged: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _WaitingTime:
    """Seconds that sampling has waited for an environment."""

    seconds: float = 0.0


class Answer(Protocol):
    """The answer of an environment to a turn of the policy."""

    @property
    def messages(self) -> Messages:
        """The messages that the policy reads next."""
        ...

    @property
    def reward(self) -> float:
        """The reward of the policy's turn."""
        ...

    @property
    def ending(self) -> str | None:
        """How the episode ended; None if it continues."""
        ...

    @property
    def num_calls(self) -> int:
        """Number of tool calls of the policy."""
        ...

    @property
    def num_errors(self) -> int:
        """Number of failed calls."""
        ...

    @property
    def privileged(self) -> Mapping[str, Any]:
        """The critic's privileged information about an episode that was opened, by name."""
        ...


class Environment(Protocol):
    """The other side of episodes, which are identified by number.

    Attributes:
        name: Its name in errors.
        failure: The message about the last failed call.
    """

    name: str
    failure: str

    @property
    def tools(self) -> ToolUse | None:
        """The tools that the policy may call."""
        ...

    def open(self, episodes: Mapping[int, tuple[Mapping[str, Any], int]]) -> Mapping[int, Answer | None]:
        """Start episodes, each with a row of the data and a seed; return what follows the prompt, or None for a
        failure.
        """
        ...

    def step(self, texts: Mapping[int, str]) -> Mapping[int, Answer]:
        """Send a text to each of some episodes."""
        ...

    def finish(self, episodes: Iterable[int]) -> Mapping[int, float | None]:
        """End episodes; return the reward of each beyond those of its turns, or None for a failure."""
        ...

    def close(self) -> None:
        """End the environment's process, if any."""
        ...


class EnvironmentReward:
    """A reward source that returns an environment's rewards.

    Args:
        name: The environment's name.
        by_turn: Place each turn's reward at the turn's last token; otherwise their sum is the response's score.
    """

    def __init__(self, name: str, *, by_turn: bool) -> None:
        self.name = name
        self.models: Mapping[str, Any] = {}
        self._by_turn = by_turn

    def check(self, columns: Collection[str]) -> None:
        """Do nothing, because an environment reads the rows itself."""

    def score(self, responses: Any) -> list[Any]:
        """Return each response's rewards per token, or their sum; None for failed episodes and other responses."""
        if not responses.paid:
            return [None] * len(responses)
        return [None if math.isnan(sum(row)) else row if self._by_turn else sum(row) for row in responses.paid]


class Player:
    """Plays episodes of an environment with the policy.

    Args:
        environment: The environment.
        limits: The limits of an episode.
        by_turn: Place each turn's reward at the turn's last token; see `EnvironmentReward`.
        say: Prints a line to the user about the policy's chat template.
    """

    def __init__(
        self, environment: Environment, limits: Limits, *, by_turn: bool, say: Callable[[str], None] | None = None
    ) -> None:
        self.environment = environment
        self.reward = EnvironmentReward(environment.name, by_turn=by_turn)
        self._limits = limits
        self._say = say
        self._stop_ids: frozenset[int] = frozenset()
        self._privileged: PrivilegedText | None = None
        self._turns: dict[tuple[int, bool], Turns] = {}
        self._waited = _WaitingTime()
        self._waited_before = 0.0

    def begin(
        self,
        stop_ids: Collection[int],
        prompt_tokens: int | None,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        privileged: PrivilegedText | None = None,
    ) -> None:
        """Examine the policy's tokens and template, and try to open an episode, before anything expensive starts.

        Args:
            stop_ids: The tokens that end a turn.
            prompt_tokens: Tokens that an episode may open with; None for no limit.
            tokenizer: The policy's.
            prompts: A row to try; may be empty.
            privileged: The critic's privileged information.

        Raises:
            EnvError: The environment failed.
            DataError: A conversation cannot continue with this chat template, opens with too many tokens, or lacks
                privileged information.
        """
        self._stop_ids = frozenset(stop_ids)
        self._privileged = privileged
        self._limits = replace(self._limits, prompt_tokens=prompt_tokens)
        if prompts:
            trial = self.episodes(tokenizer, prompts, [0])
            trial = replace(trial, limits=replace(trial.limits, on_error="stop"))
            trial.open([0])
            if privileged is not None:
                privileged.ids(trial.rows()[0] or {}, tokenizer, f"an episode of {self.environment.name}")
            trial.end()

    def episodes(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        *,
        max_new_tokens: int | None = None,
    ) -> Episodes:
        """The other side of a batch of conversations.

        Args:
            tokenizer: The policy's.
            prompts: A row of the data for each.
            seeds: A seed for each.
            max_new_tokens: Tokens of both sides, if fewer than the player's limit, for example because of a schedule.
        """
        turns = [self._turns_of(tokenizer, prompt) for prompt in prompts]
        limits = replace(self._limits, tokens=max_new_tokens or self._limits.tokens)
        given = (tokenizer, prompts, seeds, limits, self._stop_ids, self._waited, self._privileged)
        return Episodes(self.environment, turns, *given)

    def check(self, rollout: Rollout) -> Rollout:
        """Check the episodes that were played.

        Raises:
            EnvError: The environment failed in all of them, for example because of a bug in it.
        """
        if rollout.ending is not None and bool((rollout.ending == FAILED).all()):
            raise EnvError(f"{self.environment.failure or self.environment.name}: it failed in all episodes")
        return rollout

    def metrics(self, rollout: Rollout, sampled: Sequence[Rollout] = ()) -> dict[str, float]:
        """Compute metrics of an update's episodes: turns, endings, tools, and the environment's seconds.

        Args:
            rollout: The episodes that have a score. Responses from elsewhere have no metrics.
            sampled: All episodes that were played, including those in which the environment failed.
        """
        if rollout.ending is None:
            return {}
        endings = [
            ending for each in sampled or [rollout] if each.ending is not None for ending in each.ending.tolist()
        ]
        own = rollout.action_mask
        # The environment's reply can be empty; a turn then directly follows the stop token of the previous one.
        stops = torch.isin(rollout.response_ids, torch.tensor([*self._stop_ids], device=own.device))
        starts = own & ~torch.nn.functional.pad(own & ~stops, (1, 0))[:, :-1]
        calls, errors = (0, 0) if rollout.calls is None else rollout.calls.sum(0).tolist()
        # Another thread may be sampling the next episodes, and adding to the sum.
        waited = self._waited.seconds
        before, self._waited_before = self._waited_before, waited
        return {
            "episode/turns": float(starts.sum(-1).float().mean()),
            "episode/length": float(rollout.token_mask.sum(-1).float().mean()),
            **{f"episode/{name}": endings.count(number) / len(endings) for number, name in enumerate(ENDINGS)},
            "time/environment": waited - before,
            **({"tools/calls": calls / len(own), "tools/failed": errors / calls} if calls else {}),
        }

    def _turns_of(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Turns:
        """Return the turn format of the chat template, or of plain text."""
        is_chat = isinstance(prompt.text, Rendered)  # a column `messages` may stand beside a plain text
        environment = self.environment
        if environment.tools and not is_chat:
            raise DataError(
                f"{environment.name} has tools, and the prompt {prompt.text[:40]!r} is plain text; tools are called in "
                'conversations: write the prompts as messages, such as {"prompt": [{"role": "user", "content": "…"}]}'
            )
        key = (id(tokenizer), is_chat)
        if key not in self._turns:
            self._turns[key] = self._chat_turns(tokenizer) if is_chat else PlainTurns(tokenizer)
        return self._turns[key]

    def _chat_turns(self, tokenizer: PreTrainedTokenizerBase) -> TemplateTurns:
        tools = self.environment.tools
        turns = TemplateTurns(tokenizer, self._stop_ids, tools=tools)
        if tools and turns.incompatibility and self._say:
            self._say(
                f"{self.environment.name}: the chat template {turns.incompatibility}; they are described before the "
                f"first question, and called as {tools.sample_text}"
            )
        return turns


@dataclass(frozen=True)
class Episodes:
    """The other side of a batch of conversations; see `kedge.rollout.engine.Dialogue`.

    Args:
        environment: The environment.
        turns: For each episode, the tokens around the policy's turns.
        tokenizer: The policy's.
        prompts: The row of each episode.
        seeds: A seed for each.
        limits: The limits.
        stop_ids: The tokens that end a turn of the policy.
        waited: Counts the environment's seconds.
        privileged: The critic's privileged information.
    """

    environment: Environment
    turns: Sequence[Turns]
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    limits: Limits
    stop_ids: Collection[int]
    waited: _WaitingTime
    privileged: PrivilegedText | None = None
    _states: dict[int, _State] = field(default_factory=dict)

    @property
    def longest_turn(self) -> int:
        """See `Dialogue`."""
        return min(self.limits.turn_tokens or self.limits.tokens, self.limits.tokens)

    def among(self, rows: Sequence[int]) -> Episodes:
        """See `Dialogue`."""
        parts = {name: [getattr(self, name)[row] for row in rows] for name in ("turns", "prompts", "seeds")}
        return replace(self, **parts, _states={})

    def open(self, rows: Sequence[int]) -> list[list[int]]:
        """See `Dialogue`.

        Raises:
            EnvError: The environment failed, and the run should stop.
            DataError: An episode opens with more tokens than there is room for, or cannot be rendered.
        """
        for row in rows:
            known = self._states.get(row)
            self._states[row] = _State(next(_NUMBERS) if known is None else known.number)
        # Copies: an environment may change its row, which other episodes and a resumed run read again.
        starts = {row: (own_copy(self.prompts[row].row), self.seeds[row]) for row in rows}
        opened = self._call(self.environment.open, starts)
        return [self._opening(row, opened[row]) for row in rows]

    def answer(self, said: Mapping[int, Sequence[int]]) -> dict[int, list[int] | None]:
        """See `Dialogue`."""
        for row, tokens in said.items():
            state = self._states[row]
            state.length += len(tokens)
            state.turns += 1
        texts = {row: self._text(row, tokens) for row, tokens in said.items() if not self._states[row].ending}
        turns = self._call(self.environment.step, texts)
        answers: dict[int, list[int] | None] = dict.fromkeys(said)
        answers |= {row: self._after(row, said[row], turn) for row, turn in turns.items()}
        # The environment has already ended episodes with its own endings.
        self._finish(row for row, turn in turns.items() if answers[row] is None and turn.ending is None)
        return answers

    def rows(self) -> list[Mapping[str, Any] | None]:
        """Each prompt's row, with the environment's privileged information; None for an episode that failed."""
        states = [self._states[row] for row in range(len(self.prompts))]
        return [
            None if state.ending == "failed" else {**prompt.row, **state.privileged}
            for prompt, state in zip(self.prompts, states, strict=True)
        ]

    def end(self) -> None:
        """End episodes that were only opened as a test."""
        self._finish(self._states)

    def finished(self, rollout: Rollout) -> Rollout:
        """See `Dialogue`."""
        rewards = torch.zeros_like(rollout.logprobs)
        for row, state in self._states.items():
            for slot, reward in state.rewards.items():
                rewards[row, slot] = reward
            if state.ending == "failed":
                rewards[row] = math.nan
        device = rewards.device
        states = [self._states[row] for row in range(len(self.prompts))]
        endings = [ENDINGS.index(state.ending) for state in states]
        if self.privileged is not None:
            rollout = self.privileged.added(rollout, self.rows(), self.tokenizer)
        return replace(
            rollout,
            rewards=rewards,
            ending=torch.tensor(endings, device=device),
            cut_off=torch.tensor([ENDINGS[ending] in CUT_OFF for ending in endings], device=device),
            calls=torch.tensor([[state.calls, state.errors] for state in states], device=device),
        )

    def _finish(self, rows: Iterable[int]) -> None:
        """End episodes, and add the environment's final rewards."""
        for row, reward in self._call(self.environment.finish, dict.fromkeys(rows)).items():
            if reward is None:
                self._fail(row)
            else:
                self._pay(row, reward)

    def _call(
        self, method: Callable[[dict[int, _Argument]], Mapping[int, _Result]], rows: Mapping[int, _Argument]
    ) -> dict[int, _Result]:
        """Call a method of the environment with its arguments by episode number, and measure the time."""
        numbers = {self._states[row].number: row for row in rows}
        started = time.perf_counter()
        found = method({number: rows[row] for number, row in numbers.items()})
        self.waited.seconds += time.perf_counter() - started
        return {row: found[number] for number, row in numbers.items()}

    def _fail(self, row: int) -> None:
        """Record that the environment failed in an episode, which ends with the policy's turn."""
        if self.limits.on_error == "stop":
            raise EnvError(self.environment.failure)
        self._states[row].ending = "failed"

    def _opening(self, row: int, opened: Answer | None) -> list[int]:
        if opened is None:
            self._fail(row)
            messages: Messages = [{"role": "user", "content": "…"}]  # the policy speaks before the episode is left
        else:
            messages = opened.messages
            self._states[row].privileged = opened.privileged
        try:
            tokens = self.turns[row].open(self.prompts[row], messages)
        except RowError as error:
            raise DataError(f"{self.environment.name} cannot open an episode: {error}") from error
        most = self.limits.prompt_tokens
        if not tokens or (most is not None and len(tokens) > most):
            raise DataError(
                f"an episode of {self.environment.name} opens with {len(tokens)} tokens (prompt, tools and what reset "
                f"says); expected 1 to {most}: the model's context less rollout.max_new_tokens"
            )
        return self._read(row, tokens)

    def _text(self, row: int, tokens: Sequence[int]) -> str:
        """Return the text of a turn without its final stop token, unless that may be the tag that closes a call."""
        ids = list(tokens)
        closes = self.environment.tools and str(self.tokenizer.decode(ids[-1:])).startswith("</")
        if ids and ids[-1] in self.stop_ids and not closes:
            ids = ids[:-1]
        return self._states[row].opening + str(self.tokenizer.decode(ids))

    def _read(self, row: int, tokens: list[int]) -> list[int]:
        """Record the thought that these tokens open for the next turn; return the tokens."""
        if self.environment.tools:
            self._states[row].opening = opened_thought(str(self.tokenizer.decode(tokens[-LONGEST_MARK:])))
        return tokens

    def _after(self, row: int, said: Sequence[int], turn: Answer) -> list[int] | None:
        """Return the tokens after a turn of the policy; None if the episode has ended."""
        state = self._states[row]
        self._pay(row, turn.reward)
        state.calls += turn.num_calls
        state.errors += turn.num_errors
        if turn.ending == "failed":
            self._fail(row)
        has_room = state.length < self.limits.tokens or said[-1] in self.stop_ids
        # With tools, an answer without a call ends an episode, unless it was cut off at the token limit.
        if turn.ending is not None and (has_room or turn.ending != "completed" or not self.environment.tools):
            state.ending = turn.ending
            return None
        if state.length >= self.limits.tokens:
            state.ending = "max_tokens"
            return None
        if state.turns >= self.limits.turns:
            state.ending = "max_turns"
            return None
        try:
            tokens = self.turns[row].after(said, turn.messages)
        except RowError as error:
            raise DataError(f"an answer of {self.environment.name} cannot be written as a message: {error}") from error
        if state.length + len(tokens) >= self.limits.tokens:
            state.ending = "context_overflow"
            return None
        state.length += len(tokens)
        return self._read(row, tokens)

    def _pay(self, row: int, reward: float) -> None:
        """Add a reward at the policy's last token so far."""
        state = self._states[row]
        slot = state.length - 1
        state.rewards[slot] = state.rewards.get(slot, 0.0) + reward
