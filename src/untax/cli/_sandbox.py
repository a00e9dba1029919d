"""The options that describe a sandbox, shared by the commands that make one."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import untax
from untax import substrates
from untax.cli._progress import Progress
from untax.core.errors import UsageError
from untax.core.spec import ISOLATION_LEVELS
from untax.leases import usual_isolation
from untax.leasing import Leasing


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the sandbox")
    group.add_argument(
        "--substrate",
        default="namespace",
        choices=(*substrates.names(), *substrates.HOSTED, "auto"),
        help="how it is run; auto: whatever suits best here (default: %(default)s)",
    )
    group.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the substrate's own, as engine=podman; repeatable"
    )
    group.add_argument("--image", default="host", help="what it stands on: host, or dir:PATH (default: %(default)s)")
    group.add_argument("--isolation", choices=ISOLATION_LEVELS, help="weakest boundary accepted (default: the substrate's own)")
    group.add_argument(
        "--network", action="append", metavar="POLICY", help="none, all, or HOST:PORT that may be reached; repeatable (default: none)"
    )
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable; NAME alone takes it from here; repeatable"
    )
    group.add_argument("--workdir", help="working directory inside")
    group.add_argument("--user", help="who the command runs as inside")
    for limit in dataclasses.fields(untax.Limits):
        kind = float if limit.name == "cpus" else int
        option = "--" + limit.name.replace("_", "-")
        group.add_argument(option, type=kind, metavar="N", help=f"limit (default: {limit.default})")
    group.add_argument("--limits", choices=("warn", "strict"), default="warn", help="what to do about a limit this host cannot enforce")
    group.add_argument("--state-dir", metavar="DIR", help="where the engine keeps its state")
    group.add_argument(
        "--connect", metavar="URL", help="lease it from a server, unix:PATH, which has its own --substrate, --limits and --state-dir"
    )


def spec_of(arguments: argparse.Namespace, engine: Leasing) -> untax.EnvSpec:
    given = {
        limit.name: getattr(arguments, limit.name)
        for limit in dataclasses.fields(untax.Limits)
        if getattr(arguments, limit.name) is not None
    }
    return untax.EnvSpec(
        image=arguments.image,
        env=_variables(arguments.env),
        workdir=arguments.workdir,
        user=arguments.user,
        limits=untax.Limits(**given),
        network=_network(arguments.network),
        isolation=arguments.isolation or usual_isolation(engine.offer),
    )


async def put_in_place(engine: Leasing, spec: untax.EnvSpec) -> None:
    """Show how far it is when a substrate takes this machine's own software in: for the first time that is minutes of silence otherwise."""
    if isinstance(engine, untax.Engine) and engine.importing is not None and spec.image == "host":
        with Progress() as progress:
            prepared = await engine.prepare(spec, progress=progress)
        if prepared.pin is not None:
            prepared.pin.close()


def engine_of(arguments: argparse.Namespace) -> Leasing:
    if arguments.connect is not None:
        if arguments.state_dir is not None:
            raise UsageError("--state-dir is the server's own: leave it out with --connect")
        if arguments.option:
            raise UsageError("--option is for a substrate of this process: with --connect it is the server's")
        return untax.connect(arguments.connect)
    return untax.Engine(arguments.substrate, state_dir=arguments.state_dir, limits=arguments.limits, **_options(arguments.option))


def _options(given: list[str]) -> dict[str, Any]:
    """Numbers are numbers, anything else is text; whether the substrate has such an option, it says itself."""
    options: dict[str, Any] = {}
    for item in given:
        name, has_value, value = item.partition("=")
        if not has_value or not name.isidentifier() or name in ("state_dir", "limits", "substrate"):
            raise UsageError(f"--option {item}: write NAME=VALUE")
        try:
            options[name] = float(value) if "." in value else int(value)
        except ValueError:
            options[name] = value
    return options


def _network(given: list[str] | None) -> Any:
    if not given:
        return "none"
    if len(given) == 1 and given[0] in ("none", "all"):
        return given[0]
    return tuple(given)


def _variables(given: list[str]) -> dict[str, str]:
    import os

    variables = {}
    for item in given:
        name, has_value, value = item.partition("=")
        if not has_value:
            if name not in os.environ:
                raise UsageError(f"--env {name}: there is no such variable here; write {name}=VALUE")
            value = os.environ[name]
        variables[name] = value
    return variables
