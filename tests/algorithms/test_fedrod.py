"""FedROD against NumPy: both forms of the personal head, after the others or beside them.

generic: q = (softmax(h G + log pi) - onehot) / n, as in `softmax_by_hand`
personal: q = (softmax(h G + h P) - onehot) / n,  d P = h^T q
P = reshape(r O + o),  r = relu(pi I + i):  d O = r (x) d P,  d o = d P,  d I = pi (x) (O d P)_{r > 0}
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import aggregators, heads, local, losses, models, privacy, simulate
from fedjax_nc.algorithms import fedavg, fedrod, latest
from fedjax_nc.objective import objective

GENERIC = ('u', 'w')
FORMS = {'linear': fedrod.linear, 'zeros': lambda: fedrod.linear('zeros'), 'network': fedrod.hyper}


def share(data, k):
    n = np.maximum(np.asarray(data.counts[k], np.float64), 1e-12)
    return n / n.sum()


def made(p, pi):
    """The personal head [D, C], and the hidden layer if there is one."""
    if 'in' not in p:
        return p['w'], None
    r = np.maximum(pi @ p['in']['w'] + p['in']['b'], 0)
    return (r @ p['out']['w'] + p['out']['b']).reshape(toys.DIM, toys.CLASSES), r


def personal_step(p, pi, h, generic, y, rate):
    """One plain step on `CE(generic + h P, y)`."""
    head, r = made(p, pi)
    d = h.T @ hand.errors(generic + h @ head, y)
    if r is None:
        return {'w': p['w'] - rate * d}
    d = d.reshape(-1)
    hidden = (p['out']['w'] @ d) * (r > 0)
    gradient = {'in': {'w': np.outer(pi, hidden), 'b': hidden}, 'out': {'w': np.outer(r, d), 'b': d}}
    return jax.tree.map(lambda a, g: a - rate * g, p, gradient)


def work(p, personal, pi, x, y, rate, separate, epochs):
    """A client's round: body and generic head, then or meanwhile the personal head."""

    def gradient(p):
        return hand.gradients(p, x, y, prior=np.log(pi))

    def step(personal, p):
        h = x * p['u']
        return personal_step(personal, pi, h, h @ p['w'], y, rate)

    if separate:
        p = hand.descend(p, GENERIC, gradient, rate)
        for _ in range(epochs):
            personal = step(personal, p)
        return p, personal
    met = []

    def spying(p):  # the generic part before each of its steps
        met.append(dict(p))
        return gradient(p)

    end = hand.descend(p, GENERIC, spying, rate)
    for p in met:
        personal = step(personal, p)
    return end, personal


def double(tree):
    return jax.tree.map(lambda u: np.asarray(u, np.float64), tree)


@pytest.mark.parametrize(
    ('form', 'separate', 'epochs'),
    [
        ('linear', True, None),
        ('linear', True, 2),
        ('zeros', False, None),
        ('network', True, None),
        ('network', False, None),
    ],
)
def test_two_rounds(data, form, separate, epochs):
    algorithm = latest.keep(
        fedrod.algorithm(
            toys.scaling,
            hand.opt,
            personal=FORMS[form](),
            personal_opt=hand.plain,
            separate=separate,
            personal_epochs=epochs,
            plan=hand.PLAN,
        )
    )
    states = hand.two_rounds(algorithm, data)
    server = hand.numbers(states[0].server.variables)
    first = shared = double(states[0].server.variables.params['personal'])
    if form != 'network':
        np.testing.assert_array_equal(first['w'], server['w'] if form == 'linear' else 0.0)
    private, own = [first] * 8, {}
    for t, ids in enumerate(hand.COHORTS):
        for k in ids:
            start = shared if form == 'network' else private[k]
            rate = hand.LR * hand.FALL**t
            own[k] = work(server, start, share(data, k), *toys.examples(data, k), rate, separate, epochs or hand.EPOCHS)
            private[k] = own[k][1]
        server = hand.average([own[k][0] for k in ids])
        if form == 'network':
            shared = jax.tree.map(lambda *ends: np.mean(ends, axis=0), *(own[k][1] for k in ids))
        v = states[t + 1].server.variables
        hand.close(hand.numbers(v), server, atol=1e-5)
        toys.same(double(v.params['personal']), shared, atol=1e-5)
    if form != 'network':
        toys.same(double(states[2].clients.own.head), {'w': np.stack([p['w'] for p in private])}, atol=1e-5)
    for k in (0, 7):  # with the latest local model and the last network, not the one before the last step
        p, personal = own[k]
        h = np.asarray(data.x[:9]) * p['u']
        want = h @ (p['w'] + made(personal, share(data, k))[0])
        np.testing.assert_allclose(algorithm.predict(states[2].server, hand.row(states[2].clients, k), data.x[:9]),
                                   want, atol=1e-4)  # fmt: skip
    want = np.asarray(data.x[:9]) * server['u'] @ server['w']
    np.testing.assert_allclose(algorithm.predict(states[2].server, None, data.x[:9]), want, atol=1e-4)


@pytest.mark.parametrize(('form', 'absent'), [('linear', 'mask'), ('network', 'floor')])
def test_body_and_generic_head_do_not_notice_the_personal_one(data, form, absent):
    """Bit for bit those of FedAvg with the balanced loss."""
    algorithm = fedrod.algorithm(toys.tiny, toys.opt, personal=FORMS[form](), absent=absent, plan=toys.PLAN)
    balanced = objective(
        toys.tiny, heads.linear(bias=False), lambda *args: losses.balanced_softmax(*args, absent=absent)
    )
    plain = fedavg.algorithm(balanced, toys.opt, plan=toys.PLAN, **fedavg.UNWEIGHTED)
    server = algorithm.init(toys.KEY, data)
    other = plain.init(toys.KEY, data)
    toys.same({k: server.variables.params[k] for k in ('body', 'head')}, other.variables.params)

    @toys.optimised
    def both(shard):
        mine, message, info = algorithm.client(toys.KEY, server, algorithm.init_client(toys.KEY, server), shard)
        return mine, message.delta, plain.client(toys.KEY, other, (), shard)[1].delta, info.examples

    mine, sent, want, visited = both(data.shard(2))
    assert int(visited) == 2 * toys.PLAN.epochs * int(data.size[2])
    toys.same({k: sent[k] for k in want}, want)
    assert set(sent) - set(want) == (set() if form == 'linear' else {'personal'})
    logits = [
        algorithm.predict(server, client, data.x[:9])
        for client in (None, mine, mine._replace(head=jax.tree.map(lambda u: u + 1.0, mine.head)))
    ]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
    assert (np.abs(logits[1] - logits[2]).max() > 1e-3) == (form == 'linear')


def test_balanced_softmax_worked_example():
    logits, counts = jnp.array([[0.5, 1.0, 2.0]] * 2), jnp.array([6, 2, 0])
    got = losses.balanced_softmax(logits, jnp.array([0, 1]), counts, absent='mask')
    np.testing.assert_allclose(got, [0.437980, 1.036592], atol=1e-6)
    np.testing.assert_allclose(np.log(fedrod._shares(counts)[2]), -27.6310 - np.log(8), atol=1e-4)
    equal = losses.balanced_softmax(logits, jnp.array([0, 2]), jnp.array([4, 4, 4]), absent='mask')
    np.testing.assert_allclose(equal, losses.cross_entropy(logits, jnp.array([0, 2])), atol=1e-6)


@pytest.mark.parametrize(('classes', 'size'), [(10, 372_672), (100, 3_724_992)])
def test_sizes_of_the_network(classes, size):
    params = jax.eval_shape(lambda key: fedrod.hyper().init(key, {}, 192, classes), toys.KEY)
    assert sum(u.size for u in jax.tree.leaves(params)) == size


def test_any_generic_head_will_do_if_the_personal_one_starts_at_zero(data):
    with pytest.raises(ValueError, match="start='zeros'"):
        simulate.init(fedrod.algorithm(toys.tiny, toys.opt, head=heads.etf()), toys.KEY, data)
    algorithm = fedrod.algorithm(toys.tiny, toys.opt, head=heads.etf(), personal=fedrod.linear('zeros'))
    state = simulate.init(algorithm, toys.KEY, data)
    generic, personal = (algorithm.predict(state.server, c, data.x[:9]) for c in (None, hand.row(state.clients, 0)))
    np.testing.assert_array_equal(generic, personal)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match='zeros'):
        fedrod.linear('random')
    for options, match in (
        ({'absent': 'zero'}, 'floor'),
        ({'personal': 'hyper'}, 'personal must be'),
        ({'personal': fedrod.hyper}, 'personal must be'),
        ({'personal_opt': optax.sgd(0.1)}, 'personal_opt is a function of the round'),
        ({'personal_epochs': 0}, 'personal_epochs must be at least 1'),
    ):
        with pytest.raises(ValueError, match=match):
            fedrod.algorithm(toys.tiny, toys.opt, **options)


def test_noise_of_a_private_base_stays_secret():
    def base(*args, **kwargs):
        private = fedavg.algorithm(*args, **{**kwargs, 'aggregate': aggregators.uniform})
        return privacy.private(private, clip=1.0, noise_multiplier=1.0, cohort=3)

    model, opt, plan = models.from_flax(models.MLP((8,))), local.sgd(0.1), local.Plan(4, 1)
    assert fedrod.algorithm(model, opt, plan=plan, base=base).secret
    assert not fedrod.algorithm(model, opt, plan=plan).secret
