"""What is left of THREATS 4.3 to 4.5 in gVisor: what is asked of a container, and the clock after a pause."""

from tests.security.container.test_inside import *  # noqa: F403
from tests.security.inside import test_x25_the_clock_is_the_host_s_after_a_pause  # noqa: F401
