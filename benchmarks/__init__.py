"""The performance budgets, each a program that prints its ratio: `python -m benchmarks.action`, or all: `python -m benchmarks`."""
