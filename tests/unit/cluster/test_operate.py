"""What an operator is given of a fleet, as far as no cluster is needed for it."""

import pytest

pytest.importorskip("cryptography", reason="ray: the extra is not installed")

from untax.cluster.known import HEAD
from untax.cluster.operate import head_first
from untax.cluster.terms import Member


def _member(node_id, **more):
    return Member(node_id, f"node {node_id}", "10.0.0.1", "https://10.0.0.1:1", "/s", None, "1", "namespace", "strong", "strong", **more)


A, B, C = map(_member, "abc")


def _as_ray_lists(node_id, **resources):
    return {"NodeID": node_id, "Alive": True, "Resources": resources}


def test_the_head_which_never_rests_is_the_one_to_be_scraped():
    nodes = [_as_ray_lists("a", CPU=8.0), _as_ray_lists("b", **{HEAD: 1.0}), {"NodeID": "c", "Alive": True}]

    assert head_first([A, B, C], nodes) == [B, A, C]


def test_a_head_that_is_drained_or_not_in_the_fleet_is_not():
    nodes = [_as_ray_lists("a"), _as_ray_lists("b", **{HEAD: 1.0})]

    assert head_first([A, B.drained(), C], nodes) == [A, C, B.drained()]
    assert head_first([A, C], nodes) == [A, C]
    assert head_first([], nodes) == []
