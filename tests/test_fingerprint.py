"""Fingerprints tell algorithms and data apart, and nothing else."""

import enum
import subprocess
import sys
import threading
import types
from collections import deque
from decimal import Decimal
from fractions import Fraction

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from test_contract import ALGORITHMS

from fedjax_nc import _fingerprint, heads, local, losses, models
from fedjax_nc._fingerprint import of_algorithm, of_arrays
from fedjax_nc.algorithms import fedavg, fedprox
from fedjax_nc.objective import objective


def of_model(module):
    task = objective(models.from_flax(module), heads.linear(), losses.cross_entropy)
    return of_algorithm(fedavg.algorithm(task, toys.opt))


def test_a_field_that_a_record_has_got_since_is_left_out_while_it_is_empty():
    """Checkpoints of versions without it still belong to the same algorithm."""
    plan = local.Plan(8, 2, (4,))
    assert list(_fingerprint.words(plan, {})) == [
        'fedjax_nc.local.Plan', 'int 8', 'int 2', 'builtins.tuple', 'int 4', 'end', 'end',
    ]  # fmt: skip
    several = [
        of_algorithm(fedavg.algorithm(toys.task, toys.opt, plan=plan._replace(narrower=n))) for n in ((), (1,), (2,))
    ]
    assert len(set(several)) == 3


class Wide(nn.Module):
    a: int = 1
    b: int = 2
    c: int = 3
    d: float = 0.5
    e: tuple = (1, 2)

    def __call__(self, x, *, mask=None, train=False):
        return x


def test_every_field_of_a_module_counts():
    known = {of_model(Wide())}
    for change in ({'a': 2}, {'b': 3}, {'c': 4}, {'d': 0.25}, {'e': (1, 3)}):
        known.add(of_model(Wide(**change)))
    assert len(known) == 6
    assert of_model(models.ResNet20(norm='group')) != of_model(models.ResNet20(norm='batch'))
    assert of_model(models.MLP((64, 64))) != of_model(models.MLP((64, 65)))


class Part(nn.Module):
    steep: float = 1.0

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) * self.steep


class Whole(nn.Module):
    def setup(self):
        self.part = Part()

    def __call__(self, x, *, mask=None, train=False):
        return nn.relu(self.part(x))


class Base:
    slope = 0.1

    def __call__(self, x):
        return jnp.where(x > 0, x, self.slope * x)


class Leaky(Base):
    __slots__ = ('own',)

    def __init__(self, own):
        self.own = own

    @property
    def twice(self):
        return 2 * self.own


@pytest.mark.parametrize(
    ('value', 'change'),
    [
        (Whole(), (Whole, '__call__', lambda self, x, *, mask=None, train=False: jnp.tanh(self.part(x)))),
        (Whole(), (Part, '__call__', nn.compact(lambda self, x: nn.Dense(3)(x) - self.steep))),
        (Leaky(1), (Base, '__call__', lambda self, x: jnp.maximum(x, 0))),
        (Leaky(1), (Base, 'slope', 0.2)),
        (Leaky(1), (Leaky, 'twice', property(lambda self: 3 * self.own))),
        (Leaky(1).__call__, (Base, 'slope', 0.2)),
    ],
)
def test_what_a_class_of_users_says_counts(value, change, monkeypatch):
    before = of_algorithm(value)
    assert of_algorithm(value) == before
    monkeypatch.setattr(*change)
    assert of_algorithm(value) != before


def test_classes_of_installed_packages_go_by_name(monkeypatch):
    before = of_algorithm(models.MLP((3,)))
    monkeypatch.setattr(models.MLP, 'new_in_a_later_version', 3, raising=False)
    assert of_algorithm(models.MLP((3,))) == before


class Kind(enum.Enum):
    A = 1
    B = 2


class Loss:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, logits, labels, counts):
        return self.factor * losses.cross_entropy(logits, labels)

    def method(self, logits, labels, counts):
        return self(logits, labels, counts)


FACTOR = 1.0


def helper(x):
    return FACTOR * x


PAIRS = {
    'numbers': (0.1, 0.2),
    'types of numbers': (1, 1.0),
    'texts': ('a', 'b'),
    'dicts of dicts': ({'a': {'x': 1}, 'b': {'x': 2}, 'c': {'x': 3}}, {'a': {'x': 1}, 'b': {'x': 2}, 'c': {'x': 4}}),
    'lists of tuples': ([(1, 2), (3, 4), (5, 6)], [(1, 2), (3, 4), (5, 7)]),
    'arrays': (np.arange(3.0), np.array([0.0, 1.0, 2.5])),
    'jax arrays': (jnp.arange(3), jnp.arange(4)),
    'enums': (Kind.A, Kind.B),
    'ranges': (range(3), range(5)),
    'fractions': (Fraction(1, 3), Fraction(1, 2)),
    'decimals': (Decimal('0.1'), Decimal('0.2')),
    'queues': (deque([1]), deque([2])),
    'slots': (Leaky(1), Leaky(2)),
    'slices': (slice(1, 2), slice(1, 3)),
    'namespaces': (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    'objects that are called': (Loss(1.0), Loss(2.0)),
    'bound methods': (Loss(1.0).method, Loss(2.0).method),
    'constants in code': (lambda x: x + 1, lambda x: x + 2),
    'instructions': (lambda x, y: x + y, lambda x, y: x - y),
    'defaults': (lambda x, y=1: x, lambda x, y=2: x),
    'optimizers': (local.sgd(0.1), local.sgd(0.1, decay=0.9)),
    'penalties': (fedprox.proximal(0.1), fedprox.proximal(0.2)),
}


@pytest.mark.parametrize(('one', 'other'), PAIRS.values(), ids=PAIRS)
def test_what_differs_differs(one, other):
    assert of_algorithm(one) == of_algorithm(one)
    assert of_algorithm(one) != of_algorithm(other)


def test_what_a_function_takes_from_its_module_counts(monkeypatch):
    before = of_algorithm(lambda x: helper(x))
    monkeypatch.setattr(sys.modules[__name__], 'FACTOR', 2.0)
    assert of_algorithm(lambda x: helper(x)) != before


def test_what_a_function_takes_from_a_module_of_the_users_counts(monkeypatch):
    """As does what that takes from another; what none of them names does not."""
    inner, outer = types.ModuleType('inner_of_mine'), types.ModuleType('outer_of_mine')
    exec('def weigh(x):\n    return FACTOR * x\nFACTOR = 1.0\nOTHER = 1.0', vars(inner))
    outer.inner, inner.outer = inner, outer  # a cycle, as in packages
    monkeypatch.setitem(globals(), 'outer_of_mine', outer)

    def found():
        return of_algorithm(lambda x: outer_of_mine.inner.weigh(x))  # noqa: F821

    before = found()
    inner.OTHER = 2.0
    assert found() == before
    inner.FACTOR = 2.0
    assert found() != before
    inner.FACTOR = 1.0
    assert found() == before
    inner.weigh = lambda x: x
    assert found() != before


def test_algorithms_are_told_apart_and_made_again_are_the_same():
    found = {name: of_algorithm(algorithm) for name, algorithm in ALGORITHMS.items()}
    assert len(set(found.values())) == len(found)
    again = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    assert of_algorithm(again) == of_algorithm(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN))


@pytest.mark.slow
def test_it_is_the_same_in_every_process_and_beside_other_threads():
    code = (
        'import sys; sys.path.insert(0, sys.argv[1])\n'
        'from test_contract import ALGORITHMS; from fedjax_nc._fingerprint import of_algorithm\n'
        'print(*[of_algorithm(a) for a in ALGORITHMS.values()])'
    )
    told = {
        subprocess.run(
            [sys.executable, '-c', code, toys.__file__.rsplit('/', 1)[0]], env={'PYTHONHASHSEED': seed, 'PATH': ''},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in '12'
    }  # fmt: skip
    assert len(told) == 1
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            [(i, str(i)) for i in range(100)]

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert len({of_model(models.ResNet20()) for _ in range(30)}) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_arrays_go_by_type_shape_and_value():
    base = {'a': np.arange(6.0), 'b': np.float32(1)}
    assert of_arrays(base) == of_arrays({'a': np.arange(6.0), 'b': np.float32(1)})
    others = [
        {**base, 'a': np.arange(6.0).reshape(2, 3)},
        {**base, 'a': np.arange(6)},
        {**base, 'a': np.array([0.0, 1, 2, 3, 4, 6])},
        {**base, 'b': np.float64(1)},
    ]
    assert len({of_arrays(a) for a in (base, *others)}) == 5
    assert _fingerprint.of_arrays(jnp.arange(3, dtype=jnp.int32)) == of_arrays(np.arange(3, dtype=np.int32))
