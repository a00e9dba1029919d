"""Metrics of several nodes in one text."""

from untax.service.exposition import merged

ONE = """# HELP untax_leases leases that are held
# TYPE untax_leases gauge
untax_leases{dialect="channel"} 3
untax_leases{dialect="a \\"}{ b"} 1
# HELP untax_clients clients
# TYPE untax_clients gauge
untax_clients 2
"""


def test_a_family_is_described_once_and_its_samples_stand_together():
    lines = merged([("a", ONE), ("b", ONE)]).splitlines()

    assert [line for line in lines if line.startswith("# TYPE")] == ["# TYPE untax_leases gauge", "# TYPE untax_clients gauge"]
    assert [line.partition("{")[0] for line in lines if not line.startswith("#")] == ["untax_leases"] * 4 + ["untax_clients"] * 2


def test_every_sample_says_whose_it_is():
    lines = merged([("a", ONE), ('b"\n', ONE)]).splitlines()

    assert 'untax_leases{node="a",dialect="channel"} 3' in lines
    assert 'untax_leases{node="a",dialect="a \\"}{ b"} 1' in lines
    assert 'untax_clients{node="b\\"\\n"} 2' in lines


def test_empty_labels_stay_valid():
    assert merged([("a", "x{} 1\n")]) == 'x{node="a"} 1\n'


def test_what_is_no_sample_is_left_out():
    """A node that is broken, or lies, adds no line of a form that would make the others' unreadable."""
    assert merged([("a", "<html>\n\nname_without_value\n 5\n# a remark\nx 1\n"), ("b", "")]) == 'x{node="a"} 1\n'
