"""A spec that exists is well formed: every mistake is refused where it enters."""

import math
import pickle

import pytest

from untax.core.errors import UsageError
from untax.core.spec import EnvSpec, FrozenEnv, Limits, Repo, is_as_strong


def test_equal_specs_are_interchangeable():
    one = EnvSpec(env={"B": "2", "A": "1"}, network=["a.example:443"], setup=["make"])
    other = EnvSpec(env={"A": "1", "B": "2"}, network=("a.example:443",), setup=("make",))

    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one


def test_mappings_are_frozen_on_entry():
    variables = {"A": "1"}
    spec = EnvSpec(env=variables)
    variables["A"] = "2"

    assert spec.env["A"] == "1"
    assert isinstance(spec.env, FrozenEnv)
    with pytest.raises(TypeError):
        spec.env["A"] = "3"


@pytest.mark.parametrize(
    "fields",
    [
        {"image": ""},
        {"image": "a\0b"},
        {"image": 3},
        {"repo": "url"},
        {"setup": "make"},
        {"setup": ("",)},
        {"env": {"A=B": "x"}},
        {"env": {"": "x"}},
        {"env": {"A": "x\0"}},
        {"env": {"A": 1}},
        {"env": [("A", "1")]},
        {"workdir": "relative"},
        {"user": "a:b"},
        {"user": "-x"},
        {"limits": {"cpus": 1}},
        {"network": "some"},
        {"network": ("example.org",)},
        {"network": ("example.org:0",)},
        {"network": ("example.org:70000",)},
        {"network": ("exa*mple.org:443",)},
        {"network": (b"example.org:443",)},
        {"isolation": "strong"},
    ],
)
def test_a_mistake_is_a_usage_error(fields):
    with pytest.raises(UsageError):
        EnvSpec(**fields)


@pytest.mark.parametrize(
    "pattern",
    ["index.example.org:443", "*.example.com:*", "*:443", "10.0.0.1:80", "[::1]:8080", "localhost:*", "10.0.0.0/8:*", "[fd00::/8]:443"],
)
def test_patterns_of_destinations(pattern):
    assert EnvSpec(network=(pattern,)).network == (pattern,)


@pytest.mark.parametrize(
    "fields",
    [
        {"cpus": 0},
        {"cpus": -1.0},
        {"cpus": math.nan},
        {"cpus": math.inf},
        {"cpus": 1e9},
        {"cpus": True},
        {"memory_mib": -1},
        {"memory_mib": 1.5},
        {"disk_mib": 0},
        {"pids": 0},
        {"pids": 10**9},
        {"pids": "512"},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(fields):
    with pytest.raises(UsageError):
        Limits(**fields)


def test_a_repository_cannot_smuggle_an_option():
    with pytest.raises(UsageError):
        Repo("--upload-pack=x", "HEAD")
    with pytest.raises(UsageError):
        Repo("https://example.org/a.git", "-x")


def test_isolation_is_ordered():
    assert is_as_strong("vm", as_required="namespace")
    assert is_as_strong("namespace", as_required="namespace")
    assert not is_as_strong("none", as_required="namespace")
