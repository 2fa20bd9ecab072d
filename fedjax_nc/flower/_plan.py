"""What a consortium agrees on before it begins, and what follows from that: the shapes of all that travels."""

import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_nc
from fedjax_nc import _fingerprint, checks, simulate
from fedjax_nc.base import Algorithm, Array, FederatedData, Info, State, Tree


@functools.cache
def library() -> str:
    """The version of this library, with a digest of its program text: two commits may have one version."""
    root, digest = Path(fedjax_nc.__file__).parent, hashlib.blake2b(digest_size=4)
    for path in sorted(root.rglob('*.py')):
        digest.update(path.relative_to(root).as_posix().encode() + b'\0' + path.read_bytes() + b'\0')
    return f'{fedjax_nc.__version__}+{digest.hexdigest()}'


@functools.cache
def versions() -> str:
    """Of Python and the packages that compute and carry messages."""
    packages = ', '.join(f'{name} {metadata.version(name)}' for name in ('jax', 'jaxlib', 'flax', 'optax', 'flwr'))
    return f'python {platform.python_version()}, {packages}'


def join(algorithm: Algorithm, key: Array, state: State, data: FederatedData) -> State:
    """How most stages take over: `simulate.join` on the server's state.

    Args:
      algorithm: the stage.
      key: draws the clients' first states.
      state: the last one of the phase before.
      data: tells the number of clients.

    Returns:
      The stage's first state.
    """
    return simulate.join(algorithm, key, state.server, data.num_clients)


class Phase(NamedTuple):
    """Rounds of one algorithm: training, or a stage that follows it."""

    algorithm: Algorithm
    #: of its rounds, as `training.run` takes it: round t, from 0, uses `fold_in(key, t)`. All sites know it, so that
    #: what must be unknown to them, the noise of `privacy.private`, is drawn by the server alone
    key: Array
    rounds: int = 1
    cohort: int | None = None  #: sites a round, drawn as in simulation; all by default
    #: (algorithm, key, state before, data) -> first state; not asked for the first phase, which `simulate.init` begins
    enter: Callable[[Algorithm, Array, State, FederatedData], State] = join
    name: str = 'train'  #: of its folder


class Secure(NamedTuple):
    """Secure aggregation by SecAgg+: a server that keeps to the protocol sees sums over sites and no message."""

    #: largest absolute entry of a message. Sums are exact to `2 limit / levels` a site; what lies beyond is not sent
    limit: float = 8.0
    least: int = 3  #: sites of which a sum is made at least
    threshold: float = 2 / 3  #: share of the cohort that must stay to the end of a round
    levels: int = 2**22  #: values of an entry; levels times sites must be below 2^32


class Agreement(NamedTuple):
    """All that server and sites have in common: the program that they run."""

    phases: Sequence[Phase]
    init_key: Array  #: draws the first state, as `simulate.init` takes it
    clients: int  #: K, how many sites there are
    example: jax.ShapeDtypeStruct  #: shape and type of one example
    num_classes: int  #: C
    half: bool = False  #: whether float32 of two axes or more, the bulk of a model, travels as float16
    secure: Secure | None = None  #: whether, and how, messages are summed unseen


class Shapes(NamedTuple):
    """What travels in a phase, as shapes."""

    server: Tree
    client: Tree  #: of one site; stays there
    message: Tree  #: of one site
    info: Info
    generic: bool  #: whether there is a model for everybody


def checked(agreed: Agreement) -> list[Shapes]:
    """What travels in each phase, from the algorithms themselves: nothing is computed.

    Raises:
      ValueError: for an agreement that cannot be carried out.
    """
    checks.kind('agreed', agreed, Agreement)
    checks.whole('clients', agreed.clients)
    checks.whole('num_classes', agreed.num_classes, 2)
    checks.key('init_key', agreed.init_key)
    if not (hasattr(agreed.example, 'shape') and hasattr(agreed.example, 'dtype')):
        raise ValueError(
            'example must have a shape and a type, as jax.ShapeDtypeStruct((28, 28, 1), jnp.float32) has, not '
            f'{checks.shown(agreed.example)}'
        )
    if agreed.secure is not None:
        checks.kind('secure', agreed.secure, Secure)
    if not agreed.phases:
        raise ValueError('an agreement needs a phase: what is to be trained?')
    for phase in agreed.phases:
        checks.kind('phase', phase, Phase)
        checks.kind('algorithm', phase.algorithm, Algorithm)
        checks.key('key', phase.key)
        checks.whole('rounds', phase.rounds)
        if not isinstance(phase.name, str) or any(c in phase.name for c in '/\\\0'):
            raise ValueError(f'name must be one of a folder, such as "train", not {checks.shown(phase.name)}')
        if phase.cohort is not None:
            checks.whole('cohort', phase.cohort)
            if phase.cohort > agreed.clients:
                raise ValueError(f'a cohort of {phase.cohort} cannot be drawn from {agreed.clients} sites')
    found = _shapes(agreed)
    if agreed.secure is not None:
        _securable(agreed, agreed.secure, found)
    return found


def _shapes(agreed: Agreement) -> list[Shapes]:
    data = blank(agreed, [1] * agreed.clients)
    out: list[Shapes] = []
    state: Any = None
    for phase in agreed.phases:

        def begin(state: Any, phase: Phase = phase) -> State:
            if state is None:
                return simulate.init(phase.algorithm, agreed.init_key, data)
            return phase.enter(phase.algorithm, phase.key, state, data)

        def work(server: Tree, client: Tree, phase: Phase = phase) -> tuple[Tree, Tree, Info]:
            return phase.algorithm.client(phase.key, server, client, data.shard(0))

        state = jax.eval_shape(begin, state)
        mine = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), state.clients)
        _, message, info = jax.eval_shape(work, state.server, mine)
        out.append(Shapes(state.server, mine, message, info, _generic(agreed, phase.algorithm, state.server)))
    return out


def _generic(agreed: Agreement, algorithm: Algorithm, server: Tree) -> bool:
    x = jax.ShapeDtypeStruct((1, *agreed.example.shape), agreed.example.dtype)
    try:
        jax.eval_shape(lambda server, x: algorithm.predict(server, None, x), server, x)
    except ValueError:
        return False
    return True


def _securable(agreed: Agreement, secure: Secure, found: list[Shapes]) -> None:
    """Refuses phases whose aggregator asks for more than a sum, and settings that SecAgg+ cannot keep."""
    checks.number('limit', secure.limit, open_low=True)
    checks.number('threshold', secure.threshold, high=1)
    checks.whole('least', secure.least, 2)
    checks.whole('levels', secure.levels, 2)
    if secure.threshold <= 0.5:
        raise ValueError('a threshold of half of the sites or less would let the server make two sums of one round')
    if secure.levels * agreed.clients >= 2**32:
        raise ValueError(f'{agreed.clients} sites of {secure.levels} levels go beyond 2^32: take fewer levels')
    for phase, kinds in zip(agreed.phases, found, strict=True):
        if secure.least > (phase.cohort or agreed.clients):
            raise ValueError(
                f'no sum of {secure.least} sites comes out of a cohort of {phase.cohort or agreed.clients}'
            )
        one, two = (partial_shapes(phase.algorithm, kinds.message, cohort) for cohort in (1, 2))
        if jax.tree.map(lambda u: u.shape, one) != jax.tree.map(lambda u: u.shape, two):
            raise ValueError(
                f"the aggregator of phase '{phase.name}' looks at every message, as medians and calibration do, and "
                'secure aggregation shows sums alone: leave secure out, or take an aggregator that is a sum'
            )
        if secure.limit < 1 and _weighs(phase.algorithm, kinds.message):
            raise ValueError(
                f"limit must be at least 1, not {secure.limit:g}: phase '{phase.name}' sends what a message weighs, "
                'which is 1 of the largest site'
            )


def _weighs(algorithm: Algorithm, message: Tree) -> bool:
    """Whether something goes into the sum beside the message: it is there where that is zero."""
    nothing = summand(algorithm, jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), message), 1)
    return any(bool(jnp.any(u != 0)) for u in jax.tree.leaves(nothing))


def summand(algorithm: Algorithm, message: Tree, size: int, cohort: int = 1) -> Tree:
    """What the message of a site with so many examples becomes on its way to the sum."""
    rows = jax.tree.map(lambda u: jnp.asarray(u)[None], message)
    return algorithm.aggregate.partial(rows, jnp.full(1, size, jnp.float32), jnp.zeros(1, jnp.int32), cohort)


def partial_shapes(algorithm: Algorithm, message: Tree, cohort: int) -> Tree:
    """What one site's message becomes on its way to the sum, as shapes; of a sum it does not grow with the cohort."""
    return jax.eval_shape(lambda message: summand(algorithm, message, 1, cohort), message)


def blank(agreed: Agreement, sizes: Sequence[int] | np.ndarray) -> FederatedData:
    """The population as its server knows it: how many examples everybody holds, and none of them.

    Args:
      agreed: shape of examples, number of sites and classes.
      sizes: [K] examples of each site, 0 where that is not known.

    Returns:
      Clients whose rows all point to one example of zeros; only their sizes mean anything.
    """
    x = jnp.zeros((1, *agreed.example.shape), agreed.example.dtype)
    counts = jnp.zeros((agreed.clients, agreed.num_classes), jnp.int32)
    index = jnp.zeros((agreed.clients, 1), jnp.int32)
    return FederatedData(x, jnp.zeros(1, jnp.int32), index, jnp.asarray(np.asarray(sizes), jnp.int32), counts)


def first(agreed: Agreement, number: int, before: Tree, own: Tree | None, client: int) -> Tree:
    """One site's state at the beginning of a phase, as simulation has it.

    Args:
      agreed: by all.
      number: of the phase.
      before: the server's last state of the phase before; its first state for phase 0.
      own: the site's last state of the phase before; None for phase 0.
      client: whose state.

    Returns:
      The state, without the axis of clients.
    """
    phase = agreed.phases[number]
    if number == 0:
        _, key = jax.random.split(agreed.init_key)
        state = simulate.join(phase.algorithm, key, before, agreed.clients)
    else:  # what others hold makes no difference to row `client`
        everybody = jax.tree.map(lambda u: jnp.broadcast_to(u, (agreed.clients, *np.shape(u))), own)
        data = blank(agreed, [1] * agreed.clients)
        state = phase.enter(phase.algorithm, phase.key, State(before, everybody), data)
    return jax.tree.map(lambda u: u[client], state.clients)


def fingerprint(agreed: Agreement) -> str:
    """Of the program that all run: 32 hexadecimal digits."""
    said = agreed._replace(example=(str(agreed.example.dtype), tuple(agreed.example.shape)))  # type: ignore[arg-type]
    return _fingerprint.of_algorithm(said)
