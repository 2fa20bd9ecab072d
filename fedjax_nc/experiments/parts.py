"""What methods are made of, by name: heads, losses, server optimizers, weights of clients, frames."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import aggregators, checks, frames, heads, losses, server_optimizers, simulate
from fedjax_nc import algorithms as alg
from fedjax_nc._differences import in_one_line
from fedjax_nc.base import Algorithm, Array, FederatedData, Head, Loss, Model, Objective, State, Variables
from fedjax_nc.experiments import own
from fedjax_nc.local import ClientOptimizer, Plan
from fedjax_nc.objective import objective


def join(stage: Algorithm, key: Array, state: State, data: FederatedData) -> State:
    """How most stages begin: with the server's model alone.

    Args:
      stage: the algorithm of the stage.
      key: key of the clients' first states.
      state: the state at the end of training, of which `server` alone is used.
      data: the clients.

    Returns:
      The state before the stage's first round, as `simulate.join` makes it.
    """
    joined = functools.partial(simulate.join, stage, num_clients=data.num_clients)
    return jax.jit(joined)(key, server=state.server)  # one program to compile, and not one for each shape


def held(server: Any) -> Variables | None:
    """The variables of a server's model, as most methods have them; None of a server of another kind."""
    return getattr(server, 'variables', None)


class Recipe(NamedTuple):
    """A method from training to personal models."""

    train: Algorithm  #: what rounds are made of
    personalize: Algorithm | None = None  #: a stage of one round on all clients; None if training makes personal models
    calibrate: Algorithm | None = None  #: a stage of one round on all clients before it, which makes the generic model
    #: (stage, key, state, data) -> the state with which personalisation begins
    enter: Callable[[Algorithm, Array, State, FederatedData], State] = join
    refines: bool = False  #: whether the generic model is more than what was trained, as that stage makes it
    variants: Mapping[str, Algorithm] = {}  #: other stages in the place of `personalize`
    generic: bool = True  #: whether there is a generic model
    #: what predicts with a model refitted on all real features, NOT a federated method, and the refit
    oracle: tuple[Algorithm, Callable[[Array, State, FederatedData], State]] | None = None
    told: Mapping[str, Any] = {}  #: what the factory of `train` was given and its defaults, as plain data
    views: Mapping[str, Algorithm] = {}  #: other ways to predict from the state of `train`, measured beside it
    #: what makes features of examples with `variables`; None if that is not known
    task: Objective | Model | None = None
    #: server -> the variables of the generic model; None of a server of another kind
    variables: Callable[[Any], Variables | None] = held

    @property
    def final(self) -> Algorithm:
        """What predicts with clients' models at the end."""
        return self.personalize or self.train

    @property
    def general(self) -> Algorithm:
        """What predicts with the generic model at the end: as it was trained, or as the stage that refines it does."""
        return self.calibrate or (self.final if self.refines else self.train)


SAID = ('plan', 'server_opt', 'personal_opt', 'head', 'auxiliary', 'base', 'penalty')
"""Arguments of factories that settings tell by other names, or that `Recipe.told` tells apart."""


def trained(factory: Callable[..., Algorithm], *args: Any, **kwargs: Any) -> Recipe:
    """What begins every recipe: the algorithm that trains, and what its factory was given.

    Args:
      factory: of the algorithm.
      *args: its model or task, and optimizer.
      **kwargs: its other arguments.

    Returns:
      A recipe without a stage after training.

    Raises:
      ValueError: if the factory needs another argument.
    """
    known = [*inspect.signature(factory).parameters.values()][len(args) :]
    needed = (u.name for u in known if u.default is u.empty and u.kind not in (u.VAR_POSITIONAL, u.VAR_KEYWORD))
    lacking = [name for name in needed if name not in kwargs]
    if lacking:
        raise ValueError(f'{factory.__name__} needs the options {", ".join(lacking)}, which have no default')
    given = {**defaults(factory), **kwargs}
    task = args[0] if args and isinstance(args[0], Objective | Model) else None
    told = {name: plain(value) for name, value in given.items() if name not in SAID}
    base, under = given.get('base'), dict[str, Any]()
    if not callable(base) or not factory.__module__.startswith('fedjax_nc.'):
        own_base = {'base': plain(base)} if 'base' in given else {}
        return Recipe(factory(*args, **kwargs), told={**told, **own_base}, task=task)

    def seen(*args: Any, **kwargs: Any) -> Algorithm:
        under.update({**defaults(base), **kwargs})
        return base(*args, **kwargs)

    algorithm = factory(*args, **{**kwargs, 'base': seen})
    more = {name: plain(value) for name, value in under.items() if name not in (*SAID, 'parts', *told)}
    module = getattr(base, 'func', base).__module__  # of a partial, what it is of
    return Recipe(algorithm, told={**told, 'base': module.rpartition('.')[2], **more}, task=task)


def defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """What the arguments of a function are by default that can be given by name alone."""
    known = inspect.signature(factory).parameters.values()
    return {u.name: u.default for u in known if u.kind is u.KEYWORD_ONLY and u.default is not u.empty}


def plain(value: Any) -> Any:
    """An argument of a factory as JSON can hold it: functions by their names and what they were made with."""
    if isinstance(value, bool | int | float | str):
        return value
    if value is None:
        return 'none'
    if isinstance(value, aggregators.Aggregator):
        named = (name for name, known in vars(aggregators).items() if known is value)
        return next(named, called('aggregator', {0: value.partial}))
    if isinstance(value, optax.GradientTransformation):
        return plain(value.update)
    if isinstance(value, functools.partial):
        return called(plain(value.func), {**dict(enumerate(value.args)), **value.keywords})
    if inspect.isfunction(value):
        held = inspect.getclosurevars(value).nonlocals
        return called(value.__qualname__.partition('.<locals>')[0], {k: v for k, v in held.items() if not callable(v)})
    if hasattr(value, '_asdict'):
        return {name: plain(inner) for name, inner in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.item() if hasattr(value, 'item') and not jnp.ndim(value) else checks.shown(value)


def called(name: str, arguments: Mapping[Any, Any]) -> str:
    """A call as it would be written."""
    words = {name: plain(value) for name, value in arguments.items()}
    said = ', '.join(str(word) if type(name) is int else f'{name}={word}' for name, word in words.items())
    return f'{name}({said})' if said else name


class Setup(NamedTuple):
    """What a method is made from: the arguments of `Method`, with heads and losses in the place of their names."""

    model: Model  #: feature extractor
    client_opt: ClientOptimizer  #: from the round's number to a client's optimizer
    personal_opt: ClientOptimizer  #: the same of models or heads that clients keep
    plan: Plan  #: batch size and local epochs
    head: Head  #: the one that was chosen, or the method's own
    learned: bool  #: whether the head's class vectors are
    loss: Loss  #: the one that was chosen, or the method's own
    server_opt: optax.GradientTransformation | None  #: None for plain averaging
    dim: int | None  #: of the projected ETF; None for the number of classes
    scale: float  #: first temperature of heads that compare angles
    rounds: int  #: how long training will be
    auxiliary: FederatedData | None  #: the server's own examples, one client a class
    weigh: str  #: one of `WEIGHTS`
    options: Mapping[str, Any]  #: further arguments of the factory

    @property
    def task(self) -> Objective:
        """Model, head and loss together."""
        return objective(self.model, self.head, self.loss)

    @property
    def common(self) -> dict[str, Any]:
        """What most factories are given by name, which is plan, server optimizer, weights of clients, options."""
        return {'plan': self.plan, 'server_opt': self.server_opt, **WEIGHTS[self.weigh], **self.options}

    def finetune(self, task: Objective | None = None, **kwargs: Any) -> Algorithm:
        """One more local update, which gives personal models to a method without any.

        Args:
          task: what is tuned; by default `self.task`.
          **kwargs: further arguments of `algorithms.finetune.algorithm`.

        Returns:
          The stage, one round of which is `plan.epochs` local epochs by `client_opt`.
        """
        return alg.finetune.algorithm(task or self.task, self.client_opt, plan=self.plan, **kwargs)


HEADS: dict[str, Callable[[int | None, float, bool], Head]] = {
    'linear': lambda dim, scale, learn: heads.linear(),
    'unbiased': lambda dim, scale, learn: heads.linear(bias=False),
    'unit_norm': lambda dim, scale, learn: heads.unit_norm(),
    'cosine': lambda dim, scale, learn: heads.cosine(scale, learn),
    'etf': lambda dim, scale, learn: heads.etf(dim, scale=scale, learn_scale=learn),
    'unprojected_etf': lambda dim, scale, learn: heads.etf(scale=scale, learn_scale=learn, project=False),
    'projected_sparse_etf': lambda dim, scale, learn: heads.etf(
        dim, scale=scale, learn_scale=learn, frame=frames.sparse_etf
    ),
    'bare_etf': lambda dim, scale, learn: bare(frames.simplex_etf),
    'sparse_etf': lambda dim, scale, learn: bare(frames.sparse_etf),
    'prototypes': lambda dim, scale, learn: heads.prototypes(scale, learn, frames.uniform),
}
"""(frame's dimension, first temperature, whether it is learned) -> head. The ETF of FedETF has a projection and a
temperature, that of FedAvg_ETF is bare; 'unprojected_etf' and 'projected_sparse_etf' are those of FedLoGe's ablations;
prototypes are FedUH's, spread uniformly and frozen."""

LOSSES: dict[str, Loss] = {
    'cross_entropy': losses.cross_entropy,
    'balanced_softmax': losses.balanced_softmax,
    'restricted_softmax': losses.restricted_softmax,
    'positive': losses.positive,
    'dot_regression': losses.dot_regression,
}
"""Functions of `losses` by name."""

SERVER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    'sgd': lambda lr=1.0, momentum=0.0: optax.sgd(lr, momentum or None),
    'fedavgm': lambda lr=0.1, momentum=0.9: server_optimizers.fedavgm(lr, momentum),
    'fedadagrad': lambda lr=1e-2, momentum=0.0: server_optimizers.fedadagrad(lr, momentum),
    'fedadam': lambda lr=1e-2, momentum=0.9: server_optimizers.fedadam(lr, momentum),
    'fedyogi': lambda lr=1e-2, momentum=0.9: server_optimizers.fedyogi(lr, momentum),
}
"""(rate, momentum; by default those of its paper) -> optimizer."""

WEIGHTS: dict[str, dict[str, Any]] = {
    'published': {},
    'examples': {'aggregate': aggregators.mean, 'aggregate_stats': aggregators.mean},
    'alike': alg.fedavg.UNWEIGHTED,
}
"""How clients are weighed: as the method has it, by their numbers of examples, or all alike."""


def own_head(name: str) -> Head:
    """The head of one's own that is called 'package.module:attribute': a `base.Head`, or what makes one of nothing.

    Raises:
      ValueError: for a module that cannot be imported, or what is neither in it.
    """
    made = own.attribute('head', name)
    if not isinstance(made, Head) and callable(made) and made is not Head:
        try:
            made = made()
        except Exception as error:  # whatever a function of somebody else's raises
            raise ValueError(
                f'head {name} is made by a call without arguments, and says: {in_one_line(error)}'
            ) from error
    if not isinstance(made, Head):
        raise ValueError(f'head {name} must be a base.Head, or a function that makes one, not {checks.shown(made)}')
    return made


def own_loss(name: str) -> Loss:
    """The loss of one's own that is called 'package.module:attribute': a function as those of `losses` are.

    Raises:
      ValueError: for a module that cannot be imported, or what is no function `(logits, labels, counts)` in it.
    """
    loss: Loss = own.attribute('loss', name)
    checks.called(f'loss {name}', loss, 'logits, labels, counts', 'losses.cross_entropy')
    return loss


def server_optimizer(name: str) -> tuple[Callable[[float, float], optax.GradientTransformation], float | None, float]:
    """What makes a server optimizer of a rate and a momentum, and its own rate, if it has one, and momentum.

    Args:
      name: 'average', one of `SERVER_OPTIMIZERS`, or 'package.module:function' of one's own, such as 'optax:lion': a
        function of the rate, and of `momentum` if it names it, that makes an optax transformation.

    Raises:
      ValueError: for another name, a module that cannot be imported, or what is no such function in it. What is
        returned raises it for a momentum that the function does not take, and for whatever else it makes.
    """
    if not own.is_own('server_optimizer', name, ('average', *SERVER_OPTIMIZERS), 'function'):
        function = SERVER_OPTIMIZERS['sgd' if name == 'average' else name]
        lr, momentum = own.takes(function)[0].values()
        return function, lr, momentum
    function, what = own.attribute('server_optimizer', name), f'server_optimizer {name}'
    defaults, _ = own.takes(function)
    takes = 'momentum' in defaults
    checks.called(what, function, 'lr', 'server_optimizers.fedyogi', by_name=('momentum',) if takes else ())

    def make(lr: float, momentum: float) -> optax.GradientTransformation:
        if momentum and not takes:
            raise ValueError(f'{what} has no argument `momentum`: leave server_momentum out')
        given = {'momentum': momentum} if takes and (momentum or defaults['momentum'] is not None) else {}
        try:
            made = function(lr, **given)
        except Exception as error:  # whatever a function of somebody else's raises
            raise ValueError(f'{what}: {in_one_line(error)}') from error
        checks.transformation(f'what {what} makes', made)
        return made

    rate, momentum = (_positive(value) for value in (next(iter(defaults.values()), None), defaults.get('momentum')))
    return make, rate, momentum or 0.0


def _positive(value: Any) -> float | None:
    """A default as a setting can hold it, or None where it is no positive number, such as a schedule."""
    try:
        checks.number('a default', value, open_low=True)
    except ValueError:
        return None
    return float(value)


LEARNED = ('linear', 'unbiased', 'unit_norm', 'cosine')
"""Heads whose class vectors are trained."""
OF_COSINES = {
    'heads': ('cosine', 'etf', 'unprojected_etf', 'projected_sparse_etf', 'prototypes'),
    'losses': ('positive', 'dot_regression'),
}
"""Losses of cosines, and the heads that they go with."""


def entries(init: Callable[..., Array]) -> heads.Frame:
    """A frame [D, C] of the entries that an initialiser draws for a layer from D to C."""
    return lambda key, dim, classes: init(key, (dim, classes), jnp.float32)


DRAWN = {
    'xavier': entries(jax.nn.initializers.glorot_uniform()),
    'gaussian': entries(jax.nn.initializers.normal(1.0)),
    'uniform': entries(lambda key, shape, dtype: jax.random.uniform(key, shape, dtype)),
    'orthogonal': entries(jax.nn.initializers.orthogonal()),
    'kaiming': entries(jax.nn.initializers.he_uniform()),
}
FRAMES: dict[str, heads.Frame] = {
    'etf': frames.simplex_etf,
    'sparse_etf': frames.sparse_etf,
    **DRAWN,
    **{f'sparse_{name}': functools.partial(frames.sparse_etf, start=drawn) for name, drawn in DRAWN.items()},
}
"""What FedLoGe may freeze: an ETF, a sparse one, or a matrix as layers begin with, and the sparse ETF from there."""


def longer(key: Array, dim: int, classes: int, *, frame: heads.Frame, length: float) -> Array:
    """A frame [dim, classes] whose columns are `length` times as long."""
    return length * frame(key, dim, classes)


def bare(frame: heads.Frame, scale: float = 1.0) -> Head:
    """A frozen frame on the features as they are, its columns `scale` times as long."""
    return heads.etf(scale=scale, learn_scale=False, project=False, unit_features=False, frame=frame)
