"""A run on fake substrates, as the tests of the meter begin one."""

from untax.engine import Engine
from untax.meter import begun
from untax.meter import run as runs
from untax.meter.plan import Plan
from untax.meter.record import read
from untax.rollout.material import Material
from untax.rollout.workload import parse

TEXT = """
version = 1
name = "W"
reset = true
actions = [{ run = ["true"] }, { shell = "echo hello" }]
[trajectory]
lengths = [4]
blocks = [[{ run = ["true"] }, { sort = "inspect", run = ["echo", "x"] }]]
"""
WORKLOAD = parse(TEXT, origin="W.toml")


def plan(**fields):
    given = {
        "substrates": ("fake",),
        "works": (("W", 0),),
        "warmth": ("cold",),
        "paths": ("channel",),
        "trials": 3,
        "warmup": 1,
        "retries": 0,
    }
    return Plan(**{**given, **fields})


class Bench:
    """`fakes` are the substrates by the names in the plan; `records()` what the file has."""

    def __init__(self, tmp_path, fakes, a_plan, workload=WORKLOAD, **hooks):
        self.out = tmp_path / "out"
        self.said = []
        self._tmp = tmp_path
        self._fakes = fakes
        self._plan = a_plan
        self._workload = workload
        self._hooks = hooks

    def make(self, name, options):
        fake = self._fakes[name]
        fake.name = name
        return Engine(fake, **options)

    async def run(self):
        journal, run = begun.begin(self._plan, self.out, command="untax bench")
        return await self._carry_out(journal, run, None)

    async def resume(self):
        journal, first, done = begun.reopen(self.out / "records.jsonl", command="untax bench --resume")
        return await self._carry_out(journal, first.run, done)

    async def _carry_out(self, journal, run, done):
        tiers = {tier: self._workload for tier, _ in self._plan.works}
        material, scratch = Material(self._tmp / "material"), self._tmp / "scratch"
        bench = runs.Bench(self._plan, tiers, journal, run, material, scratch, self.make, done=done, say=self.said.append, **self._hooks)
        try:
            return await bench.carry_out()
        finally:
            journal.close()

    def records(self, kind=object):
        return [record for record in read(self.out / "records.jsonl") if isinstance(record, kind)]
