"""The measurements on accelerators: each row costs only itself, and whatever ends the script, the rest goes on."""

import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / 'benchmarks'
RESULT = {
    'workload': 'W1', 'precision': 'float32', 'data': 'random images', 'device': 'Toy',
    'versions': {'jax': '0', 'tf32': 'on'},
    'rows': [{
        'conv': 'native', 'chunk': '5', 'seconds_per_round': 0.5, 'median_seconds_per_round': 0.6,
        'samples_per_second': 8.0, 'model_flops_per_second': 1e9, 'share_of_matmul': 0.5, 'padded_work': 0.0,
        'compile_seconds': 1.0, 'memory_bytes': None, 'ratios': {'PyTorch': 12.0, 'PyTorch CUDA graphs': 2.5},
    }],
    'seconds_per_round': 0.5,
    'peers': {
        'PyTorch': {'seconds_per_round': 6.0, 'versions': {'torch': '0'}},
        'PyTorch CUDA graphs': {'seconds_per_round': 1.25, 'versions': {'torch': '0'}},
    },
}  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module('accelerator')


@pytest.fixture
def rows(script, monkeypatch):
    """Rows 'good', 'bad', 'slow', 'late' and 'best', whose commands are what their forms say."""

    def command(row, args, known, found):
        write = f'import json; json.dump({RESULT!r}, open({str(found)!r}, "w"))'
        if row.form == script.BEST:
            chosen = script.best(row.what, known)
            return chosen and [sys.executable, '-c', f'{write}; print({chosen!r})']
        kinds = {
            'good': write,
            'late': f'{write}; import sys; print("Not compared with PyTorch vmap: no", file=sys.stderr)',
            'bad': 'raise SystemExit("first\\n\\nout of memory")',
            'slow': 'import time; time.sleep(600)',
            'killed': 'import os; os.kill(os.getpid(), 9)',
        }
        return [sys.executable, '-c', kinds[row.form]]

    monkeypatch.setattr(script, 'command', command)
    monkeypatch.setattr(
        script, 'ROWS', tuple(script.Row('a', 'W1', form, '5', seconds=2 if form == 'slow' else 60)
                              for form in ('good', 'bad', 'slow', 'killed', 'late')),
    )  # fmt: skip
    return script


def known(out):
    return {row['form']: row for row in map(json.loads, (out / 'rows.jsonl').read_text().splitlines())}


def test_a_row_that_fails_costs_only_itself(rows, tmp_path, capsys):
    table = rows.main(['--out', str(tmp_path)])
    found = known(tmp_path)
    states = {form: row['state'] for form, row in found.items()}
    assert states == {'good': 'done', 'bad': 'failed', 'slow': 'too long', 'killed': 'failed', 'late': 'done'}
    assert found['bad']['why'] == 'out of memory'
    assert found['killed']['why'] == 'it ended with status -9'
    assert found['late']['notes'] == ['Not compared with PyTorch vmap: no']
    assert '- a W1 slow 5: too long, not done after 2 s' in table
    assert table.count('| W1 | native | 5 |') == 2
    assert (tmp_path / 'table.md').read_text() == table + '\n'
    said = capsys.readouterr()
    assert said.out == table + '\n'
    assert [line.split(':')[0] for line in said.err.splitlines()] == [f'a W1 {form} 5' for form in found]


def test_what_is_done_is_not_done_again(rows, tmp_path, capsys):
    call = ['--out', str(tmp_path)]
    rows.main(call)
    before = (tmp_path / 'rows.jsonl').read_text()
    capsys.readouterr()
    rows.main(call)
    rows.main([*call, '--table'])
    assert capsys.readouterr().err == ''
    assert (tmp_path / 'rows.jsonl').read_text() == before
    rows.main([*call, '--again'])
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ['bad', 'slow', 'killed']


@pytest.mark.slow
def test_time_that_is_over_is_no_fault_of_the_row(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, 'ROWS', [rows.Row('a', 'W1', form, '5', seconds=90) for form in ('good', 'slow', 'late')])
    monkeypatch.setattr(rows, 'WORTH', 1)
    args = rows.arguments(['--out', str(tmp_path)])
    args.minutes = 9 / 60  # of which 5 s are kept
    found = {}
    rows.carry_on(args, found)
    assert [row['state'] for row in found.values()] == ['done', 'cut']
    assert 'Rows left: 2, next "a W1 slow 5"' in rows.main(['--out', str(tmp_path), '--table'])
    rows.carry_on(args, found)  # now it comes first, and has all the time there is
    assert [row['state'] for row in found.values()] == ['done', 'too long']
    rows.carry_on(args, found)
    assert known(tmp_path)['late']['state'] == 'done'
    assert list(known(tmp_path)) == ['good', 'slow', 'late']


KILLED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells keep from what they start in the background
sys.path.insert(0, {folder!r})
import accelerator
accelerator.ROWS = [accelerator.Row('a', 'W1', form, '5') for form in ('good', 'slow')]
forms = {forms!r}
accelerator.command = lambda row, args, known, found: [sys.executable, '-c', forms[row.form], str(found)]
accelerator.main(['--out', {out!r}])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere a row outlives who is killed')
@pytest.mark.parametrize('sent', [signal.SIGKILL, signal.SIGINT])
def test_whoever_is_killed_takes_its_row_along(rows, tmp_path, sent):
    out, pid = tmp_path / 'out', tmp_path / 'pid'
    forms = {
        'good': f'import json, sys; json.dump({RESULT!r}, open(sys.argv[1], "w"))',
        'slow': f'import os, time; open({str(pid)!r}, "w").write(str(os.getpid())); time.sleep(600)',
    }
    program = KILLED.format(folder=str(BENCHMARKS), forms=forms, out=str(out))
    process = subprocess.Popen([sys.executable, '-c', program], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait(lambda: process.poll() is not None or (pid.exists() and pid.read_text()))
    process.send_signal(sent)
    process.wait(30)
    wait(lambda: not alive(int(pid.read_text())))
    assert {row['form']: row['state'] for row in known(out).values()} == {'good': 'done'}
    assert {path.name for path in out.iterdir()} == {'.lock', 'rows.jsonl'}  # nothing is half written
    assert 'next "a W1 bad 5"' in rows.main(['--out', str(out), '--table'])


def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    except (OSError, IndexError):
        return False


@pytest.mark.parametrize('wrong', ['0', '-3', 'nan', 'inf', 'long', '0.05'])
def test_a_call_without_time_is_refused(script, tmp_path, wrong, capsys):
    with pytest.raises(SystemExit):
        script.arguments(['--out', str(tmp_path), f'--minutes={wrong}'])
    assert f"'{wrong}' is not a number of minutes above 0.08" in capsys.readouterr().err


def test_only_one_at_a_time(rows, tmp_path):
    with rows._checkpoints.holding(tmp_path):
        call = [sys.executable, str(BENCHMARKS / 'accelerator.py'), '--out', str(tmp_path)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert 'is in use by another run' in done.stderr


@pytest.mark.parametrize(
    ('content', 'message'), [('{"row": ', 'is damaged'), ('{"row": "x", "tiny": true}', 'a trial')]
)
def test_what_cannot_be_gone_on_from_is_one_line(script, tmp_path, content, message):
    (tmp_path / 'rows.jsonl').write_text(content + '\n')
    with pytest.raises(ValueError, match=f'{message}.*choose another --out'):
        script.main(['--out', str(tmp_path)])
    assert (tmp_path / 'rows.jsonl').read_text() == content + '\n'


def test_rows_are_by_priority_and_have_names_of_their_own(script):
    assert len({row.name for row in script.ROWS}) == len(script.ROWS)
    parts = [row.part + row.what for row in script.ROWS]
    firsts = [parts.index(name) for name in ('aW1', 'bW1', 'aW3', 'bW3', 'cW3', 'dFedETF', 'dFedAvg')]
    assert firsts == sorted(firsts)
    chosen = script.wanted(script.arguments(['--out', 'x', '--part', 'a', 'd', '--workload', 'W3']))
    assert {row.part + row.what for row in chosen} == {'aW3', 'dFedETF', 'dFedAvg'}


def test_commands_are_those_of_the_benchmarks(script, tmp_path):
    args = script.arguments(['--out', str(tmp_path), '--data-dir', 'data', '--torch-python', 'py'])
    compare = next(row for row in script.ROWS if row.part == 'b')
    assert script.command(compare, args, {}, tmp_path) is None  # what is the best form is not known
    slow, fast = (script.Row('a', 'W1', form, '20').name for form in ('grouped', 'native'))
    found = {name: {'state': 'done', 'result': {'seconds_per_round': s}} for name, s in ((slow, 2.0), (fast, 1.0))}
    options = script.command(compare, args, found, tmp_path)[2:]
    assert options[:6] == ['--workload', 'W1', '--conv', 'native', '--chunk', '20']
    found |= {script.Row('a', 'W3', 'grouped', '10 4 2 1', '--rounds 2').name: found[fast]}
    told = script.command(next(r for r in script.ROWS if r.part == 'c'), args, found, tmp_path)
    assert ' --chunk 10 ' in ' '.join(told)
    assert ' --narrower 1 2 4 ' in ' '.join(told)
    profile_round = importlib.import_module('profile_round')
    for row in script.ROWS:
        args.tiny = row.part != 'd'
        if row.part != 'd':
            name, *options = script.command(row, args, found, tmp_path)[1:]
            parsed = {'rounds_per_second.py': script.rounds_per_second, 'profile_round.py': profile_round}
            script.rounds_per_second.settle(parsed[Path(name).name].arguments(options))
    args.tiny = False
    table = script.command(next(row for row in script.ROWS if row.part == 'd'), args, found, tmp_path)
    assert table[3:9] == ['run', 'fedetf_1', '--scenes', script.SCENE, '--rows', 'FedETF']
    assert table[-5:] == ['--clients-per-chunk', '10', '4', '2', '1']


def test_flags_of_a_row_are_added_to_those_that_are_set(script, monkeypatch):
    monkeypatch.delenv('XLA_FLAGS', raising=False)
    graphs, apart = (next(r for r in script.ROWS if r.part == part and r.flags) for part in 'ac')
    assert script.own(script.Row('a', 'W1', 'grouped', '4')) == {}
    assert script.own(graphs) == {'XLA_FLAGS': graphs.flags}
    assert graphs.flags.endswith(',CONVOLUTION')
    monkeypatch.setenv('XLA_FLAGS', '--one')
    assert script.own(apart) == {'XLA_FLAGS': '--one --xla_gpu_enable_command_buffer='}
    fastest = {row.name: {'state': 'done', 'result': {'seconds_per_round': 1.0}} for row in (graphs,)}
    assert script.best('W3', fastest) is None  # a form, not what is set beside it


def test_the_reason_of_a_failure_is_the_error_and_not_what_xla_says_after_it(script, tmp_path):
    args = script.arguments(['--out', str(tmp_path)])
    said = 'jax.errors.JaxRuntimeError: INTERNAL: out of registers\\nexternal/xla/status.cc:146'
    call = [sys.executable, '-c', f'import sys; print("{said}", file=sys.stderr); sys.exit(1)']
    record = script.measure(script.Row('a', 'W1'), args, call, tmp_path / 'found', 60.0, True)
    assert record['why'] == 'jax.errors.JaxRuntimeError: INTERNAL: out of registers'


def test_goals_are_told(script):
    record = {
        'row': 'b',
        'part': 'b',
        'what': 'W1',
        'state': 'done',
        'notes': [],
        'date': '2026-01-01',
        'result': RESULT,
    }
    told = script.accelerator_table.markdown([record], [], 'x')
    assert 'W1, float32, TF32 on: 12.00 times as fast as eager PyTorch; goal 10, reached.' in told
    assert '2.50 times as fast as the fastest PyTorch, PyTorch CUDA graphs; goal 3, missed.' in told
    assert '2026-01-01, Toy. jax 0, tf32 on; torch 0.' in told
    elsewhere = record | {'result': RESULT | {'device': 'Other'}}
    assert 'compare within a row only' in script.accelerator_table.markdown([record, elsewhere], [], 'x')


def test_a_run_that_diverges_is_a_row_that_failed(script, tmp_path):
    """What it leaves has no rounds and no versions, which the table shows of others."""
    args = script.arguments(['--out', str(tmp_path), '--tiny'])
    (tmp_path / 'tiny.toml').write_text(script.TINY_STUDY)
    row = next(row for row in script.ROWS if row.part == 'd')
    run = script.run_of(row, args)
    folder = script.runner.where(run, tmp_path)
    folder.mkdir(parents=True)
    script.runner.diverged(run, tmp_path, ValueError('training diverged in round 3'))
    assert script.runner.summary(run, tmp_path)  # it is done, and will not be run again
    call = [sys.executable, '-c', 'import sys; print("FedETF: diverged", file=sys.stderr)']
    record = script.measure(row, args, call, tmp_path / 'found', 60.0, True)
    assert (record['state'], record['why']) == ('failed', 'FedETF: diverged')
    assert '- d FedETF: failed, FedETF: diverged' in script.accelerator_table.markdown([record], [], 'x')


LENT = (
    'jax',
    'jaxlib',
    'flax',
    'optax',
    'chex',
    'orbax-checkpoint',
    'filelock',
    'safetensors',
    'tqdm',
    'numpy',
    'scipy',
)
"""What the machines have on which it is to run."""


@pytest.mark.slow
def test_it_needs_no_more_than_it_says(tmp_path):
    """In a process that cannot import what else the project names."""
    project = tomllib.loads((BENCHMARKS.parent / 'pyproject.toml').read_text())['project']
    extras = {k: v for k, v in project['optional-dependencies'].items() if k not in ('docs', 'release', 'test')}
    named = [*project['dependencies'], *(line for lines in extras.values() for line in lines)]
    others = {re.split(r'[^\w.-]', line)[0] for line in named} - {*LENT, 'fedjax_nc'}
    tops = importlib.metadata.packages_distributions()
    spelled = {name.lower().replace('_', '-') for name in others}
    barred = [top for top, names in tops.items() if spelled & {name.lower().replace('_', '-') for name in names}]
    assert {'tomli_w', 'tensorflow_datasets', 'matplotlib'} <= set(barred)
    study = ['run', 'fedetf_1', '--rows', 'FedETF', '--seeds', '0', '--out', str(tmp_path), '--data-dir', 'nowhere']
    for module, given in (
        ('accelerator', ['--out', str(tmp_path), '--table']),
        ('rounds_per_second', ['--help']),
        ('profile_round', ['--help']),
        ('fedjax_nc.experiments', study),
    ):
        program = (
            f'import runpy, sys\nsys.modules |= dict.fromkeys({barred!r})\n'
            f'sys.path.insert(0, {str(BENCHMARKS)!r})\n'
            f'sys.argv[1:] = {given!r}\n'
            f"runpy.run_module({module!r}, run_name='__main__')\n"
        )
        done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
        assert 'ModuleNotFoundError' not in done.stderr, done.stderr
        if module == 'fedjax_nc.experiments':
            assert 'cifar-10-binary.tar.gz' in done.stderr  # it wants the data, and no package
        else:
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_trial_of_table_1(script, tmp_path):
    pytest.importorskip('sklearn')
    table = script.main(['--out', str(tmp_path), '--tiny', '--part', 'd'])
    assert '| FedETF |' in table
    assert '| FedAvg |' in table
    assert not [row for row in map(json.loads, (tmp_path / 'rows.jsonl').read_text().splitlines()) if row['why']]
