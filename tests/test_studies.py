"""Studies: what a file says, what is run of it, and that seeds trained together are the seeds alone."""

import contextlib
import copy
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fedjax_nc import _checkpoints, frames, training
from fedjax_nc.experiments import Setting, geometry, pipeline, report, runner, scene, seeds, study
from fedjax_nc.experiments import __main__ as shell
from fedjax_nc.experiments.study import Study

TINY = {'dataset': 'digits', 'clients': 4, 'rounds': 2, 'local_epochs': 1, 'max_examples': 300}
PLAIN = {
    'title': 'Two methods',
    'baseline': 'FedAvg',
    'seeds': [0, 1],
    'metrics': {'general': 'global_accuracy_last5', 'personal': 'personal_accuracy'},
    'setting': TINY,
    'methods': {'FedAvg': {'algorithm': 'fedavg'}, 'FedProx': {'algorithm': 'fedprox', 'options': {'mu': 0.5}}},
    'scenes': {'skewed': {'alpha': 0.1}, 'even': {'partition': 'iid'}},
    'published': {'FedAvg': {'skewed': [[66.4, 3.1], math.nan], 'even': [70, [80, 1]]}},
    'scales': {'small': {'about': 'less', 'minutes': 4, 'methods': ['FedProx'], 'setting': {'rounds': 1}}},
}
FRAMES = {
    'title': 'Frames',
    'kind': 'geometry',
    'seeds': [0, 1],
    'metrics': {'spread': 'gap'},
    'setting': {'dim': 8, 'classes': 4, 'steps': 3, 'solver': 'gram'},
    'methods': {'half': {'sparsity': 0.5}, 'none': {'sparsity': 0.0}},
}


def plain(**changes):
    return {**copy.deepcopy(PLAIN), **changes}


def put(folder, content, name='mine'):
    path = folder / f'{name}.json'
    path.write_text(json.dumps(content))
    return path


class TestStudy:
    def test_the_example_of_the_docstring_is_one(self, tmp_path):
        text = textwrap.dedent(re.search(r'Its parts:\n\n(.*?)\n\nOptions of methods', study.__doc__, re.DOTALL)[1])
        (tmp_path / 'example.toml').write_text(text)
        full = Study.read(tmp_path / 'example.toml')
        assert (full.name, full.baseline, full.seeds) == ('example', 'FedAvg', (0, 1, 2))
        assert (full.methods, full.scenes) == (('FedAvg', 'FedNH'), ('Dirichlet(0.1)',))
        assert [(run.method, run.seed) for run in full.runs] == [(m, s) for s in (0, 1, 2) for m in full.methods]
        assert {run.setting.alpha for run in full.runs} == {0.1}
        assert full.metric('FedAvg', 'general') == 'global_accuracy_last5'
        assert full.metric('FedNH', 'general') == 'global_accuracy'
        assert full.published == {('FedAvg', 'Dirichlet(0.1)'): ((66.4, 3.1),)}
        small = Study.read(tmp_path / 'example.toml', 'reduced')
        assert [run.setting for run in small.runs] == [
            Setting(dataset='digits', algorithm='fedavg', alpha=0.1, rounds=20, seed=seed) for seed in (0, 1, 2)
        ]
        assert small.minutes == 4

    def test_later_parts_come_on_top_and_options_are_merged_by_name(self):
        said = plain(
            setting={
                **TINY,
                'lr': 0.1,
                'momentum': 0.1,
                'clip': 0.1,
                'alpha': 0.1,
                'options': {'rho': 0.1, 'scale': 1.0},
            },
            scenes={'s': {'momentum': 0.2, 'clip': 0.2, 'alpha': 0.2, 'options': {'scale': 2.0, 'init': 'auto'}}},
            methods={
                'm': {
                    'algorithm': 'fednh',
                    'clip': 0.3,
                    'alpha': 0.3,
                    'options': {'init': 'orthogonal', 'weigh': 'counts'},
                }
            },
            scales={'last': {'setting': {'alpha': 0.4, 'options': {'weigh': 'holders'}}}},
            baseline='m',
            published={},
        )
        (run,) = Study.of(said, 'x', 'last').some(seeds=[7]).runs
        setting = run.setting
        assert (setting.lr, setting.momentum, setting.clip, setting.alpha) == (0.1, 0.2, 0.3, 0.4)
        assert setting.options == {'rho': 0.1, 'scale': 2.0, 'init': 'orthogonal', 'weigh': 'holders'}
        assert setting.seed == run.seed == 7

    def test_a_scene_may_change_a_single_method(self):
        own = {'FedProx': {'model': 'mlpnet', 'options': {'mu': 0.25}}}
        said = plain(scenes={'even': {'partition': 'iid', 'methods': own}, 'skewed': {}}, published={}, scales={})
        runs = {(run.method, run.scene): run.setting for run in Study.of(said, 'x').some(seeds=[0]).runs}
        assert (runs['FedProx', 'even'].model, runs['FedProx', 'even'].options) == ('mlpnet', {'mu': 0.25})
        assert runs['FedAvg', 'even'].model == runs['FedProx', 'skewed'].model == 'mlp'
        assert runs['FedProx', 'skewed'].options != {'mu': 0.25}
        for wrong, message in (
            ({'FedFoo': {}}, 'the methods of scene even has no FedFoo'),
            ({'FedProx': {'seed': 1}}, "no 'seed'"),
            ({'FedProx': {'unavailable': 'lost'}}, "scenes.even.methods.FedProx cannot have 'unavailable'"),
        ):
            with pytest.raises(ValueError, match=message):
                Study.of(plain(scenes={'even': {'methods': wrong}}, published={}, scales={}), 'x')
        own = {'FedAvg': {'algorithm': 'fedavg', 'methods': {}}}
        with pytest.raises(ValueError, match=r"methods\.FedAvg cannot have 'methods'"):
            Study.of(plain(methods=own, published={}, scales={}), 'x')

    def test_a_scale_may_call_a_scene_by_what_it_is_run_on(self):
        said = plain(scales={'small': {'scenes': {'even': 'digits (print: faces)'}, 'setting': {'max_examples': 200}}})
        full, small = Study.of(said, 'x'), Study.of(said, 'x', 'small')
        assert small.scenes == ('digits (print: faces)',)
        assert [run.label.replace('digits (print: faces)', 'even') for run in small.runs] == [
            run.label for run in full.some(scenes=['even']).runs
        ]
        assert {run.setting.partition for run in small.runs} == {'iid'}
        assert small.published['FedAvg', 'digits (print: faces)'] == full.published['FedAvg', 'even']
        assert [run.scene for run in small.some(scenes=['digits (print: faces)'], seeds=[0]).runs] == [
            *small.scenes
        ] * 2

    def test_a_scene_may_take_the_name_of_one_that_is_left_out(self):
        said = plain(scales={'small': {'scenes': {'even': 'skewed'}}})
        full, small = Study.of(said, 'x'), Study.of(said, 'x', 'small')
        assert small.published == {('FedAvg', 'skewed'): full.published['FedAvg', 'even']}

    def test_json_and_toml_say_the_same(self, tmp_path):
        (tmp_path / 'mine.toml').write_text("""
            title = "Two methods"
            baseline = "FedAvg"
            seeds = [0, 1]
            metrics = {general = "global_accuracy_last5", personal = "personal_accuracy"}
            setting = {dataset = "digits", clients = 4, rounds = 2, local_epochs = 1, max_examples = 300}
            [methods]
            FedAvg = {algorithm = "fedavg"}
            FedProx = {algorithm = "fedprox", options = {mu = 0.5}}
            [scenes]
            skewed = {alpha = 0.1}
            even = {partition = "iid"}
            [published.FedAvg]
            skewed = [[66.4, 3.1], nan]
            even = [70, [80, 1]]
            [scales.small]
            about = "less"
            minutes = 4
            methods = ["FedProx"]
            setting = {rounds = 1}
            """)
        for scale in ('full', 'small'):
            one, two = Study.read(tmp_path / 'mine.toml', scale), Study.read(put(tmp_path, PLAIN), scale)
            for field in dataclasses.fields(Study):
                a, b = (getattr(known, field.name) for known in (one, two))
                assert repr(a) == repr(b) if field.name in ('published', 'minutes') else a == b  # NaN

    def test_runs_go_seed_by_seed_and_scenes_that_cannot_be_have_none(self):
        said = plain()
        said['scenes']['even']['unavailable'] = 'the data are lost'
        known = Study.of(said, 'x')
        assert [(r.seed, r.scene, r.method) for r in known.runs] == [
            (seed, 'skewed', method) for seed in (0, 1) for method in ('FedAvg', 'FedProx')
        ]
        assert known.unavailable == {'even': 'the data are lost'}
        assert known.scenes == ('skewed', 'even')

    def test_numbers_that_were_published(self):
        found = Study.of(PLAIN, 'x').published
        assert set(found) == {('FedAvg', 'skewed'), ('FedAvg', 'even')}
        np.testing.assert_equal(found['FedAvg', 'skewed'], [[66.4, 3.1], [math.nan, math.nan]])
        np.testing.assert_equal(found['FedAvg', 'even'], [[70, math.nan], [80, 1]])

    def test_some_of_it(self):
        whole = Study.of(PLAIN, 'x')
        part = whole.some(['FedProx'], ['even'], [5, np.int64(3), 5])
        assert [(r.method, r.scene, r.seed, r.setting.seed) for r in part.runs] == [
            ('FedProx', 'even', 5, 5), ('FedProx', 'even', 3, 3),
        ]  # fmt: skip
        assert (part.methods, part.scenes, part.seeds) == (('FedProx',), ('even',), (5, 3))
        assert {r.setting.partition for r in part.runs} == {'iid'}
        assert whole.some() == whole
        assert whole.some(['FedProx', 'FedAvg']).methods == ('FedAvg', 'FedProx')
        for names, said in (
            ({'methods': []}, 'methods name none'),
            ({'seeds': []}, 'seeds name none'),
            ({'seeds': ['5']}, 'each of the seeds must be a whole number'),
        ):
            with pytest.raises(ValueError, match=said):
                whole.some(**names)
        for names in ({'methods': ['FedFoo']}, {'scenes': ['FedFoo']}):
            with pytest.raises(ValueError, match=r'no (methods|scenes) FedFoo; there are'):
                whole.some(**names)

    @pytest.mark.parametrize(
        ('wrong', 'said'),
        [
            ({'tittle': 'x'}, 'has no tittle; there are title'),
            ({'title': ''}, "needs 'title'"),
            ({'metrics': {}}, "needs 'metrics'"),
            ({'methods': {}}, "needs 'methods'"),
            ({'methods': 3}, 'methods cannot be 3'),
            ({'methods': {'FedAvg': 3}}, 'methods.FedAvg must be a table'),
            ({'setting': 3}, 'setting cannot be 3'),
            ({'kind': 'survey'}, 'kind must be one of training, geometry'),
            ({'setting': {'learning_rate': 1}}, 'FedAvg, skewed, seed 0: no setting is called learning_rate'),
            ({'setting': {'dataset': 'imagenet'}}, 'FedAvg, skewed, seed 0: dataset must be one of'),
            ({'methods': {'FedAvg': {'algorithm': 'fedfoo'}}}, 'algorithm must be one of'),
            ({'methods': {'FedAvg': {'algorithm': 'fedavg', 'metrics': {'x': 'y'}}}}, 'metrics of FedAvg has no x'),
            ({'baseline': 'FedFoo'}, 'FedFoo'),
            ({'seeds': []}, 'at least one'),
            ({'seeds': [1, 2, 1]}, 'seeds must be different'),
            ({'seeds': [-1]}, 'seeds must be different whole numbers'),
            ({'scales': {'small': {'rows': ['FedAvg']}}}, 'a scale has no rows'),
            ({'scales': {'full': {'methods': ['FedFoo']}}}, 'no methods FedFoo'),
            ({'scales': {'full': {'scenes': ['here']}}}, 'no scenes here'),
            ({'scales': {'full': {'scenes': {'here': 'there'}}}}, 'no scenes here'),
            ({'scales': {'full': {'scenes': {'even': 3}}}}, 'called by different names'),
            ({'scales': {'full': {'scenes': {'even': 'a', 'skewed': 'a'}}}}, 'called by different names'),
            ({'published': {'FedFoo': {'skewed': [1, 2]}}}, "'FedFoo' is none of the methods"),
            ({'published': {'FedAvg': {'here': [1, 2]}}}, "'here' is none of the scenes"),
            ({'published': {'FedAvg': {'even': [1, 2, 3]}}}, '3 numbers for 2 metrics'),
            ({'published': {'FedAvg': {'even': [1, [1, 2, 3]]}}}, r'\[mean, deviation\]'),
            ({'published': {'FedAvg': {'even': [1, 'two']}}}, 'neither a number'),
            # what is of another type than it should be
            ({'seeds': 3}, 'seeds'),
            ({'seeds': [[1]]}, 'seed'),
            ({'seeds': ['one']}, 'seed'),
            ({'setting': {'options': 3}}, 'options'),
            ({'setting': {'imbalance': 'ten'}}, 'imbalance'),
            ({'kind': ['training']}, 'kind'),
            ({'baseline': ['FedAvg']}, 'baseline'),
            ({'notes': 3}, 'notes'),
            ({'metrics': {'general': 3}, 'published': {}}, 'general'),
            ({'metrics': {'fast': 'rounds_to:soon'}, 'published': {}}, 'rounds_to'),
            ({'scales': {'full': {'setting': 3}}}, 'setting'),
            ({'scales': {'full': {'methods': 3}}}, 'methods'),
            ({'scales': {'full': {'methods': []}}}, 'methods name none'),
            ({'scales': {'full': {'minutes': 'four'}}}, 'four|minutes'),
            ({'scales': {'full': {'minutes': [4]}}}, 'minutes'),
        ],
    )
    def test_wrong_ones_are_refused_in_one_line(self, wrong, said, tmp_path):
        path = put(tmp_path, plain(**wrong))
        with pytest.raises(ValueError, match=said) as caught:
            Study.read(path)
        assert str(caught.value).startswith('mine.json: ')
        assert '\n' not in str(caught.value)

    def test_files_and_scales_that_are_none(self, tmp_path):
        with pytest.raises(ValueError, match="no scale 'tiny', only full and small"):
            Study.read(put(tmp_path, PLAIN), 'tiny')
        with pytest.raises(ValueError, match='there is no file'):
            Study.read(tmp_path / 'none.toml')
        with pytest.raises(ValueError, match=r'fednh_99 is neither a study .* nor a published table: ccvr_1'):
            Study.read('fednh_99')
        for name, text in (('a.toml', 'title = '), ('a.json', '{"title"'), ('b.json', '[1]')):
            (tmp_path / name).write_text(text)
            with pytest.raises(ValueError, match=f'^{name}: ') as caught:
                Study.read(tmp_path / name)
            assert '\n' not in str(caught.value)


@contextlib.contextmanager
def counted():
    """Seeds of the runs that are made meanwhile, and how."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        one, several = pipeline.run, seeds.run

        def alone(setting, *args, **kwargs):
            made.append(('alone', setting.algorithm, setting.lr, (setting.seed,)))
            return one(setting, *args, **kwargs)

        def together(settings, *args, **kwargs):
            made.append(('together', settings[0].algorithm, settings[0].lr, tuple(s.seed for s in settings)))
            return several(settings, *args, **kwargs)

        patch.setattr(pipeline, 'run', alone)
        patch.setattr(seeds, 'run', together)
        yield made


def carried_out(known, out, **kwargs):
    """(runs in other hands, lines that were told, what was run)."""
    told = io.StringIO()
    with counted() as made, contextlib.redirect_stderr(told):
        busy = runner.carry_out(known, out, **kwargs)
    return busy, told.getvalue().splitlines(), made


FOUR = plain(
    methods={
        'broken': {'algorithm': 'fedavg', 'lr': 1e30},
        'FedAvg': {'algorithm': 'fedavg'},
        'again': {'algorithm': 'fedavg', 'metrics': {'personal': 'personal_accuracy_before'}},
    },
    scenes={'skewed': {}},
    published={},
    scales={},
)


@pytest.fixture(scope='module')
def carried(tmp_path_factory):
    """A study with a row that diverges and one that shares its runs, carried out."""
    out = tmp_path_factory.mktemp('study')
    known = Study.of(FOUR, 'four')
    return known, out, *carried_out(known, out)


@pytest.mark.slow
def test_runs_that_are_missing_are_run_and_equal_ones_once(carried):
    known, out, busy, _, made = carried
    assert busy == []
    assert sorted(made) == [('together', 'fedavg', 0.02, (0, 1)), ('together', 'fedavg', 1e30, (0, 1))]
    assert {path.name for path in (out / 'runs').iterdir()} == {run.setting.name for run in known.runs}
    assert len(list((out / 'runs').iterdir())) == 4
    shared = {run.setting.name for run in known.runs if run.method in ('FedAvg', 'again')}
    assert len(shared) == 2


def test_a_run_that_diverges_is_told_and_the_others_go_on(carried):
    known, out, _, told, _ = carried
    for run in known.runs:
        summary = json.loads((out / 'runs' / run.setting.name / 'summary.json').read_text())
        assert ('diverged' in summary) == (run.method == 'broken')
        assert summary['seed'] == run.seed
        if run.method == 'broken':
            assert 'training diverged in round' in summary['diverged']
        else:
            assert 0 < summary['global_accuracy_last5'] <= 1
    assert sum('broken' in line and 'diverged' in line for line in told) == 2


def test_every_run_is_a_line_with_the_time_that_is_left(carried):
    _, _, _, told, _ = carried
    assert told[0].startswith('four: 4 of 4 runs to do')
    lines = told[1:]
    assert [re.match(r'\[(\d)/4\] ', line)[1] for line in lines] == ['1', '2', '3', '4']
    fine = r'\[\d/4\] FedAvg, skewed, seed \d: general \d+\.\d, personal \d+\.\d, \d\d:\d\d'
    assert sum(bool(re.match(fine, line)) for line in lines) == 2
    assert 'about' in lines[0]
    assert 'left' in lines[0]
    assert 'left' not in lines[-1]


def test_what_is_finished_is_not_run_again(carried):
    known, out, *_ = carried
    before = {path: path.stat().st_mtime_ns for path in out.rglob('*.json*')}
    busy, told, made = carried_out(known, out)
    assert (busy, made) == ([], [])
    assert told == ['four: 0 of 4 runs to do']
    assert {path: path.stat().st_mtime_ns for path in out.rglob('*.json*')} == before
    assert carried_out(known, out, show=False)[1] == []


@pytest.mark.parametrize(('hurt', 'seed'), [('damaged', 0), ('gone', 1)])
def test_a_summary_that_is_damaged_is_made_anew(carried, tmp_path, hurt, seed):
    """Without training again, whoever trained: one of the seeds was padded to the width of the other."""
    known, out, *_ = carried
    widths = {scene.load(run.setting)[1].index.shape[1] for run in known.some(['FedAvg']).runs}
    assert len(widths) == 2
    shutil.copytree(out, tmp_path / 'out')
    (run,) = known.some(['FedAvg'], seeds=[seed]).runs
    path = tmp_path / 'out' / 'runs' / run.setting.name / 'summary.json'
    before = json.loads(path.read_text())
    path.write_text('{"algo') if hurt == 'damaged' else path.unlink()
    _, _, made = carried_out(known, tmp_path / 'out')
    assert made == [('alone', 'fedavg', 0.02, (seed,))]
    same(before, json.loads(path.read_text()))


@pytest.mark.slow
def test_a_run_alone_that_diverges_does_not_stop_the_next(tmp_path):
    known = Study.of(FOUR, 'four').some(['broken', 'FedAvg'], seeds=[5])
    _, told, made = carried_out(known, tmp_path)
    assert made == [('alone', 'fedavg', 1e30, (5,)), ('alone', 'fedavg', 0.02, (5,))]
    first, second = (runner.summary(run, tmp_path) for run in known.runs)
    assert 'diverged' in first
    assert second['rounds'] == 2
    assert 'broken, skewed, seed 5: diverged' in told[1]


HOLD = """
import sys
from pathlib import Path
from fedjax_nc import _checkpoints
with _checkpoints.holding(Path(sys.argv[1])):
    print('held', flush=True)
    sys.stdin.read()
"""


def test_a_run_that_another_process_has_in_hand_is_left_to_it(tmp_path):
    known = Study.of(FRAMES, 'frames')
    held = known.runs[2]
    folder = tmp_path / 'runs' / held.setting.name
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, '-c', HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == 'held\n'
        busy, told, _ = carried_out(known, tmp_path)
        assert busy == [held]
        assert not (folder / 'summary.json').exists()
        assert [re.match(r'\[\d/4\]', line)[0] for line in told[1:]] == ['[1/4]', '[2/4]', '[3/4]']
        assert all(runner.summary(run, tmp_path) for run in known.runs if run != held)
        other.stdin.close()
    assert carried_out(known, tmp_path)[0] == []
    assert runner.summary(held, tmp_path)


@pytest.mark.slow
def test_a_run_that_cannot_be_is_left_out_by_name_and_others_go_on(tmp_path):
    methods = {
        'small': {'algorithm': 'fedavg', 'model': 'cnn'},
        'nowhere': {'algorithm': 'fedavg', 'dataset': 'lost.npz'},
        'FedAvg': {'algorithm': 'fedavg'},
    }
    content = plain(methods=methods, scenes={'': {}}, seeds=[0], published={}, scales={})
    known = Study.of(content, 'mine')
    left, told, _ = carried_out(known, tmp_path)
    assert [run.method for run in left] == ['small', 'nowhere']
    assert re.match(r'small, seed 0: left out: expected images .* of at least 18x18', told[1])
    assert re.match(r'nowhere, seed 0: left out: .*lost\.npz is not there', told[2])
    assert told[3].startswith('[1/3] FedAvg, seed 0: ')
    with pytest.raises(SystemExit, match='2 of 3 runs are not done'):
        shell.main(['run', str(put(tmp_path, content)), '--out', str(tmp_path)])
    assert '| FedAvg |' in (tmp_path / 'mine' / 'report.md').read_text()
    with pytest.warns(UserWarning, match=r'nowhere, seed 0: left out: .*lost\.npz'):
        assert runner.carry_out(known.some(['nowhere', 'FedAvg']), tmp_path, show=False) == left[1:]


@pytest.mark.slow
def test_what_does_not_fit_is_told_before_anything_is_run(tmp_path):
    """Though it is the last in line, and under whatever seed."""
    methods = {
        'FedAvg': {'algorithm': 'fedavg'},
        'narrow': {'algorithm': 'fedavg', 'head': 'bare_etf', 'model': 'cnn'},
        'many': {'algorithm': 'fedavg', 'clients': 500},
    }
    known = Study.of(plain(methods=methods, scenes={'': {}}, published={}, scales={}), 'mine')
    left, told, made = carried_out(known, tmp_path)
    assert [re.match(r'(\[\d/6\] )?(\w+), seed (\d)', line).groups()[1:] for line in told[1:]] == [
        ('narrow', '0'), ('many', '0'), ('narrow', '1'), ('many', '1'), ('FedAvg', '0'), ('FedAvg', '1'),
    ]  # fmt: skip
    assert {run.method for run in left} == {'narrow', 'many'}
    assert [algorithm for _, algorithm, *_ in made] == ['fedavg']
    assert not any((tmp_path / 'runs' / run.setting.name).exists() for run in left)
    for _, error in runner.refused(known.runs, tmp_path / 'other', None):
        assert error.__traceback__ is None  # it would keep the data


@pytest.mark.slow
def test_runs_may_be_watched_each_by_a_tracker_of_its_own(tmp_path):
    seen = {}

    @contextlib.contextmanager
    def tracker(run, folder):
        rows = seen.setdefault(folder.name, [])
        yield lambda row, state: rows.append(row['round'])
        rows.append('closed')

    known = Study.of(FOUR, 'four').some(['FedAvg'])
    _, _, made = carried_out(known, tmp_path, watch=tracker)
    assert seen == {run.setting.name: [1, 2, 'closed'] for run in known.runs}
    assert [how for how, *_ in made] == ['alone', 'alone']


@pytest.mark.slow
def test_tensorboard_from_the_command_line(tmp_path):
    pytest.importorskip('tensorboardX')
    path = put(tmp_path, {**FOUR, 'seeds': [0]})
    shell.main(['run', str(path), '--rows', 'FedAvg', '--tensorboard', '--out', str(tmp_path / 'out')])
    (events,) = (tmp_path / 'out' / 'runs').glob('fedavg-*/tensorboard/events*')
    assert events.stat().st_size > 100


@pytest.mark.parametrize(
    ('method', 'said'),
    [
        ({'algorithm': 'fedprox', 'options': {'muu': 1}}, r"odd, skewed, seed 0: .*\{'muu': 1\}"),
        ({'algorithm': 'fedetf', 'head': 'linear'}, "fedetf has no head 'linear', it takes etf"),
        ({'algorithm': 'solo', 'server_optimizer': 'fedadam'}, 'solo has no server model to optimize'),
        ({'algorithm': 'fednh', 'options': {'rho': 1.5}}, 'rho'),
        ({'lr': 0.1}, "odd, skewed, seed 0: names no 'algorithm'"),
    ],
)
def test_methods_are_checked_when_a_study_is_read(method, said):
    with pytest.raises(ValueError, match=said):
        Study.of(plain(methods={'odd': method}, published={}, scales={}), 'x')


@pytest.mark.slow
def test_without_matplotlib_there_are_numbers_and_a_warning(tmp_path, monkeypatch):
    known = Study.of(plain(scenes={'': {}}, seeds=[0], published={}, scales={}), 'mine')
    folder = tmp_path / 'mine'
    folder.mkdir()
    (folder / 'curves.png').write_text('of an earlier report')
    monkeypatch.setitem(sys.modules, 'matplotlib.backends.backend_agg', None)
    with pytest.warns(UserWarning, match=r'no picture: figures need matplotlib'):
        carried_out(known, tmp_path)
    with pytest.warns(UserWarning, match=r'no figures: figures need matplotlib'):
        assert '| FedProx |' in (report.write(known, tmp_path) / 'report.md').read_text()
    assert 'curves' not in (folder / 'report.md').read_text()
    assert (folder / 'curves.png').read_text() == 'of an earlier report'


def test_frames_that_differ_in_length_alone_are_fitted_once(tmp_path, monkeypatch):
    fits, real = [], frames.sparse_etf
    monkeypatch.setattr(frames, 'sparse_etf', lambda *args, **kwargs: fits.append(kwargs) or real(*args, **kwargs))
    common = {'dim': 9, 'classes': 4, 'steps': 3, 'sparsity': 0.25}
    for norm, seed in ((0.5, 0), (1.5, 0), (1.5, 1)):
        seen = geometry.run(geometry.Geometry(norm=norm, seed=seed, **common), tmp_path / f'{norm}, {seed}')
        direct = frames.frame_quality(real(jax.random.key(seed), 9, 4, norm=norm, sparsity=0.25, steps=3))
        assert seen['norm_mean'] == pytest.approx(float(direct.norm_mean))
        assert seen['angle_mean'] == pytest.approx(float(direct.angle_mean))
    assert len(fits) == 2


def test_frames_are_studied_without_training(tmp_path):
    known = Study.of(FRAMES, 'frames')
    carried_out(known, tmp_path)
    for run in known.runs:
        found = runner.summary(run, tmp_path)
        config = json.loads((tmp_path / 'runs' / run.setting.name / 'config.json').read_text())
        own = {'sparsity': run.setting.sparsity, 'seed': run.seed}
        assert config == {**FRAMES['setting'], 'norm': 1.0, 'fit_norm': 0.5, **own}
        assert found['seconds']['total'] > 0
        assert found['versions']['jax']
        assert all(math.isfinite(found[name]) for name in found if isinstance(found[name], float))
    with pytest.raises(ValueError, match='solver must be mma or gram'):
        Study.of({**FRAMES, 'setting': {'solver': 'guess'}}, 'x')
    with pytest.raises(ValueError, match='fit_norm must be positive'):
        Study.of({**FRAMES, 'setting': {'fit_norm': 0.0}}, 'x')


def history(folder):
    """Rows without times, nor what padding alone changes."""
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ('seconds', 'compile_seconds', 'padded_work')} for row in rows]


def state(folder, round):
    """Fingerprints of the values in a checkpoint."""
    run = _checkpoints.Files(folder).load(round, run=ocp.args.JsonRestore())['run']
    return run['arrays'], run['key']


def same(one, other):
    """Whether two summaries of the same setting say the same, but for times, memory and padding."""
    timed = ('seconds', 'rounds_per_second', 'compile_seconds', 'padded_work_share', 'peak_process_bytes',
             'peak_device_bytes', 'commit', 'curve')  # fmt: skip
    a, b = ({k: v for k, v in u.items() if k not in timed} for u in (one, other))
    assert a == b


def settings(count, **changes):
    """Seeds of one setting, whose batches are full in every table."""
    made = [Setting(**{**TINY, 'batch_size': 16, **changes, 'seed': seed}) for seed in range(count)]
    widths = {scene.load(setting)[1].index.shape[1] for setting in made}
    assert len(widths) > 1  # otherwise nothing is padded
    assert min(widths) >= 16  # no batch is made longer by it
    return made


def together(folder, made, **kwargs):
    begun = time.perf_counter()
    found = seeds.run(made, [folder / str(s.seed) for s in made], progress=False, **kwargs)
    took = time.perf_counter() - begun
    assert 0 < sum(summary['seconds']['total'] for summary in found) < took  # each has its share
    for setting, summary in zip(made, found, strict=True):
        ours = folder / str(setting.seed)
        assert json.loads((ours / 'summary.json').read_text()) == summary
        assert json.loads((ours / 'config.json').read_text()) == setting.plain()
    losses = [tuple(row['loss'] for row in history(folder / str(s.seed))) for s in made]
    assert len(set(losses)) == len(made)
    return found


def near(one, two, *, exact=True):
    """Whether two runs are the same: exactly, in what a round can show of it; else but for rounding."""
    a, b = history(one), history(two)
    assert [set(row) for row in a] == [set(row) for row in b]
    np.testing.assert_allclose([row['loss'] for row in a], [row['loss'] for row in b], rtol=1e-6 if exact else 1e-4)
    a, b = (json.loads((folder / 'summary.json').read_text()) for folder in (one, two))
    if exact:
        same(a, b)
    for name in ('global_accuracy', 'personal_accuracy', 'personal_accuracy_before'):
        assert abs(a[name] - b[name]) < 0.01


@pytest.fixture(scope='module')
def three(tmp_path_factory):
    made = settings(3, algorithm='fedavg', participation=0.5, rounds=4, eval_every=2, eval_last=1)
    folder = tmp_path_factory.mktemp('three')
    return folder, made, together(folder, made)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
def test_seeds_together_are_the_seeds_alone(three, tmp_path, seed):
    folder, made, _ = three
    pipeline.run(made[seed], tmp_path, progress=False)
    near(folder / str(seed), tmp_path)
    assert [row['round'] for row in history(folder / str(seed)) if 'accuracy' in row] == [2, 4]
    assert {p.name for p in (folder / str(seed)).iterdir()} == {p.name for p in tmp_path.iterdir()}
    rows = [(place / 'metrics.csv').read_text().splitlines() for place in (folder / str(seed), tmp_path)]
    assert rows[0][0] == rows[1][0]
    assert len(rows[0]) == len(rows[1]) == 5


@pytest.mark.slow
@pytest.mark.parametrize('name', ['scaffold', 'ccvr'])
def test_so_they_are_where_clients_keep_something_or_a_head_is_calibrated(tmp_path, name):
    made = settings(2, algorithm=name, eval_last=1)
    together(tmp_path, made)
    pipeline.run(made[0], tmp_path / 'alone', progress=False)
    near(tmp_path / '0', tmp_path / 'alone')


@pytest.mark.slow
def test_seeds_side_by_side_are_the_seeds_one_after_the_other_nearly(three, tmp_path):
    folder, made, _ = three
    together(tmp_path, made, lanes=2)
    for setting in made:
        near(folder / str(setting.seed), tmp_path / str(setting.seed), exact=False)


EXACT = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_studies as tests
from fedjax_nc.experiments import pipeline
folder = Path(sys.argv[1])
for name, choice in (('fedavg', {'participation': 0.5, 'rounds': 4}), ('scaffold', {}), ('ccvr', {})):
    made = tests.settings(2, algorithm=name, **choice)
    tests.together(folder / name, made)
    widths = [tests.scene.load(setting)[1].index.shape[1] for setting in made]
    setting = made[widths.index(min(widths))]  # the one that was padded
    alone, ours = folder / name / 'alone', folder / name / str(setting.seed)
    tests.same(pipeline.run(setting, alone, progress=False), tests.json.loads((ours / 'summary.json').read_text()))
    assert tests.history(ours) == tests.history(alone), name
    assert tests.state(ours, setting.rounds) == tests.state(alone, setting.rounds), name
"""


@pytest.mark.slow
def test_to_the_last_bit_where_programs_are_optimised(tmp_path):
    """As users have it; tests optimise less, and two programs then round here and there in other ways."""
    command = [sys.executable, '-c', EXACT, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, env={**os.environ, 'XLA_FLAGS': ''}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_batches_that_are_padded_change_next_to_nothing(tmp_path):
    made = [Setting(**TINY, algorithm='fedavg', seed=seed) for seed in range(2)]
    together(tmp_path, made)
    for setting in made:
        pipeline.run(setting, tmp_path / f'{setting.seed} alone', progress=False)
        near(tmp_path / f'{setting.seed} alone', tmp_path / str(setting.seed), exact=False)


@pytest.mark.slow
def test_one_seed_that_diverges_does_not_stop_the_others(tmp_path):
    """One example is too large, which some seeds train on and others test on."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 6)).astype(np.float32), np.arange(80) % 4
    x[17] = 3e38
    np.savez(tmp_path / 'own.npz', x_train=x, y_train=y, x_test=x[:16], y_test=y[:16])
    changes = {'dataset': 'own.npz', 'model': 'mlp', 'partition': 'iid', 'test_share': 0.5, 'max_examples': 0}
    made = [Setting(**{**TINY, **changes, 'algorithm': 'fedavg', 'seed': seed}) for seed in range(12)]

    def trains(setting):
        train = scene.load(setting, tmp_path)[1]
        rows = [np.asarray(train.index[k, : int(train.size[k])]) for k in range(setting.clients)]
        return 17 in np.concatenate(rows)

    bad = next(s for s in made if trains(s))
    good = [s for s in made if not trains(s)][:2]
    order = [good[0], bad, good[1]]
    found = seeds.run(order, [tmp_path / str(s.seed) for s in order], data_dir=tmp_path, progress=False)
    assert isinstance(found[1], training.DivergedError)
    assert 'training diverged' in str(found[1])
    pipeline.run(good[1], tmp_path / 'alone', data_dir=tmp_path, progress=False)
    near(tmp_path / str(good[1].seed), tmp_path / 'alone')
    assert [found[0]['seed'], found[2]['seed']] == [s.seed for s in good]
    assert not (tmp_path / str(bad.seed) / 'summary.json').exists()
    assert (tmp_path / str(bad.seed) / 'metrics.jsonl').exists()


@pytest.mark.slow
def test_pools_of_different_length_go_together(tmp_path):
    """A long tail of a subset keeps one example more or less, by seed."""
    settings = [
        Setting(dataset='digits', max_examples=205, imbalance=5.0, clients=4, rounds=2, algorithm='fedavg', seed=seed,
                local_epochs=1)
        for seed in (0, 2)
    ]  # fmt: skip
    assert len({len(scene.load(setting)[1].y) for setting in settings}) == 2
    together = seeds.run(settings, [tmp_path / f'{s.seed}' for s in settings], progress=False)
    alone = [pipeline.run(s, tmp_path / f'alone-{s.seed}', progress=False) for s in settings]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one['global_accuracy'], other['global_accuracy'], atol=1e-3)
        np.testing.assert_allclose(one['personal_accuracy'], other['personal_accuracy'], atol=1e-3)


def test_runs_that_one_program_cannot_train_are_refused(tmp_path):
    one, two = Setting(**TINY), Setting(**TINY, seed=1)
    a, b = tmp_path / 'a', tmp_path / 'b'
    with pytest.raises(ValueError, match='differ in their seed alone'):
        seeds.run([one, dataclasses.replace(two, lr=0.5)], [a, b])
    for wrong in (([one, one], [a, b]), ([one, two], [a])):
        with pytest.raises(ValueError, match='a seed and a folder of its own'):
            seeds.run(*wrong)
    b.mkdir()
    (b / 'metrics.jsonl').write_text('')
    with pytest.raises(ValueError, match='b already holds a run'):
        seeds.run([one, two], [a, b])


@pytest.mark.slow
def test_large_runs_are_not_trained_together():
    assert seeds.pays(Setting(**TINY))
    for large in ({'rounds': 100_000}, {'model': 'cnn'}, {'algorithm': 'ratioloss'}):
        assert not seeds.pays(Setting(**{**TINY, **large}))


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
    said = plain(scenes={'skewed': {}}, published={}, scales={})
    said['setting'] = {**TINY, 'rounds': 40, 'eval_every': 2, 'participation': 0.5}
    del said['methods']['FedProx']
    path, known = put(tmp_path, said), Study.of(said, 'mine')
    command = [sys.executable, '-m', 'fedjax_nc.experiments', 'run', str(path), '--one-by-one', '--out', str(tmp_path)]
    folders = [tmp_path / 'runs' / run.setting.name for run in known.runs]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        log = folders[1] / 'metrics.jsonl'
        end = time.monotonic() + 200
        while time.monotonic() < end and killed.poll() is None:
            if log.exists() and log.read_text().count('\n') >= 7:
                break
            time.sleep(0.002)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert (folders[0] / 'summary.json').exists()
    assert not (folders[1] / 'summary.json').exists()
    assert 7 <= len(history(folders[1])) < 40
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert '1 of 2 runs to do' in done.stderr
    assert runner.carry_out(known, tmp_path / 'undisturbed', together=False, show=False) == []
    for run, folder in zip(known.runs, folders, strict=True):
        theirs = tmp_path / 'undisturbed' / 'runs' / run.setting.name
        assert history(folder) == history(theirs)
        assert state(folder, 40) == state(theirs, 40)
        same(*(json.loads((f / 'summary.json').read_text()) for f in (folder, theirs)))
