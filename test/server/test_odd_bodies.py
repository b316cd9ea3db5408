"""Whatever the body, the answer is below 500 and the server keeps nothing open."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import Live

from truespec.server.app import BODIES
from truespec.server.native_models import NativeSampling

BASES = {
    "/v1/completions": {"prompt": "say:ab|", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:ab|"}]},
    "/generate": {"text": "say:ab|", "sampling_params": {"max_new_tokens": 3}},
    "/inference/v1/generate": {"token_ids": [5, 6]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "nobody"},
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 20, 2**31, 2**63, 2**64 - 1, 2**70]),
    st.sampled_from([0.0, -0.5, 0.5, 1e-300, 1e308]),
    st.text(max_size=4),
    st.sampled_from(["raw", "json_object", "user", "text"]),
)
KEYS = st.sampled_from(["json", "regex", "choice", "type", "role", "content", "5", "include_usage"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


def fields_of(path: str) -> list[str]:
    return sorted(BODIES[path].model_fields)


@pytest.mark.parametrize("path", sorted(BODIES))
@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_body_is_an_internal_error(live: Live, path: str, data: st.DataObject) -> None:
    changes = st.dictionaries(st.sampled_from(fields_of(path)), VALUES, min_size=1, max_size=2)
    body = {**BASES[path], **data.draw(changes)}
    if path == "/generate" and isinstance(body.get("sampling_params"), dict):
        names = st.sampled_from(sorted(NativeSampling.model_fields))
        body["sampling_params"] = {
            **body["sampling_params"],
            **data.draw(st.dictionaries(names, VALUES, max_size=2)),
        }
    reply = live.http.post(path, content=json.dumps(body))
    assert reply.status_code < 500, (body, reply.text)
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert live.service.client.num_open == 0


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize(
    "data", [b"[" * 10_000, b'{"a":' * 2000, b"\xff\xfe", b'{"prompt": "\xff"}']
)
def test_broken_bytes_are_400(live: Live, path: str, data: bytes) -> None:
    assert live.http.post(path, content=data).status_code == 400
