"""Who may use the service: token files, keys, addresses, and the bodies that are read."""

import ipaddress
import os

import pytest

pytest.importorskip("starlette")

import untax
from untax.service.admission import Admission, own_addresses
from untax.service.auth import token_in
from untax.service.bodies import parse_json
from untax.service.errors import Refused
from untax.service.keys import new_key, own_key, read_secret
from untax.service.tenants import ANYBODY, digest, read_tenants

TOKEN = "a-token-0123456789"


def test_one_token_is_one_tenant():
    tenants = read_tenants(f"# mine\n{TOKEN}\n")
    assert tenants.find(TOKEN).name == "default"
    for wrong in (None, "", TOKEN + " ", TOKEN[:-1], TOKEN.upper(), "x" * 600):
        assert tenants.find(wrong) is None


def test_tables_give_tenants_their_limits_and_may_hold_hashes_only():
    tenants = read_tenants(f'[tenant.a]\ntoken = "{TOKEN}"\nleases = 3\n[tenant.b]\ntoken_sha256 = "{digest("b" * 20).hex()}"\n')
    assert tenants.find(TOKEN).allowance.leases == 3 and tenants.find("b" * 20).name == "b"


@pytest.mark.parametrize(
    "text",
    ["", "short", f"{TOKEN}\n{TOKEN}x", "[tenant.a]", f'[tenant.a]\ntoken = "{TOKEN}"\nleases = 0', f'[tenant.a]\ntoken = "{TOKEN}"\nnonsense = 1',
     f'[tenant."a/b"]\ntoken = "{TOKEN}"', '[tenant.a]\ntoken_sha256 = "00"', f'[other]\ntoken = "{TOKEN}"'],
)  # fmt: skip
def test_a_token_file_that_is_none_is_refused_without_showing_it(text):
    with pytest.raises(untax.UsageError) as told:
        read_tenants(text)
    assert TOKEN not in str(told.value)


def test_any_key_is_anybody():
    tenants = read_tenants(TOKEN, any_key=True)
    assert tenants.find("whatever") is ANYBODY and tenants.find(TOKEN).name == "default" and tenants.find("") is None


def test_a_key_is_made_once_and_only_for_its_owner(tmp_path):
    path = tmp_path / "state" / "api-key"
    key = own_key(path)
    assert own_key(path) == key and path.stat().st_mode & 0o777 == 0o600
    assert len(key) == 44 and key.startswith("e2b_") and int(key[4:], 16) >= 0 and new_key() != key
    path.chmod(0o640)
    with pytest.raises(untax.UsageError, match="chmod 600"):
        read_secret(path)
    path.unlink()
    os.symlink("/etc/shadow", path)
    with pytest.raises(untax.UsageError):
        own_key(tmp_path / "state")


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([(b"authorization", b"Bearer t")], "t"), ([(b"authorization", b"bearer t")], "t"), ([(b"x-api-key", b"t")], "t"),
        ([(b"authorization", b"Bearer t"), (b"x-api-key", b"t")], "t"), ([(b"authorization", b"Bearer t"), (b"x-api-key", b"u")], None),
        ([(b"authorization", b"Basic t")], None), ([], None), ([(b"x-api-key", b"")], None),
    ],
)  # fmt: skip
def test_a_token_is_read_from_one_place(headers, token):
    assert token_in(headers) == token


@pytest.mark.parametrize(
    "data",
    [b"[]", b"{", b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":1e999}', b'{"a":' + b"1" * 30 + b"}", b"[" * 100_000, b'{"a":"\\ud800"}', b"\xff"],
)
def test_json_that_means_nothing_is_refused(data):
    with pytest.raises(Refused) as told:
        parse_json(data)
    assert told.value.status == 400


def test_json_is_read():
    assert parse_json(b'{"a": [1, 2.5, "\\u00e9", null, true]}') == {"a": [1, 2.5, "é", None, True]} and parse_json(b" ") == {}


def test_images_and_repositories_are_the_operators_to_allow():
    admission = Admission(("host", "registry:*"), ("https://git.example.org/*",))
    admission.check(untax.EnvSpec(image="registry:x", repo=untax.Repo("https://git.example.org/a", "c")))
    for spec in (untax.EnvSpec(image="dir:/"), untax.EnvSpec(repo=untax.Repo("https://git.example.org.evil/a", "c"))):
        with pytest.raises(Refused) as told:
            admission.check(spec)
        assert told.value.status == 403


@pytest.mark.parametrize(
    "pattern",
    ["169.254.169.254:80", "127.0.0.1:*", "localhost:80", "0.0.0.0/1:*", "10.0.0.0/7:*", "168.63.129.16:80", "224.0.0.1:1", "[::1]:80", "[fd00::1]:80",
     "[::ffff:10.0.0.1]:80", "[64:ff9b::a00:1]:80", "[2002:a00:1::]:80", "[2000::/3]:*"],
)  # fmt: skip
def test_private_addresses_are_the_operators_to_allow(pattern):
    with pytest.raises(Refused) as told:
        Admission().check_network(("index.example.org:443", pattern))
    assert told.value.status == 403
    Admission(private=("*",)).check_network((pattern,))
    Admission(private=(pattern,)).check(untax.EnvSpec(network=(pattern,)))


def test_an_allowed_range_opens_what_lies_in_it_and_no_more():
    admission = Admission(private=("10.0.0.0/8:5432", "192.168.1.1", "[fd00::/8]"))
    for network in (("10.1.2.3:5432",), ("192.168.1.1:80", "9.9.9.9:*"), ("[fd00::7]:1",), "all", "none", ("*:*",), ("*.example.org:443",)):
        admission.check_network(network)
    for pattern in ("10.1.2.3:80", "10.1.2.3:*", "8.0.0.0/5:5432", "192.168.1.2:80", "[fe80::1]:1", "localhost:5432"):
        with pytest.raises(Refused):
            admission.check_network((pattern,))
    with pytest.raises(untax.UsageError):
        Admission(private=("a b",)).reachable()


def test_where_there_is_no_network_none_is_bound_late_either():
    with pytest.raises(Refused):
        Admission(networks=False).check_network("all")
    Admission(networks=False).check_network(None)


def test_a_public_address_of_the_server_is_its_own_too(monkeypatch):
    assert ipaddress.ip_address("127.0.0.1") in own_addresses()
    monkeypatch.setattr(
        "untax.service.admission.own_addresses", lambda: [ipaddress.ip_address("9.9.9.9"), ipaddress.ip_address("2620:fe::fe")]
    )
    Admission().check_network(("8.8.8.8:*", "[2620:fe::9]:53", "*:*"))
    for pattern in ("9.9.9.9:443", "9.0.0.0/8:*", "[2620:fe::/48]:53"):
        with pytest.raises(Refused):
            Admission().check_network((pattern,))
    Admission(private=("9.9.9.9",)).check_network(("9.9.9.9:443",))
