"""THREATS on pods: what the workload of one can see, reach, use up and break. Named by the ids of the threat list.

The boundary is the node's container runtime; what is checked is that our pods ask for all of it, and that the network is gone.
"""

import asyncio
import dataclasses
import errno
import os
import platform
import time
from pathlib import Path

import pytest
from tests import kubehost, servers
from tests.security.inside import (  # noqa: F401
    test_e8_e15_e19_no_root_to_change_and_nobody_else_to_become,
    test_e23_e25_neighbours_share_nothing,
    test_f1_f2_f4_f6_files_that_are_none_of_its_own,
    test_f5_odd_names_are_names,
    test_f7_f9_f10_f18_f19_a_reset_undoes_everything,
    test_f8_no_file_can_be_made_to_stay,
    test_n4_n5_n10_n11_no_names_no_way_out_no_proxy_and_a_loopback,
    test_n8_n9_n12_with_a_list_the_rest_is_refused_and_on_record,
    test_o1_o7_o11_o12_bytes_are_what_was_written,
    test_o2_o3_o4_o5_o8_much_of_it_late_of_it_and_none,
    test_o6_o9_odd_text_is_one_line_of_a_summary_and_a_command_like_any,
    test_p1_p3_p10_p11_an_answer_comes_when_the_command_ends,
    test_p2_p5_p7_p8_p9_p22_p23_nothing_outlives_a_reset,
    test_p4_p6_p18_a_deadline_takes_all_of_it,
    test_p12_p13_who_asks_is_answered_by_nobody_and_no_pager_waits,
    test_p14_p16_p17_p20_what_cannot_run_and_how_things_end,
    test_p15_arguments_that_no_kernel_takes_are_refused,
    test_p21_a_session_keeps_its_rules,
    test_r5_r11_r12_r16_signals_and_deadlines_are_told_apart,
    test_r9_r10_r18_r19_descriptors_floods_and_priorities,
    test_r13_entries_without_an_end_are_refused,
)

import untax

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
SPEC = untax.EnvSpec(image=kubehost.SMALL, isolation="container")
CANARY = f"untax-canary-{os.getpid()}-{os.urandom(8).hex()}"


@pytest.fixture(scope="module")
def cluster():
    with kubehost.cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pods(cluster, _runner, tmp_path_factory):
    os.environ["UNTAX_CANARY"] = CANARY
    (tmp_path_factory.mktemp("canary") / "file").write_text(CANARY)
    engine = untax.Engine("kubernetes", kubeconfig=cluster.kubeconfig, state_dir=tmp_path_factory.mktemp("state") / "k")
    _runner.run(engine.start())
    yield engine
    _runner.run(engine.aclose())
    del os.environ["UNTAX_CANARY"]


@pytest.fixture(scope="module")
def box(pods, _runner):
    """One pod for the cases that leave nothing in it."""
    box = _runner.run(pods.acquire(SPEC))
    yield box
    _runner.run(box.release())


@pytest.fixture(scope="module", params=[None, "root"], ids=["user", "root"])
def anyone(pods, _runner, request):
    """A pod of the usual user's, and one of root's with the few capabilities that an install needs."""
    box = _runner.run(pods.acquire(dataclasses.replace(SPEC, user=request.param)))
    yield box
    _runner.run(box.release())


@pytest.fixture(scope="module")
def neighbour(pods, _runner):
    box = _runner.run(pods.acquire(SPEC))
    yield box
    _runner.run(box.release())


@pytest.fixture(scope="module", name="fresh")
def _fresh(pods, _runner):
    box = _runner.run(pods.acquire(SPEC))
    yield box
    _runner.run(box.release())


@pytest.fixture(scope="module")
def fresh_with_network(pods, _runner):
    box = _runner.run(pods.acquire(SPEC, network=("example.invalid:443",)))
    yield box
    _runner.run(box.release())


async def out(box, text: str, **more) -> str:
    return (await box.shell(text, timeout_s=20, **more)).text


# A call that the kernel did not do for want of a right, or does not know: nothing else proves a boundary. With arguments that
# make no sense, unconfined root gets an error too (EFAULT, EBADF, EINVAL).
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_TRIED = """
    $| = 1;
    sub tried {
        my ($name, @call) = @_;
        my $got = syscall(shift(@call), @call);
        exit 0 if $got == 0 and $name =~ /^clone/;  # the child, if there is one
        print "$name ", ($got < 0 ? $! + 0 : 0), "\\n";
        return $got;
    }
"""


async def answers_to(box, calls: str) -> dict[str, int]:
    """What the kernel answered to each call of a Perl program: an error, or 0 when it was done."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    done = await box.run(["perl", "-e", _TRIED + calls], timeout_s=20)
    assert done.exit_code == 0, done.stderr
    return {name: int(error) for name, error in map(str.split, done.text.splitlines())}


# ---- 4.1 escape and isolation ----


async def test_e1_e22_nothing_of_the_engine_is_inside(box):
    assert await out(box, f"grep -rIls '{CANARY[:-4]}[{CANARY[-4]}]{CANARY[-3:]}' / --exclude-dir=proc --exclude-dir=sys 2>/dev/null") == ""
    env = await out(box, "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert CANARY not in env
    assert "KUBERNETES" not in await out(box, "env")


async def test_e2_only_this_pod_s_processes_and_the_agent_first(box):
    assert await out(box, "cat /proc/1/comm") == "cell-agent\n"
    assert int(await out(box, "ls /proc | grep -c '^[0-9]'")) < 12


async def test_e3_no_descriptor_but_its_own(box):
    assert (await out(box, "ls /proc/self/fd")).split() == ["0", "1", "2", "3"]


async def test_e4_nothing_can_be_mounted_or_unmounted(anyone):
    """With arguments that root on the node would get through with: what is refused is the call, not how it was made."""
    answers = await answers_to(
        anyone,
        """
        mkdir "/tmp/m"; mkdir "/tmp/n";
        tried("mount", 165, "t", "/tmp/m", "tmpfs", 0, 0);
        tried("remount", 165, "", "/", "", 32, 0);
        tried("bind", 165, "/proc", "/tmp/n", "", 4096, 0);
        my $fs = tried("fsopen", 430, "tmpfs", 0);
        syscall(431, $fs, 6, 0, 0, 0);  # fsconfig: create it
        tried("fsmount", 432, $fs, 0, 0);
        tried("fspick", 433, -100, "/", 0);
        tried("open_tree", 428, -100, "/proc", 1);  # a copy
        tried("move_mount", 429, -100, "/tmp/m", -100, "/tmp/n", 0);
        tried("mount_setattr", 442, -100, "/", 0, pack("Q4", 0, 1, 0, 0), 32);  # no longer read-only
        tried("umount2", 166, "/proc", 2);
        tried("pivot_root", 155, "/tmp/n", "/tmp/n");
        """,
    )

    assert len(answers) == 11
    assert {name: error for name, error in answers.items() if error not in REFUSED} == {}
    assert await out(anyone, "cat /proc/1/comm") == "cell-agent\n"


async def test_e5_no_namespace_can_be_made(anyone):
    """The capabilities that are gone do not answer for a user namespace: anybody may make one where no filter is."""
    answers = await answers_to(
        anyone,
        """
        tried("clone", 56, 0x10000011, 0, 0, 0, 0);
        tried("clone3", 435, pack("Q8", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64);
        my %kinds = (mount => 0x20000, network => 0x40000000, pid => 0x20000000, ipc => 0x8000000, uts => 0x4000000, cgroup => 0x2000000,
                     user => 0x10000000);
        tried("unshare-$_", 272, $kinds{$_}) foreach sort keys %kinds;
        """,
    )

    assert len(answers) == 9
    assert {name: error for name, error in answers.items() if error not in REFUSED} == {}


async def test_e6_no_namespace_can_be_entered(anyone):
    """Neither the agent's, where it can be opened, nor the very one that the caller is in."""
    answers = await answers_to(
        anyone,
        """
        foreach my $who ("1", "self") {
            foreach my $kind ("mnt", "net", "pid", "uts", "ipc", "user", "cgroup") {
                if (open(my $ns, "<", "/proc/$who/ns/$kind")) { tried("$who-$kind", 308, fileno($ns), 0) } else { print "$who-$kind ", $! + 0, "\\n" }
            }
        }
        tried("by-pidfd-$_", 308, syscall(434, $_, 0), 0x40020000) foreach (1, $$);
        """,
    )

    assert len(answers) == 16
    assert {name: error for name, error in answers.items() if error not in REFUSED} == {}


async def test_e7_no_device_can_be_made_and_none_is_there_but_the_usual(anyone):
    """Numbers of a disk and of the kernel's log, in memory and on the node's disk."""
    answers = await answers_to(
        anyone,
        """
        foreach my $where ("/tmp", "/workspace") {
            tried("$where-block", 259, -100, "$where/b", 0060600, 0x800);
            tried("$where-character", 259, -100, "$where/c", 0020600, 0x10b);
        }
        """,
    )
    found = await out(anyone, "find /dev -type b; find /dev -type c | grep -v -E '^/dev/(null|zero|full|random|urandom|tty|ptmx|pts/.*)$'")

    assert len(answers) == 4
    assert {name: error for name, error in answers.items() if error not in REFUSED} == {}
    assert found == ""


@pytest.mark.parametrize("cwd", ["/proc/self/fd/7", "/proc/1/root", "../../../..", "/missing"])
async def test_e13_a_working_directory_lies_inside_or_is_refused(box, cwd):
    try:
        result = await box.run(["ls", "-a"], cwd=cwd)
    except (untax.UntaxError, OSError) as exc:
        assert not isinstance(exc, untax.SubstrateError)
    else:
        assert "untax" in result.text.split() or result.exit_code != 0  # the pod's own root


async def test_e24_processes_of_the_node_do_not_exist_here(box):
    assert (await box.shell(f"kill -0 {os.getpid()} || test ! -e /proc/{os.getpid()}/exe")).exit_code == 0
    assert (await box.shell(f"test -e /proc/{os.getpid()} && grep -q pytest /proc/{os.getpid()}/cmdline")).exit_code != 0


async def test_e9_e11_e12_the_kernel_s_files_are_not_to_be_written(box):
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
        assert (await box.shell(f"echo 1 >{path}")).exit_code != 0
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert (
        await out(box, "find / -name release_agent -writable 2>/dev/null; find /sys/fs/cgroup -type f -writable 2>/dev/null | head -1")
        == ""
    )


async def test_e10_what_tells_of_the_host_is_covered(box):
    """Files are empty or refused, directories have nothing in them or are not there; the host's own are not so."""
    files = await out(
        box, "cd /proc; for f in kcore keys timer_list sched_debug latency_stats interrupts; do head -c 64 $f 2>/dev/null; done"
    )
    inside = await out(
        box, "find /proc/acpi /proc/scsi /proc/asound /sys/firmware /sys/devices/virtual/powercap -mindepth 1 2>/dev/null | head -5"
    )

    assert (files, inside) == ("", "")
    assert Path("/proc/interrupts").read_bytes()


async def test_e14_the_agent_s_program_is_not_to_be_rewritten(box):
    assert (await box.shell("cp /bin/sh /proc/1/exe")).exit_code != 0
    assert (
        await box.shell("echo x >/untax/bin/cell; echo x >/untax/bin/..data/cell; rm -f /untax/bin/cell; test -x /untax/bin/cell")
    ).exit_code == 0


async def test_e15_e16_no_capability_no_new_privileges_a_filter(box):
    status = dict(line.split(":\t") for line in (await out(box, "grep -E 'Cap|Seccomp:|NoNewPrivs' /proc/self/status")).splitlines())
    assert {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {
        "CapInh": 0,
        "CapPrm": 0,
        "CapEff": 0,
        "CapAmb": 0,
    }
    assert (int(status["CapBnd"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")


async def test_e21_no_socket_of_the_host(box):
    assert (
        await out(
            box,
            "find / -type s 2>/dev/null; ls /var/run/docker.sock /run/containerd /run/podman /run/dbus 2>/dev/null; ls /var/run/secrets 2>/dev/null",
        )
        == ""
    )


async def test_e26_e30_no_kernel_log_and_the_level_s_name_is_true(box):
    assert (await box.shell("head -c 64 /dev/kmsg")).exit_code != 0
    assert (await out(box, "cat /proc/sys/kernel/random/boot_id")).strip() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert box.ledger.isolation == "container"


async def test_t12_the_agent_s_socket_gives_the_channel_to_nobody(box):
    """The workload may find the abstract name; without the host's token it gets a closed connection."""
    tried = await out(box, "for i in 1 2 3 4 5 6; do head -c 4000 /dev/zero | /untax/bin/cell join untax | wc -c; done")
    assert tried.split() == ["0"] * 6
    assert (await box.run(["true"])).exit_code == 0


# ---- 4.2 resource exhaustion ----


async def test_r3_r4_memory_ends_the_command_and_not_the_pod(pods):
    async with pods.lease(SPEC, limits=untax.Limits(memory_mib=128)) as small:
        eat = "my @a; for (1..4000) { push @a, 'x' x (1<<20) }"
        whole = await small.run(["perl", "-e", eat], timeout_s=60)
        part = await small.shell(f'perl -e "{eat.replace("$", chr(92) + "$").replace("@", chr(92) + "@")}" ; echo after', timeout_s=60)
        assert whole.outcome == "oom"
        assert (part.text, part.exit_code) == ("after\n", 0)
        assert (await small.run(["true"])).exit_code == 0


async def test_r6_processor_time_is_held_to_the_limit(pods):
    """Four busy loops on half a processor get half a processor."""
    async with pods.lease(SPEC, limits=untax.Limits(cpus=0.5)) as box:
        burnt = await box.shell("for i in 1 2 3 4; do (timeout 2 sh -c 'while :; do :; done') & done; wait; times | tail -1", timeout_s=30)
        minutes = [part.rstrip("s").split("m") for part in burnt.text.split()]
        assert (
            sum(60 * float(m) + float(seconds) for m, seconds in minutes) < 1.8
        )  # of two seconds: 1.0, and what a period gives in advance


async def test_r8_tmp_has_a_cap_that_is_charged_to_the_pod(pods):
    async with pods.lease(SPEC, limits=untax.Limits(memory_mib=128)) as small:
        filled = await small.shell("dd if=/dev/zero of=/tmp/x bs=1M count=100", timeout_s=60)
        assert filled.exit_code != 0
        assert (await small.run(["true"])).exit_code == 0


async def test_what_a_node_does_not_enforce_is_said(box):
    """Processes (R1, R2) and disk (R7) have no limit here; a lease says so instead of promising one, and what to do about it."""
    assert {"pids", "disk_mib"} == {one.name for one in box.ledger.unenforced}
    assert all(one.remedy for one in box.ledger.unenforced)


# ---- 4.5 files ----


async def test_f9_f10_a_reset_restores_what_was_ruined(pods):
    async with pods.lease(spec_root := untax.EnvSpec(image=kubehost.SMALL, isolation="container", user="root")) as box:
        assert spec_root.user == "root"
        await box.shell("rm -rf /usr/bin/git /usr/bin/wc /etc/passwd; cp /bin/false /bin/true")
        await box.reset()
        assert (await box.run(["true"])).exit_code == 0
        assert await out(box, "test -e /etc/passwd && echo there") == "there\n"


# ---- 4.6 network ----


async def test_n1_n2_n3_nothing_is_reachable_and_that_is_known_at_once(box, cluster):
    """Not the API server, not the node, not the host."""
    with servers.listener("0.0.0.0") as peer:
        assert servers.Listener("127.0.0.1", peer.port).is_reachable_from_host
        began = time.monotonic()
        for target in (f"10.201.0.1/{peer.port}", "10.201.0.2/6443", "10.202.1.1/10250", f"127.0.0.1/{peer.port}"):
            assert (await box.shell(f"timeout 3 bash -c 'echo >/dev/tcp/{target}'")).exit_code not in (0, 124)
        assert time.monotonic() - began < 3
        assert peer.peers == []


async def test_n6_no_raw_sockets_and_no_way_to_bring_the_network_up(box):
    raw = "socket(S, {f}, 3, {p}) and exit 1; exit 0"
    assert (await box.run(["perl", "-e", raw.format(f=2, p=1)])).exit_code == 0
    assert (await box.run(["perl", "-e", raw.format(f=17, p=768)])).exit_code == 0
    up = 'socket(S, 2, 2, 0) or exit 2; $r = pack("a16 s x14", "eth0", 0x1043); exit(ioctl(S, 0x8914, $r) ? 1 : 0)'
    assert (await box.run(["perl", "-e", up])).exit_code == 0


async def test_n7_neighbours_cannot_be_reached_even_with_a_network(pods, neighbour, cluster):
    address = cluster.kubectl("get", "pod", neighbour.id, "-o", "jsonpath={.status.podIP}")
    await neighbour.shell(
        "perl -MIO::Socket -e 1; (perl -e 'socket(S,2,1,6); bind(S, pack(\"S n N x8\", 2, 9999, 0)); listen(S, 5); sleep 60' >/dev/null 2>&1 &)"
    )
    async with pods.lease(SPEC, network="all") as box:
        assert (await box.shell(f"timeout 3 bash -c 'echo >/dev/tcp/{address}/9999'")).exit_code not in (0, 124)


# ---- 6.5 and the clock ----


async def test_6_5_the_pod_asks_for_everything_that_holds_it_in(box, cluster):
    import json

    pod = json.loads(cluster.kubectl("get", "pod", box.id, "-o", "json"))
    inside = pod["spec"]
    cell = next(one for one in inside["containers"] if one["name"] == "cell")
    assert inside["automountServiceAccountToken"] is False
    assert inside["enableServiceLinks"] is False
    assert not any(inside.get(key) for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"))
    assert inside["activeDeadlineSeconds"] > 0
    assert inside["securityContext"]["runAsNonRoot"] is True
    assert inside["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert cell["securityContext"]["allowPrivilegeEscalation"] is False
    assert cell["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert set(cell["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
    assert all(set(volume) & {"configMap", "emptyDir"} for volume in inside["volumes"])
    assert cluster.kubectl("get", "networkpolicy", "-o", "jsonpath={.items[*].spec.policyTypes}")


async def test_x25_the_clock_inside_is_the_host_s(box):
    assert abs(float(await out(box, "date +%s.%N")) - time.time()) < 1


async def test_q2_two_ends_at_once_are_one(pods):
    box = await pods.acquire(SPEC)
    sandbox = box._sandbox
    await asyncio.gather(box.release(), box.release(), sandbox.destroy())
    with pytest.raises(untax.SandboxLost):
        await box.run(["true"])
