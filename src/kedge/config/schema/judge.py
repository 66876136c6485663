"""`judge`: judges behind an API, and limits on the requests to them."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Parameters, Section


class CostLimit(Parameters):
    """The most that judges may cost, with the prices of their tokens."""

    cost: float = field(..., gt=0)
    """The most that a run may cost, in the prices' currency.

    Source: kedge
    """
    price_in: float = field(..., ge=0)
    """Price of a million tokens of prompts.

    Source: the server's list
    """
    price_out: float = field(..., ge=0)
    """Price of a million tokens of answers.

    Source: the server's list
    """


class JudgeConfig(Section):
    """Judges behind an API: `openai:MODEL@URL` as evaluate.judge, rlhf.labeler or a reward.

    The limits hold for all judges of a run together, also over failed requests and resumed runs.
    """

    rubric: str | None = None
    """A text file that says what a good response is; null is a short text of kedge's.

    Source: kedge: correct, as asked, no longer than needed
    Text: a file
    """
    max_tokens: int = field(1024, ge=1)
    """Maximum length of an answer with its reasoning, in tokens.

    Source: kedge: a few sentences before the verdict; a reasoning model needs more
    Too high: each request reserves this much of max_total_tokens and max_cost until it ends
    Too low: answers are cut off, and asked for again
    """
    concurrency: int = field(8, ge=1)
    """Requests at the same time.

    Source: kedge: most servers batch this many
    Too high: requests wait on the server until they time out
    Too low: slow
    """
    requests_per_minute: int | None = field(None, ge=1)
    """Most requests in any 60 seconds; null: no limit.

    Source: kedge: off
    Too high: the server refuses requests, which are then repeated
    Too low: slow
    """
    max_requests: int | None = field(None, ge=1)
    """Most requests of a run, failed ones included; null: no limit.

    Source: kedge: off
    Too high: a mistake in the settings is expensive
    Too low: the run ends early, and is resumed with a higher limit
    """
    max_total_tokens: int | None = field(None, ge=1)
    """Most tokens of prompts and answers of a run; null: no limit. A request is only sent if its upper bound fits.

    Source: kedge: off
    Too high: a mistake in the settings is expensive
    Too low: the run ends early, and is resumed with a higher limit
    """
    max_cost: CostLimit | None = None
    """Most that a run may cost: {cost: 5, price_in: 0.15, price_out: 0.6}.

    Source: kedge: off
    """
    timeout: float = field(120.0, gt=0)
    """Seconds that a request may take.

    Source: kedge: a large model on a busy server
    Too high: a server that hangs blocks the run
    Too low: slow answers are paid for, and not used
    """
    retries: int = field(5, ge=0)
    """Further requests after one that failed with status 429 or 5xx, a timeout or a closed connection, after about 1 s,
    2 s, 4 s and so on, or when the server says.

    Source: kedge: half a minute of failures is bridged
    Too high: a server that is down delays the end of the run
    Too low: a short failure ends the run
    """
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable with the key, which is sent if the variable is set; null: none is sent.

    Source: OpenAI
    Text: a name
    """
    allow_http: bool = False
    """Allow sending the key unencrypted (http) to another machine.

    Source: kedge: a key is for those who have it
    """
