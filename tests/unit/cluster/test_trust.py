"""Certificates of a fleet's own authority: who is let in, and who is not."""

import asyncio
import ssl

import pytest

pytest.importorskip("cryptography", reason="cryptography: not installed; pip install 'untax[ray]'")

from untax.cluster.trust import Trust, pinned


async def greeted(authority, identity, directory, host="127.0.0.1"):
    """One connection to a listener with `identity`, by a client that trusts `authority`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*identity.write(directory))

    async def hello(reader, writer):
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=pinned(authority), server_hostname=host)
        try:
            return await reader.read(), writer.get_extra_info("ssl_object").version()
        finally:
            writer.close()


async def test_an_agent_is_known_by_the_fleets_authority(tmp_path):
    trust = Trust.new("untax")
    assert await greeted(trust.authority.certificate, trust.identity_for("127.0.0.1"), tmp_path) == (b"hello", "TLSv1.3")


async def test_an_agent_of_another_fleet_of_the_same_name_is_not_trusted(tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError):
        await greeted(Trust.new("untax").authority.certificate, Trust.new("untax").identity_for("127.0.0.1"), tmp_path)


async def test_an_agent_cannot_stand_in_for_another_node(tmp_path):
    trust = Trust.new("untax")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        await greeted(trust.authority.certificate, trust.identity_for("127.0.0.9"), tmp_path)


async def test_an_agent_cannot_sign_for_others(tmp_path):
    trust = Trust.new("untax")
    agent = trust.identity_for("127.0.0.1")
    forged = Trust("token", agent).identity_for("127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        await greeted(trust.authority.certificate, forged, tmp_path)


def test_keys_lie_where_nobody_else_can_read_them_and_replace_what_was_there(tmp_path):
    identity = Trust.new("untax").identity_for("node-7.example.org")
    (tmp_path / "agent-key.pem").symlink_to(tmp_path / "elsewhere")
    for path in (*identity.write(tmp_path), *identity.write(tmp_path)):
        assert path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_secrets_are_not_shown():
    trust = Trust.new("untax")
    assert trust.token not in repr(trust) and "PRIVATE" not in repr(trust) and len(trust.token) >= 40
    assert Trust.new("untax").token != trust.token
