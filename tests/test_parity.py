"""The comparison with the authors' code: its arithmetic here, the comparison itself where their code is at hand."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_nc import local

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / 'benchmarks' / 'parity.py'
PYTHON, AUTHORS = os.environ.get('PARITY_PYTHON'), os.environ.get('PARITY_AUTHORS')


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module('parity')


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module('authors_ours')


def test_differences_are_relative_to_each_array_and_the_largest_counts(parity):
    ours = {'a': np.array([1.0, 100.0]), 'b': np.array([0.011])}
    theirs = {'a': np.array([1.0, 101.0]), 'b': np.array([0.010])}
    np.testing.assert_allclose(parity.largest(ours, theirs), 0.1)
    assert parity.largest({'a': np.array(0.5)}, {'a': np.array(0.0)}) == 0.5
    assert parity.largest({'a': np.zeros(0)}, {'a': np.zeros(0)}) == 0.0


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_what_is_no_number_differs_without_limit(parity, bad):
    for a, b in ((bad, 1.0), (1.0, bad), (bad, bad)):
        assert parity.largest({'a': np.array([a, 0.0])}, {'a': np.array([b, 0.0])}) == np.inf


def test_other_names_or_shapes_are_not_compared(parity):
    with pytest.raises(ValueError, match='cannot be compared'):
        parity.largest({'a': np.ones(2)}, {'b': np.ones(2)})
    with pytest.raises(ValueError, match='cannot be compared'):
        parity.largest({}, {})
    with pytest.raises(ValueError, match=r'\(2,\) here and \(3,\) there'):
        parity.largest({'a': np.ones(2)}, {'a': np.ones(3)})


def test_arrays_are_found_by_the_beginning_of_their_names(parity):
    arrays = dict.fromkeys(('run/body/w', 'run/body', 'run/bodywork', 'body'), np.ones(1))
    assert set(parity.under('run/body', arrays)) == {'/w', ''}


def test_only_rows_without_a_cause_can_fail(parity):
    rows = [('M', 'x', 1e-12, ''), ('M', 'y', 1e-3, 'on purpose'), ('M', 'z', 1e-8, ''), ('M', 'n', np.nan, '')]
    assert parity.failing(rows) == ['M: z', 'M: n']
    assert parity.table(rows).splitlines()[3] == '| M | y | 1.0e-03 | on purpose |'


def test_orders_are_those_in_which_clients_train(ours):
    setting, key, k = ours.Setting(1), jax.random.key(0), ours.CHOSEN
    shard, steps = setting.data.shard(k), ours.EPOCHS * -(-ours.SIZES[k] // ours.BATCH)

    def loss(params, stats, batch):
        at, seen = stats
        row = jnp.where(batch.mask, batch.x[:, 0, 0, 0], 0.0)
        return 0.0 * params, (at + 1, seen.at[at].set(row))

    stats = (jnp.int32(0), jnp.zeros((steps, ours.BATCH)))
    plan = local.Plan(ours.BATCH, ours.EPOCHS)
    out = local.local_sgd(key, loss, jnp.float32(0), stats, optax.sgd(0.1), shard, plan)
    values = np.asarray(setting.data.x)[:, 0, 0, 0]
    want = np.zeros((steps, ours.BATCH))
    batches = [batch for e in range(ours.EPOCHS) for batch in setting.epoch(key, k, e)]
    for row, (rows, _) in zip(want, batches, strict=True):
        row[: len(rows)] = values[rows]
    np.testing.assert_array_equal(out.stats[1], want)
    assert {len(rows) for rows, _ in batches} == {ours.BATCH, ours.SIZES[k] % ours.BATCH}


def test_double_precision_is_for_a_fresh_process(ours):
    with pytest.raises(RuntimeError, match='as a script'):
        ours.double_precision()


def script(*args):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ('args', 'said'),
    [
        (['--python', sys.executable], 'name at least one checkout'),
        (
            ['--fednh', 'CHECKOUT', '--fedetf', 'nowhere', '--python', sys.executable],
            '--fedetf nowhere has no client_f',
        ),
        (['--fednh', 'CHECKOUT', '--python', 'no-such-python'], '--python no-such-python: No such file'),
        (['--fednh', 'CHECKOUT'], 'the following arguments are required: --python'),
        pytest.param(
            ['--fednh', 'CHECKOUT', '--python', sys.executable],
            "No module named 'torch'; pip install torch==",
            marks=pytest.mark.skipif(importlib.util.find_spec('torch') is not None, reason='PyTorch is installed'),
        ),
    ],
)
def test_a_bad_argument_is_one_line(args, said, tmp_path):
    (tmp_path / 'src/flbase/strategies').mkdir(parents=True)
    (tmp_path / 'src/flbase/strategies/FedNH.py').touch()
    done = script(*(tmp_path if arg == 'CHECKOUT' else arg for arg in args))
    assert done.returncode == 2
    assert done.stdout == ''
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


needs = pytest.mark.skipif(
    not (PYTHON and AUTHORS),
    reason='set PARITY_PYTHON, a Python with PyTorch, and PARITY_AUTHORS, a folder with fedetf, fednh and fedloge',
)


@needs
@pytest.mark.slow
@pytest.mark.parametrize('method', ['fedetf', 'fednh', 'fedloge'])
def test_the_authors_code_leads_to_the_same_weights(method, tmp_path):
    done = script(f'--{method}', Path(AUTHORS) / method, '--python', PYTHON, '--json', tmp_path / 'rows.json')
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / 'rows.json').read_text())['rows']
    alike = {row['quantity']: row['gap'] for row in rows if not row['cause']}
    assert len(alike) >= 8
    assert {name: gap for name, gap in alike.items() if not gap < 1e-9} == {}
    assert all(row['gap'] > 0 for row in rows if row['cause'])


@needs
@pytest.mark.slow
@pytest.mark.parametrize('off', ['lr', 'rho'])
def test_a_millionth_more_is_seen(off):
    done = script('--fednh', Path(AUTHORS) / 'fednh', '--python', PYTHON, '--off', off)
    assert done.returncode == 1
    assert 'differ without a cause' in done.stderr
