"""Examples that stay on the host: the same rounds, bit for bit, from a cohort's examples alone."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import data, evaluate, footprint, population, simulate, training
from fedjax_nc.algorithms import ccvr, fedavg, fednh, finetune, latest, scaffold
from fedjax_nc.base import State
from fedjax_nc.data import host
from fedjax_nc.metrics import similarity

SIZES = (30, 7, 25, 9, 14, 3, 22, 11)
COHORT = 3


@pytest.fixture(scope='module')
def both(tmp_path_factory):
    """The same population on the device, and with its examples in a file."""
    there = toys.ragged(SIZES)
    parts = [np.asarray(there.index[k, :n]) for k, n in enumerate(SIZES)]
    place = tmp_path_factory.mktemp('pool') / 'x.npy'
    np.save(place, there.x)
    x = np.load(place, mmap_mode='r')
    return data.federate(there.x, there.y, parts, toys.CLASSES), data.federate(
        x, there.y, parts, toys.CLASSES, host=True
    )


def test_class_means_of_clients_whose_examples_are_on_the_host(both, monkeypatch):
    here, there = both
    v = simulate.init(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN), toys.KEY, here).server.variables
    several = jax.tree.map(lambda u: jnp.stack([u * (1 + k) for k in range(len(SIZES))]), v)
    monkeypatch.setattr(similarity, 'cohorts', lambda data: host.cohorts(data, 4000))
    assert len(list(similarity.cohorts(there))) > 1
    for variables, own in ((v, False), (several, True)):
        one, other = (similarity.client_prototypes(toys.task, variables, d, own=own, batch_size=8) for d in both)
        toys.same(one, other)


ALGORITHMS = {
    'fedavg': fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN),
    'scaffold': scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN),
    'fednh': latest.keep(fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)),
    'ccvr': ccvr.calibrate(toys.task, samples=20),
}


def test_the_pool_is_the_file_itself(both):
    _, away = both
    assert isinstance(away, data.HostData)
    assert isinstance(away.x.base, np.memmap)
    assert all(isinstance(u, np.ndarray) for u in away)


@pytest.mark.slow
@pytest.mark.parametrize('chunk', [1, 2])
@pytest.mark.parametrize('name', ALGORITHMS)
def test_rounds_are_those_of_data_on_the_device(name, chunk, both):
    here, away = both
    algorithm = ALGORITHMS[name]
    round = jax.jit(simulate.make_round(algorithm, cohort=COHORT, chunk=chunk))
    keys = [jax.random.key(t) for t in range(3)]
    first = simulate.init(algorithm, toys.KEY, here)
    toys.same(first, simulate.init(algorithm, toys.KEY, away))
    states, reports = [first, first], []
    for key, part in zip(keys, data.feed(away, keys, cohort=COHORT), strict=True):
        states[0], left = round(key, states[0], here)
        states[1], right = round(key, states[1], part)
        reports.append((left, right))
    toys.same(*states, atol=1e-4 if name == 'ccvr' else 0)  # CCVR's factors amplify rounding
    for left, right in reports:
        toys.same(left, right)


@pytest.mark.slow
def test_what_knows_nothing_of_it_takes_all_of_it(both):
    """A round that is not given a part, compiled or not."""
    here, away = both
    algorithm = ALGORITHMS['fedavg']
    state, round = simulate.init(algorithm, toys.KEY, away), simulate.make_round(algorithm, cohort=COHORT)
    want = jax.jit(round)(toys.KEY, state, here)
    toys.same(jax.jit(round)(toys.KEY, state, away), want)
    toys.same(round(toys.KEY, state, away)[0], want[0], atol=1e-5)
    bound = ccvr.oracle(toys.KEY, toys.noisy_task, state.server, away)
    toys.same(bound, ccvr.oracle(toys.KEY, toys.noisy_task, state.server, here))


def test_one_program_serves_all_parts(both):
    _, away = both
    traces = []
    inner = simulate.make_round(ALGORITHMS['fedavg'])

    @jax.jit
    def round(key, state, part):
        traces.append(1)
        return inner(key, state, part)

    state = simulate.init(ALGORITHMS['fedavg'], toys.KEY, away)
    for ids in ([0, 2, 6], [5, 1, 3], [4, 8, 8]):
        state, report = round(toys.KEY, state, data.part(away, np.array(ids)))
        assert set(np.asarray(report.ids)) == set(ids)
    assert len(traces) == 1


def test_a_part_holds_its_clients_and_nothing_else(both):
    here, away = both
    part = data.part(away, np.array([6, 8, 1]))
    assert part.num_clients == 8
    assert part.data.x.shape[0] == host.room(away, 3) == 30 + 25 + 22
    np.testing.assert_array_equal(part.data.size, [22, 0, 7])
    for row, client in ((0, 6), (2, 1)):
        mine, theirs = part.data.shard(row), here.shard(client)
        n = int(mine.size)
        np.testing.assert_array_equal(mine.x[mine.index[:n]], theirs.x[theirs.index[:n]])
        np.testing.assert_array_equal(mine.y[mine.index[:n]], theirs.y[theirs.index[:n]])
        np.testing.assert_array_equal(mine.counts, theirs.counts)
    assert not np.asarray(part.data.x[29:]).any()


@pytest.mark.slow
@pytest.mark.parametrize('stored', [False, True])
def test_runs_and_their_resumption_are_the_same(stored, both, tmp_path):
    here, away = both
    algorithm = ALGORITHMS['scaffold']
    begin = population.init if stored else simulate.init

    def run(where, rounds, out, resume=False):
        state = begin(algorithm, toys.KEY, where)
        return training.run(
            algorithm, toys.KEY, state, where, rounds=rounds, cohort=COHORT, out=out, resume=resume, progress=False,
            evaluate=lambda s: {'accuracy': evaluate.accuracy(
                evaluate.generic(algorithm, State(s.server, ()), here.x, here.y, toys.CLASSES))},
        )  # fmt: skip

    whole = run(here, 5, tmp_path / 'here')
    run(away, 2, tmp_path / 'away')
    resumed = run(away, 5, tmp_path / 'away', resume=True)
    toys.same(whole.state.server, resumed.state.server)
    every = np.arange(8)
    left, right = ((r.state.clients.take(every) if stored else r.state.clients) for r in (whole, resumed))
    toys.same(left, right)
    assert [r['accuracy'] for r in whole.history] == [r['accuracy'] for r in resumed.history]


@pytest.mark.slow
@pytest.mark.parametrize('most', [1, 3000, 10**9])
def test_evaluation_and_stages_go_through_all_clients_a_few_at_a_time(most, both, monkeypatch):
    here, away = both
    stage = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    first = simulate.init(stage, toys.KEY, here)
    round = jax.jit(simulate.make_round(stage, chunk=1))
    whole, _ = round(toys.KEY, first, here)
    some, count = first, 0
    for ids in data.cohorts(away, most):
        some, _ = round(toys.KEY, some, data.part(away, ids))
        count += 1
    assert count == {1: 8, 3000: 4, 10**9: 1}[most]
    toys.same(whole, some)
    monkeypatch.setattr(evaluate.tables, 'cohorts', lambda given: data.cohorts(given, most))
    allowed = here.counts > 0
    for kwargs in ({}, {'personal': False}, {'allowed': allowed}):
        tables = [evaluate.per_client(stage, whole, d, **kwargs) for d in (here, away)]
        toys.same(*tables)


def test_a_large_test_set_is_counted_in_pieces(both, monkeypatch):
    here, _ = both
    algorithm = ALGORITHMS['fedavg']
    state = simulate.init(algorithm, toys.KEY, here)
    whole = evaluate.generic(algorithm, state, here.x, here.y, toys.CLASSES)
    monkeypatch.setattr(evaluate.tables, 'AT_ONCE', 500)
    x, y = np.asarray(here.x), np.asarray(here.y)
    toys.same(whole, evaluate.generic(algorithm, state, x, y, toys.CLASSES))


def test_splits_and_tests_stay_on_the_host_too(both):
    here, away = both
    for left, right in zip(data.split(here, 0.3, seed=1), data.split(away, 0.3, seed=1), strict=True):
        toys.same(tuple(left), tuple(right))
        assert isinstance(right, data.HostData)
        assert right.x is away.x
    toys.same(data.class_weights(here, 'labels'), data.class_weights(away, 'labels'))


def test_a_pool_larger_than_the_device_is_refused_there_and_taken_here():
    """Ten times as many bytes as a round may take."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20_000, 200)).astype(np.float32), rng.integers(0, 5, 20_000)
    parts = np.array_split(rng.permutation(20_000), 200)
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    limit = x.nbytes / 10
    for where in (False, True):
        clients = data.federate(x, y, parts, 5, host=where)
        state = simulate.init(algorithm, toys.KEY, clients)

        def run(clients=clients, state=state):
            return training.run(algorithm, toys.KEY, state, clients, rounds=1, cohort=2, memory_limit=limit,
                                progress=False)  # fmt: skip

        if where:
            assert run().history[0]['loss'] > 0
        else:
            with pytest.raises(MemoryError, match='largest share: data'):
                run()
    need = footprint.estimate(algorithm, state, host.shapes(clients, 2))
    assert need.data < limit


SHARED = """
import jax, numpy as np, toys
from fedjax_nc import data, devices, population, simulate, training
from fedjax_nc.algorithms import scaffold

assert len(jax.devices()) == 4
sizes = (30, 7, 25, 9, 14, 3, 22, 11)
here = toys.ragged(sizes)
parts = [np.asarray(here.index[k, :n]) for k, n in enumerate(sizes)]
away = data.federate(np.asarray(here.x), here.y, parts, toys.CLASSES, host=True)
algorithm = scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN)
for begin in (simulate.init, population.init):
    states = []
    for clients, mesh in ((here, None), (away, devices.mesh())):
        state = begin(algorithm, toys.KEY, clients)
        states.append(training.run(algorithm, toys.KEY, state, clients, rounds=2, cohort=5, mesh=mesh,
                                   progress=False).state.server)
    toys.same(*states, atol=1e-5)
"""


@pytest.mark.slow
def test_four_devices_share_it():
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=4'
    folder = Path(__file__).parent
    env = {**os.environ, 'XLA_FLAGS': flags, 'PYTHONPATH': os.pathsep.join([str(folder.parent), str(folder)])}
    done = subprocess.run([sys.executable, '-c', SHARED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ('x', 'message'),
    [
        (np.ones((5, 2)), 'of a type that jax has: float32, not float64'),
        (np.array(['a'] * 5), 'of a type that jax has'),
        (np.ones((4, 2), np.float32), 'one entry per example'),
        (np.array([[1], [2], [np.nan], [4], [5]], np.float32), 'row 2 holds NaN'),
    ],
)
def test_what_is_refused(x, message):
    with pytest.raises((ValueError, TypeError), match=message):
        data.federate(x, np.arange(5), [np.arange(5)], host=True)


def test_what_else_is_refused(both):
    here, away = both
    with pytest.raises(ValueError, match='HostData'):
        data.part(here, np.arange(2))
    for wrong in ([-1, 0], [0, 9], [[0]], [0.5]):
        with pytest.raises(ValueError, match=r'integers in \[0, 8\]'):
            data.part(away, np.array(wrong))
    with pytest.raises(ValueError, match='all be different'):
        data.part(away, np.array([2, 8, 2]))
    with pytest.raises(ValueError, match='cannot be drawn'):
        list(data.feed(away, [toys.KEY], cohort=9))
    algorithm = ALGORITHMS['fedavg']
    state = simulate.init(algorithm, toys.KEY, away)
    with pytest.raises(ValueError, match='rounds_per_call at 1'):
        training.run(algorithm, toys.KEY, state, away, rounds=2, rounds_per_call=2)
    assert jnp.isfinite(data.part(away, np.array([8, 8])).data.x).all()  # nobody at all


def test_examples_that_clients_share_travel_once():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, toys.DIM)).astype(np.float32), np.arange(30) % toys.CLASSES
    parts = [rng.permutation(30)[:25] for _ in range(6)]
    here, away = (data.federate(x, y, parts, toys.CLASSES, host=host) for host in (False, True))
    part = data.part(away, np.arange(6))
    assert len(part.data.x) == host.room(away, 6) == 30
    state = simulate.init(ALGORITHMS['fedavg'], toys.KEY, here)
    round = jax.jit(simulate.make_round(ALGORITHMS['fedavg']))
    toys.same(round(toys.KEY, state, here), round(toys.KEY, state, part))


def test_half_precision_stays_on_the_host_as_on_the_device():
    x = np.ones((5, 2), jnp.bfloat16)
    assert data.federate(x, np.arange(5), [np.arange(5)], host=True).x.dtype == jnp.bfloat16
    x[3] = np.nan
    with pytest.raises(ValueError, match='row 3 holds NaN'):
        data.federate(x, np.arange(5), [np.arange(5)], host=True)


def test_more_rows_than_can_be_numbered_are_refused():
    many = np.broadcast_to(np.int8(0), 2**31)
    with pytest.raises(ValueError, match='beyond counting'):
        data.federate(many, many, [np.arange(3)], 2, host=True)


def test_evaluation_may_be_compiled_with_them(both):
    algorithm = ALGORITHMS['fedavg']
    state = simulate.init(algorithm, toys.KEY, both[0])
    tables = [jax.jit(lambda d: evaluate.per_client(algorithm, state, d))(d) for d in both]
    toys.same(*tables)


ABANDONED = """
import jax, numpy as np
from fedjax_nc import data
clients = data.federate(np.ones((6, 2), np.float32), np.arange(6) % 2, np.split(np.arange(6), 3), host=True)
parts = data.feed(clients, [jax.random.key(0)] * 5, cohort=2)
next(parts)
"""


def test_a_program_ends_quietly_with_parts_that_nobody_took():
    done = subprocess.run([sys.executable, '-c', ABANDONED], capture_output=True, text=True, timeout=120, check=True)
    assert 'Exception' not in done.stderr
