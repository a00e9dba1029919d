"""The error tree: what can be retried, what else an error is, and that it survives a pickle."""

import errno
import pickle

import pytest

from untax.core import errors
from untax.core.result import CommandResult


def all_errors(root=errors.UntaxError):
    for kind in root.__subclasses__():
        yield kind
        yield from all_errors(kind)


def test_only_what_a_fresh_sandbox_may_cure_is_retryable():
    retryable = {kind.__name__ for kind in all_errors() if kind.retryable}

    assert retryable == {
        "CreateError",
        "ReadinessTimeout",
        "SandboxLost",
        "BackendError",
        "PoolTimeout",
        "LeaseRefused",
        "StageUnavailable",
    }


def test_every_error_is_drawn_in_the_tree():
    for kind in all_errors():
        if kind.__module__ != errors.__name__:
            continue  # what one module says to another and nobody else hears
        assert f" {kind.__name__} " in errors.__doc__ or f" {kind.__name__}\n" in errors.__doc__


@pytest.mark.parametrize(
    ("number", "kind", "builtin"),
    [
        (errno.ENOENT, errors.NotFound, FileNotFoundError),
        (errno.EEXIST, errors.Exists, FileExistsError),
        (errno.EACCES, errors.PermissionDenied, PermissionError),
        (errno.EISDIR, errors.IsDirectory, IsADirectoryError),
        (errno.ENOTDIR, errors.NotDirectory, NotADirectoryError),
        (errno.ENOSPC, errors.DiskFull, OSError),
        (errno.EDQUOT, errors.DiskFull, OSError),
        (errno.ELOOP, errors.FileError, OSError),
    ],
)
def test_a_file_error_is_also_the_builtin_one(number, kind, builtin):
    error = errors.file_error(number, "open", "a/b")

    assert type(error) is kind
    assert isinstance(error, builtin)
    assert (error.errno, error.filename) == (number, "a/b")
    assert "open" in str(error)


def test_the_reason_is_said_once():
    error = errors.file_error(errno.ENOENT, "read /x: No such file or directory", "x")

    assert str(error) == "[Errno 2] No such file or directory (read /x): 'x'"


def test_errors_survive_a_pickle():
    for error in (
        errors.SandboxLost("sbx-1", "gone"),
        errors.file_error(2, "open", "x"),
        errors.CommandFailed(CommandResult(3)),
        errors.UsageError("no"),
        errors.StageFailed("deps", "pip failed", b"the log\xff"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


def test_a_substrate_error_names_its_sandbox():
    assert str(errors.SandboxLost("sbx-1", "it died")) == "sbx-1: it died"
    assert str(errors.CreateError("", "no room")) == "no room"


def test_a_stage_error_shows_its_stage_and_the_end_of_its_log():
    error = errors.StageFailed("deps", "the second command failed", b"x" * 9000 + b"\nno such package\xff\n")

    assert str(error).startswith("deps: the second command failed\n")
    assert str(error).endswith("no such package\ufffd")
    assert len(str(error)) < 2100
    assert len(error.log) > 9000
