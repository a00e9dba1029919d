"""An image's config becomes data; what it cannot be is refused in tests/security/test_archives.py."""

import json

import pytest
from tests import hostile_archives as hostile

from untax.core.errors import StageFailed
from untax.core.root import ImageConfig
from untax.layers.sources._reference import Platform
from untax.layers.sources.config import read_config


def read(platform=None, top=None, **fields):
    return read_config(json.dumps({"config": fields, **(top or {})}).encode(), "test", platform=platform)


def test_what_an_image_says_is_kept():
    found = read(
        Env=["PATH=/usr/bin:/bin", "LANG=C.UTF-8"],
        WorkingDir="/srv/app",
        User="app",
        Entrypoint=["/bin/entry", "--flag"],
        Cmd=["serve"],
        Labels={"org.opencontainers.image.title": "x", "a\nb": "c"},
        top={"rootfs": {"diff_ids": [hostile.digest_of(b"1"), hostile.digest_of(b"2")]}},
    )

    assert found.config == ImageConfig(
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        workdir="/srv/app",
        user="app",
        entrypoint=("/bin/entry", "--flag"),
        command=("serve",),
        labels={"org.opencontainers.image.title": "x", "a\nb": "c"},
    )
    assert found.diff_ids == (hostile.digest_of(b"1"), hostile.digest_of(b"2"))
    assert found.notes == ()


@pytest.mark.parametrize("data", [b"{}", b'{"config": null}', b'{"config": {"Env": null, "Cmd": null, "User": "", "WorkingDir": ""}}'])
def test_an_image_may_say_nothing(data):
    assert read_config(data, "test").config == ImageConfig()


@pytest.mark.parametrize(
    ("said", "kept"),
    [("app", "app"), ("1000", "1000"), ("1000:1000", "1000"), ("app:staff", "app"), ("", None), (":5", None), ("-x", None), ("a/b", None), ("a\nb", None), ("a\0b", None)],
)  # fmt: skip
def test_a_user_is_a_name_or_a_number(said, kept):
    found = read(User=said)

    assert found.config.user == kept
    assert bool(found.notes) == (kept is None and said not in ("", ":5"))


@pytest.mark.parametrize(
    ("said", "kept"),
    [("/a", "/a"), ("a/b", "/a/b"), ("/a/../../..", "/"), ("//a//b/", "/a/b"), ("/a\0", None), ("/" + "a" * 5000, None)],
)
def test_a_working_directory_is_absolute_and_inside(said, kept):
    assert read(WorkingDir=said).config.workdir == kept


def test_a_config_of_another_platform_is_refused():
    ours = Platform("arm64", "v8")
    read(ours, {"architecture": "arm64", "os": "linux"})
    read(ours, {"architecture": "arm64", "variant": "v8"})
    with pytest.raises(StageFailed, match=r"linux/amd64.*this machine is linux/arm64/v8"):
        read(ours, {"architecture": "amd64", "os": "linux"})


def test_a_config_is_held_to_its_digest():
    data = b'{"config": {}}'
    assert read_config(data, "test", digest=hostile.digest_of(data)).digest == hostile.digest_of(data)
    with pytest.raises(StageFailed, match="was promised"):
        read_config(data + b" ", "test", digest=hostile.digest_of(data))
