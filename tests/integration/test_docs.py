"""The examples in the documentation run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from untax import substrates

_ROOT = Path(__file__).parents[2]


def examples():
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))):
        for n, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            yield pytest.param(block, id=f"{page.relative_to(_ROOT)}-{n}")


@pytest.mark.parametrize("source", list(examples()))
def test_an_example_runs(source, tmp_path):
    if "Engine()" in source and (reason := substrates.load("namespace").unavailable_reason()):
        pytest.skip(f"namespace: {reason}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "UNTAX_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
