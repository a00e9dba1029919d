"""How a workload's software gets to a substrate: by what the substrate can do, and never by what its isolation is called."""

import pytest

from untax.engine import Engine
from untax.rollout.footing import UPLOADED, footing
from untax.rollout.material import Material
from untax.rollout.workload import parse
from untax.substrates.process import ProcessSubstrate
from untax.testing import FakeSubstrate

WORKLOAD = parse('version = 1\nname = "W"\npackages = ["pytest==8.4.2"]\nactions = [{ run = ["true"] }]\n', origin="x")


class Unpacked(Material):
    """Its packages are here already."""

    def packages(self, packages):
        return self.directory / "packages"


@pytest.mark.parametrize("sees", [True, False])
def test_packages_are_a_directory_here_only_where_commands_see_it(tmp_path, sees):
    """A machine at the end of an SSH connection has no isolation either, and other files."""
    fake = FakeSubstrate(isolation="none")
    if sees:
        fake.sees_host_files = True
    found = footing(Engine(fake), WORKLOAD, Unpacked(tmp_path))

    here = tmp_path / "packages"
    assert found.software["packages"] == ("host" if sees else "uploaded")
    assert found.upload == (None if sees else here)
    assert found.spec.env["PYTHONPATH"] == (str(here) if sees else UPLOADED)


def test_the_floor_sees_this_machine_s_files(tmp_path):
    assert footing(Engine(ProcessSubstrate(tmp_path)), WORKLOAD, Unpacked(tmp_path)).software["packages"] == "host"
