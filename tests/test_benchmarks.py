"""The benchmark script, and that its PyTorch loop does the same work."""

import argparse
import functools
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_nc import evaluate, experiments, simulate
from fedjax_nc.experiments import report, study

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / 'benchmarks' / 'rounds_per_second.py'
TORCH = importlib.util.find_spec('torch') is not None


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent / 'peers'))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module('rounds_per_second')


def script(*args):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_script_prints_markdown_and_writes_json(tmp_path):
    out = tmp_path / 'deep' / 'w4.json'
    compare = ('--compare', 'pytorch', '--torch-threads', 1) if TORCH else ()
    done = script(
        '--workload', 'W4', '--clients', 20, '--cohort', 4, '--rounds', 2, '--chunk', 1, '--json', out, *compare
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('\n| - |') == 1
    result = json.loads(out.read_text())
    assert [p.name for p in out.parent.iterdir()] == ['w4.json']
    assert {'date', 'device', 'versions'} <= set(result)
    numbers = [result[name] for name in ('seconds_per_round', 'model_flops_per_round', 'matmul_flops_per_second')]
    numbers += [result['peers']['PyTorch']['seconds_per_round']] if TORCH else []
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert done.stdout.count('\n| PyTorch |') == len(result['peers']) == TORCH
    for row in result['rows']:
        per_round = row['samples_per_second'] * row['seconds_per_round']
        np.testing.assert_allclose(per_round, 4 * 20)
        assert row['compile_seconds'] > 0


@pytest.mark.slow
def test_the_fastest_form_may_be_looked_for_first(bench, capsys, monkeypatch):
    few = [bench.tuning.Choice(chunk=2), bench.tuning.Choice(chunk=2, rounds_per_call=9)]
    monkeypatch.setattr(bench.tuning, 'candidates', lambda *about, **more: few)
    result = bench.main(['--workload', 'W4', '--clients', '20', '--cohort', '4', '--rounds', '1', '--tune'])
    assert [row['chunk'] for row in result['rows']] == ['4 (default)', '2']
    assert capsys.readouterr().err.count('tuning: default form, chunk 2: ') == 1


@pytest.mark.slow
def test_rounds_of_one_call_are_told_by_the_round(bench):
    few = ['--workload', 'W4', '--clients', '20', '--cohort', '4', '--rounds', '2', '--rounds-per-call', '1', '3']
    single, several = bench.main(few)['rows']
    assert (single['conv'], several['conv']) == ('-', '-, 3 rounds a call')
    for row in (single, several):
        np.testing.assert_allclose(row['samples_per_second'] * row['seconds_per_round'], 4 * 20)
    args = bench.arguments(few)
    work = bench.settle(args)
    row = bench.Row(args, work, bench.load(args, work)[0], None, None, None, 3)
    report = row.round(jax.random.key(0))
    assert report.ids.shape == (3, 4)
    assert int(row.state.server.round) == 3
    with pytest.raises(ValueError, match='one a call'):
        bench.main([*few, '--keep', 'host'])
    with pytest.raises(ValueError, match='not that of fedetf'):
        bench.main(['--workload', 'W3', '--keep', 'device'])


def test_a_bad_argument_is_one_line():
    done = script('--cohort', 21)
    assert done.returncode != 0
    assert done.stdout == ''
    assert len(done.stderr.splitlines()) == 1
    assert 'error: --cohort 21 is more than the 20 clients' in done.stderr


@pytest.mark.parametrize('args', [['--rounds', '0'], ['--conv', 'fft'], ['--peer-python', 'pfl']])
def test_malformed_options_are_one_line(bench, capsys, args):
    with pytest.raises(SystemExit, match='2'):
        bench.arguments(args)
    assert len(capsys.readouterr().err.splitlines()) == 1


FAKE = """
import serving

class Fake:
    versions = {'fake': '1.0'}
    def round(self, ids):
        print('libraries talk')
        self.ids = ids
        assert 13 not in ids, 'bad luck'
    def weights(self):
        return {'ids': self.ids}

serving.Channel().serve(Fake())
"""


def fake(bench, folder, source):
    (folder / 'pfl_worker.py').write_text(f'import sys; sys.path.append({str(SCRIPT.parent / "peers")!r}); {source}')
    return bench.side_by_side.Peer('pfl', sys.executable, folder / 'work.npz', folder).ready()


def test_a_worker_plays_rounds_until_it_fails(bench, tmp_path, capsys):
    peer = fake(bench, tmp_path, FAKE)
    assert peer.versions == {'fake': '1.0'}
    peer.round([7], timed=False)
    assert peer.seconds == []
    peer.round([3, 4])
    assert peer.ask(save=str(tmp_path / 'w.npz')) == {'saved': True}
    assert np.load(tmp_path / 'w.npz')['ids'].tolist() == [3, 4]
    assert len(peer.seconds) == 1
    assert 0 <= peer.results()['seconds_per_round'] < 5
    assert capsys.readouterr().err == ''
    peer.round([13])
    peer.round([5])
    assert peer.seconds == []
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    assert said.startswith('Not compared with pfl-research: AssertionError: bad luck')


def test_a_peer_that_is_not_there_is_left_out_with_one_line(bench, tmp_path, capsys):
    missing = fake(bench, tmp_path, 'import no_such_package')
    nowhere = bench.side_by_side.Peer('fedjax', str(tmp_path / 'python'), tmp_path / 'work.npz').ready()
    for peer in (missing, nowhere):
        peer.round([0])
        peer.close()
        assert peer.seconds == []
    first, second = capsys.readouterr().err.splitlines()
    assert "No module named 'no_such_package'" in first
    assert "VENV/bin/pip install 'pfl[pytorch]==0.6.0' torch==2.13.0" in first
    assert 'No such file' in second
    assert 'pip install fedjax==0.0.17 jax==0.5.3' in second


def test_a_workload_that_a_peer_does_not_have_is_one_line(bench, capsys):
    base = {
        'algorithm': 'fedetf',
        'model': 'resnet20',
        'norm': 'batch',
        'bfloat16': False,
        'device': 'cpu',
        'equal': True,
    }
    refusals = {
        'flower': 'Not compared with Flower: it takes part on a CPU',
        'pytorch-graphs': 'Not compared with PyTorch CUDA graphs: it needs an NVIDIA GPU',
        'pytorch-vmap': 'Not compared with PyTorch vmap: it cannot move the statistics of BatchNorm',
    }
    for peer, said in refusals.items():
        assert not bench.side_by_side.fit(peer, base)
        assert capsys.readouterr().err.startswith(said)
    assert not bench.side_by_side.fit('pytorch-vmap', {**base, 'norm': 'group', 'equal': False})
    assert 'clients of one size only' in capsys.readouterr().err
    for peer in ('pytorch', 'pytorch-channels-last', 'pytorch-compile'):
        assert bench.side_by_side.fit(peer, base)
    assert bench.side_by_side.fit('pytorch-vmap', {**base, 'norm': 'group'})
    assert bench.side_by_side.fit('pytorch-graphs', {**base, 'device': 'cuda'})
    assert bench.side_by_side.fit('flower', {**base, 'algorithm': 'fedavg', 'model': 'cnn'})


def test_a_form_of_pytorch_is_told_to_its_worker(bench, tmp_path):
    (tmp_path / 'pytorch_worker.py').write_text(
        f'import sys; sys.path.append({str(SCRIPT.parent / "peers")!r}); import serving; channel = serving.Channel();'
        'Fake = type("Fake", (), {"versions": {"form": channel.form}}); channel.serve(Fake())'
    )
    for peer, form in (('pytorch', ''), ('pytorch-channels-last', 'channels-last')):
        started = bench.side_by_side.Peer(peer, sys.executable, tmp_path / 'work.npz', tmp_path).ready()
        started.close()
        assert started.versions == {'form': form}
    args = bench.arguments(['--peer-python', 'pytorch=a', 'pytorch-vmap=b'])
    pythons = [bench.python_of(peer, args) for peer in ('pytorch', 'pytorch-vmap', 'pytorch-compile', 'pfl')]
    assert pythons == ['a', 'b', 'a', sys.executable]


def test_the_fastest_pytorch_has_a_column(bench):
    row = {
        'conv': 'native', 'chunk': '1', 'devices': 1, 'seconds_per_round': 1.0, 'median_seconds_per_round': 1.0,
        'samples_per_second': 1.0, 'model_flops_per_second': 1.0, 'share_of_matmul': 1.0, 'padded_work': 0.0,
        'compile_seconds': 1.0, 'memory_bytes': None, 'ratios': {'PyTorch': 4.0, 'PyTorch vmap': 2.0, 'Flower': 1.0},
    }  # fmt: skip
    work = bench.WORKLOADS['W1']._asdict()
    about = {'seconds_per_round': 1.0, 'median_seconds_per_round': 1.0, 'versions': {'torch': '1'}}
    result = {
        'workload': 'W1', **work, 'precision': 'float32', 'data': 'x', 'rounds': 1, 'model_flops_per_round': 1.0,
        'matmul_flops_per_second': 1.0, 'date': 'x', 'device': 'x', 'versions': {'jax': '1'}, 'peak_device_bytes': None,
        'peak_process_bytes': 0, 'rows': [row], 'peers': dict.fromkeys(row['ratios'], about),
    }  # fmt: skip
    lines = bench.results.markdown(result).splitlines()
    assert lines[2].endswith('| PyTorch / ours | PyTorch vmap / ours | Flower / ours | fastest PyTorch / ours |')
    assert lines[4].endswith('| 4.00 | 2.00 | 1.00 | 2.00 |')
    assert len({line.count('|') for line in lines[2:8]}) == 1
    assert lines[-1].endswith('jax 1; torch 1.')  # the same versions once


def test_w1_is_424_gflop(bench):
    args = bench.arguments([])
    work = bench.settle(args)
    clients, _ = bench.load(args, work)
    flops = bench.training_flops(args, work, clients)
    # 2 x multiply-adds of both convolutions, the dense layer and the head, forward and twice that backward
    by_hand = 3 * 2 * (32 * 32 * 75 * 32 + 16 * 16 * 800 * 64 + 4096 * 512 + 512 * 10)
    assert flops == by_hand
    assert round(flops * int(clients.size.sum()) / 1e9) == 424


@pytest.mark.parametrize(
    'options',
    [
        ['--workload', 'W4', '--clients', '3', '--cohort', '2', '--samples', '8'],
        ['--model', 'cnn', '--clients', '2', '--samples', '8'],
        ['--clients', '2', '--samples', '8'],
        pytest.param(['--workload', 'W3', '--clients', '2', '--samples', '8'], marks=pytest.mark.slow),
        pytest.param(
            ['--workload', 'W3', '--clients', '2', '--samples', '8', '--norm', 'group'], marks=pytest.mark.slow
        ),
    ],
    ids=['mlp', 'cnn', 'cnn_mcmahan', 'resnet20_etf_batch', 'resnet20_etf_group'],
)
def test_pytorch_computes_the_same_round(bench, tmp_path, options):
    pytest.importorskip('torch')
    serving, rounds = importlib.import_module('serving'), importlib.import_module('torch_rounds')
    args = bench.arguments([*options, '--batch-size', '8', '--torch-threads', '1'])  # full batches: no order
    work = bench.settle(args)._replace(epochs=2)
    row = bench.Row(args, work, bench.load(args, work)[0], None, None)
    bench.pack(args, work, row, tmp_path / 'work.npz')
    other = rounds.Loop(serving.load(tmp_path / 'work.npz'))
    begun = bench.side_by_side.named(row.state.server.variables)
    assert difference(begun, other.weights()) == 0
    report = row.round(jax.random.key(0))
    other.round(np.asarray(report.ids)[np.asarray(report.ids) < work.clients].tolist())
    moved = difference(begun, other.weights())
    assert moved > 1e-3
    assert difference(bench.side_by_side.named(row.state.server.variables), other.weights()) < 0.01 * moved


def difference(ours, theirs):
    assert set(ours) == set(theirs)
    return max(np.max(np.abs(ours[name] - theirs[name])) for name in ours)


TORCH_FORMS = ['pytorch', 'pytorch-channels-last', 'pytorch-compile', 'pytorch-vmap']
RESNETS = {'resnet20_etf_batch': 'batch', 'resnet20_etf_group': 'group'}


@pytest.mark.slow
@pytest.mark.parametrize('model', ['mlp', 'cnn', 'cnn_mcmahan', *RESNETS])
@pytest.mark.parametrize('peer', ['fedjax', 'flower', 'pfl', *TORCH_FORMS])
def test_peers_compute_the_same_rounds(bench, tmp_path, peer, model):
    # PEER_PYTHON='fedjax=/path/to/python pytorch=...' pytest -m slow tests/test_benchmarks.py
    given = os.environ.get('PEER_PYTHON', '').split()
    if not any(text.startswith(f'{peer.partition("-")[0]}=') for text in given):
        pytest.skip(f'no Python that has {peer} is named in PEER_PYTHON')
    sizes = ['--clients', '4', '--cohort', '3', '--samples', '8', '--batch-size', '8', '--epochs', '3']
    workload = ['--workload', 'W4' if model == 'mlp' else 'W1', '--model', model]
    if model in RESNETS:
        workload = ['--workload', 'W3', '--norm', RESNETS[model]]
        sizes[-1] = '1'  # more steps, and rounding turns ReLUs
    args = bench.arguments([*workload, *sizes, '--torch-threads', '1', '--compare', peer, '--peer-python', *given])
    work = bench.settle(args)
    row = bench.Row(args, work, bench.load(args, work)[0], None, None)
    if not bench.side_by_side.fit(peer, bench.pack(args, work, row, tmp_path / 'work.npz')):
        pytest.skip(f'{peer} has no such workload')
    begun = bench.side_by_side.named(row.state.server.variables)
    (other,) = bench.start_peers(args, work, row, tmp_path / 'work.npz')
    for r in range(2):
        report = row.round(jax.random.key(r))
        other.round([k for k in np.asarray(report.ids).tolist() if k < work.clients])
    other.ask(save=str(tmp_path / 'weights.npz'))
    other.close()
    ours, theirs = bench.side_by_side.named(row.state.server.variables), dict(np.load(tmp_path / 'weights.npz'))
    moved = difference(begun, theirs)
    assert moved > 1e-3
    # Compilers add in an order of their own, and deep networks amplify it.
    assert difference(ours, theirs) < (0.002 * moved if model in RESNETS else 5e-6 if 'compile' in peer else 1e-6)


@pytest.mark.parametrize(
    ('name', 'rows', 'beside'), [('dirichlet', 12, 'published'), ('longtail', 4, 'PM, heads tuned')]
)
def test_studies_are_made_into_tables_of_what_is_finished(name, rows, beside, tmp_path):
    known = study.Study.read(SCRIPT.parent / f'{name}.toml')
    assert (len(known.methods), len(known.runs)) == (rows, 3 * rows)
    for run in known.runs:
        assert (run.setting.clients, run.setting.cohort, run.setting.rounds, run.setting.model) == (20, 5, 60, 'cnn')
    run = known.runs[0]
    there = tmp_path / 'runs' / run.setting.name
    there.mkdir(parents=True)
    (there / 'config.json').write_text(json.dumps(run.setting.plain()))
    (there / 'summary.json').write_text(json.dumps({'rounds': 60, 'global_accuracy_last5': 0.125}))
    text = (report.write(known, tmp_path) / 'report.md').read_text()
    assert beside in text
    assert '| FedAvg | 12.5 |' in text
    assert '- FedAvg: seeds 1, 2' in text


@pytest.mark.slow
def test_digits_table_is_made_once_for_all_seeds_and_continued(bench, tmp_path, capsys):
    digits = importlib.import_module('digits')
    call = ['--rounds', '2', '--out', str(tmp_path), '--methods']
    made = digits.main([*call, 'solo'])
    runs = json.loads((tmp_path / 'solo.json').read_text())
    assert len({run['personal'] for run in runs['runs']}) == 3
    runs['runs'] = [{'personal': p, 'PM(V)': 0.5, 'rounds/s': s} for p, s in ((0.2, 1.0), (0.4, 3.0), (0.9, 2.0))]
    (tmp_path / 'solo.json').write_text(json.dumps(runs))
    table = digits.main([*call, 'solo', 'fedavg+etf'])  # the first is not run again
    first, second = table.splitlines()[2:]
    assert made.splitlines()[:2] == table.splitlines()[:2]
    assert first == '| solo |  | 50.0 ± 29.4 | 50.0 ± 0.0 | 2.00 ± 0.82 |'
    assert second.count('±') == 4
    assert table in capsys.readouterr().out
    assert (tmp_path / 'digits.md').read_text() == table
    with pytest.raises(ValueError, match='choose another --out'):
        digits.main([*call, 'solo', '--seeds', '0'])


@pytest.mark.slow
def test_digits_rows_have_their_own_seeds(bench, tmp_path, monkeypatch):
    digits = importlib.import_module('digits')
    monkeypatch.setitem(digits.ROWS, 'solo', digits.Row('solo', seeds=(4, 0)))
    call = ['--rounds', '1', '--methods', 'solo', '--out']

    def runs(out, *more):
        digits.main([*call, str(tmp_path / out), *more])
        known = json.loads((tmp_path / out / 'solo.json').read_text())
        return known['settings']['seeds'], [run['personal'] for run in known['runs']]

    seeds, own = runs('own')
    assert seeds == [4, 0]
    assert runs('given', '--seeds', '0') == ([0], own[1:])  # whatever seeds are drawn beside it
    assert len(digits.ROWS['moon'].seeds) == 15


def test_digits_seeds_share_one_compiled_round(bench):
    digits = importlib.import_module('digits')
    images = digits.data.load_dataset('digits')
    drawn = digits.scenes(images, [0, 1])
    alone = digits.scenes(images, [1])[1]
    wide, narrow = drawn[1].train, alone.train
    assert drawn[0].train.index.shape == wide.index.shape
    np.testing.assert_array_equal(wide.counts, narrow.counts)
    for k, size in enumerate(np.asarray(narrow.size)):
        np.testing.assert_array_equal(wide.index[k, :size], narrow.index[k, :size])


def test_a_shared_pool_makes_many_clients(bench):
    args = bench.arguments(['--workload', 'W4', '--pool', '50', '--clients', '3000', '--cohort', '5'])
    clients, source = bench.load(args, bench.settle(args))
    assert clients.index.shape == (3000, 20)
    assert clients.x.shape == (50, 8, 8, 1)
    assert '50 shared' in source
    labels = np.asarray(clients.y)[np.asarray(clients.index[2999])]
    np.testing.assert_array_equal(clients.counts[2999], np.bincount(labels, minlength=10))


def test_a_shared_pool_is_a_part_of_a_data_set(bench, monkeypatch):
    images = np.arange(300, dtype=np.uint8).repeat(3072).reshape(300, 32, 32, 3)
    found = argparse.Namespace(x_train=images, y_train=np.arange(300, dtype=np.int32) % 10)
    monkeypatch.setattr('fedjax_nc.data.load_dataset', lambda name, folder: found)
    given = ['--workload', 'W1', '--clients', '7', '--data-dir', 'somewhere', '--pool']
    for few, fits in (('100', True), ('301', False)):
        args = bench.arguments([*given, few])
        if fits:
            clients, source = bench.load(args, bench.settle(args))
            assert clients.x.shape == (100, 32, 32, 3)
            assert 'CIFAR-10, 100 shared' in source
        else:
            with pytest.raises(ValueError, match='--pool 301: there are 300 images'):
                bench.load(args, bench.settle(args))


@pytest.mark.slow
def test_scaling_counts_communication(bench, capsys):
    scaling = importlib.import_module('scaling')
    text = """
      %a = (f32[3,4]{1,0}, s32[]) all-reduce(%x, %y), channel_id=1
      %b = bf16[8]{0} all-gather-start(%z)
      %c = f32[100]{0} add(%a, %b)
    """
    assert scaling.collectives(text) == {'all-reduce': (1, 52), 'all-gather': (1, 16)}
    table = scaling.main(['--workload', 'W4', '--devices', '1'])
    assert [(row['scaling'], row['clients'], row['operations']) for row in table] == [
        ('strong', 100, 0),
        ('weak', 100, 0),
    ]
    assert table[0]['rows'] == 2000
    assert capsys.readouterr().out.count('\n| strong |') == 1


@pytest.mark.slow
def test_clients_of_the_last_round_have_the_models_that_they_keep(bench, tmp_path):
    cohort_models = importlib.import_module('cohort_models')
    setting = experiments.Setting(
        dataset='digits', model='mlp', pixels='half', crop=0, flip=False, algorithm='fedavg', clients=6, lr=0.05,
        participation=0.5, batch_size=16, partition='dirichlet_multiclass', alpha=0.3, tests='common',
        personal='latest', rounds=3,
    )  # fmt: skip
    args = argparse.Namespace(data_dir=None, images=None, last=2)
    result = cohort_models.measured(setting, args, tmp_path)
    assert [row['round'] for row in result['rounds']] == [2, 3]
    args.last = 1
    assert cohort_models.measured(setting, args, tmp_path)['rounds'] == result['rounds'][1:]
    for other in ({'images': 20}, {'last': 3}):
        with pytest.raises(ValueError, match='was measured by other --images or fewer rounds'):
            cohort_models.measured(setting, argparse.Namespace(**{**vars(args), **other}), tmp_path)
    k_train = jax.random.split(jax.random.key(setting.seed), 3)[1]
    ids = simulate.choose(simulate.cohort_key(jax.random.fold_in(k_train, 2)), 6, 3)
    for name, kind in (('PM(V)', 'present'), ('PM(L)', 'labels')):
        kept = np.array(result['of_all'][f'personal_accuracy_{kind}'], float)
        of_round = result['rounds'][-1]['clients'][name]
        np.testing.assert_allclose(sorted(of_round), sorted(kept[ids]), rtol=1e-5)
        np.testing.assert_allclose(result['rounds'][-1][name], np.mean(of_round), rtol=1e-5)
        np.testing.assert_allclose(result['all'][name], np.nanmean(kept), rtol=1e-5)
    chosen = cohort_models.choices(result)
    assert chosen['.. the round of the best GM'][0] == max(row['GM'] for row in result['rounds'])
    assert f'{100 * result["all"]["PM(V)"]:.1f}' in cohort_models.markdown({'FedAvg': result})


@pytest.mark.slow
def test_the_first_refits_are_those_of_the_table(bench, tmp_path, monkeypatch):
    refits = importlib.import_module('ccvr_refits')
    setting = experiments.Setting(
        dataset='digits', model='mlp', pixels='half', crop=0, flip=False, algorithm='ccvr', clients=4, lr=0.05,
        participation=1.0, batch_size=16, partition='dirichlet', alpha=0.1, tests='common', rounds=2, local_epochs=1,
    )  # fmt: skip
    for name, last in (('REAL', 'after the power transform'), ('VIRTUAL', 'no power transform')):
        ways = getattr(refits, name)
        monkeypatch.setattr(refits, name, {way: ways[way] for way in (next(iter(ways)), last)})
    measure, state = refits.trained(setting, argparse.Namespace(data_dir=None), tmp_path)
    result, key, recipe = refits.refitted(measure, state, 1), jax.random.fold_in(measure.k_tune, 0), measure.recipe
    algorithm, oracle = recipe.oracle
    begun = simulate.join(recipe.calibrate, key, state.server, 4)
    calibrated, _ = simulate.make_round(recipe.calibrate, chunk=1)(key, begun, measure.train)
    for kind, stage, after in (
        ('real', algorithm, oracle(key, state, measure.train)),
        ('virtual', recipe.calibrate, calibrated),
    ):
        first, _ = result[kind].values()
        assert first == pytest.approx([float(evaluate.accuracy(measure.table(stage, after)))], abs=0.005)
        assert f'| {100 * first[0]:.1f} |' in refits.markdown({'digits': {**result, **dict.fromkeys(
            ('rounds', 'keys', 'device', 'date'), '')}})  # fmt: skip
    assert result['trained'] == pytest.approx(float(evaluate.accuracy(measure.table(algorithm, state))))


def test_jpeg_once_more_changes_what_varies_and_keeps_places(bench):
    compress_again = importlib.import_module('compress_again')
    flat = np.broadcast_to(np.arange(0, 250, 50, dtype=np.uint8)[:, None, None, None], (5, 32, 32, 3))
    np.testing.assert_allclose(compress_again.again(flat).astype(int), flat, atol=1)
    across, down = np.meshgrid(np.linspace(0, 255, 32), np.linspace(0, 255, 32))
    smooth = np.stack([across, down, (across + down) / 2], -1)[None].astype(np.uint8)
    assert compress_again.changed(smooth, compress_again.again(smooth)) < 5
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    found = compress_again.again(noise)
    assert found.shape == noise.shape
    assert found.dtype == noise.dtype
    assert compress_again.changed(noise, found) > 30


def test_forms_of_convolution_are_told_apart_and_right(bench, monkeypatch, capsys):
    convolutions, called = importlib.import_module('convolutions'), []
    own = convolutions.libdnnl.available

    def spied(program, *arrays, calls):
        called.append(
            [name for name in ('fedjax_nc_convolution', 'onednn$') if name in program.lower(*arrays).as_text()]
        )
        return 1.0

    monkeypatch.setattr(convolutions, 'LAYERS', ((9, 16, 8, 3),))
    monkeypatch.setattr(convolutions, 'milliseconds', spied)
    convolutions.main(['--batch', '2'])
    rows = [line.split(' | ') for line in capsys.readouterr().out.splitlines() if ' 9, 16 to 8, 3 ' in line]
    assert [row[2] for row in rows] == list(convolutions.forms())
    assert all(0 < float(row[-1].strip(' |')) < 1e-6 for row in rows)
    assert called[:3] == [[]] * 3
    if convolutions.libdnnl.version():
        assert called[3:] == [['onednn$']] * 3 + [['fedjax_nc_convolution']] * 3
    assert convolutions.libdnnl.available is own


def test_convolutions_of_lanes_are_the_same_in_all_forms(bench, monkeypatch, capsys):
    convolutions = importlib.import_module('convolutions')
    rng = np.random.default_rng(0)
    for pads in (((1, 1), (1, 1)), ((0, 2), (2, 0)), ((1, 1), (0, 2))):
        where = convolutions.geometry(2, 8, 3, 5, 1)._replace(pads=pads)
        x, g, kernel = (
            rng.normal(size=(3, *shape)).astype('f') for shape in ((2, 8, 8, 3), (2, 8, 8, 5), where.kernel)
        )
        found = {
            name: [
                jax.jit(jax.vmap(functools.partial(step, geometry=where)))(*arrays)
                for step, arrays in zip(form[:3], ((x, kernel), (g, kernel), (x, g)), strict=True)
            ]
            for name, form in convolutions.beside(where).items()
        }
        assert list(found) == ['native', 'grouped', 'windows over 2', 'windows over 4', 'windows over 8']
        for several in found.values():
            for one, other in zip(several, found['native'], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(convolutions, 'LAYERS', ((8, 3, 4, 1), (8, 3, 4, 2)))
    convolutions.main(['--batch', '2', '--calls', '1', '--lanes', '1', '2'])
    told = [line.split(' | ') for line in capsys.readouterr().out.splitlines() if line.startswith(('| 1 ', '| 2 '))]
    assert [row[0].strip('| ') for row in told] == ['1'] * 7 + ['2'] * 7
    assert all(0 < float(row[-1].strip(' |')) < 1e-6 for row in told)
