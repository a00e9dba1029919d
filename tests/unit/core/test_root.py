"""A root is a value: what a sandbox stands on, and the same with more on top."""

import pytest

from untax.core.root import ImageConfig, Root, View
from untax.core.spec import FrozenEnv

BASE = Root(("/l/0", "/l/1"), (View("/usr", "/usr"),), ImageConfig(env=FrozenEnv({"A": "b"}), workdir="/srv"), path="/bin")


def test_further_layers_lie_on_top_and_everything_else_stays():
    more = BASE.with_layers("/l/2", "/l/3")

    assert more.layers == ("/l/0", "/l/1", "/l/2", "/l/3")
    assert (more.views, more.config, more.path) == (BASE.views, BASE.config, BASE.path)
    assert BASE.layers == ("/l/0", "/l/1")


def test_what_stands_on_a_layer_of_a_sandbox_is_furnished():
    """A layer that a sandbox left holds its directories already, with the owners and modes they were given there."""
    assert not BASE.is_furnished
    assert BASE.with_layers("/l/2").is_furnished


def test_roots_are_values():
    assert Root(("/a",)) == Root(("/a",))
    assert len({Root(("/a",)), Root(("/a",)), Root(("/a",), (View("/x", "/y"),))}) == 2
    with pytest.raises(AttributeError):
        BASE.layers = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        BASE.config.workdir = "/"  # type: ignore[misc]
