"""What callers may ask for, checked before a byte is sent: each mistake is a `UsageError` that names the remedy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from untax.core.errors import UsageError

ARGUMENT_MAX = 128 << 10  # the kernel's MAX_ARG_STRLEN, its NUL included
COMMAND_MAX = 2 << 20  # arguments and variables together: a quarter of the usual 8 MiB stack limit, as in execve(2)
PATH_MAX = 4096
TIMEOUT_MAX_S = 4_294_967  # what a u32 of milliseconds holds, about 49 days

Name = str | bytes | os.PathLike[str]


def text_bytes(value: object, what: str, most: int = 0, remedy: str = "") -> bytes:
    """`value` as the bytes a program inside sees: UTF-8, with what `os.fsdecode` escaped put back. `most`: as many as the kernel takes."""
    if most and isinstance(value, (str, bytes)) and len(value) > most:  # at once: a gigabyte takes a second to encode
        raise UsageError(f"{what} has {len(value)} bytes or more: the kernel takes {most}{remedy}")
    if isinstance(value, str):
        try:
            raw = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            raise UsageError(f"{what} holds a lone surrogate: pass bytes instead") from exc
    elif isinstance(value, bytes):
        raw = value
    elif isinstance(value, os.PathLike):
        raw = os.fsencode(value)
    else:
        raise UsageError(f"{what} is of type {type(value).__name__}: pass str or bytes")
    if most and len(raw) > most:
        raise UsageError(f"{what} has {len(raw)} bytes: the kernel takes {most}{remedy}")
    if b"\0" in raw:
        raise UsageError(f"{what} holds a NUL byte: the kernel ends names and arguments there, so remove it")
    return raw


def path_bytes(path: Name, what: str = "path") -> bytes:
    raw = text_bytes(path, what, PATH_MAX - 1, ", so use a working directory")
    if not raw:
        raise UsageError(f'{what} is empty: "." is the working directory')
    return raw


def argv_bytes(argv: Sequence[Name]) -> list[bytes]:
    if isinstance(argv, (str, bytes)) or not isinstance(argv, Sequence):
        raise UsageError('the command is not a list: pass ["program", "argument"], or use shell() for a string')
    if not argv:
        raise UsageError("the command is an empty list: its first element is the program")
    remedy = "; write() it to a file, or pass it as stdin"
    raw = [text_bytes(argument, f"argument {n}", ARGUMENT_MAX - 1, remedy) for n, argument in enumerate(argv)]
    if not raw[0]:
        raise UsageError("the program's name is empty")
    return raw


def env_bytes(env: Mapping[str, str | None] | None) -> list[bytes]:
    """`K=V` to set and `K` to unset, as the protocol has it."""
    if not env:
        return []
    if not isinstance(env, Mapping):
        raise UsageError(f"env is of type {type(env).__name__}: pass a mapping of names to values")
    return [_variable(name, value) for name, value in env.items()]


def _variable(name: str, value: str | None) -> bytes:
    raw = text_bytes(name, "the name of a variable", ARGUMENT_MAX - 1)
    if not raw or b"=" in raw:
        raise UsageError(f"{name!r} cannot name a variable: names are not empty and hold no '='")
    if value is None:
        return raw
    variable = raw + b"=" + text_bytes(value, f"the variable {name!r}", ARGUMENT_MAX - 1)
    if len(variable) >= ARGUMENT_MAX:
        raise UsageError(f"the variable {name!r} has {len(variable)} bytes: the kernel takes {ARGUMENT_MAX - 1}")
    return variable


def check_command_size(argv: list[bytes], env: list[bytes]) -> None:
    total = sum(map(len, argv)) + sum(map(len, env)) + 9 * (len(argv) + len(env))  # each with its NUL and pointer
    if total > COMMAND_MAX:
        raise UsageError(f"arguments and variables take {total} bytes: the kernel takes {COMMAND_MAX}; pass the data by file or stdin")


def timeout_ms(timeout_s: float | None) -> int:
    """The deadline on the wire, rounded up; 0 stands for none."""
    if timeout_s is None:
        return 0
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise UsageError(f"timeout_s is of type {type(timeout_s).__name__}: pass seconds, or None for no limit")
    if not 0 < timeout_s <= TIMEOUT_MAX_S:  # false for NaN as well
        raise UsageError(f"timeout_s={timeout_s} is not above 0 and up to {TIMEOUT_MAX_S}: None means no limit")
    return math.ceil(timeout_s * 1000)


def body_bytes(data: object, what: str) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    raise UsageError(f"{what} is of type {type(data).__name__}: pass bytes (text.encode() makes them of a str)")


def whole_number(value: object, what: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{what}={value!r} is not a whole number from {least} to {most}")
    return value
