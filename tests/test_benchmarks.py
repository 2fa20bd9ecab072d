"""The benchmark script, and that its PyTorch loop does the same work."""

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / 'benchmarks' / 'rounds_per_second.py'
TORCH = importlib.util.find_spec('torch') is not None


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module('rounds_per_second')


def script(*args):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


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
    assert {'device', 'versions', 'pytorch_seconds_per_round'} <= set(result)
    numbers = ['seconds_per_round', 'model_flops_per_round', 'matmul_flops_per_second']
    numbers += ['pytorch_seconds_per_round'] if TORCH else []
    assert all(math.isfinite(result[name]) and result[name] > 0 for name in numbers)
    for row in result['rows']:
        per_round = row['samples_per_second'] * row['seconds_per_round']
        np.testing.assert_allclose(per_round, 4 * 20)
        assert row['compile_seconds'] > 0


def test_a_bad_argument_is_one_line():
    done = script('--cohort', 21)
    assert done.returncode != 0
    assert done.stdout == ''
    assert len(done.stderr.splitlines()) == 1
    assert 'error: --cohort 21 is more than the 20 clients' in done.stderr


@pytest.mark.parametrize('args', [['--rounds', '0'], ['--conv', 'fft'], ['--json']])
def test_malformed_options_are_one_line(bench, capsys, args):
    with pytest.raises(SystemExit, match='2'):
        bench.arguments(args)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_pytorch_the_comparison_is_left_out_with_one_line(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, 'find_spec', lambda name: None)
    args = bench.arguments(['--compare', 'pytorch'])
    bench.settle(args)
    assert args.compare is None
    assert capsys.readouterr().err == 'Not compared: PyTorch is not installed (pip install torch).\n'


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
def test_both_sides_compute_the_same_round(bench, options):
    pytest.importorskip('torch')
    loop = importlib.import_module('pytorch_loop')
    args = bench.arguments([*options, '--batch-size', '8', '--torch-threads', '1'])  # full batches: no order
    work = bench.settle(args)._replace(epochs=2)
    clients, _ = bench.load(args, work)
    row, other = bench.Row(args, work, clients, None, None), loop.build(args, work, clients, bench.SGD)
    start = row.state.server.variables
    other.load(start)
    assert other.difference(start) == 0
    begun = jax.tree.map(np.array, start)  # the state is donated
    report = row.round(jax.random.key(0))
    other.round(np.asarray(report.ids)[np.asarray(report.ids) < work.clients].tolist())
    moved = other.difference(begun)
    assert moved > 1e-3
    assert other.difference(row.state.server.variables) < 0.01 * moved


def test_accuracy_table_is_made_of_finished_and_resumed_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    accuracy = importlib.import_module('accuracy')
    call = ['--settings', 'longtail', '--methods', 'fedavg', 'fedloge', '--out', str(tmp_path), '--seeds']
    small = ['--more', '--dataset', 'digits', '--model', 'mlp', '--imbalance', '10', '--rounds', '2']
    accuracy.main([*call, '0', *small])
    summary = tmp_path / 'longtail' / 'fedloge' / '0' / 'summary.json'
    made = json.loads(summary.read_text())
    summary.write_text(json.dumps({**made, 'personal_accuracy': 0.125}))
    accuracy.main([*call, '0', *small])  # nothing is run again
    rows = (tmp_path / 'longtail.md').read_text().splitlines()
    assert rows[0].count('|') == rows[3].count('|') == 9
    assert rows[3].startswith(f'| fedloge | {100 * made["global_accuracy_last5"]:.1f} |')
    assert '| 12.5 |' in rows[3]
    assert rows[2].endswith('|  |  |')  # FedAvg has no realigned heads
    assert rows[3] in capsys.readouterr().out
    with pytest.raises(ValueError, match='other settings'):
        accuracy.main([*call, '0', *small, '--lr', '0.5'])
