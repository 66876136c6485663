"""An OpenAI-compatible server: one request at a time, with one-line errors that never contain the key."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kedge_base.errors import LastingRewardError, RewardError
from kedge_base.texts import error_text, shortened
from kedge_base.version import __version__
from kedge_tasks.judge.ledger import Limits

OPENAI = "https://api.openai.com/v1"
EXPECTED = "openai:MODEL@URL, such as openai:llama3:8b@http://127.0.0.1:11434/v1"
PASSING = {408, 409, 425, 429, *range(500, 600)}
"""Statuses after which the same request may succeed later."""

MOST_BYTES = 16 * 2**20
_SPEC = re.compile(r"openai:(?P<model>\S+?)(?:@(?P<url>https?://\S*))?")


class RequestError(Exception):
    """A request that failed; the message is for one line.

    Attributes:
        status: The status of the answer; 0 without one.
        wait: Seconds that the server asks to wait before the next request; None if it does not.
        is_passing: Whether the same request may succeed later.
        is_free: Whether the server certainly did no work for it.
    """

    def __init__(self, message: str, *, status: int = 0, wait: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.wait = wait
        self.is_passing = status < 300 or status in PASSING
        self.is_free = 300 <= status < 500 and status != 408


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key would go to wherever the server says."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Refuse, so that urllib raises an error."""


@dataclass(frozen=True)
class Endpoint:
    """A model on a server.

    Attributes:
        model: The model's name there.
        url: The address, up to `/v1`.
        timeout: Seconds that a request may take.
        key: Sent as the bearer token; empty for none.
        key_variable: Where it comes from, for messages.
    """

    model: str
    url: str
    timeout: float
    key: str = field(repr=False)
    key_variable: str | None

    @classmethod
    def of(cls, judge: str, limits: Limits) -> Endpoint:
        """Read a judge's name, and the key from the environment.

        Raises:
            RewardError: The name is not of this form; the address holds a secret; the key cannot be sent.
        """
        found = _SPEC.fullmatch(judge)
        if found is None or (found["url"] is None and "@" in found["model"]):
            raise RewardError(f"judge {judge.partition('://')[0]!r} is not of the form {EXPECTED}")
        url = (found["url"] or OPENAI).rstrip("/").removesuffix("/chat/completions")
        variable = limits.key_variable
        is_plain = False
        with suppress(ValueError):  # such as a port that is not a number; the message would have a part of a password
            parts = urlsplit(url)
            is_plain = parts.hostname and parts.port != 0 and not any((parts.username, parts.password, *parts[3:]))
        if not is_plain:
            raise RewardError(
                f"judge openai:{found['model']}: the address must be a host and a path, with a port if needed, and "
                "without a user, a password or a query; put the key into the environment variable that "
                "judge.key_variable names"
            )
        key = os.environ.get(variable or "", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise RewardError(f"the key in the variable {variable} has characters that no key has")
        if key and url.startswith("http:") and not _is_here(url) and not limits.allow_http:
            raise RewardError(
                f"judge {judge}: the key in {variable} would be sent unencrypted; use https, judge.key_variable=null "
                "to send no key, or judge.allow_http=true"
            )
        return cls(found["model"], url, limits.timeout, key, variable)

    def check(self) -> None:
        """List the server's models, to check that it answers, accepts the key and has the model.

        Servers without such a list are not checked further.

        Raises:
            RewardError: A check fails.
        """
        try:
            listed = self.request("/models")
        except RequestError as error:
            if error.status not in (0, 401, 403, *range(300, 400)):
                return
            raise self.failed(error) from None
        rows = listed.get("data")
        names = [str(row.get("id")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        # Azure lists what can be deployed, not the deployments.
        if names and self.model not in names and not self.url.partition("/openai")[0].endswith(".azure.com"):
            some = _short(self.clean(", ".join(names)))
            raise RewardError(f"judge openai:{self.model}: {self.url} has no such model; it has {some}")

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, a POST if there is a body; return the answer's JSON.

        Raises:
            RequestError: There is no usable answer.
        """
        headers = {"Content-Type": "application/json", "User-Agent": f"kedge/{__version__}"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else encoded(body)
        sent = urllib.request.Request(self.url + path, data, headers)
        proxies = urllib.request.ProxyHandler({} if _is_here(self.url) else None)
        opener = urllib.request.build_opener(proxies, _NoRedirects())
        until = time.monotonic() + self.timeout
        try:
            with opener.open(sent, timeout=self.timeout) as answer:
                text = self._read(answer, until)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, until) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            is_late = isinstance(reason, TimeoutError)
            what = f"no answer within {self.timeout:g} s" if is_late else error_text(reason)  # pyright: ignore
            raise RequestError(self.clean(what)) from None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise RequestError(f"the answer is not a JSON object but {_short(self.clean(text))!r}", status=200)
        return found

    def _read(self, answer: Any, until: float) -> str:
        """Read a body, which a server may send drop by drop or without an end."""
        parts = bytearray()
        while piece := answer.read1(1 << 16):
            parts += piece
            if time.monotonic() > until:
                raise TimeoutError
            if len(parts) > MOST_BYTES:
                raise RequestError("the answer has no end", status=200)
        if answer.length:
            raise http.client.IncompleteRead(bytes(parts), answer.length)
        return parts.decode("utf-8", "replace")

    def _refused(self, error: urllib.error.HTTPError, until: float) -> RequestError:
        text = ""
        with suppress(OSError, http.client.HTTPException, RequestError):
            text = self._read(error, until)
        if 300 <= error.code < 400:
            host = urlsplit(str(error.headers.get("Location"))).netloc
            text = f"it redirects to {host}; name the address itself" if host else "it redirects"
        with suppress(ValueError, RecursionError, AttributeError):
            found = json.loads(text)
            inner = found.get("error", found)
            text = str(inner if isinstance(inner, str) else inner.get("message") or inner.get("detail") or text)
        after = error.headers.get("Retry-After", "")  # seconds, or a date
        wait = float(after) if re.fullmatch(r"\d{1,9}(\.\d+)?", after) else None
        line = _short(self.clean(f"{error.reason}: {text}"))
        later = f"; it asks to wait {after} s" if wait else ""
        return RequestError(f"{error.code} {line}{later}", status=error.code, wait=wait)

    def failed(self, error: RequestError) -> RewardError:
        """The error for the user."""
        hint = ""
        if error.status in (401, 403):
            where = self.key_variable or "the variable of judge.key_variable"
            hint = f"; {'is the key in ' + where + ' right?' if self.key else 'set ' + where + ' to the key'}"
        elif error.status == 404:
            hint = "; is the address complete, as in http://127.0.0.1:8000/v1, and the model's name right?"
        elif not error.status:
            hint = "; is the server running?"
        kind = RewardError if error.is_passing else LastingRewardError
        return kind(f"judge openai:{self.model} at {self.url}: {error}{hint}")

    def clean(self, text: str) -> str:
        """Remove the key from a text of the server, which may repeat what it was sent."""
        return text.replace(self.key, "[key]") if self.key else text


def encoded(body: Mapping[str, Any]) -> bytes:
    """Encode a body in UTF-8; lone surrogates become question marks."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _short(text: str) -> str:
    return shortened(" ".join(text.split()), 200)
