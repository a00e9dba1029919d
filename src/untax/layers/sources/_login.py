"""Who we are to a registry: credentials from the files that container tools write, and the tokens that are had for them.

Only what stands in a file is used: programs that such a file names to be asked for credentials are not run.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from untax.core.errors import StageFailed, UsageError
from untax.layers.sources._http import Reply, Web, printable, shown
from untax.layers.sources._reference import Reference

_LARGEST_FILE = 1 << 20
_LARGEST_TOKEN = 1 << 18  # some services put a whole list of rights into one

_CHALLENGE = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9!#$%&'*+.^_`|~-]*)(?:\s+(?=[^\s=]+\s*=)|\s*(?=,|$))")
_PARAMETER = re.compile(r'\s*,?\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))')


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one file says about one registry; never printed."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str | None:
        if not self.user:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def read_credentials(reference: Reference, env: Mapping[str, str] | None = None) -> Credentials | None:
    """What the first file that names this registry says; None when none does. `UsageError` for a file that cannot be read.

    `REGISTRY_AUTH_FILE` alone when it is set; otherwise `config.json` in `DOCKER_CONFIG` or ~/.docker, and the `auth.json`
    of Podman, Skopeo and Buildah.
    """
    for path, is_named in _files(os.environ if env is None else env):
        text = _read(path, is_named)
        if text is None:
            continue
        found = choose(text, reference, str(path))
        if found is not None:
            return found
    return None


def _files(env: Mapping[str, str]) -> Iterator[tuple[Path, bool]]:
    if named := env.get("REGISTRY_AUTH_FILE"):
        yield Path(named), True
        return
    home = env.get("HOME")
    if directory := env.get("DOCKER_CONFIG"):
        yield Path(directory, "config.json"), False
    elif home:
        yield Path(home, ".docker", "config.json"), False
    if runtime := env.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers", "auth.json"), False
    config = env.get("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else None)
    if config:
        yield Path(config, "containers", "auth.json"), False


def _read(path: Path, is_named: bool) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_FILE).decode()
    except FileNotFoundError:
        if is_named:
            raise UsageError(f"REGISTRY_AUTH_FILE names {path}, which does not exist") from None
        return None
    except OSError as exc:
        raise UsageError(f"registry credentials {path}: {exc.strerror}; make it readable, or name another in REGISTRY_AUTH_FILE") from exc
    except UnicodeDecodeError:
        raise UsageError(f"registry credentials {path}: not text") from None


def choose(text: str, reference: Reference, path: str) -> Credentials | None:
    """The entry for the longest part of `host/name` that the file knows. Pure."""
    try:
        entries = json.loads(text).get("auths") or {}
        keys = {_bare(key): value for key, value in entries.items() if isinstance(value, dict)}
    except (ValueError, AttributeError, RecursionError):
        raise UsageError(f'registry credentials {path}: not JSON of the form {{"auths": {{"host": {{"auth": …}}}}}}') from None
    parts = reference.name.split("/")
    for kept in range(len(parts), -1, -1):
        entry = keys.get("/".join([reference.authority, *parts[:kept]]))
        if entry is not None:
            return _credentials(entry, path)
    return None


def _bare(key: str) -> str:
    """Older tools wrote a URL: `https://host/v1/`."""
    bare = key.removeprefix("https://").removeprefix("http://").rstrip("/")
    return bare.removesuffix("/v1").removesuffix("/v2")


def _credentials(entry: dict[str, Any], path: str) -> Credentials | None:
    user, password = entry.get("username", ""), entry.get("password", "")
    if entry.get("auth"):
        try:
            user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        except (binascii.Error, ValueError, TypeError):
            raise UsageError(f"registry credentials {path}: an entry's auth is not base64; log in again") from None
    texts = (user, password.rstrip("\0"), entry.get("identitytoken", ""), entry.get("registrytoken", ""))
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"registry credentials {path}: an entry holds something that is not text; log in again")
    return Credentials(*texts) if any(texts) else None  # an empty entry: a helper program has the rest


@dataclass(frozen=True, slots=True)
class Challenge:
    scheme: str
    parameters: Mapping[str, str]


def parse_challenges(header: str) -> list[Challenge]:
    """What a `WWW-Authenticate` header offers; nothing for what is not understood. Pure."""
    found, at = [], 0
    while (scheme := _CHALLENGE.match(header, at)) is not None and scheme.end() > at:
        at, parameters = scheme.end(), {}
        while (parameter := _PARAMETER.match(header, at)) is not None:
            quoted = parameter[2]
            parameters[parameter[1].lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else parameter[3]
            at = parameter.end()
        found.append(Challenge(scheme[1].lower(), parameters))
    return found


class Login:
    """Opens a registry's URLs, proving who asks where the registry wants to know. For threads that share one image."""

    def __init__(self, web: Web, reference: Reference, credentials: Credentials | None) -> None:
        self._web, self._reference, self._credentials = web, reference, credentials
        self._authorization: str | None = None
        if credentials is not None and credentials.registry_token:
            self._authorization = f"Bearer {credentials.registry_token}"
        self._lock = threading.Lock()

    def open(self, method: str, url: str, headers: Mapping[str, str]) -> Reply:
        """The answer, asked for again with what the registry wanted to see. `StageFailed` when it still says no."""
        used = self._authorization
        reply = self._web.open(method, url, headers, authorization=used)
        if reply.status != 401:
            return reply
        reply.close()
        if urlsplit(reply.url)[:2] != urlsplit(url)[:2]:  # where a redirect led to has no say in where credentials go
            raise StageFailed("image", f"{shown(reply.url)}, where the registry sends us, wants to know who asks")
        offers = parse_challenges(", ".join(reply.headers.get_all("WWW-Authenticate", [])))
        reply = self._web.open(method, url, headers, authorization=self._renew(offers, used))
        if reply.status == 401:
            reply.close()
            raise StageFailed("image", self._refused("says that we are not who may read it"))
        return reply

    def _renew(self, offers: list[Challenge], used: str | None) -> str:
        with self._lock:
            if self._authorization == used:  # nobody else has got a fresh one meanwhile
                self._authorization = self._prove(offers, used)
            assert self._authorization is not None
            return self._authorization

    def _prove(self, offers: list[Challenge], used: str | None) -> str:
        basic = self._credentials.basic if self._credentials else None
        for offer in offers:
            if offer.scheme == "bearer" and offer.parameters.get("realm"):
                return f"Bearer {self._token(offer.parameters)}"
            if offer.scheme == "basic" and basic is not None and used != basic:
                return basic
        raise StageFailed("image", self._refused("wants to know who asks"))

    def _token(self, offered: Mapping[str, str]) -> str:
        """A token for reading this one repository, whatever scope the registry proposed: it may propose somebody else's."""
        realm = urljoin(f"{self.base}/", offered["realm"])
        wanted = {"service": offered.get("service", ""), "scope": f"repository:{self._reference.name}:pull"}
        if self._credentials and self._credentials.identity_token:
            form = {**wanted, "client_id": "untax", "grant_type": "refresh_token", "refresh_token": self._credentials.identity_token}
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            reply = self._web.open("POST", realm, headers, body=urlencode(form).encode())
        else:
            url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(wanted)}"
            reply = self._web.open("GET", url, {}, authorization=self._credentials.basic if self._credentials else None)
        with reply:
            if reply.status != 200:
                raise StageFailed("image", self._refused(f"has no token for us ({shown(realm)} answered {reply.status})"))
            body = reply.read(_LARGEST_TOKEN)
        try:
            answer = json.loads(body)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise StageFailed("image", f"{shown(realm)} answered with something that is not a token")
        return token

    @property
    def base(self) -> str:
        return f"{self._reference.scheme or 'https'}://{self._reference.authority}"

    def _refused(self, what: str) -> str:
        have = "the credentials that are there are not taken" if self._credentials else "there are no credentials for it"
        return (
            f"the registry {what}: {printable(str(self._reference), 200)}; {have}. Log in with a tool that writes them to "
            "~/.docker/config.json, or name a file that has them in REGISTRY_AUTH_FILE (helper programs are not run)"
        )
