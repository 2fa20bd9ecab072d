"""`python -m fedjax_nc.experiments` as a user meets it: what it prints, and that what goes wrong ends in one line."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import warnings

import pytest

from fedjax_nc.experiments import Setting, command, pipeline, study
from fedjax_nc.experiments import __main__ as shell

FRAMES = """
title = "Frames"
kind = "geometry"
seeds = [0, 1]
metrics = {cosine = "NAME", variance = "norm_var"}
setting = {dim = 8, classes = 4, steps = 3, solver = "gram"}
methods.half = {sparsity = 0.5}
methods.none = {sparsity = 0.0}
[published.half]
"" = [[0.25, 0.01], nan]
[scales.small]
about = "one of them"
minutes = 0.5
methods = ["none"]
"""


@pytest.fixture
def frames(tmp_path):
    from fedjax_nc import frames

    path = tmp_path / 'frames.toml'
    path.write_text(FRAMES.replace('NAME', frames.FrameQuality._fields[0]))
    return path


@pytest.fixture
def ended(monkeypatch, capsys):
    """What `program` says when it does not come to its end."""
    monkeypatch.setattr(signal, 'signal', lambda *_: None)
    monkeypatch.setattr(warnings, 'showwarning', warnings.showwarning)

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['fedjax-nc', *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            shell.program()
        said = capsys.readouterr().err
        return str(caught.value.code) if caught.value.code not in (1, 2) else said.strip()

    return run


def test_list_has_a_line_for_every_published_table(capsys):
    shell.main(['list'])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == study.tables()
    assert {'ccvr_1', 'fedetf_1', 'fedloge_1', 'fednh_1', 'gmv_1'} <= set(study.tables())
    nh = next(line for line in lines if line.startswith('fednh_1 '))
    assert '10 rows' in nh
    assert 'full 180 runs of ' in nh  # 10 methods, 6 scenes, 3 seeds
    assert 'reduced 9 runs' in nh
    assert 'full 4 runs of ' in next(line for line in lines if line.startswith('gmv_6 '))


def test_show_tells_settings_and_published_numbers(capsys):
    shell.main(['show', 'fednh_1', '--rows', 'FedNH', 'FedAvg'])
    out = capsys.readouterr().out
    common = out.split('All runs:\n')[1].splitlines()[0]
    assert 'clients = 100' in common
    assert 'algorithm' not in common
    assert '  FedNH | CIFAR-10, Dir(0.3): ' in out
    assert '  FedNH | CIFAR-10, Dir(0.3): 69.0 ± 2.5 | 65.0 ± 1.2 | 84.6 ± 2.1' in out
    assert 'FedROD |' not in out
    assert 'not run' not in out
    assert 'Other scales: reduced' in out
    shell.main(['show', 'gmv_6'])
    assert 'model = mlpnet' in capsys.readouterr().out


def test_run_goes_on_and_report_tells_it_again(frames, tmp_path, capsys):
    out = ['--out', str(tmp_path / 'out')]
    shell.main(['run', str(frames), '--seeds', '1', *out])
    first = capsys.readouterr()
    assert 'frames: 2 of 2 runs to do' in first.err
    shell.main(['run', str(frames), '--rows', 'none', *out])
    second = capsys.readouterr()
    assert 'frames: 1 of 2 runs to do' in second.err
    assert '| half |' in second.out  # the report is of all that is finished
    kept = ['--keep', str(tmp_path / 'kept')]
    shell.main(['run', str(frames), '--rows', 'none', *out, *kept])
    assert '| half |' in capsys.readouterr().out  # and so is what is kept
    shell.main(['report', str(frames), '--seeds', '1', *out, *kept])
    assert capsys.readouterr().out.endswith(f'written to {tmp_path / "kept" / "frames-part"}\n')
    shell.main(['report', str(frames), *out])
    told = capsys.readouterr()
    assert told.err == ''
    assert '# Frames' in told.out
    assert '- half: seeds 0\n' in told.out
    assert '0.25 ± 0.01' in told.out
    assert told.out.endswith(f'written to {tmp_path / "out" / "frames"}\n')
    assert (tmp_path / 'out' / 'frames' / 'report.md').read_text() in told.out
    shell.main(['run', str(frames), '--scale', 'small', *out])
    assert 'frames: 0 of 2 runs to do' in capsys.readouterr().err


def test_runs_of_a_study_may_be_tuned(tmp_path, monkeypatch):
    asked = []

    def run(setting, out, **how):
        asked.append(how['tune'])
        raise ValueError('enough')

    monkeypatch.setattr(pipeline, 'run', run)
    study = tmp_path / 'two.json'
    said = {'title': 'Two', 'metrics': {'a': 'global_accuracy'}, 'seeds': [0, 1], 'setting': {'dataset': 'digits'}}
    study.write_text(json.dumps({**said, 'methods': {'FedAvg': {'algorithm': 'fedavg'}}}))
    for flags in ([], ['--tune']):
        with pytest.raises(ValueError, match='enough'):
            shell.main(['run', str(study), '--one-by-one', '--out', str(tmp_path / 'out'), *flags])
    assert asked == [False, False, True, True]  # both runs, each time


def test_results_are_copied_without_checkpoints(frames, tmp_path, capsys):
    shell.main(['run', str(frames), '--out', str(tmp_path / 'out'), '--keep', str(tmp_path / 'kept')])
    shutil.rmtree(tmp_path / 'out')
    first = capsys.readouterr().out
    assert first.endswith(f'written to {tmp_path / "kept" / "frames"}\n')
    shell.main(['report', str(frames), '--out', str(tmp_path / 'kept')])
    assert capsys.readouterr().out == first
    kept = {path.name for path in (tmp_path / 'kept' / 'runs').rglob('*') if path.is_file()}
    assert kept == {'config.json', 'summary.json'}


@pytest.mark.parametrize(
    ('args', 'said'),
    [
        ([], 'arguments are required'),
        (['dance'], 'invalid choice'),
        (['show', 'fednh_99'], 'neither a study'),
        (['show', 'none.toml'], 'there is no file none.toml'),
        (['run', 'FILE', '--rows', 'FedFoo'], 'no methods FedFoo; there are half, none'),
        (['run', 'FILE', '--scenes', 'here'], 'no scenes here'),
        (['run', 'FILE', '--scale', 'tiny'], "frames.toml: there is no scale 'tiny', only full and small"),
        (['run', 'FILE', '--seeds', '-1'], 'out of range'),
        (['run', 'FILE', '--seeds', 'x'], 'not a whole number'),
        (['report', 'FILE', '--target', '101'], 'out of range'),
        (['report', 'FILE', '--seeds', '9', '--out', 'OUT'], 'no run of frames is finished'),
        (['run', 'FILE', '--baseline', 'FedFoo'], 'no methods FedFoo; there are half, none'),
        (['report', 'FILE'], 'no run of frames is finished'),
        (['run', 'WRONG'], 'wrong.toml: '),
        (['run', 'LOST', '--out', 'OUT'], 'lost.npz is not there'),
    ],
)
def test_what_goes_wrong_ends_in_one_line(args, said, frames, tmp_path, ended):
    (tmp_path / 'wrong.toml').write_text('title = ')
    lost = {
        'title': 'Lost', 'metrics': {'a': 'global_accuracy'}, 'seeds': [0, 1],
        'setting': {'dataset': 'lost.npz'}, 'methods': {'m': {'algorithm': 'fedavg'}},
    }  # fmt: skip
    (tmp_path / 'lost.json').write_text(json.dumps(lost))
    paths = {
        'FILE': frames, 'WRONG': tmp_path / 'wrong.toml', 'LOST': tmp_path / 'lost.json', 'OUT': tmp_path / 'out',
    }  # fmt: skip
    if args and args[0] != 'show' and '--out' not in args:
        args = [*args, *(('--out', 'OUT') if args[0] in ('run', 'report') else ())]
    line = ended(*[paths.get(word, word) for word in args]).splitlines()[-1:]
    assert line, 'nothing was said'
    assert line[0].startswith('fedjax-nc')
    assert 'error: ' in line[0]
    assert said in line[0]


def test_as_a_program(tmp_path):
    """The module and the console script are one."""
    done = subprocess.run(
        [sys.executable, '-m', 'fedjax_nc.experiments', 'show', 'no_such_table'],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ''
    assert done.stderr.startswith('fedjax_nc.experiments: error: no_such_table is neither')
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_console_script_finds_methods_in_the_current_folder(tmp_path):
    (tmp_path / 'fedjax-nc').write_text('from fedjax_nc.experiments.__main__ import program\nprogram()\n')
    (tmp_path / 'here').mkdir()
    (tmp_path / 'here' / 'mymethod.py').write_text('from fedjax_nc.algorithms.fedavg import algorithm\n')
    (tmp_path / 'here' / 'mine.toml').write_text(
        'title = "Mine"\nmetrics = {general = "global_accuracy"}\nsetting = {dataset = "digits"}\n'
        'methods = {Mine = {algorithm = "mymethod:algorithm"}}\n'
    )
    done = [
        subprocess.run(
            [sys.executable, str(tmp_path / 'fedjax-nc'), 'show', name],
            capture_output=True, text=True, check=False, cwd=tmp_path / 'here',
        )
        for name in ('mine.toml', 'yours')
    ]  # fmt: skip
    assert 'algorithm = mymethod:algorithm' in done[0].stdout, done[0].stderr
    assert done[1].stderr.startswith('fedjax-nc: error: yours is neither')


def test_the_console_script_is_that_program():
    from importlib.metadata import entry_points

    named = [entry for entry in entry_points(group='console_scripts') if entry.name == 'fedjax-nc']
    if not named:
        pytest.skip('the library is not installed')
    assert named[0].load() is shell.program
    assert command.Parser(prog='x').prog == 'x'


def test_what_a_setting_says_has_a_flag_of_its_name():
    flags = {*vars(command.arguments([], 'cifar.py', ''))}
    rare = {'pixels', 'crop_mode', 'personal_momentum'}  # by --setting alone
    assert {field.name for field in dataclasses.fields(Setting)} - flags == rare
    said = ['--personal', 'latest', '--eval-last', '2', '--server-optimizer', 'fedavgm', '--server-momentum', '0.5']
    setting = command.setting_of(command.arguments(['--dataset', 'digits', *said], 'cifar.py', ''))
    assert (setting.personal, setting.eval_last, setting.server_momentum) == ('latest', 2, 0.5)
