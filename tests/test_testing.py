"""`testing.check` lets sound algorithms pass and catches each fault by the clause that is about it."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, local, losses, simulate, testing, tree
from fedjax_nc.algorithms import fedavg, solo
from fedjax_nc.base import Aggregator, Algorithm, Info
from fedjax_nc.data import federate

SOUND = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, persist_momentum=True)
KEEPING = solo.algorithm(toys.task, toys.opt, plan=toys.PLAN)
CLIENTS = testing.clients()


def changing(**functions):
    """A sound algorithm in which functions are others, made from the sound ones."""
    return SOUND._replace(**{name: make(getattr(SOUND, name)) for name, make in functions.items()})


def client(change):
    """A client whose message is changed by `change(key, server, client, shard)`."""

    def made(sound):
        def work(key, server, mine, shard):
            mine, message, info = sound(key, server, mine, shard)
            add = change(key, server, mine, shard)
            return mine, message._replace(delta=jax.tree.map(lambda u: u + add, message.delta)), info

        return work

    return made


def server(change):
    """A server whose variables are changed after each round by `change(variables, aggregate)`."""

    def made(sound):
        def follow(key, state, aggregate):
            state = sound(key, state, aggregate)
            return state._replace(variables=change(state.variables, aggregate))

        return follow

    return made


def moved(v, by):
    return v._replace(params=jax.tree.map(by, v.params))


COUNT = iter(range(10**9))


def counted(*_):
    """A number that lives on the host, and is another each time the program runs."""
    told = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.experimental.io_callback(lambda: np.float32(1e-2 * next(COUNT)), told)


def remembering(key, server, mine, shard):
    mine, message, info = KEEPING.client(key, server, mine, shard)
    return tree.scale(mine, 1 + counted()), message, info


def of_the_slot(sound):
    """A mean of messages with noise that depends on where a client stands."""

    def partial(messages, weights, slots, cohort):
        noise = jax.vmap(lambda s: jax.random.normal(jax.random.fold_in(toys.KEY, s)))(slots)
        noisy = jax.tree.map(lambda u: u + noise.reshape(-1, *[1] * (u.ndim - 1)), messages)
        return sound.partial(noisy, weights, slots, cohort)

    return Aggregator(partial, sound.finish)


def of_means(sound):
    """Means of chunks, which are then added."""
    return Aggregator(lambda *args: sound.finish(sound.partial(*args)), lambda total: total)


def junk_of_padding(key, server, mine, shard):
    return 1e-3 * jnp.mean(shard.x[shard.index])


def unmasked(v, z, batch):
    return jnp.mean(losses.cross_entropy(toys.task.logits(v, z), batch.y))


def changing_plain(**functions):
    """As `changing`, without noise of its own."""
    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    return plain._replace(**{name: make(getattr(plain, name)) for name, make in functions.items()})


def told_by_slots(sound):
    """A client that reports a mean over all rows that it has computed."""

    def work(key, server, mine, shard):
        mine, message, info = sound(key, server, mine, shard)
        return mine, message, info._replace(loss=info.loss * info.examples / jnp.maximum(info.slots, 1))

    return work


FAULTS = {
    'trace: another type': (
        changing(server=server(lambda v, a: moved(v, lambda u: u.astype(jnp.float16)))),
        'trace',
        'float32.* comes out as float16',
    ),
    'trace: another structure': (
        changing(server=server(lambda v, a: v._replace(fixed={'more': jnp.zeros(2)}))),
        'trace',
        'keep its structure',
    ),
    'pure: a counter outside': (changing(client=client(lambda *_: 1e-3 * next(COUNT))), 'pure', 'another program'),
    'chunks: means of chunks': (changing(aggregate=of_means), 'chunks', 'must be a sum over messages'),
    'order: noise by slot': (changing(aggregate=of_the_slot), 'order', 'nothing may depend on slots'),
    'padding: rows beyond the size': (changing(client=client(junk_of_padding)), 'padding', 'the first `size` are real'),
    'masks: a penalty of all rows': (
        fedavg.algorithm(
            toys.task, toys.opt, plan=toys.PLAN, penalty=lambda v, z, batch, server, mine: 0.1 * jnp.mean(z**2)
        ),
        'masks',
        '3 examples and rows that fill their batch leave another state than 3 alone, .* `objective.masked_mean`',
    ),
    'masks: a loss of all rows': (
        fedavg.algorithm(toys.task._replace(loss=unmasked), toys.opt, plan=toys.PLAN),
        'masks',
        'leave another state',
    ),
    'masks: a loss of all rows in batches of three': (
        fedavg.algorithm(toys.task._replace(loss=unmasked), toys.opt, plan=local.Plan(3, 1)),
        'masks',
        '2 examples and rows that fill their batch leave another state than 2 alone',
    ),
    'masks: a loss that is told': (changing_plain(client=told_by_slots), 'masks', 'report another loss'),
    'masks: the length of the pool': (
        changing_plain(client=client(lambda key, server, mine, shard: shard.size / len(shard.x))),
        'masks',
        "rows that nobody holds change the state, .* `len\\(shard.x\\)` is nobody's number",
    ),
    "owned: the pool's mean": (
        changing(client=client(lambda key, server, mine, shard: 1e-3 * jnp.mean(shard.x))),
        'owned',
        "others' examples reach a client of",
    ),
    "owned: others' labels": (
        changing(client=client(lambda key, server, mine, shard: 1e-3 * jnp.mean(shard.y == 1))),
        'owned',
        "others' examples reach",
    ),
    'finite: division by zero': (
        changing(server=server(lambda v, a: moved(v, lambda u: u / jnp.sum(0 * u)))),
        'finite',
        'NaN or infinity in .server.variables.params',
    ),
    'pure: numbers from the host': (changing(client=client(counted)), 'pure', 'once more leave another state'),
    'company: numbers from the host': (KEEPING._replace(client=remembering), 'company', 'other company'),
    'resumed: a count on the host': (
        changing(server=server(lambda v, a: moved(v, lambda u: u + counted()))),
        'resumed',
        'must be in the state',
    ),
    'nobody: decay by the server': (
        changing(server=server(lambda v, a: moved(v, lambda u: 0.9 * u))),
        'nobody',
        'where `aggregate.clients` is 0',
    ),
    'nobody: division by no client': (
        changing(server=lambda sound: lambda key, s, a: sound(key, s, a)._replace(extra=1.0 / a.clients))._replace(
            init=lambda key, data: SOUND.init(key, data)._replace(extra=jnp.float32(0))
        ),
        'nobody',
        'NaN or infinity in .server.extra',
    ),
    'predict: features': (
        changing(predict=lambda sound: lambda server, client, x: x @ server.variables.params['body']['w']),
        'predict',
        r'the generic model makes float32\[3,16\] of 3 examples, and logits are float32\[3,5\]',
    ),
    'predict: nothing without a client': (
        changing(predict=lambda sound: lambda server, client, x: sound(server, client.nothing, x)),
        'predict',
        "AttributeError: 'NoneType' object has no attribute 'nothing'",
    ),
    'predict: rows that are mixed': (
        changing(predict=lambda sound: lambda *args: (z := sound(*args)) - jnp.mean(z, axis=0)),
        'predict',
        'an example alone and among others has different logits, by .*: do not mix rows',
    ),
    'fixed: a frame that moves': (
        changing(
            init=lambda sound: (
                lambda key, data: sound(key, data)._replace(
                    variables=sound(key, data).variables._replace(fixed={'frame': jnp.eye(5)})
                )
            ),
            server=server(lambda v, a: v._replace(fixed={'frame': 0.9 * v.fixed['frame']})),
        ),
        'fixed',
        "'frame'.*moves_fixed",
    ),
}
WHOLE = ('trace: another structure', 'predict: nothing without a client')


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in FAULTS if name not in WHOLE])
def test_a_fault_is_caught_by_the_clause_that_names_it(name):
    algorithm, clause, said = FAULTS[name]
    assert re.search(said, testing.CLAUSES[clause](testing.Play(algorithm, CLIENTS)))


@pytest.mark.slow
@pytest.mark.parametrize('name', WHOLE)
def test_all_that_is_broken_is_told_in_a_line_each(name):
    algorithm, clause, said = FAULTS[name]
    with pytest.raises(testing.ContractError, match=rf'(?m)^{clause}: .*{said}') as caught:
        testing.check(algorithm, CLIENTS)
    assert isinstance(caught.value, AssertionError)
    lines = str(caught.value).splitlines()
    assert all(line.split(': ')[0] in testing.CLAUSES and len(line) < 300 for line in lines)


def test_clauses_of_the_engine_catch_its_faults(monkeypatch):
    """What no algorithm can break: the absent's states, and that several rounds are rounds."""
    whole, scanned = simulate.make_round, simulate.several

    def fading(*args, **kwargs):
        inner = whole(*args, **kwargs)

        def round(*args):
            state, report = inner(*args)
            return state._replace(clients=tree.scale(state.clients, 0.5)), report  # also the absent's

        return round

    with monkeypatch.context() as patch:
        patch.setattr(simulate, 'make_round', fading)
        assert 'states of clients that did not take part' in testing.absent(
            testing.Play(KEEPING, CLIENTS, generic=False)
        )
    monkeypatch.setattr(
        simulate, 'several', lambda round: scanned(lambda key, state, data: round(toys.KEY, state, data))
    )
    assert 'in one call and in two' in testing.several(testing.Play(SOUND, CLIENTS))


def test_what_cannot_be_compiled_is_told_with_its_cause():
    unlucky = changing(client=client(lambda key, server, mine, shard: 1.0 if shard.size > 3 else 0.0))
    with pytest.raises(testing.ContractError, match=r'^trace: two rounds cannot be compiled.*TracerBool') as caught:
        testing.check(unlucky, CLIENTS)
    assert '\n' not in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JAXTypeError)


def centroids():
    """An algorithm that shares nothing with the library's: class means of raw bytes, and states of its own kind."""

    def init(key, data):
        return {'means': jnp.zeros((data.num_classes, 9)), 'key': key}

    def work(key, server, mine, shard):
        real = jnp.arange(len(shard.index)) < shard.size
        x = shard.x[shard.index].reshape(len(shard.index), -1).astype(jnp.float32) / 255
        hot = jax.nn.one_hot(shard.y[shard.index], len(shard.counts)) * real[:, None]
        sums = jnp.where(real[:, None], x, 0).T @ hot
        info = Info(jnp.float32(0), jnp.int32(1), shard.size, jnp.int32(len(shard.index)))
        return {'rounds': mine['rounds'] + 1}, {'sums': sums.T, 'counts': jnp.sum(hot, 0)}, info

    def follow(key, server, aggregate):
        sums, counts = aggregate.value['sums'], aggregate.value['counts'][:, None]
        return {**server, 'means': jnp.where(counts > 0, sums / jnp.maximum(counts, 1), server['means'])}

    def predict(server, client, x):
        x = x.reshape(len(x), -1).astype(jnp.float32) / 255
        return -jnp.sum(jnp.square(x[:, None] - server['means']), axis=-1)

    first = {'rounds': jnp.int32(0)}
    return Algorithm(init, lambda key, server: first, work, aggregators.total, follow, predict)


@functools.cache
def images():
    rng = np.random.default_rng(0)
    sizes = [9, 3, 30, 12, 1, 7, 0]
    y = rng.integers(0, 4, sum(sizes))
    x = rng.integers(0, 256, (len(y), 3, 3, 1)).astype(np.uint8)
    return federate(x, y, np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]), 4, allow_empty=True)


@pytest.mark.slow
def test_any_algorithm_on_any_data_can_be_proven():
    mine = centroids()
    testing.check(mine, images())
    moving = mine._replace(server=lambda key, s, a: {**mine.server(key, s, a), 'means': 0.9 * s['means'] + 1})
    assert 'changes predictions' in testing.nobody(testing.Play(moving, images()))
    leak = mine._replace(client=lambda key, s, c, shard: mine.client(key, s, c, shard._replace(index=shard.index * 0)))
    play = testing.Play(leak, images())
    assert "others' examples reach a client of" in testing.owned(play)
    testing.check(moving, images(), skip=[clause for clause in testing.CLAUSES if clause != 'trace'])


@pytest.mark.slow
def test_options_say_what_an_algorithm_is_not():
    play = testing.Play(KEEPING, CLIENTS, generic=False)
    assert not testing.predict(play)
    play.generic = True
    assert re.search('no generic model.*say generic=False', testing.predict(play))
    play = testing.Play(SOUND, CLIENTS, generic=False)
    assert testing.predict(play).startswith('without a generic model, predict(server, None, x) must raise ValueError')


class Signed(NamedTuple):
    base: fedavg.Message
    who: jax.Array  # [] int32 that no other client has
    loss: jax.Array


@pytest.mark.slow
def test_a_server_may_know_clients_by_numbers_that_they_send():
    """Their losses are added in the order of their numbers, each times its rank, whatever their slots."""

    def work(key, server, me, shard):
        _, message, info = SOUND.client(key, server, SOUND.init_client(key, server), shard)
        return me, Signed(message, me, info.loss), info

    def follow(key, state, aggregate):
        (who, weights), (loss, _) = aggregate.value['who'], aggregate.value['loss']
        ranked = loss[jnp.lexsort((who, weights <= 0))] * jnp.arange(1.0, 1 + len(loss))  # nobody's are 0 and last
        new = SOUND.server(key, state, aggregate._replace(value=aggregate.value['base']))
        return new._replace(extra=jnp.where(aggregate.clients > 0, jnp.sum(ranked), state.extra))

    every = aggregators.stacked(lambda messages, weights: (messages, weights))
    signed = SOUND._replace(
        init=lambda key, data: SOUND.init(key, data)._replace(extra=jnp.float32(0)),
        init_client=lambda key, server: jax.random.randint(key, (), 0, 2**31 - 1),
        client=work,
        aggregate=aggregators.by_field(base=SOUND.aggregate, who=every, loss=every),
        server=follow,
    )
    testing.check(signed)


def test_infinity_may_stay_where_it_was():
    """As a smallest loss so far in a client's state."""

    def work(key, server, mine, shard):
        inner, message, info = SOUND.client(key, server, mine[0], shard)
        return (inner, jnp.where(shard.size > 100, info.loss, mine[1])), message, info

    mine = SOUND._replace(init_client=lambda key, s: (SOUND.init_client(key, s), jnp.float32(jnp.inf)), client=work)
    play = testing.Play(mine, CLIENTS)
    assert np.isinf(play.state.clients[1]).any()
    assert not testing.finite(play)


@pytest.mark.slow
def test_a_sound_algorithm_passes_whole_and_stages_begin_with_a_state_of_training():
    testing.check(SOUND, state=simulate.init(SOUND, toys.KEY, CLIENTS))
    trained = simulate.init(SOUND, toys.KEY, CLIENTS)
    assert testing.Play(SOUND, CLIENTS, state=trained).before is trained


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda: testing.check(toys.task, CLIENTS), 'algorithm must be an Algorithm'),
        (lambda: testing.check(SOUND, toys.task), 'data must be FederatedData'),
        (lambda: testing.check(SOUND, testing.clients((3, 4, 5))), 'more than 5 clients with examples'),
        (lambda: testing.check(SOUND, testing.clients((3,) * 9)), 'not all of one size'),
        (lambda: testing.check(SOUND, CLIENTS, skip=['nobdy']), 'no clause is called nobdy; there are trace, pure'),
        (lambda: testing.check(SOUND, CLIENTS, skip=3), 'skip must be names of clauses, not 3'),
        (lambda: testing.check(SOUND, CLIENTS, atol=-1), 'atol must not be negative'),
    ],
)
def test_bad_arguments_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.slow
def test_it_leaves_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(testing.tempfile, 'tempdir', str(tmp_path))
    assert not testing.resumed(testing.Play(SOUND, CLIENTS))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_examples_may_stay_on_the_host():
    x, y = np.asarray(CLIENTS.x), np.asarray(CLIENTS.y)
    parts = [np.asarray(CLIENTS.index)[k, :n] for k, n in enumerate(np.asarray(CLIENTS.size))]
    testing.check(SOUND, federate(x, y, parts, CLIENTS.num_classes, host=True, allow_empty=True))
