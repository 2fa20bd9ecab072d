"""Runs by which options are chosen: examples that clients hold back in the place of the test set."""

import numpy as np
import pytest

from fedjax_nc import experiments
from fedjax_nc.experiments import Setting, command, report, runner, scene, study
from fedjax_nc.experiments import setting as setting_module

N, TESTS = 120, 40


@pytest.fixture
def numbered(tmp_path):
    """Examples that are their own numbers, those for testing from 1000, of four natural clients and classes."""
    y, y_test = np.arange(N) % 4, np.arange(TESTS) % 4
    x, x_test = (np.float32(numbers)[:, None] for numbers in (np.arange(N), 1000 + np.arange(TESTS)))
    np.savez(
        tmp_path / 'own.npz', x_train=x, y_train=y, x_test=x_test, y_test=y_test,
        clients_train=np.arange(N) // 30, clients_test=np.arange(TESTS) // 10,
    )  # fmt: skip
    return tmp_path


def setting(**changes):
    return Setting(**{'dataset': 'own.npz', 'model': 'mlp', 'clients': 4, 'partition': 'iid', **changes})


def rows(clients):
    """The numbers of each client's examples."""
    return [set(np.asarray(clients.x)[i[:n], 0].astype(int).tolist()) for i, n in zip(*where(clients), strict=True)]


def where(clients):
    return np.asarray(clients.index), np.asarray(clients.size)


@pytest.mark.parametrize(
    'kind', [{}, {'tests': 'matched'}, {'tests': 'common'}, {'tests': 'natural', 'partition': 'natural'}]
)
@pytest.mark.parametrize('host', [False, True])
def test_clients_hold_back_what_they_would_train_on_and_nobody_sees_a_test(numbered, kind, host):
    _, whole, tests = scene.load(setting(**kind), numbered)
    dataset, train, seen = scene.load(setting(**kind, validation=0.2), numbered, host)
    held = set(dataset.x_test[:, 0].astype(int).tolist())
    assert len(held) == len(dataset.y_test)
    for mine, kept, tested in zip(rows(whole), rows(train), rows(seen), strict=True):
        assert kept < mine
        assert len(mine - kept) == int(0.2 * len(mine))
        assert mine - kept <= held
        if 'tests' not in kind or kind['tests'] == 'natural':
            assert tested == mine - kept
        else:
            assert tested <= held
    for real in rows(tests):
        assert not real & held
    assert held == set.union(*rows(whole)) - set.union(*rows(train))
    np.testing.assert_array_equal(dataset.y_test, np.asarray(dataset.x_test)[:, 0] % 4)
    assert set(dataset.x_train[:, 0].astype(int)) == set(range(N)) - held  # from which methods may draw their own
    np.testing.assert_array_equal(dataset.y_train, np.asarray(dataset.x_train)[:, 0] % 4)


def overlapping(labels, clients, *, seed):
    return [np.arange(60), np.arange(30, 90), np.arange(40, 120), np.arange(10)]


def test_what_others_train_on_is_not_tested(numbered, monkeypatch):
    monkeypatch.setitem(setting_module.PARTITIONS, 'overlapping', overlapping)
    dataset, train, _ = scene.load(setting(partition='overlapping', validation=0.5), numbered)
    held = set(dataset.x_test[:, 0].astype(int).tolist())
    assert held
    assert not held & set.union(*rows(train))


def test_noisy_clients_are_tested_as_others_are(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (90, 4, 4, 1), np.uint8)
    y = np.arange(90) % 3
    np.savez(tmp_path / 'own.npz', x_train=pixels[:60], y_train=y[:60], x_test=pixels[60:], y_test=y[60:])
    dataset, train, _ = scene.load(setting(features='noisy', noise=0.0, validation=0.3, tests='common'), tmp_path)
    plain, _, _ = scene.load(setting(validation=0.3, tests='common'), tmp_path)
    np.testing.assert_allclose(dataset.x_test, 2 * (plain.x_test / 255) - 1, atol=1e-6)
    assert train.x.dtype == dataset.x_test.dtype


def test_a_share_of_nothing_is_refused(numbered):
    with pytest.raises(ValueError, match=r'validation 0\.01 holds back nothing of clients of at most 21 examples'):
        scene.load(setting(validation=0.01), numbered)
    for share in (1, -0.1, True, '0.1'):
        with pytest.raises(ValueError, match='validation must '):
            setting(validation=share)
    argv = ['--dataset', 'digits', '--validation', '0.1']
    assert command.setting_of(command.arguments(argv, 'cifar.py', '')).validation == 0.1


def test_a_run_without_is_named_as_before():
    assert setting(validation=0.0).digest == setting().digest != setting(validation=0.1).digest


@pytest.mark.slow
def test_options_are_chosen_by_a_scale_of_a_study(tmp_path):
    """As the guide has it: rates are compared on what clients hold back, the best one is then tested."""
    plain = {
        'title': 'Rates', 'baseline': 'slow', 'seeds': [0], 'metrics': {'general': 'global_accuracy_last1'},
        'setting': {'dataset': 'digits', 'clients': 4, 'max_examples': 300, 'rounds': 2, 'eval_last': 1},
        'methods': {name: {'algorithm': 'fedavg', 'lr': lr} for name, lr in (('slow', 0.001), ('fast', 0.1))},
        'scales': {'validation': {'setting': {'validation': 0.2}}},
    }  # fmt: skip
    chosen = study.Study.of(plain, 'rates', 'validation')
    runner.carry_out(chosen, tmp_path)
    folder = report.write(chosen, tmp_path)
    assert 'Tested on 20 % of the training examples, held back.' in (folder / 'report.md').read_text()
    for run in chosen.runs:
        loaded = experiments.load(runner.where(run, tmp_path))
        dataset, _, _ = scene.load(run.setting)
        right = np.asarray(loaded.predict(dataset.x_test)).argmax(-1) == dataset.y_test
        assert np.mean(right) == pytest.approx(runner.summary(run, tmp_path)['global_accuracy'])
