"""A live page: kept up to date from a run's files, for browsers on this machine; it can change nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kedge.errors import KedgeError
from kedge.system.local_server import PAGE_POLICY, Answer, LocalServer, Request

__all__ = ["LivePage", "page_server"]

REBUILD_SHARE = 10
"""Rebuilding the data takes at most one part in this many of the time: the machine belongs to the run."""

DATA_FILE = "data.json"


@dataclass(frozen=True)
class LivePage:
    """The page to serve.

    Attributes:
        version: A text that changes whenever the data does; cheap to compute.
        data: The data of the page, in JSON types.
        render: The page as HTML, from its data and the URL of newer data.
    """

    version: Callable[[], str]
    data: Callable[[], Mapping[str, Any]]
    render: Callable[[Mapping[str, Any], str], bytes]


def page_server(page: LivePage, *, port: int = 0) -> LocalServer:
    """A server of a live page; use it as a context.

    Args:
        page: The page.
        port: The local port; 0 picks a free one.

    Raises:
        ConfigError: The port is taken or not permitted.
    """
    return LocalServer(_Pages(page).answer, port=port)


class _Pages:
    """Answers requests for a live page and its data."""

    def __init__(self, page: LivePage) -> None:
        self._page = page
        self._lock, self._next_build = threading.Lock(), 0.0
        self._built: tuple[str, Mapping[str, Any]] = ("", {})

    def answer(self, request: Request) -> Answer:
        """The page, or its data if the browser has an older version."""
        try:
            if request.path == "":
                page = self._page.render(self._newest()[1], request.root + DATA_FILE)
                return Answer(HTTPStatus.OK, page, "text/html; charset=utf-8", policy=PAGE_POLICY)
            if request.path == DATA_FILE:
                version, data = self._newest()
                if request.known == version:
                    return Answer(HTTPStatus.NOT_MODIFIED, version=version)
                text = json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
                return Answer(HTTPStatus.OK, text, "application/json", version=version)
        except KedgeError as error:  # the run's folder was moved or is damaged
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode("utf-8", "backslashreplace"))
        return Answer(HTTPStatus.NOT_FOUND, b"Not found.\n")

    def _newest(self) -> tuple[str, Mapping[str, Any]]:
        """Version and data, rebuilt when there is something new, but not too often."""
        with self._lock:
            version = f'"{self._page.version()}"'
            if version != self._built[0] and time.monotonic() >= self._next_build:
                started = time.monotonic()
                self._built = (version, {**self._page.data(), "version": version})
                self._next_build = started + REBUILD_SHARE * (time.monotonic() - started)
            return self._built
