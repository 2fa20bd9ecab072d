"""Algorithms by name, for scripts that put them side by side. Programs call the factories themselves.

Model, optimizer, plan and first temperature are given and the same for all, whatever each paper took; the rest are the
factories' defaults. Head, loss and server optimizer are a choice where a method does not bring its own; clients are
weighed as each method has it, unless `weigh` says how for all.

A method of one's own has the name 'package.module:factory' everywhere: see `named`. The functions called `..._recipe`
make the `Recipe` of a `Setup`; their docstrings say what they add to the factory's defaults, and further options.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import optax

from fedjax_nc import algorithms as alg
from fedjax_nc import checks, frames, heads, losses
from fedjax_nc.base import Algorithm, Array, FederatedData, Model, State, Variables
from fedjax_nc.data import federate
from fedjax_nc.experiments import own
from fedjax_nc.experiments.parts import FRAMES as FRAMES
from fedjax_nc.experiments.parts import HEADS as HEADS
from fedjax_nc.experiments.parts import LEARNED as LEARNED
from fedjax_nc.experiments.parts import LOSSES as LOSSES
from fedjax_nc.experiments.parts import OF_COSINES as OF_COSINES
from fedjax_nc.experiments.parts import SERVER_OPTIMIZERS as SERVER_OPTIMIZERS
from fedjax_nc.experiments.parts import WEIGHTS as WEIGHTS
from fedjax_nc.experiments.parts import Recipe as Recipe
from fedjax_nc.experiments.parts import Setup as Setup
from fedjax_nc.experiments.parts import bare as bare
from fedjax_nc.experiments.parts import defaults as defaults
from fedjax_nc.experiments.parts import join as join
from fedjax_nc.experiments.parts import longer as longer
from fedjax_nc.experiments.parts import own_head as own_head
from fedjax_nc.experiments.parts import own_loss as own_loss
from fedjax_nc.experiments.parts import plain as plain
from fedjax_nc.experiments.parts import server_optimizer as server_optimizer
from fedjax_nc.experiments.parts import trained as trained
from fedjax_nc.local import ClientOptimizer, Plan
from fedjax_nc.memory import remembering, tallying
from fedjax_nc.objective import objective, transformed


class Method(NamedTuple):
    """What can be had under a name."""

    name: str  #: what it is called in tables and messages
    make: Callable[[Setup], Recipe]  #: from what is chosen to how the method is carried out
    heads: tuple[str, ...] = tuple(HEADS)  #: those that it takes, names in `HEADS`; the first is the method's own
    losses: tuple[str, ...] = tuple(LOSSES)  #: those that it takes, names in `LOSSES`; the first is the method's own
    server: bool = True  #: whether a server optimizer moves a model
    weighs: bool = True  #: whether `weigh` can be chosen, or has no meaning, as with clients that train alone

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
        """The method's recipe. It ignores what it has no use for, but for a head, loss, server optimizer or weights.

        Args:
          model: feature extractor.
          client_opt: from the round's number to a client's optimizer.
          plan: batch size and local epochs.
          head: one of `heads`, and where these are all of `HEADS` one of a user's own, see `own_head`; by default the
            method's.
          loss: one of `losses`, and where these are all of `LOSSES` one of a user's own, see `own_loss`; by default
            the method's.
          server_opt: by default plain averaging.
          personal_opt: of Ditto's second models and FedROD's personal heads, by default the same as `client_opt`;
            published by FedNH and FedETF: plain SGD of the same rate.
          dim: dimension of the projected ETF.
          scale: first temperature of heads that compare angles.
          rounds: how long training will be.
          auxiliary: the server's own examples, one client a class, which Ratio Loss needs; see `auxiliary`.
          weigh: one of `WEIGHTS`; by default as the method has it.
          personal: 'own' as the docstrings here say; 'latest' for clients' latest local models, where training makes
            no personal ones.
          options: further arguments of the method's factory, such as `{'mu': 0.1}`.

        Returns:
          The algorithm that trains, and the stages that calibrate its model and make it personal, where it has them.

        Raises:
          ValueError: for a choice or an option that the method does not have; it says which there are. Also as the
            method's recipe and its factory.
        """
        head, loss = head or self.heads[0], loss or self.losses[0]
        if weigh not in WEIGHTS:
            raise ValueError(f"clients are weighed by 'examples' or 'alike', or as 'published', not by {weigh!r}")
        for what, given, known, every in (('head', head, self.heads, HEADS), ('loss', loss, self.losses, LOSSES)):
            if given not in known and not (':' in given and set(known) >= set(every)):
                raise ValueError(f'{self.name} has no {what} {given!r}, it takes {" or ".join(known)}')
        angular = loss in OF_COSINES['losses']
        if angular and head in HEADS and head not in OF_COSINES['heads']:
            possible = [name for name in self.heads if name in OF_COSINES['heads']]
            raise ValueError(f'the loss {loss!r} is one of cosines: with it {self.name} takes {" or ".join(possible)}')
        if server_opt is not None and not self.server:
            possible = [method.name for method in RECIPES.values() if method.server]
            raise ValueError(f'{self.name} has no server model to optimize; these have one: {", ".join(possible)}')
        if weigh != 'published' and not self.weighs:
            raise ValueError(
                f'{self.name} weighs clients its own way: weigh={weigh!r} needs a factory with `aggregate`'
            )
        made = HEADS[head](dim, 1.0 if angular else scale, not angular) if head in HEADS else own_head(head)
        values = LOSSES[loss] if loss in LOSSES else own_loss(loss)
        opts, learned = (client_opt, personal_opt or client_opt), head in LEARNED
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
            if recipe.refines and recipe.calibrate is None:
                raise ValueError(
                    f'{self.name} makes its general model in the stage after training, which personal={personal!r} '
                    'would leave out'
                )
            kept = alg.latest.keep(recipe.train)
            recipe = recipe._replace(train=kept, personalize=None, enter=join, variants={})
        return recipe


def auxiliary(x: Any, y: Any, num_classes: int, each: int = 63) -> FederatedData:
    """The first examples of each class as the server's own, as many as Ratio Loss was given.

    Args:
      x: [n, ...] examples, as for `data.federate`.
      y: [n] integers in [0, C).
      num_classes: the number of classes, C.
      each: examples of a class; a class that has fewer gives all.

    Returns:
      The data of C clients; client c holds what is taken of class c.

    Raises:
      ValueError: if a class has no example, or as `data.federate`.
    """
    parts = [np.flatnonzero(np.asarray(y) == c)[:each] for c in range(num_classes)]
    rows, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    own = np.split(np.arange(len(rows)), ends[:-1])
    return federate(np.asarray(x)[rows], np.asarray(y)[rows], own, num_classes)


def shared(factory: Callable[..., Algorithm], **kwargs: Any) -> Callable[[Setup], Recipe]:
    """A method that trains one model for all; one more local update makes the personal models.

    Of `server_opt`, `aggregate` and `aggregate_stats`, a factory without `**kwargs` is given those that it names.

    Args:
      factory: `(task, client_opt, *, plan, ...) -> Algorithm`, as the library's are.
      **kwargs: defaults of its other arguments; a setup's options come before them.

    Returns:
      What makes its recipe, the `make` of a `Method`.
    """

    def made(s: Setup) -> Recipe:
        names, several = own.takes(factory)
        left_out = set() if several else {'server_opt', 'aggregate', 'aggregate_stats'} - {*names, *s.options}
        given = {name: value for name, value in {**kwargs, **s.common}.items() if name not in left_out}
        return trained(factory, s.task, s.client_opt, **given)._replace(personalize=s.finetune())

    return made


def private(factory: Callable[..., Algorithm]) -> Callable[[Setup], Recipe]:
    """A method whose clients keep parts of models.

    Their personal models are those of their latest local work, whole: what stayed behind does not fit what the others
    have made of the rest since.

    Args:
      factory: `(task, client_opt, *, plan, server_opt, ...) -> Algorithm`, as the library's are.

    Returns:
      What makes its recipe, the `make` of a `Method`.
    """
    return lambda s: latest(trained(factory, s.task, s.client_opt, **s.common))


def latest(recipe: Recipe) -> Recipe:
    """The recipe of clients whose personal models are those of their latest local work."""
    return recipe._replace(train=alg.latest.keep(recipe.train))


def ditto_recipe(s: Setup) -> Recipe:
    """Ditto, whose clients keep whole personal models."""
    return trained(alg.ditto.algorithm, s.task, s.client_opt, **{'personal_opt': s.personal_opt, **s.common})


def fedrep_recipe(s: Setup) -> Recipe:
    """FedRep with as many epochs for the head as for the body."""
    return latest(trained(alg.fedrep.algorithm, s.task, s.client_opt, **{'head_epochs': s.plan.epochs, **s.common}))


def fedproto_recipe(s: Setup) -> Recipe:
    """FedProto, where weighing clients by examples means their class means. The view 'head' predicts by their heads."""
    weigh = 'counts' if s.weigh == 'examples' else 'holders'
    recipe = trained(alg.fedproto.algorithm, s.task, s.client_opt, **{'weigh': weigh, 'plan': s.plan, **s.options})
    own = recipe.train._replace(predict=alg.fedproto.head_predict(s.task))
    return recipe._replace(generic=False, views={'head': own})


def solo_recipe(s: Setup) -> Recipe:
    """Local training. Where few clients take part in a round, a falling rate falls for those who do not, too."""
    recipe = trained(alg.solo.algorithm, s.task, s.client_opt, plan=s.plan, **s.options)
    return recipe._replace(generic=False)


def feddyn_recipe(s: Setup) -> Recipe:
    """FedDyn, which weighs clients by its penalty: its means are plain.

    Personal models are tuned without anchor. The view 'averaged', the mean of the last cohort's models, is there where
    no server optimizer moves the model."""
    kwargs = {'by_examples': s.weigh == 'examples', 'plan': s.plan, 'server_opt': s.server_opt, **s.options}
    recipe = trained(alg.feddyn.algorithm, s.task, s.client_opt, **kwargs)

    def predict(server: Any, client: Any, x: Array) -> Array:
        return recipe.train.predict(alg.feddyn.averaged(server), client, x)

    views = {'averaged': recipe.train._replace(predict=predict)} if kwargs['server_opt'] is None else {}
    return recipe._replace(personalize=s.finetune(), views=views)


def fedprox_recipe(s: Setup) -> Recipe:
    """FedProx at mu = 0.001, as FedETF's comparison ran it; the anchor stays while models are made personal.

    The option `anchored=['head']` holds that part alone, which is the clsprox of CCVR's comparison."""
    kwargs = {'mu': 0.001, 'anchored': None, **s.common}
    said = {name: kwargs.pop(name) for name in ('mu', 'anchored')}
    penalty = alg.fedprox.proximal(*said.values())
    recipe = trained(alg.fedavg.algorithm, s.task, s.client_opt, penalty=penalty, **kwargs)
    return recipe._replace(personalize=s.finetune(penalty=penalty), told={**plain(said), **recipe.told})


def contrasting(factory: Callable[..., Algorithm], project: bool, **kwargs: Any) -> Callable[[Setup], Recipe]:
    """A method that compares models on the same images.

    Args:
      factory: MOON's or FedMMD's.
      project: whether MOON's projection comes between model and head, unless the option `project` says otherwise.
      **kwargs: defaults of its options.

    Returns:
      What makes its recipe, the `make` of a `Method`. One more local update, without the comparison, makes the personal
      models.
    """

    def made(s: Setup) -> Recipe:
        """What `contrasting` makes; `moon_recipe` is MOON with its projection and mu = 1, as in FedETF's comparison."""
        options = {**kwargs, 'project': project, **s.options}
        if projected := options.pop('project'):
            s = s._replace(model=alg.moon.projected(s.model))
        s = s._replace(options=options)
        recipe = trained(factory, s.task, s.client_opt, **s.common)
        return recipe._replace(personalize=s.finetune(), told={'project': projected, **recipe.told})

    return made


moon_recipe = contrasting(alg.moon.algorithm, project=True, mu=1.0)


def fedrs_recipe(s: Setup) -> Recipe:
    """FedRS; personal models are tuned under the same restricted softmax."""
    recipe = trained(alg.fedrs.algorithm, s.model, s.client_opt, head=s.head, **s.common)
    known = {**defaults(alg.fedrs.algorithm), **s.options}
    restricted = functools.partial(losses.restricted_softmax, alpha=known['alpha'], soft=known['soft'])
    return recipe._replace(personalize=s.finetune(objective(s.model, s.head, restricted)))


def ratioloss_recipe(s: Setup) -> Recipe:
    """Ratio Loss with ratios up to C; personal models are tuned under the last weights.

    Balanced classes have ratios about C - 1. The published limit of 5,000 goes with a rate of 0.001: weights of
    hundreds, as they come where clients lack classes, multiply the rate.

    Raises:
      ValueError: without `auxiliary` in the setup.
    """
    if s.auxiliary is None:
        raise ValueError('ratioloss needs examples of every class on the server: pass auxiliary=recipes.auxiliary(...)')
    cap = s.auxiliary.num_classes
    kwargs = {'auxiliary': s.auxiliary, 'cap': cap, 'head': s.head, **s.common}
    recipe = trained(alg.ratioloss.algorithm, s.model, s.client_opt, **kwargs)
    return recipe._replace(personalize=s.finetune(alg.ratioloss.weighing(s.task)))


def fedbabu_recipe(s: Setup) -> Recipe:
    """FedBABU, whose personal models have the final body."""
    recipe = trained(alg.fedbabu.algorithm, s.task, s.client_opt, **s.common)
    return recipe._replace(personalize=alg.fedbabu.personalize(s.task, s.client_opt, plan=s.plan))


def creff_recipe(s: Setup) -> Recipe:
    """CReFF: the generic model has the re-trained head, personal ones begin with the averaged one, as FedAvg's do."""

    def variables(server: Any) -> Variables:
        v: Variables = server.variables
        return v._replace(params={**v.params, 'head': server.extra.head})

    recipe = trained(alg.creff.algorithm, s.model, s.client_opt, **s.common)
    task = s._replace(head=heads.linear(recipe.told['bias'])).task
    return recipe._replace(personalize=s.finetune(task), variables=variables)


def fedrod_recipe(s: Setup) -> Recipe:
    """FedROD with private linear heads on the clients' latest models, with biases if the generic head has them.

    Under an ETF, of which there is nothing to copy, they start at zero. The option `personal='hyper'` is the network
    that was published for CIFAR, 'linear' the default."""
    kwargs = {'head': s.head, 'personal': 'linear', 'personal_opt': s.personal_opt, **s.common}
    if kwargs['personal'] == 'linear':
        kwargs['personal'] = alg.fedrod.linear('generic' if s.learned else 'zeros', bias=True)
    elif kwargs['personal'] == 'hyper':
        kwargs['personal'] = alg.fedrod.hyper()
    return latest(trained(alg.fedrod.algorithm, s.model, s.client_opt, **kwargs))


def fedetf_recipe(s: Setup) -> Recipe:
    """FedETF with both stages of personalisation, 20 turns of classifier and projection."""
    recipe = trained(alg.fedetf.algorithm, s.model, s.client_opt, **{'dim': s.dim, 'scale': s.scale, **s.common})
    told = {**recipe.told, 'dim': s.dim or 'number of classes'} if 'dim' not in s.options else recipe.told
    return recipe._replace(personalize=alg.fedetf.personalize(s.model, s.client_opt, plan=s.plan), told=told)


def fedetf_gmv_recipe(s: Setup) -> Recipe:
    """FedAvg_ETF whose memory acts in the last two fifths of the rounds; one more local update makes it personal.

    The option `scale` is the length of the ETF's columns.

    Raises:
      ValueError: for a `scale` of a learned head.
    """
    if s.learned and 'scale' in s.options:
        raise ValueError(
            "fedetf_gmv's option scale is the length of a frozen ETF's columns, and the head is learned: "
            'leave out one of the two'
        )
    options = {'warm': round(0.6 * s.rounds), 'scale': 1.0, **s.common}
    scale = options.pop('scale')
    head = bare(frames.simplex_etf, scale) if 'scale' in s.options else s.head
    recipe = trained(alg.fedetf_gmv.algorithm, s.model, s.client_opt, head=head, **options)
    task = objective(s.model, head, s.loss)
    online = options.get('features') == 'online'  # sums of features have travelled with the statistics
    personal = s.finetune(remembering(tallying(task, s.plan.epochs) if online else task))
    own = {} if s.learned else {'scale': plain(scale)}  # of the frame, if there is one
    return recipe._replace(personalize=personal, told={k: v for k, v in recipe.told.items() if k != 'scale'} | own)


def prototypes_recipe(method: Callable[..., Algorithm]) -> Callable[[Setup], Recipe]:
    """FedNH or FedUH, whose scale is learned if no option says otherwise; one more local update makes it personal.

    The option `init` is a method of `frames.uniform`, such as 'orthogonal', which is that of FedNH's released code.

    Args:
      method: FedNH's or FedUH's factory.

    Returns:
      What makes its recipe, the `make` of a `Method`.
    """

    def made(s: Setup) -> Recipe:
        options = {'scale': s.scale, **s.common}
        if isinstance(init := options.get('init'), str):
            options['init'] = functools.partial(frames.uniform, method=init)
        recipe = trained(method, s.model, s.client_opt, **options)
        head = HEADS['prototypes'](None, options['scale'], recipe.told['learn_scale'])
        return recipe._replace(personalize=s.finetune(s._replace(head=head).task))

    return made


def ccvr_recipe(s: Setup) -> Recipe:
    """FedAvg, or the option `base` 'fedprox' or 'moon' at the option `mu`, calibrated by CCVR.

    The option `samples` is the number of virtual features of each class, 100 by default, and 0 calibrates nothing.
    Personal models tune the calibrated head alone: psi has no slope at zero.

    Raises:
      ValueError: for another `base`.
    """
    options = {'base': 'fedavg', 'samples': 100, **s.options}
    base, samples = options.pop('base'), options.pop('samples')
    bases = {'fedavg': shared(alg.fedavg.algorithm), 'fedprox': fedprox_recipe, 'moon': moon_recipe}
    if base not in bases:
        raise ValueError(f'ccvr calibrates {", ".join(bases)}, not {base!r}')
    recipe, task = bases[base](s._replace(options=options)), s.task
    if base == 'moon':
        body = alg.moon.projected(s.model) if options.get('project', True) else s.model
        task = objective(body, s.head, s.loss)
    psi = alg.ccvr.tukey() if samples else None  # without virtual features the model stays what it was
    seen = transformed(task, psi) if psi else task
    personal = s.finetune(seen, parts=('head',))
    calibrate = alg.ccvr.calibrate(task, transform=psi, samples=samples)

    def oracle(key: Array, state: State, data: FederatedData) -> State:
        return state._replace(server=alg.ccvr.oracle(key, task, state.server, data))

    said = {'base': base, 'samples': samples, 'transform': psi}
    return recipe._replace(
        personalize=personal, calibrate=calibrate, refines=True, oracle=(recipe.train, oracle),
        told={**plain(said), **recipe.told}, task=seen,
    )  # fmt: skip


def fedloge_recipe(s: Setup) -> Recipe:
    """FedLoGe: the generic model is the globally realigned one, personal models are the locally realigned ones.

    The option `frame` is one of `FRAMES`, whose columns the option `length` makes so many times as long. With the
    option `project=True` an affine layer of as many dimensions as the features have comes between model and heads.

    Raises:
      ValueError: for another `frame`, a `length` out of range, or a `project` that is neither true nor false.
    """
    options = {'frame': 'sparse_etf', 'length': 1.0, 'project': False, **s.common}
    frame, length, project = (options.pop(name) for name in ('frame', 'length', 'project'))
    if frame not in FRAMES:
        raise ValueError(f'frame must be one of {", ".join(FRAMES)}, not {frame!r}')
    checks.number('length', length, open_low=True)
    if not isinstance(project, bool):
        raise ValueError(f'project must be true or false, not {checks.shown(project)}')
    made = FRAMES[frame] if length == 1 else functools.partial(longer, frame=FRAMES[frame], length=length)
    if project:
        s = s._replace(model=alg.moon.projected(s.model, None, hidden=False))

    def enter(stage: Algorithm, key: Array, state: State, data: FederatedData) -> State:
        return alg.fedloge.stage_state(state)

    realign = functools.partial(alg.fedloge.realign, s.model, s.client_opt, plan=s.plan)
    variants = {'released': realign(mode='released'), 'tuned': realign(finetune_epochs=15)}
    recipe = trained(alg.fedloge.algorithm, s.model, s.client_opt, frame=made, **options)
    told = {**recipe.told, 'frame': frame, 'length': length, 'project': project}
    return recipe._replace(personalize=realign(), enter=enter, refines=True, variants=variants, told=told)


_CE, _BALANCED = ('cross_entropy',), ('balanced_softmax',)
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
        Method('ratioloss', ratioloss_recipe, LEARNED, _CE),
        Method('creff', creff_recipe, ('unbiased',), _CE),
        Method('ccvr', ccvr_recipe, LEARNED),
        Method('fedetf', fedetf_recipe, ('etf',), _BALANCED),
        Method('fedetf_gmv', fedetf_gmv_recipe, ('bare_etf', 'unbiased'), _CE),
        Method('feduh', prototypes_recipe(alg.feduh.algorithm), ('prototypes',), _CE),
        Method('fednh', prototypes_recipe(alg.fednh.algorithm), ('prototypes',), _CE),
        Method('fedloge', fedloge_recipe, ('sparse_etf',), _CE),
        Method('fedbabu', fedbabu_recipe, LEARNED),
        Method('fedper', private(alg.fedper.algorithm), (*LEARNED, 'etf')),
        Method('fedrep', fedrep_recipe, (*LEARNED, 'etf')),
        Method('fedbn', private(alg.fedbn.algorithm)),
        Method('ditto', ditto_recipe),
        Method('fedrod', fedrod_recipe, ('unbiased', 'linear', 'unit_norm', 'cosine', 'etf', 'bare_etf'), _BALANCED),
        Method('fedproto', fedproto_recipe, server=False),
        Method('solo', solo_recipe, server=False),
    )
}
"""Every method. FedAvg with the head 'etf' and the loss 'balanced_softmax' is FedETF before personalisation, and with
'cross_entropy' its ablation; with 'bare_etf' it is FedAvg_ETF, but for the weights of clients."""


def named(name: str) -> Method:
    """The method of a name in `RECIPES`, or of one's own: 'package.module:attribute', of a module that can be imported.

    The attribute is a `Method`, which says all that there is to say; or a factory `(task, client_opt, *, plan, ...) ->
    Algorithm`, as the library's are, which takes every head and loss, and from whose model one more local update makes
    the personal ones. What it also has of `server_opt`, `aggregate` and `aggregate_stats` can be chosen, and all its
    other arguments are options. A factory called `algorithm` is labelled by its module.

    Raises:
      ValueError: for another name, a module that cannot be imported, what is neither in it, or a method that takes no
        head or no loss.
    """
    if not own.is_own('algorithm', name, RECIPES, 'factory'):
        return RECIPES[name]
    made = own.attribute('algorithm', name)
    if isinstance(made, Method):
        if not (made.heads and made.losses):
            raise ValueError(
                f'algorithm {name} must name a head and a loss: of a method that brings its own, those which these are '
                "most like, such as heads=('etf',), losses=('cross_entropy',)"
            )
        return made
    factory = callable(made) and not isinstance(made, type)
    names, several = own.takes(made) if factory else ({}, False)
    if not several and 'plan' not in names:
        raise ValueError(
            f'algorithm {name} must be a recipes.Method, or a factory (task, client_opt, *, plan, ...) -> Algorithm, '
            f'not {checks.shown(made)}'
        )
    module, _, attribute = name.partition(':')
    label = module.rpartition('.')[2] if attribute == 'algorithm' else attribute
    server, weighs = (several or name in names for name in ('server_opt', 'aggregate'))
    return Method(label, shared(made), server=server, weighs=weighs)
