"""The rules of the house that ruff and mypy do not hold."""

import ast
import functools
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("dsl", "codegen", "runtime")
LIBRARY = (*LAYERS, "benchmarks")

SOFT_FILE_LINES = 350
HARD_FILE_LINES = 500
FUNCTION_LINES = 60
# Files over the soft limit, each with a reason. Keep it short.
LONG_FILES: frozenset[str] = frozenset()

KNOBS = frozenset(
    f"ATTNCC_{name}" for name in ("CACHE_DIR", "DUMP", "CHECK", "BACKEND", "EXPECT_HIT")
)
KNOBS_FILE = "runtime/knobs.py"
TORCH_IN_DSL = "dsl/interp.py"

# Written in pieces, so that this file does not contain what it forbids.
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:wo" r"rk|ro" r"ot|ho" r"me)/")
REGISTRY_HOST = re.compile(r"py" r"pi\.org|python" r"hosted\.org|download\.py" r"torch\.org")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: where, what, and whether it happens when the module is imported."""

    line: int
    target: str
    eager: bool


def library_files() -> list[Path]:
    return sorted(path for folder in LIBRARY for path in (ROOT / folder).rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        return ["." * node.level + (node.module or "")]
    if node.module == "attncc":
        return [f"attncc.{alias.name}" for alias in node.names]
    return [node.module or ""]


def walk_imports(node: ast.AST, eager: bool = True) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import() | ast.ImportFrom():
                for target in import_targets(child):
                    yield Import(child.lineno, target, eager)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from walk_imports(child, eager=False)
            case _ if is_type_checking(child):
                yield from walk_imports(child, eager=False)
            case _:
                yield from walk_imports(child, eager)


def imports_under(*folders: str) -> Iterator[tuple[str, Import]]:
    for path in library_files():
        name = label(path)
        if name.split("/")[0] in folders:
            for found in walk_imports(parse(path)):
                yield name, found


def within(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def test_library_files_stay_short() -> None:
    lengths = {label(p): len(p.read_text(encoding="utf-8").splitlines()) for p in library_files()}
    assert {n: c for n, c in lengths.items() if c > HARD_FILE_LINES} == {}
    over = {n: c for n, c in lengths.items() if c > SOFT_FILE_LINES}
    assert {n: c for n, c in over.items() if n not in LONG_FILES} == {}
    assert over.keys() >= LONG_FILES, "a listed file is short again or gone: take it off the list"
    assert len(LONG_FILES) <= 5


def test_functions_stay_short() -> None:
    long = [
        f"{label(path)}:{node.lineno} {node.name}: {length} lines"
        for path in library_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert long == []


def test_imports_are_absolute_and_start_at_attncc() -> None:
    wrong = [
        f"{name}:{found.line} {found.target}"
        for name, found in imports_under(*LIBRARY)
        if found.target.startswith(".") or any(within(found.target, layer) for layer in LAYERS)
    ]
    assert wrong == []


@pytest.mark.parametrize("index", range(len(LAYERS)), ids=LAYERS)
def test_a_layer_imports_only_itself_and_those_below(index: int) -> None:
    allowed = [f"attncc.{layer}" for layer in LAYERS[: index + 1]] + ["attncc.__version__"]
    wrong = [
        f"{name}:{found.line} {found.target}"
        for name, found in imports_under(LAYERS[index])
        if within(found.target, "attncc") and not any(within(found.target, a) for a in allowed)
    ]
    assert wrong == []


def test_front_end_and_codegen_import_without_torch() -> None:
    wrong = [
        f"{name}:{found.line}"
        for name, found in imports_under("dsl", "codegen")
        if found.eager and within(found.target, "torch") and name != TORCH_IN_DSL
    ]
    assert wrong == []


def test_nothing_below_runtime_imports_the_interpreter_eagerly() -> None:
    interpreter = "attncc.dsl.interp"
    wrong = [
        f"{name}:{found.line}"
        for name, found in imports_under("dsl", "codegen")
        if found.eager and within(found.target, interpreter)
    ]
    assert wrong == []


def test_one_module_of_codegen_imports_jinja2() -> None:
    users = {name for name, found in imports_under(*LIBRARY) if within(found.target, "jinja2")}
    assert len(users) <= 1
    assert all(name.startswith("codegen/") for name in users)


def test_only_the_knobs_module_names_environment_variables() -> None:
    pattern = re.compile(r"ATTNCC_[A-Z_]+")
    files = [*library_files(), ROOT / ".pkg/attncc/__init__.py"]
    named = {label(p): set(pattern.findall(p.read_text(encoding="utf-8"))) for p in files}
    assert {name for name, found in named.items() if found} <= {KNOBS_FILE}
    assert named.get(KNOBS_FILE, set()) <= KNOBS


def subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def error_classes() -> set[type]:
    errors = importlib.import_module("attncc.dsl.errors")
    for module in pkgutil.walk_packages(getattr(errors, "__path__", []), "attncc.dsl.errors."):
        importlib.import_module(module.name)
    found = set(subclasses(errors.AttnccError))
    return {cls for cls in found if within(cls.__module__, "attncc")}


def called_names() -> set[str]:
    calls = (n for p in library_files() for n in ast.walk(parse(p)) if isinstance(n, ast.Call))
    return {ast.unparse(call.func).split(".")[-1] for call in calls}


def test_every_error_class_is_named_in_a_test() -> None:
    # A base class that nothing constructs only groups others.
    constructed = called_names()
    wanted = {
        cls.__name__
        for cls in error_classes()
        if not cls.__subclasses__() or cls.__name__ in constructed
    }
    tests = [p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__).resolve()]
    words = set(re.findall(r"\w+", "\n".join(p.read_text(encoding="utf-8") for p in tests)))
    assert wanted, "no error class found"
    assert sorted(wanted - words) == []


def test_the_folders_cannot_be_imported_bare() -> None:
    # Fails under `python -m pytest`, which puts the root on sys.path: use the pytest script.
    bare = [name for name in (*LAYERS, "templates") if importlib.util.find_spec(name)]
    assert bare == []


def test_the_package_imports_from_any_folder_and_only_once(tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys, attncc.dsl\n"
        "bare = [n for n in ('dsl', 'codegen', 'runtime') if importlib.util.find_spec(n)]\n"
        "sys.exit(f'importable: {bare}' if bare else 0)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / '.pkg')!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr


def repository_files() -> list[Path]:
    """Tracked files and those that would be; every source file where there is no git checkout."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        kinds = {".py", ".md", ".toml", ".jinja", ".txt", ".json"}
        hidden = (p for p in ROOT.rglob("*") if p.suffix in kinds)
        paths = [p for p in hidden if not any(x.startswith(".") for x in p.relative_to(ROOT).parts)]
    else:
        paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_no_file_names_a_machine_path_or_a_registry_host() -> None:
    wrong = []
    for path in repository_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
                wrong.append(f"{label(path)}:{number}")
    assert wrong == []


def test_every_template_variable_is_given() -> None:
    render = importlib.import_module("attncc.codegen.render")
    templates = list(render.template_variables())
    assert templates, "no template found"
    unknown = {
        name: sorted(extra)
        for name, undeclared, allowed in templates
        if (extra := set(undeclared) - set(allowed))
    }
    assert unknown == {}
