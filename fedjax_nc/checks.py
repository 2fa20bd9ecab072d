"""Early answers to wrong arguments: one line that says what to pass instead.

What is traced cannot be looked at and passes, but for its shape and type; everything else is looked at once, where it
enters the library.
"""

import contextlib
import inspect
import math
import operator
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from fedjax_nc._differences import in_one_line, reshaped, restructured
from fedjax_nc.base import Aggregator, Algorithm, Array, FederatedData, Head, Info, Model, Objective, State, Tree

MOST_CLASSES = 2**20
"""A label beyond is a mistake. Tables [K, C] and loops over classes would take all memory and time."""


def traced(value: Any) -> bool:
    """Whether an array's values are unknown yet: under `jit`, `vmap` and `grad`, or of a `jax.ShapeDtypeStruct`."""
    return isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)


def number(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    finite: bool = True,
    advice: str = '',
) -> None:
    """Refuses what is no number, or one outside of its range, of Python, NumPy or jax.

    Args:
      name: what the caller calls it.
      value: anything.
      low: lower end of the range.
      high: upper end.
      open_low: whether the lower end is excluded.
      open_high: whether the upper end is.
      finite: whether infinity is refused where `high` is infinite.
      advice: what to do instead, after a colon.

    Raises:
      ValueError: for all but a number in the range; of what is traced, for what is no scalar.
    """
    said = f': {advice}' if advice else ''
    if traced(value):
        if value.ndim:
            raise ValueError(f'{name} must be one number, not an array {value.shape}{said}')
        return
    if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or np.ndim(value):
        raise ValueError(f'{name} must be one number, not {shown(value)}{said}')
    dtype = np.asarray(value).dtype
    if not any(jnp.issubdtype(dtype, known) for known in (jnp.integer, jnp.floating, jnp.bool_)):
        raise ValueError(f'{name} must be one number, not {shown(value)}{said}')
    x = float(value)
    inside = (x > low if open_low else x >= low) and (x < high if open_high else x <= high)
    if inside and not (finite and math.isinf(x)):
        return
    if inside or math.isnan(x):
        must = 'be finite'
    elif math.isfinite(high):
        must = f'lie in {"(" if open_low else "["}{low:g}, {high:g}{")" if open_high else "]"}'
    elif low == 0 and not open_low:
        raise ValueError(f'{name} must not be negative: {x:g}{said}')
    elif low == 0:
        must = 'be positive'
    else:
        must = f'be {"above" if open_low else "at least"} {low:g}'
    raise ValueError(f'{name} must {must}, not {x:g}{said}')


def whole(name: str, value: Any, least: int = 1, advice: str = '') -> None:
    """Refuses what is no whole number, or one below `least`. Booleans are none.

    Args:
      name: what the caller calls it.
      value: anything; a traced integer passes.
      least: the smallest number that passes.
      advice: what to do instead, after a colon.

    Raises:
      ValueError: for all else.
    """
    if traced(value) and not value.ndim and jnp.issubdtype(value.dtype, jnp.integer):
        return
    known = False
    if not isinstance(value, bool | np.bool_) and not traced(value):
        with contextlib.suppress(TypeError):  # 2.5 is no index, and neither is 'x'
            operator.index(value)
            known = True
    if not known or operator.index(value) < least:
        said = f': {advice}' if advice else ''
        raise ValueError(
            f'{name} must be {"" if known else "a whole number of "}at least {least}, not {shown(value)}{said}'
        )


def static(name: str, value: Any, least: int = 1) -> int:
    """A whole number that programs are compiled for, as Python has it: jax's own would be traced.

    Args:
      name: what the caller calls it.
      value: a whole number of Python's, NumPy's or jax's.
      least: the smallest number that passes.

    Raises:
      ValueError: for all else, what is traced among it.
    """
    if traced(value):
        raise ValueError(f'{name} must be known when a program is compiled, not be traced')
    whole(name, value, least)
    return operator.index(value)


def flags(**values: Any) -> None:
    """Refuses what is neither true nor false: the word 'False' would be true.

    Args:
      **values: by their names; True, False, 1 or 0 of Python, NumPy or jax.

    Raises:
      ValueError: for all else.
    """
    for name, value in values.items():
        truth = np.ndim(value) == 0 and getattr(value, 'dtype', np.dtype(type(value))).kind in 'bi'
        if not truth or (not traced(value) and value not in (0, 1)):
            raise ValueError(f'{name} must be True or False, not {shown(value)}')


def labels(name: str, y: Any, length: int | None = None, classes: int | None = None) -> None:
    """Refuses labels that are no vector of integers in [0, C), or of another length.

    Args:
      name: what the caller calls them.
      y: labels [n]; where they are traced their values pass.
      length: n; any if None.
      classes: C; MOST_CLASSES if None.

    Raises:
      ValueError: for such labels.
    """
    shape, dtype = np.shape(y), jnp.result_type(y) if traced(y) or isinstance(y, jax.Array) else np.asarray(y).dtype
    if len(shape) != 1 or not jnp.issubdtype(dtype, jnp.integer):
        advice = ''
        if len(shape) == 1 and jnp.issubdtype(dtype, jnp.floating):
            whole_ones = not traced(y) and bool(np.all(np.asarray(y) == np.rint(np.asarray(y))))
            advice = (
                ': make them integers, as by y.astype(int)' if whole_ones else '; they are classes, no measurements'
            )
        elif len(shape) == 2 and not traced(y):
            advice = '; one class an example, as of one-hot rows by y.argmax(1)'
        elif len(shape) == 1 and np.dtype(dtype).kind in 'OSU':
            advice = ': number them, as by names, y = np.unique(y, return_inverse=True)'
        raise ValueError(f'{name} must be a vector of integers, not shape {shape}, {dtype}{advice}')
    if length is not None and shape[0] != length:
        raise ValueError(f'{name} must be one for each of {length} examples, not {shape[0]}')
    if traced(y) or shape[0] == 0:
        return
    known = np.asarray(y)  # on the host: inside `jit` even a known array's minimum would be traced
    low, high = int(known.min()), int(known.max())
    most = MOST_CLASSES if classes is None else classes
    if low < 0 or high >= most:
        advice = ': number the classes from 0' if classes is None else ''
        raise ValueError(f'{name} must lie in [0, {most}), and they go from {low} to {high}{advice}')


def widened(numbers: Array) -> Array:
    """The numbers in at least 32 bits: in 8, a class or client beyond would wrap where they are compared with it.

    Args:
      numbers: of any integer type, of NumPy, too.
    """
    numbers = jnp.asarray(numbers)
    return numbers.astype(jnp.int32) if jnp.iinfo(numbers.dtype).bits < 32 else numbers


def rows(name: str, values: Any, ndim: int = 2, length: int | None = None) -> None:
    """Refuses an array of another number of axes, or with another number of rows.

    Args:
      name: what the caller calls it.
      values: an array, or what has a shape; the values are not looked at.
      ndim: number of axes.
      length: number of rows; any if None.

    Raises:
      ValueError: for such an array.
    """
    letters = {1: '[B]', 2: '[B, D]', 3: '[B, C, D]'}.get(ndim, f'{ndim} axes')
    shape = np.shape(values)
    if len(shape) != ndim:
        raise ValueError(f'{name} must have the shape {letters}, not {shape}')
    if length is not None and shape[0] != length:
        raise ValueError(f'{name} must have {length} rows, not {shape[0]}')


def finite(name: str, x: Array | NDArray[Any]) -> None:
    """Refuses a known array [n, ...] with NaN or infinity, and names the first such row.

    Args:
      name: what the caller calls it.
      x: the array; where it is traced, or of integers, it passes.

    Raises:
      ValueError: for such an array.
    """
    if traced(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return
    with jax.ensure_compile_time_eval():
        sound = jnp.isfinite(x)
        if bool(jnp.all(sound)):
            return
        bad = np.flatnonzero(~np.asarray(jnp.all(sound.reshape(len(x), -1), axis=1)))
    rows = f'row {bad[0]} holds' if len(bad) == 1 else f'row {bad[0]} and {len(bad) - 1} more hold'
    raise ValueError(f'{name} must be finite: {rows} NaN or infinity')


def shown(value: Any) -> str:
    """A value in a message: arrays by their shape, all else cut to 60 characters and without its place in memory."""
    if isinstance(value, np.ndarray | jax.Array) and np.ndim(value):
        return f'an array {np.shape(value)}'
    text = ' '.join((str if isinstance(value, np.generic) else repr)(value).split())
    text = re.sub(' at 0x[0-9a-f]+', '', text)
    return text if len(text) <= 60 else text[:57] + '...'


def stacked(name: str, clients: Any) -> None:
    """Refuses client states that are no arrays [K, ...], as those that a `population.Store` keeps off the devices.

    Args:
      name: what the caller calls them.
      clients: states, or their shapes.

    Raises:
      ValueError: for such states.
    """
    if not all(hasattr(u, 'shape') and u.shape for u in jax.tree.leaves(clients)):
        raise ValueError(
            f'{name} are no arrays [K, ...]: states kept off the devices go to population.make_round and training.run, '
            'and anywhere else as state.clients.state(state.server), which has to fit on the device'
        )


def population(clients: Any, count: int) -> None:
    """Refuses client states of another number of clients than the data have.

    Args:
      clients: states [K, ...], or their shapes.
      count: K of the data.

    Raises:
      ValueError: for such states.
    """
    held = {u.shape[0] for u in jax.tree.leaves(clients)}
    if held - {count}:
        raise ValueError(f'the state has {held.pop()} clients and the data {count}: make it with init or join')


SUCH_AS = {
    Objective: 'an Objective, such as objective(model, head, loss)',
    Model: 'a Model, such as models.from_flax(module)',
    Head: 'a Head, such as heads.linear()',
    Algorithm: 'an Algorithm, such as fedavg.algorithm(task, local.sgd(0.1))',
    Aggregator: 'an Aggregator, such as aggregators.mean',
    FederatedData: 'FederatedData, such as data.federate(x, y, parts)',
    State: 'a State, such as simulate.init(algorithm, key, data), or the state of a training.Run',
}
"""How types are made, for messages."""

TAKE = {
    'init': 'key, data',
    'init_client': 'key, server',
    'client': 'key, server, client, shard',
    'server': 'key, server, aggregate',
    'predict': 'server, client, x',
}
"""What functions of an algorithm are called with."""


def kind(name: str, value: Any, wanted: type) -> None:
    """Refuses what is not of one of the library's types: a model where a task is due, or a module for a model.

    Args:
      name: what the caller calls it.
      value: anything.
      wanted: the type; of those in SUCH_AS it is said how they are made.

    Raises:
      ValueError: for what is not of that type.
    """
    if not isinstance(value, wanted):
        given = type(value).__name__ if not isinstance(value, type) else f'the class {value.__name__}'
        raise ValueError(f'{name} must be {SUCH_AS.get(wanted, f"of the type {wanted.__name__}")}, not {given}')


def called(name: str, function: Any, arguments: str, such: str = '', by_name: tuple[str, ...] = ()) -> None:
    """Refuses what is no function of so many arguments.

    Args:
      name: what the caller calls it.
      function: anything; what does not tell its arguments passes.
      arguments: names of those that it is called with by position, as 'logits, labels, counts'.
      such: how one is made, for the message.
      by_name: what it is given besides, by name.

    Raises:
      ValueError: for what cannot be called so.
    """
    takes = f'({", ".join((arguments, *(f"{u}=" for u in by_name)))})' + (f', as {such}' if such else '')
    if not callable(function):
        raise ValueError(f'{name} must be a function of {takes}; not {shown(function)}')
    plain = function
    while isinstance(plain, jax.stages.Wrapped):  # `jit` tells the arguments of what lies below it, to the ground
        plain = getattr(plain, '__wrapped__', None)
    try:
        # As it is called: what `functools.wraps` has put around a function may take more arguments than that, or fewer.
        known = inspect.signature(plain, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions of compiled modules do not tell
        return
    try:
        known.bind(*arguments.split(', '), **dict.fromkeys(by_name))
    except TypeError as error:
        told = getattr(function, '__name__', shown(function))
        raise ValueError(f'{name} must be a function of {takes}; {told}{known}: {error}') from None


def algorithm(value: Any) -> None:
    """Refuses what is no `Algorithm`, and one whose functions take other arguments.

    Args:
      value: anything.

    Raises:
      ValueError: for what is none.
    """
    kind('algorithm', value, Algorithm)
    kind('`aggregate` of an algorithm', value.aggregate, Aggregator)
    for name, arguments in TAKE.items():
        called(f'`{name}` of an algorithm', getattr(value, name), arguments)


def worked(client: Tree, out: Any) -> tuple[Tree, Tree, Info]:
    """Refuses what no `client` of an algorithm may return.

    Args:
      client: the state that it was given.
      out: what it returned.

    Returns:
      `out`: the client's state, its message and info.

    Raises:
      ValueError: for anything but (client, message, info), and for a state of another structure, shape or type.
    """
    if not (isinstance(out, tuple) and len(out) == 3 and isinstance(out[2], Info)):
        found = f'a tuple of {len(out)}' if isinstance(out, tuple) else type(out).__name__
        if isinstance(out, tuple) and len(out) == 3:
            found = f'{type(out[2]).__name__} in its place'
        raise ValueError(
            f'`client` of an algorithm returns (client, message, info), of which info is a base.Info, and this one '
            f'returns {found}'
        )
    return kept('`client`', client, out[0]), *out[1:]


@contextlib.contextmanager
def fitting(value: Algorithm, state: State, data: FederatedData) -> Iterator[None]:
    """Where an algorithm fails on a state that is likely another's, such as a stage on that of training, says so.

    Args:
      value: the algorithm.
      state: what it is to work on; of the clients whichever there are.
      data: the clients, or some of them.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Most ValueErrors refuse something else; those that tell of a missing name come from its error.
        lacking = not isinstance(error, ValueError) or isinstance(error.__cause__, KeyError)
        if lacking and strange(value, state, data):
            error.add_note(
                'The state looks like that of another algorithm: begin with simulate.init, or after training with '
                'simulate.join(stage, key, state.server, num_clients)'
            )
        raise


def strange(value: Algorithm, state: State, data: FederatedData) -> bool:
    """Whether an algorithm would begin with states of another structure, or, as a stage, its clients would."""
    random = jax.random.key(0)
    try:
        own = jax.eval_shape(value.init_client, random, state.server)
        if restructured(own, state.clients):
            return True
        if jax.tree.leaves(own):  # of this algorithm, on a server that `join` may have taken from another
            return False
    except Exception:  # whatever is raised by a function that is given what it does not know
        return True
    try:
        return bool(restructured(jax.eval_shape(value.init, random, data), state.server))
    except Exception:  # which says nothing of the state
        return False


def kept(name: str, before: Tree, after: Tree) -> Tree:
    """Refuses a state that is of another structure, shape or type than before: rounds could not go on with it.

    Args:
      name: the function of the algorithm that returned it.
      before: what it was given.
      after: what it returned.

    Returns:
      `after`.

    Raises:
      ValueError: where the two differ.
    """
    if said := reshaped(before, after):
        raise ValueError(
            f'{name} of an algorithm returns a state of another kind than it was given: {said}. A state keeps its '
            'structure, shapes and types'
        )
    return after


def optimizer(name: str, value: Any) -> None:
    """Refuses what is no function from the round to an optimizer.

    Args:
      name: what the caller calls it.
      value: anything; a function is called once, with a round that is traced.

    Raises:
      ValueError: for what is no such function, or one that needs the round's value.
    """
    found = value
    if callable(value) and not isinstance(value, type):
        made: list[Any] = []
        try:
            jax.eval_shape(lambda round: made.append(value(round)), jax.ShapeDtypeStruct((), jnp.int32))
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise ValueError(
                f'{name} is given a round that is traced, whose value is not known when programs are compiled: choose '
                'by jnp.where, or take a schedule of optax'
            ) from error
        found = made[0]
    if found is value or not (hasattr(found, 'init') and hasattr(found, 'update')):
        raise ValueError(f'{name} is a function of the round: local.sgd(0.1), or lambda round: optax.sgd(0.1)')


def transformation(name: str, value: Any) -> None:
    """Refuses what is no optax optimizer, such as the functions of the round that clients take.

    Args:
      name: what the caller calls it.
      value: anything.

    Raises:
      ValueError: for all but an optimizer.
    """
    if not isinstance(value, optax.GradientTransformation):
        raise ValueError(f'{name} must be an optax optimizer, such as optax.sgd(0.1), not {shown(value)}')


def steps(name: str, optimizer: optax.GradientTransformation, params: Tree) -> None:
    """Refuses an optax optimizer that cannot take a step by a gradient alone, as one that asks for the loss.

    Args:
      name: what the caller calls it.
      optimizer: of optax, whose step is traced and not computed.
      params: what it is to move.

    Raises:
      ValueError: for such an optimizer.
    """
    try:
        jax.eval_shape(lambda params: optimizer.update(params, optimizer.init(params), params), params)
    except Exception as error:  # whatever a function of somebody else's raises
        raise ValueError(f'{name} cannot take a step by a gradient alone: {in_one_line(error)}') from error


def seed(value: Any) -> None:
    """Refuses what is no seed.

    Raises:
      ValueError: for all but whole numbers from 0 to 2^32 - 1, beyond which keys begin again.
    """
    whole('seed', value, 0)
    if value >= 2**32:
        raise ValueError(f'seed must be below 2^32, beyond which keys begin again, not {value}')


def seeded(value: int) -> jax.Array:
    """The key of a seed, of a generator that `key` takes, whatever jax's default is; ValueError as `seed`."""
    seed(value)
    return jax.random.key(value, impl='threefry2x32')


def key(name: str, value: Any) -> None:
    """Refuses what is no random key.

    Args:
      name: what the caller calls it.
      value: anything; one key of `jax.random.key` passes, or [2] uint32 of `jax.random.PRNGKey`.

    Raises:
      ValueError: for what is none, or several, or of a generator with which results would depend on chunks.
    """
    dtype = getattr(value, 'dtype', None)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and not value.ndim) and not (dtype == jnp.uint32 and np.shape(value) == (2,)):
        raise ValueError(f'{name} must be a random key, such as jax.random.key(0), not {shown(value)}')
    if typed and 'rbg' in (made := str(jax.random.key_impl(value))):
        raise ValueError(
            f'{name} is of {made}, which draws other numbers for clients side by side than one by one: make it with '
            "jax.random.key(0, impl='threefry2x32')"
        )
