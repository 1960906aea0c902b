"""Schemathesis: requests that fit the OpenAPI schema, and many that do not, get an answer in time and no server
error."""

import os

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "30"))
TIMEOUT = 60
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

schema = schemathesis.openapi.from_url(f"{os.environ['CLIENTS_URL']}/openapi.json")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_breaks_the_server(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict):  # an answer may be as long as the context
        for name in LIMITS:
            limit = case.body.get(name)
            case.body[name] = 4 if limit is None or (isinstance(limit, int) and limit > 4) else limit
    case.call_and_validate(checks=[not_a_server_error], timeout=TIMEOUT)
