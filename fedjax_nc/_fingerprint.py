"""Fingerprints: whether two programs mean the same algorithm and the same data, and whether a file still holds what was
written.

Arrays go by their values. Algorithms are closures, and go by what they close over: names of functions, and every
number, array, option and function that these hold, down to the last; functions of users also by their code and what
they take from their module and from modules of users that it imports, and classes of users by their methods and
constants. The same program has the same fingerprint in every process and on every device. What is not seen is the code
of classes of installed packages, what a function imports while it runs, and what an object of a compiled class holds
without attributes.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import numbers
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from fedjax_nc.base import Tree

LIBRARIES = ('fedjax_nc.', 'jax.', 'jaxlib.', 'optax.', 'flax.', 'chex.', 'numpy.', 'functools.')
"""Whose functions go by name, so that a new version of one, or of a docstring, is still the same algorithm."""

ADDED: dict[str, dict[str, Any]] = {'fedjax_nc.local.Plan': {'narrower': ()}}
"""Fields of records that earlier versions had not, and what stands for that: checkpoints of those are still known."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, np.ndarray, np.generic, jax.Array)
MADE = ('__init__', '__new__', '__repr__', '__eq__', '__hash__', '__setattr__', '__delattr__', '__replace__')
"""What `dataclasses` and flax write into classes."""


def of_arrays(a: Tree) -> str:
    """Of types, shapes and values of all leaves: 32 hexadecimal digits. With several processes all have to ask."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(a):
        values = np.ascontiguousarray(on_host(leaf))
        digest.update(f'{values.dtype} {values.shape} '.encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def on_host(leaf: Any) -> NDArray[Any]:
    """A leaf's values, also where the processes hold parts of it."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def of_algorithm(algorithm: Any) -> str:
    """Of a record of functions, and all that they close over: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for word in words(algorithm, {}):
        digest.update(word.encode() + b'\0')
    return digest.hexdigest()


def words(value: Any, met: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """What a value is, word by word. What was met before, as in a cycle, goes by its number."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.dtype | enum.Enum):
        yield f'{type(value).__name__} {value!r}'
        return
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        yield f'{getattr(value, "__module__", "")}.{getattr(value, "__qualname__", value.__name__)}'
        if not (isinstance(value, type) and of_user(value)):
            return
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        yield f'array {of_arrays(value)}'
        return
    if isinstance(value, range | numbers.Number):
        yield f'{type(value).__name__} {value}'
        return
    if id(value) in met:
        yield f'as {met[id(value)][0]}'
        return
    met[id(value)] = len(met), value  # kept, or another value could come to lie where it was
    yield f'{type(value).__module__}.{type(value).__qualname__}'
    for part in parts(value):
        yield from words(part, met)
    yield 'end'


def parts(value: Any) -> Iterator[Any]:
    """What a compound value is made of."""
    if isinstance(value, type):
        yield from body(value)
        return
    if of_user(type(value)):
        yield type(value)
        for cls in type(value).__mro__:
            slots = vars(cls).get('__slots__', ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield from (name, getattr(value, name, None))
    if isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield from (name, value[name])
    elif isinstance(value, tuple | list | collections.deque):
        if added := ADDED.get(f'{type(value).__module__}.{type(value).__qualname__}'):
            named = zip(type(value)._fields, value, strict=True)  # type: ignore[union-attr]
            yield from (part for name, part in named if name not in added or part != added[name])
            return
        yield from value
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield f'{value.__module__}.{value.__qualname__}'
        # That of a decorator of a library, such as flax has on methods, is the module where it is written.
        if not f'{value.__globals__.get("__name__", value.__module__)}.'.startswith(LIBRARIES):
            yield from code(value.__code__, value.__doc__, value.__globals__)
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                yield 'empty'
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from (field.name, getattr(value, field.name, None))
    elif hasattr(value, '__wrapped__'):  # a compiled function
        yield value.__wrapped__
    else:
        yield from (getattr(value, '__dict__', None),)


def of_user(value: type | types.ModuleType) -> bool:
    """Whether a class or a module is of no installed package, and of none of Python's."""
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    if f'{module}.'.startswith(LIBRARIES) or module.partition('.')[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), '__file__', None) or ''
    return not {'site-packages', 'dist-packages'} & set(Path(file).parts)


def body(cls: type) -> Iterator[Any]:
    """What a user's class says: those that it is made from, its methods and constants, by name."""
    yield from cls.__bases__
    for name, value in sorted(vars(cls).items()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget, value.fset
        elif isinstance(value, functools.cached_property):
            value = value.func
        dunder = name.startswith('__') and name.endswith('__')
        if name in MADE or (dunder and not isinstance(value, types.FunctionType)):
            continue  # how an object is made shows in the object
        if isinstance(value, (*PLAIN, types.FunctionType, functools.partial, type)) or hasattr(value, '__wrapped__'):
            yield from (name, value)


def code(of: types.CodeType, doc: str | None, scope: Mapping[str, Any]) -> Iterator[Any]:
    """What a user's function does: its instructions and constants, and what it takes from its module."""
    yield from (of.co_names, of.co_code)
    yield from taken(of.co_names, scope, set())
    for constant in of.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code(constant, None, scope)
        elif constant != doc:
            yield constant


def taken(names: Iterable[str], scope: Mapping[str, Any], met: set[int]) -> Iterator[Any]:
    """What these names stand for in a module, and in the user's modules that it takes from there, as `helpers.mean`."""
    met.add(id(scope))
    for name in names:
        if name in scope:
            value = scope[name]
            yield value
            if isinstance(value, types.ModuleType) and of_user(value) and id(vars(value)) not in met:
                yield from taken(names, vars(value), met)
