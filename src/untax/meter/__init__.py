"""Measuring: plans of trials, what they cost, and what the machine was like meanwhile."""
