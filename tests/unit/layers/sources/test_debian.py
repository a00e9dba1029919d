"""Recipes of a Debian: what is one, and where this machine's apt would get it from."""

import asyncio

import pytest

from untax.core.errors import StageUnavailable, UsageError
from untax.layers import sources
from untax.layers.sources import _apt
from untax.layers.sources._apt import Source, for_suite, parse_lines, parse_stanzas, read_sources
from untax.layers.sources.debian import choose_builder, debootstrap, is_network_failure, mmdebstrap, parse


@pytest.mark.parametrize(
    ("text", "suite", "packages"),
    [
        ("bookworm", "bookworm", ()),
        ("sid", "sid", ()),
        ("bookworm-backports", "bookworm-backports", ()),
        ("bookworm+git", "bookworm", ("git",)),
        ("bookworm+python3,git,python3", "bookworm", ("git", "python3")),
        ("bookworm+g++,libstdc++6,0ad,python3.11", "bookworm", ("0ad", "g++", "libstdc++6", "python3.11")),
    ],
)
def test_a_recipe_is_a_release_and_packages(text, suite, packages):
    found = parse(text)
    assert (found.suite, found.packages) == (suite, packages)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "--privileged",
        ";reboot",
        "$(id)",
        "a\nb",
        "a\n",
        "-v/:/host",
        "/etc/apt",
        "../x",
        "a b",
        "a=1",
        "a/b",
        "apt-",
        "apt+",
        "?essential",
        "~napt",
        "a:amd64",
        "Apt",
        "x" * 200,
        "ünïcode",
        "a\0",
    ],
)
def test_a9_what_is_no_release_or_package_is_refused_before_anything_runs(word):
    for text in (word, f"bookworm+{word}", f"bookworm+git,{word}"):
        with pytest.raises(UsageError):
            sources.find(f"debian:{text}")


def test_the_same_recipe_is_the_same_image_however_it_is_written():
    def identity(text):
        return asyncio.run(sources.find(f"debian:{text}").identify())

    assert identity("bookworm+git,less") == identity("bookworm+less,git,less")
    assert len({identity(text).text for text in ("bookworm", "sid", "bookworm+git", "bookworm+less")}) == 4
    assert identity("bookworm").is_portable


def test_one_line_sources_are_read_as_apt_reads_them():
    text = """
# deb http://commented.test/debian bookworm main
deb http://mirror.test/debian bookworm main contrib # a comment
deb-src http://mirror.test/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://mirror.test/debian bookworm-updates main
deb cdrom:[Debian]/ bookworm main
deb http://flat.test/ ./
nonsense
"""
    assert list(parse_lines(text)) == [
        Source("http://mirror.test/debian", "bookworm", ("main", "contrib")),
        Source(
            "https://mirror.test/debian", "bookworm-updates", ("main",), (("signed-by", "/usr/share/keyrings/debian-archive-keyring.gpg"),)
        ),
    ]


def test_sources_in_fields_are_read_as_apt_reads_them():
    text = """\
Types: deb deb-src
# a comment
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://off.test/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://inline.test/debian
Suites: sid
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJKwYBBAHaRw8BAQdAd7Z0srwuhlB6JKFkcf4HU4SSS/xcRfwEQWzr
"""
    keys = (("signed-by", "/usr/share/keyrings/debian-archive-keyring.gpg"),)
    assert list(parse_stanzas(text)) == [
        Source("http://mirror.test/debian", "bookworm", ("main",), keys),
        Source("http://mirror.test/debian", "bookworm-updates", ("main",), keys),
        Source("http://inline.test/debian", "sid", ("main",)),
    ]


def test_both_kinds_of_files_are_read(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://a.test/debian bookworm main\n")
    (tmp_path / "sources.list.d/b.list").write_text("deb http://b.test/debian bookworm main\n")
    (tmp_path / "sources.list.d/c.sources").write_text("Types: deb\nURIs: http://c.test/debian\nSuites: bookworm\nComponents: main\n")
    (tmp_path / "sources.list.d/d.disabled").write_text("deb http://d.test/debian bookworm main\n")
    assert [source.uri[7] for source in read_sources(tmp_path)] == ["a", "b", "c"]
    assert read_sources(tmp_path / "missing") == []


MAIN = Source("http://mirror.test/debian", "bookworm", ("main",))
UPDATES = Source("http://mirror.test/debian", "bookworm-updates", ("main",))
SECURITY = Source("http://mirror.test/debian-security", "bookworm-security", ("main",))
OTHER = Source("http://vendor.test/apt", "bookworm", ("main",))


def test_a_release_comes_with_its_updates_and_security_fixes_and_nobody_else_s_packages():
    assert for_suite([OTHER, MAIN, UPDATES, SECURITY], "bookworm") == [MAIN, UPDATES, SECURITY]


def test_another_release_is_looked_for_on_the_same_mirror():
    assert for_suite([OTHER, SECURITY, UPDATES, MAIN], "sid") == [Source(MAIN.uri, "sid", ("main",))]


def test_a_machine_whose_apt_knows_no_debian_has_no_source_for_one():
    assert for_suite([OTHER], "bookworm") == []


def test_an_image_does_not_learn_the_mirror_s_password_or_a_key_that_only_the_host_has():
    source = Source("https://me:secret@mirror.test/debian", "bookworm", ("main",), (("signed-by", "/etc/apt/keyrings/mine.gpg"),))
    assert "secret" in source.line()
    assert source.public().line() == "deb https://mirror.test/debian bookworm main"
    kept = Source(MAIN.uri, "bookworm", ("main",), (("signed-by", "/usr/share/keyrings/debian-archive-keyring.gpg"),))
    assert kept.public() == kept


def test_the_machine_s_means_decide_what_builds(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert choose_builder(lambda name: True) is mmdebstrap
    assert choose_builder(lambda name: name == "debootstrap") is debootstrap
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert choose_builder(lambda name: name in ("mmdebstrap", "newuidmap")) is mmdebstrap
    with pytest.raises(StageUnavailable, match="apt install uidmap"):
        choose_builder(lambda name: name in ("mmdebstrap", "debootstrap"))
    with pytest.raises(StageUnavailable, match="apt install mmdebstrap"):
        choose_builder(lambda name: name == "debootstrap")


def test_what_apt_is_told_about_reaching_its_mirrors_is_passed_on(monkeypatch):
    dumped = """\
Acquire::http::Proxy "http://proxy.test:3128";
Acquire::https::Proxy::mirror.test "DIRECT";
Acquire::Check-Valid-Until "false";
Acquire::http "";
Acquire::AllowInsecureRepositories "1";
DPkg::Post-Invoke:: "rm -rf /";
"""
    monkeypatch.setattr(_apt.subprocess, "run", lambda *args, **options: type("Done", (), {"stdout": dumped}))
    assert _apt.passed_on() == [
        'Acquire::http::Proxy "http://proxy.test:3128"',
        'Acquire::https::Proxy::mirror.test "DIRECT"',
        'Acquire::Check-Valid-Until "false"',
    ]


def test_a_builder_that_failed_for_the_network_may_work_another_time():
    for log in (
        b"Err:1 http://mirror.test/debian bookworm InRelease\n  Temporary failure resolving 'mirror.test'",
        b"Err:1 http://mirror.test/debian bookworm InRelease\n  503  Service Unavailable [IP: 192.0.2.1 80]",
        b"E: Failed to fetch http://mirror.test/x  Could not connect to mirror.test:80 (192.0.2.1), connection timed out",
    ):
        assert is_network_failure(log)
    for log in (
        b"Get:1 http://mirror.test/debian bookworm/main amd64 x 1 [500 kB]",
        b"E: Unable to locate package nosuchpackage",
        b"404  Not Found",
    ):
        assert not is_network_failure(log)
