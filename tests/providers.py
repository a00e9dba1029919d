"""What is asked of every provider's adapter, whoever stands in for the provider."""

import asyncio
import os

import untax


async def check_a_box(substrate: str, options: dict) -> None:
    """Commands, sessions, files byte for byte and processes go over one held stream."""
    data = os.urandom(3 << 20)
    async with untax.Engine(substrate, **options) as engine, engine.lease() as box:
        assert (await box.run(["sh", "-c", "printf '\\377\\0x'; exit 3"])).exit_code == 3
        assert (await box.run(["printf", "\\377\\200"])).stdout == b"\xff\x80"
        await box.write("big", data)
        assert await box.read("big") == data
        async with box.session() as bash:
            await bash.run("cd /tmp && X=1")
            assert (await bash.run("pwd; echo $X")).text == "/tmp\n1\n"
        results = await asyncio.gather(*(box.run(["echo", str(number)]) for number in range(20)))
        assert [one.text for one in results] == [f"{number}\n" for number in range(20)]
    assert box.ledger.verdict == "trusted"
