"""THREATS 4.5 and 4.6 in gVisor, as in a container."""

from tests.security.container.test_network import *  # noqa: F403
