"""The network over the channel, the same on every substrate: what ordinary tools do through the sandbox's proxy."""

import dataclasses
import shutil

import pytest
from tests import servers
from tests.images import tools_image

from untax import substrates


@pytest.fixture
def spec(engine, spec):
    """These need git, curl and Python inside."""
    return dataclasses.replace(spec, image=tools_image(engine.test_substrate))


async def test_pip_install_works_through_the_proxy(engine, spec, tmp_path):
    with servers.package_index(tmp_path, "untaxprobe", "1.0", "VALUE = 42\n") as index:
        async with engine.lease(spec, network=(index.pattern,), files={"ca.pem": index.certificate}) as box:
            made = await box.shell(
                "python3 -m venv --without-pip v && python3 -m pip --version >/dev/null && "
                f"python3 -m pip --python v/bin/python install -q --cert ca.pem --index-url {index.url} untaxprobe && v/bin/python -c 'import untaxprobe; print(untaxprobe.VALUE)'",
                timeout_s=60,
            )
            if b"No module named" in made.stderr:
                pytest.skip("this host's Python has no pip or venv")
            records = {(r.host, r.port, r.verdict) for r in box.ledger.egress}

    assert made.text == "42\n", made.stderr
    host, port = index.pattern.split(":")
    assert (host, int(port), "allowed") in records


async def test_git_clone_works_through_the_proxy(engine, spec, tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    with servers.git_over_https(tmp_path, {"README": "cloned\n"}) as repo:
        async with engine.lease(spec, network=(repo.pattern,), files={"ca.pem": repo.certificate}) as box:
            result = await box.shell(f"git -c http.sslCAInfo=$PWD/ca.pem clone -q {repo.url} work && cat work/README", timeout_s=60)

    assert result.text == "cloned\n", result.stderr


async def test_without_a_policy_the_same_fails_at_once(engine, spec, tmp_path):
    if substrates.load(engine.test_substrate).isolation == "none":
        pytest.skip(f"the substrate {engine.test_substrate!r} has no boundary")
    with servers.listener() as peer:
        assert peer.is_reachable_from_host()
        async with engine.lease(spec) as box:
            result = await box.shell(f"curl -s -m 3 http://{peer.address}/")
        assert result.exit_code != 0
        assert peer.peers == []


async def test_what_the_policy_does_not_name_is_refused_with_words(engine, spec):
    with servers.listener() as peer:
        async with engine.lease(spec, network=("127.0.0.3:1",)) as box:
            result = await box.shell(f"curl -s -m 5 -w '%{{http_code}}' http://{peer.address}/")
        assert result.text.endswith("403")
        assert peer.address in result.text
        assert peer.peers == []
