"""schemathesis against the published schema: whatever fits it or not, no answer is a 5xx."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from api_client import ApiClient

BODIES = {
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /generate",
    "POST /inference/v1/generate",
    "POST /tokenize",
    "POST /detokenize",
    "POST /abort_request",
}


def test_no_request_of_the_schema_is_an_internal_error(plain: ApiClient) -> None:
    schema = schemathesis.openapi.from_url(f"{plain.url}/openapi.json")
    operations = {found.ok().label: found.ok() for found in schema.get_all_operations()}
    assert operations.keys() > BODIES
    statuses = {
        label: answers(operation, num_examples=12 if label in BODIES else 1)
        for label, operation in operations.items()
    }
    assert set().union(*(statuses[label] for label in BODIES)) >= {200, 400}
    assert plain.http.get("/v1/loads").json()["loads"][0]["num_reqs"] == 0


def answers(operation: schemathesis.APIOperation, num_examples: int) -> set[int]:
    """Send what the operation's schema allows; the statuses that came back."""
    statuses = set()

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def no_server_error(case: schemathesis.Case) -> None:
        statuses.add(case.call_and_validate(checks=[not_a_server_error]).status_code)

    no_server_error()
    return statuses
