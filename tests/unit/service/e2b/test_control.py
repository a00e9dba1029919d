"""Requests to the control plane and to envd, before anything is done for them."""

from types import SimpleNamespace

import pytest
from starlette.requests import Request

from untax.core.errors import UsageError
from untax.service.e2b.connect import RpcError
from untax.service.e2b.control import Control, _whole
from untax.service.e2b.envd import _ping_s, _timeout_s
from untax.service.e2b.models import Accounts
from untax.service.hosting import Hosting
from untax.service.tenants import Allowance, Tenant, Tenants, digest


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


@pytest.mark.parametrize("text", ["²", "--5", "-", "", "1" * 16, "5\n", "1_0"])
def test_what_is_no_number_is_refused_and_breaks_nothing(text):
    with pytest.raises(UsageError):
        _whole(text, "limit")
    with pytest.raises(RpcError):
        _timeout_s(request(connect_timeout_ms=text))
    assert _ping_s(request(keepalive_ping_interval=text)) == 90.0
    assert Accounts.parse(f"a:x:{text}:1::/a:\nb:x:0:{text}::/b:\n".encode(), b"").users.keys() <= {"b"}


def test_numbers_are_read():
    assert (_whole("-5", "start"), _timeout_s(request(connect_timeout_ms="1500")), _ping_s(request(keepalive_ping_interval="7"))) == (
        -5,
        1.5,
        7.0,
    )


async def test_a_request_to_the_control_plane_counts_as_one(tmp_path):
    alice = Tenant("alice", Allowance(actions=1))
    engine = SimpleNamespace(warehouse=SimpleNamespace(state_dir=tmp_path))
    hosting = Hosting(engine, Tenants([(alice, digest("t"))]), owners=SimpleNamespace(on_ledger=None, is_draining=False))
    asked: list[dict[str, int]] = []

    async def handler(_, tenant):
        asked.append(hosting.use(tenant))
        return (await guarded(request(x_api_key="t"))).status_code  # one more at the same time

    guarded = Control(hosting, *[None] * 4)._guarded(handler)
    assert await guarded(request(x_api_key="t")) == 429 and [one["actions"] for one in asked] == [1]
