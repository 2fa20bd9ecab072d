"""Scripts and README as a user meets them."""

import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest

from fedjax_nc.experiments import command, study

ROOT = Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()


def script(*args, timeout=300):
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def cifar(out, *args):
    return script('examples/cifar.py', '--dataset', 'digits', '--clients', 6, '--batch-size', 32, '--out', out, *args)


@pytest.mark.slow
def test_quickstart_prints_a_table_and_writes_its_pictures(tmp_path):
    done = script('examples/quickstart.py', '--seeds', 1, '--rounds', 3, '--out', tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r'general, last 3 rounds +\d+\.\d ± +\d+\.\d +\d+\.\d ± +\d+\.\d\n', done.stdout)
    for name in ('accuracy.png', 'clients.png'):
        assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')


def test_quickstart_says_early_where_it_cannot_write(tmp_path):
    (tmp_path / 'file').touch()
    done = script('examples/quickstart.py', '--out', tmp_path / 'file')
    assert done.returncode == 2
    assert 'cannot be made a directory' in done.stderr.splitlines()[-1]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp('run') / 'deep' / 'run'
    done = cifar(out, '--rounds', 6, '--participation', 0.5, '--eval-every', 2, '--tensorboard')
    assert done.returncode == 0, done.stderr
    return out


def test_cifar_writes_its_files(finished):
    assert {p.name for p in finished.iterdir()} == {
        'config.json', 'metrics.jsonl', 'metrics.csv', 'summary.json', 'accuracy.png', 'checkpoints', '.lock',
        'model.safetensors', 'seconds.json', 'tensorboard',
    }  # fmt: skip
    assert len(list((finished / 'tensorboard').glob('events*'))) == 1
    summary = json.loads((finished / 'summary.json').read_text())
    assert summary['algorithm'] == 'fedetf'
    assert summary['rounds'] == 6
    shares = ('global_accuracy', 'global_accuracy_last5', 'personal_accuracy', 'personal_accuracy_std',
              'padded_work_share')  # fmt: skip
    assert all(0 <= summary[name] <= 1 for name in shares)
    assert summary['rounds_per_second'] > 0
    assert summary['compile_seconds'] > 0
    rows = [json.loads(line) for line in (finished / 'metrics.jsonl').read_text().splitlines()]
    seen = [row['accuracy'] for row in rows if 'accuracy' in row]
    assert len(rows) == 6
    np.testing.assert_allclose(summary['global_accuracy_last5'], np.mean(seen[-5:]))
    assert json.loads((finished / 'config.json').read_text())['model'] == 'mlp'


@pytest.mark.slow
def test_cifar_resumes_to_the_uninterrupted_run(finished, tmp_path):
    settings = ('--participation', 0.5, '--eval-every', 2)
    assert cifar(tmp_path / 'a', '--rounds', 2, *settings).returncode == 0
    done = cifar(tmp_path / 'a', '--rounds', 6, *settings, '--resume')
    assert done.returncode == 0, done.stderr
    whole, resumed = (json.loads((d / 'summary.json').read_text()) for d in (finished, tmp_path / 'a'))
    for name in ('global_accuracy', 'global_accuracy_last5', 'personal_accuracy', 'personal_accuracy_std'):
        assert whole[name] == resumed[name]


@pytest.mark.parametrize(
    ('args', 'said'),
    [
        (['--alpha', '0'], 'argument --alpha: 0 is out of range'),
        (['--algorithm', 'fedfoo'], 'algorithm must be one of fedavg, '),
        (['--algorithm', 'fed.foo:algorithm'], "No module named 'fed': is its folder in PYTHONPATH?"),
        (['--algorithm', 'fednh', '--head', 'linear'], "fednh has no head 'linear', it takes prototypes"),
        (['--clients', '500'], '500 clients cannot have 10 examples each'),
        (['--model', 'cnn'], 'at least 18x18'),
        (['--dataset', 'cifar10', '--data-dir', 'NOWHERE/data'], 'cifar-10-binary.tar.gz'),
        (['--rounds', '2', '--lr', '1e30'], 'diverged in round 1'),
        (['--devices', '999'], '--devices 999: at most'),
    ],
)
def test_bad_arguments_end_with_one_line(tmp_path, args, said, monkeypatch, capsys):
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')  # no network, wherever this runs
    monkeypatch.setattr(signal, 'signal', lambda *_: None)
    monkeypatch.setattr(warnings, 'showwarning', warnings.showwarning)  # put back afterwards
    args = [a.replace('NOWHERE', str(tmp_path)) for a in args]
    argv = ['--dataset', 'digits', '--clients', '6', '--rounds', '2', '--out', str(tmp_path / 'out'), *args]
    with pytest.raises(SystemExit) as ended:
        command.script(lambda: command.main(argv), 'cifar.py')
    line = str(ended.value.code) if ended.value.code != 2 else capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    assert line.startswith('cifar.py: error: ')
    assert said in line


def test_a_problem_of_the_script_is_no_traceback(tmp_path):
    done = cifar(tmp_path, '--rounds', 2, '--model', 'cnn')
    assert done.returncode == 1
    assert re.fullmatch(r'cifar.py: error: .*at least 18x18.*\n', done.stderr)


def test_a_run_is_never_overwritten_nor_resumed_with_other_settings(finished):
    before = (finished / 'summary.json').read_bytes()
    assert 'already holds a run' in cifar(finished).stderr
    other = cifar(finished, '--resume', '--participation', 0.5, '--alpha', 7)
    assert 'alpha was 0.1 and is now 7.0' in other.stderr
    assert other.returncode != 0
    assert (finished / 'summary.json').read_bytes() == before


@pytest.mark.slow
def test_fewer_rounds_or_a_damaged_configuration_are_refused(finished, tmp_path):
    fewer = cifar(finished, '--resume', '--participation', 0.5, '--rounds', 2)
    assert 'already holds 6 rounds' in fewer.stderr
    assert json.loads((finished / 'config.json').read_text())['rounds'] == 6
    (tmp_path / 'config.json').write_text('[')
    assert 'config.json is damaged' in cifar(tmp_path, '--resume').stderr


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_how_to_go_on_and_does(tmp_path, number):
    args = ['examples/cifar.py', '--dataset', 'digits', '--clients', 6, '--rounds', 500, '--out', tmp_path]
    with subprocess.Popen(
        [sys.executable, *map(str, args)], cwd=ROOT, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        for line in running.stderr:  # until it is well under way
            if 'round 1 of 500, loss' in line:
                break
        running.send_signal(number)
        rest = running.stderr.read()
    assert running.returncode == 128 + number
    assert 'Traceback' not in rest
    last = rest.strip().splitlines()[-1]
    assert last.startswith('cifar.py: stopped; go on with: python examples/cifar.py')
    newest = max(int(path.name) for path in (tmp_path / 'checkpoints').iterdir() if path.name.isdigit())
    again = [str(newest + 2) if word == '500' else word for word in shlex.split(last.split('python ', 1)[1])]
    done = script(*again)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / 'summary.json').read_text())['rounds'] == newest + 2


@pytest.mark.slow
def test_two_runs_of_one_directory_do_not_mix(tmp_path):
    """One goes on as if it were alone, the other ends with one line."""
    args = ['--dataset', 'digits', '--clients', '6', '--rounds', '3', '--out', str(tmp_path)]
    pair = [
        subprocess.Popen(
            [sys.executable, 'examples/cifar.py', *args, '--seed', seed], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for seed in '01'
    ]
    told = [run.communicate()[1] for run in pair]
    codes = [run.returncode for run in pair]
    assert sorted(codes) == [0, 1], told
    loser, winner = told[codes.index(1)], codes.index(0)
    assert 'in use by another run' in loser or 'already holds a run' in loser
    assert json.loads((tmp_path / 'config.json').read_text())['seed'] == winner


def test_the_readme_is_short():
    assert len(README.splitlines()) < 160


@pytest.mark.slow
@pytest.mark.parametrize('frozen', [None, False, True], ids=['FedETF', 'FedAvg', 'frozen'])
def test_the_programs_of_the_readme_run(frozen):
    program, exchange = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
    lines = program.splitlines()
    if frozen is not None:  # as the README says it: the lines of algorithm and stage exchanged
        *before, algorithm, stage = exchange.replace('linear', 'etf' if frozen else 'linear').splitlines()
        lines = [algorithm if line.startswith('algorithm =') else line for line in lines]
        lines = [stage if line.startswith('stage =') else line for line in lines]
        at = lines.index(algorithm)
        lines[at:at] = before
    namespace: dict = {}
    exec('\n'.join(lines), namespace)
    assert namespace['general'] > 0.8
    assert namespace['personal'].mean > 0.9


def test_what_the_readme_links_is_there():
    for target in re.findall(r'\]\((?!http)([^)#]+)', README):
        assert (ROOT / target).exists(), target


def test_the_study_of_the_guide_is_one():
    (text, *_) = re.findall(r'```toml\n(.*?)```', (ROOT / 'docs/guides/experiments.md').read_text(), re.DOTALL)
    made = study.Study.of(tomllib.loads(text), 'guide')
    assert (len(made.runs), made.baseline, made.seeds) == (30, 'FedAvg', (0, 1, 2, 3, 4))


def test_ci_runs_the_test_command_of_the_readme():
    command = next(line for line in README.splitlines() if line.startswith('python3 -m venv') and 'pytest' in line)
    assert command in (ROOT / '.ci/run').read_text().splitlines()


def test_importing_the_package_is_light():
    check = (
        "import sys, fedjax_nc; heavy = ('tensorflow_datasets', 'tensorflow', 'matplotlib', 'sklearn', 'torch'); "
        'print([name for name in heavy if name in sys.modules])'
    )
    assert script('-c', check).stdout.strip() == '[]'


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    return importlib.import_module('cifar')


SMALL = ['--dataset', 'digits', '--clients', '6', '--rounds', '2', '--local-epochs', '1', '--out']


@pytest.mark.slow
def test_algorithm_head_loss_and_server_optimizer_compose_on_two_devices(run, tmp_path):
    choice = ['--algorithm', 'fedavg', '--head', 'etf', '--loss', 'balanced_softmax', '--server-optimizer', 'fedadam']
    done = script('examples/cifar.py', '--devices', 2, *SMALL, tmp_path / 'two', *choice, '--server-lr', 0.02)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / 'two' / 'summary.json').read_text())
    one = run.main([*SMALL, str(tmp_path / 'one'), *choice, '--server-lr', '0.02'])
    for name in ('global_accuracy', 'personal_accuracy', 'personal_accuracy_before'):
        assert abs(one[name] - two[name]) < 0.01


def test_a_method_without_a_generic_model_has_personal_accuracy_alone(run, tmp_path):
    summary = run.main([*SMALL, str(tmp_path), '--algorithm', 'solo'])
    assert 0.3 < summary['personal_accuracy'] <= 1
    assert not [name for name in summary if name.startswith('global') or 'before' in name]
    assert (tmp_path / 'accuracy.png').exists()
    assert 'accuracy_personal' in (tmp_path / 'metrics.jsonl').read_text()
