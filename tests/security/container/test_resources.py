"""THREATS 4.2 in a container."""

from tests.security.test_resources import *  # noqa: F403

# A reset here is the engine's remove and create, and has no bound of its own.
del test_r7_the_disk_is_full_at_its_quota, test_r17_a_reset_takes_no_longer_for_many_files  # noqa: F821


async def test_r7_a_disk_ends_at_its_quota_or_is_said_to_have_none(box):
    """Few storage drivers have quotas. A limit that does not hold is in the ledger, with what would make it hold."""
    lacking = {one.name: one.remedy for one in box.ledger.unenforced}
    assert lacking.get("disk_mib") or (await box.shell("fallocate -l 100G big", timeout_s=60)).exit_code != 0
