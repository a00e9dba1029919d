"""Signed URLs: what opens a file, and what does not."""

import pytest

from untax.service.e2b.signature import refusal, sign


def test_a_signature_holds_for_what_it_was_made_for_only():
    signature = sign("a.txt", "read", "user", "token", 100)
    assert refusal(signature, "a.txt", "read", "user", "token", "100", 99.0) is None
    for path, operation, user, token, expiration in (
        ("b.txt", "read", "user", "token", "100"),
        ("a.txt", "write", "user", "token", "100"),
        ("a.txt", "read", "root", "token", "100"),
        ("a.txt", "read", "user", "other", "100"),
        ("a.txt", "read", "user", "token", "101"),
        ("a.txt", "read", "user", "token", None),
    ):
        assert refusal(signature, path, operation, user, token, expiration, 99.0) == "invalid signature"


def test_an_old_signature_says_so_and_a_wrong_one_does_not():
    signature = sign("a.txt", "read", "", "token", 100)
    assert refusal(signature, "a.txt", "read", "", "token", "100", 101.0) == "signature is already expired"
    assert refusal("v1_x", "a.txt", "read", "", "token", "100", 101.0) == "invalid signature"


@pytest.mark.parametrize("expiration", ["", "x", "1e9", "9" * 40, "--5", "²", "-", "5\n"])
def test_an_expiration_that_is_no_number_is_refused(expiration):
    assert refusal("v1_x", "a", "read", "", "t", expiration, 0.0) == "invalid signature expiration"


def test_signatures_are_those_of_the_sdk():
    e2b = pytest.importorskip("e2b.sandbox.signature")
    assert e2b.get_signature("p/ü", "write", "user", "tok")["signature"] == sign("p/ü", "write", "user", "tok")
