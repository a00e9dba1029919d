"""A tree entry by entry, as the kernel shows it, to compare two of them: what is exported with what somebody else made of it.

`python tests/treelist.py DIRECTORY` prints it; `of_mount` and `of_chain` do so in a mount namespace of their own, and leave no mount.
"""

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

# What a kernel, an engine or a tool adds by itself.
_OWN_XATTRS = ("trusted.overlay.", "user.overlay.", "security.selinux", "user.containers.override")


def listing(top: str | os.PathLike[str]) -> dict[str, dict[str, object]]:
    """What is there by path; the top is "". Files with several names know the others; only files have a date."""
    rows: dict[str, dict[str, object]] = {}
    names_of: dict[tuple[int, int], list[str]] = {}
    inode_of: dict[str, tuple[int, int]] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        place = os.path.join(os.fsencode(top), os.fsencode(path)) if path else os.fsencode(top)
        st = os.lstat(place)
        rows[path] = _row(place, st)
        if stat.S_ISDIR(st.st_mode):
            pending += [f"{path}/{os.fsdecode(name)}" if path else os.fsdecode(name) for name in os.listdir(place)]
        elif st.st_nlink > 1:
            inode_of[path] = (st.st_dev, st.st_ino)
            names_of.setdefault(inode_of[path], []).append(path)
    for path, inode in inode_of.items():
        if len(names_of[inode]) > 1:
            rows[path]["names"] = sorted(names_of[inode])
    return rows


def _row(place: bytes, st: os.stat_result) -> dict[str, object]:
    row: dict[str, object] = {
        "type": stat.filemode(st.st_mode)[0],
        "mode": f"{stat.S_IMODE(st.st_mode):o}",
        "owner": [st.st_uid, st.st_gid],
    }
    if stat.S_ISREG(st.st_mode):
        digest = hashlib.sha256()
        with open(place, "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
        row |= {"size": st.st_size, "content": digest.hexdigest(), "mtime_ns": st.st_mtime_ns}
    elif stat.S_ISLNK(st.st_mode):
        row["target"] = os.fsdecode(os.readlink(place))
    elif stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
        row["device"] = [os.major(st.st_rdev), os.minor(st.st_rdev)]
    xattrs = {name: os.getxattr(place, name, follow_symlinks=False).hex() for name in os.listxattr(place, follow_symlinks=False)}
    if kept := {name: value for name, value in xattrs.items() if not name.startswith(_OWN_XATTRS)}:
        row["xattrs"] = kept
    return row


def of_mount(*mount: str) -> dict[str, dict[str, object]]:
    """Of what `mount MOUNT… PLACE` shows, as root."""
    return _alone(["unshare", "--mount"], mount)


def of_chain(layers: list[Path], options: str = "") -> dict[str, dict[str, object]]:
    """Of a chain of layers, bottom first, as the kernel's overlay merges it; as an ordinary user with the marks of one."""
    if os.geteuid() == 0:
        how, options = ["unshare", "--mount"], options or "redirect_dir=follow"
    else:
        how, options = ["unshare", "--user", "--map-root-user", "--mount"], options or "userxattr"
    # A single lower directory without an upper one is refused; an empty one below changes nothing.
    return _alone(
        how, ("-t", "overlay", "overlay", "-o", f"ro,{options},lowerdir={':'.join(str(layer) for layer in reversed(layers))}:EMPTY")
    )


def _alone(how: list[str], mount: tuple[str, ...]) -> dict[str, dict[str, object]]:
    script = (
        "set -e; mount -t tmpfs tmpfs /mnt; mkdir /mnt/empty /mnt/at; python=$1; self=$2; shift 2; "
        'for word; do shift; set -- "$@" "$(printf %s "$word" | sed s,EMPTY,/mnt/empty,)"; done; mount "$@" /mnt/at; exec "$python" "$self" /mnt/at'
    )
    done = subprocess.run([*how, "sh", "-c", script, "sh", sys.executable, __file__, *mount], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return json.loads(done.stdout)


if __name__ == "__main__":
    json.dump(listing(sys.argv[1]), sys.stdout)
