"""Runs that are killed, started twice, or whose files rot: nothing is mixed up and nothing wrong is gone on from."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import toys

from fedjax_nc import _checkpoints, simulate
from fedjax_nc.algorithms import fedavg

ROOT = Path(__file__).parent.parent
PROGRAM = [sys.executable, str(ROOT / 'tests' / 'hostile_program.py')]
ROUNDS = 40


def rows(out, name):
    with (out / name).open(newline='') as file:
        found = list(csv.DictReader(file)) if name.endswith('csv') else [json.loads(line) for line in file]
    return [{k: float(v) for k, v in row.items() if k not in ('seconds', 'compile_seconds')} for row in found]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp('whole')
    subprocess.run([*PROGRAM, out, str(ROUNDS)], check=True, capture_output=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4))
def test_killed_at_any_time_a_run_ends_as_if_nothing_had_happened(whole, tmp_path, seed):
    """Forty kills each, all of them after the first round: most between a round and the end of its files."""
    rng, kills = np.random.default_rng(seed), 0
    out = tmp_path / '0'
    while kills < 40:
        with subprocess.Popen([*PROGRAM, out, str(ROUNDS)], stderr=subprocess.PIPE, text=True) as running:
            for line in running.stderr:
                if ', loss ' in line:
                    break
            time.sleep(rng.uniform(0, 1.5))
            alive = running.poll() is None
            running.kill()
            running.wait()
        kills += alive
        # The next one goes on, unless it is done.
        if not alive:
            assert running.returncode == 0, running.stderr
            agree(whole, out)
            out = tmp_path / str(kills)
    subprocess.run([*PROGRAM, out, str(ROUNDS)], check=True, capture_output=True)
    agree(whole, out)


def agree(whole, out):
    with np.load(whole / 'end.npz') as want, np.load(out / 'end.npz') as got:
        assert all(np.array_equal(want[name], got[name]) for name in want.files)
    for name in ('metrics.jsonl', 'metrics.csv'):
        assert rows(out, name) == rows(whole, name)


@pytest.mark.slow
def test_two_hundred_and_forty_flipped_bits_and_none_goes_unnoticed(tmp_path):
    algorithm = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    state = simulate.init(algorithm, toys.KEY, toys.ragged([30, 7, 60, 33]))
    files, history = _checkpoints.Files(tmp_path, {'algorithm': 'x'}), [{'round': 1, 'loss': 0.1234}, {'round': 2}]
    for round in (1, 2):
        files.save(round, state, toys.KEY, history[:round])
    rng, told = np.random.default_rng(0), {'refused': 0, 'harmless': 0}
    places = [path for path in (tmp_path / 'checkpoints' / '2').rglob('*') if path.is_file() and path.stat().st_size]
    for flip in range(240):
        path = sorted(places)[flip % len(places)]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            found, restored = files.read(2, state, toys.KEY)
        except (_checkpoints.DamagedError, _checkpoints.CheckpointError):
            told['refused'] += 1
        else:
            assert found == history
            assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(state)))
            told['harmless'] += 1
        path.write_bytes(good)
    assert told['refused'] > 50
    print(told)


@pytest.mark.slow
@pytest.mark.parametrize('resume', [False, True])
def test_of_ten_pairs_of_simultaneous_starts_each_leaves_one_run(tmp_path, resume):
    def start(out, seed, rounds):
        args = ['--dataset', 'digits', '--clients', '5', '--rounds', rounds, '--out', out, '--seed', seed]
        command = [sys.executable, 'examples/cifar.py', *map(str, args), *(['--resume'] if resume else [])]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    refused = 0
    for pair in range(10):
        out = tmp_path / str(pair)
        if resume:
            assert start(out, 0, 1).wait() == 0
        both = [start(out, 0 if resume else seed, 4) for seed in (0, 1)]
        told = [run.communicate()[1] for run in both]
        codes = [run.returncode for run in both]
        assert 0 in codes, told
        for code, text in zip(codes, told, strict=True):
            assert 'Traceback' not in text
            if code:
                assert 'in use by another run' in text or (not resume and 'already holds a run' in text)
                refused += 1
        seed = 0 if resume else codes.index(0)
        config, summary = (json.loads((out / f'{name}.json').read_text()) for name in ('config', 'summary'))
        assert (config['seed'], config['rounds'], summary['rounds']) == (seed, 4, 4)
        assert [row['round'] for row in rows(out, 'metrics.jsonl')] == [1, 2, 3, 4]
        assert rows(out, 'metrics.csv') == rows(out, 'metrics.jsonl')
        assert summary['global_accuracy'] == rows(out, 'metrics.csv')[-1]['accuracy']
    assert refused >= (5 if resume else 10)
