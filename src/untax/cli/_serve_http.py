"""`untax serve` over HTTP: which tokens, which address, and what a client has to be told."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from untax.core.errors import UsageError
from untax.server.service import Service
from untax.service import telemetry
from untax.service.admission import Admission
from untax.service.app import build
from untax.service.held import take_over
from untax.service.hosting import Hosting, Settings
from untax.service.keys import own_key, read_secret
from untax.service.listen import Address, HttpListener
from untax.service.tenants import Tenants, read_tenants
from untax.substrates._host import chosen_state_dir

_HTTPS = 443
_DOMAIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)+")


@dataclass
class Http:
    """Everything that can be wrong about it is found out here, before an engine is started."""

    host: str
    port: int
    token_file: str | None
    tls_cert: str | None
    tls_key: str | None
    any_key: bool
    state_dir: str | None
    allow_image: tuple[str, ...] = ()
    allow_repo: tuple[str, ...] = ()
    allow_network: tuple[str, ...] = ()
    domain: str | None = None
    base_image: str = "host"
    images: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.address = Address(self.host, self.port, self.tls_cert, self.tls_key)
        self.address.check_safe(has_tokens=self.token_file is not None, any_key=self.any_key)
        if self.domain is not None and (not _DOMAIN.fullmatch(self.domain) or not self.port or self.tls_cert is None):
            raise UsageError("--domain is a name such as sandboxes.example.org; it wants a --port, and --tls-cert and --tls-key for *.NAME")
        self.admission = Admission(("host", *self.allow_image), self.allow_repo, private=self.allow_network)
        self.admission.reachable()  # reads every pattern
        self.spans = telemetry.from_environment()
        self.key_file = Path(self.token_file or _key_path(self.state_dir))
        self.tenants: Tenants = read_tenants(
            read_secret(self.key_file) if self.token_file is not None else own_key(self.key_file), any_key=self.any_key
        )

    async def start(self, owners: Service, stack: contextlib.AsyncExitStack) -> tuple[Hosting, dict[str, object]]:
        """Listen until `stack` is left. Gives what can be drained, and what is to be said."""
        settings = Settings(
            admission=self.admission,
            domain=self._shown_domain,
            extra={"e2b_image": self.base_image, "e2b_images": dict(self.images)},
        )
        hosting = Hosting(owners.engine, self.tenants, settings, owners=owners, spans=self.spans)
        listener = HttpListener(build(hosting), self.address, functools.partial(take_over, hosting))
        stack.push_async_callback(listener.close)
        stack.push_async_callback(hosting.aclose)
        await listener.start()
        key = f"$(cat {self.key_file})"
        exports = {
            "UNTAX_URL": listener.url,
            "UNTAX_TOKEN": key,
            **(
                {"E2B_DOMAIN": domain} if (domain := self._shown_domain) else {"E2B_API_URL": listener.url, "E2B_SANDBOX_URL": listener.url}
            ),
            "E2B_API_KEY": key,
        }
        return hosting, {"url": listener.url, "key_file": str(self.key_file), "exports": exports}

    @property
    def _shown_domain(self) -> str | None:
        """With the port where clients would not guess it."""
        return self.domain if self.domain is None or self.port == _HTTPS else f"{self.domain}:{self.port}"


def _key_path(state_dir: str | os.PathLike[str] | None) -> Path:
    return chosen_state_dir(None if state_dir is None else os.fsdecode(state_dir)) / "api-key"
