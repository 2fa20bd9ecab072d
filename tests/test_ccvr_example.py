"""The analyses of CCVR, made tiny."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_spiral import fast_compilation as fast_compilation
from test_spiral import load

from fedjax_nc import data, local

study = pytest.fixture(scope='module')(lambda: load('ccvr'))


def numbers(out, title):
    """The table under `title`: its rows' names -> what stands before each ±, and that behind is 0."""
    rows = out.split(title)[1].split('\n\n')[0].splitlines()[1:]
    cells = {row[:28].strip(): re.findall(r'(\S+) ± (\S+)', row) for row in rows}
    assert all(float(sd) == 0 for row in cells.values() for _, sd in row)  # one seed
    return {name: [float(mean) for mean, _ in row] for name, row in cells.items() if row}


@pytest.mark.slow
def test_prints_tables_and_draws(study, tmp_path, monkeypatch, capsys, fast_compilation):
    monkeypatch.setattr(study, 'BASES', {'FedAvg': study.BASES['FedAvg']})
    monkeypatch.setattr(study, 'SAMPLES', (0, 20))
    monkeypatch.setattr(study, 'USUAL', 20)
    monkeypatch.setattr(study, 'REFIT', local.Plan(64, 2))
    monkeypatch.setattr(sys, 'argv', ['ccvr.py', '--seeds', '1', '--rounds', '2', '--out', str(tmp_path)])
    study.main()
    out = capsys.readouterr().out
    lengths, cka, sweep, gains = (numbers(out, f'({letter}) ') for letter in 'abcd')
    cells = [f'{kind}, round {round}' for kind in ('even', 'Dirichlet') for round in (1, 2)]
    assert list(lengths) == list(cka) == cells
    for round in (1, 2):
        even, skewed = f'even, round {round}', f'Dirichlet, round {round}'
        assert lengths[skewed][0] > 1.3 * lengths[even][0]
        assert lengths[skewed][1] > 0.5
        assert all(b < a for a, b in zip(cka[even], cka[skewed], strict=True))
        assert all(1 >= a > b >= 0 for a, b in zip(cka[skewed], cka[skewed][1:], strict=False))
    distance, before, after, gain, oracle = gains['FedAvg, 2 rounds']
    assert sweep == {'as it is': [before], 'M = 20': [after], 'oracle, not federated': [oracle]}
    assert gain == pytest.approx(after - before, abs=0.11)
    assert gain > 5
    assert oracle > before
    assert distance > 0
    assert list(gains) == ['FedAvg, 1 rounds', 'FedAvg, 2 rounds', 'FedAvg, 4 rounds']
    assert len(re.findall(r': -?[01]\.\d\d', out.splitlines()[-3])) == 3
    assert (tmp_path / 'ccvr.png').read_bytes().startswith(b'\x89PNG')


def test_clients_hold_all_examples_in_tables_of_one_width(study):
    digits = data.load_dataset('digits')
    every = study.populations(digits, 2)
    assert len({clients.index.shape for many in every.values() for clients in many}) == 1
    for clients in every['even'] + every['Dirichlet']:
        index, size = np.asarray(clients.index), np.asarray(clients.size)
        rows = np.concatenate([index[k, : size[k]] for k in range(study.CLIENTS)])
        assert sorted(rows.tolist()) == list(range(len(digits.y_train)))
    assert int(np.ptp(every['even'][0].size)) == 1
    assert (np.asarray(every['Dirichlet'][0].counts) != np.asarray(every['Dirichlet'][1].counts)).any()


def test_agreement_and_norms_against_numpy(study, fast_compilation):
    """Three random models: CKA of their layers by the Gram matrices of a plain forward pass."""
    digits = data.load_dataset('digits')
    x = digits.x_test[:40]
    clients = data.federate(digits.x_train, digits.y_train, data.iid(digits.y_train, 3, seed=0), 10)
    own = jax.jit(jax.vmap(lambda key: study.LINEAR.init(key, clients)))(jax.random.split(jax.random.key(5), 3))
    state = study.State((), study.latest.Latest((), own, jnp.zeros(3)))
    dense = [own.params['body'][f'Dense_{i}'] for i in range(3)]
    layers = [(np.asarray(u['kernel'], np.float64), np.asarray(u['bias'], np.float64)) for u in dense]
    w, b = (np.asarray(own.params['head'][name], np.float64) for name in 'wb')
    grams = []
    for k in range(3):
        z, outputs = x.reshape(40, -1) / 127.5 - 1, []
        for kernel, bias in [*layers, (w, b)]:
            outputs.append(z @ kernel[k] + bias[k])
            z = np.maximum(outputs[-1], 0)
        centred = [u - u.mean(axis=0) for u in outputs]
        grams.append([u @ u.T / np.linalg.norm(u @ u.T) for u in centred])
    want = [np.mean([np.vdot(grams[i][n], grams[j][n]) for i, j in ((0, 1), (0, 2), (1, 2))]) for n in range(4)]
    np.testing.assert_allclose(study.agreement(state, x), want, atol=1e-5)
    np.testing.assert_allclose(study.norms(state), np.sqrt((w**2).sum(axis=1)), rtol=1e-6)
