"""Names of images: what is one, what is none, and which of several suits this machine."""

import pytest

from untax.core.errors import UsageError
from untax.layers.sources import find
from untax.layers.sources._reference import Platform, is_loopback, parse_local, parse_remote

SHA = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "authority", "name", "wanted"),
    [
        ("registry.test/tools/python:3.12", "registry.test", "tools/python", "3.12"),
        ("registry.test:5000/a", "registry.test:5000", "a", "latest"),
        (f"registry.test/a@{SHA}", "registry.test", "a", SHA),
        (f"registry.test/a:tag@{SHA}", "registry.test", "a", SHA),
        ("127.0.0.1:5000/x/y/z", "127.0.0.1:5000", "x/y/z", "latest"),
        ("[::1]:5000/x", "[::1]:5000", "x", "latest"),
        ("http://registry.test/a:b", "registry.test", "a", "b"),
        ("Registry.Test/a__b/c.d/e-f--g:V1.0_x", "registry.test", "a__b/c.d/e-f--g", "V1.0_x"),
    ],
)
def test_an_image_in_a_registry_has_a_host_a_name_and_a_tag_or_a_digest(text, authority, name, wanted):
    found = parse_remote(text)
    assert (found.authority, found.name, found.wanted) == (authority, name, wanted)


HOSTILE = [
    "",
    "/",
    "--privileged",
    ";reboot",
    "$(id)",
    "a\nb",
    "-v/:/host",
    "a b",
    "name,upperdir=/",
    "name\\x",
    "name\0",
    "../../etc/passwd",
    "name:tag:tag",
    "name@sha256:short",
    "Name:tag",
    "name:" + "t" * 129,
    "n" * 600,
    "ünïcode",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a9_what_is_no_name_is_refused_before_anything_is_asked(text):
    for image in (text, f"registry.test/{text}", f"{text}/name"):
        with pytest.raises(UsageError):
            parse_remote(image)
    with pytest.raises(UsageError):
        parse_local(text, "docker")


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "registry.test",
        "user:secret@registry.test/a",
        "registry.test/a?b=c",
        "registry.test/a#b",
        "registry.test/a%2e",
        "registry.test:0/a",
        "registry.test:65536/a",
        "registry.test//a",
        "registry.test/a/",
        "registry.test/a:tag\n",
        "registry.test/a\r\nX: y",
        "ftp://registry.test/a",
        "http:///a",
        "[::g]/a",
        "[::1/a",
        "registry..test/a",
        "-registry.test/a",
        "registry.test/" + "a/" * 200 + "a",
    ],
)
def test_a9_a_registry_name_without_host_or_with_more_than_a_name_is_refused(text):
    with pytest.raises(UsageError):
        parse_remote(text)


@pytest.mark.parametrize("text", ["name", "name:tag", "localhost/name:tag", f"reg.test:5000/a/b@{SHA}", SHA, "0123456789ab"])
def test_an_engine_is_asked_by_name_or_id(text):
    assert parse_local(text, "docker") == text


def test_only_names_of_this_machine_are_loopback():
    """Nothing is resolved: a name that happens to lead here is not taken for this machine."""
    assert [is_loopback(host) for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "[::1]")] == [True] * 5
    assert [is_loopback(host) for host in ("localhost.test", "10.0.0.1", "0.0.0.0", "[::2]", "127.0.0.1.test", "")] == [False] * 6


def test_the_nearest_variant_that_runs_here_is_the_best():
    here = Platform("arm", "v7")
    assert here.fit(Platform("arm", "v7")) == 0
    assert here.fit(Platform("arm")) == 0
    assert here.fit(Platform("arm", "v6")) == 1
    assert here.fit(Platform("arm", "v5")) == 2
    assert here.fit(Platform("arm", "v8")) is None
    assert here.fit(Platform("arm64", "v8")) is None
    assert here.fit(Platform("arm", "v7", "windows")) is None
    assert Platform("arm64", "v8").fit(Platform("arm64")) == 0
    assert Platform("amd64").fit(Platform("amd64", "v3")) is None
    assert Platform("amd64").fit(Platform("amd64", "odd")) is None


@pytest.mark.parametrize(
    "image",
    [
        "registry:user:s3cr3t@host.example/name:tag",
        "registry:https://user:s3cr3t@host.example/name",
        "docker:user:s3cr3t@host/name",
        "https://user:s3cr3t@host.example/name",
        "user:s3cr3t@host.example/name",
    ],
)
def test_a15_a_password_in_a_name_is_refused_and_not_repeated(image):
    """Errors are logged, and shown to others than whoever wrote the name."""
    with pytest.raises(UsageError) as told:
        find(image)
    assert "s3cr3t" not in str(told.value)
    assert "@host" in str(told.value)


def test_a_digest_in_a_name_that_is_wrong_otherwise_is_shown():
    with pytest.raises(UsageError, match="h/n:Tag!@sha256:00"):
        find("registry:h/n:Tag!@sha256:00")
