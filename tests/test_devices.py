"""Several devices against one, and two processes against one. The programs run apart: devices are counted at start."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import devices, simulate
from fedjax_nc.algorithms import fedavg

PROGRAM = Path(__file__).with_name('devices_program.py')


def launch(count, *args):
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={count}'
    env = {**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(PROGRAM.parent)}
    command = [sys.executable, str(PROGRAM), *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def check(answer, devices, runs):
    assert answer['devices'] == devices
    assert len(answer['found']) == runs
    for name, found in answer['found'].items():
        assert found['gap'] < 5e-5, (name, found)
        assert abs(found['loss']) < 1e-4, (name, found)
        assert found['ids'], name
        assert (found['traces'], found['compiled']) == (1, 1), (name, found)
        assert 0.25 <= found['balance'] < 1, (name, found)


@pytest.mark.slow
def test_four_devices_equal_one():
    """Client states split over devices and not, statistics, prototypes, a median; sizes from 1 to 200, nobody."""
    check(answer(launch(4)), 4, 10)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{s.getsockname()[1]}'
    first, second = (launch(1, address, i, tmp_path) for i in range(2))
    found = [answer(first), answer(second)]
    check(found[0], 2, 2)
    assert found[0] == found[1]
    log = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['loss'] for line in log] == found[0]['history']
    assert len(log) == 3
    assert found[0]['saved'] == [['1', '2'], ['2', '3']]


@pytest.mark.parametrize('count', [1, 2, 4])
def test_work_is_shared_out_evenly(count):
    sizes = np.sort(np.random.default_rng(0).pareto(1.5, 48) * 100)[::-1]
    place = np.asarray(devices.balanced(jnp.asarray(sizes), count))
    assert sorted(place) == list(range(48))
    load = np.zeros(count)
    np.add.at(load, place // (48 // count), sizes)
    # No way of sharing is better than the largest single cost or an equal split.
    assert load.max() <= 1.1 * max(sizes[0], sizes.sum() / count)


def test_one_device_needs_no_mesh_and_may_have_one(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    mesh = devices.mesh(jax.devices()[:1])
    alone, report = jax.jit(simulate.make_round(algorithm, cohort=5, chunk=2))(toys.KEY, state, data)
    placed, other = jax.jit(simulate.make_round(algorithm, cohort=5, chunk=2, mesh=mesh))(
        toys.KEY, *devices.place(mesh, state, data)
    )
    toys.same(alone, placed, atol=1e-6)
    assert float(report.balance) == float(other.balance) == 1


def test_a_mesh_with_other_axes_is_refused():
    mesh = jax.make_mesh((1,), ('batch',))
    with pytest.raises(ValueError, match=r'devices\.mesh'):
        simulate.make_round(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN), mesh=mesh)


def test_a_mesh_of_no_devices_is_refused():
    with pytest.raises(ValueError, match='one device or more'):
        devices.mesh([])
