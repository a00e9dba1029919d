"""What a pod is asked to be, what its status means, and how a kubeconfig is read: pure, with literal data."""

import base64
import json
from dataclasses import replace

import pytest

import untax
from untax.core.substrate import Detailing
from untax.substrates import kubernetes
from untax.substrates._kubernetes_access import find_access
from untax.substrates._kubernetes_exec import exit_code_of
from untax.substrates._kubernetes_pod import Wishes, checked_template, image_of, manifest, merged, uid_of
from untax.substrates._kubernetes_sandbox import Patience, PodSandbox
from untax.substrates._kubernetes_status import Timeline, condition

SPEC = untax.EnvSpec(image="registry:r.example.org/a:1", isolation="container")


def pod(spec=SPEC, **wishes):
    return manifest(spec, Wishes(namespace="n", **wishes), name="untax-1", owner="me", config_map="untax-me", owner_reference=None)


# ---- the pod ----


def test_limits_are_limits_and_requests_are_small():
    cell = pod()["spec"]["containers"][-1]

    assert cell["resources"]["limits"] == {"cpu": "1000m", "memory": str(1 << 30), "ephemeral-storage": "4096Mi"}
    assert cell["resources"]["requests"]["cpu"] == "50m"


def test_a_request_never_exceeds_its_limit():
    small = replace(SPEC, limits=untax.Limits(cpus=0.01, memory_mib=16))
    cell = pod(small, request_cpus=1.0, request_memory_mib=512)["spec"]["containers"][-1]

    assert cell["resources"]["requests"] == {"cpu": "10m", "memory": str(16 << 20), "ephemeral-storage": "0"}


def test_without_the_cut_there_is_one_container_and_the_cell_does_not_wait_for_it():
    containers = pod(cut=False)["spec"]["containers"]

    assert [one["name"] for one in containers] == ["cell"]
    assert "--cut" not in containers[0]["command"]
    assert "--cut" in pod()["spec"]["containers"][-1]["command"]


def test_only_the_container_that_cuts_the_network_has_a_capability():
    cut, cell = pod()["spec"]["containers"]

    assert cut["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert cell["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_template_is_merged_by_name_and_none_takes_a_key_out():
    out = merged(
        {"spec": {"a": 1, "b": 2, "containers": [{"name": "cell", "image": "x", "env": [1]}]}},
        {"spec": {"b": None, "containers": [{"name": "cell", "env": [2]}, {"name": "side", "image": "y"}]}},
    )

    assert out == {"spec": {"a": 1, "containers": [{"name": "cell", "image": "x", "env": [2]}, {"name": "side", "image": "y"}]}}


def test_a_template_cannot_make_the_pod_another_s():
    template = {
        "metadata": {"name": "x", "labels": {"untax/owner": "x", "team": "t"}},
        "spec": {"restartPolicy": "Always", "containers": [{"name": "cell", "command": ["x"]}]},
    }
    out = pod(template=template)

    assert out["metadata"]["name"] == "untax-1"
    assert out["metadata"]["labels"]["untax/owner"] == "me"
    assert out["metadata"]["labels"]["team"] == "t"
    assert out["spec"]["restartPolicy"] == "Never"
    assert out["spec"]["containers"][-1]["command"][1] == "agent"


@pytest.mark.parametrize(
    "template",
    [
        [],
        {"spec": []},
        {"other": 1},
        {"spec": {"hostNetwork": True}},
        {"spec": {"hostPID": True}},
        {"spec": {"shareProcessNamespace": True}},
        {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}},
        {"spec": {"containers": [{"image": "x"}]}},
        {"spec": {"containers": [{"name": "c", "securityContext": {"privileged": True}}]}},
    ],
    ids=repr,
)
def test_a11_a_template_that_would_take_the_boundary_away_is_refused(template):
    with pytest.raises(untax.UsageError, match="template"):
        checked_template(template)


@pytest.mark.parametrize(
    "image", ["host", "dir:/x", "debian:bookworm", "--privileged", ";reboot", "$(id)", "a\nb", "https://x/y", "docker:x"]
)
def test_a9_an_image_that_no_node_could_pull_is_refused(image):
    with pytest.raises(untax.UsageError, match="image"):
        image_of(image)


def test_users_are_numbers_and_two_names():
    assert [uid_of(replace(SPEC, user=user)) for user in (None, "user", "root", "1234")] == [1000, 1000, 0, 1234]
    with pytest.raises(untax.UsageError, match="number"):
        uid_of(replace(SPEC, user="postgres"))


@pytest.mark.parametrize(
    "options",
    [
        {"isolation": "namespace"},
        {"isolation": "gvisor"},
        {"pull_policy": "x"},
        {"ready_timeout_s": 0},
        {"request_cpus": -1},
        {"template": 5},
        {"namespace": ""},
    ],
    ids=repr,
)
def test_an_option_that_is_none_is_refused(options):
    with pytest.raises(untax.UsageError):
        kubernetes.make(**options)


# ---- its status ----


def status(**fields):
    return {"metadata": {}, "status": {"phase": "Pending", **fields}}


def cell(**state):
    return [{"name": "cell", "image": "i", "state": state}]


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (status(), "waiting", ""),
        (
            status(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]),
            "waiting",
            "Unschedulable: 0/3 nodes",
        ),
        (status(phase="Running", containerStatuses=cell(running={})), "ready", ""),
        (status(containerStatuses=cell(waiting={"reason": "ContainerCreating"})), "waiting", ""),
        (
            status(containerStatuses=cell(waiting={"reason": "ErrImageNeverPull", "message": "m"})),
            "failed",
            "image 'i': ErrImageNeverPull: m",
        ),
        (status(containerStatuses=cell(waiting={"reason": "ErrImagePull", "message": "timeout"})), "waiting", ""),
        (status(containerStatuses=cell(waiting={"reason": "ErrImagePull", "message": "x: not found"})), "failed", "not found"),
        (status(containerStatuses=cell(waiting={"reason": "CreateContainerError", "message": "m"})), "failed", "CreateContainerError: m"),
        (status(phase="Failed", reason="Evicted", message="The node was low on memory"), "failed", "Evicted: The node was low on memory"),
        (
            status(phase="Failed", containerStatuses=cell(terminated={"exitCode": 137, "reason": "OOMKilled", "startedAt": "x"})),
            "lost",
            "OOMKilled",
        ),
        (status(phase="Failed", reason="DeadlineExceeded"), "failed", "lifetime_s"),
        (
            {"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running", "containerStatuses": cell(running={})}},
            "lost",
            "deleted",
        ),
        (
            {
                "metadata": {"deletionTimestamp": "x"},
                "status": {
                    "conditions": [
                        {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for another"}
                    ]
                },
            },
            "lost",
            "PreemptionByScheduler: for another",
        ),
    ],
)
def test_a_status_in_our_words(seen, state, words):
    found = condition(seen)

    assert found.state == state
    assert words in found.reason


def test_the_parts_of_a_pod_s_way_and_the_control_plane_s_share():
    line = Timeline()
    for step, at in (
        ("asked", 0),
        ("accepted", 5),
        ("scheduled", 8),
        ("pulling", 10),
        ("pulled", 30),
        ("created", 35),
        ("started", 40),
        ("ready", 42),
    ):
        line.note(step, at)

    assert line.parts_ns() == {"api": 5, "schedule": 3, "image": 20, "start": 12, "report": 2}
    assert line.control_plane_ns == 10


def test_an_image_that_the_node_had_took_no_time():
    """The kubelet then says that it is pulled, and never that it is pulling."""
    line = Timeline()
    line.note("scheduled", 5)
    for at, reason in ((6, "Pulled"), (7, "Created"), (9, "Started")):
        line.event({"reason": reason, "type": "Normal", "involvedObject": {"fieldPath": "spec.containers{cell}"}}, at)

    assert line.parts_ns() == {"image": 0, "start": 4}


async def test_a_pod_tells_the_record_where_its_start_went():
    sandbox = PodSandbox(
        None,
        "default",
        "untax-1",
        architecture="x86_64",
        patience=Patience(ready_s=1, request_s=1, reopen_s=1),
        unenforced=(),
        forget=lambda name: None,
    )
    for step, at in (("asked", 0), ("accepted", 5), ("scheduled", 8), ("started", 40)):
        sandbox.timeline.note(step, at)

    assert isinstance(sandbox, Detailing)
    assert sandbox.detail == {"start_parts_ns": {"api": 5, "schedule": 3, "start": 32}}


def test_events_of_another_container_are_not_the_sandbox_s():
    line = Timeline()
    line.event({"reason": "Started", "type": "Normal", "involvedObject": {"fieldPath": "spec.containers{cut}"}}, 1)
    line.event({"reason": "Failed", "type": "Warning", "message": "m", "involvedObject": {}}, 2)

    assert line.seen == {}
    assert line.warnings == ["Failed: m"]


def test_how_an_exec_ended():
    assert exit_code_of({"status": "Success"}) == 0
    assert (
        exit_code_of({"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}})
        == 7
    )
    assert exit_code_of({"status": "Failure", "reason": "InternalError", "message": "x"}) is None


# ---- kubeconfigs ----


def config(tmp_path, name="config", **changes):
    whole = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": "https://h:6443/base"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
        **changes,
    }
    (tmp_path / name).write_text(json.dumps(whole))
    return str(tmp_path / name)


async def test_a_context_names_server_user_and_namespace(tmp_path):
    access = find_access(config(tmp_path), None, None)

    assert (access.server, access.namespace) == ("https://h:6443/base", "n")
    assert await access.headers() == {"Authorization": "Bearer t"}
    assert find_access(config(tmp_path), "c", "other").namespace == "other"


async def test_of_several_files_the_first_that_has_a_name_wins(tmp_path, monkeypatch):
    one = config(tmp_path, "one", users=[{"name": "u", "user": {"token": "first"}}], contexts=[])
    two = config(tmp_path, "two")
    monkeypatch.setenv("KUBECONFIG", f"{one}:{two}")

    assert await find_access(None, None, None).headers() == {"Authorization": "Bearer first"}


async def test_user_and_password_impersonation_and_a_file_of_a_token(tmp_path):
    basic = find_access(config(tmp_path, users=[{"name": "u", "user": {"username": "a", "password": "b", "as": "boss"}}]), None, None)
    assert await basic.headers() == {"Authorization": "Basic " + base64.b64encode(b"a:b").decode(), "Impersonate-User": "boss"}

    (tmp_path / "token").write_text("one\n")
    held = find_access(config(tmp_path, users=[{"name": "u", "user": {"tokenFile": "token"}}]), None, None)
    assert await held.headers() == {"Authorization": "Bearer one"}
    (tmp_path / "token").write_text("two\n")
    assert await held.headers() == {"Authorization": "Bearer one"}
    assert await held.headers(anew=True) == {"Authorization": "Bearer two"}  # after a refusal


@pytest.mark.parametrize(
    "changes",
    [
        {"current-context": "missing"},
        {"clusters": []},
        {"clusters": [{"name": "k", "cluster": {"server": "ftp://h"}}]},
        {"clusters": [{"name": "k", "cluster": {"server": "https://h", "proxy-url": "socks5://p"}}]},
        {"users": [{"name": "u", "user": {"auth-provider": {"name": "gcp"}}}]},
    ],
    ids=repr,
)
def test_a_kubeconfig_that_names_nothing_is_refused_with_its_name(tmp_path, changes):
    with pytest.raises(untax.UsageError, match="config"):
        find_access(config(tmp_path, **changes), None, None)


def test_files_that_are_no_kubeconfig(tmp_path):
    (tmp_path / "bad").write_text("a: [")
    (tmp_path / "text").write_text("hello")
    for name in ("bad", "text"):
        with pytest.raises(untax.UsageError, match=name):
            find_access(str(tmp_path / name), None, None)
    with pytest.raises(untax.SubstrateUnavailable, match="missing"):
        find_access(str(tmp_path / "missing"), None, None)


async def test_a_plugin_that_fails_is_named_with_its_words(tmp_path):
    for command, words in (("/no/such/plugin", "plugin"), ("/bin/false", "exit code 1"), ("/bin/echo", "failed")):
        user = {"exec": {"command": command, "installHint": "get it there"}}
        with pytest.raises(untax.SubstrateUnavailable, match=words) as caught:
            await find_access(config(tmp_path, users=[{"name": "u", "user": user}]), None, None).headers()
        assert "get it there" in str(caught.value)
