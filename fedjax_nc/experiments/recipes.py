"""Algorithms by name, for scripts that put them side by side. Programs call the factories themselves.

Model, optimizer, plan and first temperature are given and the same for all, whatever each paper took; the rest are the
factories' defaults. Head, loss and server optimizer are a choice where a method does not bring its own; clients are
weighed as each method has it, unless `weigh` says how for all.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_nc import aggregators, frames, heads, losses, server_optimizers, simulate
from fedjax_nc import algorithms as alg
from fedjax_nc.base import Algorithm, Array, FederatedData, Head, Loss, Model, Objective, State
from fedjax_nc.data import federate
from fedjax_nc.local import ClientOptimizer, Plan
from fedjax_nc.memory import remembering
from fedjax_nc.objective import objective, transformed


def join(stage: Algorithm, key: Array, state: State, data: FederatedData) -> State:
    """How most stages begin: with the server's model alone."""
    joined = functools.partial(simulate.join, stage, num_clients=data.num_clients)
    return jax.jit(joined)(key, server=state.server)  # one program to compile, and not one for each shape


class Recipe(NamedTuple):
    """A method from training to personal models."""

    train: Algorithm
    personalize: Algorithm | None = None  # a stage of one round on all clients; None if training makes personal models
    calibrate: Algorithm | None = None  # a stage of one round on all clients before it, which makes the generic model
    enter: Callable[[Algorithm, Array, State, FederatedData], State] = join  # how personalisation begins
    refines: bool = False  # whether the generic model is more than what was trained
    variants: Mapping[str, Algorithm] = {}  # other stages in the place of `personalize`
    generic: bool = True  # whether there is a generic model
    oracle: tuple[Algorithm, Callable[[Array, State, FederatedData], State]] | None = None  # what predicts with a model
    # refitted on all real features, NOT a federated method, and the refit

    @property
    def final(self) -> Algorithm:
        """What predicts at the end, with clients' models as with the generic one."""
        return self.personalize or self.train


class Setup(NamedTuple):
    """What a method is made from."""

    model: Model
    client_opt: ClientOptimizer
    personal_opt: ClientOptimizer
    plan: Plan
    head: Head
    learned: bool  # whether the head's class vectors are
    loss: Loss
    server_opt: optax.GradientTransformation | None
    dim: int | None
    scale: float
    rounds: int
    auxiliary: FederatedData | None
    weigh: str
    options: Mapping[str, Any]  # further arguments of the factory

    @property
    def task(self) -> Objective:
        return objective(self.model, self.head, self.loss)

    @property
    def common(self) -> dict[str, Any]:
        return {'plan': self.plan, 'server_opt': self.server_opt, **WEIGHTS[self.weigh], **self.options}

    def finetune(self, task: Objective | None = None, **kwargs: Any) -> Algorithm:
        """One more local update, which gives personal models to a method without any."""
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
temperature, that of FedAvg_ETF is bare; 'unprojected_etf' and
'projected_sparse_etf' are those of FedLoGe's ablations; prototypes are FedUH's, spread uniformly and frozen."""

LOSSES: dict[str, Loss] = {
    'cross_entropy': losses.cross_entropy,
    'balanced_softmax': losses.balanced_softmax,
    'restricted_softmax': losses.restricted_softmax,
    'positive': losses.positive,
    'dot_regression': losses.dot_regression,
}

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

LEARNED = ('linear', 'unbiased', 'unit_norm', 'cosine')  # heads whose class vectors are trained
OF_COSINES = {
    'heads': ('cosine', 'etf', 'unprojected_etf', 'projected_sparse_etf', 'prototypes'),
    'losses': ('positive', 'dot_regression'),
}


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


def bare(frame: heads.Frame, scale: float = 1.0) -> Head:
    """A frozen frame on the features as they are, its columns `scale` times as long."""
    return heads.etf(scale=scale, learn_scale=False, project=False, unit_features=False, frame=frame)


class Method(NamedTuple):
    """What can be had under a name."""

    name: str
    make: Callable[[Setup], Recipe]
    heads: tuple[str, ...] = tuple(HEADS)  # the first is the method's own
    losses: tuple[str, ...] = tuple(LOSSES)
    server: bool = True  # whether a server optimizer moves a model

    def __call__(
        self,
        model: Model,
        client_opt: ClientOptimizer,
        plan: Plan,
        *,
        head: str | None = None,
        loss: str | None = None,
        server_opt: optax.GradientTransformation | None = None,
        personal_opt: ClientOptimizer | None = None,
        dim: int | None = None,
        scale: float = 1.0,
        rounds: int = 200,
        auxiliary: FederatedData | None = None,
        weigh: str = 'published',
        personal: str = 'own',
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Recipe:
        """The method's recipe. It ignores what it has no use for, but for a head, loss or server optimizer.

        Args:
          model: feature extractor.
          client_opt: from the round's number to a client's optimizer.
          plan: batch size and local epochs.
          head: one of `heads`; by default the method's own.
          loss: one of `losses`; by default the method's own.
          server_opt: by default plain averaging.
          personal_opt: of Ditto's second models and FedROD's personal heads, by default the same as `client_opt`; as
            published, plain SGD of the same rate.
          dim: dimension of the projected ETF.
          scale: first temperature of heads that compare angles.
          rounds: how long training will be.
          auxiliary: the server's own examples, one client a class, which Ratio Loss needs; see `auxiliary`.
          weigh: one of `WEIGHTS`; by default as the method has it.
          personal: 'own' as the docstrings here say; 'latest' for clients' latest local models, where training makes
            no personal ones.
          options: further arguments of the method's factory, such as `{'mu': 0.1}`.

        Raises:
          ValueError: for a choice that the method does not have; it says which there are.
        """
        head, loss = head or self.heads[0], loss or self.losses[0]
        if weigh not in WEIGHTS:
            raise ValueError(f"clients are weighed by 'examples' or 'alike', or as 'published', not by {weigh!r}")
        for what, given, known in (('head', head, self.heads), ('loss', loss, self.losses)):
            if given not in known:
                raise ValueError(f'{self.name} has no {what} {given!r}, it takes {" or ".join(known)}')
        angular = loss in OF_COSINES['losses']
        if angular and head not in OF_COSINES['heads']:
            possible = [name for name in self.heads if name in OF_COSINES['heads']]
            raise ValueError(f'the loss {loss!r} is one of cosines: with it {self.name} takes {" or ".join(possible)}')
        if server_opt is not None and not self.server:
            possible = [method.name for method in RECIPES.values() if method.server]
            raise ValueError(f'{self.name} has no server model to optimize; these have one: {", ".join(possible)}')
        made, learned = HEADS[head](dim, 1.0 if angular else scale, not angular), head in LEARNED
        opts, values = (client_opt, personal_opt or client_opt), LOSSES[loss]
        setup = Setup(
            model, *opts, plan, made, learned, values, server_opt, dim, scale, rounds, auxiliary, weigh, options
        )
        try:
            recipe = self.make(setup)
        except TypeError as error:
            if not options:
                raise
            raise ValueError(f'{self.name} cannot take the options {dict(options)}: {error}') from error
        if personal == 'latest' and recipe.personalize is not None:
            recipe = Recipe(alg.latest.keep(recipe.train), None, recipe.calibrate, join, recipe.refines)
        return recipe


def auxiliary(x: Any, y: Any, num_classes: int, each: int = 63) -> FederatedData:
    """The first examples `x [n, ...]`, `y [n]` of each class as the server's own, as many as Ratio Loss was given."""
    parts = [np.flatnonzero(np.asarray(y) == c)[:each] for c in range(num_classes)]
    rows, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    own = np.split(np.arange(len(rows)), ends[:-1])
    return federate(np.asarray(x)[rows], np.asarray(y)[rows], own, num_classes)


def shared(factory: Callable[..., Algorithm], **kwargs: Any) -> Callable[[Setup], Recipe]:
    """A method that trains one model for all; one more local update makes the personal models."""
    return lambda s: Recipe(factory(s.task, s.client_opt, **{**kwargs, **s.common}), s.finetune())


def private(factory: Callable[..., Algorithm]) -> Callable[[Setup], Recipe]:
    """A method whose clients keep parts of models. Their personal models are those of their latest local work, whole:
    what stayed behind does not fit what the others have made of the rest since."""
    return lambda s: Recipe(alg.latest.keep(factory(s.task, s.client_opt, **s.common)))


def ditto_recipe(s: Setup) -> Recipe:
    """Ditto, whose clients keep whole personal models."""
    return Recipe(alg.ditto.algorithm(s.task, s.client_opt, **{'personal_opt': s.personal_opt, **s.common}))


def fedrep_recipe(s: Setup) -> Recipe:
    """FedRep with as many epochs for the head as for the body."""
    train = alg.fedrep.algorithm(s.task, s.client_opt, **{'head_epochs': s.plan.epochs, **s.common})
    return Recipe(alg.latest.keep(train))


def fedproto_recipe(s: Setup) -> Recipe:
    """FedProto, where weighing clients by examples means their class means."""
    weigh = 'counts' if s.weigh == 'examples' else 'holders'
    kwargs = {'weigh': weigh, 'plan': s.plan, **s.options}
    return Recipe(alg.fedproto.algorithm(s.task, s.client_opt, **kwargs), generic=False)


def solo_recipe(s: Setup) -> Recipe:
    """Local training. Where few clients take part in a round, a falling rate falls for those who do not, too."""
    return Recipe(alg.solo.algorithm(s.task, s.client_opt, plan=s.plan, **s.options), generic=False)


def feddyn_recipe(s: Setup) -> Recipe:
    """FedDyn, which weighs clients by its penalty: its means are plain."""
    train = alg.feddyn.algorithm(
        s.task, s.client_opt, by_examples=s.weigh == 'examples', plan=s.plan, server_opt=s.server_opt, **s.options
    )
    return Recipe(train, s.finetune())


def fedprox_recipe(s: Setup) -> Recipe:
    """FedProx at mu = 0.001, as FedETF's comparison ran it; the anchor stays while models are made personal. The option
    `anchored=['head']` holds that part alone, which is the clsprox of CCVR's comparison."""
    kwargs = {'mu': 0.001, 'anchored': None, **s.common}
    penalty = alg.fedprox.proximal(kwargs.pop('mu'), kwargs.pop('anchored'))
    return Recipe(alg.fedavg.algorithm(s.task, s.client_opt, penalty=penalty, **kwargs), s.finetune(penalty=penalty))


def contrasting(factory: Callable[..., Algorithm], project: bool, **kwargs: Any) -> Callable[[Setup], Recipe]:
    """A method that compares models on the same images, which the option `preprocess` prepares for all of them.

    Args:
      factory: MOON's or FedMMD's.
      project: whether MOON's projection comes between model and head, unless the option `project` says otherwise.
      **kwargs: defaults of its options.
    """

    def made(s: Setup) -> Recipe:
        options = {**kwargs, 'project': project, **s.options}
        if options.pop('project'):
            s = s._replace(model=alg.moon.projected(s.model))
        s = s._replace(options=options)
        seen = alg.moon.prepared(s.task, options.get('preprocess'))
        return Recipe(factory(s.task, s.client_opt, **s.common), s.finetune(seen))

    return made


moon_recipe = contrasting(alg.moon.algorithm, project=True, mu=1.0)  # as FedETF's comparison ran it


def fedrs_recipe(s: Setup) -> Recipe:
    """FedRS; personal models are tuned under the restricted softmax too."""
    return Recipe(alg.fedrs.algorithm(s.model, s.client_opt, head=s.head, **s.common), s.finetune())


def ratioloss_recipe(s: Setup) -> Recipe:
    """Ratio Loss with ratios up to C; personal models are tuned under the last weights.

    Balanced classes have ratios about C - 1. The published limit of 5,000 goes with a rate of 0.001: weights of
    hundreds, as they come where clients lack classes, multiply the rate.
    """
    if s.auxiliary is None:
        raise ValueError('ratioloss needs examples of every class on the server: pass auxiliary=recipes.auxiliary(...)')
    cap = s.auxiliary.num_classes
    kwargs = {'auxiliary': s.auxiliary, 'cap': cap, 'head': s.head, **s.common}
    train = alg.ratioloss.algorithm(s.model, s.client_opt, **kwargs)
    return Recipe(train, s.finetune(alg.ratioloss.weighing(s.task)))


def fedbabu_recipe(s: Setup) -> Recipe:
    """FedBABU, whose personal models have the final body."""
    train = alg.fedbabu.algorithm(s.task, s.client_opt, **s.common)
    return Recipe(train, alg.fedbabu.personalize(s.task, s.client_opt, plan=s.plan))


def creff_recipe(s: Setup) -> Recipe:
    """CReFF: the generic model has the re-trained head, personal ones begin with the averaged one, as FedAvg's do."""
    train, stage = alg.creff.algorithm(s.model, s.client_opt, **s.common), s.finetune()

    def predict(server: Any, client: Any, x: Array) -> Array:
        return (train if client is None else stage).predict(server, client, x)

    return Recipe(train, stage._replace(predict=predict))


def fedrod_recipe(s: Setup) -> Recipe:
    """FedROD with private linear heads on the clients' latest models. Under an ETF, of which there is nothing to copy,
    they start at zero. The option `personal='hyper'` is the network that was published for CIFAR."""
    personal = alg.fedrod.linear('generic' if s.learned else 'zeros')
    kwargs = {'head': s.head, 'personal': personal, 'personal_opt': s.personal_opt, **s.common}
    if kwargs['personal'] == 'hyper':
        kwargs['personal'] = alg.fedrod.hyper()
    return Recipe(alg.latest.keep(alg.fedrod.algorithm(s.model, s.client_opt, **kwargs)))


def fedetf_recipe(s: Setup) -> Recipe:
    """FedETF with both stages of personalisation, 20 turns of classifier and projection."""
    train = alg.fedetf.algorithm(s.model, s.client_opt, **{'dim': s.dim, 'scale': s.scale, **s.common})
    return Recipe(train, alg.fedetf.personalize(s.model, s.client_opt, plan=s.plan))


def fedetf_gmv_recipe(s: Setup) -> Recipe:
    """FedAvg_ETF whose memory acts in the last two fifths of the rounds; one more local update makes it personal. The
    option `scale` is the length of the ETF's columns."""
    options = dict(s.common)
    head = bare(frames.simplex_etf, options.pop('scale')) if 'scale' in options else s.head
    train = alg.fedetf_gmv.algorithm(s.model, s.client_opt, **{'warm': round(0.6 * s.rounds), 'head': head, **options})
    return Recipe(train, s.finetune(remembering(objective(s.model, head, s.loss))))


def prototypes_recipe(method: Callable[..., Algorithm]) -> Callable[[Setup], Recipe]:
    """FedNH or FedUH with a learned scale; one more local update makes the personal models.

    The option `init` is a method of `frames.uniform`, such as 'orthogonal', which is that of FedNH's released code."""

    def made(s: Setup) -> Recipe:
        options = {'scale': s.scale, **s.common}
        if isinstance(init := options.get('init'), str):
            options['init'] = functools.partial(frames.uniform, method=init)
        return Recipe(method(s.model, s.client_opt, **options), s.finetune())

    return made


def ccvr_recipe(s: Setup) -> Recipe:
    """FedAvg, or the option `base` 'fedprox' or 'moon' at the option `mu`, calibrated by CCVR with `samples` virtual
    features of each class. Personal models tune the calibrated head alone: psi has no slope at zero."""
    options = {'base': 'fedavg', 'samples': 100, **s.options}
    base, samples = options.pop('base'), options.pop('samples')
    bases = {'fedavg': shared(alg.fedavg.algorithm), 'fedprox': fedprox_recipe, 'moon': moon_recipe}
    if base not in bases:
        raise ValueError(f'ccvr calibrates {", ".join(bases)}, not {base!r}')
    train = bases[base](s._replace(options=options)).train
    task = s.task
    if base == 'moon':
        body = alg.moon.projected(s.model) if options.get('project', True) else s.model
        task = alg.moon.prepared(objective(body, s.head, s.loss), options.get('preprocess'))
    psi = alg.ccvr.tukey()
    personal = s.finetune(transformed(task, psi), parts=('head',))
    calibrate = alg.ccvr.calibrate(task, transform=psi, samples=samples)

    def oracle(key: Array, state: State, data: FederatedData) -> State:
        return state._replace(server=alg.ccvr.oracle(key, task, state.server, data))

    return Recipe(train, personal, calibrate, refines=True, oracle=(train, oracle))


def fedloge_recipe(s: Setup) -> Recipe:
    """FedLoGe: the generic model is the globally realigned one, personal models are the locally realigned ones. The
    option `frame` is one of `FRAMES`."""
    options = dict(s.common)
    if 'frame' in options:
        if options['frame'] not in FRAMES:
            raise ValueError(f'frame must be one of {", ".join(FRAMES)}, not {options["frame"]!r}')
        options['frame'] = FRAMES[options['frame']]

    def enter(stage: Algorithm, key: Array, state: State, data: FederatedData) -> State:
        return alg.fedloge.stage_state(state)

    realign = functools.partial(alg.fedloge.realign, s.model, s.client_opt, plan=s.plan)
    variants = {'released': realign(mode='released'), 'tuned': realign(finetune_epochs=15)}
    return Recipe(alg.fedloge.algorithm(s.model, s.client_opt, **options), realign(), None, enter, True, variants)


CE, BALANCED = ('cross_entropy',), ('balanced_softmax',)
RECIPES: dict[str, Method] = {
    method.name: method
    for method in (
        Method('fedavg', shared(alg.fedavg.algorithm)),
        Method('fedprox', fedprox_recipe),
        Method('scaffold', shared(alg.scaffold.algorithm)),
        Method('fednova', shared(alg.fednova.algorithm)),
        Method('feddyn', feddyn_recipe),
        Method('moon', moon_recipe),
        Method('fedmmd', contrasting(alg.fedmmd.algorithm, project=False)),
        Method('fedrs', fedrs_recipe, ('unbiased', *(h for h in HEADS if h != 'unbiased')), ('restricted_softmax',)),
        Method('fedaws', shared(alg.fedaws.algorithm), LEARNED),
        Method('ratioloss', ratioloss_recipe, LEARNED, CE),
        Method('creff', creff_recipe, ('unbiased',), CE),
        Method('ccvr', ccvr_recipe, LEARNED),
        Method('fedetf', fedetf_recipe, ('etf',), BALANCED),
        Method('fedetf_gmv', fedetf_gmv_recipe, ('bare_etf', 'unbiased'), CE),
        Method('feduh', prototypes_recipe(alg.feduh.algorithm), ('prototypes',), CE),
        Method('fednh', prototypes_recipe(alg.fednh.algorithm), ('prototypes',), CE),
        Method('fedloge', fedloge_recipe, ('sparse_etf',), CE),
        Method('fedbabu', fedbabu_recipe, LEARNED),
        Method('fedper', private(alg.fedper.algorithm), (*LEARNED, 'etf')),
        Method('fedrep', fedrep_recipe, (*LEARNED, 'etf')),
        Method('fedbn', private(alg.fedbn.algorithm)),
        Method('ditto', ditto_recipe),
        Method('fedrod', fedrod_recipe, ('unbiased', 'linear', 'unit_norm', 'cosine', 'etf', 'bare_etf'), BALANCED),
        Method('fedproto', fedproto_recipe, server=False),
        Method('solo', solo_recipe, server=False),
    )
}
"""Every method. FedAvg with the head 'etf' and the loss 'balanced_softmax' is FedETF before personalisation, and with
'cross_entropy' its ablation; with 'bare_etf' it is FedAvg_ETF, but for the weights of clients."""
