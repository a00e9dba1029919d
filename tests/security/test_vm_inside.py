"""THREATS 4.1 to 4.6 in a virtual machine: one restored machine for what leaves nothing, one for what ruins it."""

import pytest
from tests.images import small_image
from tests.security.inside import *  # noqa: F403
from tests.security.inside import out

import untax
from untax import substrates


@pytest.fixture(scope="module")
def vms(_runner, tmp_path_factory):
    if reason := substrates.load("vm").unavailable_reason():
        pytest.skip(f"vm: {reason}")
    engine = untax.Engine("vm", state_dir=tmp_path_factory.mktemp("vm") / "state", ready_s=150.0)
    _runner.run(engine.start())
    yield engine
    _runner.run(engine.aclose())


def _leased(name, **late):
    @pytest.fixture(scope="module", name=name)
    def leased(vms, _runner):
        box = _runner.run(vms.acquire(untax.EnvSpec(image=small_image("vm"), isolation="vm"), **late))
        yield box
        _runner.run(box.release())

    return leased


box = _leased("box")
fresh = _leased("fresh")
fresh_with_network = _leased("fresh_with_network", network=("example.invalid:443",))


async def test_e1_e21_e22_e26_nothing_of_this_machine_is_inside(box, canary):
    """Its files, its sockets, its variables, its kernel's log."""
    assert canary.text not in await out(box, "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert await out(box, f"grep -rIls '{canary.text[:-1]}[{canary.text[-1]}]' / --exclude-dir=proc --exclude-dir=sys 2>/dev/null") == ""
    assert await out(box, "find / -xdev -type s 2>/dev/null; ls /var/run/docker.sock /run/containerd 2>/dev/null") == ""
    assert (await box.shell("head -c 64 /dev/kmsg")).exit_code != 0
