"""Images and stages in the store: pull, build, list, show, export, gc.

The exit code is 1 when a recipe failed (a set-up command, a missing commit, a refused archive), 125 when its source or the store did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import untax
from untax.cli import EXIT_NO
from untax.cli._build_spec import Recipe, add_recipe_arguments, recipe_of
from untax.cli._progress import Progress, human, seconds
from untax.cli._terminal import neutralised, one_line
from untax.core.errors import StageFailed, UsageError
from untax.core.root import Root

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.chain import Chain
    from untax.layers.store import LayerStore, StageRecord

_SHORT = 12  # characters of a key that are shown; any beginning that is unique will do
_IMAGE_HELP = "as in registry:host/name:tag, docker:name, oci:/path, tar:/path, debian:bookworm, dir:/path, host"
_FORMATS = ("oci", "ext4", "squashfs", "erofs", "initramfs")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary)
        # Not to hide what was said before the action.
        made.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output")
        made.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log what happens on standard error")
        made.add_argument("--state-dir", metavar="DIR", help="where the engine keeps its state")
        made.set_defaults(act=act)
        return made

    pull = action("pull", _pull, "bring an image into the store, unless it is there")
    pull.add_argument("image", metavar="IMAGE", help=_IMAGE_HELP)

    build = action("build", _build, "put every stage of a spec into the store: image, repository, set-up")
    build.add_argument("file", nargs="?", metavar="SPEC.toml", help="image, repo, setup, workdir, network and limits in a file")
    build.add_argument("--image", help=f"what it begins with, {_IMAGE_HELP} (default: host)")
    add_recipe_arguments(build)

    action("list", _list, "what is in the store, and what it takes")

    show = action("show", _show, "all about one of them")
    show.add_argument("what", metavar="KEY|IMAGE", help="a key, or the beginning of one; or an image")

    export = action("export", _export, "write it to a file that something else can run")
    export.add_argument("what", metavar="KEY|IMAGE", help="a key, or the beginning of one; or an image, with what is put on it")
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="where to; - is standard output (oci, initramfs)")
    export.add_argument("--format", choices=_FORMATS, default="oci", help="(default: %(default)s)")
    export.add_argument("--name", metavar="NAME[:TAG]", help="oci: what engines call it (default: localhost/untax:KEY)")
    export.add_argument("--init", metavar="FILE", help="initramfs: the program that the kernel starts, as /init")
    export.add_argument("--free-mib", type=int, metavar="N", help="ext4: room to write (default: 64)")
    add_recipe_arguments(export)

    gc = action("gc", _gc, "remove what nobody needs, and more to keep within a budget")
    gc.add_argument(
        "--budget", metavar="SIZE", help="what all may take together, as in 20G; mirrors and caches go first, then the least useful stages"
    )
    gc.add_argument("--remove", action="append", default=[], metavar="KEY", help="this stage or saved snapshot in any case; repeatable")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def carry_out(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.act(arguments)
        return code
    except StageFailed as exc:
        if arguments.json:
            log = exc.log.decode(errors="replace")
            print(
                json.dumps(
                    {
                        "error": "StageFailed",
                        "stage": exc.stage,
                        "message": exc.message,
                        "log": log,
                        "retryable": False,
                        "exit_code": EXIT_NO,
                    }
                )
            )
        sys.stderr.buffer.write(neutralised(exc.log))
        print(f"untax: {exc.stage} failed: {one_line(exc.message)}", file=sys.stderr)
        return EXIT_NO


# ---- pull and build ----


def _pull(arguments: argparse.Namespace) -> int:
    return asyncio.run(_make(arguments, Recipe(untax.EnvSpec(image=arguments.image), "none")))


def _build(arguments: argparse.Namespace) -> int:
    return asyncio.run(_make(arguments, recipe_of(arguments, image=arguments.image, file=arguments.file)))


async def _make(arguments: argparse.Namespace, recipe: Recipe) -> int:
    store = _store(arguments)
    with Progress() as progress:
        async with _prepared(arguments, store, recipe, progress) as made:
            document = _made(store, made)
    if arguments.json:
        print(json.dumps(document))
        return 0
    for stage in document["stages"]:
        what = "built in " + seconds(stage["built_s"]) if stage["built_s"] is not None else "there" if stage["stored"] else "used in place"
        print(f"untax: {stage['name']:<6} {stage['key'][:_SHORT]}  {what}", file=sys.stderr)
    print(f"untax: {len(document['layers'])} layers, {human(document['bytes'])}", file=sys.stderr)
    print(document["key"])
    return 0


def _made(store: LayerStore, made: Prepared) -> dict[str, Any]:
    stages = [
        {"name": one.name, "key": one.key, "stored": store.stage(one.key) is not None, "built_s": made.built.get(one.name)}
        for one in made.stages
        if one.name != "base"
    ]
    layers = [store.layer(one) for one in made.pin.ids]
    return {
        "key": made.stages[-1].key,
        "portable": made.stages[-1].is_portable,
        "stages": stages,
        "layers": [layer.id for layer in layers],
        "bytes": sum(layer.bytes for layer in layers),
    }


@contextlib.asynccontextmanager
async def _prepared(arguments: argparse.Namespace, store: LayerStore, recipe: Recipe, progress: Progress) -> AsyncIterator[Prepared]:
    """Every stage of the recipe in place, pinned for as long as the block lasts. Only set-up commands need a sandbox."""
    from untax.layers.build import Stages

    if recipe.spec.setup:
        async with untax.Engine(state_dir=arguments.state_dir, setup_network=recipe.network) as engine:
            yield await engine.prepare(recipe.spec, progress=progress)
    else:
        made = await Stages(store).root(recipe.spec, progress=progress)
        try:
            yield made
        finally:
            made.pin.close()


# ---- list and show ----


def _list(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    sizes = {layer.id: layer.bytes for layer in store.layers()}
    records = store.stages()
    caches = dict.fromkeys(("mirrors", "caches", "downloads"), 0)
    for spare in store.spares():
        caches[spare.path.parent.name] += spare.bytes
    if arguments.json:
        rows = [{**_facts(one), "bytes": sum(sizes.get(layer, 0) for layer in one.adds)} for one in records]
        total = {"layers": len(sizes), "bytes": sum(sizes.values()), **caches}
        print(json.dumps({"store": str(store.root), "stages": rows, "total": total}))
        return 0
    if records:
        print(f"{'KEY':<{_SHORT}}  {'STAGE':<8}  {'SIZE':>10}  {'COST':>8}  {'AGE':>8}  WHAT")
    for one in records:
        size = human(sum(sizes.get(layer, 0) for layer in one.adds))
        age = seconds(max(0.0, time.time() - one.created))
        print(f"{_short(one.key)}  {one.name:<8}  {size:>10}  {seconds(one.cost_s):>8}  {age:>8}  {one_line(_what(one))}")
    rest = ", ".join(f"{name} {human(size)}" for name, size in caches.items() if size)
    print(f"untax: {len(sizes)} layers, {human(sum(sizes.values()))}{f'; {rest}' if rest else ''} in {store.root}", file=sys.stderr)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    chain = asyncio.run(_found(store, arguments.what))
    last = chain.records[-1]
    layers = [store.layer(one) for one in chain.layer_ids]
    document = {
        **_facts(last),
        "chain": [_facts(one) for one in chain.records],
        "stands_on": chain.below,
        "layers": [{"id": one.id, "bytes": one.bytes, "entries": one.entries, "path": str(one.tree)} for one in layers],
        "bytes": sum(one.bytes for one in layers),
        "config": {
            "env": dict(last.config.env),
            "workdir": last.config.workdir,
            "user": last.config.user,
            "entrypoint": list(last.config.entrypoint),
            "command": list(last.config.command),
            "labels": dict(last.config.labels),
        },
        "log": last.log_tail.decode(errors="replace"),
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        _show_text(document, chain)
    return 0


def _show_text(document: dict[str, Any], chain: Chain) -> None:
    print(document["key"])
    if chain.below is not None:
        print(f"  on        {chain.below[:_SHORT]} (an image that is used in place)")
    for one in chain.records:
        print(f"  {one.name:<8}  {_short(one.key)}  {seconds(one.cost_s):>8}  {one_line(_what(one))}")
    print(f"  portable  {'yes' if chain.is_portable else 'no: it is of this machine'}")
    for layer in document["layers"]:
        print(f"  layer     {layer['id']}  {human(layer['bytes']):>10}  {layer['entries']} entries")
    print(f"  in all    {human(document['bytes'])}")
    for name, value in document["config"].items():
        for text in (f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else [value] if value else []:
            print(f"  {name:<8}  {one_line(str(text))}")
    if document["log"]:
        sys.stdout.flush()
        sys.stdout.buffer.write(neutralised(document["log"].encode()))


async def _found(store: LayerStore, what: str) -> Chain:
    """By key; or an image, when it is in the store."""
    from untax.core.stage import stages_of
    from untax.layers import sources
    from untax.layers.chain import find_chain
    from untax.layers.sources import InPlace

    if not _is_image(what):
        return find_chain(store, what)
    source = sources.find(what, cache=store.root / "host")
    key = stages_of(untax.EnvSpec(image=what), await source.identify())[-1].key
    if isinstance(source, InPlace):
        raise UsageError(f"{what} is used in place, nothing of it is in the store; its key now is {key}")
    if store.stage(key) is None:
        raise UsageError(f"{what} is not in the store; bring it there with: untax image pull {what}")
    return find_chain(store, key)


# ---- export ----


def _export(arguments: argparse.Namespace) -> int:
    from untax.layers.export import Options

    options = Options(init=_init(arguments))
    if arguments.free_mib is not None:
        options = replace(options, free_mib=arguments.free_mib)
    for option, owner in (("name", "oci"), ("init", "initramfs"), ("free_mib", "ext4")):
        if getattr(arguments, option) is not None and arguments.format != owner:
            raise UsageError(f"--{option.replace('_', '-')} is for --format {owner}")
    return asyncio.run(_exported(arguments, options))


async def _exported(arguments: argparse.Namespace, options: Any) -> int:
    from untax.layers import sources
    from untax.layers.export import export

    store = _store(arguments)
    to_stdout = arguments.output == "-"
    with Progress() as progress:
        async with _chosen(arguments, store, progress) as (root, key, is_portable):
            options = replace(options, name=arguments.name or f"localhost/untax:{_short(key).rstrip()}", is_portable=is_portable)
            target: Path | BinaryIO = sys.stdout.buffer if to_stdout else Path(arguments.output)

            def work(stop: sources.Stop) -> Any:
                def told(what: str, done: int, total: int | None) -> None:
                    stop.check()
                    progress(f"export to {arguments.format}" if what == "export" else what, done, total)

                return export(store, root, target, arguments.format, options, progress=told)

            done = await sources.in_thread(work)
    document = {
        "key": key,
        "format": arguments.format,
        "file": arguments.output,
        "bytes": done.bytes,
        "portable": is_portable,
        "losses": list(done.losses),
    }
    if arguments.json and not to_stdout:
        print(json.dumps(document))
    else:
        named = f" as {options.name}" if arguments.format == "oci" else ""
        print(f"untax: {arguments.output}: {human(done.bytes)}{named}", file=sys.stderr)
    for loss in done.losses:
        print(f"untax: {loss}", file=sys.stderr)
    return 0


@contextlib.asynccontextmanager
async def _chosen(arguments: argparse.Namespace, store: LayerStore, progress: Progress) -> AsyncIterator[tuple[Root, str, bool]]:
    """What is exported, its key, and whether it is more than this machine's own."""
    from untax.layers.build import Stages
    from untax.layers.chain import find_chain, root_of

    if _is_image(arguments.what):
        recipe = recipe_of(arguments, image=arguments.what)
        async with _prepared(arguments, store, recipe, progress) as made:
            last = made.stages[-1]
            place = last.recipe.get("at")
            yield _begins_in(made.root, place if isinstance(place, str) else None), last.key, last.is_portable
        return
    if any(getattr(arguments, name) for name in ("repo", "setup", "workdir", "depth", "network")):
        raise UsageError("a key is what it is: --repo, --setup and the like go with an image")
    chain = find_chain(store, arguments.what)
    made = await root_of(store, chain, Stages(store))
    try:
        yield _begins_in(made.root, chain.workdir), chain.key, chain.is_portable
    finally:
        made.pin.close()


def _begins_in(root: Root, place: str | None) -> Root:
    return root if place is None else replace(root, config=replace(root.config, workdir=place))


def _init(arguments: argparse.Namespace) -> bytes | None:
    if arguments.init is None:
        return None
    try:
        return Path(arguments.init).read_bytes()
    except OSError as exc:
        raise UsageError(f"--init {arguments.init}: {exc.strerror}") from exc


# ---- gc ----


def _gc(arguments: argparse.Namespace) -> int:
    from untax.layers.chain import find_chain
    from untax.layers.garbage import would_free

    store = _store(arguments, budget_bytes=_size(arguments.budget) if arguments.budget is not None else None)
    named = [find_chain(store, key).key for key in arguments.remove]
    before = _bytes_in(store)
    if arguments.dry_run:
        freed = would_free(store, removed=named)
    else:
        for key in named:
            store.remove_stage(key)
        freed = store.evict()
    after = before - freed.bytes if arguments.dry_run else _bytes_in(store)
    stages = list(dict.fromkeys([*named, *freed.stages]))
    over = max(0, after - store.budget_bytes) if store.budget_bytes is not None else 0
    if arguments.json:
        print(
            json.dumps(
                {
                    "dry_run": arguments.dry_run,
                    "stages": stages,
                    "spares": list(freed.spares),
                    "freed_bytes": before - after,
                    "bytes": after,
                    "over_budget_bytes": over,
                }
            )
        )
    else:
        for name in (*stages, *freed.spares):
            print(name)
        verb = "would free" if arguments.dry_run else "freed"
        beside = f", {len(freed.spares)} mirrors, caches and downloads" if freed.spares else ""
        print(f"untax: {verb} {human(before - after)}: {len(stages)} stages{beside}; {human(after)} left", file=sys.stderr)
    if over:
        print(
            f"untax: {human(over)} over the budget are in use, or are saved snapshots: close engines, or remove some with --remove KEY",
            file=sys.stderr,
        )
    return EXIT_NO if over else 0


# ---- shared ----


def _store(arguments: argparse.Namespace, *, budget_bytes: int | None = None) -> LayerStore:
    from untax.layers.store import LayerStore
    from untax.substrates._host import chosen_state_dir, ensure_private_dir, is_host_root

    state_dir = chosen_state_dir(arguments.state_dir)
    ensure_private_dir(state_dir)
    return LayerStore(state_dir / "layers", marks="trusted" if is_host_root() else "user", budget_bytes=budget_bytes)


def _is_image(what: str) -> bool:
    return what == "host" or ":" in what


def _facts(record: StageRecord) -> dict[str, Any]:
    return {
        "key": record.key,
        "stage": record.name,
        "parent": record.parent,
        "adds": list(record.adds),
        "recipe": dict(record.recipe),
        "cost_s": record.cost_s,
        "created": record.created,
        "portable": record.is_portable,
    }


def _what(record: StageRecord) -> str:
    """Its recipe in a line."""
    recipe = record.recipe
    if record.name == "image":
        return str(recipe.get("image", ""))
    if record.name == "repo":
        return f"{recipe.get('url')}@{str(recipe.get('commit'))[:_SHORT]}"
    if record.name == "deps":
        steps = recipe.get("steps")
        return "; ".join(steps) if isinstance(steps, list) else ""
    spec = recipe.get("spec")
    return f"of a sandbox on {spec.get('image')}" if isinstance(spec, dict) else ""


def _short(key: str) -> str:
    """The beginning of a hash; the whole of a name that is none."""
    return key[:_SHORT] if re.fullmatch(r"[0-9a-f]{64}", key) else key.ljust(_SHORT)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget {text!r}: write a size as in 500M or 20G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _bytes_in(store: LayerStore) -> int:
    return sum(layer.bytes for layer in store.layers()) + sum(spare.bytes for spare in store.spares())
