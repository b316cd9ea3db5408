"""Requests to a running server, whoever runs it: replies are read as strict JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

import httpx
import orjson


@dataclass
class ApiClient:
    """A server's address and a connection to it."""

    url: str
    http: httpx.Client

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.http.post(path, content=json.dumps(body), headers=headers)

    def ok(self, path: str, body: object) -> dict:
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        return strict(reply.content)

    def events(self, path: str, body: dict) -> list[dict]:
        """The chunks of a stream, which ends with [DONE]."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [strict(line.removeprefix("data: ").encode()) for line in lines[:-1]]


def strict(data: bytes) -> dict:
    """JSON without NaN or Infinity (orjson reads neither)."""
    return orjson.loads(data)
