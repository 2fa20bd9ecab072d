"""The study of FedETF's dimension, made tiny."""

import re
import sys

import numpy as np
import pytest
from test_spiral import fast_compilation as fast_compilation
from test_spiral import load

from fedjax_nc import data

study = pytest.fixture(scope='module')(lambda: load('fedetf_dimension'))


@pytest.mark.slow
def test_prints_a_table_and_draws(study, tmp_path, monkeypatch, capsys, fast_compilation):
    monkeypatch.setattr(study, 'PLAN', study.PLAN._replace(epochs=1))
    settings = ('--seeds', '1', '--rounds', '12', '--dims', '12', '--out', str(tmp_path))
    monkeypatch.setattr(sys, 'argv', ['fedetf_dimension.py', *settings])
    study.main()
    row = re.search(r'^ +12 +(\S+) ± +(\S+) +(\S+) ± (\S+) +(\S+) ± (\S+)$', capsys.readouterr().out, re.MULTILINE)
    accuracy, before, after = (float(row[i]) for i in (1, 3, 5))
    assert [float(row[i]) for i in (2, 4, 6)] == [0, 0, 0]  # one seed
    assert 20 < accuracy <= 100  # ten classes, hardly trained
    assert 0 < before < 1
    assert 0 < after < 1
    assert before != after
    assert (tmp_path / 'fedetf_dimension.png').read_bytes().startswith(b'\x89PNG')


def test_tables_of_all_seeds_have_one_width_and_other_clients(study):
    first, second = study.populations(data.load_dataset('digits'), 2)
    assert first.index.shape == second.index.shape
    assert (np.asarray(first.size) != np.asarray(second.size)).any()
    assert max(int(first.size.max()), int(second.size.max())) == first.index.shape[1]


def test_too_few_dimensions_are_refused_at_once(study, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['fedetf_dimension.py', '--dims', '32', '8'])
    with pytest.raises(SystemExit):
        study.main()
    assert 'needs at least 9 dimensions' in capsys.readouterr().err
