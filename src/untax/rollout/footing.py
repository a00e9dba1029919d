"""What a workload stands on with one engine: its spec, and what is still to be brought before its first action.

The software is the same on every substrate; how it gets there depends on what the engine can do. Where there are layers, packages are
a stage; where commands see the host's own files, they are a directory there; elsewhere they go over the channel, which is left out of
the account, and the record says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from untax.core.spec import EnvSpec, Limits, Network, Repo
from untax.core.substrate import Seeing
from untax.engine import Engine
from untax.layers.deps import WHEELS
from untax.rollout.material import Material, Repository
from untax.rollout.workload import Action, Workload

PACKAGES = "/opt/untax-packages"
"""Where sandboxes with files of their own have a workload's packages."""
UPLOADED = "/tmp/untax-packages"
"""Where those have them that get them over the channel: their user may write there, whoever that is."""


@dataclass(frozen=True, slots=True)
class Footing:
    spec: EnvSpec
    setup: tuple[Action, ...] = ()
    upload: Path | None = None
    """Packages that go over the channel."""
    software: Mapping[str, object] = field(default_factory=dict)
    """For the record: image, repository, where the packages are."""


def footing(
    engine: Engine,
    workload: Workload,
    material: Material,
    *,
    is_warm: bool = False,
    server: str | None = None,
    image: str | None = None,
    limits: Limits | None = None,
) -> Footing:
    """Everything that is needed is brought to this machine; nothing is leased yet.

    `server` is where the git server listens, for workloads that clone. A warm trial has the repository in place.
    """
    env = dict(workload.env)
    setup_steps: tuple[str, ...] = ()
    upload: Path | None = None
    where = "none"
    if workload.packages:
        where, directory = "stage", PACKAGES
        if isinstance(engine.substrate, Seeing) and engine.substrate.sees_host_files:
            where, directory = "host", str(material.packages(workload.packages))
        elif engine.warehouse.has_stages:
            setup_steps = (install_step(workload.packages),)
        else:
            where, directory, upload = "uploaded", UPLOADED, material.packages(workload.packages)
        env["PYTHONPATH"] = ":".join(filter(None, (env.get("PYTHONPATH"), directory)))
    repository = material.repository(workload.source) if workload.source is not None else None
    is_there = workload.preloaded or is_warm
    network: Network = workload.network  # type: ignore[assignment]
    if repository is not None and not is_there:
        assert server is not None, "a workload that clones needs a server to clone from"
        env |= {"UNTAX_REPO_URL": f"http://{server}/{repository.name}", "UNTAX_REPO_COMMIT": repository.commit}
        network = _with(network, server)
    spec = EnvSpec(
        image=image or workload.image,
        repo=Repo(repository.path, repository.commit) if repository is not None and is_there else None,
        setup=setup_steps,
        env=env,
        limits=limits or workload.limits,
        network=network,
        isolation=engine.substrate.isolation,
    )
    software = {"image": spec.image, "repo": _about(repository, is_there), "packages": where, "workload": workload.digest()}
    return Footing(spec, () if is_there else workload.setup, upload, software)


def install_step(packages: Sequence[str]) -> str:
    """A set-up command that unpacks the wheels of these packages; it needs a Python, and no pip."""
    names = " ".join(
        shlex.quote(f"{WHEELS}/{package.partition('==')[0].replace('-', '_')}-{package.partition('==')[2]}-") for package in packages
    )
    return f'mkdir -p {PACKAGES} && for wheel in {names}; do python3 -m zipfile -e "$wheel"*.whl {PACKAGES} || exit 1; done && chmod -R a+rX {PACKAGES} && python3 -m compileall -q {PACKAGES}'


def _with(network: Network, server: str) -> Network:
    if isinstance(network, tuple):
        return (*network, server)
    # "all" leaves out the host's own addresses, so the server is named beside everything else.
    return (server,) if network == "none" else ("*:*", server)


def _about(repository: Repository | None, is_there: bool) -> dict[str, object] | None:
    if repository is None:
        return None
    return {"url": repository.url, "ref": repository.ref, "commit": repository.commit, "origin": repository.origin, "preloaded": is_there}
