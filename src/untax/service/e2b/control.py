"""The control plane: E2B's REST routes over the register of sandboxes and templates."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from untax.core.errors import SandboxLost, SubstrateUnavailable, UntaxError, UsageError
from untax.service.auth import authenticate
from untax.service.bodies import read_json
from untax.service.e2b.builds import UPLOAD_S, Builder, Contexts
from untax.service.e2b.models import moment, whole
from untax.service.e2b.sandbox import Sandbox
from untax.service.e2b.sandboxes import FORKS_MAX, TIMEOUT_S, Sandboxes
from untax.service.e2b.templates import Templates
from untax.service.e2b.usage import sample
from untax.service.errors import Refused, error_headers, status_of
from untax.service.hosting import Hosting
from untax.service.tenants import Tenant

_LIMIT = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")

Handler = Callable[[Request, Tenant], Awaitable[Response]]


def answer(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(document), status, headers, "application/json")


def refused(exc: UntaxError) -> Response:
    """An error as E2B's API says it. 5xx of ours that a retry may mend say so."""
    status = status_of(exc)
    return answer({"code": status, "message": str(exc)}, status, error_headers(exc))


class Control:
    def __init__(self, hosting: Hosting, sandboxes: Sandboxes, templates: Templates, builder: Builder, contexts: Contexts) -> None:
        self._hosting = hosting
        self._sandboxes = sandboxes
        self._templates = templates
        self._builder = builder
        self._contexts = contexts
        self._secret = secrets.token_bytes(32)  # of links to upload to: they do not outlive the server

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/sandboxes", self.create),
            ("POST", "/v2/sandboxes", self.create),
            ("GET", "/sandboxes", self.list_running),
            ("GET", "/v2/sandboxes", self.list_all),
            ("GET", "/sandboxes/metrics", self.metrics_of_many),
            ("GET", "/sandboxes/{id}", self.info),
            ("DELETE", "/sandboxes/{id}", self.kill),
            ("POST", "/sandboxes/{id}/pause", self.pause),
            ("POST", "/sandboxes/{id}/resume", self.resume),
            ("POST", "/sandboxes/{id}/connect", self.connect),
            ("POST", "/v2/sandboxes/{id}/connect", self.connect),
            ("POST", "/sandboxes/{id}/timeout", self.timeout),
            ("POST", "/sandboxes/{id}/refreshes", self.refresh),
            ("PUT", "/sandboxes/{id}/network", self.network),
            ("POST", "/sandboxes/{id}/fork", self.fork),
            ("POST", "/sandboxes/{id}/snapshots", self.snapshot),
            ("GET", "/sandboxes/{id}/metrics", self.metrics),
            ("GET", "/sandboxes/{id}/logs", self.logs),
            ("GET", "/v2/sandboxes/{id}/logs", self.logs),
            ("GET", "/snapshots", self.snapshots),
            ("POST", "/v3/templates", self.template_request),
            ("POST", "/v2/templates", self.template_request),
            ("GET", "/templates", self.template_list),
            ("GET", "/v2/templates", self.template_list),
            ("GET", "/templates/aliases/{alias:path}", self.template_alias),
            ("POST", "/templates/tags", self.tags_assign),
            ("DELETE", "/templates/tags", self.tags_remove),
            ("GET", "/templates/{id}", self.template_info),
            ("DELETE", "/templates/{id}", self.template_delete),
            ("GET", "/templates/{id}/tags", self.tags),
            ("GET", "/templates/{id}/files/{hash}", self.files_link),
            ("POST", "/v2/templates/{id}/builds/{build}", self.build_start),
            ("GET", "/templates/{id}/builds/{build}/status", self.build_status),
        ]
        routes = [Route(path, self._guarded(handler), methods=[method]) for method, path, handler in table]
        return [*routes, Route("/templates/{id}/files/{hash}/{tenant}/{until}/{signature}", self.files_upload, methods=["PUT"])]

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                tenant = authenticate(self._hosting.tenants, request.headers.raw)
                with self._hosting.acting(tenant):
                    return await handler(request, tenant)
            except SandboxLost:
                return refused(Refused(404, "NotFound", "sandbox not found"))  # it died while it was asked for
            except UntaxError as exc:
                return refused(exc)
            except ClientDisconnect:
                return Response(status_code=400)

        return guarded

    def _named(self, request: Request, tenant: Tenant) -> Sandbox:
        return self._sandboxes.find(tenant, request.path_params["id"])

    def _created(self, sandbox: Sandbox) -> dict[str, Any]:
        return sandbox.created(self._hosting.settings.domain)

    # ---- sandboxes ----

    async def create(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 255:
            raise UsageError("an idempotency key has 1 to 255 characters")
        return answer(self._created(await self._sandboxes.create(tenant, body, key)), 201)

    async def info(self, request: Request, tenant: Tenant) -> Response:
        return answer(self._named(request, tenant).detailed(self._hosting.settings.domain))

    async def kill(self, request: Request, tenant: Tenant) -> Response:
        await self._sandboxes.kill(self._named(request, tenant))
        return Response(status_code=204)

    async def pause(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        try:
            is_paused = await self._sandboxes.pause(self._named(request, tenant), keep_memory=body.get("memory") is not False)
        except SubstrateUnavailable as exc:  # not for now but for good: no client should ask again
            raise Refused(501, "Unavailable", f"{exc.message}; keep_memory=False pauses without it") from exc
        if not is_paused:
            raise Refused(409, "Conflict", "the sandbox is paused already")
        return Response(status_code=204)

    async def connect(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        sandbox = self._named(request, tenant)
        was_paused = await self._sandboxes.connect(sandbox, self._sandboxes.checked_timeout(body.get("timeout", TIMEOUT_S)))
        return answer(self._created(sandbox), 201 if was_paused else 200)

    async def resume(self, request: Request, tenant: Tenant) -> Response:
        """As older SDKs ask: what runs is no thing to resume."""
        sandbox = self._named(request, tenant)
        if sandbox.state == "running":
            raise Refused(409, "Conflict", "the sandbox is running already")
        return await self.connect(request, tenant)

    async def timeout(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        self._sandboxes.set_timeout(self._named(request, tenant), self._sandboxes.checked_timeout(body.get("timeout")))
        return Response(status_code=204)

    async def refresh(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        sandbox = self._named(request, tenant)
        wanted = self._sandboxes.checked_timeout(body.get("duration", 15))
        if wanted > sandbox.holding.left_s:
            self._sandboxes.set_timeout(sandbox, wanted)
        return Response(status_code=204)

    async def network(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        sandbox = self._named(request, tenant)
        internet = body.pop("allow_internet_access", None)
        self._sandboxes.set_rules(sandbox, sandbox.rules.updated(body, internet if isinstance(internet, bool) else None))
        return Response(status_code=204)

    async def fork(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        sandbox = self._named(request, tenant)
        count = body.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= FORKS_MAX:
            raise UsageError(f"count must be a whole number between 1 and {FORKS_MAX}")
        forks = await self._sandboxes.fork(sandbox, count, self._sandboxes.checked_timeout(body.get("timeout", TIMEOUT_S)))
        results = [
            {"error": {"code": status_of(one), "message": str(one)}} if isinstance(one, UntaxError) else {"sandbox": self._created(one)}
            for one in forks
        ]
        return answer(results, 201)

    async def metrics(self, request: Request, tenant: Tenant) -> Response:
        return answer(await self._metrics(self._named(request, tenant), request.query_params))

    async def _metrics(self, sandbox: Sandbox, query: Mapping[str, str]) -> list[dict[str, Any]]:
        start, end = (_whole(query.get(name), name) for name in ("start", "end"))
        if sandbox.state == "running":
            await sample(sandbox)
        limits = sandbox.holding.box.spec.limits
        return [
            one.to_json(limits.cpus, limits.memory_mib)
            for one in sandbox.samples
            if (start is None or int(one.at) >= start) and (end is None or int(one.at) <= end)
        ]

    async def metrics_of_many(self, request: Request, tenant: Tenant) -> Response:
        ids = (request.query_params.get("sandbox_ids") or "").split(",")[:_LIMIT]
        found = {}
        for one in self._sandboxes.all(tenant):
            if one.id in ids and (metrics := await self._metrics(one, {})):
                found[one.id] = metrics[-1]
        return answer({"sandboxes": found})

    async def logs(self, request: Request, tenant: Tenant) -> Response:
        self._named(request, tenant)
        return answer({"logs": [], "logEntries": []})

    async def list_running(self, request: Request, tenant: Tenant) -> Response:
        found = [one for one in self._sandboxes.all(tenant) if one.state == "running"]
        wanted = _metadata(request.query_params.get("metadata"))
        return answer([one.listed() for one in found if wanted.items() <= one.metadata.items()])

    async def list_all(self, request: Request, tenant: Tenant) -> Response:
        query = request.query_params
        wanted = _metadata(query.get("metadata"))
        states = {state for value in query.getlist("state") for state in value.split(",") if state}
        template = query.get("template")
        after = _moment(query.get("startedAfter"))
        found = [
            one
            for one in self._sandboxes.all(tenant)
            if wanted.items() <= one.metadata.items()
            and (not states or one.state in states)
            and (after is None or one.holding.began >= after - 1e-6)
            and (template is None or template in (one.manner.template, one.manner.alias))
        ]
        descending = query.get("order", "desc") != "asc"
        found.sort(key=lambda one: (one.holding.began, one.id), reverse=descending)
        return _page(query, found, lambda one: (one.holding.began, one.id), Sandbox.listed, descending=descending)

    # ---- snapshots ----

    async def snapshot(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        sandbox = self._named(request, tenant)
        name = body.get("name")
        if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name)):
            raise UsageError("a snapshot's name begins with a letter or digit, and has only letters, digits and '._:/-'")
        template = await self._sandboxes.snapshot(sandbox, name)
        return answer({"snapshotID": template.id, "names": template.names}, 201)

    async def snapshots(self, request: Request, tenant: Tenant) -> Response:
        query = request.query_params
        sandbox, name = query.get("sandboxID"), query.get("name")
        found = [
            one
            for one in self._templates
            if one.tenant == tenant.name and one.origin is not None and sandbox in (None, one.origin) and name in (None, one.name)
        ]
        found.sort(key=lambda one: (one.created, one.id), reverse=True)
        return _page(
            query, found, lambda one: (one.created, one.id), lambda one: {"snapshotID": one.id, "names": one.names}, descending=True
        )

    # ---- templates ----

    async def template_request(self, request: Request, tenant: Tenant) -> Response:
        template, build = self._templates.request(tenant, await read_json(request))
        tags = list(template.pending[build.id][1])
        document = {
            "templateID": template.id, "buildID": build.id, "public": False, "names": template.names, "aliases": template.names, "tags": tags,
        }  # fmt: skip
        return answer(document, 202)

    async def template_list(self, _: Request, tenant: Tenant) -> Response:
        return answer([one.shown() for one in self._templates if one.tenant == tenant.name and one.origin is None])

    async def template_info(self, request: Request, tenant: Tenant) -> Response:
        return answer(self._templates.find(tenant.name, request.path_params["id"]).shown() | {"builds": []})

    async def template_alias(self, request: Request, tenant: Tenant) -> Response:
        template, _ = self._templates.ready(tenant.name, unquote(request.path_params["alias"]))
        return answer({"templateID": template.id, "public": False})

    async def template_delete(self, request: Request, tenant: Tenant) -> Response:
        template = self._templates.find(tenant.name, unquote(request.path_params["id"]))
        await self._sandboxes.drop(await self._templates.remove(template))
        return Response(status_code=204)

    async def build_start(self, request: Request, tenant: Tenant) -> Response:
        template, build = self._templates.build_of(tenant.name, request.path_params["id"], request.path_params["build"])
        self._builder.begin(tenant, template, build, await read_json(request))
        return Response(status_code=202)

    async def build_status(self, request: Request, tenant: Tenant) -> Response:
        template, build = self._templates.build_of(tenant.name, request.path_params["id"], request.path_params["build"])
        return answer(build.shown(template.id, _whole(request.query_params.get("logsOffset"), "logsOffset") or 0))

    async def tags_assign(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        build = await self._templates.assign(tenant.name, str(body.get("target", "")), body.get("tags"))
        return answer({"tags": body["tags"], "buildID": build.id}, 201)

    async def tags_remove(self, request: Request, tenant: Tenant) -> Response:
        body = await read_json(request)
        await self._templates.unassign(tenant.name, str(body.get("name", "")), body.get("tags"))
        return Response(status_code=204)

    async def tags(self, request: Request, tenant: Tenant) -> Response:
        template = self._templates.find(tenant.name, unquote(request.path_params["id"]))
        return answer([{"tag": tag, "buildID": build.id, "createdAt": moment(build.created)} for tag, build in template.tags.items()])

    # ---- files of builds: a link that carries its own permission, as object stores give ----

    async def files_link(self, request: Request, tenant: Tenant) -> Response:
        files_hash = request.path_params["hash"]
        template = self._templates.find(tenant.name, request.path_params["id"])
        if self._contexts.announce(tenant.name, files_hash):
            return answer({"present": True}, 201)
        until = int(time.time()) + UPLOAD_S
        signature = self._signature(template.id, files_hash, tenant.name, until)
        owner = base64.urlsafe_b64encode(tenant.name.encode()).decode().rstrip("=")
        base = str(request.base_url).rstrip("/")
        return answer({"present": False, "url": f"{base}/templates/{template.id}/files/{files_hash}/{owner}/{until}/{signature}"}, 201)

    async def files_upload(self, request: Request) -> Response:
        where = request.path_params
        try:
            owner = base64.urlsafe_b64decode(where["tenant"] + "=" * (-len(where["tenant"]) % 4)).decode()
            until = int(where["until"])
        except (ValueError, binascii.Error):
            return refused(Refused(401, "Unauthorized", "not a link of this server"))
        expected = self._signature(where["id"], where["hash"], owner, until)
        if not hmac.compare_digest(expected.encode(), where["signature"].encode()) or until < time.time():
            return refused(Refused(401, "Unauthorized", "the link is none of this server's, or too old"))
        try:
            tenant = next(one for one in self._hosting.tenants if one.name == owner)
            with self._hosting.acting(tenant):
                await self._contexts.store(tenant, where["hash"], request.stream())
        except UntaxError as exc:
            return refused(exc)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(status_code=200)

    def _signature(self, *parts: object) -> str:
        return hmac.new(self._secret, json.dumps(parts).encode(), "sha256").hexdigest()


# ---- queries ----


def _whole(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    if (number := whole(text)) is None:
        raise UsageError(f"{name} is not a whole number")
    return number


def _metadata(text: str | None) -> dict[str, str]:
    """Quoted twice by SDKs: as a query of its own, and as a value in one."""
    return {unquote(key): unquote(value) for key, value in parse_qsl(text, keep_blank_values=True)} if text else {}


def _moment(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError:
        raise UsageError("startedAfter is not a time as in RFC 3339") from None


def _page(
    query: Mapping[str, str], found: list[Any], key: Callable[[Any], tuple[float, str]], shown: Callable[[Any], object], *, descending: bool
) -> Response:
    """So many from where the token says, and the token of the next page in a header. What is made meanwhile moves nothing."""
    limit = _whole(query.get("limit"), "limit")
    limit = _LIMIT if limit is None else limit
    if not 1 <= limit <= 1000:
        raise UsageError("limit must be between 1 and 1000")
    if token := query.get("nextToken"):
        try:
            at, _, name = base64.urlsafe_b64decode(token).decode().partition(" ")
            after = float(at), name
        except (ValueError, binascii.Error):
            raise UsageError("nextToken is none of this server's") from None
        found = [one for one in found if (key(one) < after if descending else key(one) > after)]
    page = found[:limit]
    headers = {}
    if len(found) > limit:
        at_s, name = key(page[-1])
        headers["x-next-token"] = base64.urlsafe_b64encode(f"{at_s!r} {name}".encode()).decode()
    return answer([shown(one) for one in page], 200, headers)
