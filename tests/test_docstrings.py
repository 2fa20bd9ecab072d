"""Docstrings: the examples in them run, and they say what callers must know."""

import ast
import doctest
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'fedjax_nc'
MODULES = re.findall(r'\]\(generated/([\w.]+)\.md\)', (ROOT / 'docs/api/index.md').read_text())
"""The public ones."""

TODO: set[str] = set()
"""Modules whose docstrings do not say everything yet. One that does is to be taken out."""

REFUSING = ('number', 'whole', 'labels', 'rows', 'finite', 'kind', 'optimizer', 'key')
"""Functions of `checks`, and those of the same names elsewhere, that raise ValueError."""

OBVIOUS = {'self', 'cls', 'key', 'algorithm', 'state', 'data'}
"""Arguments that mean the same everywhere, what `base` says of them."""


def module_of(path: Path) -> str:
    """A file's name as a module of the package."""
    return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts).removesuffix('.__init__')


EXAMPLES = sorted(module_of(path) for path in PACKAGE.rglob('*.py') if '>>> ' in path.read_text())


@pytest.mark.parametrize('name', EXAMPLES)
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, with their own imports."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f'fedjax_nc.{name}')
    tests = [test for test in doctest.DocTestFinder().find(module, globs={}) if test.examples]
    assert tests
    said: list[str] = []
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test, out=said.append)
    assert not runner.failures, ''.join(said)


@pytest.mark.parametrize('name', MODULES)
def test_public_names_say_what_callers_must_know(name: str) -> None:
    found = list(complaints(importlib.import_module(f'fedjax_nc.{name}')))
    if name in TODO:
        assert found, f'{name} says everything: take it out of TODO'
        pytest.xfail('; '.join(found))
    assert not found, '\n'.join(found)


def test_every_public_module_is_in_the_reference() -> None:
    folders = (PACKAGE, PACKAGE / 'algorithms', PACKAGE / 'metrics')
    files = (path for folder in folders for path in folder.glob('[!_]*.py'))
    assert sorted(set(map(module_of, files)) - set(MODULES)) == []


def complaints(module: ModuleType) -> Iterator[str]:
    """What public names of a module do not say."""
    if not inspect.getdoc(module):
        yield f'{module.__name__} has no docstring'
    prefix = module.__name__.removeprefix('fedjax_nc.')
    seen = set()
    for name, value in public(module):
        if isinstance(value, type):
            yield from of_class(f'{prefix}.{name}', value)
        elif callable(value) and inspect.isroutine(inspect.unwrap(value)):
            yield from of_function(f'{prefix}.{name}', value)
        else:
            continue
        seen.add(name)
    tree, lines = parsed(module)
    for at, statement in enumerate(tree.body):
        for name in assigned(statement):
            after = tree.body[at + 1] if at + 1 < len(tree.body) else None
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            commented = lines[statement.lineno - 2].startswith('#:') or '#:' in lines[(statement.end_lineno or 0) - 1]
            if not (name.startswith('_') or name in seen or said or commented):
                yield f'{prefix}.{name} has no docstring'


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions: what a package says that it exports, or what a module defines, or imports by `as`."""
    names = getattr(module, '__all__', None)
    if names is None:
        aliases = [a for node in parsed(module)[0].body if isinstance(node, ast.ImportFrom) for a in node.names]
        passed_on = {a.name for a in aliases if a.asname == a.name}
        own = [n for n, value in vars(module).items() if getattr(value, '__module__', None) == module.__name__]
        names = [name for name in dict.fromkeys([*own, *sorted(passed_on)]) if not name.startswith('_')]
    for name in names:
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield name, value


@functools.cache
def parsed(module: ModuleType) -> tuple[ast.Module, list[str]]:
    """The program of a module, and its lines."""
    source = inspect.getsource(module)
    return ast.parse(source), source.splitlines()


def assigned(statement: ast.stmt) -> list[str]:
    """Names that a statement of a module gives to constants."""
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def of_class(where: str, value: type) -> Iterator[str]:
    """What a class, or one of its public methods, does not say."""
    doc = value.__doc__ or ''
    if not doc or doc.startswith(f'{value.__name__}('):  # which Python makes for records
        yield f'{where} has no docstring'
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, '__func__', member)
        if not inspect.isfunction(function) or function.__code__.co_filename != inspect.getsourcefile(value):
            continue  # made by Python or by flax
        if not name.startswith('_'):
            yield from of_function(f'{where}.{name}', function, doc)
        elif name == '__init__':
            yield from of_function(f'{where}.{name}', function, doc, documented=True)


def of_function(where: str, value: Callable[..., Any], around: str = '', *, documented: bool = False) -> Iterator[str]:
    """What a function does not say: anything, that it raises ValueError, or what its arguments are.

    `around` is what its class says, `documented` whether that is enough.
    """
    doc = inspect.getdoc(value) or ''
    if not doc and not documented:
        yield f'{where} has no docstring'
        return
    doc += around
    if re.search(r'(?m)^\s*(\w+: )?[A-Z]\.$', doc):
        yield f'{where} has a line such as `clients: K.`, which the site takes for the first of a list'
    if 'ValueError' not in doc and refuses(value):
        yield f'{where} does not say that it raises ValueError'
    if re.search(r'[Aa]rguments\b[^.]*\bthose\s+of\b|^As `', doc):
        return
    names = [p.lstrip('_') for p in inspect.signature(value).parameters if p not in OBVIOUS]
    unsaid = [name for name in names if not re.search(rf'\b{name}\b', doc)]
    if len(names) > 1 and unsaid:
        yield f'{where} does not say what {", ".join(unsaid)} {"is" if len(unsaid) == 1 else "are"}'


def refuses(value: Callable[..., Any]) -> bool:
    """Whether a function, or what it returns, raises ValueError itself, or calls what refuses wrong arguments.

    Private functions of its module are looked into.
    """
    function = inspect.unwrap(value)
    module = inspect.getmodule(function)
    if module is None or not module.__name__.startswith('fedjax_nc'):
        return False
    own = {node.name: node for node in parsed(module)[0].body if isinstance(node, ast.FunctionDef)}
    ahead: list[ast.AST] = [ast.parse(textwrap.dedent(inspect.getsource(function)))]
    seen: set[str] = set()
    for body in ahead:
        for node in ast.walk(body):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(raised, ast.Name) and raised.id == 'ValueError':
                    return True
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                if called.value.id in ('checks', 'arguments') and called.attr in REFUSING:
                    return True
            elif isinstance(called, ast.Name) and called.id.startswith('_') and called.id in {*own} - seen:
                seen.add(called.id)
                ahead.append(own[called.id])
    return False
