"""A tree goes with whatever a workload put into it, and nothing else goes with it."""

import os
from pathlib import Path

import pytest
from tests.unit.layers.odd import dig
from tests.unit.layers.private import in_child

from untax._remove import remove_tree


def test_a_tree_is_removed_whatever_is_in_it(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    dig(top, 2500)
    (top / "d" / "read only").mkdir()
    (top / "d" / "read only" / "file").touch()
    (top / "d" / "read only").chmod(0o555)

    assert remove_tree(top)
    assert not top.exists()
    assert remove_tree(top)


def test_removing_a_link_removes_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to("real")

    assert remove_tree(tmp_path / "link")
    assert (tmp_path / "real" / "file").exists()
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="root: only root makes what another user cannot remove")
def test_what_is_somebody_elses_stays_and_takes_nothing_else_with_it(tmp_path):
    top = tmp_path / "top"
    for name in ("a", "b", "c"):
        (top / name).mkdir(parents=True)
        (top / name / "file").touch()
    (top / "b").chmod(0o700)  # root's, in the directories of a user
    for path in (tmp_path, top, top / "a", top / "c"):
        os.chown(path, 65534, 65534)

    def remove():
        os.chdir(tmp_path)  # on the way here are directories that are root's alone
        os.setresuid(65534, 65534, 65534)
        assert not remove_tree(Path("top"))

    assert in_child(remove) == 0
    assert os.listdir(top) == ["b"]
