"""THREATS 4.1 in a container."""

import json
import os
from pathlib import Path

from tests.security.test_escape import *  # noqa: F403
from tests.security.test_syscalls import _PROBE, _UNFILTERED, _recorded

# Claims of the other level: its name, and ranges of user ids that an engine gives only where it is set up for them.
del test_e30_the_evidence_matches_the_level_s_name, test_what_the_sandbox_s_root_makes_is_not_root_s_on_the_host  # noqa: F821
del test_the_agent_is_small_static_and_not_writable_by_others  # noqa: F821 - of the file, not of a sandbox


async def test_e30_the_evidence_matches_the_level_s_name(box):
    """A container shares the host's kernel, and says so."""
    inside = (await box.shell("cat /proc/sys/kernel/random/boot_id; uname -r")).text.split()

    assert inside == [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.uname().release]
    assert (box.ledger.isolation, box.ledger.substrate) == ("container", "container")


async def test_e17_what_the_table_refuses_is_refused_by_the_engine_s_profile(box):
    """One table for both levels. Engines before Docker 23 answer EPERM where ours says that there is no such call."""
    refused = [number for number, verdict in _recorded().items() if verdict in ("eperm", "enosys") and number not in _UNFILTERED]

    result = await box.run(["python3", "-c", _PROBE, json.dumps([*refused, 600, 1000])])

    assert result.exit_code == 0, result.stderr
    answers = {int(number): error for number, error in json.loads(result.stdout).items()}
    assert not {number: error for number, error in answers.items() if error not in (1, 38)}
    # Of later ones an engine's library may not know the names yet.
    assert {answers[number] for number, verdict in _recorded().items() if verdict == "eperm" and number < 440} == {1}
    assert answers[435] == 38  # clone3 must look absent, or no thread starts
