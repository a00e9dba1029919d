"""Staged warm pools: which idle sandbox is closest, how many to keep, and the driver that carries both out."""
