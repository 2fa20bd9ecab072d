"""User-level differential privacy, under any algorithm whose messages are changes.

Learning Differentially Private Recurrent Language Models.
McMahan, Ramage, Talwar, Zhang. ICLR 2018. https://arxiv.org/abs/1710.06963

Each client scales what it sends down to norm S; the server adds noise to the sum and divides by a fixed number,

    ( sum_k m_k min(1, S / |m_k|) + N(0, (z S)^2) ) / M,

so that the mean of M clients carries noise of standard deviation `z S / M`, and whoever sees all models learns little
of whether a client, with all its examples, took part at all.
"""

import logging
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fedjax_nc import aggregators, checks, tree
from fedjax_nc.algorithms import feddyn, fednova
from fedjax_nc.base import Aggregate, Algorithm, Array, Info, Shard, Tree, Variables

MULTIPLIERS = 1e-6, 1e6
"""The noise that is accounted for."""


def private(algorithm: Algorithm, *, clip: float, noise_multiplier: float, cohort: int) -> Algorithm:
    """The same algorithm, to whose server the cohort's messages come clipped, averaged and noisy.

    The whole message is clipped at once, whatever it holds, and clients count the same, whatever their size. The
    algorithm then goes on as if each of M clients had sent the noisy mean, so that its own aggregator, be it a sum or a
    median, sees nothing else; M stands for the number of clients too, and how many examples they hold is not told. What
    clients keep for themselves is not noisy and not to be published, and neither are the reports of rounds, which are
    for the person who simulates. Nor is it clipped: SCAFFOLD's and FedDyn's servers follow the noisy changes of what
    clients keep exactly. Put it around everything else: what is put around it instead, such as `latest.keep`, sees
    clipped messages, and takes a client's model to be what it has sent.

    Whoever knows the key of a round knows its cohort and its noise: in simulation, keep the run's key as secret as its
    reports, and use it for nothing else, the first state included, whose parameters are published. The same key gives
    the same noise only in the same round with the same S, z and M. `flower.server_app` draws the noise from fresh
    randomness of its own.

    Args:
      algorithm: one whose server works with means or sums of messages. Means by class and FedNova's directions are
        weighted before they are summed, which noisy weights do not allow; nor may the server ask for numbers of
        examples, as SCAFFOLD does under `aggregators.mean`.
      clip: S, such as the median norm of messages.
      noise_multiplier: z; 0 clips without privacy. See `epsilon` for what it buys.
      cohort: M, the fixed denominator: clients a round, as given to `simulate.make_round`.

    Returns:
      An `Algorithm` with the states and predictions of the given one.

    Raises:
      ValueError: if S is not positive and finite, z negative, or M below 1; when a state is made, for a model with
        running statistics: they are not changes, and clipping would destroy them; in the first round, for messages
        that are weighted or hold whole numbers, a server that asks for numbers of examples, or a cohort of another
        size; for what is no algorithm.
    """
    checks.kind('algorithm', algorithm, Algorithm)
    checks.number('clip', clip, open_low=True)
    checks.number('noise_multiplier', noise_multiplier)
    cohort = checks.static('cohort', cohort)
    # NumPy's half precision would go on in all products; what is traced, as by `simulate.tuned`, stays so.
    clip, noise_multiplier = (u if checks.traced(u) else float(u) for u in (clip, noise_multiplier))

    def refuse_statistics(server: Tree) -> None:
        held = jax.tree.leaves(server, is_leaf=lambda u: isinstance(u, Variables))
        if jax.tree.leaves([u.stats for u in held if isinstance(u, Variables)]):
            raise ValueError('running statistics cannot be sent in private: use a model with GroupNorm, not BatchNorm')

    def init_client(key: Array, server: Tree) -> Tree:
        refuse_statistics(server)
        return algorithm.init_client(key, server)

    def client(key: Array, server: Tree, client: Tree, shard: Shard) -> tuple[Tree, Tree, Info]:
        refuse_statistics(server)
        if any(_counting(u) for u in jax.tree.leaves(server, is_leaf=_counting)):
            raise ValueError(
                "FedDyn with by_examples=True anchors each client by all clients' examples, so that one of them moves "
                'what the others send: leave it out in private'
            )
        new, message, info = algorithm.client(key, server, client, shard)
        kinds = (aggregators.ClassRows, fednova.Message)
        weighted = jax.tree.leaves(message, is_leaf=lambda u: isinstance(u, kinds))
        if any(isinstance(u, kinds) for u in weighted):
            raise ValueError(
                'this algorithm weighs what clients send, by class or by their steps, before it is summed: in private '
                'use one that sends changes of a model alone, such as fedavg'
            )
        if any(not jnp.issubdtype(u.dtype, jnp.floating) for u in jax.tree.leaves(message)):
            raise ValueError(
                'messages of this algorithm hold whole numbers, such as counts or ids, which cannot be clipped beside '
                'the change of a model: send changes alone in private'
            )
        # What is dropped leaves no trace, in the client's state neither: the report knows it as broken by its loss.
        lost = jnp.any(tree.nan_rows(jax.tree.map(lambda u: jnp.expand_dims(u, 0), new)))
        sound = jnp.isfinite(info.loss) & ~lost
        kept = tree.where(sound, _clipped(message, clip), tree.zeros(message))
        whole = sound & jnp.isfinite(tree.dot(message, message))
        return tree.where(whole, new, client), kept, info._replace(loss=jnp.where(whole, info.loss, jnp.nan))

    def server(key: Array, server: Tree, aggregate: Aggregate) -> Tree:
        if isinstance(aggregate.cohort, int) and aggregate.cohort != cohort:
            raise ValueError(
                f'private divides by cohort={cohort}, and the round has {aggregate.cohort} clients: give both the same'
            )
        k_noise, key = jax.random.split(key)
        std = jnp.float32(noise_multiplier * clip)
        # Runs that differ in S, z or M, or one that goes on with the key that it began with, would share their noise,
        # and the difference of their models be without any.
        counted = [u for u in map(jnp.asarray, jax.tree.leaves(server)) if u.ndim == 0 and u.dtype == jnp.int32]
        bits = [jax.lax.bitcast_convert_type(jnp.float32(u), jnp.uint32) for u in (clip, noise_multiplier)]
        for own in (*bits, jnp.uint32(cohort), *counted):  # of the server such as the number of the round
            k_noise = jax.random.fold_in(k_noise, own)
        mean = tree.scale(_noisy(k_noise, aggregate.value, std), 1.0 / cohort)
        message = jax.tree.map(lambda u: u[None], mean)

        def sent(slot: Array) -> Tree:
            return algorithm.aggregate.partial(message, jnp.ones(1, jnp.float32), slot, cohort)

        slots = jnp.arange(cohort)[:, None]
        first = sent(slots[0])
        if depends_on(jax.make_jaxpr(sent)(slots[0]).jaxpr, 0):  # each has a place of its own, as in a stack
            total = jax.lax.fori_loop(1, cohort, lambda i, total: tree.add(total, sent(slots[i])), first)
        else:  # the same of all: in a large cohort the sum would lose digits, and take long
            total = jax.tree.map(lambda u: u * jnp.asarray(cohort, u.dtype), first)
        value = algorithm.aggregate.finish(total)

        def step(examples: Array) -> Tree:
            return algorithm.server(key, server, Aggregate(value, examples, jnp.float32(cohort), cohort))

        if depends_on(jax.make_jaxpr(step)(jnp.float32(0)).jaxpr, 0):
            raise ValueError(
                'the server of this algorithm asks how many examples the cohort holds, which is not told in private: '
                'let clients count alike, by aggregate=aggregators.uniform'
            )
        return step(jnp.float32(jnp.nan))

    return algorithm._replace(
        init_client=init_client,
        client=client,
        aggregate=aggregators.total,
        server=server,
        secret=algorithm.secret or checks.traced(noise_multiplier) or noise_multiplier > 0,
    )


def depends_on(jaxpr: core.Jaxpr, at: int) -> bool:
    """Whether anything that a trace `jaxpr`, `jax.make_jaxpr(fn)(*args).jaxpr`, computes depends on its input `at`."""
    var = jaxpr.invars[at]
    if any(out is var for out in jaxpr.outvars):
        return True
    for eqn in jaxpr.eqns:
        for i, atom in enumerate(eqn.invars):
            if atom is var:
                inner = list(core.jaxprs_in_params(eqn.params))
                same = len(inner) == 1 and len(inner[0].invars) == len(eqn.invars)  # a call of a function, say
                if not same or depends_on(inner[0], i):
                    return True
    return False


def _counting(state: Any) -> bool:
    """Whether it is what FedDyn knows with the examples of all clients in it."""
    return isinstance(state, feddyn.Dual) and not isinstance(state.examples, tuple)


def _clipped(message: Tree, norm: float) -> Tree:
    """The message scaled down to at most this Euclidean norm over all its leaves; zero if it is not finite."""
    message = jax.tree.map(lambda u: u.astype(jnp.float32), message)
    length = jnp.sqrt(tree.dot(message, message))
    scaled = tree.scale(message, norm / jnp.maximum(length, norm))
    return tree.where(jnp.isfinite(length), scaled, tree.zeros(message))


def _noisy(key: Array, message: Tree, std: Array | float) -> Tree:
    """The message plus independent normal noise of that standard deviation in every entry."""
    leaves, structure = jax.tree.flatten(message)
    keys = jax.random.split(key, len(leaves))
    drawn = [u + std * jax.random.normal(k, u.shape, jnp.float32) for k, u in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def epsilon(
    noise_multiplier: float, sampling_rate: float, rounds: int, delta: float, *, sampling: str = 'fixed'
) -> float:
    """The epsilon for which `rounds` of `private` are (epsilon, delta) differentially private, by Renyi accounting.

    `simulate` draws cohorts of fixed size without replacement. The guarantee for it, 'fixed', is that one client's data
    could have been another's (Wang, Balle, Kasiviswanathan, AISTATS 2019); the sum then moves by up to 2 S, so that the
    noise counts as half of z. Most papers report 'poisson' instead: as if each client had joined by the toss of a coin,
    with the guarantee that a client could have been missing. That number is smaller, and here an idealisation, but for
    a rate of 1, where it is exact for what it guarantees. Cohorts chosen by `ids` are covered by neither, and a rate
    below 1 is worth nothing against those who know the cohorts, as the sites of a deployment do.

    Args:
      noise_multiplier: z, as given to `private`; 0, or between 1e-6 and 1e6.
      sampling_rate: share of the population in a cohort, M / K.
      rounds: how many.
      delta: the allowed failure probability, below 1 / K.
      sampling: 'fixed' or 'poisson'.

    Returns:
      Epsilon: 0 for no round, infinity without noise.

    Raises:
      ImportError: without dp-accounting.
      ValueError: for arguments out of range, or another `sampling`.
    """
    checks.number('noise_multiplier', noise_multiplier)
    z = float(noise_multiplier)
    if z != 0 and not MULTIPLIERS[0] <= z <= MULTIPLIERS[1]:
        raise ValueError(f'noise_multiplier must be 0, or between 1e-6 and 1e6, not {z}')
    spent = _accounting(sampling_rate, rounds, delta, sampling)
    if rounds == 0:
        return 0.0
    return math.inf if z == 0 else spent(z)


def noise_multiplier(
    epsilon: float, sampling_rate: float, rounds: int, delta: float, *, sampling: str = 'fixed'
) -> float:
    """The noise with which `rounds` of `private` are (epsilon, delta) differentially private: the inverse of `epsilon`.

    Args:
      epsilon: what is to be promised, above 0.
      sampling_rate: share of the population in a cohort, M / K.
      rounds: how many, at least 1.
      delta: the allowed failure probability, below 1 / K.
      sampling: 'fixed' or 'poisson', see `epsilon`.

    Returns:
      The smallest z that promises it, to about a thousandth of it.

    Raises:
      ImportError: without dp-accounting.
      ValueError: for arguments out of range, another `sampling`, or a promise that no such noise keeps.
    """
    checks.number('epsilon', epsilon, open_low=True)
    checks.whole('rounds', rounds)
    spent = _accounting(sampling_rate, rounds, delta, sampling)
    high, last = 1.0, logging.getLogger('absl').level
    logging.getLogger('absl').setLevel(logging.ERROR)  # of each order that is left out, at each step
    try:
        while spent(high) > epsilon:
            if high == MULTIPLIERS[1]:
                raise ValueError(f'epsilon {epsilon:g} takes a noise_multiplier above {high:g}: promise less')
            high = min(4 * high, MULTIPLIERS[1])
        low = high / 4
        while low > MULTIPLIERS[0] and spent(low) <= epsilon:
            low, high = max(low / 4, MULTIPLIERS[0]), low
        while high > 1.001 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    finally:
        logging.getLogger('absl').setLevel(last)
    return high


def _accounting(sampling_rate: float, rounds: int, delta: float, sampling: str) -> Callable[[float], float]:
    """From a noise multiplier to epsilon. Errors are those of `epsilon`."""
    checks.number('sampling_rate', sampling_rate, high=1, open_low=True)
    checks.whole('rounds', rounds, 0)
    checks.number('delta', delta, high=1, open_low=True, open_high=True)
    if sampling not in ('fixed', 'poisson'):
        raise ValueError(f"sampling must be 'fixed' or 'poisson', not {sampling!r}")
    try:
        import dp_accounting as dp
    except ImportError as error:
        raise ImportError('epsilon needs dp-accounting: pip install "fedjax_nc[privacy]"') from error
    rate = float(sampling_rate)  # the accountant goes on in the precision of what it is given
    share = max(Fraction(rate).limit_denominator(10**9), Fraction(1, 10**9))  # none would be no loss at all
    coins = sampling == 'poisson'
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE if coins else dp.NeighboringRelation.REPLACE_ONE

    def once(z: float) -> list[Any]:
        """A round, in ways that all bound it."""
        if coins:
            return [dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))]
        # The accountant takes the multiplier for that of the sensitivity, here twice the norm of a message.
        half = dp.GaussianDpEvent(z / 2)
        # A cohort tells no more than everybody would: the bound for samples can be looser than that without.
        return [dp.SampledWithoutReplacementDpEvent(share.denominator, share.numerator, half), half]

    def spent(z: float) -> float:
        bounds = []
        for event in once(z):
            accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
            accountant.compose(dp.SelfComposedDpEvent(event, int(rounds)))
            bounds.append(float(accountant.get_epsilon(float(delta))))
        return min(bounds)

    return spent
