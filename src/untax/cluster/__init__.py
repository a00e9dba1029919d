"""One engine on each node of a Ray cluster, used as one: who is in the fleet, how its nodes trust each other, and where leases go.

Ray starts things, finds things and notices deaths. Leases and actions never go through it.
"""
