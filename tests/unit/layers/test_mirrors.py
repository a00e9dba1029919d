"""Where a repository is, read from what somebody wrote; what may be a password in it is shown to nobody."""

import pytest

from untax.core.errors import UsageError
from untax.core.spec import Repo
from untax.layers.mirrors import origin_of, without_password


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:s3cr3t@host/x",
        "https://user:s3cr3t@ho st/x",
        "https://user:s3cr3t@-host/x",
        "https://user:s3cr3t\n@host/x",
        "https://user:s3cr3t@[::1/x",
        "file://user:s3cr3t@host/x",
        "ssh://user:s3cr3t@host/x",
        "user:s3cr3t@host:path",
    ],
)
def test_a15_a_refusal_does_not_repeat_a_password(url):
    with pytest.raises(UsageError) as told:
        origin_of(url)
    assert "s3cr3t" not in str(told.value)


def test_a15_a_password_is_no_part_of_what_a_repository_is_nor_of_how_it_is_shown():
    origin = origin_of("https://user:s3%40cr3t@host.example/x")

    assert origin.authorization == "Basic dXNlcjpzM0BjcjN0"
    assert origin.name == origin_of("https://host.example/x").name
    assert "s3" not in repr(origin) and "dXNl" not in repr(origin)
    assert without_password(Repo("https://user:s3%40cr3t@host.example/x", "1234")).url == "https://host.example/x"
