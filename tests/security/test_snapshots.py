"""What a workload can do to the files it stands on, and what is left of it after a reset, in a fork, in the next lease and for the grader.

As root of the sandbox where the engine is root, which can do the most; otherwise as the one user there is.
"""

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time

import pytest
from tests.images import small_directory
from tests.security.conftest import LONG

import untax

WORST = "root" if os.geteuid() == 0 else None

# Names, types, modes, owners, sizes, targets and link counts of everything that is the sandbox's own file system, and the contents of all files.
# Of a directory neither size nor link count: file systems count these as they like.
TREE = r"""
find / -xdev \( -path /proc -o -path /dev -o -path /tmp \) -prune -o -printf '%p|%y|%m|%U|%G|%l|' \( -type d -printf '\n' -o -printf '%s|%n\n' \) | sort
find / -xdev \( -path /proc -o -path /dev -o -path /tmp \) -prune -o -type f -exec sha256sum {} + | sort
"""


@pytest.fixture
def small():
    return untax.EnvSpec(image=f"dir:{small_directory()}", user=WORST)


@pytest.fixture
def hosted():
    return untax.EnvSpec(user=WORST)


async def tree(box):
    found = await box.shell(TREE, cap=64 << 20)
    assert found.exit_code == 0, found.stderr
    assert len(found.stdout) > 1000
    return found.stdout


# ---- after a reset ----


async def test_f7_after_any_damage_a_reset_gives_the_pristine_tree(engine, small):
    async with engine.lease(small) as box:
        pristine = await tree(box)
        await box.shell(
            "find / -xdev -type f -exec touch {} + ; rm -rf /usr/share /etc/*; mkdir -p /a/b; mv /bin /b; ln /b /c; chmod 000 /", merge=True
        )
        with contextlib.suppress(untax.PermissionDenied):  # for an ordinary user the root is closed now
            await box.shell("cp /usr/bin/true /usr/bin/sh; rm -rf /etc; chmod 000 /usr", merge=True)
        await box.reset()
        assert await tree(box) == pristine
        assert box.ledger.resets == {"replaced": 1}
        assert box.ledger.verdict == "trusted"


async def test_f8_immutable_files_hold_up_neither_reset_nor_destroy(engine, hosted):
    async with engine.lease(hosted) as box:
        await box.shell("touch /tmp/f /tmp/g f g; chattr +i /tmp/f f; chattr +a /tmp/g g", merge=True)
        await box.reset()
        assert await box.list(".") == []
        await box.shell("touch f; chattr +i f", merge=True)
    assert engine.quarantined == ()


async def test_f9_an_empty_root_fails_in_a_typed_way_and_a_reset_restores_it(engine, small):
    async with engine.lease(small) as box:
        pristine = await tree(box)
        await box.shell("rm -rf --no-preserve-root / 2>/dev/null", timeout_s=60)
        try:
            assert (await box.run(["true"])).exit_code in (0, 126, 127)
        except (untax.SpawnFailed, untax.NotFound):
            pass  # no bash, no directory to run it in: the sandbox stands and says so
        await box.reset()
        assert await tree(box) == pristine


async def test_f10_replaced_programs_are_back_after_a_reset_and_no_grader_sees_them(engine, small):
    async with engine.lease(small) as box:
        before = (await box.run(["sha256sum", "/usr/bin/sh", "/usr/bin/cat"])).text
        await box.shell(
            "cp /usr/bin/true /usr/bin/cat; ln -sf /usr/bin/false /usr/bin/sh; echo planted >src; mkdir d; echo 1 >d/a", merge=True
        )
        async with engine.grader(box, take=("d/*",)) as clean:
            assert (await clean.run(["sha256sum", "/usr/bin/sh", "/usr/bin/cat"])).text == before
            assert [entry.name for entry in await clean.list(".")] == ["d"]
        await box.reset()
        assert (await box.run(["sha256sum", "/usr/bin/sh", "/usr/bin/cat"])).text == before


_LEFT = "/tmp /var/tmp $HOME/.cache /dev/shm /workspace $HOME"


async def test_f19_what_one_lease_leaves_the_next_does_not_find(engine, hosted):
    plant = f"for d in {_LEFT}; do mkdir -p $d; echo left >$d/left-behind; done; echo 'echo left' >>$HOME/.bashrc; echo 'export LEFT=1' >>$HOME/.profile"
    plant += (
        "; mkdir -p /etc/cron.d /var/spool/cron; echo '* * * * * root true' >/etc/cron.d/left; echo LEFT=1 >>/etc/environment; sleep 4321 &"
    )
    look = f"ls -A {_LEFT} /etc/cron.d /var/spool/cron 2>/dev/null | grep left; bash -lc 'echo $LEFT'; grep -s LEFT /etc/environment; "
    look += "grep -lsz '^4321$' /proc/[0-9]*/cmdline | grep -v self"
    async with engine.lease(hosted) as box:
        await box.shell(plant, merge=True)
        assert "left-behind" in (await box.shell(look)).text
        await box.reset()
        assert (await box.shell(look)).text.strip() == ""
        await box.shell(plant, merge=True)
    async with engine.lease(hosted) as box:
        assert (await box.shell(look)).text.strip() == ""


async def test_a_thousand_resets_in_a_row_leave_nothing_and_stay_as_fast(engine, small):
    """Two hundred unless the run is a long one. The last quarter against the first, generously: the budget is a benchmark's business."""
    count = 1000 if LONG else 200
    took = []
    async with engine.lease(small) as box:
        for n in range(count):
            await box.write("n", str(n).encode())
            began = time.perf_counter()
            await box.reset()
            took.append(time.perf_counter() - began)
        assert await box.list(".") == []
        assert box.ledger.resets == {"replaced": count}
    quarter = count // 4
    assert statistics.median(took[-quarter:]) < 3 * statistics.median(took[:quarter])


# ---- forks ----


_DRESS = """
import os, sys
os.chdir("/workspace")
open("plain", "w").write("x"); os.chmod("plain", 0o4751); os.utime("plain", ns=(1, 1234567890123456789))
os.link("plain", "linked"); os.symlink("nowhere/at/all", "dangling"); os.mkfifo("pipe", 0o640)
os.setxattr("plain", "user.mine", b"\\0\\xff"); os.makedirs("d/e"); os.chmod("d", 0o2770)
with open("sparse", "wb") as f: f.seek(256 << 20); f.write(b"end")
if os.getuid() == 0:
    os.chown("d/e", 1234, 4321); os.chown("dangling", 7, 8, follow_symlinks=False)
os.utime("d", ns=(5, 987654321))
"""
_SHOW = """
import os, hashlib
found = []
for top, dirs, files in os.walk("/workspace"):
    for name in [*dirs, *files]:
        path = os.path.join(top, name); st = os.lstat(path)
        data = hashlib.sha256(open(path, "rb").read(8192)).hexdigest() if os.path.isfile(path) and not os.path.islink(path) else ""
        attrs = {a: os.getxattr(path, a, follow_symlinks=False) for a in os.listxattr(path, follow_symlinks=False)}
        found.append((path, oct(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns, *((st.st_nlink, st.st_size) if not os.path.isdir(path) else ()), data, attrs,
                      os.readlink(path) if os.path.islink(path) else ""))
print(sorted(found)); print(os.lstat("/workspace/sparse").st_blocks * 512 < 1 << 20, os.lstat("/workspace/plain").st_ino == os.lstat("/workspace/linked").st_ino)
"""


async def test_f11_a_fork_and_a_saved_snapshot_keep_modes_owners_times_holes_links_and_attributes(tmp_path, hosted):
    """The second is read back by another engine, and forked once more."""
    show = ["python3", "-c", _SHOW]
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as engine, engine.lease(hosted) as box:
        (await box.run(["python3", "-c", _DRESS])).check()
        shown = (await box.run(show)).check().text
        assert shown.endswith("True True\n")
        snapshot = await box.snapshot()
        assert (await box.run(show)).check().text == shown
        async with engine.restore(snapshot) as fork:
            assert (await fork.run(show)).check().text == shown
        saved = await snapshot.save()
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as later, later.restore(saved) as restored:
        assert (await restored.run(show)).check().text == shown
        async with later.restore(await restored.snapshot()) as fork:
            assert (await fork.run(show)).check().text == shown


async def test_f12_sixty_four_forks_each_with_a_token_of_its_own(engine, small):
    async with engine.lease(small) as box:
        await box.write("token", b"parent")
        snapshot = await box.snapshot()
        async with engine.fork(snapshot, 64) as group:
            await asyncio.gather(
                *(one.shell(f"echo {n} >token; echo {n} >own-{n}; echo {n} >/etc/own; sync") for n, one in enumerate(group))
            )
            seen = await asyncio.gather(*(one.shell("cat token own-* /etc/own 2>/dev/null") for one in group))
        assert [one.text.split() for one in seen] == [[str(n)] * 3 for n in range(64)]
        assert (await box.shell("cat token; echo; ls")).text.split() == ["parent", "token"]
    await snapshot.drop()


async def test_q5_256_forks_of_one_snapshot_at_once(engine, small):
    async with engine.lease(small) as box:
        await box.write("token", b"parent")
        snapshot = await box.snapshot()
    async with engine.fork(snapshot, 256, limits=untax.Limits(memory_mib=64, pids=32)) as group:
        assert len({one.id for one in group}) == 256
        await asyncio.gather(*(one.write("own", str(n).encode()) for n, one in enumerate(group)))
        assert await asyncio.gather(*(one.read("own") for one in group)) == [str(n).encode() for n in range(256)]
        assert set(await asyncio.gather(*(one.read("token") for one in group))) == {b"parent"}
        assert {one.ledger.verdict for one in group} == {"trusted"}
    await snapshot.drop()


async def test_f14_a_fork_of_a_fork_a_hundred_and_fifty_deep(engine, small):
    async with engine.lease(small) as box:
        await box.shell("mkdir d; echo 0 >d/0; mv d moved; echo base >both")
        snapshot = await box.snapshot()
    for n in range(1, 151):
        async with engine.restore(snapshot) as box:
            ran = await box.shell(f"mv moved m{n} && mv m{n} moved && echo {n} >moved/{n} && rm -f moved/{n - 3} && echo {n} >both")
            assert ran.exit_code == 0, (n, ran.stderr)
            following = await box.snapshot()
        await snapshot.drop()
        snapshot = following
    async with engine.restore(snapshot) as box:
        assert (await box.shell("ls moved; cat both")).text.split() == ["148", "149", "150", "150"]
        assert len(box._sandbox.root.layers) < 60
    await snapshot.drop()


# ---- snapshots ----


async def test_q8_a_snapshot_under_a_writer_is_a_prefix_of_what_it_wrote(engine, small):
    """Two files, the second always written after the first: no snapshot has the second ahead, none has a torn or missing line."""
    script = "i=0; while :; do i=$((i+1)); echo line-$i >>first; echo line-$i >>second; done"
    async with engine.lease(small) as box:
        writer = await box.start(["bash", "-c", script])
        while not [entry for entry in await box.list(".") if entry.name == "second"]:
            await asyncio.sleep(0.01)
        lengths = []
        for _ in range(10):
            snapshot = await box.snapshot()
            async with engine.restore(snapshot) as fork:
                first, second = [(await fork.read(name)).decode().splitlines(keepends=True) for name in ("first", "second")]
                for lines in (first, second):
                    assert lines == [f"line-{n}\n" for n in range(1, len(lines) + 1)]
                assert len(second) <= len(first) <= len(second) + 1
                lengths.append(len(first))
                with pytest.raises(untax.ActionError):
                    await fork.attach(writer.pid)  # files only
            await snapshot.drop()
            await asyncio.sleep(0.01)
        assert lengths == sorted(lengths)
        assert lengths[-1] > lengths[0]  # it went on
        writer.kill()
        await writer.wait()
        live = (await box.read("first")).decode().splitlines()
        assert live == [f"line-{n}" for n in range(1, len(live) + 1)]  # and wrote into the file that is seen


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\\b", "a=b", "a b", "x,upperdir=", "lowerdir+=x", "new\nline", "ü", "%s", "a,userxattr"])
async def test_f15_odd_names_are_names_wherever_they_are_mounted(tmp_path, name):
    """Of the state directory, so of every layer, upper and frozen directory; of the image; of the working directory."""
    place = tmp_path / name
    image = shutil.copytree(small_directory(), place / "image", symlinks=True)
    spec = untax.EnvSpec(image=f"dir:{image}", workdir=f"/srv/{name}", user=WORST)
    async with untax.Engine("namespace", state_dir=place / "state") as engine, engine.lease(spec) as box:
        await box.write("a", b"1")
        assert (await box.run(["pwd"])).stdout.decode() == f"/srv/{name}\n"
        snapshot = await box.snapshot()
        await snapshot.save()
        async with engine.fork(snapshot, 2) as group:
            assert [await one.read("a") for one in group] == [b"1"] * 2
        options = (await box.read("/proc/self/mountinfo")).decode(errors="replace")
        assert "upperdir=/ " not in options


@pytest.mark.parametrize("which", [".", "layers"])
async def test_f20_a_link_in_the_place_of_the_store_is_refused_and_not_followed(tmp_path, which):
    """Whoever may write beside the state directory can put one there first; further down only its owner can write."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = tmp_path / "state" / which
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(elsewhere)
    engine = untax.Engine("namespace", state_dir=tmp_path / "state")
    with pytest.raises(untax.UsageError):
        await engine.start()
    assert list(elsewhere.iterdir()) == []


_KILLED = """
import asyncio, os, signal, sys, untax

async def main():
    async with untax.Engine("namespace", state_dir=sys.argv[1]) as engine, engine.lease(untax.EnvSpec(image=sys.argv[2])) as box:
        await box.write("kept", b"1")
        saved = await (await box.snapshot()).save()
        await box.write("lost", b"2" * 1000000)
        unsaved = await box.snapshot()
        async with engine.fork(unsaved, 4):
            saving = asyncio.create_task(unsaved.save())
            await asyncio.sleep(float(sys.argv[3]))
            print(saved, unsaved.id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_x34_an_engine_that_is_killed_loses_nothing_that_was_saved_and_leaves_nothing_else(tmp_path, small):
    """Killed at several moments of a save: what it was about is there whole or not at all."""
    state = tmp_path / "state"
    for delay_s in (0, 0.001, 0.003, 0.01, 0.05):
        ended = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", _KILLED, state, small.image, str(delay_s)],
            capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        assert ended.returncode == -9, ended.stderr
        saved, unsaved = ended.stdout.split()
        async with untax.Engine("namespace", state_dir=state) as engine:
            async with engine.restore(saved) as box:
                assert [entry.name for entry in await box.list(".")] == ["kept"]
            await (await engine.find_snapshot(saved)).drop()
            with contextlib.suppress(untax.UsageError):
                async with engine.restore(unsaved) as box:
                    assert {(entry.name, entry.size) for entry in await box.list(".")} == {("kept", 1), ("lost", 1_000_000)}
                await (await engine.find_snapshot(unsaved)).drop()
    async with untax.Engine("namespace", state_dir=state) as engine:
        await asyncio.to_thread(engine.warehouse.store.evict)
    left = [path for place in ("layers/trees", "layers/drafts", "layers/stages", "namespace") for path in (state / place).glob("*")]
    assert [path.name for path in left if path.name not in ("images", ".gate")] == []


# ---- grading ----


_TESTS = """
import src.answer

def test_it():
    assert src.answer.answer() == 42

def test_other():
    assert src.answer.answer() > 0
"""
_CONFTEST = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome = "passed"
"""
_PLANT = f"""
cat >conftest.py <<'END'
{_CONFTEST}
END
cp conftest.py tests/conftest.py; cp conftest.py ../conftest.py
printf '[pytest]\\naddopts = --co\\n' >pytest.ini
printf 'import os, sys\\nif "pytest" in " ".join(sys.orig_argv): print("2 passed"); os._exit(0)\\n' >sitecustomize.py
cp sitecustomize.py usercustomize.py
site=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $site; cp sitecustomize.py $site/usercustomize.py
echo 'import os; os._exit(0)' >$site/x.pth
for d in $(python3 -c 'import sysconfig, site; print(sysconfig.get_path("purelib"), *site.getsitepackages())'); do
  echo 'import os, sys; print("2 passed"); os._exit(0)' >$d/x.pth; cp sitecustomize.py $d/; done
mkdir -p $HOME/bin $HOME/.local/bin
for d in $HOME/bin $HOME/.local/bin /usr/local/bin $(echo $PATH | tr : ' ') .; do
  for p in python python3 pytest; do printf '#!/bin/sh\\necho 2 passed\\n' >$d/.w 2>/dev/null && chmod 755 $d/.w && mv -f $d/.w $d/$p; done; done
echo 'export LD_PRELOAD=/tmp/x.so PYTHONSTARTUP=/tmp/x PYTHONPATH=/tmp' | tee -a $HOME/.profile $HOME/.bashrc $HOME/.bash_profile /etc/profile /etc/environment
echo /tmp/x.so >/etc/ld.so.preload
git config --global core.hooksPath /tmp; mkdir -p src/__pycache__; ln -s ../tests src/tests; ln -sf /dev/null tests/test_it.py
(while :; do pkill -9 -f pytest; sleep 0.01; done) >/dev/null 2>&1 &
"""


async def score(clean):
    """How many of the tests passed, by exit code and by the report."""
    ran = await clean.shell("python3 -B -m pytest -q -p no:cacheprovider tests 2>&1 | tail -3", timeout_s=120)
    return ran.text.strip().splitlines()[-1].rpartition(" in ")[0] if ran.text.strip() else ""


@pytest.mark.parametrize(("answer", "expected"), [("41", "1 failed, 1 passed"), ("42", "2 passed")])
async def test_f18_t15_nothing_planted_changes_the_score(engine, hosted, answer, expected):
    """Every trick at once, then a grade of the answer alone: the same as without them, for a wrong answer and a right one."""
    files = {"tests/test_it.py": _TESTS.encode(), "src/__init__.py": b""}
    scores = []
    for plant in ("true", _PLANT):
        async with engine.lease(hosted, files=files) as box:
            await box.write("src/answer.py", f"def answer():\n    return {answer}\n".encode())
            await box.shell(plant, merge=True, timeout_s=120)
            async with engine.grader(box, take=("src/*.py",)) as clean:
                scores.append(await score(clean))
                left = (await clean.shell("ls -A . src ~; cat /etc/ld.so.preload; env", merge=True)).text
                assert "conftest" not in left
                assert "LD_PRELOAD" not in left
    assert scores == [expected, expected]


async def test_f18_the_tricks_do_work_where_nobody_grades_apart(engine, hosted):
    """Or the test above would prove nothing."""
    async with engine.lease(hosted, files={"tests/test_it.py": _TESTS.encode(), "src/__init__.py": b""}) as box:
        await box.write("src/answer.py", b"def answer():\n    return 41\n")
        await box.write("conftest.py", _CONFTEST.encode())
        assert await score(box) == "2 passed"


async def test_c13_two_clones_of_one_snapshot_differ(engine, hosted):
    """Random bytes and name are each one's own, the clock is the host's, and no machine id is shared: the host's own is shown to none."""
    ask = "head -c 16 /dev/urandom | od -An -tx1; hostname; date +%s; cat /etc/machine-id 2>/dev/null"
    async with engine.lease(hosted) as box:
        snapshot = await box.snapshot()
        async with engine.fork(snapshot, 2) as clones:
            told = []
            for one in (box, *clones):
                before = time.time()
                random, name, now, *machine = (await one.shell(ask)).text.splitlines()
                assert before - 1 <= int(now) <= time.time() + 1
                assert name == one.id
                told.append((random, name, *machine))
        await snapshot.drop()

    assert all(len({*values}) == 3 for values in zip(*told, strict=True)), told


async def test_c13_an_images_own_machine_id_is_no_sandboxs(tmp_path):
    """Each has one of its own, which nobody can write to, which stays with it when a snapshot is taken and is in no layer; an empty one stays empty."""
    shared = "0123456789abcdef0123456789abcdef"
    image = tmp_path / "image"
    shutil.copytree(small_directory(), image, symlinks=True)
    for place in ("etc", "var/lib/dbus"):
        (image / place).mkdir(parents=True, exist_ok=True)
        (image / place / "machine-id").write_text(f"{shared}\n")
    spec = untax.EnvSpec(image=f"dir:{image}", setup=("cat /etc/machine-id >/built",), user=WORST)
    told = [shared]

    async def own(box):
        first, second = (await box.shell("cat /etc/machine-id /var/lib/dbus/machine-id")).check().text.splitlines()
        assert first == second and len(bytes.fromhex(first)) == 16
        return first

    async def is_pristine(box):
        """Soon: one of the cell's own processes that is just ending cannot be told from another's."""
        for _ in range(40):
            if await box._sandbox.is_pristine():
                return True
            await asyncio.sleep(0.05)
        return False

    async with untax.Engine(state_dir=tmp_path / "state") as engine:
        async with engine.lease(untax.EnvSpec(image=f"dir:{small_directory()}", user=WORST)) as plain:
            provable = await is_pristine(plain)  # not for every ordinary user
        async with engine.lease(spec) as box:
            assert await is_pristine(box) == provable  # nothing of it counts as a change
            told += [await own(box), (await box.read("/built")).decode().strip()]
            assert (await box.stat("/etc/machine-id")).mode & 0o777 == 0o444
            written = await box.shell("echo 0 >/etc/machine-id || rm -f /etc/machine-id || chmod 777 /etc/machine-id", merge=True)
            assert written.exit_code != 0 and await own(box) == told[1]
            assert list(await box.diff()) == []
            async with box.session() as bash:  # so that the root is swapped under a live one
                await bash.run("cd /etc")
                snapshot = await box.snapshot()
                assert (await bash.run("cat machine-id")).text.strip() == told[1]
            assert await own(box) == told[1]
            async with engine.fork(snapshot, 2) as clones:
                told += [await own(one) for one in clones]
            await snapshot.drop()
            await box.reset()
            told.append(await own(box))
        assert len({*told}) == len(told), told
        layers = engine.warehouse.store.layers()
        assert layers and not any((layer.tree / "etc/machine-id").exists() for layer in layers)

        (image / "etc/machine-id").write_text("")
        async with engine.lease(untax.EnvSpec(image=f"dir:{image}", user=WORST)) as box:
            assert (await box.shell("cat /etc/machine-id")).text == ""
