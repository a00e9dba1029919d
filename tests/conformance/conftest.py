"""One engine for each substrate this machine has, kept for the whole run; a fresh sandbox for each check.

`served` is the engine of `untax serve` in another process, `hosted` the same over HTTP, `fleet` those of two Ray nodes, `fleet-tls` the same without the socket of the
caller's own node. `fake` has files and layers but no commands. The adapters of providers run against such a server as well:
ours as itself, E2B's through its own SDK; Daytona's and Modal's through their SDKs against facades of their APIs.
"""

import functools
import itertools
import os
from pathlib import Path

import pytest
from tests import hosted, kubehost, raycluster
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_image, tools_directory
from tests.serving import ended, started
from tests.sshd import sshd  # noqa: F401
from tests.variants import VARIANTS, Variant, options_of

import untax
from untax import substrates
from untax.core.substrate import Priced
from untax.testing import LayeredFake

SLOW_S = 0.1
# Modules whose checks leave nothing behind but files in the working directory: they share a sandbox where one is slow to come by.
SHARING = {
    *("test_bad_input", "test_commands", "test_files", "test_output"),
    *("test_search_and_edit", "test_sessions", "test_streams", "test_trees"),
}
FAKE = Variant("fake")
SERVED = Variant("namespace", is_served=True)
HOSTED = Variant("namespace", is_hosted=True)
FLEET = Variant("namespace", is_fleet=True)
FLEET_TLS = Variant("namespace", is_fleet=True, is_afar=True)
PROVIDERS = [Variant("hosted:daytona"), Variant("hosted:e2b"), Variant("hosted:modal"), Variant("hosted:untax")]
HERE = Path(__file__).parent
EVERY = {path.stem for path in HERE.glob("test_*.py")}
# Bad input is refused before anything is sent, the network goes through the channel as everything does, and only `namespace` has layers.
MOST = EVERY - {"test_bad_input", "test_network", "test_snapshots"}
FEW = {"test_commands", "test_lifecycle", "test_sessions", "test_streams"}
# What the suite takes on the slow ones, and on those that differ from another only below the channel; UNTAX_CONFORMANCE=all has everything.
MODULES = {
    "fake": {"test_snapshots"},
    "served": {"test_lifecycle", "test_network", "test_sessions", "test_snapshots", "test_streams"},
    "hosted": {"test_lifecycle", "test_network", "test_sessions", "test_snapshots", "test_streams", "test_trees"},
    "fleet": {"test_lifecycle", "test_snapshots", "test_stages"},
    "fleet-tls": EVERY,
    "container-podman": MOST,
    "container-docker-runsc": {"test_sessions", "test_streams"},
    "gvisor": MOST,
    "hosted:daytona": {"test_commands", "test_lifecycle", "test_streams"},
    "hosted:e2b": {"test_commands", "test_lifecycle", "test_streams"},
    "hosted:modal": {"test_commands", "test_lifecycle", "test_streams"},
    "hosted:untax": {"test_commands", "test_environment", "test_lifecycle", "test_network", "test_streams"},
    "kubernetes": MOST,
    "ssh": MOST,
    "vm": FEW,  # emulated
}
# As an ordinary user: that a fleet can be one's at all. What its sandboxes can do is what a served engine's can; what others' can is asked as root.
ORDINARY = {"fleet": set(), "fleet-tls": {"test_lifecycle"}, "container-podman": FEW, "gvisor": FEW, "ssh": FEW}


@pytest.hookimpl
def pytest_collection_modifyitems(config, items):
    own = [item for item in items if item.path.parent == HERE]  # the hook is asked about every suite of the run
    _check_named(config, own)
    over = {item for item in own if _is_of_another_run(item) or _is_left_out(item)}
    config.hook.pytest_deselected(items=list(over))
    items[:] = [item for item in items if item not in over]


def _check_named(config, own):
    """A module named for a variant has something for it, or what is named would be taken for what is run. Of files that were collected whole."""
    whole = {item.path.stem for item in own} - {Path(arg.partition("::")[0]).stem for arg in config.args if "::" in arg}
    there = {(str(_variant_of(item)), item.path.stem) for item in own}
    named = {(variant, module) for chosen in (MODULES, ORDINARY) for variant, modules in chosen.items() for module in modules}
    if unknown := {module for _, module in named} - EVERY:
        raise pytest.UsageError(f"{__file__} names modules that are not there: {', '.join(sorted(unknown))}")
    if empty := sorted(f"{module} on {variant}" for variant, module in named - there if module in whole):
        raise pytest.UsageError(f"{__file__} names what no test is there for: {', '.join(empty)}")


def _is_of_another_run(item):
    """`scripts/run-tests` has fleets in a run beside the others: UNTAX_FLEETS=only, or =not here."""
    if not (which := os.environ.get("UNTAX_FLEETS")):
        return False
    variant = _variant_of(item)
    return (variant is not None and variant.is_fleet) != (which == "only")


def _is_left_out(item):
    modules = _modules_of(variant) if (variant := _variant_of(item)) is not None else None
    return modules is not None and item.path.stem not in modules


def _variant_of(item):
    return item.callspec.params.get("engine") if hasattr(item, "callspec") else None


def _modules_of(variant):
    """Those that run on it; None where all do."""
    if os.environ.get("UNTAX_CONFORMANCE") == "all" and variant != FAKE:
        return None
    return (MODULES if os.geteuid() == 0 else {**MODULES, **ORDINARY}).get(str(variant))


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session", params=[FAKE, *VARIANTS, SERVED, HOSTED, FLEET, FLEET_TLS, *PROVIDERS], ids=str)
def engine(request, _runner, tmp_path_factory):
    """Its `test_another` makes a second one of the same state: an engine over the same directory, a second client of the same server or fleet."""
    name = request.param.substrate
    if request.param == FAKE:
        yield from _on_fakes(_runner, tmp_path_factory.mktemp("state"))
        return
    if request.param.is_fleet:
        yield from _on_a_fleet(request, _runner, tmp_path_factory.mktemp("state"))
        return
    if name == "kubernetes":
        yield from _on_a_cluster(_runner, tmp_path_factory.mktemp("state"))
        return
    if name in ("hosted:daytona", "hosted:modal"):
        yield from _at_a_facade(_runner, tmp_path_factory.mktemp("state"), name)
        return
    if name in substrates.HOSTED:
        yield from _at_a_provider(_runner, tmp_path_factory.mktemp("state"), name)
        return
    if name == "vm" and os.geteuid() != 0:
        pytest.skip("vm: emulated machines are slow, so this suite has them as root only; tests/security/test_vm.py has some as anyone")
    options = options_of(request)
    if reason := substrates.load(name, **options).unavailable_reason():
        pytest.skip(f"{name}: {reason}")
    state = tmp_path_factory.mktemp("state") / name
    served = None
    if request.param.is_served:
        served = _runner.run(started(tmp_path_factory.mktemp("socket") / "s", state, substrate=name))
        another = functools.partial(untax.connect, served.url)
    elif request.param.is_hosted:
        served = _runner.run(hosted.started(state, "--allow-image", "*", "--allow-repo", "*", "--allow-network", "*", substrate=name))
        another = functools.partial(untax.connect, served.url, token=served.token)
    else:
        another = functools.partial(untax.Engine, name, state_dir=state, **options)
    yield from _running(_runner, another(), name, another)
    if served is not None:
        _runner.run(ended(served))


def _running(_runner, engine, name, another=None):
    _runner.run(engine.start())
    engine.test_substrate = name
    engine.test_another = another
    yield engine
    _runner.run(engine.aclose())


def _on_fakes(_runner, state_dir):
    """Each has a place of its own, as they count their sandboxes from nought."""
    counted = itertools.count()

    def another():
        return untax.Engine(LayeredFake(state_dir / f"fake-{next(counted)}"), state_dir=state_dir / "state")

    yield from _running(_runner, another(), "fake", another)


@pytest.fixture(scope="session")
def ray_nodes():
    with raycluster.RayCluster(2) as cluster:
        yield cluster


def _afar():
    class Afar(untax.Fleet):
        def _made(self, member, *, is_here):
            return super()._made(member, is_here=False)

    return Afar


def _on_a_fleet(request, _runner, state_dir):
    """The engines of two Ray nodes, as one."""
    if reason := raycluster.unavailable_reason():
        pytest.skip(reason)
    cluster = request.getfixturevalue("ray_nodes")
    another = functools.partial(_afar() if request.param.is_afar else untax.Fleet, cluster.address, name="conformance")
    for engine in _running(_runner, another(state_dir=state_dir / "{node}"), "namespace", another):
        assert any(node.is_here for node in engine._nodes.values()) is not request.param.is_afar
        yield engine


def _on_a_cluster(_runner, state_dir):
    """An engine on a cluster that is there for as long as the engine."""
    with kubehost.cluster() as cluster:
        substrate = substrates.load("kubernetes", state_dir=str(state_dir), kubeconfig=cluster.kubeconfig)
        engine = untax.Engine(kubehost.Ahead(substrate))
        yield from _running(_runner, engine, "kubernetes")


def _at_a_facade(_runner, state_dir, name):
    """An engine of sandboxes that a provider's SDK gets from a facade of the provider's API."""
    sdk = name.removeprefix("hosted:")
    facades = pytest.importorskip(f"tests.{sdk}_facade", reason=f"{sdk}: its SDK is not installed; pip install 'untax[test]'")
    facade = facades.facade(state_dir / "provider", f"dir:{tools_directory()}")
    provider = _runner.run(facade.__aenter__())
    with pytest.MonkeyPatch.context() as environment:
        for variable, value in facades.environment(provider).items():
            environment.setenv(variable, value)
        engine = untax.Engine(name, state_dir=state_dir / "own", **facades.options(provider))
        yield from _running(_runner, engine, name)
    _runner.run(facade.__aexit__(None, None, None))


def _at_a_provider(_runner, state_dir, name):
    """An engine of sandboxes that a server of ours has, in the provider's place."""
    if name == "hosted:e2b":
        pytest.importorskip("e2b", reason="e2b: its SDK is not installed; pip install 'untax[test]'")
    image = small_image("namespace")
    served = _runner.run(hosted.started(state_dir / "served", "--allow-image", "*", "--base-image", image))
    if name == "hosted:e2b":
        options = {
            "api_url": served.url,
            "sandbox_url": served.url,
            "api_key": served.token,
            "isolation": "namespace",
            "creates_per_s": 100.0,
        }
    else:
        options = {"url": served.url, "token": served.token}
    engine = untax.Engine(name, state_dir=state_dir / "own", **options)
    yield from _running(_runner, engine, name)
    _runner.run(ended(served))


@pytest.fixture
def spec(engine):
    """The same few megabytes everywhere; the weakest boundary that this substrate can claim."""
    name = engine.test_substrate
    return untax.EnvSpec(image=small_image(name), isolation=engine.offer.isolation)


@pytest.fixture
def is_slow(engine):
    """Whether a sandbox takes long enough that a check does with fewer of them."""
    substrate = substrates.load(engine.test_substrate)
    return isinstance(substrate, Priced) and substrate.typical.start_s >= SLOW_S


@pytest.fixture(scope="session")
def kept(engine, _runner):
    """A sandbox that checks share where one is dear; gone before its engine."""
    boxes = []
    yield boxes
    for box in boxes:
        _runner.run(box.release())


@pytest.fixture
async def box(request, engine, spec, is_slow):
    if not is_slow or request.path.stem not in SHARING:
        async with engine.lease(spec) as box:
            yield box
        return
    boxes = request.getfixturevalue("kept")
    if boxes and boxes[-1].ledger.verdict != "trusted":
        await boxes.pop().release()
    if not boxes:
        boxes.append(await engine.acquire(spec))
    yield boxes[-1]
    if boxes[-1].ledger.verdict == "trusted":
        await boxes[-1].shell("find . -mindepth 1 -maxdepth 1 -exec chmod -R u+rwX {} + -exec rm -rf {} +")


@pytest.fixture
def isolated(engine):
    """Skips a check that only a substrate with a boundary can pass: nothing destructive is ever run on the bare host."""
    if substrates.load(engine.test_substrate).isolation == "none":
        pytest.skip(f"the substrate {engine.test_substrate!r} has no boundary")
