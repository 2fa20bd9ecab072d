"""From models of other libraries to the library's `Model`: what adapters share, and those for flax linen and functions.

Others are in `adapter_nnx`, `adapter_equinox` and `adapter_haiku`, which need those libraries.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array, Model, Still, Tree

Preprocess = Callable[[Array, Array | None], Array]
"""(batch, key) -> what the module takes; key None means evaluation, without augmentation."""

Apply = Callable[[Tree, Tree, Array, Array | None, Array | None], tuple[Array, Tree]]
"""(params, stats, prepared batch, mask, key) -> (features, new stats); without a key it evaluates."""

TRAINS = ('train', 'training', 'is_training')
EVALUATES = ('deterministic', 'inference', 'use_running_average')


def scale_images(x: Array, key: Array | None = None) -> Array:
    """A batch of uint8 to [-1, 1] float32; all else is left alone, floats as they are and integers as tokens.

    `key` is not used: this is what adapters take for `preprocess` by default.
    """
    return (x.astype(jnp.float32) / 255 - 0.5) / 0.5 if x.dtype == jnp.uint8 else x


def from_flax(module: nn.Module, preprocess: Preprocess | None = None, *, classifier: str | None = None) -> Model:
    """Makes a `Model` of a flax linen module, `x [B, ...] -> features [B, D]`.

    Its `__call__` is told what it asks for by name: `train`, `training` or `is_training`, or else `deterministic`; and
    `mask [B]`, which is False for rows that are padding. Of an `nn.Sequential` the first layer is. The collection
    'batch_stats', if any, becomes the `stats`, otherwise they are (); its counters and flags are float32 there, because
    means are taken of them. `nn.BatchNorm` is given the mask in any case. Dropout draws from the key 'dropout', and
    what asks for a key by another name from 'params'.

    Args:
        module: the body: an instance of a `flax.linen.Module`.
        preprocess: applied to each raw batch, augmentation included; None means `scale_images`.
        classifier: name of the submodule that classifies, 'Dense_2' for instance, if the module ends in one. It is left
            out: the features are what it would be given.

    Returns:
        The model. Its features are float32; with `key=None` it runs in evaluation mode and returns `stats` unchanged.

    Raises:
        ValueError: if `module` is no such instance, or `preprocess` no function; on `init`, if there is no submodule
            `classifier`, or the module has variables other than 'params' and 'batch_stats'; for examples that do not
            fit the parameters; and in evaluation, for layers that train whatever they are told.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from fedjax_nc import models
        >>> model = models.from_flax(models.MLP((16,)))
        >>> x = jnp.zeros((3, 28, 28), jnp.uint8)
        >>> params, stats = model.init(jax.random.key(0), x)
        >>> params['Dense_0']['kernel'].shape
        (784, 16)
        >>> z, _ = model.features(params, stats, x, None, None)
        >>> z.shape
        (3, 16)
    """
    _check_module(module)
    named = asked(entry(module, nn.Sequential))

    def call(variables: Tree, x: Array, mask: Array | None, train: bool, met: list[str] | None, **kwargs: Any) -> Any:
        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            inner, called = context.module, context.method_name == '__call__'
            if called and len(inner.path) == 1:
                if met is not None:
                    met.append(inner.name)
                if inner.name == classifier:
                    return first(args, kwargs)
            # A subclass that takes no mask calls the layer's own method, which comes by here, too.
            normalises = called and isinstance(inner, nn.BatchNorm)
            if normalises and 'mask' in inspect.signature(context.orig_method).parameters:
                kwargs = masked(kwargs, mask, first(args, kwargs))
            return call(*args, **kwargs)

        try:
            with nn.intercept_methods(intercept):
                return kwargs.pop('by', module.apply)(variables, x, **named(mask, train), **kwargs)
        except flax.errors.ScopeParamNotFoundError as error:
            raise ValueError(
                f'{type(module).__name__} has other layers than these parameters: {str(error).partition(" (http")[0]}'
            ) from error
        except flax.errors.ScopeParamShapeError as error:
            raise ValueError(
                f'examples of the shape {x.shape[1:]}, as they come from `preprocess`, or features where a head trains '
                f'alone, do not fit these parameters: {str(error).partition(" (http")[0]}'
            ) from error
        except (flax.errors.ModifyScopeVariableError, flax.errors.InvalidRngError) as error:
            if train:
                raise
            raise ValueError(
                f'{type(module).__name__} trains where it should evaluate ({str(error).partition(" (http")[0]}): let '
                'its `__call__` ask for `train`, and tell its layers `use_running_average=not train` or '
                '`deterministic=not train`'
            ) from error

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        met: list[str] = []
        variables = call(key, x, None, False, met, by=module.init)
        if classifier is not None and classifier not in met:
            raise ValueError(no_part('classifier', classifier, met))
        if others := sorted(set(variables) - {'params', 'batch_stats'}):
            raise ValueError(
                f"{type(module).__name__} keeps {', '.join(others)}: only 'params' and 'batch_stats' travel"
            )
        return variables.get('params', {}), as_values(variables.get('batch_stats', ()))

    def apply(params: Tree, stats: Tree, x: Array, mask: Array | None, key: Array | None) -> tuple[Array, Tree]:
        variables = {'params': params, 'batch_stats': stats} if stats else {'params': params}
        if key is None:
            return call(variables, x, mask, False, None), stats
        rngs = {'dropout': key, 'params': jax.random.fold_in(key, 1)}  # flax looks there for names that it has not got
        z, updated = call(variables, x, mask, True, None, mutable=['batch_stats'], rngs=rngs)
        return z, as_values(updated['batch_stats']) if stats else stats

    return modelled(init, apply, preprocess)


def from_functions(
    init: Callable[[Array, Array], Tree], apply: Callable[..., Array], preprocess: Preprocess | None = None
) -> Model:
    """Makes a `Model` of a pair `init(key, x [B, ...]) -> params`, `apply(params, x) -> features [B, D]`.

    `apply` is told what it asks for by name: `key`, None in evaluation; `train`, as in `from_flax`; and `mask [B]`,
    False for rows that are padding, which nothing but statistics over a batch needs. What else changes in training is a
    `Model`'s `stats`: write that, of two functions as well.

    Args:
        init: from a key and a prepared batch to parameters, any tree of float32 arrays.
        apply: the body, without a classifier.
        preprocess: as for `from_flax`.

    Returns:
        The model, as of `from_flax`; its `stats` are ().

    Raises:
        ValueError: if one of them is no function, or asks for arguments that are not known.
    """
    for name, function in (('`init`', init), ('`apply`', apply)):
        if not callable(function) or isinstance(function, type):
            raise ValueError(f'{name} must be a function; got {checks.shown(function)}.')
    named = asked(apply, 2, ('key',))

    def run(params: Tree, stats: Tree, x: Array, mask: Array | None, key: Array | None) -> tuple[Array, Tree]:
        return apply(params, x, **named(mask, key is not None, key=key)), stats

    return modelled(lambda key, x: (init(key, x), ()), run, preprocess)


def modelled(init: Callable[[Array, Array], tuple[Tree, Tree]], apply: Apply, preprocess: Preprocess | None) -> Model:
    """The `Model` of functions that take prepared batches, and whose features may be of any type.

    Raises:
        ValueError: if `preprocess` is no function.
    """
    if preprocess is not None and not callable(preprocess):
        raise ValueError(f'`preprocess` must be a function of a batch and a key; got {checks.shown(preprocess)}.')
    prepare = preprocess or scale_images

    # Jitted so that only the parameters are computed, not the features of the example; here, to be compiled once.
    begin = jax.jit(lambda key, x: init(key, prepare(x, None)))

    def features(
        params: Tree, stats: Tree, x: Array, mask: Array | None = None, key: Array | Still | None = None
    ) -> tuple[Array, Tree]:
        if key is None or isinstance(key, Still):
            seen = prepare(x, None if key is None else jax.random.split(key.key)[0])
            z, _ = apply(params, stats, seen, mask, None)
            return _features(z), stats
        augment, noise = jax.random.split(key)
        z, new = apply(params, stats, prepare(x, augment), mask, noise)
        return _features(z), new

    return Model(begin, features, augments=preprocess is not None)


def _features(z: Any) -> Array:
    """What a model returned, as float32."""
    if not hasattr(z, 'shape'):
        raise ValueError(
            f'the model must return one array, features [B, D], and there came a {type(z).__name__}: what else it '
            'makes belongs to an objective of your own'
        )
    return jnp.asarray(z, jnp.float32)


def asked(function: Callable[..., Any], arguments: int = 1, known: Sequence[str] = ()) -> Callable[..., dict[str, Any]]:
    """What a function wants to be told, of what an adapter knows: `(mask, train, **known) -> arguments by name`.

    A function that takes any name gets `mask` and `train`.

    Args:
        function: what will be called.
        arguments: how many come first, without a name.
        known: names that an adapter knows beside `mask` and those of training and evaluation.

    Raises:
        ValueError: if it cannot do without anything else, or does not take by name what it could be told.
    """
    parameters = inspect.signature(function).parameters.values()
    for p in list(parameters)[arguments:]:
        name, could = p.name, p.name in {*TRAINS, *EVALUATES, *known, 'mask'}
        if could and p.kind is p.POSITIONAL_ONLY:
            raise ValueError(f'{_called(function)} does not take {name} by name: write it as (x, *, {name}=None)')
        if not could and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise ValueError(
                f'{_called(function)} needs {name}, of which nothing is known: if it says whether to train, call it '
                f'{", ".join(TRAINS)} or {EVALUATES[0]}, or else give it a default'
            )
        if not could and isinstance(p.default, bool) and re.search('(^|_)(train|eval|infer|determin)', name):
            warnings.warn(
                f'{_called(function)} has {name}={p.default}, which nobody changes: if it says whether to train, '
                f'call it {", ".join(TRAINS)} or {EVALUATES[0]}',
                stacklevel=3,
            )
    wanted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        wanted |= {'mask', 'train'}

    def told(mask: Array | None, train: bool, **others: Any) -> dict[str, Any]:
        modes = {**dict.fromkeys(TRAINS, train), **dict.fromkeys(EVALUATES, not train)}
        return {name: value for name, value in {**modes, 'mask': mask, **others}.items() if name in wanted}

    return told


def _called(function: Callable[..., Any]) -> str:
    return getattr(function, '__qualname__', type(function).__name__)


def entry(module: Any, sequential: type) -> Callable[..., Any]:
    """What a module's arguments go to: its `__call__`, or that of the first layer of one that hands all of them on."""
    while isinstance(module, sequential) and len(module.layers):  # type: ignore[attr-defined]
        module = module.layers[0]  # type: ignore[attr-defined]
    return module if inspect.isroutine(module) or hasattr(module, '__wrapped__') else module.__call__


def first(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a layer is given, by name or without: of the names it need not be the first."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ('x', 'inputs') if name in kwargs), next(iter(kwargs.values())))


def masked(kwargs: dict[str, Any], mask: Array | None, x: Array) -> dict[str, Any]:
    """Arguments of batch normalisation, the mask of rows among them, unless it is given one of its own."""
    if mask is None or not (kwargs.get('mask') is None or kwargs['mask'] is mask):
        return kwargs
    return {**kwargs, 'mask': rows_of(mask, x)}


def rows_of(mask: Array, x: Array) -> Array:
    """A mask of rows [B] in the shape that broadcasts to `x [B, ...]`.

    Raises:
        ValueError: for other rows than those of the batch, such as tokens in a row.
    """
    if len(x) != len(mask):
        raise ValueError(
            f'batch normalisation of {x.shape} cannot tell which of a batch of {len(mask)} are padding: leave the '
            'batch as the first axis'
        )
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def no_part(what: str, name: str, known: Any) -> str:
    """That a module has no such part, in a line."""
    return f'no part of the module is called {name!r}, as `{what}` says; there are {", ".join(sorted(set(known)))}'


def maker(module: Any, argument: str, wanted: str) -> Callable[[Any], Any]:
    """What makes a module from one thing, whatever it calls it; `argument` is what it is asked to call it.

    Raises:
        ValueError: if it is no function or class, or takes nothing.
    """
    if not callable(module) or isinstance(module, nn.Module):
        raise ValueError(f'`module` must be {wanted}, or make one from `{argument}`; got {checks.shown(module)}.')
    made = module.func if isinstance(module, functools.partial) else module  # nnx hides what a class takes from others
    parameters = list(inspect.signature(getattr(made, '__init__') if isinstance(made, type) else made).parameters)  # noqa: B009
    if argument in parameters:
        return lambda given: module(**{argument: given})
    if not parameters[isinstance(made, type) :]:
        raise ValueError(f'`module` must make {wanted} from `{argument}`: lambda {argument}: Net(..., {argument}=...).')
    return lambda given: module(given)


def found(module: Any, path: str) -> Any:
    """A part of a module: names of attributes, or numbers in a list, with dots between, such as 'layers.2'.

    Raises:
        ValueError: if there is no such part.
    """
    at = module
    for step in path.split('.'):
        try:
            at = at[int(step)] if step.lstrip('-').isdigit() else getattr(at, step)
        except (AttributeError, IndexError, KeyError, TypeError):
            raise ValueError(no_part('classifier', path, _attributes(module))) from None
    return at


def _attributes(module: Any) -> Iterator[str]:
    return (name for name, value in vars(module).items() if callable(value) or isinstance(value, list | tuple))


def as_values(state: Tree) -> Tree:
    """State of a module as `stats`, whose means are taken: counters and flags become float32."""
    return jax.tree.map(
        lambda u: u if jnp.issubdtype(jnp.result_type(u), jnp.inexact) else jnp.asarray(u, jnp.float32), state
    )


def as_state(stats: Tree, like: Tree) -> Tree:
    """`stats` with the types that a module's state has."""
    return jax.tree.map(
        lambda u, v: u.astype(v.dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else jnp.round(u).astype(v.dtype),
        stats,
        like,
    )


def _check_module(module: Any) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ValueError(f'`module` must be an instance, not the class: pass {module.__name__}(...).')
    if not isinstance(module, nn.Module):
        raise ValueError(
            f'`module` must be an instance of a flax.linen.Module, such as models.MLP(); got {checks.shown(module)}. '
            'Others have adapters of their own: from_nnx, from_equinox, from_haiku, from_functions.'
        )
    if not callable(getattr(module, '__call__', None)):  # noqa: B004  # an instance is, whether it has one or not
        raise ValueError(f'{type(module).__name__} has no `__call__`: it must take a batch and return features [B, D].')
