"""`untax bench` as a user calls it, on real substrates: T0 to T2, Ctrl-C and --resume, a full disk, contention, and nothing left behind."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from tests.integration.test_cli import PATHS, command, untax

from untax import substrates
from untax.core.errors import RecordError
from untax.meter import parquet, stress
from untax.meter.journal import Journal
from untax.meter.record import Case, End, Gap, Reader, Resume, Run, Trial, no_parts, read
from untax.rollout import gitserver, workload
from untax.rollout.material import FIXED, Material, _git
from untax.rollout.workload import Source


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state directory for the whole module, so that what workloads need is brought here once."""
    if reason := substrates.load("process").unavailable_reason():
        pytest.skip(f"process: {reason}")
    return tmp_path_factory.mktemp("bench") / "state"


@pytest.fixture
def material(state):
    return Material(state / "bench")


def bench(state, *arguments, timeout=120):
    return subprocess.run(
        command("bench", "--state-dir", str(state), "--no-report", *arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": PATHS},
    )


def records(out, kind=object):
    return [record for record in read(out / "records.jsonl") if isinstance(record, kind)]


def git(path, *argv):
    said = _git(*argv, cwd=path, timeout_s=60)
    assert said is not None, argv
    return said


# ---- what workloads work on ----


def test_the_test_and_the_mend_of_the_heavy_tier_are_those_of_the_release(material):
    """What the workload applies is byte for byte what the two source distributions differ in."""
    found = workload.load("T2")
    repository = material.repository(found.source)
    if repository.origin != "sdist":
        pytest.skip("offline: this machine reaches the public repository, which has no source distribution beside it")

    for path in ("src/attr/_make.py", "tests/test_hooks.py"):
        diff = git(repository.path, "diff", "--no-color", "main", FIXED, "--", path)
        hunk = diff[diff.index("\n@@") + 1 :].partition("\n")[2]
        texts = [action.what for action in found.actions if action.verb == "shell" and f"+++ b/{path}" in action.what]
        assert [hunk.strip("\n") in text for text in texts] == [True]


def test_a_clone_gives_nothing_away_that_is_newer(material, tmp_path):
    repository = material.repository(workload.load("T2").source)
    with gitserver.serving(material.served) as address:
        clone = tmp_path / "clone"
        git(tmp_path, "clone", "-q", f"http://{address}/{repository.name}", str(clone))
        refs = git(clone, "ls-remote", "origin").splitlines()

    assert git(clone, "rev-parse", "HEAD") == repository.commit
    assert {ref.split()[0] for ref in refs} == {repository.commit}
    assert git(clone, "rev-list", "--all").split()[0] == repository.commit
    assert "tuple(field_transformer" not in (clone / "src" / "attr" / "_make.py").read_text()


def test_the_git_server_ends_with_whoever_started_it(material):
    server = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom untax.rollout import gitserver\n"
        f"with gitserver.serving(Path({str(material.served)!r})) as at:\n    print(at, flush=True)\n    import os; os.kill(os.getpid(), 9)\n"
    )
    died = subprocess.run([sys.executable, "-c", server], capture_output=True, text=True, timeout=60)
    host, port = died.stdout.strip().split(":")

    assert died.returncode == -9
    import socket

    for _ in range(100):  # the kernel closes its input; it then ends by itself
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the server still listens")


def test_a_public_home_that_answers_is_taken_before_a_source_distribution(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    git(home, "init", "-q", "-b", "main", ".")
    for number, name in enumerate(("1.0", "2.0")):
        (home / "file").write_text(str(number))
        git(home, "add", "file")
        git(home, "commit", "-q", "-m", name)
        git(home, "tag", name)
    material = Material(tmp_path / "material")
    source = Source(str(home), "1.0", sdist="attrs==25.2.0")

    found = material.repository(source)
    assert (found.origin, found.commit) == ("public", git(home, "rev-parse", "1.0"))
    assert git(found.path, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(found.path, "rev-list", "--all") == found.commit  # nothing of 2.0
    by_hash = material.repository(Source(str(home), found.commit))
    assert by_hash.commit == found.commit


def test_what_can_be_had_nowhere_names_the_remedy(tmp_path):
    from untax.core.errors import StageUnavailable

    material = Material(tmp_path / "material", downloads=tmp_path)
    with pytest.raises(StageUnavailable, match="sdist"):
        material.repository(Source(str(tmp_path / "nowhere"), "1.0"))
    with pytest.raises(StageUnavailable, match="--downloads"):
        material.repository(Source(str(tmp_path / "nowhere"), "1.0", sdist="untax-no-such-package==1.0"))
    with pytest.raises(StageUnavailable, match="--downloads"):
        material.packages(["untax-no-such-package==1.0"])
    assert not list((tmp_path / "material").rglob(".draft-*"))


@pytest.mark.parametrize("kind", ["climbs", "links", "absolute", "broken"])
def test_a_source_distribution_that_leads_out_is_refused(tmp_path, kind):
    """Whoever serves the index may be anybody."""
    import io
    import tarfile

    from untax.core.errors import StageFailed

    archive = tmp_path / "downloads" / "evil-1.0.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        names = {
            "climbs": "evil-1.0/../../../../out",
            "links": "evil-1.0/link",
            "absolute": str(tmp_path / "out"),
            "broken": "evil-1.0/file",
        }
        member = tarfile.TarInfo(names[kind])
        if kind == "links":
            member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path)
        member.size = 0 if kind == "links" else 3
        tar.addfile(member, io.BytesIO(b"abc"))
    if kind == "broken":
        archive.write_bytes(archive.read_bytes()[:60])
    material = Material(tmp_path / "material", downloads=archive.parent)
    with pytest.raises(StageFailed):
        material.repository(Source(str(tmp_path / "nowhere"), "1.0", sdist="evil==1.0"))
    assert sorted(os.listdir(tmp_path)) == ["downloads", "material"]


def test_a_directory_of_downloads_serves_a_machine_without_an_index(state, material, tmp_path, monkeypatch):
    source = workload.load("T2").source
    material.repository(source)
    monkeypatch.setattr(Material, "_pip", lambda *_: pytest.fail("the index was asked"))

    away = Material(tmp_path / "material", downloads=state / "bench" / "sources")
    assert away.repository(source).commit == material.repository(source).commit


# ---- runs ----


@pytest.mark.parametrize("name", ["process", "namespace"])
def test_the_heavy_tier_cold_and_warm_on_a_real_substrate(state, tmp_path, name):
    if reason := substrates.load(name).unavailable_reason():
        pytest.skip(f"{name}: {reason}")
    out = tmp_path / "out"
    done = bench(
        state, "--substrate", name, "--tier", "T2", "--length", "0", "--length", "10", "--trials", "1", "--warmup", "0", "--out", str(out)
    )

    assert done.returncode == 0, done.stdout + done.stderr
    trials = records(out, Trial)
    assert sorted((t.case.length, t.case.warmth, t.outcome, t.actions) for t in trials) == [
        (0, "cold", "ok", 9), (0, "warm", "ok", 9), (10, "cold", "ok", 10), (10, "warm", "ok", 10),
    ]  # fmt: skip
    for trial in trials:
        assert trial.parts_ns["unattributed"] <= max(0.01 * trial.total_ns, 50_000)
        assert trial.parts_ns["action"] > trial.parts_ns["dispatch"]
        assert trial.parts_ns["reset"] > 0
        assert (trial.parts_ns["setup"] > 0) == (trial.case.warmth == "cold")  # the clone, or where there are no layers the upload ahead
        assert trial.software["repo"]["commit"]
    assert "a span costs" in done.stdout


def test_records_hold_the_host_the_seed_the_plan_and_the_command(state, tmp_path):
    out = tmp_path / "out"
    done = bench(
        state,
        "--substrate",
        "process",
        "--tier",
        "T0",
        "--trials",
        "3",
        "--warmup",
        "1",
        "--cold",
        "--seed",
        "5",
        "--json",
        "--out",
        str(out),
        "--parquet",
    )

    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["complete"]
    assert [(row["case"]["tier"], row["n"]) for row in document["cases"]] == [("T0", 3)]
    (run,) = records(out, Run)
    assert (run.seed, run.plan["trials"]) == (5, 3)
    assert {"kernel", "cpu", "cores", "memory_mib", "engines", "noise_probe", "clock", "load"} <= run.host.keys()
    assert run.span_cost_ns > 0
    assert "--seed 5" in run.command
    assert sorted(os.listdir(out)) == ["records.jsonl", "records.parquet"]
    from pyarrow import parquet as pq

    table = pq.read_table(out / "records.parquet").to_pylist()
    assert len(table) == 4
    assert sum(row["total_ns"] for row in table) == sum(t.total_ns for t in records(out, Trial))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_a_run_loses_no_record_and_resume_goes_on(state, tmp_path, how):
    """Ctrl-C and SIGTERM give everything back at once; what a run that was killed left behind goes with the next."""
    trials, out = 60, tmp_path / "out"
    argv = command(
        "bench",
        "--state-dir",
        str(state),
        "--no-report",
        "--substrate",
        "process",
        "--tier",
        "T0",
        "--trials",
        str(trials),
        "--cold",
        "--out",
        str(out),
    )
    running = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": PATHS})
    while not (out / "records.jsonl").exists() or (out / "records.jsonl").stat().st_size < 20_000:
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.01)
    running.send_signal(how)
    said = running.communicate(timeout=60)[1]

    kept = [t.trial for t in records(out, Trial) if not t.warmup]
    assert 5 < len(kept) < trials
    assert not records(out, End)
    if how != signal.SIGKILL:
        assert (running.returncode, "--resume" in said) == (128 + how, True)
        assert list((state / "process").glob("engine-*")) == []
    # Going on: a line that was cut off, as by a loss of power, is no obstacle.
    with (out / "records.jsonl").open("ab") as file:
        file.write(b'{"v":1,"kind":"trial","run":')
    done = bench(state, "--resume", str(out))
    assert done.returncode == 0, done.stderr
    assert sorted(t.trial for t in records(out, Trial) if not t.warmup) == list(range(trials))
    assert len(records(out, Resume)) == len(records(out, End)) == 1
    assert list((state / "process").glob("engine-*")) == []
    again = bench(state, "--resume", str(out))
    assert (again.returncode, "complete" in again.stderr) == (0, True)


def test_a_run_whose_terminal_is_closed_ends_as_by_ctrl_c(state, tmp_path):
    out = tmp_path / "out"
    argv = command(
        "bench", "--state-dir", str(state), "--no-report", "--substrate", "process", "--tier", "T0", "--trials", "200", "--cold", "--out", str(out)
    )  # fmt: skip
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(argv[0], argv, {**os.environ, "PYTHONPATH": PATHS})
    shown = b""
    while b" of " not in shown or not (out / "records.jsonl").exists() or (out / "records.jsonl").stat().st_size < 20_000:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert len(records(out, Trial)) > 5 and not records(out, End)
    assert list((state / "process").glob("engine-*")) == []
    assert not [one for one in out.iterdir() if one.name != "records.jsonl"]


def test_a_user_s_workload_fails_where_it_says_it_should_not_and_is_still_a_record(state, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'version = 1\nname = "mine"\nactions = [{ write = "a", text = "x" }, { read = "a" }, { list = "." }, { search = "x" }, { run = ["false"] }]\n'
    )
    out = tmp_path / "out"
    done = bench(state, "--substrate", "process", "--tier", str(mine), "--trials", "2", "--warmup", "0", "--cold", "--out", str(out))

    assert done.returncode == 125
    assert [(t.outcome, t.actions, t.error["type"]) for t in records(out, Trial)] == [("failed", 5, "Unexpected")] * 2
    assert records(out, End)[0].failed == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--substrate", "dream"), "no substrate 'dream'"),
        (("--substrate", "process", "--tier", "T9"), "T0, T1, T2"),
        (("--substrate", "process", "--length", "11"), "10, 50, 150"),
        (("--substrate", "process", "--trials", "0"), "trials must be"),
        (("--substrate", "process", "--concurrency", "many"), "--concurrency"),
        (("--substrate", "process", "--out", "/dev/null/x"), "--out"),
        (("--resume", "/nowhere"), "records.jsonl"),
        (("/nowhere/plan.toml",), "No such file"),
        (("--substrate", "process", "--cpus", "-1"), "cpus"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_measured(state, tmp_path, arguments, word):
    done = subprocess.run(
        command("bench", "--state-dir", str(state), *arguments),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATHS},
    )

    assert done.returncode == 2
    assert word in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_plan_file_with_an_option_that_the_engine_does_not_know(state, tmp_path):
    (tmp_path / "plan.toml").write_text('substrates = ["process"]\ntiers = ["T0"]\ntrials = 1\n[options.process]\ncolour = "red"\n')
    out = tmp_path / "out"
    done = bench(state, str(tmp_path / "plan.toml"), "--out", str(out))

    assert done.returncode == 125
    assert "colour" in records(out, Gap)[0].reason


def test_an_empty_run_cannot_be_gone_on_with(state, tmp_path):
    (tmp_path / "records.jsonl").touch()
    done = bench(state, "--resume", str(tmp_path))

    assert (done.returncode, "it is empty" in done.stderr) == (2, True)


# ---- contention, and a full disk ----


@pytest.mark.parametrize("kind", ["cpu", "disk", "network"])
async def test_a_stressor_is_at_work_during_its_block_and_gone_after_it(tmp_path, kind):
    before = _own_children()
    async with stress.contention(kind, tmp_path):
        during = _own_children() - before
        assert during
        used = [_cpu_ticks(pid) for pid in during]
        while not all(_cpu_ticks(pid) > ticks for pid, ticks in zip(during, used, strict=True)):
            time.sleep(0.01)
    assert _own_children() == before
    assert os.listdir(tmp_path) == []


def _own_children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def _cpu_ticks(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_trials_under_contention_are_cases_of_their_own(state, tmp_path):
    out = tmp_path / "out"
    done = bench(
        state, "--substrate", "process", "--tier", "T0", "--trials", "2", "--warmup", "0", "--cold", "--contention", "none",
        "--contention", "disk", "--concurrency", "1,4", "--out", str(out),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert {(t.case.contention, t.case.concurrency) for t in records(out, Trial)} == {("none", 1), ("none", 4), ("disk", 1), ("disk", 4)}


@pytest.mark.skipif(os.geteuid() != 0, reason="root: mounts a small file system")
def test_a_full_disk_loses_no_record(tmp_path):
    """On a real file system of 2 MiB: the records that were due when it was full are in the file, and it says what to do."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=True)
    try:
        out = place / "run" / "records.jsonl"
        appended = 0
        with Journal.create(out, Run("r", "now", 1, {}, {}, 1)) as journal:
            with pytest.raises(RecordError, match="the disk is full") as caught:
                for number in range(100_000):
                    journal.check_room()
                    journal.append(_trial(number))
                    appended += 1
            for number in range(appended, appended + 32):  # what was under way at once when it was found full
                journal.append(_trial(number))
            journal.sync()
        assert "--resume" in str(caught.value)
        with Reader(out) as reader:
            assert [one.trial for one in reader if isinstance(one, Trial)] == list(range(appended + 32))
        assert not reader.truncated
        assert os.listdir(out.parent) == ["records.jsonl"]
        (place / "ballast").write_bytes(b"x" * (place_free(place)))
        with pytest.raises(RecordError, match="free some space"):
            Journal.create(place / "other" / "records.jsonl", Run("r", "now", 1, {}, {}, 1))
    finally:
        subprocess.run(["umount", str(place)], check=True)


def place_free(place):
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _trial(number):
    return Trial("r", Case("a"), number, number, False, "now", "ok", no_parts(), 0, {})


def test_parquet_of_nothing_is_refused(tmp_path):
    (tmp_path / "records.jsonl").touch()

    with pytest.raises(RecordError, match="empty"):
        parquet.write(tmp_path / "records.jsonl", tmp_path / "records.parquet")
    assert not (tmp_path / "records.parquet").exists()


def test_imported_trajectories_can_be_measured(state, tmp_path):
    recorded = {
        "messages": [
            {"role": "assistant", "content": "", "extra": {"actions": [{"command": "echo hello > f"}, {"command": "cat f; exit 3"}]}}
        ]
    }
    (tmp_path / "x.traj.json").write_text(json.dumps(recorded))
    mine = tmp_path / "mine.toml"
    assert untax("workload", "import", str(tmp_path / "x.traj.json"), "-o", str(mine)).returncode == 0
    out = tmp_path / "out"
    done = bench(state, "--substrate", "process", "--tier", str(mine), "--trials", "1", "--warmup", "0", "--out", str(out))

    assert done.returncode == 0, done.stderr
    assert {(t.outcome, t.actions) for t in records(out, Trial)} == {("ok", 2)}
