"""Reset: a sandbox after `pip install`, 10,000 files written and a server left running, back to what its lease began with.

The span is the call; what the old sandbox held is deleted behind it. Then a thousand resets in a row, each after a file was
written and a process left: the last hundred must be as fast as the first.
"""

import argparse
import io
import time
import zipfile

from benchmarks import _measure
from benchmarks._measure import Row

EACH_MS = 5.0  # DESIGN §8
FILES = 10_000
IN_A_ROW = 1000
SLOWER = 1.2

DIRT = f"""
python3 -m pip install --quiet --no-index --no-deps --disable-pip-version-check --target ./packages ./dirt-1.0-py3-none-any.whl
mkdir -p many && cd many && seq {FILES} | xargs touch
nohup python3 -m http.server --bind 127.0.0.1 8000 >/dev/null 2>&1 &
until : 2>/dev/null >/dev/tcp/127.0.0.1/8000; do sleep 0.01; done
"""


def _wheel() -> bytes:
    """A small package that any pip installs without an index."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        for i in range(50):
            wheel.writestr(f"dirt/module{i}.py", f"x = {i}\n" * 50)
        info = "dirt-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: dirt\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: untax\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return data.getvalue()


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    dirty: list[float] = []
    row_of: list[float] = []
    async with _measure.engine_on(substrate) as engine:
        wheel = {"dirt-1.0-py3-none-any.whl": _wheel()}
        async with engine.lease(_measure.spec_for(substrate), files=wheel) as box:
            for _ in range(arguments.count):
                (await box.shell(DIRT)).check()
                begin = time.perf_counter()
                await box.reset()
                dirty.append(time.perf_counter() - begin)
                left = await box.shell("ls -A; ls /proc | grep -c '^[0-9]'")
                assert left.stdout.split()[:-1] == [b"dirt-1.0-py3-none-any.whl"], left.text
        async with engine.lease(_measure.spec_for(substrate)) as box:
            for _ in range(IN_A_ROW):
                (await box.shell("echo x > file; sleep 600 &")).check()
                begin = time.perf_counter()
                await box.reset()
                row_of.append(time.perf_counter() - begin)
    first, last = (_measure.percentile(part, 0.5) for part in (row_of[:100], row_of[-100:]))
    return [
        _measure.compare(
            "reset of a dirty sandbox", substrate, dirty, budget=f"≤ {EACH_MS:g} ms at p50", holds=lambda row: row.p50 <= EACH_MS
        ),
        _measure.compare("resets in a row", substrate, row_of),
        _measure.number("last hundred ÷ first", substrate, last / first, "×", budget=f"≤ {SLOWER:g} ×", holds=last / first <= SLOWER),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("reset", __doc__, measure, count=200, only=("namespace",)))
