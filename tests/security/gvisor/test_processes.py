"""THREATS 4.3 and 4.4 in gVisor: what depends on who reaps and who carries the bytes, as in a container."""

from tests.security.container.test_processes import *  # noqa: F403
