"""Search, edit and patch, on every substrate: what a coding agent does between two commands."""

import pytest

import untax

SOURCE = b'''\
class Outer:
    def method(self):
        def inner():
            return "def not_a_function"
        return inner

    async def later(self): ...


def needle(a, b):
    """def in_a_docstring(): ..."""
    return a + b
'''


def places(found):
    return {(m.path.removeprefix("./"), m.line) for m in found.matches}


async def test_a_text_is_found_with_its_place(box):
    await box.write("src/a.py", SOURCE)
    await box.write("src/b.txt", b"nothing\nhere a needle\n")

    found = await box.search("needle", "src")

    assert {(path.rsplit("/", 1)[-1], line) for path, line in places(found)} == {("a.py", 10), ("b.txt", 2)}
    [match] = [m for m in found.matches if m.path.endswith("b.txt")]
    assert (match.column, match.kind) == (8, "text")
    assert "here a needle" in match.text
    assert not found.more


async def test_a_search_may_be_narrowed(box):
    await box.write("d/a.py", b"Needle\nneedles\nneedle\n")
    await box.write("d/a.md", b"needle\n")

    only = await box.search("needle", "d", globs=["*.py"])
    words = await box.search("needle", "d", globs=["*.py"], whole_words=True)
    cases = await box.search("NEEDLE", "d", globs=["*.py"], ignore_case=True)
    few = await box.search("needle", "d", most=1)

    assert [m.line for m in only.matches] == [2, 3]
    assert [m.line for m in words.matches] == [3]
    assert [m.line for m in cases.matches] == [1, 2, 3]
    assert len(few.matches) == 1
    assert few.more


async def test_a_regular_expression_is_one_only_when_asked(box):
    await box.write("d/f", b"a.c\nabc\na1c\n")

    literal = await box.search("a.c", "d")
    regex = await box.search("^a[a-z0-9]c$", "d", how="regex")

    assert [m.line for m in literal.matches] == [1]
    assert [m.line for m in regex.matches] == [2, 3]


async def test_a_bad_expression_is_the_caller_s_mistake(box):
    with pytest.raises(untax.UsageError):
        await box.search("(unclosed", how="regex")
    with pytest.raises(untax.UsageError):
        await box.search("")


async def test_symbols_are_those_of_the_syntax(box):
    """Definitions in strings and comments are none; nested ones have dotted names."""
    await box.write("m.py", SOURCE + b"# def commented(): ...\n")

    async def kinds(name):
        return [(m.text, m.line, m.kind) for m in (await box.search(name, how="symbol")).matches]

    assert await kinds("needle") == [("needle", 10, "function")]
    assert await kinds("Outer") == [("Outer", 1, "class")]
    assert [(text, line) for text, line, _ in await kinds("inner")] == [("Outer.method.inner", 3)] or (await kinds("inner"))[0][1] == 3
    assert (await kinds("later"))[0][1:] == (7, "async function")
    assert await kinds("not_a_function") == []
    assert await kinds("in_a_docstring") == []
    assert await kinds("commented") == []


async def test_a_search_skips_what_is_no_text(box):
    await box.shell(
        "mkdir d; printf 'needle\\0bin' >d/bin; mkfifo d/pipe; ln -s /dev/zero d/zero; echo needle >d/t; mkdir d/locked; chmod 0 d/locked"
    )
    found = await box.search("needle", "d", timeout_s=10)

    assert "t" in [m.path.rsplit("/", 1)[-1] for m in found.matches]
    assert not [m for m in found.matches if m.path.endswith(("pipe", "zero"))]


async def test_an_expression_with_bad_manners_does_not_run_away(box):
    """The matcher is linear, or the deadline holds; either way the channel stays free."""
    await box.write("d/f", b"a" * 5000 + b"!\n")
    try:
        await box.search("(a+)+$", "d", how="regex", timeout_s=3)
    except untax.ActionTimeout:
        pass

    assert (await box.run(["true"])).round_trip_s < 1


async def test_an_edit_replaces_exactly_what_it_names(box):
    await box.write("f.py", SOURCE, mode=0o750)

    assert await box.edit("f.py", "return a + b", "return a - b") == 1
    assert await box.read("f.py") == SOURCE.replace(b"a + b", b"a - b")
    assert (await box.stat("f.py")).mode == 0o750


async def test_an_edit_that_does_not_fit_changes_nothing(box):
    """Not there, or more often than said: the text stays as it was."""
    await box.write("f", b"one two two\n")

    with pytest.raises(untax.EditConflict):
        await box.edit("f", "three", "3")
    with pytest.raises(untax.EditConflict):
        await box.edit("f", "two", "2")
    assert await box.read("f") == b"one two two\n"
    assert await box.edit("f", "two", "2", count=2) == 2
    assert await box.edit("f", "2", "two", count=0) == 2
    with pytest.raises(untax.NotFound):
        await box.edit("missing", "a", "b")


async def test_an_edit_keeps_every_other_byte(box):
    raw = bytes(range(256)) + b"OLD" + bytes(range(256))
    await box.write("f", raw)
    await box.edit("f", b"OLD", b"\0\xff")

    assert await box.read("f") == raw.replace(b"OLD", b"\0\xff")


DIFF = """\
--- a/hello.txt
+++ b/hello.txt
@@ -1,3 +1,3 @@
 one
-two
+2
 three
--- /dev/null
+++ b/new/file.txt
@@ -0,0 +1 @@
+made
--- a/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-going
"""


async def test_a_patch_changes_makes_and_removes_files(box):
    await box.write("hello.txt", b"one\ntwo\nthree\n")
    await box.write("old.txt", b"going\n")

    tried = await box.apply_patch(DIFF, dry_run=True)
    assert await box.read("hello.txt") == b"one\ntwo\nthree\n"
    changed = await box.apply_patch(DIFF)

    assert sorted(changed) == sorted(tried) == ["hello.txt", "new/file.txt", "old.txt"]
    assert await box.read("hello.txt") == b"one\n2\nthree\n"
    assert await box.read("new/file.txt") == b"made\n"
    with pytest.raises(untax.NotFound):
        await box.stat("old.txt")


async def test_a_patch_is_applied_whole_or_not_at_all(box):
    """The last part does not apply, so the first is not applied either."""
    await box.write("hello.txt", b"one\ntwo\nthree\n")
    await box.write("old.txt", b"something else\n")

    with pytest.raises(untax.EditConflict):
        await box.apply_patch(DIFF)

    assert await box.read("hello.txt") == b"one\ntwo\nthree\n"
    with pytest.raises(untax.NotFound):
        await box.stat("new/file.txt")


async def test_a_patch_finds_its_place_when_lines_have_moved(box):
    await box.write("hello.txt", b"zero\nzero\nzero\none\ntwo\nthree\nfour\n")
    await box.apply_patch("--- a/hello.txt\n+++ b/hello.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n")

    assert await box.read("hello.txt") == b"zero\nzero\nzero\none\n2\nthree\nfour\n"


@pytest.mark.parametrize("name", ["../../escape.txt", "/tmp/untax-escape.txt"])
async def test_a_patch_does_not_leave_its_directory(box, name):
    await box.mkdir("repo/deep")
    with pytest.raises(untax.UntaxError):
        await box.apply_patch(f"--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n", "repo/deep", strip=0)
    assert (await box.shell("ls escape.txt ../escape.txt /tmp/untax-escape.txt 2>/dev/null")).stdout == b""


async def test_a_text_that_is_no_patch_is_refused(box):
    with pytest.raises(untax.UntaxError):
        await box.apply_patch("this is no diff\n")
