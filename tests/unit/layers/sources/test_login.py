"""Credentials as files hold them, challenges as registries make them."""

import base64
import json

import pytest

from untax.core.errors import UsageError
from untax.layers.sources._login import choose, parse_challenges, read_credentials
from untax.layers.sources._reference import parse_remote

IMAGE = parse_remote("registry.test:5000/team/tool:1")


def entry(user="u", password="p"):
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def found(auths):
    return choose(json.dumps({"auths": auths}), IMAGE, "file")


@pytest.mark.parametrize(
    "key",
    [
        "registry.test:5000",
        "https://registry.test:5000",
        "https://registry.test:5000/v1/",
        "http://registry.test:5000/v2/",
        "registry.test:5000/team",
    ],
)
def test_an_entry_is_found_by_its_host_however_tools_write_it(key):
    assert found({key: entry()}).basic == "Basic dTpw"


@pytest.mark.parametrize(
    "key", ["registry.test", "registry.test:50001", "other.test:5000", "registry.test:5000/tea", "registry.test:5000/team/tool/x"]
)
def test_another_registry_s_entry_is_not_used(key):
    assert found({key: entry()}) is None


def test_the_entry_that_names_most_of_the_image_is_taken():
    auths = {"registry.test:5000": entry("host"), "registry.test:5000/team": entry("team"), "registry.test:5000/team/other": entry("other")}
    assert found(auths).user == "team"


def test_a_password_may_hold_colons():
    assert found({"registry.test:5000": entry(password="a:b:c")}).password == "a:b:c"


def test_tokens_and_plain_names_are_taken_as_they_are():
    got = found({"registry.test:5000": {"identitytoken": "i", "registrytoken": "r", "username": "u", "password": "p"}})
    assert (got.identity_token, got.registry_token, got.user, got.password) == ("i", "r", "u", "p")


def test_an_entry_whose_secret_a_helper_program_keeps_is_none():
    assert found({"registry.test:5000": {}}) is None


def test_a15_credentials_are_never_printed():
    assert "secret" not in repr(found({"registry.test:5000": entry("secret-user", "secret")}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"auths": 7}',
        '{"auths": {"registry.test:5000": {"auth": "%%%"}}}',
        '{"auths": {"registry.test:5000": {"username": 7}}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_none_is_the_caller_s_mistake(text):
    with pytest.raises(UsageError, match="file"):
        choose(text, IMAGE, "file")


def test_files_are_looked_for_where_container_tools_write_them(tmp_path):
    def written(path, user):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"auths": {"registry.test:5000": entry(user)}}))

    env = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    assert read_credentials(IMAGE, env) is None
    written(tmp_path / "run/containers/auth.json", "podman")
    assert read_credentials(IMAGE, env).user == "podman"
    written(tmp_path / ".docker/config.json", "docker")
    assert read_credentials(IMAGE, env).user == "docker"
    written(tmp_path / "elsewhere/config.json", "moved")
    assert read_credentials(IMAGE, {**env, "DOCKER_CONFIG": str(tmp_path / "elsewhere")}).user == "moved"
    written(tmp_path / "named.json", "named")
    assert read_credentials(IMAGE, {**env, "REGISTRY_AUTH_FILE": str(tmp_path / "named.json")}).user == "named"
    with pytest.raises(UsageError, match="does not exist"):
        read_credentials(IMAGE, {**env, "REGISTRY_AUTH_FILE": str(tmp_path / "missing.json")})


def test_a_challenge_says_where_tokens_are_had():
    (one,) = parse_challenges(
        'Bearer realm="https://auth.test/token",service="the \\"registry\\"", scope="repository:a/b:pull,push",error=bad'
    )
    assert one.scheme == "bearer"
    assert one.parameters == {
        "realm": "https://auth.test/token",
        "service": 'the "registry"',
        "scope": "repository:a/b:pull,push",
        "error": "bad",
    }


def test_several_challenges_in_one_header_are_told_apart():
    both = parse_challenges('Basic realm="a, b", Bearer realm="https://auth.test/", charset=UTF-8, Negotiate')
    assert [(one.scheme, one.parameters.get("realm")) for one in both] == [
        ("basic", "a, b"),
        ("bearer", "https://auth.test/"),
        ("negotiate", None),
    ]


@pytest.mark.parametrize(
    "header", ["", " ", ",", '="x"', 'Bearer realm="unclosed', "\x00", "Bearer " * 20_000, 'Bearer a="' + "\\" * 50_000]
)
def test_a_header_that_is_no_challenge_is_none_quickly(header):
    assert all(one.parameters == {} for one in parse_challenges(header))
