"""Examples of hypothesis have no deadline: on a full machine the first of a test may take longer than the 200 ms that it gives them."""

from hypothesis import HealthCheck, settings

settings.register_profile("full machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("full machine")
