"""Pictures as PNG, by the library of the extra `untax[png]`."""

from __future__ import annotations

import importlib.util

from untax.core.errors import UsageError
from untax.meter.figures._svg import with_colours

_ZOOM = 2  # for screens and slides


def is_there() -> bool:
    return importlib.util.find_spec("resvg_py") is not None


def demand() -> None:
    if not is_there():
        raise UsageError("PNG pictures need an extra: pip install 'untax[png]'; the SVG files are the same pictures")


def drawn(svg: str) -> bytes:
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=with_colours(svg), zoom=_ZOOM))
