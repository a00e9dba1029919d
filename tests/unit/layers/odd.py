"""Trees as only a workload makes them."""

import os
import socket


def dig(top, depth):
    """Directories in each other, a file at the bottom."""
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    bottom = os.open("end", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd)
    os.write(bottom, b"end")
    os.close(bottom)
    os.close(fd)


def furnish(top, *, outside):
    """One of everything that an ordinary user can make, with links that lead out to `outside`."""
    path = os.fsencode(top)
    for name in (b"plain", b"\xff\xfe not utf-8", b"n" * 255, b" ", b"new\nline", b"-rf", b"*"):
        with open(path + b"/" + name, "wb") as file:
            file.write(name * 3)
    os.chmod(path + b"/plain", 0o4755)
    os.makedirs(path + b"/closed/inner")
    with open(path + b"/closed/inner/file", "w") as file:
        file.write("hidden")
    os.chmod(path + b"/closed/inner/file", 0)
    os.chmod(path + b"/closed/inner", 0o400)
    os.chmod(path + b"/closed", 0)
    os.mkdir(path + b"/read only", 0o555)
    os.symlink(os.fsencode(outside), path + b"/way out")
    os.symlink(b"way out", path + b"/way there")
    os.symlink(b"x" * 4000, path + b"/nowhere")
    os.link(path + b"/plain", path + b"/second name")
    os.mkfifo(path + b"/fifo")
    os.mknod(path + b"/whiteout", 0o020000, 0)
    with socket.socket(socket.AF_UNIX) as end:
        here = os.open(path, os.O_RDONLY)
        end.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    os.mkdir(path + b"/sparse")
    with open(path + b"/sparse/big", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"in the middle")
    os.setxattr(path + b"/plain", "user.note", b"\0\xff")
    os.setxattr(path + b"/sparse", "user.overlay.opaque", b"y")
    dig(top, 1200)
