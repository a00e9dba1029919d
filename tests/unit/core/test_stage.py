"""Keys of stages: the same recipe over the same ground has the same key everywhere, and what binds late is in none."""

import subprocess
import sys
from dataclasses import replace

import pytest

from untax.core.spec import EnvSpec, Limits, Repo
from untax.core.stage import LADDER, Identity, key_of, nearest, stages_of

IMAGE = Identity("sha256:0123")
FULL = EnvSpec(image="registry:example/x:1", repo=Repo("https://example.org/r.git", "c0ffee"), setup=("pip install -e .", "true"))
PINNED = [
    "2796684c48511f636041c6ce84162d7197097f3ebdf482411f1099faa5d7eafc",
    "a82390908c80919b7387953166707dc8ab0138f0cf76705acc3b395b08872d95",
    "b6c48a1b6fbe43945dda05cfa2654d649abc05995542851a837d8d59f2266355",
    "7f502bf0706884b9962caada5dc5263792b1b79f3032566884209ad1d234888e",
]


def keys(spec, image=IMAGE):
    return [stage.key for stage in stages_of(spec, image)]


def test_the_ladder_has_only_the_rungs_that_a_spec_needs():
    assert [stage.name for stage in stages_of(EnvSpec(), IMAGE)] == ["base", "image"]
    assert [stage.name for stage in stages_of(EnvSpec(setup=("true",)), IMAGE)] == ["base", "image", "deps"]
    assert tuple(stage.name for stage in stages_of(FULL, IMAGE)) == LADDER


def test_each_rung_names_the_one_below_it():
    stages = stages_of(FULL, IMAGE)

    assert [stage.parent for stage in stages] == [None, *(stage.key for stage in stages[:-1])]


def test_equal_specs_have_equal_keys():
    again = EnvSpec(image="registry:example/x:1", repo=Repo("https://example.org/r.git", "c0ffee"), setup=["pip install -e .", "true"])

    assert keys(FULL) == keys(again)


def test_keys_are_these_on_every_machine():
    """Literal values: when this fails, a recipe has changed, and every stored stage of every user will be built anew."""
    assert keys(FULL) == PINNED


def test_keys_do_not_depend_on_the_process():
    """Python's own hashes differ between two runs; keys must not."""
    script = (
        "from untax.core.spec import *; from untax.core.stage import *; "
        "print(stages_of(EnvSpec(image='registry:example/x:1', repo=Repo('https://example.org/r.git', 'c0ffee'), "
        "setup=('pip install -e .', 'true')), Identity('sha256:0123'))[-1].key)"
    )
    for seed in ("1", "2"):
        said = subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, capture_output=True
        )
        assert said.stdout.decode().strip() == PINNED[-1]


@pytest.mark.parametrize(
    "late",
    [
        {"env": {"TOKEN": "x"}},
        {"user": "root"},
        {"limits": Limits(cpus=4, memory_mib=64)},
        {"network": "all"},
        {"network": ("example.org:443",)},
        {"isolation": "vm"},
    ],
    ids=lambda late: next(iter(late)),
)
def test_what_binds_late_is_in_no_key(late):
    assert keys(replace(FULL, **late)) == keys(FULL)


def test_the_image_enters_by_what_it_is_and_not_by_its_name():
    assert keys(replace(FULL, image="docker:same")) == keys(FULL)
    assert keys(FULL, Identity("sha256:4567"))[1:] != keys(FULL)[1:]
    assert keys(FULL, Identity("sha256:4567"))[0] == keys(FULL)[0]


@pytest.mark.parametrize(
    ("changed", "first_other"),
    [
        ({"repo": Repo("https://example.org/other.git", "c0ffee")}, 2),
        ({"repo": Repo("https://example.org/r.git", "decaf")}, 2),
        ({"repo": Repo("https://example.org/r.git", "c0ffee", depth=1)}, 2),
        ({"workdir": "/elsewhere"}, 2),
        ({"setup": ("true", "pip install -e .")}, 3),
        ({"setup": ("pip install -e . true",)}, 3),
    ],
)
def test_another_recipe_has_another_key_and_so_has_everything_above_it(changed, first_other):
    ours, theirs = keys(FULL), keys(replace(FULL, **changed))

    assert ours[:first_other] == theirs[:first_other]
    assert not set(ours[first_other:]) & set(theirs[first_other:])


def test_the_default_workdir_said_aloud_is_the_same_stage():
    assert keys(replace(FULL, workdir="/workspace")) == keys(FULL)


def test_what_stands_on_this_machine_alone_is_not_portable():
    """A layer over `host` or a directory is never shipped: its key holds the machine's own mark."""
    host = stages_of(FULL, Identity("host:this-machine", is_portable=False))

    assert [stage.is_portable for stage in host] == [True, False, False, False]
    assert all(stage.is_portable for stage in stages_of(FULL, IMAGE))


def test_nearest_is_the_warmest_that_is_there():
    stages = stages_of(FULL, IMAGE)

    assert nearest(stages, frozenset({stages[0].key, stages[2].key, "other"})) is stages[2]
    assert nearest(stages, frozenset()) is None


def test_a_key_does_not_depend_on_the_order_of_fields_and_tells_types_apart():
    assert key_of({"a": 1, "b": "é"}) == key_of({"b": "é", "a": 1})
    assert key_of({"a": 1}) != key_of({"a": "1"})
    assert key_of(["a", "b"]) != key_of(["ab"])
