"""Schemathesis: whatever fits the OpenAPI schema, and much that does not, is answered in time and without an error of
the server's own."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "30"))
TIMEOUT = 60


@pytest.fixture(scope="session")
def served(url: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


schema = schemathesis.pytest.from_fixture("served")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_breaks_the_server(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict) and "max_tokens" not in case.body:
        case.body["max_tokens"] = 4  # else an answer may be as long as the context
    case.call_and_validate(checks=[not_a_server_error], timeout=TIMEOUT)
