"""The blocking names where actions go straight over the socket, in the caller's thread."""

import os
import signal
import threading
import time

import pytest
from tests import interrupts
from tests.serving import ended, started

import untax
import untax.sync
from untax import substrates
from untax.remote import connection, stream
from untax.remote.engine import RemoteEngine


@pytest.fixture(params=["embedded", "served"])
def engine(request, process_state, tmp_path, _runner):
    if request.param == "embedded":
        with untax.sync.Engine("process", state_dir=process_state) as engine:
            yield engine
        return
    server = _runner.run(started(tmp_path / "s.sock", process_state, substrate="process"))
    with untax.sync.connect(server.url) as engine:
        yield engine
    _runner.run(ended(server))


@pytest.fixture(params=["none", "all"], ids=["direct", "by the loop"])
def box(engine, request):
    with engine.lease(network=request.param) as box:
        yield box


def test_the_server_is_spoken_to_in_the_loop_s_thread_alone(engine, monkeypatch):
    """A lease is made, and checked, in the caller's."""
    spoke = set()
    send = stream.UnixStream.send

    def sent(self, body, fd=None):
        spoke.add(threading.current_thread())
        send(self, body, fd)

    monkeypatch.setattr(connection, "_ASLEEP_S", 0.0)
    monkeypatch.setattr(stream.UnixStream, "send", sent)
    with engine.lease() as box:
        box.run(["true"])
    engine.acquire().release()
    assert threading.current_thread() not in spoke
    assert len(spoke) == isinstance(engine._inner, RemoteEngine)


def test_commands_files_and_sessions(box):
    assert box.run(["sh", "-c", "echo no >&2; exit 3"]).exit_code == 3
    box.write("d/f", b"bytes")
    assert box.read("d/f") == b"bytes"
    assert [entry.name for entry in box.list("d")] == ["f"]
    with box.session() as bash:
        bash.run("cd d; X=1")
        assert bash.run("echo $X; ls").text == "1\nf\n"
    with pytest.raises(untax.Gone):
        bash.run("true")


def test_started_processes_stream(box):
    with box.start(["cat"]) as process:
        process.write(b"one")
        assert process.read() == ("stdout", b"one")
        process.close_stdin()
        assert process.wait().exit_code == 0
    with box.start(["sleep", "60"]) as process:
        process.signal(signal.SIGTERM)
        assert process.wait().outcome == "signaled"


def test_trees_go_in_and_out(box, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"1")
    box.upload(tmp_path / "in", "tree")
    box.download("tree", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == b"1"


def test_a_reset_box_is_fresh_and_old_sessions_are_not(box):
    box.write("left", b"")
    bash = box.session().open()
    box.reset()
    assert box.list(".") == []
    with pytest.raises(untax.UntaxError):
        bash.run("true")
    bash.close()


def test_watching(box):
    with box.watch(".") as events:
        box.write("made", b"1")
        assert next(events).path == "made"


def test_many_threads(box):
    failures = []

    def work(n):
        try:
            for i in range(20):
                assert box.run(["echo", f"{n}.{i}"]).text == f"{n}.{i}\n"
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_release_ends_an_action_of_another_thread(box):
    seen = []

    def work():
        try:
            box.run(["sleep", "60"])
        except untax.SandboxLost as exc:
            seen.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    box.run(["true"])
    box.release()
    thread.join(5)
    assert seen
    assert box.ledger.verdict == "trusted"


def test_a_cell_that_dies_is_a_lost_sandbox(box):
    os.kill(int(box.shell("echo $PPID").text), signal.SIGKILL)
    with pytest.raises(untax.SandboxLost):
        box.run(["true"])
    with pytest.raises(untax.SandboxLost):
        box.run(["true"])
    assert box.ledger.verdict == "infra"


def test_a_lease_ends_by_itself(engine):
    box = engine.acquire(ttl_s=0.2)
    with pytest.raises(untax.SandboxLost, match="ttl_s"):
        box.run(["sleep", "60"])
    box.release()


def _refused(*calls):
    """How many of these are a `UsageError`."""
    refused = 0
    for call in calls:
        try:
            call()
        except untax.UsageError:
            refused += 1
    return refused


def test_after_a_fork_it_says_so(engine, box):
    """Whatever the child holds: a byte that it took from the socket, or put there, would be its parent's."""
    process, bash, watch = box.start(["cat"]), box.session().open(), box.watch()
    calls = (
        lambda: box.run(["true"]), lambda: bash.run("true"), lambda: process.write(b"x"), process.read, process.wait, process.kill,
        process.close_stdin, lambda: next(watch), watch.close, engine.acquire, box.reset, engine.aclose,
    )  # fmt: skip
    pid = os.fork()
    if pid == 0:
        refused = -1
        try:
            refused = _refused(*calls)
        finally:
            os._exit(0 if refused == len(calls) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box.run(["true"]).exit_code == 0
    process.write(b"hello")
    process.close_stdin()
    assert process.wait().stdout == b"hello"
    assert bash.run("echo still").text == "still\n"
    watch.close()


def test_an_interrupt_kills_the_command(engine):
    """Ctrl-C during a blocking action: the command inside ends with it."""
    with engine.lease() as box:
        threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
        with interrupts.raised(), pytest.raises(KeyboardInterrupt):
            box.run(["sleep", "77.5"])
        deadline = time.monotonic() + 5
        while box.shell("grep -lsz '^77.5$' /proc/[0-9]*/cmdline").stdout and time.monotonic() < deadline:
            time.sleep(0.02)
        assert box.shell("grep -lsz '^77.5$' /proc/[0-9]*/cmdline").stdout == b""


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_no_lease_is_lost_to_an_interrupt_whenever_it_comes(engine):
    """Nor the engine's thread to an action that was interrupted in the midst. Every single step is tried in the unit tests, and takes too long here."""

    def work():
        with engine.lease() as box:
            box.run(["true"])

    steps = 0
    for steps in interrupts.at_each_step(work, every=5):
        deadline = time.monotonic() + 60
        while engine._inner._boxes:
            assert time.monotonic() < deadline, (steps, engine._inner._boxes)
            time.sleep(0.001)
    assert steps > 500  # or it was not interrupted at all


@pytest.fixture(params=["embedded", "served"])
def layered(request, tmp_path, _runner):
    """Gives an engine that is not entered yet, on the same state directory each time."""
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    if request.param == "embedded":
        yield lambda: untax.sync.Engine("namespace", state_dir=tmp_path / "state")
        return
    server = _runner.run(started(tmp_path / "s.sock", tmp_path / "state"))
    yield lambda: untax.sync.connect(server.url)
    _runner.run(ended(server))


@pytest.mark.parametrize("network", ["none", "all"], ids=["direct", "by the loop"])
def test_snapshots_forks_resets_and_graders(layered, network):
    """Frozen and forked by the loop's thread while the actions go straight over the socket; the socket outlives the change of root."""
    with layered() as engine, engine.lease(network=network) as box:
        box.write("src/a", b"1")
        with box.session() as bash:
            bash.run("cd src; X=kept")
            snapshot = box.snapshot()
            assert bash.run("echo $X; ls; echo 2 >b").text == "kept\na\n"
        with engine.fork(snapshot, 4) as group:
            assert [[entry.name for entry in one.list("src")] for one in group] == [["a"]] * 4
            group[0].write("src/a", b"mine")
            assert [(one.path, one.kind) for one in group[0].diff()] == [("/workspace/src/a", "modified")]
            group[0].reset()
            assert group[0].read("src/a") == b"1"
        with engine.grader(box) as clean:
            assert sorted(entry.name for entry in clean.list("src")) == ["a", "b"]
        saved = snapshot.save()
        box.reset()
        assert box.list(".") == []
    with layered() as engine, engine.restore(saved) as box:
        assert box.read("src/a") == b"1"
        engine.find_snapshot(saved).drop()
    assert box.ledger.verdict == "trusted"
