"""Client states on the host and on disk against those on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import devices, population, simulate, training
from fedjax_nc.algorithms import fedavg, fedper, fedrod, finetune
from fedjax_nc.data import federate
from fedjax_nc.data.host import part

kept = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)
ROUNDS = 4


@pytest.fixture(scope='module')
def on_device(data):
    run = jax.jit(simulate.make_round(kept, cohort=3, chunk=2))
    state = simulate.init(kept, toys.KEY, data)
    for t in range(ROUNDS):
        state, report = run(jax.random.fold_in(toys.KEY, t), state, data)
    return state, report


@pytest.fixture(scope='module')
def round():
    return population.make_round(kept, cohort=3, chunk=2)


def play(round, state, data, rounds=range(ROUNDS)):
    for t in rounds:
        state, report = round(jax.random.fold_in(toys.KEY, t), state, data)
    return state, report


@pytest.mark.parametrize('disk', [False, True])
def test_same_results_wherever_states_are_kept(data, on_device, round, disk, tmp_path):
    state = population.init(kept, toys.KEY, data, tmp_path if disk else None)
    state, report = play(round, state, data)
    toys.same(on_device[0], state.clients.state(state.server), atol=1e-6)
    np.testing.assert_array_equal(on_device[1].ids, report.ids)
    assert 3 < state.clients.seen < 8  # some clients never took part: their states were made for the comparison
    assert any(tmp_path.rglob('*-*')) == disk


def test_a_store_serves_a_mesh(data, on_device):
    mesh = devices.mesh(jax.devices()[:1])
    state = population.init(kept, toys.KEY, data)
    placed, shared = devices.place(mesh, state._replace(clients=()), data)
    state, _ = play(
        population.make_round(kept, cohort=3, chunk=2, mesh=mesh), placed._replace(clients=state.clients), shared
    )
    toys.same(on_device[0], state.clients.state(state.server), atol=1e-6)


def test_first_variables_that_share_a_buffer_are_donated_once(data):
    """FedROD's private head begins as the generic one."""
    shared = fedrod.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)
    state = population.init(shared, toys.KEY, data)
    state, report = population.make_round(shared, cohort=3)(toys.KEY, state, data)
    assert bool(report.finite)


def test_a_part_has_named_its_clients(data, round):
    away = federate(np.asarray(data.x), np.asarray(data.y), [range(3)] * 8, data.num_classes, host=True)
    with pytest.raises(ValueError, match=r'a data\.Part brings its clients along'):
        round(toys.KEY, population.init(kept, toys.KEY, data), part(away, np.arange(2)), ids=jnp.array([3, 5]))


def test_files_go_with_the_store(data, tmp_path):
    state = population.init(kept, toys.KEY, data, tmp_path)
    state.clients.put(np.arange(3), state.clients.take(np.arange(3)))
    assert list(tmp_path.iterdir())
    del state
    assert not list(tmp_path.iterdir())


def test_personal_stage_starts_from_the_server_of_its_store(data, round):
    """First states of a stage are the server's model as it was then, whatever becomes of the server."""
    trained, _ = play(round, population.init(kept, toys.KEY, data), data, range(1))
    stage = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    want = simulate.join(stage, toys.KEY, trained.server, 8)
    store = population.Store(stage, toys.KEY, trained.server, 8)
    state = population.make_round(stage, chunk=2)(toys.KEY, want._replace(clients=store), data, np.array([5, 8, 1]))[0]
    want, _ = simulate.make_round(stage, chunk=2)(
        toys.KEY, simulate.join(stage, toys.KEY, state.server, 8), data, np.array([5, 8, 1])
    )
    toys.same(want, store.state(state.server), atol=1e-6)
    assert store.seen == 2


def test_what_cannot_be_stored_leaves_a_store_as_it_was():
    data = toys.ragged([20] * 8)
    store = population.init(kept, toys.KEY, data).clients
    two, before = store.take(np.arange(2)), store.take(np.arange(8))
    for ids, states in (
        (np.arange(3), two), (np.arange(1), two), (np.arange(2), jax.tree.map(lambda u: u.astype('f8'), two)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match='clients need as many states'):
            store.put(ids, states)
    assert store.seen == 0
    toys.same(store.take(np.arange(8)), before)


def test_contents_restore_a_store(data, round, on_device):
    half, _ = play(round, population.init(kept, toys.KEY, data), data, range(2))
    contents = half.clients.contents()
    fresh = population.init(kept, toys.KEY, data)
    fresh.clients.put(np.arange(8), fresh.clients.take(np.arange(8)))  # forgotten by what follows
    fresh.clients.restore(contents)
    assert fresh.clients.seen == half.clients.seen == len(contents['clients'])
    state, _ = play(round, half._replace(clients=fresh.clients), data, range(2, ROUNDS))
    toys.same(on_device[0], state.clients.state(state.server), atol=1e-6)
    twice = contents | {'clients': np.repeat(contents['clients'][:1], len(contents['clients']))}
    for wrong in ({'clients': contents['clients']}, contents | {'clients': contents['clients'] + 8}, twice):
        with pytest.raises(ValueError, match='another algorithm or population'):
            state.clients.restore(wrong)
    toys.same(on_device[0], state.clients.state(state.server), atol=1e-6)  # nothing was lost


def test_room_grows_with_the_clients_seen_and_not_with_the_population():
    data = toys.ragged([20] * 8)
    server = kept.init(toys.KEY, data)
    store = population.Store(kept, toys.KEY, server, 1_000_000)
    one = sum(u.nbytes for u in jax.tree.leaves(store.take(np.array([0]))))
    for first in range(100, 400, 50):
        ids = np.arange(first, first + 50)
        store.put(ids, store.take(ids))
    assert store.seen == 300
    assert 300 * one <= store.nbytes <= 600 * one
    with pytest.raises(ValueError, match='not states of the algorithm'):
        store.put(np.arange(2), ())
    for wrong in ([-2, 1], [3, 3]):
        with pytest.raises(ValueError, match='different numbers of clients'):
            store.put(np.array(wrong), store.take(np.arange(2)))
    assert store.seen == 300


@pytest.mark.slow
def test_a_run_with_a_store_resumes(data, on_device, tmp_path):
    options = {'cohort': 3, 'chunk': 2, 'progress': False}
    begin = lambda: population.init(kept, toys.KEY, data)  # noqa: E731
    training.run(kept, toys.KEY, begin(), data, rounds=2, out=tmp_path, **options)
    resumed = training.run(kept, toys.KEY, begin(), data, rounds=ROUNDS, out=tmp_path, resume=True, **options)
    toys.same(on_device[0], resumed.state.clients.state(resumed.state.server), atol=1e-6)
    assert [row['round'] for row in resumed.history] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match='rounds_per_call'):
        training.run(kept, toys.KEY, begin(), data, rounds=1, rounds_per_call=2, **options)
    other = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    with pytest.raises(training.CheckpointError):
        training.run(other, toys.KEY, population.init(other, toys.KEY, data), data, rounds=5, out=tmp_path, resume=True)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_first_states_of_another(data, tmp_path):
    """Those of clients that it has not met yet are made of the key that the state was made with."""
    algorithm = fedper.algorithm(toys.task, toys.opt, plan=toys.PLAN)

    def go_on(key, rounds):
        state = population.init(algorithm, key, data)
        return training.run(
            algorithm, toys.KEY, state, data, rounds=rounds, cohort=3, out=tmp_path, resume=True, progress=False
        )

    go_on(jax.random.key(7), 1)
    with pytest.raises(training.CheckpointError, match='begin with other states'):
        go_on(jax.random.key(8), 2)
    assert len(go_on(jax.random.key(7), 2).history) == 2


@pytest.mark.parametrize('ids', [[-1], [0.0, 1.0], 3])
def test_nobodys_state_is_not_taken(data, ids):
    with pytest.raises(ValueError, match='numbers of clients, from 0 on'):
        population.init(kept, toys.KEY, data).clients.take(np.array(ids))


def test_another_population_is_refused(data, round):
    with pytest.raises(ValueError, match='state has 8 clients and the data 5'):
        round(toys.KEY, population.init(kept, toys.KEY, data), toys.ragged([20] * 5))
    with pytest.raises(ValueError, match='cohort must be at least 1'):
        population.make_round(kept, cohort=0)
    with pytest.raises(ValueError, match='name at least one client'):
        round(toys.KEY, population.init(kept, toys.KEY, data), data, np.zeros(0, int))
    wrong = {'an Algorithm': ('x', toys.KEY, data), 'key': (kept, 3, data), 'data': (kept, toys.KEY, 5)}
    for said, arguments in wrong.items():
        with pytest.raises(ValueError, match=said):
            population.init(*arguments)


def test_random_keys_are_kept_too(data, tmp_path):
    def init_client(key, server):
        return kept.init_client(key, server), key

    def client(key, server, client, shard):
        inner, message, info = kept.client(client[1], server, client[0], shard)
        return (inner, jax.random.fold_in(client[1], 1)), message, info

    own = kept._replace(init_client=init_client, client=client)
    want, run = simulate.init(own, toys.KEY, data), jax.jit(simulate.make_round(own, cohort=3, chunk=2))
    for t in range(2):
        want, _ = run(jax.random.fold_in(toys.KEY, t), want, data)
    state, _ = play(population.make_round(own, cohort=3, chunk=2), population.init(own, toys.KEY, data), data, range(2))
    found = state.clients.state(state.server)
    toys.same(want.clients[0], found.clients[0], atol=1e-6)
    np.testing.assert_array_equal(*(jax.random.key_data(s.clients[1]) for s in (want, found)))
    again = population.init(own, toys.KEY, data).clients
    again.restore(state.clients.contents())
    np.testing.assert_array_equal(
        *(jax.random.key_data(store.take(np.arange(8))[1]) for store in (again, state.clients))
    )
