"""A fleet in simulated time: the placement, sizing and cost code of the real pools, over nodes that are only described.

`read_fleet` reads the description, `drawn` or `recorded` give the rollouts that arrive, `simulate` plays them through one
policy, and `report` puts the outcomes side by side. Everything follows from the description and the seed.
"""

from untax.pool.simulation import report
from untax.pool.simulation.description import Description, read_fleet
from untax.pool.simulation.events import simulate
from untax.pool.simulation.outcome import Outcome
from untax.pool.simulation.policies import POLICIES
from untax.pool.simulation.trace import Trace, drawn, recorded

__all__ = ["POLICIES", "Description", "Outcome", "Trace", "drawn", "read_fleet", "recorded", "report", "simulate"]
