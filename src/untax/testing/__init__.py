"""Substrates without a machine and a clock without time, for our tests and for authors of adapters."""

from untax.testing.fake import HANGS, PROGRAMS, FakeCell, FakeClock, FakeExit, FakeSandbox, FakeSubstrate, Program
from untax.testing.layered import LayeredFake, LayeredFakeSandbox

__all__ = [
    "HANGS",
    "PROGRAMS",
    "FakeCell",
    "FakeClock",
    "FakeExit",
    "FakeSandbox",
    "FakeSubstrate",
    "LayeredFake",
    "LayeredFakeSandbox",
    "Program",
]
