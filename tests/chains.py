"""Chains of layers with everything in them that a file system can say, the upper ones written by the kernel's own overlay."""

import os
import struct
import subprocess
from pathlib import Path

from tests.images import small_directory

_CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service, effective
# For user 1000 to read and write, on top of 0640: version 2, then tag, permissions, id.
_ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry) for entry in ((1, 6, 2**32 - 1), (2, 6, 1000), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1), (32, 0, 2**32 - 1))
)


def rich_chain(home: Path, *, renames: bool = False) -> list[Path]:
    """Layers, bottom first; with `renames` one that says where a renamed directory came from, which needs root."""
    base, upper = home / "base", home / "upper"
    subprocess.run(["cp", "-a", str(small_directory()), str(base)], check=True)
    _fill(base)
    _write_over([base], upper, home, _CHANGES + (_RENAMES if renames else ""))
    top = home / "top"
    _write_over(
        [base, upper],
        top,
        home,
        'echo last > "$1/data/replaced/again"; rm "$1/data/deleted-later"; touch -d @1600000000.5 "$1/data/replaced/again"',
    )
    return [base, upper, top]


_CHANGES = """
cd "$1/data"
rm deleted; rm -r deleted-directory
rm -r replaced; mkdir replaced; echo new > replaced/new; chmod 2750 replaced
rm -r directory-to-file; echo file > directory-to-file
rm file-to-directory; mkdir file-to-directory; echo in > file-to-directory/in
echo more >> appended; chmod 600 mode-changed; ln modes/plain linked-above
rm -r deep/a; mkdir -p deep/a/b/c; echo c > deep/a/b/c/d
mkdir empty-above
"""
_RENAMES = 'cd "$1/data"; mv whole whole-renamed; mkdir whole; echo other > whole/other; mv deep moved-deep; rm moved-deep/kept\n'


def _fill(root: Path) -> None:
    data = root / "data"
    for name in ("modes", "deleted-directory/x", "replaced/old", "directory-to-file/x", "deep/a/b", "whole/part", "empty", "links"):
        (data / name).mkdir(parents=True)
    for name in ("deleted", "deleted-later", "replaced/old/x", "replaced/hidden", "file-to-directory", "appended", "mode-changed", "deep/kept",
                 "deep/a/gone", "whole/file", "whole/part/file", "deleted-directory/x/y"):  # fmt: skip
        (data / name).write_text(name)
    for mode in (0o644, 0o755, 0o600, 0o444, 0o4755, 0o2755, 0o6711):
        (data / f"modes/{mode:o}").write_bytes(b"%o" % mode)
        (data / f"modes/{mode:o}").chmod(mode)
    (data / "modes/plain").write_text("plain")
    (data / "modes/sticky").mkdir()
    (data / "modes/sticky").chmod(0o1777)
    (data / "links/relative").symlink_to("../modes/plain")
    (data / "links/absolute").symlink_to("/data/modes/plain")
    (data / "links/dangling").symlink_to("nowhere/" + "long/" * 40 + "end")
    (data / "hard").write_text("hard")
    os.link(data / "hard", data / "zz-hard")
    os.link(data / "hard", data / "links/hard")
    os.mkfifo(data / "fifo", 0o640)
    long = data / ("n" * 120) / ("m" * 200)
    long.mkdir(parents=True)
    (long / "file in a long path").write_text("long")
    for name in (b"name with space", b"new\nline", b"\xff\xfe not utf-8", "übung".encode(), b"-dash", b"back\\slash", b"quo'te\""):
        Path(os.fsdecode(os.fsencode(data) + b"/" + name)).write_bytes(name)
    (data / "dated").write_text("dated")
    os.utime(data / "dated", ns=(1, 1_234_567_890_123_456_789))
    os.utime(data / "modes/plain", ns=(1, 1_000_000_000 * 10**9))
    (data / "large").write_bytes(bytes(range(256)) * 12_345)
    with open(data / "sparse", "wb") as sparse:
        sparse.seek(3 << 20)
        sparse.write(b"end")
    os.setxattr(data / "modes/plain", "user.note", b"\x00binary\xff")
    os.setxattr(data / "empty", "user.on-a-directory", b"1")
    os.setxattr(data / "modes/600", "user.valueless", b"")
    if os.geteuid() == 0:
        for name, owner in (("owned", (1000, 1001)), ("owned-by-the-last", (65535, 65534))):
            (data / name).write_text(name)
            os.chown(data / name, *owner)
        os.chown(data / "links/relative", 1000, 1000, follow_symlinks=False)
        os.chown(data / "empty", 33, 33)
        os.setxattr(data / "hard", "security.capability", _CAPABILITY)
        (data / "listed").write_text("listed")
        (data / "listed").chmod(0o640)
        os.setxattr(data / "listed", "system.posix_acl_access", _ACL)


def _write_over(layers: list[Path], upper: Path, home: Path, script: str) -> None:
    """Run a shell script over the chain mounted at its $1, and keep what it wrote as a layer."""
    upper.mkdir()
    (home / "work").mkdir(exist_ok=True)
    lower = ":".join(str(layer) for layer in reversed(layers))
    is_root = os.geteuid() == 0
    how = ["unshare", "--mount"] if is_root else ["unshare", "--user", "--map-root-user", "--mount"]
    options = (
        f"{'redirect_dir=on' if is_root else 'userxattr'},index=off,metacopy=off,lowerdir={lower},upperdir={upper},workdir={home / 'work'}"
    )
    mounting = 'set -e; mount -t tmpfs tmpfs /mnt; mkdir /mnt/at; mount -t overlay overlay -o "$0" /mnt/at; set -- /mnt/at\n'
    subprocess.run([*how, "sh", "-c", mounting + script, options], check=True, timeout=60)
    subprocess.run(["chmod", "-R", "u+rwx", str(home / "work")], check=True)
