"""The cell's tokenizer and CPython's own parser must agree on every definition in real code."""

import ast
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
KINDS = {ast.FunctionDef: 1, ast.AsyncFunctionDef: 2, ast.ClassDef: 3}

Symbol = tuple[int, int, str]  # line, kind, dotted name


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver around native/symbols.c, compiled for this run."""
    compiler = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt install gcc libc6-dev")
    program = tmp_path_factory.mktemp("symbols") / "symbols"
    sources = [str(NATIVE / "tests" / "symbols_main.c"), str(NATIVE / "symbols.c")]
    subprocess.run([compiler, "-std=c11", "-O2", f"-I{NATIVE}", *sources, "-o", str(program)], check=True)
    return program


def found_by_cell(tokenizer: Path, files: list[Path]) -> dict[str, list[Symbol]]:
    listing = "".join(f"{file}\n" for file in files).encode()
    output = subprocess.run([tokenizer], input=listing, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, list[Symbol]] = {str(file): [] for file in files}
    for row in output.decode().splitlines():
        path, line, kind, name = row.split("\t")
        found[path].append((int(line), int(kind), name))
    return found


def found_by_ast(node: ast.AST, scope: str = "") -> Iterator[Symbol]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = scope + child.name
            yield child.lineno, KINDS[type(child)], name
            yield from found_by_ast(child, name + ".")
        else:
            yield from found_by_ast(child, scope)


def expected(file: Path) -> list[Symbol] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return sorted(found_by_ast(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError, RecursionError):
            return None  # test data that is broken on purpose


def compare(tokenizer: Path, files: list[Path]) -> int:
    by_cell = found_by_cell(tokenizer, files)
    by_ast = {file: symbols for file in files if (symbols := expected(file)) is not None}
    for file, symbols in by_ast.items():
        assert sorted(by_cell[str(file)]) == symbols, file
    return len(by_ast)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two thousand files through CPython's parser: seconds, and minutes on a machine that does other things too
def test_every_definition_of_the_standard_library_is_found(tokenizer: Path) -> None:
    """Same names, kinds and lines, file by file."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.rglob("*.py")) if "site-packages" not in file.parts]

    assert compare(tokenizer, files) > 500


def test_every_definition_of_attrs_is_found(tokenizer: Path) -> None:
    """attrs is the repository that tier T1 works on."""
    try:
        distribution = metadata.distribution("attrs")
    except metadata.PackageNotFoundError:
        pytest.skip("attrs is not installed: pip install attrs")
    files = [Path(str(file.locate())) for file in distribution.files or [] if file.suffix in {".py", ".pyi"}]

    assert compare(tokenizer, files) > 10


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbfdef f(): pass\n",
        b"class A:\r\n  def f(self):\r\n    def g(): pass\r\n  async def h(self): pass\r\n",
        b"class A:\r  def f(self): pass\rdef g(): pass\r",
        b"if x:\n\tdef f():\n\t\tpass\n        class B: pass\n",
        b"\x0cclass A:\n    pass\n\x0c\ndef f(): pass\n",
        b"def \\\n  f(): pass\nasync \\\n def g(): pass\n",
        b"x = '''\ndef no(): pass\n'''\ndef yes(): pass\n",
        b"x = rb'\\'; y = f'{a!r:>{w}}'; z = f'''{\n1}\ndef no(): pass\n'''\ndef yes(): pass\n",
        b"x = f'{{'\ndef yes(): pass\n",
        b"x = f'\\N{DIGIT ONE}{y}'\ndef yes(): pass\n",
        b"x = (\ndef_,\nclass_\n)\n@d(\n1)\n@e\ndef f():\n    return lambda: 0\n",
        b"def f():\n    if x:\n        class C:\n            x = 1; y = 2\n    else:\n        def C(): pass\n    def g(): pass\n",
        b"class A: pass\nclass B: x = 1\ndef f(): return 1\n",
        b"x = 1 if y else 0xdef\ndefine = 1\nasync_ = 2\nclassy = 3\n",
        "class Größe:\n    def maß(self): pass\n".encode(),
        b"def f(a=\"'\", b='\"'):\n    '''doc'''\n# def no()\n    def g(): pass\n",
        b"def f():\n  # comment\n\n # other\n  def g(): pass\n",
        b"def f[T](x: T) -> T: return x\nclass A[T]: pass\n",
        b'x = f"{y["def no(): pass"]}"\ndef yes(): pass\n',
        b"x = f'{f'{f'{1}'}'}'\ndef yes(): pass\n",
        b"def f(): pass",
        b"match x:\n    case {'a': 1}:\n        def f(): pass\n",
    ],
)
def test_awkward_sources(tokenizer: Path, tmp_path: Path, source: bytes) -> None:
    """Each is compared with `ast` where this Python can parse it."""
    file = tmp_path / "awkward.py"
    file.write_bytes(source)
    if expected(file) is None:
        pytest.skip("newer syntax than this Python has")

    compare(tokenizer, [file])
