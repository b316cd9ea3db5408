"""The examples of docs/api.md and docs/logprobs.md are run, and their replies compared."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from api_client import ApiClient
from truespec.server.native_models import GenerateRequest, NativeSampling, TokenGenerateRequest
from truespec.server.openai_models import ChatRequest, CompletionRequest

DOCS = Path(__file__).parents[2] / "docs"
HOST = "http://127.0.0.1:30000"
# What differs from run to run, or with the drafter; its type is compared.
VOLATILE = {"id", "created", "seed", "e2e_latency", "cached_tokens", "num_cached_tokens"}
VOLATILE |= {"speculative_decoding", "origin", "accepted_position", "draft_logprob", "request_id"}
TOLERANCE = 0.005


class Example(NamedTuple):
    """A curl command of a page and the reply shown below it.

    Attributes:
        place: page and line.
        body: of a POST, `None` for a GET.
        kind: "json", or "text" for a stream.
    """

    place: str
    path: str
    body: dict | None
    kind: str
    reply: str


def examples() -> list[Example]:
    """Every example of both pages, in order."""
    found = []
    block = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for page in ("api.md", "logprobs.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = list(block.finditer(text))
        for command, reply in pairwise(blocks):
            if not command[2].startswith("curl"):
                continue
            words = shlex.split(command[2].replace("\\\n", " "))
            body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
            line = text[: command.start()].count("\n") + 2
            path = words[1].removeprefix(HOST)
            found.append(Example(f"{page}:{line}", path, body, reply[1], reply[2]))
    return found


EXAMPLES = examples()


def differences(shown: object, real: object, where: str, volatile: bool = False) -> Iterator[str]:
    """Where a real reply is not what a page shows."""
    if isinstance(shown, dict) and isinstance(real, dict):
        more = shown.keys() ^ real.keys()
        if "..." in shown:
            more = shown.keys() - real.keys() - {"..."}
        if more:
            yield f"{where}: {sorted(more)}"
        for name in shown.keys() & real.keys():
            inner = volatile or name in VOLATILE or name.startswith("spec_")
            yield from differences(shown[name], real[name], f"{where}.{name}", inner)
    elif isinstance(shown, list) and isinstance(real, list):
        if len(shown) != len(real):
            yield f"{where}: {len(shown)} entries shown, {len(real)} came"
        for place, (one, other) in enumerate(zip(shown, real, strict=False)):
            yield from differences(one, other, f"{where}[{place}]", volatile)
    elif not is_same(shown, real, volatile):
        yield f"{where}: {shown!r} shown, {real!r} came"


def is_same(shown: object, real: object, volatile: bool) -> bool:
    """Values of one example; numbers are rounded on the page."""
    numbers = [v for v in (shown, real) if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == 2:
        return volatile or numbers[0] == pytest.approx(numbers[1], abs=TOLERANCE)
    if volatile:
        return type(shown) is type(real) or None in (shown, real)
    return shown == real


def lines_of(text: str) -> list[str]:
    """The data of a stream's lines."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.place for example in EXAMPLES])
def test_an_example_gives_what_the_page_shows(default_model: ApiClient, example: Example) -> None:
    if example.body is None:
        reply = default_model.http.get(example.path)
    else:
        reply = default_model.post(example.path, example.body)
    if example.kind == "text":
        shown, real = lines_of(example.reply), lines_of(reply.text)
        assert (len(shown), shown[-1]) == (len(real), real[-1])
        pairs = list(zip(shown[:-1], real[:-1], strict=True))
    else:
        pairs = [(example.reply, reply.text)]
    for page, came in pairs:
        data = json.loads(page)
        assert (reply.status_code == 200) == ("error" not in data)
        assert list(differences(data, json.loads(came), "")) == []


def test_the_pages_have_an_example_of_every_route_that_generates_or_tokenises() -> None:
    assert {example.path for example in EXAMPLES} >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/generate",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
        "/abort_request",
    }
    assert any(example.body and example.body.get("stream") for example in EXAMPLES)


@pytest.mark.parametrize(
    "model", [CompletionRequest, ChatRequest, GenerateRequest, NativeSampling, TokenGenerateRequest]
)
def test_every_field_of_a_request_is_on_the_page(model: type) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    missing = [name for name in model.model_fields if not re.search(rf"`{name}\b[^`]*`", page)]
    assert missing == []


def test_a_wrong_page_is_noticed() -> None:
    real = {"a": [1.0, None], "id": "x", "b": "text"}
    for wrong in (
        {"a": [1.0, None], "id": "x"},
        {"a": [1.1, None], "id": "x", "b": "text"},
        {"a": [1.0], "id": "x", "b": "text"},
        {"a": [1.0, 2], "id": "x", "b": "text"},
        {"a": [1.0, None], "id": 5, "b": "text"},
        {"a": [1.0, None], "id": "x", "b": "other"},
        {"c": 1, "...": "..."},
    ):
        assert list(differences(wrong, real, "")) != []
    assert list(differences({"b": "text", "...": "..."}, real, "")) == []
    assert list(differences({"a": [1.001, None], "id": "y", "b": "text"}, real, "")) == []
