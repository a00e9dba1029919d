"""Random requests to every route of the OpenAPI document and of E2B's dialect: values that fit, nearly fit and do not fit at all.

    python -m tests.fuzz.requests URL TOKEN_FILE [COUNT [SEED]]

A finding is an answer of 500 or 504, a 503 that does not say when to come again, a stream of envd's that ends with `internal` or `unknown`, and a
connection that hangs. Honest answers are 503 with `Retry-After` (exhausted now), 507 (the sandbox's own disk is full), 501 (this server never will), and
502 of envd in the words that E2B's SDK knows a sandbox by that is no more.
"""

import base64
import collections
import http.client
import json
import random
import struct
import sys
import urllib.parse
from pathlib import Path
from typing import Any

from tests.fuzz import e2b_table

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**19, 1e308, 0.5, "", "x", "\0", "..", "/", "a" * 5000, "é\u202e", "\n", [], {}, [[]], [None], {"a": 1},
    "/etc/passwd", "../../x", "none", "all", "host", ["true"], ["sh", "-c", "true"], "true", "\ud800", "0001-01-01T00:00:00", {"size": {"rows": 1}},
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")


HONEST = (501, 503, 507)
NOT_THERE = (b"The sandbox was not found", b"port is not open")
SAID_EVERY = 10_000  # requests
_ENVELOPE = struct.Struct(">BI")
_DEADLINE_MS = 100  # of what is started under E2B's dialect: `cat` has no other end


class Fuzz:
    """One client, and the only one of its tenant: what is there of others it removes."""

    def __init__(self, url: str, token: str, seed: int) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        self._headers = {"authorization": f"Bearer {token}"}
        self._random = random.Random(seed)
        self.seed = seed
        self.statuses: collections.Counter[int] = collections.Counter()
        self.findings: list[tuple[Any, ...]] = []
        self._known: dict[str, list[Any]] = {}
        self._envd_token = ""
        _, text = self._ask("GET", "/v1/openapi.json", None, {})
        document = json.loads(text)
        self._operations = [
            (method.upper(), path, operation) for path, methods in document["paths"].items() for method, operation in methods.items()
        ] + e2b_table.operations()

    def run(self, count: int) -> None:
        for number in range(count):
            if number % 100 == 0:
                self._renew()
            method, path, operation = self._random.choice(self._operations)
            if self._random.random() < 0.03:
                method = self._random.choice(METHODS)
            target, body, headers = self._made(path, operation)
            said = (self.seed, number, method, target[:300], (body or b"")[:500])
            status, text = self._ask(method, target, body, headers, is_endless=operation.get("x-endless", False))
            self.statuses[status] += 1
            is_honest = status < 500 or status in HONEST or (status == 502 and (method == "HEAD" or any(one in text for one in NOT_THERE)))
            is_broken = "x-stream" in operation and status == 200 and (b'"internal"' in text or b'"unknown"' in text)
            if is_broken or not is_honest:
                self.findings.append((*said, status, text[-500:]))
            self._mend(operation["operationId"], target, status)
            if (number + 1) % SAID_EVERY == 0:
                print(self.told(), file=sys.stderr, flush=True)

    def told(self) -> str:
        seen = dict(sorted(self.statuses.items()))
        return json.dumps({"requests": self.statuses.total(), "statuses": seen, "findings": len(self.findings)})

    def _mend(self, operation: str, target: str, status: int) -> None:
        """What was stopped goes on, or the next command would wait for ever, as it should; what was ended is made anew."""
        if operation == "pause_lease":
            self._ask("POST", target.replace("/pause", "/resume"), b"{}", {})
        elif operation == "/sandboxes/{sandbox}/pause" and status == 204:
            self._ask("POST", target.replace("/pause", "/connect"), b"{}", {})
        elif operation in ("release_lease", "/sandboxes/{sandbox}") and status in (200, 204):
            self._renew()

    def _renew(self) -> None:
        """A lease, a session, a snapshot, a sandbox and a process that are there, and none left of those before."""
        for one in self._listed("/v1/leases", "leases"):
            self._ask("DELETE", f"/v1/leases/{one['lease']}", None, {})
        for name in self._listed("/v1/snapshots", "snapshots"):
            self._ask("DELETE", f"/v1/snapshots/{name}", None, {})
        for one in self._listed("/v2/sandboxes", None):
            self._ask("DELETE", f"/sandboxes/{one['sandboxID']}", None, {})
        for path in ("/templates", "/snapshots"):
            for one in self._listed(path, None):
                self._ask("DELETE", f"/templates/{one.get('templateID') or one.get('snapshotID')}", None, {})
        lease = self._new("/v1/leases", {})["lease"]
        made = self._new("/sandboxes", {"templateID": "base", "timeout": 300})
        self._envd_token = made["envdAccessToken"]
        asked = self._new("/v3/templates", {"name": "fuzz"})
        self._known = {
            "lease": [lease],
            "session": [self._new(f"/v1/leases/{lease}/sessions", {})["session"]],
            "snapshot": [self._new(f"/v1/leases/{lease}/snapshots", {})["snapshot"]],
            "sandbox": [made["sandboxID"]],
            "template": [asked["templateID"], "fuzz", "base"],
            "build": [asked["buildID"]],
            "hash": ["0" * 64],
        }
        watch = json.dumps({"path": "/tmp"}).encode()
        self._known["watcher"] = [json.loads(self._ask("POST", "/filesystem.Filesystem/CreateWatcher", watch, self._to())[1])["watcherId"]]
        self._known["pid"] = [self._held()]

    def _held(self) -> int:
        """The pid of a process that reads its input and goes on without whoever started it."""
        start = json.dumps({"process": {"cmd": "/bin/cat"}, "tag": "held", "stdin": True}).encode()
        _, text = self._ask(
            "POST", "/process.Process/Start", _enveloped(start), {**self._to(), "content-type": "application/connect+json"}, is_endless=True
        )
        pid: int = json.loads(text)["event"]["start"]["pid"]
        return pid

    def _listed(self, path: str, name: str | None) -> list[Any]:
        found = json.loads(self._ask("GET", path, None, {})[1])
        return list(found[name] if name is not None else found)

    def _new(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, text = self._ask("POST", path, json.dumps(body).encode(), {})
        assert status in (200, 201, 202), (self.seed, path, status, text)
        found: dict[str, Any] = json.loads(text)
        return found

    def _to(self) -> dict[str, str]:
        """Headers that lead to envd of the sandbox."""
        return {"e2b-sandbox-id": self._known["sandbox"][0], "x-access-token": self._envd_token}

    def _envd_headers(self, operation: dict[str, Any]) -> dict[str, str]:
        chance, headers = self._random.random, self._to()
        if chance() < 0.02:
            headers["e2b-sandbox-id"] = self._random.choice(("x", "x" * 300, ".."))
        if chance() < 0.02:
            headers["x-access-token"] = "wrong"
        if chance() < 0.3:
            name = self._random.choice(("user:", "root:", "nobody-at-all:", ":", "\xff"))
            headers["authorization"] = "Basic " + base64.b64encode(name.encode()).decode()
        if "x-stream" in operation:
            headers["content-type"] = "application/connect+json"
            headers["connect-timeout-ms"] = str(_DEADLINE_MS)
        return headers

    def _made(self, path: str, operation: dict[str, Any]) -> tuple[str, bytes | None, dict[str, str]]:
        chance, query, headers = self._random.random, [], {}
        for one in operation.get("parameters", ()):
            if one["in"] == "path":
                known = self._known.get(one["name"]) or ["x"]
                value = self._random.choice(known) if chance() < 0.9 else _sendable(str(self._random.choice(ODD)))
                path = path.replace(f"{{{one['name']}}}", urllib.parse.quote(value, safe="") or "x")
            elif one["in"] == "query" and (one["required"] or chance() < 0.3):
                query.append((one["name"], _sendable(str(self._value(one["schema"])))))
            elif one["in"] == "header" and chance() < 0.05:
                headers[one["name"]] = self._random.choice(("k", "k2", "x" * 300))
        if chance() < 0.03:
            query.append(("nonsense", "1"))
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        if operation.get("x-envd"):
            headers |= self._envd_headers(operation)
        wanted = operation.get("requestBody", {}).get("content", {})
        if "application/json" in wanted:
            body = self._body(wanted["application/json"]["schema"])
            return target, _enveloped(body) if "x-stream" in operation and chance() < 0.98 else body, headers
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
        if "x-known" in schema:
            return choose(self._known[schema["x-known"]])
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

    def _ask(self, method: str, target: str, body: bytes | None, headers: dict[str, str], *, is_endless: bool = False) -> tuple[int, bytes]:
        """`is_endless`: of what has begun well the first message is all that is read."""
        try:
            self._connection.request(method, target, body, {**self._headers, **headers})
            answer = self._connection.getresponse()
            if is_endless and answer.status == 200:
                flags, size = _ENVELOPE.unpack(answer.read(_ENVELOPE.size))
                text = answer.read(size)
                if not flags:
                    self._connection.close()
            else:
                text = answer.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._connection.close()  # refused before it was read to its end
            return 400, b""
        if answer.status == 503 and not answer.headers.get("retry-after"):
            self.findings.append((self.seed, method, target[:300], 503, text[-500:]))
        return answer.status, text


def _enveloped(body: bytes) -> bytes:
    return _ENVELOPE.pack(0, len(body)) + body


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()


if __name__ == "__main__":
    total = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    fuzz = Fuzz(sys.argv[1], Path(sys.argv[2]).read_text().strip(), seed)
    fuzz.run(total)
    for one in fuzz.findings:
        print(*one, file=sys.stderr)
    print(fuzz.told())
    sys.exit(1 if fuzz.findings else 0)
