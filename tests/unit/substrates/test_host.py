"""What a dead engine left is told from what a live one uses by a lock that the kernel drops."""

import asyncio
import os
import shutil
import subprocess
import sys

import pytest

from untax import substrates
from untax.core.errors import BackendError, DestroyError, SubstrateUnavailable, UsageError
from untax.substrates import _host


def test_an_unknown_substrate_is_an_error_that_names_the_known():
    with pytest.raises(UsageError, match="process"):
        substrates.load("proces")


def test_an_unknown_option_is_an_error_that_names_the_known():
    with pytest.raises(UsageError, match="state_dir"):
        substrates.load("process", colour="red")


def test_a_live_holding_is_not_swept(tmp_path):
    holding = _host.Holding.take(tmp_path / "state")

    assert _host.sweep(tmp_path / "state", shutil.rmtree) == 0
    assert holding.path.is_dir()
    holding.close()
    holding.close()
    assert not holding.path.exists()


@pytest.mark.parametrize("name", ["gvisor", "vm"])
async def test_one_that_does_not_die_keeps_no_other_alive_and_is_swept_later(tmp_path, name):
    """Closing says so when everything else is done."""
    ended = []

    class Sandbox:
        def __init__(self, number):
            self.number = number

        async def destroy(self):
            if self.number == 0:
                raise DestroyError("sbx-0", "it does not die")
            await asyncio.sleep(0)
            ended.append(self.number)

    substrate = substrates.load(name, state_dir=str(tmp_path))
    substrate._holding = holding = _host.Holding.take(tmp_path / name)
    substrate._live = {str(number): Sandbox(number) for number in range(3)}
    with pytest.raises(DestroyError, match="it does not die"):
        await substrate.aclose()
    await substrate.aclose()

    assert ended == [1, 2]
    assert holding.path.is_dir()
    assert _host.sweep(tmp_path / name, shutil.rmtree) == 1


def test_what_a_killed_engine_left_is_swept(tmp_path):
    script = (
        "import os, pathlib, sys; from untax.substrates._host import Holding; "
        "h = Holding.take(pathlib.Path(sys.argv[1])); (h.path / 'left').mkdir(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "state")], env={"PYTHONPATH": os.pathsep.join(sys.path)})
    left = list((tmp_path / "state").glob("engine-*"))
    assert len(left) == 1

    assert _host.sweep(tmp_path / "state", shutil.rmtree) == 1
    assert not left[0].exists()


def test_f20_a_state_directory_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(UsageError, match="link"):
        _host.Holding.take(tmp_path / "state")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_among_the_holdings_is_not_followed(tmp_path):
    _host.Holding.take(tmp_path / "state").close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state" / "engine-1-link").symlink_to(tmp_path / "elsewhere")

    assert _host.sweep(tmp_path / "state", shutil.rmtree) == 0
    assert (tmp_path / "elsewhere").is_dir()


def test_a_state_directory_others_can_write_is_refused(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)

    with pytest.raises(UsageError, match="chmod 700"):
        _host.Holding.take(tmp_path / "state")


def test_a_state_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "state").write_text("")

    with pytest.raises(UsageError):
        _host.Holding.take(tmp_path / "state")


def test_a_state_directory_that_cannot_be_made_is_a_backend_error():
    with pytest.raises(BackendError, match="state_dir"):
        _host.ensure_private_dir(_host.Path("/proc/untax-cannot-be"))


def test_an_installation_without_a_cell_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(_host, "_CELL", tmp_path / "cell")

    with pytest.raises(SubstrateUnavailable, match="wheel"):
        _host.cell_path()
    assert "pip install" in (substrates.load("process").unavailable_reason() or "")


def test_the_environment_may_name_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("UNTAX_STATE_DIR", str(tmp_path))
    assert _host.chosen_state_dir(None) == tmp_path
    assert str(_host.chosen_state_dir("/elsewhere")) == "/elsewhere"
