"""`registry:` against the real registry server, with every way to log in that it has, and against one that misbehaves (X20)."""

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from tests import registries
from tests.registries import MACHINE, auth_file, basic, cut_after, dripping, endless, image, index, instead, layer, silent, status
from tests.servers import make_certificate

from untax.core.errors import StageFailed, StageUnavailable
from untax.layers import sources
from untax.layers.sources import _http, registry
from untax.layers.sources._http import Patience
from untax.layers.sources._reference import Platform, parse_remote
from untax.layers.sources.registry import RegistryImage
from untax.layers.store import LayerStore

QUICK = Patience(connect_s=2, answer_s=2, stall_s=0.5, attempts=4, first_wait_s=0.01, longest_wait_s=0.05, longest_asked_wait_s=5)
BASE = layer({"etc/": None, "etc/os": b"tests\n", "etc/gone": b"x", "srv/": None, "srv/old": b"x"})
TOP = layer({"etc/": None, "etc/.wh.gone": b"", "srv/": None, "srv/.wh..wh..opq": b"", "srv/new": b"new\n"})
CONFIG = {"Env": ["A=b"], "WorkingDir": "/srv", "User": "1000", "Entrypoint": ["/bin/sh"], "Cmd": ["-c", "true"], "Labels": {"k": "v"}}


@pytest.fixture(autouse=True)
def _nothing_of_the_machine_s_own_and_nothing_remembered(monkeypatch, tmp_path):
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    forget()


def forget():
    """As in a process that has not seen anything yet."""
    registry._remembered.clear()
    registry._last_seen.clear()


@pytest.fixture
def store(tmp_path):
    marks = "trusted" if os.geteuid() == 0 else "user"
    opened = LayerStore(tmp_path / "layers", marks=marks)
    yield opened
    opened.close()


@pytest.fixture
def rogue():
    with registries.rogue() as served:
        yield served


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The real registry, open to everybody on this machine."""
    with registries.registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


def named(text, **options):
    return RegistryImage(parse_remote(text), **{"patience": QUICK, **options})


def quiet(what, done, total):
    pass


def files(store, fetched):
    """Names of what each layer holds, bottom first."""
    return [sorted(str(path.relative_to(tree)) for path in tree.rglob("*")) for tree in (store.layer(one).tree for one in fetched.adds)]


def leftovers(store):
    return sorted(path.name for path in store.downloads.iterdir() if path.is_file())


# ---- the real registry ----


async def test_an_image_of_a_real_registry_comes_with_its_layers_and_config(plain, store):
    """Layers in order, deletions as overlay's marks, the config as data; nothing is left in the downloads."""
    pushed = image(BASE, TOP, config=CONFIG)
    plain.push("team/tool", "v1", pushed)
    seen = []
    source = sources.find(f"registry:{plain.address}/team/tool:v1")

    identity = await source.identify()
    fetched = await source.fetch(store, lambda *said: seen.append(said))

    assert identity == sources.image_identity(pushed.config_digest)
    assert files(store, fetched) == [["etc", "etc/gone", "etc/os", "srv", "srv/old"], ["etc", "etc/gone", "srv", "srv/new"]]
    top = store.layer(fetched.adds[1]).tree
    assert stat.S_ISCHR((top / "etc/gone").stat().st_mode)
    assert os.getxattr(top / "srv", f"{store.marks}.overlay.opaque") == b"y"
    assert (fetched.config.env, fetched.config.workdir, fetched.config.user) == ({"A": "b"}, "/srv", "1000")
    assert (fetched.config.entrypoint, fetched.config.command, fetched.config.labels) == (("/bin/sh",), ("-c", "true"), {"k": "v"})
    total = sum(len(pushed.blobs[digest]) for digest in pushed.layer_digests)
    pulled = [said[1:] for said in seen if said[0].startswith("pull")]
    assert pulled == sorted(pulled) and {of for _, of in pulled} == {total}
    assert seen[-1][1] == seen[-1][2]
    assert leftovers(store) == []


async def test_a_list_of_images_gives_the_one_for_this_machine(plain, store):
    ours, other = image(BASE), image(TOP, architecture="s390x")
    plain.push("many", "ours", ours)
    plain.push("many", "other", other)
    plain.push_index(
        "many", "latest", index((other, {"os": "linux", "architecture": "s390x"}), (ours, {"os": "linux", "architecture": MACHINE}))
    )

    assert await named(f"{plain.address}/many").identify() == sources.image_identity(ours.config_digest)
    there = await named(f"{plain.address}/many", platform=Platform("s390x")).identify()
    assert there == sources.image_identity(other.config_digest)
    with pytest.raises(StageFailed, match="none for linux/riscv64"):
        await named(f"{plain.address}/many", platform=Platform("riscv64")).identify()


async def test_a_single_image_of_another_platform_is_refused(plain, store):
    plain.push("foreign", "latest", image(BASE, architecture="s390x"))
    with pytest.raises(StageFailed, match="s390x"):
        await named(f"{plain.address}/foreign").fetch(store, quiet)


async def test_an_image_by_digest_is_that_image_whatever_the_tag_says(plain, store):
    first, second = image(BASE), image(TOP)
    plain.push("pinned", "latest", first)
    plain.push("pinned", "latest", second)
    assert await named(f"{plain.address}/pinned@{first.digest}").identify() == sources.image_identity(first.config_digest)
    assert await named(f"{plain.address}/pinned").identify() == sources.image_identity(second.config_digest)


async def test_what_was_identified_is_what_is_fetched_though_the_tag_moves(plain, store):
    first, second = image(BASE), image(TOP)
    plain.push("moving", "latest", first)
    source = named(f"{plain.address}/moving")
    await source.identify()
    plain.push("moving", "latest", second)
    assert "etc/os" in files(store, await source.fetch(store, quiet))[0]


async def test_a_tag_that_still_stands_for_the_same_image_is_only_asked_about(rogue):
    """The second question reads nothing; a tag that has moved is found to have."""
    first, second = image(BASE), image(TOP)
    rogue.hold("a", "latest", first)
    for _ in range(2):
        assert await named(f"{rogue.address}/a").identify() == sources.image_identity(first.config_digest)
    assert [method for method, _, _ in rogue.requests] == ["GET", "HEAD"]
    rogue.hold("a", "latest", second)
    assert await named(f"{rogue.address}/a").identify() == sources.image_identity(second.config_digest)


async def test_an_image_by_digest_is_asked_about_once(rogue):
    made = image(BASE)
    rogue.hold("a", "latest", made)
    for _ in range(3):
        assert await named(f"{rogue.address}/a@{made.digest}").identify() == sources.image_identity(made.config_digest)
    assert rogue.count(f"/v2/a/manifests/{made.digest}") == 1


async def test_what_the_registry_does_not_have_is_said_at_once(plain):
    for name in ("missing", "missing:tag", "missing@sha256:" + "0" * 64):
        with pytest.raises(StageFailed, match="has no"):
            await named(f"{plain.address}/{name}").identify()


async def test_a_registry_with_a_password_is_read_with_the_credentials_of_the_files(tmp_path, store, monkeypatch):
    """With them it reads, without and with wrong ones it says what to do; no secret is in what it says (A15)."""
    with registries.registry(tmp_path / "registry", auth=registries.htpasswd(tmp_path / "auth")) as server:
        server.authorization = basic()
        server.push("secret", "latest", image(BASE))
        with pytest.raises(StageFailed, match=r"no credentials for it.*REGISTRY_AUTH_FILE"):
            await named(f"{server.address}/secret").identify()
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "wrong.json", server.address, password="hunter2")))
        with pytest.raises(StageFailed, match="not taken") as said:
            await named(f"{server.address}/secret").identify()
        assert "hunter2" not in str(said.value)
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "right.json", server.address)))
        fetched = await named(f"{server.address}/secret").fetch(store, quiet)
        assert "etc/os" in files(store, fetched)[0]


async def test_a_registry_with_tokens_is_read_with_one_for_this_repository_only(tmp_path, store, monkeypatch):
    """The service sees the password, the registry only the token; the token is for reading this one repository."""
    with registries.token_service(tmp_path / "tokens") as service:
        with registries.registry(tmp_path / "registry", auth=service.section()) as server:
            server.authorization = "Bearer " + service.token(["repository:team/tool:pull,push"])
            server.push("team/tool", "latest", image(BASE, TOP))
            with pytest.raises(StageFailed, match="no token for us"):
                await named(f"{server.address}/team/tool").identify()
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "auth.json", server.address)))
            service.asked.clear()

            fetched = await named(f"{server.address}/team/tool").fetch(store, quiet)

            assert len(fetched.adds) == 2
            assert service.asked[0] == ("GET", {"service": ["tests-registry"], "scope": ["repository:team/tool:pull"]}, basic())
            assert len(service.asked) == 2, "one token for identifying and one for fetching, however many blobs"


async def test_a_refresh_token_is_exchanged(tmp_path, store, monkeypatch):
    with registries.token_service(tmp_path / "tokens") as service:
        with registries.registry(tmp_path / "registry", auth=service.section()) as server:
            server.authorization = "Bearer " + service.token(["repository:tool:pull,push"])
            server.push("tool", "latest", image(BASE))
            path = auth_file(tmp_path / "auth.json", server.address, "<token>", "", identitytoken=service.refresh_token)
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(path))
            await named(f"{server.address}/tool").identify()
            method, form, authorization = service.asked[-1]
            assert (method, form["grant_type"], authorization) == ("POST", ["refresh_token"], None)


async def test_tls_is_spoken_where_the_registry_speaks_it_and_its_certificate_must_be_trusted(tmp_path, monkeypatch):
    make_certificate(tmp_path, "127.0.0.1")
    with registries.registry(tmp_path / "registry", tls=tmp_path) as server:
        with pytest.raises(StageFailed, match="certificate is not trusted"):
            await named(f"{server.address}/missing").identify()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        with pytest.raises(StageFailed, match="has no"):
            await named(f"{server.address}/missing").identify()


async def test_layers_that_another_image_brought_are_not_fetched_again(rogue, store):
    """Two images with one base: the base's blob goes over the wire once, and the store has it once."""
    first, second = image(BASE), image(BASE, TOP)
    rogue.hold("first", "latest", first)
    rogue.hold("second", "latest", second)
    one = await named(f"{rogue.address}/first").fetch(store, quiet)
    two = await named(f"{rogue.address}/second").fetch(store, quiet)
    assert one.adds[0] == two.adds[0]
    assert rogue.count(f"/v2/second/blobs/{second.layer_digests[0]}") == 0


async def test_a_layer_that_comes_twice_is_fetched_once_and_counts_where_it_comes_last(rogue, store):
    """Overlay takes no directory twice; and a layer with nothing in it is no layer."""
    made = image(BASE, TOP, layer({}), BASE)
    rogue.hold("a", "latest", made)
    first = await named(f"{rogue.address}/a").fetch(store, quiet)
    again = await named(f"{rogue.address}/a").fetch(store, quiet)
    assert [names[0:2] for names in files(store, first)] == [["etc", "etc/gone"], ["etc", "etc/gone"]]
    assert "srv/new" in files(store, first)[0] and "etc/os" in files(store, first)[1]
    assert again.adds == first.adds
    assert rogue.count(path_of(made)) == 1


# ---- X20 and ATK9: one that misbehaves ----


def big(megabytes=3, seed=b"x"):
    """A layer of bytes that compress badly enough to take a while."""
    return layer({"big": random.Random(seed).randbytes(megabytes << 20)})


@pytest.fixture
def held(rogue):
    made = image(big())
    rogue.hold("a", "latest", made)
    return made


def path_of(made, at=0):
    return f"/v2/a/blobs/{made.layer_digests[at]}"


MANIFEST = "/v2/a/manifests/latest"


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
async def test_x20_an_error_that_passes_is_waited_out(rogue, held, store, code):
    rogue.fail(MANIFEST, status(code), status(code))
    rogue.fail(path_of(held), status(code), status(code))
    await named(f"{rogue.address}/a").fetch(store, quiet)
    assert (rogue.count(MANIFEST), rogue.count(path_of(held))) == (3, 3)


async def test_x20_an_error_that_stays_is_told_after_a_bounded_number_of_attempts(rogue, held, store):
    rogue.always[MANIFEST] = status(503)
    with pytest.raises(StageUnavailable, match="503") as told:
        await named(f"{rogue.address}/a").identify()
    assert told.value.retryable
    assert rogue.count(MANIFEST) == QUICK.attempts


async def test_x20_retry_after_is_obeyed_and_a_long_one_is_told_instead(rogue, held, store):
    rogue.fail(MANIFEST, status(429, Retry_After="1"))
    began = time.monotonic()
    await named(f"{rogue.address}/a").identify()
    assert 1.0 <= time.monotonic() - began < 4
    forget()
    rogue.fail(MANIFEST, status(429, Retry_After="3600"))
    with pytest.raises(StageUnavailable, match="asks to wait 3600 s"):
        await named(f"{rogue.address}/a").identify()
    assert rogue.count(MANIFEST) == 3, "it was not asked again"


async def test_x20_a_cut_download_goes_on_where_it_ended(rogue, held, store):
    """Three cuts, and every byte of the blob went over the wire once."""
    path = path_of(held)
    size = len(held.blobs[held.layer_digests[0]])
    rogue.fail(path, cut_after(1_000_000), cut_after(500_000), cut_after(700_000))
    await named(f"{rogue.address}/a").fetch(store, quiet)
    assert rogue.count(path) == 4
    # What the last packets of a cut connection held may be lost with it.
    assert size <= rogue.served[path] < size + 3 * 300_000
    assert [headers.get("Range") is not None for _, asked, headers in rogue.requests if asked == path] == [False, True, True, True]


async def test_x20_a_download_goes_on_in_the_next_attempt_of_the_next_process(rogue, held, store):
    """What arrived before the registry went away for good is not asked for again when it is back."""
    path = path_of(held)
    size = len(held.blobs[held.layer_digests[0]])
    rogue.fail(path, cut_after(2_000_000), *[status(500)] * QUICK.attempts)
    with pytest.raises(StageUnavailable):
        await named(f"{rogue.address}/a").fetch(store, quiet)
    (partial,) = leftovers(store)
    kept = (store.downloads / partial).stat().st_size
    assert kept > 1_500_000
    rogue.faults.clear()
    before = rogue.served[path]

    code = (
        "import asyncio, sys; from pathlib import Path; from untax.layers import sources; from untax.layers.store import LayerStore\n"
        f"store = LayerStore(Path({str(store.root)!r}), marks={store.marks!r})\n"
        f"asyncio.run(sources.find('registry:{rogue.address}/a').fetch(store, lambda *said: None))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(sources.__file__).parents[3])}
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], env=env, capture_output=True, timeout=60)

    assert done.returncode == 0, done.stderr.decode()
    assert rogue.served[path] - before == size - kept
    assert leftovers(store) == []


async def test_x20_a_server_that_cannot_go_on_in_the_middle_starts_over(rogue, held, store):
    rogue.has_ranges = False
    rogue.fail(path_of(held), cut_after(1_000_000))
    await named(f"{rogue.address}/a").fetch(store, quiet)
    assert rogue.count(path_of(held)) == 2


async def test_x20_a_damaged_remainder_of_an_earlier_download_is_started_over(rogue, held, store):
    """A crash of the machine may leave a file of zeros: the digest tells, and the blob is fetched whole."""
    digest = held.layer_digests[0]
    (store.downloads / digest.replace(":", "-")).write_bytes(bytes(1_000_000))
    await named(f"{rogue.address}/a").fetch(store, quiet)
    assert rogue.count(path_of(held)) == 2


@pytest.mark.parametrize("fault", [silent(20), dripping(0.1), dripping(0.1, head=True)], ids=["silent", "dripping", "dripping-head"])
async def test_x20_a_server_that_is_too_slow_is_given_up_on_in_bounded_time(rogue, held, store, fault):
    rogue.always[path_of(held)] = fault
    began = time.monotonic()
    with pytest.raises(StageUnavailable):
        await named(f"{rogue.address}/a", patience=replace(QUICK, attempts=2, answer_s=1)).fetch(store, quiet)
    assert time.monotonic() - began < 10


async def test_x20_a_handshake_that_never_ends_is_given_up_on_too():
    """A TLS record announced at full length and sent a byte at a time."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def drip(one):
            with contextlib.suppress(OSError), one:
                one.sendall(b"\x16\x03\x03\x40\x00")
                while True:
                    one.sendall(b"\x02")
                    time.sleep(0.05)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=drip, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(StageUnavailable, match="in time"):
            address = f"https://127.0.0.1:{listening.getsockname()[1]}"
            await named(f"{address}/a", patience=replace(QUICK, attempts=2, answer_s=0.5)).identify()
        assert time.monotonic() - began < 5
        listening.shutdown(socket.SHUT_RDWR)


async def test_x20_a_blob_that_is_always_cut_short_is_told(rogue, held, store):
    rogue.always[path_of(held)] = cut_after(0)
    with pytest.raises(StageUnavailable, match="broke off"):
        await named(f"{rogue.address}/a").fetch(store, quiet)
    assert rogue.count(path_of(held)) == QUICK.attempts


async def test_x20_other_bytes_than_promised_are_refused(rogue, held, store):
    """Of the blob, of the config and of the manifest; nothing of it stays."""
    size = len(held.blobs[held.layer_digests[0]])
    rogue.always[path_of(held)] = instead(bytes(size))
    with pytest.raises(StageFailed, match="other bytes"):
        await named(f"{rogue.address}/a").fetch(store, quiet)
    rogue.always[f"/v2/a/blobs/{held.config_digest}"] = instead(b"{}")
    with pytest.raises(StageFailed, match="promised"):
        await named(f"{rogue.address}/a").fetch(store, quiet)
    forget()
    rogue.always[f"/v2/a/manifests/{held.digest}"] = instead(held.manifest + b" ")
    with pytest.raises(StageFailed, match="not those of"):
        await named(f"{rogue.address}/a@{held.digest}").identify()
    rogue.always[MANIFEST] = status(200, Docker_Content_Digest=held.digest)
    with pytest.raises(StageFailed, match="not those of"):
        await named(f"{rogue.address}/a").identify()
    assert leftovers(store) == []
    assert store.layers() == []


async def test_x20_a_blob_without_end_is_refused_at_its_promised_size(rogue, held, store):
    size = len(held.blobs[held.layer_digests[0]])
    rogue.always[path_of(held)] = endless
    with pytest.raises(StageFailed, match="more than"):
        await named(f"{rogue.address}/a").fetch(store, quiet)
    assert rogue.served[path_of(held)] < size + (16 << 20)
    forget()
    rogue.always[MANIFEST] = endless
    with pytest.raises(StageFailed, match="more than"):
        await named(f"{rogue.address}/a").identify()


async def test_a_layer_that_unpacks_to_something_else_than_its_config_says_is_refused(rogue, store):
    made, other = image(BASE), image(TOP)
    document = json.loads(made.manifest)
    document["layers"] = json.loads(other.manifest)["layers"]
    made.manifest = json.dumps(document).encode()
    made.blobs |= other.blobs
    rogue.hold("a", "latest", made)
    with pytest.raises(StageFailed, match="diff_id"):
        await named(f"{rogue.address}/a").fetch(store, quiet)
    assert store.layers() == []
    assert leftovers(store) == []


async def test_blobs_come_several_at_a_time_and_no_more_than_four(rogue, store):
    made = image(*(layer({f"f{n}": bytes([n])}) for n in range(12)))
    rogue.hold("a", "latest", made)
    for at in range(12):

        def slow(request):
            time.sleep(0.1)
            return False

        rogue.fail(path_of(made, at), slow)
    fetched = await named(f"{rogue.address}/a").fetch(store, quiet)
    assert len(fetched.adds) == 12
    assert 2 <= rogue.most_running <= 4


async def test_one_blob_that_fails_ends_the_others_and_is_what_is_told(rogue, store):
    made = image(big(1, b"a"), big(1, b"b"))
    rogue.hold("a", "latest", made)
    rogue.always[path_of(made, 0)] = silent(30)
    rogue.always[path_of(made, 1)] = status(403)
    began = time.monotonic()
    with pytest.raises(StageFailed, match="403"):
        await named(f"{rogue.address}/a", patience=replace(QUICK, stall_s=30, answer_s=30)).fetch(store, quiet)
    assert time.monotonic() - began < 5


async def test_a_cancelled_fetch_ends_at_once_and_leaves_no_thread(rogue, held, store):
    rogue.always[path_of(held)] = silent(60)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("untax-")}
    running = asyncio.create_task(named(f"{rogue.address}/a", patience=Patience()).fetch(store, quiet))
    while not rogue.count(path_of(held)):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < 2
    while {thread for thread in threading.enumerate() if thread.name.startswith("untax-")} - before:
        assert time.monotonic() - began < 5
        await asyncio.sleep(0.01)


async def test_two_fetches_of_one_image_bring_each_blob_once(rogue, held, store):
    """Also without the single flight above us: the second waits for the file and goes on with what is there."""

    def slow(request):
        time.sleep(0.3)
        return False

    rogue.fail(path_of(held), slow)
    one, two = await asyncio.gather(*(named(f"{rogue.address}/a").fetch(store, quiet) for _ in range(2)))
    assert one.adds == two.adds
    assert rogue.served[path_of(held)] == len(held.blobs[held.layer_digests[0]])


async def test_a_full_disk_is_told_and_nothing_of_the_download_stays(rogue, held, store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # Python ignores the signal: writing fails with EFBIG
    try:
        with pytest.raises(StageUnavailable, match="cannot keep"):
            await named(f"{rogue.address}/a").fetch(store, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(store) == []


# ---- where connections go, and what they carry ----


async def test_a_redirect_to_another_host_does_not_get_the_credentials(rogue, held, store, tmp_path, monkeypatch):
    """Blobs often lie elsewhere: the registry sees who asks, the other place does not."""
    with registries.rogue("127.0.0.2") as elsewhere:
        path = path_of(held)
        elsewhere.contents["/cdn"] = ("application/octet-stream", held.blobs[held.layer_digests[0]])

        def challenge(request):
            if request.handler.headers.get("Authorization") == basic():
                return False
            request.answer(401, WWW_Authenticate='Basic realm="tests"')
            return True

        def away(request):
            assert request.handler.headers.get("Authorization") == basic()
            request.answer(307, Location=f"http://{elsewhere.address}/cdn?signature=secret")
            return True

        for each in (MANIFEST, f"/v2/a/blobs/{held.config_digest}"):
            rogue.always[each] = challenge
        rogue.always[path] = lambda request: challenge(request) or away(request)
        elsewhere.contents["/cdn?signature=secret"] = elsewhere.contents["/cdn"]
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "auth.json", rogue.address)))

        await named(f"{rogue.address}/a").fetch(store, quiet)

        assert [headers.get("Authorization") for _, _, headers in elsewhere.requests] == [None]


async def test_a_redirect_on_the_same_host_keeps_them(rogue, held, store, tmp_path, monkeypatch):
    rogue.contents["/moved"] = rogue.contents[MANIFEST]
    rogue.always[MANIFEST] = lambda request: (
        (
            request.answer(307, Location="/moved")
            if request.handler.headers.get("Authorization")
            else request.answer(401, WWW_Authenticate="Basic realm=x")
        )
        or True
    )
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "auth.json", rogue.address)))
    await named(f"{rogue.address}/a").identify()
    assert rogue.requests[-1][1:][0] == "/moved"
    assert rogue.requests[-1][2]["Authorization"] == basic()


async def test_where_a_redirect_leads_cannot_ask_for_the_credentials(rogue, held, tmp_path, monkeypatch):
    """A challenge counts only when the registry itself makes it: the other place would name a realm of its own."""
    with registries.rogue("127.0.0.2") as elsewhere:
        elsewhere.always["/x"] = status(401, WWW_Authenticate=f'Bearer realm="http://{elsewhere.address}/steal"')
        rogue.always[MANIFEST] = status(307, Location=f"http://{elsewhere.address}/x")
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "auth.json", rogue.address)))
        with pytest.raises(StageFailed, match="wants to know who asks"):
            await named(f"{rogue.address}/a").identify()
        assert [path for _, path, _ in elsewhere.requests] == ["/x"]


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/", "http://registry.test/x", "http://u:p@127.0.0.1/", "http://[", "", "//"]
)
async def test_a_redirect_to_what_must_not_be_opened_is_refused(rogue, target):
    rogue.always[MANIFEST] = status(302, Location=target or " ")
    with pytest.raises(StageFailed):
        await named(f"{rogue.address}/a").identify()


async def test_redirects_in_a_circle_end(rogue):
    rogue.always[MANIFEST] = status(302, Location=MANIFEST)
    with pytest.raises(StageFailed, match="redirects"):
        await named(f"{rogue.address}/a").identify()
    assert rogue.count(MANIFEST) == 6


async def test_a_protected_registry_cannot_send_us_to_an_open_connection(tmp_path, monkeypatch):
    """Not even to one on this machine: that would let it ask our own services things."""
    both = make_certificate(tmp_path, "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with registries.rogue("127.0.0.1") as victim, registries.rogue(tls=both) as server:
        server.always[MANIFEST] = status(302, Location=f"http://{victim.address}/")
        with pytest.raises(StageFailed, match="neither private nor authentic"):
            await named(f"{server.address}/a").identify()
        assert victim.requests == []


async def test_another_machine_is_never_asked_in_the_open_unless_that_is_written(monkeypatch):
    """Nothing is sent: the addresses are looked at before a connection is made."""
    opened = []
    monkeypatch.setattr(
        _http, "send", lambda connect, method, url, *rest: opened.append(url) or (_ for _ in ()).throw(_http.Transient("no network"))
    )
    with pytest.raises(StageUnavailable):
        await named("registry.test/a").identify()
    with pytest.raises(StageUnavailable):
        await named("http://registry.test/a").identify()
    assert {url.partition(":")[0] for url in opened[: QUICK.attempts]} == {"https"}
    assert {url.partition(":")[0] for url in opened[QUICK.attempts :]} == {"http"}


async def test_a_proxy_is_used_and_sees_only_where_the_connection_goes(tmp_path, monkeypatch):
    """HTTPS_PROXY leads to a registry whose name only the proxy knows; the registry's certificate is checked against that name."""
    made = image(BASE)
    subprocess.run(
        [
            *[
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=registry.test",
                "-addext",
                "subjectAltName=DNS:registry.test",
            ],
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    (tmp_path / "both.pem").write_bytes((tmp_path / "key.pem").read_bytes() + (tmp_path / "cert.pem").read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with registries.rogue(tls=tmp_path / "both.pem") as server, registries.connect_proxy(server.address) as proxy:
        server.hold("a", "latest", made)
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:{quote('p@ss')}@{proxy.address}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert await named("registry.test/a").identify() == sources.image_identity(made.config_digest)
        with pytest.raises(StageFailed, match="certificate"):
            await named("other.test/a").identify()
    assert proxy.asked[0] == ("CONNECT registry.test:443", basic("me", "p@ss"))


async def test_a_registry_that_is_not_there_is_told_as_such():
    port = registries._free_port()
    with pytest.raises(StageUnavailable, match="refused"):
        await named(f"127.0.0.1:{port}/a").identify()


async def test_t23_what_a_server_says_cannot_command_a_terminal(rogue):
    rogue.always[MANIFEST] = lambda request: request.answer(403, b"\x1b]0;owned\x07\x1b[2J\nforged line") or True
    with pytest.raises(StageFailed, match="403") as told:
        await named(f"{rogue.address}/a").identify()
    assert "\x1b" not in str(told.value) and "\n" not in str(told.value)


async def test_a_token_realm_in_the_open_is_not_asked_by_a_protected_registry(tmp_path, monkeypatch):
    both = make_certificate(tmp_path, "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with registries.rogue("127.0.0.1") as realm, registries.rogue(tls=both) as server:
        server.always[MANIFEST] = status(401, WWW_Authenticate=f'Bearer realm="http://{realm.address}/token"')
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth_file(tmp_path / "auth.json", server.address)))
        with pytest.raises(StageFailed, match="neither private nor authentic"):
            await named(f"{server.address}/a").identify()
        assert realm.requests == []


async def test_a_token_that_has_run_out_is_had_again_in_the_middle(rogue, held, store):
    """The registry takes each token for two requests; the fetch needs more."""
    taken = {}

    def guarded(request):
        token = request.handler.headers.get("Authorization", "")
        taken[token] = taken.get(token, 0) + 1
        if token.startswith("Bearer t") and taken[token] <= 1:
            return False
        request.answer(401, WWW_Authenticate=f'Bearer realm="http://{rogue.address}/token",service="s"')
        return True

    tokens = iter(range(100))
    for path in (MANIFEST, f"/v2/a/blobs/{held.config_digest}", path_of(held)):
        rogue.always[path] = guarded
    realm = "/token?service=s&scope=repository%3Aa%3Apull"
    rogue.always[realm] = lambda request: request.answer(200, json.dumps({"token": f"t{next(tokens)}"}).encode()) or True
    await named(f"{rogue.address}/a").fetch(store, quiet)
    assert rogue.count(realm) == 3
