"""What an image is built from: flags, files, and refusals that say what to write."""

import argparse

import pytest

from untax import EnvSpec, Limits, Repo, UsageError
from untax.cli._build_spec import add_recipe_arguments, recipe_of

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def recipe(*words, image=None, file=None):
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    return recipe_of(parser.parse_args(words), image=image, file=file)


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "spec.toml").write_text(text)
        return str(tmp_path / "spec.toml")

    return write


def test_flags_make_a_spec():
    made = recipe(
        "--repo",
        f"ssh://git@example.org/x.git@{_COMMIT}",
        "--depth",
        "3",
        "--setup",
        "a",
        "--setup",
        "b",
        "--memory-mib",
        "2048",
        image="debian:x",
    )

    assert made.spec == EnvSpec(
        image="debian:x", repo=Repo("ssh://git@example.org/x.git", _COMMIT, 3), setup=("a", "b"), limits=Limits(memory_mib=2048)
    )
    assert made.network == "none"


def test_a_file_says_the_same_and_flags_win(written):
    file = written(
        f"""
        image = "tar:/x.tar"
        setup = ["a"]
        workdir = "/src"
        network = ["index.example.org:443"]
        repo = {{ url = "/r", commit = "{_COMMIT}" }}
        limits = {{ cpus = 2, pids = 99 }}
        """
    )
    made = recipe("--setup", "b", "--pids", "7", "--depth", "1", file=file)

    assert made.spec == EnvSpec(
        image="tar:/x.tar", repo=Repo("/r", _COMMIT, 1), setup=("b",), workdir="/src", limits=Limits(cpus=2, pids=7)
    )
    assert made.network == ("index.example.org:443",)


@pytest.mark.parametrize("words", [("--network", "all"), ("--network", "none")])
def test_a_policy_in_one_word(words):
    assert recipe(*words).network == words[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image = ", "not TOML"),
        ("imgae = 'x'", "imgae"),
        ("repo = 'url@commit'", "table"),
        ("repo = { url = 'x' }", "commit"),
        ("repo = { url = 'x', commit = 'y', branch = 'z' }", "branch"),
        ("setup = 'one string'", "list"),
        ("setup = [1]", "list"),
        ("limits = { memory = 1 }", "memory_mib"),
        ("limits = { memory_mib = 'much' }", "memory_mib"),
        ("network = 5", "list"),
        ("workdir = 'relative'", "absolute"),
        ("image = 7", "image"),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_what_is_wrong(written, text, said):
    with pytest.raises(UsageError, match=said):
        recipe(file=written(text))


@pytest.mark.parametrize("text", ["no-commit", "@abc", "url@", ""])
def test_a_repository_needs_its_commit(text):
    with pytest.raises(UsageError, match="URL@COMMIT"):
        recipe("--repo", text)
