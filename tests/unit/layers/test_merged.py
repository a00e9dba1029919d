"""A chain read without mounting it is what the kernel shows when it is mounted: entry by entry, over random chains."""

import contextlib
import os
import random
import shutil
import stat
from pathlib import Path

import pytest
from tests.unit.layers.odd import dig
from tests.unit.layers.private import in_private_mounts, mount, require_root, require_user_namespaces, unmount

from untax._remove import remove_tree
from untax.core.root import Root, View
from untax.layers import marks, merged

NAMES = [b"a", b"b", b"c", b"dir", b"with space", b"\xff\xfe", "ü".encode(), b",:\\=", b"n" * 255]
SEEDS = range(int(os.environ.get("UNTAX_TEST_SEEDS", "12")))
KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


@pytest.fixture(params=["trusted", "user"])
def private(request):
    """Calls a function in a mount namespace of its own, with a builder of chains of one kind of marks."""
    kind = request.param
    if kind == "trusted":
        require_root()
    else:
        require_user_namespaces()

    def call(function, home, *args):
        in_private_mounts(lambda: function(Chain(home, kind), *args), as_user_namespace=kind == "user")

    return call


class Chain:
    """Layers that were made by writing to real overlays, one over the other, with a view of a directory of the "host"."""

    def __init__(self, home, kind):
        self.home = home
        self.kind = kind
        self.canary = home / "canary"  # what links lead out to: these acts are root's, so never to a file of the machine
        self.canary.write_bytes(b"untouched")
        self.mount_point = home / "m"
        self.mount_point.mkdir()
        self.layers = []
        self.views = ()
        self.count = 0

    def add_views(self):
        for name, at in (("usr", "/view"), ("opt", "/deep/er/view")):
            source = self.home / name
            (source / "a" / "dir").mkdir(parents=True)
            (source / "a" / "file").write_bytes(b"host")
            (source / "a" / "dir" / "b").write_bytes(b"host too")
            (source / "c").symlink_to(self.canary)
            self.views += (View(str(source), at),)

    def root(self, count=None):
        return Root(tuple(str(layer) for layer in self.layers[:count]), self.views)

    @contextlib.contextmanager
    def mounted(self, *, lowers=None, upper=None):
        """The overlay of some layers, as the launcher mounts it: the chain, then each view over the same place of every layer."""
        lowers = self.layers if lowers is None else lowers
        with contextlib.ExitStack() as stack:
            self._mount(stack, [*reversed(lowers)], upper, self.mount_point)
            for view in self.views:
                at = view.at.lstrip("/")
                parts = [layer / at for layer in reversed(lowers) if is_plain_directory(layer, at)]
                self._mount(stack, [*parts, Path(view.source)], upper / at if upper is not None else None, self.mount_point / at)
            yield self.mount_point

    def _mount(self, stack, lowers, upper, target):
        if len(lowers) == 1 and upper is None:
            lowers = [*lowers, self._empty("nothing")]  # overlay wants two
        options = "lowerdir=" + ":".join(str(lower) for lower in lowers)
        if upper is not None:
            self.count += 1
            options += f",upperdir={upper},workdir={self._empty(f'work{self.count}')}"
        options += ",userxattr" if self.kind == "user" else ",redirect_dir=on,metacopy=off"
        mount("overlay", target, options + ",index=off")
        stack.callback(unmount, target)

    def _empty(self, name):
        path = self.home / name
        path.mkdir(exist_ok=True)
        return path

    @contextlib.contextmanager
    def layer(self):
        """A new layer on top: whatever the block does to the mounted tree."""
        upper = self.home / f"l{len(self.layers)}"
        upper.mkdir()
        for view in self.views:
            (upper / view.at.lstrip("/")).mkdir(parents=True)
        if not self.layers:
            self.layers.append(upper)
            yield upper
            return
        with self.mounted(upper=upper) as top:
            yield top
        self.layers.append(upper)


def is_plain_directory(layer, at):
    here = layer
    for part in Path(at).parts:
        here = here / part
        if here.is_symlink() or not here.is_dir():
            return False
    return True


def mess(top, rng, steps):
    """Do what workloads do: make, write, replace, rename, link, delete. No act follows a link: some lead out of the tree."""
    for _ in range(steps):
        where = some_directory(top, rng)
        path = where + b"/" + rng.choice(NAMES)
        act = rng.choice(ACTS)
        with contextlib.suppress(OSError):  # taken, missing, or across a mount: as it happens to a workload
            act(top, path, rng)


def some_directory(top, rng):
    here = os.fsencode(top)
    while rng.random() < 0.7:
        inner = [entry.path for entry in os.scandir(here) if entry.is_dir(follow_symlinks=False)]
        if not inner:
            break
        here = rng.choice(sorted(inner))
    return here


def write(_top, path, rng):
    how = os.O_APPEND if rng.random() < 0.5 else os.O_TRUNC
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | how)  # it may be a FIFO that nobody reads
    with os.fdopen(fd, "wb") as file:
        file.write(rng.randbytes(rng.choice([0, 1, 100, 5000])))


def make_directory(_top, path, _rng):
    os.mkdir(path)


def make_nest(_top, path, rng):
    os.makedirs(path + b"/dir/" + rng.choice(NAMES))


def link_symbolically(_top, path, rng):
    os.symlink(rng.choice([b"a", b"dir/b", b"\xff", b"/nonexistent/untax"]), path)


def link_hard(top, path, rng):
    os.link(some_file(top, rng), path, follow_symlinks=False)


def some_file(top, rng):
    where = some_directory(top, rng)
    return rng.choice(sorted(entry.path for entry in os.scandir(where) if not entry.is_dir(follow_symlinks=False)) or [where + b"/none"])


def delete(_top, path, _rng):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def rename(top, path, rng):
    os.rename(path, some_directory(top, rng) + b"/" + rng.choice(NAMES))


def replace_directory(_top, path, rng):
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        return  # rmtree would open a FIFO and wait
    shutil.rmtree(path)
    os.mkdir(path)
    write(_top, path + b"/" + rng.choice(NAMES), rng)


def change_mode(_top, path, rng):
    if not os.path.islink(path):
        os.chmod(path, rng.choice([0o755, 0o700, 0o000, 0o4755, 0o1777, 0o640]))


def change_owner(_top, path, rng):
    os.chown(path, rng.choice([0, 1000]), rng.choice([0, 65535]), follow_symlinks=False)


def change_times(_top, path, rng):
    os.utime(path, ns=(1, rng.randrange(10**18)), follow_symlinks=False)


def set_attribute(_top, path, rng):
    os.setxattr(path, rng.choice(["user.x", "user.overlay.opaque", "trusted.y"]), rng.choice([b"", b"y", b"\0\xff"]), follow_symlinks=False)


def make_fifo(_top, path, _rng):
    os.mkfifo(path)


def touch_only(_top, path, _rng):
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW))  # copies a file up without a change


ACTS = [
    write, write, write, make_directory, make_directory, make_nest, link_symbolically, link_hard, delete, delete, rename, rename, rename, rename,
    replace_directory, change_mode, change_owner, change_times, set_attribute, set_attribute, make_fifo, touch_only,
]  # fmt: skip


def look(top):
    """The tree as the kernel shows it: for each path what it is, and its names as one file."""
    found, groups = {}, {}
    todo = [b""]
    top = os.fsencode(top)
    while todo:
        path = todo.pop()
        full = os.path.join(top, path) if path else top
        st = os.lstat(full)
        found[path] = seen(st, full)
        if stat.S_ISDIR(st.st_mode):
            todo += [(path + b"/" if path else b"") + name for name in os.listdir(full)]
        elif st.st_nlink > 1:
            groups.setdefault((st.st_dev, st.st_ino), set()).add(path)
    return found, {frozenset(names) for names in groups.values() if len(names) > 1}


def seen(st, full):
    kind = KINDS[stat.S_IFMT(st.st_mode)]
    names = [name for name in os.listxattr(full, follow_symlinks=False) if not name.startswith("security.selinux")]
    with open(full, "rb") if kind == "file" else contextlib.nullcontext() as file:
        content = file.read() if kind == "file" else os.readlink(full) if kind == "symlink" else None
    return (
        kind,
        stat.S_IMODE(st.st_mode),
        (st.st_uid, st.st_gid),
        st.st_mtime_ns if kind != "directory" else None,
        st.st_size if kind in ("file", "symlink") else None,
        content,
        {name: os.getxattr(full, name, follow_symlinks=False) for name in names},
    )


def read(root, kind):
    """The same, by `merged.walk`."""
    found, groups = {}, {}
    for entry in merged.walk(root, marks=kind):
        content = None
        if entry.kind == "file":
            with os.fdopen(entry.open(), "rb") as file:
                content = file.read()
        elif entry.kind == "symlink":
            content = entry.target
        st = entry.stat
        assert entry.path not in found
        found[entry.path] = (
            entry.kind,
            stat.S_IMODE(st.st_mode),
            (st.st_uid, st.st_gid),
            st.st_mtime_ns if entry.kind != "directory" else None,
            st.st_size if entry.kind in ("file", "symlink") else None,
            content,
            dict(entry.xattrs),
        )
        if entry.link_group is not None:
            groups.setdefault(entry.link_group, set()).add(entry.path)
    return found, {frozenset(names) for names in groups.values() if len(names) > 1}


def assert_same(expected, actual):
    assert actual[0].keys() - expected[0].keys() == set(), "seen by us alone"
    assert expected[0].keys() - actual[0].keys() == set(), "seen by the kernel alone"
    for path, fact in expected[0].items():
        assert actual[0][path] == fact, path
    assert actual[1] == expected[1]


def random_chain(chain, seed, *, views=False, layers=6, steps=60):
    rng = random.Random(seed)
    if views:
        chain.add_views()
    for _ in range(layers):
        with chain.layer() as top:
            mess(top, rng, steps)
    assert chain.canary.read_bytes() == b"untouched", "an act followed a link out of the tree"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_chain_is_read_as_the_kernel_shows_it(private, tmp_path, seed):
    def check(chain):
        random_chain(chain, seed, views=seed % 3 == 0)
        with chain.mounted() as top:
            expected = look(top)
        assert len(expected[0]) > 3
        assert_same(expected, read(chain.root(), chain.kind))

    private(check, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_are_those_between_two_walks(private, tmp_path, seed):
    def check(chain):
        random_chain(chain, 1000 + seed, views=seed % 3 == 0)
        below = 1 + seed % 4
        with chain.mounted(lowers=chain.layers[:below]) as top:
            before = look(top)[0]
        with chain.mounted() as top:
            after = look(top)[0]
        if chain.kind == "user":  # whose layers hold no owners
            before, after = ({path: (*fact[:2], None, *fact[3:]) for path, fact in tree.items()} for tree in (before, after))
        expected = {(path, "deleted") for path in before.keys() - after.keys()}
        expected |= {(path, "added") for path in after.keys() - before.keys()}
        # A link's own time is nothing that anybody looks at.
        expected |= {
            (path, "modified")
            for path in before.keys() & after.keys()
            if without_link_times(before[path]) != without_link_times(after[path])
        }

        found = merged.changes(chain.layers[below:], chain.root(below), marks=chain.kind, apart_from=())

        assert {(os.fsencode(change.path)[1:], change.kind) for change in found} == expected
        assert len(found) == len(expected) > 0
        assert [change.path for change in found] == sorted((change.path for change in found), key=os.fsencode)

    private(check, tmp_path)


def test_a_layer_that_is_opaque_as_a_whole_hides_nothing(private, tmp_path):
    """The kernel looks for the mark on directories in a layer, not on the layer itself; whoever unpacks images has to know."""

    def check(chain):
        with chain.layer() as top:
            (top / "low").touch()
        with chain.layer() as top:
            (top / "high").touch()
        os.setxattr(chain.layers[1], marks.opaque(chain.kind), marks.OPAQUE_VALUE)
        with chain.mounted() as top:
            assert sorted(os.listdir(top)) == ["high", "low"]
            expected = look(top)
        assert_same(expected, read(chain.root(), chain.kind))

    private(check, tmp_path)


def test_a_directory_on_which_another_file_system_is_mounted_is_empty_below_a_view(tmp_path):
    """Overlay does not cross mounts: what is mounted below a host directory is not part of the view of it."""
    require_root()

    def check():
        (tmp_path / "view" / "mnt").mkdir(parents=True)
        (tmp_path / "layer").mkdir()
        mount("tmpfs", tmp_path / "view" / "mnt")
        (tmp_path / "view" / "mnt" / "secret").touch()
        root = Root((str(tmp_path / "layer"),), (View(str(tmp_path / "view"), "/v"),))

        assert [entry.path for entry in merged.walk(root)] == [b"", b"v", b"v/mnt"]
        assert merged.lookup(root, "/v/mnt/secret") is None

    in_private_mounts(check)


def without_link_times(fact):
    return (*fact[:3], None, *fact[4:]) if fact[0] == "symlink" else fact


# ---- by hand: what each mark means ----


@pytest.fixture
def plain(tmp_path):
    """Two plain directories and a function that puts files into them; needs no mount."""

    def layer(name, files):
        for path, text in files.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    return layer


def paths(root):
    return [entry.path.decode() for entry in merged.walk(root, marks="user")]


def chain_of(*layers):
    return Root(tuple(str(layer) for layer in layers))


def test_the_upper_layer_wins_and_directories_merge(plain):
    root = chain_of(plain("low", {"etc/a": "low", "etc/b": "low"}), plain("high", {"etc/b": "high"}))

    assert paths(root) == ["", "etc", "etc/a", "etc/b"]
    with os.fdopen(merged.lookup(root, "/etc/b", marks="user").open()) as file:
        assert file.read() == "high"
    assert merged.lookup(root, "etc/none", marks="user") is None
    assert merged.lookup(root, "etc/b/below", marks="user") is None
    assert merged.lookup(root, "/", marks="user").kind == "directory"
    with pytest.raises(ValueError, match="up"):
        merged.lookup(root, "etc/../etc/a", marks="user")


def test_a_whiteout_hides_and_an_opaque_directory_replaces(plain):
    low, high = plain("low", {"gone": "", "kept/old": ""}), plain("high", {"kept/new": ""})
    try:
        marks.make_whiteout(high / "gone")
        os.setxattr(high / "kept", marks.opaque("user"), marks.OPAQUE_VALUE)
    except OSError as exc:
        pytest.skip(f"whiteouts: this file system or user cannot make one: {exc}")

    assert paths(chain_of(low, high)) == ["", "kept", "kept/new"]
    assert merged.changes([high], chain_of(low), marks="user") == [
        merged.Change("/gone", "deleted"),
        merged.Change("/kept/new", "added"),
        merged.Change("/kept/old", "deleted"),
    ]


def test_f1_no_link_is_followed_by_walk_lookup_or_changes(plain, tmp_path):
    """A workload that puts a link where a directory was shows nothing of the host."""
    secret = plain("host", {"secret": "canary"})
    low, high = plain("low", {"etc/secret": "mine"}), plain("high", {})
    (high / "etc").symlink_to(secret)

    root = chain_of(low, high)

    assert paths(root) == ["", "etc"]
    assert merged.lookup(root, "etc", marks="user").target == os.fsencode(secret)
    assert merged.lookup(root, "etc/secret", marks="user") is None
    assert merged.changes([high], chain_of(low), marks="user") == [
        merged.Change("/etc", "modified"),
        merged.Change("/etc/secret", "deleted"),
    ]


def test_a_copy_with_the_same_time_and_other_contents_is_modified(plain):
    low, high = plain("low", {"a": "one", "b": "one"}), plain("high", {"a": "two", "b": "one"})
    for layer in (low, high):
        for name in "ab":
            os.utime(layer / name, ns=(1, 1))

    assert merged.changes([high], chain_of(low), marks="user") == [merged.Change("/a", "modified")]


def test_places_where_a_sandbox_has_mounts_of_its_own_are_no_changes(plain):
    low, high = plain("low", {}), plain("high", {"proc/x": "", "dev/null": "", "tmp/y": "", "tmp2": ""})

    assert merged.changes([high], chain_of(low), marks="user") == [merged.Change("/tmp2", "added")]


def test_a_redirect_that_is_no_path_is_an_error(plain):
    low, high = plain("low", {"a/b": ""}), plain("high", {"c/d": ""})
    for bad in (b"..", b"/a/../b", b"//", b"a/b", b""):
        os.setxattr(high / "c", marks.redirect("user"), bad)
        with pytest.raises(OSError, match="no path"):
            paths(chain_of(low, high))


def test_a_tree_that_changes_meanwhile_is_no_error(plain, tmp_path):
    """A live upper directory: entries vanish and turn into links between two looks at them."""
    low, high = plain("low", {}), plain("high", {})
    stop = tmp_path / "stop"
    child = os.fork()
    if child == 0:
        try:
            rng = random.Random(4)
            while not stop.exists():
                name = high / f"d{rng.randrange(4)}"
                with contextlib.suppress(OSError):
                    (name / "in" / "side").mkdir(parents=True)
                    (name / "in" / "file").write_text("x")
                with contextlib.suppress(OSError):
                    os.rename(name, high / f"e{rng.randrange(4)}")
                with contextlib.suppress(OSError):
                    shutil.rmtree(high / f"e{rng.randrange(4)}")
                with contextlib.suppress(OSError):
                    name.symlink_to("/etc")
                with contextlib.suppress(OSError):
                    name.unlink()
        finally:
            os._exit(0)
    try:
        for _ in range(300):
            for change in merged.changes([high], chain_of(low), marks="user"):
                assert change.kind == "added"
                assert "passwd" not in change.path
    finally:
        stop.touch()
        os.waitpid(child, 0)


def test_a_tree_deeper_than_paths_and_descriptors_is_read_to_its_end(tmp_path):
    """2,500 directories in each other: beyond PATH_MAX, Python's recursion and 1,024 descriptors."""
    (tmp_path / "low").mkdir()
    (tmp_path / "high").mkdir()
    dig(tmp_path / "high", 2500)
    try:
        paths_found = []
        for entry in merged.walk(chain_of(tmp_path / "low", tmp_path / "high"), marks="user"):
            paths_found.append(entry.path)
        assert len(paths_found) == 2502
        assert len(paths_found[-1]) > 4999
        with os.fdopen(entry.open()) as file:
            assert file.read() == "end"
        assert len(merged.changes([tmp_path / "high"], chain_of(tmp_path / "low"), marks="user")) == 2501
    finally:
        assert remove_tree(tmp_path / "high")
