"""What programs outside call: `__all__` is what there is, and importing it is cheap."""

import subprocess
import sys

import untax
from untax.core import errors


def test_every_public_name_is_there():
    for name in untax.__all__:
        assert getattr(untax, name).__name__ == name


def test_every_error_is_public_under_its_name():
    kinds = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UntaxError)}

    assert kinds - {"NoWorker"} <= set(untax.__all__)


def test_importing_loads_nothing_heavy():
    script = (
        "import sys, untax; print(sorted(m for m in sys.modules if m.startswith('untax.') or m in ('asyncio', 'subprocess', 'socket')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )

    assert loaded.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(untax, "no_such_name")
