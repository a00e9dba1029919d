"""What a virtual machine boots: a kernel, and an initramfs with the cell as its first process and the modules that it needs."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from untax.core.errors import SubstrateUnavailable
from untax.substrates._host import cell_path

_BOOT = Path("/boot")
_MODULES = Path("/lib/modules")
# What the cell mounts and speaks over. Those that are part of the kernel, or that it does not have, are left out; which it lacks the cell says.
_NEEDED = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "virtio_rng", "squashfs", "overlay", "crc32c_generic", "ext4")
_BZIMAGE_MAGIC, _MAGIC_AT, _VERSION_AT = b"HdrS", 0x202, 0x20E
_REMEDY = "apt install linux-image-amd64 (and let this user read /boot/vmlinuz-*), or name one with kernel=…"


@dataclass(frozen=True, slots=True)
class Kernel:
    image: Path
    release: str

    @property
    def identity(self) -> str:
        """Changes with the file."""
        found = self.image.stat()
        return f"{self.image} {self.release} {found.st_size} {found.st_mtime_ns}"


def find_kernel(given: str | None) -> Kernel | str:
    """The kernel that was named, or the newest one installed; else why there is none, with what to do."""
    if given is not None:
        return _read(Path(given))
    troubles = []
    for image in sorted(_BOOT.glob("vmlinuz-*"), key=_by_version, reverse=True):
        found = _read(image)
        if isinstance(found, Kernel) and (_MODULES / found.release).is_dir():
            return found
        troubles.append(found if isinstance(found, str) else f"{image}: its modules are not in {_MODULES / found.release}")
    return f"{troubles[0]}; {_REMEDY}" if troubles else f"no kernel for guests in {_BOOT}; {_REMEDY}"


def _by_version(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _read(image: Path) -> Kernel | str:
    try:
        with image.open("rb") as file:
            head = file.read(0x10000)
    except OSError as exc:
        return f"kernel {image}: {exc.strerror}"
    if head[_MAGIC_AT : _MAGIC_AT + 4] != _BZIMAGE_MAGIC:
        return f"kernel {image} is not a bzImage; name one such as /boot/vmlinuz-*"
    at = int.from_bytes(head[_VERSION_AT : _VERSION_AT + 2], "little") + 0x200
    release = head[at : at + 128].split(b"\0")[0].split(b" ")[0].decode(errors="replace")
    return Kernel(image, release)


# ---- modules ----


def _module_files(release: str) -> list[Path]:
    """In the order in which they load, dependencies first."""
    top = _MODULES / release
    depends: dict[str, tuple[str, list[str]]] = {}
    try:
        lines = (top / "modules.dep").read_text().splitlines()
    except OSError:
        return []  # a kernel with everything in it
    for line in lines:
        path, _, needs = line.partition(":")
        depends[_module_name(path)] = (path, needs.split())
    order: dict[str, None] = {}

    def add(name: str) -> None:
        if name in depends:
            path, needs = depends[name]
            for one in reversed(needs):
                order.setdefault(one)
            order.setdefault(path)

    for name in _NEEDED:
        add(name)
    return [top / path for path in order]


def _module_name(path: str) -> str:
    return Path(path).name.split(".")[0].replace("-", "_")


def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        try:
            return subprocess.run(["zstd", "-qdc"], input=data, capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as exc:
            raise SubstrateUnavailable("", f"{path} cannot be unpacked ({exc}); apt install zstd") from exc
    return data


# ---- the initramfs ----


def initramfs(kernel: Kernel) -> bytes:
    """The same bytes for the same kernel and cell."""
    modules = [(_module_name(str(path)) + ".ko", _unpacked(path)) for path in _module_files(kernel.release)]
    entries: list[tuple[str, int, bytes]] = [
        ("dev", 0o040755, b""),
        ("proc", 0o040755, b""),
        ("modules", 0o040755, b""),
        ("cell", 0o100755, Path(cell_path()).read_bytes()),
        ("modules/order", 0o100644, "".join(f"{name}\n" for name, _ in modules).encode()),
        *((f"modules/{name}", 0o100644, data) for name, data in modules),
    ]
    return b"".join(_cpio(entries))


def _cpio(entries: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")]):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + os.fsencode(name) + b"\0"
        yield head + b"\0" * (-len(head) % 4)
        yield data + b"\0" * (-len(data) % 4)
