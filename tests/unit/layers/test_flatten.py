"""Many layers as one: over the same ground, the one shows what the many show, entry by entry."""

import os
import random
import stat

import pytest

from untax.core.root import Root, View
from untax.layers import marks as mark
from untax.layers import merged
from untax.layers.flatten import flatten, squash
from untax.layers.store import LayerStore

# Attributes of overlay's own in the trusted name space are root's to write.
KINDS = ["user", *(["trusted"] if os.geteuid() == 0 else [])]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def seen(root, kind):
    """Every entry by what is to be equal: names, types, modes, owners, times, contents, targets, attributes, and who is linked to whom."""
    found, groups = {}, {}
    for entry in merged.walk(root, marks=kind):
        st = entry.stat
        if entry.link_group is not None:
            groups.setdefault(entry.link_group, set()).add(entry.path)
        data = b""
        if entry.kind == "file":
            fd = entry.open()
            data = os.pread(fd, 1 << 20, 0)
            os.close(fd)
        found[entry.path] = (
            entry.kind,
            stat.S_IMODE(st.st_mode),
            st.st_uid,
            st.st_gid,
            st.st_mtime_ns,
            data,
            entry.target,
            dict(entry.xattrs),
        )
    return found, {frozenset(names) for names in groups.values() if len(names) > 1}


def flat(tmp_path, base, uppers, kind):
    target = tmp_path / "flat"
    target.mkdir(mode=0o755)
    squash(uppers, base, target, marks=kind)
    return base.with_layers(str(target))


def tree(path, files):
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def check(tmp_path, base, uppers, kind):
    chain = base.with_layers(*map(str, uppers))
    assert seen(flat(tmp_path, base, uppers, kind), kind) == seen(chain, kind)
    return tmp_path / "flat"


def test_the_uppermost_word_counts(tmp_path, kind):
    base = Root((str(tree(tmp_path / "base", {"a": b"0", "d/x": b"0", "d/y": b"0"})),))
    uppers = [tree(tmp_path / "1", {"a": b"1", "b": b"1"}), tree(tmp_path / "2", {"b": b"2", "d/x": b"2"})]
    made = check(tmp_path, base, uppers, kind)
    assert sorted(path.name for path in made.rglob("*")) == ["a", "b", "d", "x"]  # nothing that is the base's alone


def test_what_was_removed_stays_so_and_what_came_and_went_leaves_nothing(tmp_path, kind):
    base = Root((str(tree(tmp_path / "base", {"gone/x": b"0", "back": b"0", "kept": b"0"})),))
    one, two, three = (tree(tmp_path / n, {}) for n in "123")
    mark.make_whiteout(one / "gone")
    mark.make_whiteout(one / "back")
    tree(one, {"passing": b"1"})
    tree(two, {"back": b"2"})
    mark.make_whiteout(two / "passing")
    made = check(tmp_path, base, [one, two, three], kind)
    assert mark.is_whiteout((made / "gone").lstat())
    assert not (made / "passing").exists()


def test_a_directory_in_the_place_of_another_shows_nothing_of_it(tmp_path, kind):
    base = Root((str(tree(tmp_path / "base", {"d/old": b"0", "d/sub/deep": b"0", "f": b"0"})),))
    one, two = tree(tmp_path / "1", {"d/new": b"1"}), tree(tmp_path / "2", {"f/in": b"2", "d/late": b"2"})
    os.setxattr(one / "d", mark.opaque(kind), b"y")
    check(tmp_path, base, [one, two], kind)


def test_a_file_in_the_place_of_a_directory(tmp_path, kind):
    base = Root((str(tree(tmp_path / "base", {"d/a": b"0", "d/b/c": b"0"})),))
    check(tmp_path, base, [tree(tmp_path / "1", {"d": b"a file"})], kind)


def test_a_renamed_directory_is_written_out_where_it_lies(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user's overlay has no renamed directories")
    base = Root((str(tree(tmp_path / "base", {"old/a": b"0", "old/sub/b": b"0"})),))
    one, two = tree(tmp_path / "1", {"new/c": b"1"}), tree(tmp_path / "2", {"newer/sub/d": b"2"})
    os.setxattr(one / "new", mark.redirect("trusted"), b"/old")
    mark.make_whiteout(one / "old")
    os.setxattr(two / "newer", mark.redirect("trusted"), b"new")
    mark.make_whiteout(two / "new")
    made = check(tmp_path, base, [one, two], "trusted")
    assert (made / "newer/sub/b").read_bytes() == b"0"


def test_f11_modes_times_holes_links_and_attributes_are_kept(tmp_path, kind):
    base = Root((str(tree(tmp_path / "base", {"d/x": b"0"})),))
    upper = tree(tmp_path / "1", {"d/a": b"1", "setuid": b"", "closed/in": b"x"})
    os.link(upper / "d/a", upper / "b")
    (upper / "setuid").chmod(0o4755)
    (upper / "link").symlink_to("/nowhere/../at all")
    os.mkfifo(upper / "pipe", 0o640)
    os.setxattr(upper / "b", "user.mine", b"\0\xff")
    os.setxattr(upper / "d", "user.of-a-directory", b"1")
    with open(upper / "sparse", "wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
    os.utime(upper / "d/a", ns=(1, 1_234_567_890_123_456_789))
    os.utime(upper / "d", ns=(1, 987_654_321))
    if os.geteuid() == 0:
        os.chown(upper / "link", 1000, 1000, follow_symlinks=False)
    made = check(tmp_path, base, [upper], kind)
    assert (made / "sparse").stat().st_blocks * 512 < 1 << 20


def test_a_view_of_the_host_is_an_overlay_of_its_own(tmp_path, kind):
    host = tree(tmp_path / "host", {"bin/true": b"0", "bin/false": b"0"})
    base = Root((str(tree(tmp_path / "base", {"usr/.keep": b""})),), (View(str(host), "/usr"),))
    one, two = tree(tmp_path / "1", {"usr/bin/true": b"1"}), tree(tmp_path / "2", {})
    (two / "usr/bin").mkdir(parents=True)
    mark.make_whiteout(two / "usr/bin/false")
    check(tmp_path, base, [one, two], kind)


def test_any_history_of_writing_and_removing(tmp_path, kind):
    """Random, from a seed: forty layers of what a workload might do, as overlay would have kept it."""
    rng = random.Random(14)
    base_dir = tree(tmp_path / "base", {f"{a}/{b}/{c}": b"0" for a in "xyz" for b in "pq" for c in "12"})
    base = Root((str(base_dir),))
    uppers = []
    for n in range(40):
        upper = tmp_path / str(n)
        upper.mkdir()
        for _ in range(rng.randrange(1, 6)):
            parts = [rng.choice("xyz"), rng.choice("pqr"), rng.choice("123")][: rng.randrange(1, 4)]
            at = upper.joinpath(*parts)
            if any(os.path.lexists(upper.joinpath(*parts[:d])) and not upper.joinpath(*parts[:d]).is_dir() for d in range(1, len(parts))):
                continue
            if os.path.lexists(at):
                continue
            at.parent.mkdir(parents=True, exist_ok=True)
            match rng.randrange(4):
                case 0:
                    mark.make_whiteout(at)
                case 1:
                    at.mkdir()
                    os.setxattr(at, mark.opaque(kind), b"y")
                case _:
                    at.write_bytes(str(rng.random()).encode())
        uppers.append(upper)
    check(tmp_path, base, uppers, kind)


def test_the_store_holds_it_until_it_is_let_go(tmp_path):
    store = LayerStore(tmp_path / "store", marks="user")
    base = Root((str(tree(tmp_path / "base", {"a": b"0"})),))
    flattened = flatten(store, [tree(tmp_path / "1", {"b": b"1"})], base)
    store.evict(wanted_bytes=1 << 40)
    assert (flattened.tree / "b").read_bytes() == b"1"
    flattened.remove()
    assert store.layers() == []
    assert store.stages() == []
    store.close()
