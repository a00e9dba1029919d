"""A child process with mounts of its own, which go when it ends however it ends: for tests that need a file system to themselves."""

import ctypes
import os
import signal
import traceback

import pytest

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REC_PRIVATE = 0x4000 | 0x40000
MS_RDONLY = 1
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def call(step, result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def mount(kind, target, options="", *, flags=0):
    call(f"mount {kind}", libc.mount(kind.encode(), os.fsencode(target), kind.encode(), flags, options.encode()))


def unmount(target):
    call("umount", libc.umount2(os.fsencode(target), 0))


def die_at(step, calls):
    """In a child: from here on it is killed before the `step`-th of these calls of `os`, counted from 0."""
    left = [step]

    def dying(call):
        def wrapped(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapped

    for name in calls:
        setattr(os, name, dying(getattr(os, name)))


def in_child(function, *args):
    """Run it in a forked child; whatever it raises is told here. Gives the child's status."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # a test that times out leaves nothing
            os.close(reading)
            function(*args)
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        text = said.read().decode()
    _, status = os.waitpid(child, 0)
    if text:
        pytest.fail(f"in the child:\n{text}", pytrace=False)
    return status


def in_private_mounts(function, *args, as_user_namespace=False):
    """The same with a mount namespace of its own; with a user namespace too, where an ordinary user can mount as well."""

    def enter():
        uid, gid = os.geteuid(), os.getegid()
        call("unshare", libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if as_user_namespace else 0)))
        if as_user_namespace:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        call("make private", libc.mount(None, b"/", None, MS_REC_PRIVATE, None))
        function(*args)

    assert in_child(enter) == 0


def on_tmpfs(function, *args):
    """Where a tmpfs can be mounted: for root in a mount namespace, for an ordinary user in a user namespace as well."""
    is_root = os.geteuid() == 0
    if not is_root:
        require_user_namespaces()
    in_private_mounts(function, *args, as_user_namespace=not is_root)


def require_root():
    if os.geteuid() != 0:
        pytest.skip("mounts: an ordinary user cannot mount here; run it as root")


def require_user_namespaces():
    def enter():
        call("unshare", libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))

    child = os.fork()
    if child == 0:
        try:
            enter()
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        pytest.skip("user namespaces: this machine does not let an ordinary user have one")
