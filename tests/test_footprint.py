"""The estimate against sums by hand, and against the buffers of compiled rounds."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import toys

from fedjax_nc import aggregators, footprint, heads, local, losses, models, simulate
from fedjax_nc.algorithms import fedavg, finetune
from fedjax_nc.base import FederatedData
from fedjax_nc.objective import objective

BODY, HEAD = toys.DIM * 16 + 16, 16 * toys.CLASSES + toys.CLASSES
MODEL = 4 * (BODY + HEAD)
algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)


def shapes(algorithm, data):
    return jax.eval_shape(lambda data: simulate.init(algorithm, toys.KEY, data), data)


def images(side, pool=200, clients=6, rows=64, classes=10):
    def of(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    return FederatedData(of((pool, side, side, 3), jnp.uint8), of((pool,)), of((clients, rows)), of((clients,)),
                         of((clients, classes)))  # fmt: skip


def peak(f, *args, held=0):
    return footprint._peak(jax.make_jaxpr(f)(*args).jaxpr, held, 'cpu') / args[0].nbytes


ROW = jnp.ones(1000)


@pytest.mark.parametrize(
    ('f', 'want'),
    [
        (lambda x: x, 1),
        (lambda x: jnp.sin(jnp.sin(jnp.sin(x))), 2),  # each only needs the one before it
        (lambda x: jnp.sin(x) * jnp.cos(x), 3),
        (lambda x: jnp.sin(x) + jnp.cos(x) + jnp.tanh(x), 4),  # x, two that are added, their sum; or x, sum, tanh
        (jax.jit(lambda x: jax.jit(jnp.sin)(x) * jax.jit(jnp.cos)(x)), 3),  # calls make no difference
        (jax.checkpoint(lambda x: jnp.sin(x) * jnp.cos(x)), 3),
        (lambda x: jax.lax.cond(True, lambda x: x, lambda x: jnp.sin(x) * jnp.cos(x), x), 4),
        (lambda x: jax.lax.while_loop(lambda x: True, jnp.sin, jnp.sin(x)), 2),  # in place, apart from its step
        (lambda x: jax.lax.while_loop(lambda y: True, jnp.sin, x) + x, 3),  # which needs a copy where x lives on
        (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, length=7), 9),  # carry, its successor, the rows
    ],
)
def test_peak_of_small_functions(f, want):
    assert peak(f, ROW) == pytest.approx(want, abs=0.01)


def test_only_what_the_platform_runs_is_counted():
    def f(x):
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=lambda x: jnp.sin(x) * jnp.cos(x))

    jaxpr = jax.make_jaxpr(f)(ROW).jaxpr
    assert [footprint._peak(jaxpr, 0, platform) / ROW.nbytes for platform in ('cpu', 'tpu')] == [2, 3]


def test_inputs_of_somebody_else_are_not_counted():
    assert peak(lambda x: jnp.sin(jnp.sin(x)), ROW, held=1) == 2
    assert peak(lambda x, y: x + y, ROW, ROW, held=1) == 2


def test_a_network_must_remember_what_its_layers_made():
    """The backward pass of exp needs its output, so that each of ten layers adds one."""

    def loss(layers):
        def f(x):
            for _ in range(layers):
                x = jnp.exp(x)
            return jnp.sum(x)

        return jax.grad(f)

    assert peak(loss(20), ROW) - peak(loss(10), ROW) == pytest.approx(10, abs=0.1)


def test_what_is_there_all_the_time_is_counted_exactly(data):
    need = footprint.estimate(algorithm, shapes(algorithm, data), data, cohort=5, chunk=2)
    assert need.data == sum(u.nbytes for u in data)
    assert need.server == MODEL + 4  # and the number of the round
    assert need.clients == 8 * MODEL  # momentum
    assert need.messages == MODEL + 2 * 4  # and two sums of weights
    assert need.chunk == 2
    assert need.total == need.data + need.server + need.clients + need.messages + 2 * need.lane


def test_a_lane_holds_at_least_model_momentum_gradient_and_batch(data):
    def lane(batch, chunk=1):
        a = fedavg.algorithm(toys.task, toys.opt, plan=local.Plan(batch, 1))
        return footprint.estimate(a, shapes(a, data), data, chunk=chunk).lane

    assert lane(1) > 3 * MODEL
    # A row of a batch: its pixels, what the layer made of them and the logits.
    assert lane(200) - lane(100) >= 100 * 4 * (toys.DIM + 16 + toys.CLASSES)
    assert lane(16, chunk=4) == lane(16, chunk=2) == lane(16) + MODEL  # one that is done waits for the others


def test_stacked_messages_take_a_row_for_each_client_of_the_padded_cohort(data):
    median = aggregators.stacked(aggregators.coordinate_median)
    a = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, aggregate=median)
    need = footprint.estimate(a, shapes(a, data), data, cohort=5, chunk=2)
    assert need.messages == 6 * MODEL + 6 * 4 + 4
    assert need.update > 6 * MODEL  # the chunk's rows are added to those before
    assert need._replace(lane=1).total == need.data + need.server + need.messages + need.update


def test_nothing_is_allocated():
    data = images(32, pool=10**9, clients=10**6)
    a = fedavg.algorithm(objective(models.from_flax(models.MLP()), heads.linear(), losses.cross_entropy), toys.opt,
                         persist_momentum=True)  # fmt: skip
    need = footprint.estimate(a, shapes(a, data), data, cohort=100, chunk=10)
    assert need.data > 3e12
    assert need.clients > 2e12


@pytest.mark.slow
@pytest.mark.parametrize(
    ('body', 'side', 'chunk', 'build'),
    [
        (models.MLP((300, 300)), 16, 5, fedavg.algorithm),
        (models.CNN(), 20, 2, finetune.algorithm),
        (models.ResNet(widths=(16, 32), blocks=(1, 1), norm='batch'), 16, 1, fedavg.algorithm),
    ],
    ids=['mlp', 'cnn', 'resnet'],
)
def test_it_is_near_the_buffers_of_the_compiled_round(body, side, chunk, build):
    task, data = objective(models.from_flax(body), heads.linear(), losses.cross_entropy), images(side)
    a = build(task, local.sgd(0.1), plan=local.Plan(32, 1))
    server = fedavg.algorithm(task, local.sgd(0.1))
    state = jax.eval_shape(lambda data: simulate.join(a, toys.KEY, server.init(toys.KEY, data), data.num_clients), data)
    need = footprint.estimate(a, state, data, chunk=chunk)
    lowered = simulate.compiled(simulate.make_round(a, chunk=chunk)).lower(toys.KEY, state, data)
    b = lowered.compile().memory_analysis()
    used = b.argument_size_in_bytes + b.output_size_in_bytes + b.temp_size_in_bytes - b.alias_size_in_bytes
    assert 0.7 < need.total / used < 1.7


def test_the_advised_chunk_fits_and_the_next_does_not(data):
    state = shapes(algorithm, data)
    need = footprint.estimate(algorithm, state, data, chunk=8)
    limit = need._replace(chunk=5).total
    assert footprint.check(algorithm, state, data, chunk=5, limit=limit).total == limit
    with pytest.raises(MemoryError, match=r'chunk=5 would fit'):
        footprint.check(algorithm, state, data, chunk=6, limit=limit)
    with pytest.raises(MemoryError, match=r'largest share: lanes.*chunk=4 would fit'):
        footprint.check(algorithm, state, data, chunk=8, limit=limit - 1)
    alone = need._replace(chunk=1)
    with pytest.raises(MemoryError, match=r'no chunk would fit'):
        footprint.check(algorithm, state, data, chunk=8, limit=alone.total - need.lane)


def test_the_refusal_says_how_much(data):
    state = shapes(algorithm, data)
    big = FederatedData(jax.ShapeDtypeStruct((10**8, toys.DIM), jnp.float32), *data[1:])
    gib = f'{4 * toys.DIM * 10**8 / 2**30:.2f} GiB'  # the rest is nothing beside it
    with pytest.raises(MemoryError, match=f'needs about {gib} and can have 1 GiB; its largest share: data, {gib}'):
        footprint.check(algorithm, state, big, limit=2**30)


def test_what_is_on_the_device_already_is_not_asked_for_again(data, monkeypatch):
    state = simulate.init(algorithm, toys.KEY, data)
    need = footprint.estimate(algorithm, state, data)
    missing = need.messages + need.chunk * need.lane
    monkeypatch.setattr(footprint, '_available', lambda: missing)
    assert footprint.check(algorithm, state, data) == need
    with pytest.raises(MemoryError):  # nothing of these is anywhere yet
        footprint.check(algorithm, shapes(algorithm, data), jax.eval_shape(lambda: data))
    monkeypatch.setattr(footprint, '_available', lambda: missing - 1)
    with pytest.raises(MemoryError):
        footprint.check(algorithm, state, data)
    monkeypatch.setattr(footprint, '_available', lambda: None)
    assert footprint.check(algorithm, state, data) == need


def test_bad_numbers_are_refused(data):
    for kwargs, match in (({'chunk': 0}, 'chunk must be'), ({'cohort': 9}, 'cannot be drawn')):
        with pytest.raises(ValueError, match=match):
            footprint.estimate(algorithm, shapes(algorithm, data), data, **kwargs)
    for kwargs, match in (({'limit': float('nan')}, 'limit must'), ({'platform': 'banana'}, 'platform must be')):
        with pytest.raises(ValueError, match=match):
            footprint.check(algorithm, shapes(algorithm, data), data, **kwargs)


def test_an_accelerator_tells_what_its_allocator_has_left(monkeypatch):
    def device(platform, **stats):
        monkeypatch.setattr(
            jax, 'local_devices', lambda: [SimpleNamespace(platform=platform, memory_stats=lambda: stats)]
        )
        return footprint._available()

    assert device('gpu', bytes_limit=1000, bytes_in_use=300, peak_bytes_in_use=900) == 700
    assert device('gpu') is None


GROUP2, GROUP1 = 'sys/fs/cgroup/memory', 'sys/fs/cgroup/memory/memory'


@pytest.mark.parametrize(
    ('files', 'want'),
    [
        ({}, None),
        ({'proc/meminfo': 'MemTotal:  9000 kB\nMemAvailable:   7 kB\n'}, 7168),
        ({'proc/meminfo': 'MemAvailable: 7 kB', f'{GROUP2}.max': 'max', f'{GROUP2}.current': '5',
          f'{GROUP2}.stat': 'inactive_file 1'}, 7168),
        ({'proc/meminfo': 'MemAvailable: 7 kB', f'{GROUP2}.max': '6000', f'{GROUP2}.current': '5000',
          f'{GROUP2}.stat': 'anon 3000\ninactive_file 500\n'}, 1500),
        ({'proc/meminfo': 'MemAvailable: 7 kB', f'{GROUP1}.limit_in_bytes': '6000\n',
          f'{GROUP1}.usage_in_bytes': '1000\n', f'{GROUP1}.stat': 'inactive_file 100\n'}, 5100),
        ({'proc/meminfo': 'MemAvailable: 7 kB', f'{GROUP1}.limit_in_bytes': '9223372036854771712',
          f'{GROUP1}.usage_in_bytes': '1000', f'{GROUP1}.stat': 'inactive_file 100'}, 7168),
    ],
    ids=['unknown', 'machine', 'no limit', 'container', 'container, version 1', 'no limit, version 1'],
)  # fmt: skip
def test_main_memory(files, want, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert footprint._main_memory(str(tmp_path)) == want


def test_without_a_limit_every_chunk_fits(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt)
    need = footprint.estimate(algorithm, simulate.init(algorithm, toys.KEY, data), data, chunk=3)
    assert need.fitting(math.inf) == 3
