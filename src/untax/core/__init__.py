"""The vocabulary every other layer speaks. Standard library only, no I/O."""
