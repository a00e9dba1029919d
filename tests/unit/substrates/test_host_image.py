"""The image `host`: what its skeleton holds, and that half of one is never kept."""

import errno
import os
import shutil

import pytest

from untax.substrates._host_image import host_image


def test_a_skeleton_can_be_read_whatever_the_umask(tmp_path):
    """The workload is another user than the engine."""
    before = os.umask(0o077)
    try:
        skeleton = host_image(tmp_path).skeleton
    finally:
        os.umask(before)

    closed = [path for path, _, _ in os.walk(skeleton) if os.stat(path).st_mode & 0o555 != 0o555]
    assert closed == []
    assert os.stat(f"{skeleton}/etc/passwd").st_mode & 0o777 == 0o644


def test_a_disk_that_fills_up_leaves_no_half_of_a_skeleton(tmp_path, monkeypatch):
    """It would be taken for a whole one by every later engine."""

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", target)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy2", full)
        with pytest.raises(OSError, match="No space left"):
            host_image(tmp_path)
    assert list(tmp_path.iterdir()) == []

    assert os.path.isfile(f"{host_image(tmp_path).skeleton}/etc/passwd")


def test_nothing_of_the_host_is_in_it_but_what_is_listed(tmp_path):
    image = host_image(tmp_path)

    assert not os.path.exists(f"{image.skeleton}/etc/shadow")
    assert os.listdir(f"{image.skeleton}/home") == os.listdir(f"{image.skeleton}/run") == []
    assert "/" not in dict(image.views)


def test_the_second_to_ask_gets_the_first_ones(tmp_path):
    assert host_image(tmp_path) == host_image(tmp_path)
