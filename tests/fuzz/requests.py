"""Random requests by the OpenAPI document: every route, values that fit, nearly fit and do not fit at all.

    python -m tests.fuzz.requests URL TOKEN_FILE [COUNT [SEED]]

An answer of 500, 502 or 504, or a 503 that does not say when to come again, is a finding; so is a connection that hangs.
"""

import http.client
import json
import random
import sys
import urllib.parse
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**19, 1e308, 0.5, "", "x", "\0", "..", "/", "a" * 5000, "é\u202e", "\n", [], {}, [[]], [None], {"a": 1},
    "/etc/passwd", "../../x", "none", "all", "host", ["true"], ["sh", "-c", "true"], "true",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")


class Fuzz:
    def __init__(self, url: str, token: str, seed: int) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        self._headers = {"authorization": f"Bearer {token}"}
        self._random = random.Random(seed)
        self.seed = seed
        self.statuses: dict[int, int] = {}
        self._leases: list[str] = []
        self._snapshots: list[str] = []
        _, text = self._ask("GET", "/v1/openapi.json", None, {})
        document = json.loads(text)
        self._operations = [
            (method.upper(), path, operation) for path, methods in document["paths"].items() for method, operation in methods.items()
        ]

    def run(self, count: int) -> None:
        for number in range(count):
            if not self._leases or number % 100 == 0:
                self._renew()
            method, path, operation = self._random.choice(self._operations)
            if self._random.random() < 0.03:
                method = self._random.choice(METHODS)
            target, body, headers = self._made(path, operation)
            status, text = self._ask(method, target, body, headers)
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if operation["operationId"] == "pause_lease":
                self._ask("POST", target.replace("/pause", "/resume"), b"{}", {})  # or the next command waits for ever, as it should
            assert status not in (500, 502, 504), (self.seed, number, method, target[:300], (body or b"")[:500], status, text[:500])

    def _renew(self) -> None:
        """A lease and a snapshot that are there, and none left of those before."""
        _, text = self._ask("GET", "/v1/leases", None, {})
        for one in json.loads(text)["leases"]:
            self._ask("DELETE", f"/v1/leases/{one['lease']}", None, {})
        self._leases = [json.loads(self._ask("POST", "/v1/leases", b"{}", {})[1])["lease"]]
        _, text = self._ask("POST", f"/v1/leases/{self._leases[0]}/snapshots", b"{}", {})
        self._snapshots = [json.loads(text)["snapshot"]]

    def _made(self, path: str, operation: dict[str, Any]) -> tuple[str, bytes | None, dict[str, str]]:
        chance, query, headers = self._random.random, [], {}
        for one in operation.get("parameters", ()):
            if one["in"] == "path":
                known = {"lease": self._leases, "snapshot": self._snapshots}.get(one["name"]) or ["ses-0"]
                value = self._random.choice(known) if chance() < 0.9 else str(self._random.choice(ODD))
                path = path.replace(f"{{{one['name']}}}", urllib.parse.quote(value, safe="") or "x")
            elif one["in"] == "query" and (one["required"] or chance() < 0.3):
                query.append((one["name"], str(self._value(one["schema"]))))
            elif one["in"] == "header" and chance() < 0.05:
                headers[one["name"]] = self._random.choice(("k", "k2", "x" * 300))
        if chance() < 0.03:
            query.append(("nonsense", "1"))
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        wanted = operation.get("requestBody", {}).get("content", {})
        if "application/json" in wanted:
            return target, self._body(wanted["application/json"]["schema"]), headers
        return target, self._random.randbytes(self._random.randrange(2000)) if wanted else None, headers

    def _body(self, schema: dict[str, Any]) -> bytes:
        if self._random.random() < 0.05:
            return self._random.choice((b"", b"{", b"[]", b"null", b'{"a":1,"a":2}', b"\xff", b"[" * 5000, self._random.randbytes(50)))
        return json.dumps(self._value(schema, odd=0.02)).encode()

    def _value(self, schema: dict[str, Any], odd: float = 0.2) -> Any:
        choose = self._random.choice
        if self._random.random() < odd:
            return choose(ODD)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._value(choose(schema[name]), odd)
        if "enum" in schema:
            return choose(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            needed = schema.get("required", ())
            found = {
                name: self._value(one, 0.15)
                for name, one in schema.get("properties", {}).items()
                if name in needed or self._random.random() < 0.25
            }
            return found | ({str(choose(ODD)): "x"} if self._random.random() < 0.03 else {})
        if kind == "array":
            return [self._value(schema["items"], 0.15) for _ in range(self._random.randrange(3))]
        if kind == "integer":
            return self._random.randint(int(schema.get("minimum", -2)), int(min(schema.get("maximum", 50), 50)))
        if kind == "number":
            return choose((0.01, 0.2, 1, 5))
        if kind == "boolean":
            return choose((True, False))
        return choose(("true", "f", ".", "d/e", "x", "host", "eA==", "sleep 0.01"))

    def _ask(self, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            self._connection.request(method, target, body, {**self._headers, **headers})
            answer = self._connection.getresponse()
            text = answer.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._connection.close()  # refused before it was read to its end
            return 400, b""
        assert answer.status != 503 or answer.headers.get("retry-after"), (method, target, text)
        return answer.status, text


if __name__ == "__main__":
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
    fuzz = Fuzz(sys.argv[1], Path(sys.argv[2]).read_text().strip(), int(sys.argv[4]) if len(sys.argv) > 4 else random.randrange(2**32))
    print(f"seed {fuzz.seed}", flush=True)
    fuzz.run(count)
    print(json.dumps({"requests": count, "statuses": dict(sorted(fuzz.statuses.items()))}))
