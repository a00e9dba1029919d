"""Schemathesis over the OpenAPI document: cases that fit it and cases that break it on purpose, and every answer held against it.

    python -m tests.fuzz.document URL TOKEN_FILE [EXAMPLES OF EACH OPERATION AND MODE]

A finding is a status, a content type or a body that the document does not have, and every 5xx but two, which are honest answers:
503 with `Retry-After` (the service or its backend is exhausted now) and 507 (a sandbox's own disk is full). Leases, sessions and snapshots
that are there stand in most paths, so that what lies behind them is met and not only 404.
"""

import collections
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks as conforms

TIMEOUT_S = 30
HONEST = (503, 507)
CHECKS = [
    conforms.status_code_conformance,
    conforms.content_type_conformance,
    conforms.response_headers_conformance,
    conforms.response_schema_conformance,
]
_AGAIN = ("release_lease", "pause_lease", "drop_snapshot", "close_session")


class Held:
    """A lease, a session in it and a snapshot of it that are there whenever a path asks for them."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.http = requests.Session()
        self.http.trust_env = False
        self.http.headers["authorization"] = f"Bearer {token}"
        self.names: dict[str, str] = {}

    def renew(self) -> None:
        for one in self._ask("GET", "/v1/leases")["leases"]:
            self.http.delete(f"{self.url}/v1/leases/{one['lease']}", timeout=TIMEOUT_S)
        for name in self._ask("GET", "/v1/snapshots")["snapshots"]:
            self.http.delete(f"{self.url}/v1/snapshots/{name}", timeout=TIMEOUT_S)
        lease = self._ask("POST", "/v1/leases")["lease"]
        self.names = {
            "lease": lease,
            "session": self._ask("POST", f"/v1/leases/{lease}/sessions")["session"],
            "snapshot": self._ask("POST", f"/v1/leases/{lease}/snapshots")["snapshot"],
        }

    def is_there(self) -> bool:
        answer = self.http.get(f"{self.url}/v1/leases/{self.names['lease']}", timeout=TIMEOUT_S)
        return answer.status_code == 200 and answer.json()["state"] == "live"

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        answer = self.http.request(method, self.url + path, json=None if method == "GET" else {}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def run(url: str, token: str, examples: int, *, same_each_time: bool) -> dict[int, int]:
    """How often each status was answered; `AssertionError` or an error of schemathesis for the first finding, with a curl command."""
    held = Held(url, token)
    statuses: collections.Counter[int] = collections.Counter()
    for operation in _operations(held):
        for mode in GenerationMode:
            _tried(operation, mode, held, statuses, settings(
                max_examples=examples, deadline=None, database=None, derandomize=same_each_time, phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ))  # fmt: skip
    return dict(sorted(statuses.items()))


def _operations(held: Held) -> Iterator[Any]:
    document = held.http.get(f"{held.url}/v1/openapi.json", timeout=TIMEOUT_S).json()
    del document["security"]  # or most cases would come with a token that is nobody's
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        yield found.ok()


def _tried(operation: Any, mode: GenerationMode, held: Held, statuses: collections.Counter[int], how: settings) -> None:
    if mode is GenerationMode.NEGATIVE and not (operation.query or operation.body):
        return  # nothing of it could be broken: what stands in a path is a text, and every text is one
    name = operation.definition.raw["operationId"]
    if not held.names:
        held.renew()

    @how
    @given(case=operation.as_strategy(generation_mode=mode), is_kept=st.integers(0, 9).map(lambda drawn: drawn == 9))
    def one(case: Any, is_kept: bool) -> None:
        if not is_kept:
            case.path_parameters = {key: held.names.get(key, value) for key, value in (case.path_parameters or {}).items()}
        answer = case.call(base_url=held.url, session=held.http, timeout=TIMEOUT_S)
        statuses[answer.status_code] += 1
        said = f"{case.as_curl_command()}\n{answer.status_code} {answer.content[:500]!r}"
        assert answer.status_code < 500 or answer.status_code in HONEST, said
        assert answer.status_code != 503 or answer.headers.get("retry-after"), said
        case.validate_response(answer, checks=CHECKS)
        if (name in _AGAIN and answer.status_code < 400) or (answer.status_code in (404, 410) and not held.is_there()):
            held.renew()

    one()


if __name__ == "__main__":
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    print(run(sys.argv[1], Path(sys.argv[2]).read_text().strip(), count, same_each_time=False))
