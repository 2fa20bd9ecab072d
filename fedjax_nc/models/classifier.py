"""Whether a model ends in a classifier, whose place is the head's."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from fedjax_nc.base import Array, Model, Tree

SMOOTH = {
    'add', 'add_any', 'broadcast_in_dim', 'convert_element_type', 'copy', 'div', 'exp', 'log', 'mul', 'reduce_max',
    'reduce_sum', 'reshape', 'squeeze', 'stop_gradient', 'sub', 'transpose',
}  # fmt: skip
"""What may follow a dense layer in a classifier: a bias, softmax, its logarithm; and types and shapes."""


def classifies(model: Model, params: Tree, stats: Tree, x: Array) -> bool:
    """Whether what comes out of a model is that of a dense layer, but for a bias or a softmax after it."""

    def features(x: Array) -> Array:
        return model.features(params, stats, x, None, None)[0]

    closed = jax.make_jaxpr(features)(x)
    return set(_sources(closed.jaxpr, closed.jaxpr.outvars[0])) == {'dot_general'}


def _sources(jaxpr: Any, var: Any) -> set[Any]:
    """What a variable of a program was made by, before operations of `SMOOTH`: names of operations, and arguments."""
    made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    found: set[Any] = set()
    seen, ahead = set(), [var]
    while ahead:
        var = ahead.pop()
        if isinstance(var, Literal) or var in seen:
            continue
        seen.add(var)
        if var not in made:
            found |= {var} & {*jaxpr.invars}
            continue
        equation = made[var]
        name = equation.primitive.name
        alone = name == 'max' and any(isinstance(u, Literal) and u.val == -np.inf for u in equation.invars)
        if name in SMOOTH or alone:
            ahead += equation.invars
        elif name in ('jit', 'pjit', 'checkpoint', 'remat2'):
            inner = equation.params['jaxpr']
            inner = getattr(inner, 'jaxpr', inner)  # closed or not
            for source in _sources(inner, inner.outvars[equation.outvars.index(var)]):
                if source in inner.invars:
                    ahead.append(equation.invars[inner.invars.index(source)])
                else:
                    found.add(source)
        else:
            found.add(name)
    return found
