"""The profile that engines are given, run as the kernel would: the same verdicts as the cell's own filter."""

import errno

import pytest

from untax.core.spec import Limits
from untax.substrates._container_body import Wanted, docker_body, podman_body
from untax.substrates._seccomp import profile_of

TABLE = [("read", "allow"), ("mount", "eperm"), ("clone", "clone"), ("socket", "socket"), ("socketpair", "socket"), ("ioctl", "ioctl"),
         ("personality", "personality"), ("prlimit64", "prlimit")]  # fmt: skip
PROFILE = profile_of(TABLE)


def verdict(name: str, *arguments: int) -> int:
    """0 for allowed, else the error. A rule holds when all its conditions do; the first that refuses or allows decides."""
    given = [argument & 0xFFFFFFFFFFFFFFFF for argument in (*arguments, 0, 0, 0)]
    for rule in PROFILE["syscalls"]:
        if name in rule["names"] and all(_holds(one, given[one["index"]]) for one in rule["args"]):
            return 0 if rule["action"] == "SCMP_ACT_ALLOW" else rule["errnoRet"]
    return PROFILE["defaultErrnoRet"]


def _holds(condition: dict, argument: int) -> bool:
    if condition["op"] == "SCMP_CMP_MASKED_EQ":
        return argument & condition["value"] == condition["valueTwo"]
    assert condition["op"] == "SCMP_CMP_EQ"
    return argument == condition["value"]


def test_plain_verdicts_are_the_table_s():
    assert verdict("read") == 0
    assert verdict("mount") == errno.EPERM
    assert verdict("clone3") == errno.ENOSYS
    assert verdict("a_call_of_next_year") == errno.ENOSYS


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_no_namespace_can_be_made(flag):
    assert verdict("clone", flag | 17) != 0
    assert verdict("clone", 0x4100 | 17) == 0


@pytest.mark.parametrize("high", [0, 1 << 32, 0xFFFFFFFF << 32])
def test_nothing_can_be_typed_into_a_terminal_whatever_the_upper_half_says(high):
    """The kernel looks at the lower 32 bits of an ioctl's number, a naive profile at all 64."""
    assert verdict("ioctl", 0, high | 0x5412) != 0
    assert verdict("ioctl", 0, high | 0x541C) != 0
    for number in (0, 0x5401, 0x5410, 0x5411, 0x5413, 0x541B, 0x541D, 0x5421, 0x5422, 0x15412, 0x80045430, 0xFFFFFFFF):
        assert verdict("ioctl", 0, high | number) == 0, hex(number)


def test_only_ordinary_sockets():
    for call in ("socket", "socketpair"):
        assert [family for family in range(64) if verdict(call, family, 1, 0) == 0] == [1, 2, 10, 16]
        assert verdict(call, 16, 3, 12) != 0
        assert verdict(call, 1 << 32 | 17, 3, 0) != 0


def test_limits_are_one_s_own():
    assert verdict("prlimit64", 0, 7, 0x7FFF00001000) == 0
    assert verdict("prlimit64", 1, 7, 0) == 0
    assert verdict("prlimit64", 1, 7, 0x7FFF00001000) != 0
    assert verdict("prlimit64", 1, 7, 0x7FFF00000000) != 0
    assert [verdict("personality", value) for value in (0, 8, 0x20000, 0xFFFFFFFF)] == [0, 0, 0, 0]
    assert verdict("personality", 0x40000) != 0


WANTED = Wanted(
    "sbx-1", "sha256:x", "1000", ["/workspace"], {"untax.owner": "me"}, Limits(cpus=0.5, memory_mib=64, disk_mib=10, pids=7), None, True
)


def test_both_engines_are_asked_for_the_same():
    """THREATS 6.2, in two dialects."""
    docker, podman = docker_body(WANTED, PROFILE), podman_body(WANTED, "/profile")
    host = docker["HostConfig"]

    assert docker["Cmd"] == podman["command"] == ["agent", "--stdio", "--contained", "--user", "1000", "--own", "/workspace"]
    assert (host["NetworkMode"], podman["netns"]) == ("none", {"nsmode": "none"})
    assert host["CapDrop"] == podman["cap_drop"] == ["ALL"]
    assert [f"CAP_{name}" for name in host["CapAdd"]] == podman["cap_add"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert podman["no_new_privileges"]
    assert host["Memory"] == host["MemorySwap"] == podman["resource_limits"]["memory"]["swap"] == 64 << 20
    assert (host["NanoCpus"], podman["resource_limits"]["cpu"]["quota"]) == (500_000_000, 50_000)
    assert host["PidsLimit"] == podman["resource_limits"]["pids"]["limit"] == 9
    assert host["StorageOpt"] == podman["storage_opts"] == {"size": "10M"}
    assert not host.get("Privileged")
    assert not host.get("Binds")
    assert host["AutoRemove"]
    assert podman["remove"]
    assert host["MaskedPaths"] == podman["mask"]
    ulimits = {one["Name"]: one["Hard"] for one in host["Ulimits"]}
    assert {**ulimits, "nproc": 16_384} == {one["type"]: one["hard"] for one in podman["r_limits"]}
    assert ulimits["fsize"] == 10 << 20


def test_a_runtime_and_storage_without_quotas_are_said():
    wanted = Wanted("sbx-1", "x", "1000", [], {}, Limits(), "runsc", False)

    assert docker_body(wanted, PROFILE)["HostConfig"]["Runtime"] == podman_body(wanted, "/p")["oci_runtime"] == "runsc"
    assert "StorageOpt" not in docker_body(wanted, PROFILE)["HostConfig"]
    assert "storage_opts" not in podman_body(wanted, "/p")
