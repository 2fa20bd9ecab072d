"""What else is measured of the generic model at each evaluation, by name: neural collapse and others, or one's own."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import checks, evaluate, heads, losses
from fedjax_nc._differences import in_one_line
from fedjax_nc._training import OWN as OF_ROWS
from fedjax_nc.base import Algorithm, Array, FederatedData, Model, Objective, State, Variables
from fedjax_nc.experiments import own
from fedjax_nc.metrics import collapse

TAKEN = (*OF_ROWS, 'many', 'medium', 'few', 'memory_norm', 'memory_margin', 'temperature')
"""What evaluations measure anyway, beside accuracies."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a probe may look at: the generic model after some round, and the data."""

    algorithm: Algorithm  #: what predicts with the generic model
    state: State  #: after the round; what clients keep included
    #: what makes features of examples with `variables`; None of a recipe that does not say
    task: Objective | Model | None
    variables: Variables | None  #: of the generic model; None of a server of another kind
    x: Array  #: [n, ...] examples of the test set
    y: Array  #: [n] their labels
    train: FederatedData  #: what clients train on
    test: FederatedData  #: what they are tested on
    table: Array  #: counts [C, C] of the model on the test set, as `evaluate.generic` makes them

    @property
    def classes(self) -> int:
        """Their number, C."""
        return self.train.num_classes

    @functools.cached_property
    def features(self) -> Array:
        """Features [n, D] of the test set.

        Raises:
          ValueError: of a method of one's own whose recipe does not say how they are made.
        """
        if self.task is None or self.variables is None:
            raise ValueError(
                'there are no features to look at: let recipes.trained make the recipe, or give it its `task`; and '
                'where the server has its model by another name, `variables`, which finds it'
            )
        return evaluate.features(self.task, self.variables, self.x)

    @functools.cached_property
    def aligned(self) -> tuple[Array, Array] | None:
        """Features [n, d] and class vectors [d, C] where the classifier compares them; None where it has none.

        They are behind a head's projection `proj`, if it has one. Class vectors are called as those of the library's
        heads: learned ones `w [d, C]`, frozen ones `v [d, C]`, prototypes `w [C, d]` among what is fixed.
        """
        z, v = self.features, self.variables
        if v is None:
            return None
        params, fixed = (part if isinstance(part, Mapping) else {} for part in (v.params.get('head'), v.fixed))
        fixed = fixed.get('head', fixed)  # memory vectors lie beside it
        if 'proj' in params:
            z = heads.dense(params['proj'], z)
        vectors = fixed.get('v', params.get('w', jnp.swapaxes(fixed['w'], 0, 1) if 'w' in fixed else None))
        return (z, vectors) if np.shape(vectors) == (z.shape[1], self.classes) else None


@functools.partial(jax.jit, static_argnums=2)
def _collapsed(z: Array, y: Array, classes: int) -> dict[str, Array]:
    return {'nc1': collapse.nc1(z, y, classes), 'nc2': collapse.nc2(z, y, classes)}


def _collapse(seen: Seen) -> dict[str, Array]:
    found = _collapsed(seen.features, seen.y, seen.classes)
    if seen.aligned is not None:
        found['nc3'] = jax.jit(collapse.nc3)(seen.aligned[0], seen.y, seen.aligned[1]).mean
    return found


def _loss(seen: Seen) -> dict[str, Array]:
    return {'test_loss': evaluate.mean(seen.algorithm, seen.state, _cross_entropy, seen.x, seen.y)}


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return losses.cross_entropy(logits, labels, labels)  # whose counts it does not look at


def _top5(seen: Seen) -> dict[str, Array]:
    return {'top5_accuracy': evaluate.mean(seen.algorithm, seen.state, evaluate.among(5), seen.x, seen.y)}


def _f1(seen: Seen) -> dict[str, Array]:
    return {'macro_f1': evaluate.macro_f1(seen.table)}


class Probe(NamedTuple):
    """A function of what is seen, and the names of its numbers, () where nobody says."""

    measure: Callable[[Seen], Mapping[str, Any]]
    names: tuple[str, ...] = ()


PROBES = {
    'collapse': Probe(_collapse, ('nc1', 'nc2', 'nc3')),
    'loss': Probe(_loss, ('test_loss',)),
    'top5': Probe(_top5, ('top5_accuracy',)),
    'f1': Probe(_f1, ('macro_f1',)),
}
"""Of the generic model on the test set: neural collapse (NC1 and NC2 of its features, NC3 where its class vectors are),
the mean cross entropy, how often the true class is among the first five, and the macro F1 score."""


def named(name: str) -> Probe:
    """The probe of a name in `PROBES`, or of one's own: 'package.module:function', of a module to import.

    The function is `(seen) -> {name: number}`, of a `Seen`. Its names are those of columns in `metrics.csv`, and
    `global_NAME_lastN` in `summary.json`.

    Raises:
      ValueError: for another name, a module that cannot be imported, or what is no such function in it.
    """
    if not own.is_own('a probe', name, PROBES, 'function'):
        return PROBES[name]
    function: Callable[[Seen], Mapping[str, Any]] = own.attribute('probe', name)
    checks.called(f'probe {name}', function, 'seen', 'that of the guide to experiments')
    return Probe(function)


def told(probes: Sequence[str]) -> tuple[str, ...] | None:
    """The names of all numbers that probes give; None where one of a user's own is among them, which nobody knows."""
    found = [named(name).names for name in probes]
    return tuple(name for names in found for name in names) if all(found) else None


def taken(name: str) -> bool:
    """Whether evaluations call something so that is measured anyway."""
    return name in TAKEN or name.startswith('accuracy')


def take(probes: Sequence[str], seen: Seen) -> Iterator[tuple[str, float]]:
    """The numbers of all probes, by name.

    Args:
      probes: their names.
      seen: what they look at.

    Raises:
      ValueError: for whatever one of a user's own raises, or what is no number by a name, or by one that is taken.
    """
    before = set[str]()
    for name in probes:
        try:
            found = named(name).measure(seen)
        except Exception as error:
            if name in PROBES:
                raise
            raise ValueError(f'probe {name}: {in_one_line(error)}') from error
        if not isinstance(found, Mapping):
            raise ValueError(f'probe {name} must return numbers by their names, not {checks.shown(found)}')
        for what, value in found.items():
            if not isinstance(what, str) or not what.isidentifier():
                raise ValueError(f'probe {name} calls a number {checks.shown(what)}: take a word, as Python names have')
            if what in before or taken(what):
                raise ValueError(f'probe {name} calls a number {what}, as another is called: take another word')
            before.add(what)
            yield what, _number(name, what, value)


def _number(name: str, what: str, value: Any) -> float:
    try:
        return float(value)
    except Exception as error:
        raise ValueError(f'probe {name} must return numbers, and {what} is {checks.shown(value)}') from error


def finite(value: float) -> float | None:
    """The number, or None for one that JSON has no word for."""
    return value if math.isfinite(value) else None
