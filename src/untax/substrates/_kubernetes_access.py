"""Who we are to which API server: a kubeconfig, or the service account of the pod we run in.

Client certificates, tokens, files of tokens, credential plugins (`exec`), user and password, impersonation, a proxy. What is
read is kept until it runs out; a server that refuses it has it read once more.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime as dt
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from untax.core.errors import BackendError, SubstrateUnavailable, UsageError

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REREAD_S = 60.0  # tokens in files are replaced long before they run out; client-go reads them as often
_PLUGIN_PATIENCE_S = 60.0
_NO_CLUSTER = "no cluster: neither KUBECONFIG nor ~/.kube/config is there, and this is not a pod; set KUBECONFIG, or kubeconfig=…"


@dataclass
class Access:
    """Where the API server is and how to speak to it."""

    host: str
    port: int
    prefix: str
    namespace: str
    tls: bool
    authority: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    base: Path = Path()
    """What relative paths of the kubeconfig start from."""
    proxy: tuple[str, int] | None = None
    _context: ssl.SSLContext | None = None
    _token: str | None = None
    _until: float = 0.0
    _reading: asyncio.Lock | None = None

    @property
    def server(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    @property
    def server_hostname(self) -> str | None:
        return (self.authority.get("tls-server-name") or self.host) if self.tls else None

    async def headers(self, *, anew: bool = False) -> dict[str, str]:
        """What goes with each request. `anew` after the server has refused what we had."""
        self._reading = self._reading or asyncio.Lock()
        async with self._reading:
            if anew or time.monotonic() >= self._until:
                await self._read()
        headers = {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        elif "username" in self.user and "password" in self.user:
            pair = f"{self.user['username']}:{self.user['password']}".encode()
            headers["Authorization"] = "Basic " + base64.b64encode(pair).decode()
        if self.user.get("as"):
            headers["Impersonate-User"] = str(self.user["as"])
        for value in headers.values():
            if "\n" in value or "\r" in value:
                raise UsageError("kubeconfig: a credential has a line break in it")
        return headers

    def context(self) -> ssl.SSLContext | None:
        """For a new connection; None without TLS. `headers` comes first: a plugin may bring the certificate."""
        if self.tls and self._context is None:
            self._context = self._new_context(
                _bytes_of(self.user, "client-certificate", self.base), _bytes_of(self.user, "client-key", self.base)
            )
        return self._context

    async def _read(self) -> None:
        user = self.user
        self._until = time.monotonic() + _REREAD_S
        if user.get("token"):
            self._token, self._until = str(user["token"]), float("inf")
        elif user.get("tokenFile"):
            path = self.base / str(user["tokenFile"])
            try:
                self._token = path.read_text().strip()
            except OSError as exc:
                raise BackendError("", f"{path}: {exc.strerror}; the API server's token is to be read from there") from exc
        elif user.get("exec"):
            await self._ask_plugin(user["exec"])
        else:
            self._until = float("inf")

    async def _ask_plugin(self, plugin: Mapping[str, Any]) -> None:
        version = str(plugin.get("apiVersion", "client.authentication.k8s.io/v1"))
        info: dict[str, Any] = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        if plugin.get("provideClusterInfo"):
            info["spec"]["cluster"] = {
                "server": self.server,
                **{k: v for k, v in self.authority.items() if k.startswith(("cert", "tls", "insec"))},
            }
        env = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        env |= {str(one["name"]): str(one["value"]) for one in plugin.get("env") or ()}
        command = str(plugin.get("command", ""))
        if "/" in command:
            command = str(self.base / command)
        hint = str(plugin.get("installHint") or "see the kubeconfig's users[].user.exec").strip()
        try:
            process = await asyncio.create_subprocess_exec(
                command, *map(str, plugin.get("args") or ()), env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )  # fmt: skip
        except OSError as exc:
            raise SubstrateUnavailable("", f"credential plugin {command!r}: {exc.strerror}; {hint}") from exc
        try:
            async with asyncio.timeout(_PLUGIN_PATIENCE_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise BackendError("", f"credential plugin {command!r} gave nothing within {_PLUGIN_PATIENCE_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            status = json.loads(out)["status"] if process.returncode == 0 else None
        except (ValueError, KeyError, TypeError):
            status = None
        if not isinstance(status, dict):
            said = err.decode(errors="replace").strip()[-300:]
            raise SubstrateUnavailable("", f"credential plugin {command!r} failed (exit code {process.returncode}): {said}; {hint}")
        self._token = status.get("token")
        if status.get("clientCertificateData") and status.get("clientKeyData"):
            self._context = self._new_context(str(status["clientCertificateData"]).encode(), str(status["clientKeyData"]).encode())
        self._until = _until(status.get("expirationTimestamp"))

    def _new_context(self, certificate: bytes | None, key: bytes | None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        if self.authority.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        try:
            if authority := _bytes_of(self.authority, "certificate-authority", self.base):
                context.load_verify_locations(cadata=authority.decode("ascii"))
            if certificate and key:
                _load_pair(context, certificate, key)
        except (ssl.SSLError, ValueError) as exc:
            raise UsageError(f"kubeconfig: a certificate or key cannot be read: {exc}") from exc
        return context


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The standard library takes files only: one in memory, so that no key lies on a disk."""
    fd = os.memfd_create("untax-credential", os.MFD_CLOEXEC)
    try:
        os.write(fd, certificate.rstrip() + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _bytes_of(entry: Mapping[str, Any], name: str, base: Path) -> bytes | None:
    """A certificate or key: given in the file, or as the name of another."""
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(str(data), validate=False)
        except (binascii.Error, ValueError) as exc:
            raise UsageError(f"kubeconfig: {name}-data is not base64") from exc
    if path := entry.get(name):
        try:
            return (base / str(path)).read_bytes()
        except OSError as exc:
            raise UsageError(f"kubeconfig: {name}: {base / str(path)}: {exc.strerror}") from exc
    return None


def _until(timestamp: object) -> float:
    """When a credential is asked for again, on the monotonic clock: a minute before it runs out."""
    if not isinstance(timestamp, str):
        return float("inf")
    try:
        ends = dt.datetime.fromisoformat(timestamp)
    except ValueError:
        return time.monotonic() + _REREAD_S
    return time.monotonic() + max(ends.timestamp() - time.time() - 60.0, 1.0)


# ---- finding it ----


def missing_reason(kubeconfig: str | None) -> str | None:
    """Why there is no cluster to speak to, found out without speaking to one."""
    if not _files(kubeconfig):
        return None if _is_in_cluster() else _NO_CLUSTER
    try:
        import yaml  # noqa: F401
    except ImportError:
        return "reading a kubeconfig needs PyYAML: pip install 'untax[kubernetes]'"
    return None


def find_access(kubeconfig: str | None, context: str | None, namespace: str | None) -> Access:
    """The cluster that was named, that KUBECONFIG or ~/.kube/config names, or whose pod this is."""
    files = _files(kubeconfig)
    if files:
        return _from_files(files, context, namespace)
    if not _is_in_cluster():
        raise SubstrateUnavailable("", _NO_CLUSTER)
    found = _IN_CLUSTER / "namespace"
    return Access(
        host=os.environ["KUBERNETES_SERVICE_HOST"],
        port=int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")),
        prefix="",
        namespace=namespace or (found.read_text().strip() if found.exists() else "default"),
        tls=True,
        authority={"certificate-authority": str(_IN_CLUSTER / "ca.crt")},
        user={"tokenFile": str(_IN_CLUSTER / "token")},
    )


def _is_in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_IN_CLUSTER / "token").exists()


def _files(kubeconfig: str | None) -> list[Path]:
    if kubeconfig is not None:
        return [Path(kubeconfig)]
    if named := os.environ.get("KUBECONFIG"):
        return [Path(one) for one in named.split(os.pathsep) if one]
    usual = Path.home() / ".kube" / "config"
    return [usual] if usual.exists() else []


def _from_files(files: list[Path], context: str | None, namespace: str | None) -> Access:
    entries: dict[tuple[str, str], tuple[Mapping[str, Any], Path]] = {}
    for path in files:
        config = _loaded(path)
        context = context or config.get("current-context")
        for kind, key in (("clusters", "cluster"), ("users", "user"), ("contexts", "context")):
            for one in config.get(kind) or ():
                if isinstance(one, dict):  # the first file that has a name wins, as for kubectl
                    entries.setdefault((key, str(one.get("name"))), (one.get(key) or {}, path.parent))
    where = os.pathsep.join(map(str, files))
    chosen, _ = entries.get(("context", str(context)), (None, Path()))
    if chosen is None:
        raise UsageError(f"kubeconfig {where}: there is no context {context!r}; name one with context=…, or set current-context")
    cluster, base = entries.get(("cluster", str(chosen.get("cluster"))), (None, Path()))
    if cluster is None or not cluster.get("server"):
        raise UsageError(f"kubeconfig {where}: context {context!r} names the cluster {chosen.get('cluster')!r}, which has no server")
    user, user_base = entries.get(("user", str(chosen.get("user"))), ({}, base))
    if user.get("auth-provider"):
        raise UsageError(f"kubeconfig {where}: auth-provider is gone from Kubernetes; use a credential plugin (users[].user.exec)")
    server = urlsplit(str(cluster["server"]))
    if server.scheme not in ("https", "http") or not server.hostname:
        raise UsageError(f"kubeconfig {where}: server {cluster['server']!r} is not an http or https address")
    tls = server.scheme == "https"
    return Access(
        host=server.hostname,
        port=server.port or (443 if tls else 80),
        prefix=server.path.rstrip("/"),
        namespace=namespace or str(chosen.get("namespace") or "default"),
        tls=tls,
        authority=_rooted(cluster, base),
        user=_rooted(user, user_base),
        base=user_base,
        proxy=_proxy(cluster.get("proxy-url"), where),
    )


def _rooted(entry: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Names of files are relative to the file that has them, of which there may be several."""
    paths = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
    return {key: str(base / str(value)) if key in paths and value else value for key, value in entry.items()}


def _proxy(url: object, where: str) -> tuple[str, int] | None:
    if not url:
        return None
    parts = urlsplit(str(url))
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError(f"kubeconfig {where}: proxy-url {url!r}: only http proxies are spoken to; use another way to the cluster")
    return parts.hostname, parts.port or 80


def _loaded(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as exc:
        raise SubstrateUnavailable("", "reading a kubeconfig needs PyYAML: pip install 'untax[kubernetes]'") from exc
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise SubstrateUnavailable("", f"kubeconfig {path}: {exc.strerror}; set KUBECONFIG, or kubeconfig=…") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise UsageError(f"kubeconfig {path} is not YAML: {' '.join(str(exc).split())[:200]}") from exc
    if not isinstance(config, dict):
        raise UsageError(f"kubeconfig {path} has no clusters in it")
    return config
