# SPDX-License-Identifier: Apache-2.0
"""Asks a Sonde server its questions over HTTP, as every other client does: with a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sonde import http_client
from sonde.errors import CaptureError, SinkError, UsageError
from sonde.input_files import open_input
from sonde.server.left_out import LeftOut

REQUEST_S = 30.0
"""A question may take 15 s at the server, and wait for its turn before."""
ANSWER_BYTES = 64 << 20
"""Of an answer that is read."""
MAX_VALUES = 4_000_000
"""Of an answer that is decoded: each takes 50 to 100 bytes of memory."""
_TOKEN_BYTES = 4_096

Value = str | int | float | Sequence[str]


class QuestionError(SinkError):
    """The server refused or did not answer; `status` is that of HTTP, 0 without an answer."""

    def __init__(self, cause: str, remedy: str, status: int = 0) -> None:
        super().__init__(cause, remedy)
        self.status = status


class ServerClient:
    """Questions to one server, with one token. Thread-safe: each request has its connection."""

    def __init__(
        self, url: str, token_file: Path | None = None, token: str | Callable[[], str] = ""
    ) -> None:
        """The token is that of `token_file`, or `token`, or what `token` returns for each request.
        Raises UsageError for an invalid URL, SinkError for a token that cannot be read."""
        try:
            parts = http_client.split_url(url)
        except ValueError as error:
            raise UsageError(
                f"{http_client.shown(url)!r} is no server's URL: {error}", "write https://HOST:PORT"
            ) from error
        if (token_file is not None or token) and http_client.is_in_the_clear(parts):
            raise UsageError("the token would cross the network in the clear", "write https://…")
        self.url = url.rstrip("/")
        self._token_file = token_file
        self._token = token
        self._headers()  # a token that cannot be read is reported now

    def ask(self, question: str, parameters: Mapping[str, Value] | None = None) -> Any:
        """The answer of /v1/QUESTION, parsed from JSON. Raises QuestionError, SinkError."""
        return self.request("GET", question, parameters)

    def ask_with_left_out(
        self, question: str, parameters: Mapping[str, Value] | None = None
    ) -> tuple[Any, LeftOut]:
        """The same, and what the answer lacks."""
        found, headers = self._request("GET", question, parameters)
        return found, LeftOut.of(headers)

    def request(self, method: str, path: str, parameters: Mapping[str, Value] | None = None) -> Any:
        """The answer to METHOD /v1/PATH, parsed from JSON. Raises QuestionError, SinkError."""
        return self._request(method, path, parameters)[0]

    def _request(
        self, method: str, path: str, parameters: Mapping[str, Value] | None
    ) -> tuple[Any, Mapping[str, str]]:
        """(the answer, its headers)"""
        query = urlencode(parameters or {}, doseq=True)
        try:
            answer = http_client.request(
                method,
                f"{self.url}/v1/{path}" + (f"?{query}" if query else ""),
                deadline_s=REQUEST_S,
                max_bytes=ANSWER_BYTES,
                headers=self._headers(),
                ours=True,
            )
        except (OSError, ValueError) as error:
            raise QuestionError(
                f"the server {http_client.shown(self.url)} does not answer: {error}",
                "start it with `sonde serve`, or check its URL",
            ) from error
        found = None
        if sum(map(answer.body.count, (b"{", b"[", b","))) <= MAX_VALUES:
            with suppress(ValueError, RecursionError):
                found = json.loads(answer.body)
        if answer.status == 200 and found is not None:
            return found, answer.headers
        cause, remedy = "no answer of a Sonde server", "check the server's URL"
        if isinstance(found, dict) and isinstance(found.get("error"), str):
            cause, remedy = found["error"], str(found.get("remedy", ""))
        raise QuestionError(f"{cause} (HTTP status {answer.status})", remedy, answer.status)

    def _headers(self) -> dict[str, str]:
        """The header with the token, as the file has it now: it may have been renewed."""
        if self._token_file is None:
            given = self._token if isinstance(self._token, str) else self._token()
            return {"Authorization": f"Bearer {given}"} if given else {}
        try:
            with open_input(self._token_file) as file:
                token = file.read(_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, CaptureError, ValueError) as error:
            raise SinkError(
                f"the token in {self._token_file} cannot be read: {error}",
                "write one that `sonde token make --scope read` printed",
            ) from error
        if not token:
            raise SinkError(f"{self._token_file} is empty", "write a token into it")
        return {"Authorization": f"Bearer {token}"}
