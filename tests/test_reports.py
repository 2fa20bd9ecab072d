"""Reports: numbers of runs that were written by hand come out as SciPy and NumPy have them."""

import csv
import io
import json
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

pytest.importorskip('matplotlib')

from fedjax_nc import evaluate
from fedjax_nc.experiments import cells, figures, report, runner
from fedjax_nc.experiments.study import Study

BEST = 0.98765  # of a round in the middle, which is no result
GENERAL = {'Base': (0.612, 0.647, 0.665), 'A&B_1 50%': (0.655, 0.661, 0.742)}
PERSONAL = {'Base': (0.811, 0.802, 0.834), 'A&B_1 50%': (0.790, 0.815, 0.801)}
SAID = {
    'title': 'Made by hand',
    'source': 'Nobody. 1999',
    'baseline': 'Base',
    'notes': ['nothing of it is true'],
    'seeds': [0, 1, 2],
    'metrics': {'general': 'global_accuracy_last5', 'personal': 'personal_accuracy', 'fast': 'rounds_to:0.5'},
    'setting': {'dataset': 'digits', 'rounds': 10},
    'methods': {'Base': {'algorithm': 'fedavg'}, 'A&B_1 50%': {'algorithm': 'fedprox'}},
    'scenes': {'one': {'alpha': 0.1}, 'two_2': {'alpha': 0.2}},
    'published': {'Base': {'one': [[61.4, 2.5], 80.25, math.nan]}},
}


def summary(run, general, personal):
    return {
        'algorithm': run.setting.algorithm, 'dataset': 'digits', 'seed': run.seed, 'rounds': 10,
        'global_accuracy': general - 0.01, 'global_accuracy_last5': general, 'personal_accuracy': personal,
        'clients': {'examples': [3, 4], 'tested': [2, 0], 'personal_accuracy': [personal, None]},
        'class_accuracy': [general] * 10, 'class_examples': [30] * 10,
        'parameters': {'body': 1_200, 'head': 34, 'total': 1_234},
        'bytes': {'client_down': 5_000, 'client_up': 4_000, 'client_once': 0, 'round_down': 20_000,
                  'round_up': 16_000, 'down': 200_000, 'up': 160_000},
        'seconds': {'rounds': 100.0, 'total': 120.0},
        'device': 'abacus', 'versions': {'python': '3', 'jax': '9.9'}, 'commit': 'c0ffee' * 6 + 'abcd+',
    }  # fmt: skip


def write(folder, run, content, seen=None):
    there = folder / 'runs' / run.setting.name
    there.mkdir(parents=True)
    (there / 'summary.json').write_text(json.dumps(content))
    if seen is not None:
        (there / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in seen))


def curve(general, reached):
    """Rows of ten rounds that pass one half in one round, are best in the next, and end below it all."""
    values = [0.1] * 10
    values[reached - 1 :] = [0.55] * (11 - reached)
    values[reached], values[-1] = BEST, general - 0.01
    return [{'round': i + 1, 'loss': 1.0, **({'accuracy': a} if i != 1 else {})} for i, a in enumerate(values)]


@pytest.fixture
def known():
    return Study.of(SAID, 'byhand')


@pytest.fixture
def written(known, tmp_path):
    """All runs of the first scene, and one of the second."""
    for run in known.runs:
        if run.scene == 'one' or (run.method, run.seed) == ('Base', 1):
            general, personal = GENERAL[run.method][run.seed], PERSONAL[run.method][run.seed]
            write(tmp_path, run, summary(run, general, personal), curve(general, 4 + run.seed))
    return tmp_path


def rows_of(text, first):
    """Cells of the lines of a Markdown table that begin with a name."""
    lines = [line for line in text.splitlines() if line.startswith(f'| {first} |')]
    return [[cell.strip() for cell in line.strip('|').split('|')][1:] for line in lines]


def csv_rows(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_means_deviations_and_intervals_are_those_of_scipy(known, written):
    folder = report.write(known, written)
    assert folder == written / 'byhand'
    table = {(r['method'], r['scene'], r['metric']): r for r in csv_rows(folder / 'table.csv')}
    assert len(table) == 2 * 2 * 3
    for method in GENERAL:
        for heading, numbers in (('general', GENERAL), ('personal', PERSONAL)):
            row, ours = table[method, 'one', heading], 100 * np.array(numbers[method])
            assert int(row['seeds']) == 3
            np.testing.assert_allclose(float(row['mean']), ours.sum() / 3)
            np.testing.assert_allclose(float(row['std']), np.sqrt(((ours - ours.mean()) ** 2).sum() / 2))
    for heading, numbers in (('general', GENERAL), ('personal', PERSONAL)):
        row = table['A&B_1 50%', 'one', heading]
        pairs = stats.ttest_rel(100 * np.array(numbers['A&B_1 50%']), 100 * np.array(numbers['Base']))
        low, high = pairs.confidence_interval(0.95)
        np.testing.assert_allclose([float(row['difference_low']), float(row['difference_high'])], [low, high])
        np.testing.assert_allclose(float(row['difference']), (low + high) / 2)
        gaps = 100 * (np.array(numbers['A&B_1 50%']) - np.array(numbers['Base']))
        np.testing.assert_allclose((low, high), stats.t.interval(0.95, 2, gaps.mean(), stats.sem(gaps)))
        assert int(row['pairs']) == 3
    fast = [float(table[method, 'one', 'fast']['mean']) for method in GENERAL]
    assert fast == [5.0, 5.0]  # rounds 4, 5 and 6
    assert table['Base', 'one', 'general']['published'] == '61.4'
    assert table['Base', 'one', 'personal']['published_std'] == ''


def test_numbers_as_they_are_printed(known, written):
    folder = report.write(known, written)
    text = (folder / 'report.md').read_text()
    one, two = text.split('## two_2')
    assert '\n\nRun: digits, ' in one
    main, costs = rows_of(one, 'Base')[:2]
    assert main == ['64.1 ± 2.7', '61.4 ± 2.5', '81.6 ± 1.7', '80.3', '5 ± 1']
    method, gain, _ = rows_of(one, 'A&B_1 50%')
    assert method == ['68.6 ± 4.9', '', '80.2 ± 1.3', '', '5 ± 1']
    low, high = stats.ttest_rel([65.5, 66.1, 74.2], [61.2, 64.7, 66.5]).confidence_interval(0.95)
    assert gain[0] == f'+4.5 [{low:.1f}, {high:.1f}]'
    assert gain[1].startswith('-1.4 [')
    assert costs[0] == '63.1 ± 2.7'  # last round
    assert costs[1] == '64.1 ± 2.7'  # mean of the last
    assert costs[3:] == ['1,234', '5 kB / 4 kB', '360 kB', '2']
    assert rows_of(two, 'Base')[0][0] == '64.7'  # one seed has no deviation
    assert rows_of(two, 'A&B_1 50%')[0] == ['', '', '']
    for said in ('Nobody. 1999', 'nothing of it is true', 'abacus; python 3, jax 9.9, commit c0ffeec0ffee+'):
        assert said in text
    for name in ('report.md', 'report.tex', 'table.csv', 'runs.csv'):
        assert '98.8' not in (folder / name).read_text()
        assert '98.7' not in (folder / name).read_text()
        assert '0.987' not in (folder / name).read_text()


def test_seeds_that_are_missing_are_listed(known, written):
    text = (report.write(known, written) / 'report.md').read_text()
    listed = text.split('Not finished:')[1].split('Notes:')[0]
    assert re.findall(r'- (.*)', listed) == ['Base, two_2: seeds 0, 2', 'A&B_1 50%, two_2: seeds 0, 1, 2']


def test_a_cell_of_fewer_seeds_than_its_scene_has_is_marked(known, tmp_path):
    for run in known.runs:
        if run.scene == 'one' and (run.method == 'Base' or run.seed == 1):
            general, personal = GENERAL[run.method][run.seed], PERSONAL[run.method][run.seed]
            write(tmp_path, run, summary(run, general, personal), curve(general, 4))
    text = (report.write(known, tmp_path) / 'report.md').read_text()
    assert rows_of(text, 'A&B_1 50%')[0][0] == '66.1 (1 of 3)'
    assert ' of ' not in rows_of(text, 'Base')[0][0]


def test_without_a_finished_run_there_is_no_report(known, tmp_path):
    with pytest.raises(ValueError, match='no run of byhand is finished'):
        report.write(known, tmp_path)
    assert not (tmp_path / 'byhand').exists()


def test_latex_has_as_many_columns_in_every_row(known, written):
    text = (report.write(known, written) / 'report.tex').read_text()
    expected = [
        (1 + 2 * 3, 2 + 2 + 1),  # two heads, two methods, one line of what was published
        (1 + 2 * 3, 2 + 1),  # what the second has more than the first
        (1 + 7, 1 + 2),  # costs in the first scene
        (1 + 7, 1 + 1),  # in the second, where one method was run
    ]
    tables = text.split(r'\end{tabular}')[:-1]
    assert len(tables) == len(expected)
    for table, (columns, rows) in zip(tables, expected, strict=True):
        assert len(re.search(r'begin{tabular}{(\w+)}', table)[1]) == columns
        body = [line for line in table.splitlines() if line.endswith(r'\\')]
        assert len(body) == rows
        for line in body:
            spans = [int(n) for n in re.findall(r'\\multicolumn{(\d+)}', line)]
            assert len(re.findall(r'(?<!\\)&', line)) + 1 - len(spans) + sum(spans) == columns
    assert re.search(r'A\\&B\\_1 50\\% & \+4\.5 \[', tables[1])
    assert r'rounds to 64.1 \%' in tables[2]
    assert '% Less Base, same seed' in tables[1]
    assert r'A\&B\_1 50\% & \textbf{68.6 $\pm$ 4.9}' in text
    assert text.count('textbf') == 2  # and Base's personal one: the rest is no accuracy, or of one method
    assert r'two\_2' in text
    assert r'\quad published & 61.4 $\pm$ 2.5 & 80.3 & ' in text
    assert '±' not in text
    assert text.count('{') == text.count('}')


def test_the_best_is_told_by_what_is_printed():
    """Several share it; nobody has it alone, without a number, or for a deviation."""

    def found(**of):
        return {(name, 'one'): {0: {'global_accuracy_last5': value}} for name, value in of.items()}

    study = Study.of({**SAID, 'published': {}, 'metrics': {'General': 'global_accuracy_last5'}}, 'one')
    one = {'Base': 0.5, 'A&B_1 50%': 0.50001}
    assert cells.best(study, found(**one), 'one') == [{'Base', 'A&B_1 50%'}]
    assert cells.best(study, found(**{**one, 'Base': 0.4}), 'one') == [{'A&B_1 50%'}]
    assert cells.best(study, found(**{**one, 'Base': math.nan}), 'one') == [set()]
    study = Study.of({**SAID, 'published': {}, 'metrics': {'General': 'personal_accuracy_std'}}, 'one')
    of = {name: {0: {'personal_accuracy_std': value}} for name, value in one.items()}
    assert cells.best(study, {(name, 'one'): runs for name, runs in of.items()}, 'one') == [set()]


def test_what_methods_cost_is_a_table(known, written):
    rows = csv_rows(report.write(known, written, 50.0) / 'costs.csv')
    assert [(row['method'], row['scene'], row['runs']) for row in rows] == [
        ('Base', 'one', '3'), ('A&B_1 50%', 'one', '3'), ('Base', 'two_2', '1'),
    ]  # fmt: skip
    first = {name: float(value) for name, value in rows[0].items() if name not in ('method', 'scene')}
    ends = 100 * np.array(GENERAL['Base'])
    assert first['last'] == pytest.approx(ends.mean() - 1)
    assert first['last_several'] == pytest.approx(ends.mean())
    assert first['last_several_std'] == pytest.approx(ends.std(ddof=1))
    assert (first['goal'], first['rounds_to_goal'], first['runs_at_goal']) == (50, 5, 3)
    assert (first['client_down'], first['client_up'], first['bytes']) == (5_000, 4_000, 360_000)
    assert (first['parameters'], first['minutes'], first['runs_sound']) == (1_234, 2, 3)


def test_a_part_has_a_folder_of_its_own_and_the_baseline_of_the_whole(known, written):
    whole = (report.write(known, written) / 'report.md').read_text()
    folder = report.write(known, written, rows=['A&B_1 50%'], scenes=['one'])
    assert folder == written / 'byhand-part'
    assert (written / 'byhand' / 'report.md').read_text() == whole
    text = (folder / 'report.md').read_text()
    assert rows_of(text, 'Base') == []
    assert 'two_2' not in text
    assert rows_of(text, 'A&B_1 50%')[1][0].startswith('+4.5 [')
    assert 'rounds to 64.1 %' in text  # where the baseline ends
    assert len(csv_rows(folder / 'runs.csv')) == 3
    with pytest.raises(ValueError, match='no methods Other; there are Base'):
        report.write(known, written, rows=['Other'])


def test_seeds_are_a_part_too_and_all_that_are_finished_the_whole(known, written):
    run = known.some(['Base'], ['one'], [7]).runs[0]
    write(written, run, summary(run, 0.9, 0.8), curve(0.9, 4))
    (written / 'runs' / run.setting.name / 'config.json').write_text(json.dumps(run.setting.plain()))
    folder = report.write(known, written)
    text = (folder / 'report.md').read_text()
    assert 'Seeds 0, 1, 2, 7;' in text
    assert float(csv_rows(folder / 'table.csv')[0]['mean']) == pytest.approx(25 * (sum(GENERAL['Base']) + 0.9))
    assert '- A&B_1 50%, one' not in text  # nobody asked for its seed 7
    part = report.write(known, written, seeds=[0])
    assert part == written / 'byhand-part'
    assert 'Seeds 0;' in (part / 'report.md').read_text()
    assert (folder / 'report.md').read_text() == text
    assert runner.keep(known, written, written / 'kept') == 8


def test_another_baseline(known, written):
    folder = report.write(known.against('A&B_1 50%'), written)
    text = (folder / 'report.md').read_text()
    assert 'less A&B_1 50%, same seed' in text
    one, other = csv_rows(folder / 'table.csv')[:: len(SAID['metrics'])][:2]  # of the first metric
    assert float(one['difference']) == pytest.approx(100 * np.mean(np.subtract(*GENERAL.values())))
    assert (one['method'], float(other['difference'])) == ('Base', 0)
    assert rows_of(text, 'Base')[1][0].startswith('-4.5 [')
    with pytest.raises(ValueError, match='no methods Other'):
        known.against('Other')


@pytest.mark.slow
def test_rows_without_a_run_or_a_published_number_are_named_below_alone(written):
    said = {**SAID, 'methods': {**SAID['methods'], 'Later': {'algorithm': 'fednova'}}}
    known = Study.of(said, 'byhand')
    folder = report.write(known, written)
    assert rows_of((folder / 'report.md').read_text(), 'Later') == []
    assert 'Later' not in (folder / 'table.csv').read_text()
    listed = (folder / 'report.md').read_text().split('Not finished:')[1]
    assert '- Later, one: seeds 0, 1, 2' in listed
    printed = {**said, 'published': {**SAID['published'], 'Later': {'one': [50.0, math.nan, math.nan]}}}
    text = (report.write(Study.of(printed, 'byhand'), written) / 'report.md').read_text()
    assert rows_of(text, 'Later')[0][:2] == ['', '50.0']
    folder = report.write(Study.of(printed, 'byhand'), written, scenes=['two_2'])
    assert rows_of((folder / 'report.md').read_text(), 'Later') == []


def test_every_run_is_a_row(known, written):
    rows = csv_rows(report.write(known, written) / 'runs.csv')
    assert len(rows) == 7
    found = {(row['method'], row['scene'], int(row['seed'])): row for row in rows}
    assert float(found['Base', 'one', 2]['global_accuracy_last5']) == 0.665
    assert float(found['Base', 'one', 2]['bytes_up']) == 160_000
    assert float(found['Base', 'one', 2]['seconds_total']) == 120.0
    assert found['Base', 'two_2', 1]['algorithm'] == 'fedavg'


@pytest.mark.parametrize(('target', 'took'), [(50.0, '5'), (62.0, '6'), (98.0, '6'), (99.0, '0 of 3 runs')])
def test_rounds_to_a_target(known, written, target, took):
    """One half is passed in rounds 4, 5 and 6; all above it in the round after."""
    text = (report.write(known, written, target) / 'report.md').read_text()
    assert f'rounds to {target:.1f} %' in text
    assert rows_of(text, 'Base')[1][2] == took


def test_a_steady_baseline_reaches_its_own_accuracy(tmp_path):
    """Its mean of the last rounds is the target that is taken by default."""
    known = Study.of({**SAID, 'scenes': {'one': {}}, 'published': {}}, 'byhand').some(['Base'])
    for run in known.runs:
        rows = [{'round': r, 'loss': 1.0, 'accuracy': 0.5685} for r in range(1, 11)]
        write(tmp_path, run, summary(run, 0.5685, 0.5), rows)
    text = (report.write(known, tmp_path) / 'report.md').read_text()
    assert rows_of(text, 'Base')[1][2] == '1'


@pytest.mark.parametrize('row', list(SAID['methods']))
@pytest.mark.parametrize(('name', 'own'), [('personal_accuracy', True), ('global_accuracy_trained_last5', False)])
def test_a_row_that_looks_at_another_model_of_its_run_has_no_accuracies_of_that_run(tmp_path, row, name, own):
    """Nor is it the target of the others."""
    methods = {**SAID['methods'], row: {**SAID['methods'][row], 'metrics': {'general': name}}}
    known = Study.of({**SAID, 'methods': methods, 'scenes': {'one': {}}, 'published': {}}, 'byhand')
    for run in known.runs:
        general = GENERAL[run.method][run.seed]
        write(tmp_path, run, summary(run, general, 0.5) | {'global_accuracy_trained_last5': 0.1}, curve(general, 4))
    text = (report.write(known, tmp_path) / 'report.md').read_text()
    costs = rows_of(text, row)[1 if row == 'Base' else 2]
    assert (costs[0] != '', costs[1] != '', costs[-1]) == (own, own, '2')
    assert ('rounds to 64.1 %' in text) == (own or row != 'Base')


def test_personal_accuracies_are_no_general_ones(known, tmp_path):
    """Of a method without a generic model neither rounds nor curves stand beside those of others."""
    for run in known.some(scenes=['one']).runs:
        content, rows = summary(run, 0.6, 0.9), curve(0.6, 4)
        if run.method != 'Base':
            content = {name: value for name, value in content.items() if not name.startswith(('global', 'class'))}
            rows = [{{'accuracy': 'accuracy_personal'}.get(k, k): v for k, v in row.items()} for row in rows]
        write(tmp_path, run, content, rows)
    found = report.gather(known, tmp_path)
    assert cells.values(known, found, 'Base', 'one', 'fast') == {0: 4, 1: 4, 2: 4}
    assert cells.values(known, found, 'A&B_1 50%', 'one', 'fast') == {}
    assert dict(zip(known.metrics, cells.row(known, found, 'A&B_1 50%', 'one'), strict=True))['fast'][0] == ''
    drawn = dict(figures.of(known, found))
    labels = {name: drawn[name].axes[0].get_legend_handles_labels()[1] for name in ('curves', 'curves_personal')}
    assert labels == {'curves': ['Base'], 'curves_personal': ['A&B_1 50%']}
    assert drawn['communication'].axes[0].get_legend_handles_labels()[1] == ['Base']


def test_rounds_to_an_accuracy_are_those_of_the_model_that_a_run_ends_with(tmp_path):
    """A row before calibration shares the run, whose curve is that of the calibrated model."""
    own = {'metrics': {'general': 'global_accuracy_trained_last5'}, 'algorithm': 'ccvr'}
    last = {'metrics': {'general': 'global_accuracy'}, 'algorithm': 'fedavg'}
    study = Study.of({**SAID, 'methods': {**SAID['methods'], 'before': own, 'last': last}}, 'own')
    for run in study.some(['Base', 'before'], ['one']).runs:  # 'last' is Base's run
        write(tmp_path, run, summary(run, 0.6, 0.9), curve(0.6, 4))
    found = report.gather(study, tmp_path)
    assert cells.values(study, found, 'Base', 'one', 'fast')
    assert cells.values(study, found, 'before', 'one', 'fast') == {}
    # Another number of the same model leaves a row its costs and curves.
    assert not study.apart('last')
    assert study.apart('before')


class TestDiverged:
    """A mean of the seeds that did not is told as such."""

    def hurt(self, known, out, seeds, seen=None):
        for run in known.runs:
            if run.scene == 'one' and run.method == 'Base' and run.seed in seeds:
                write(out, run, {'seed': run.seed, 'diverged': 'in round 3'}, seen)
            elif run.scene == 'one':
                general, personal = GENERAL[run.method][run.seed], PERSONAL[run.method][run.seed]
                write(out, run, summary(run, general, personal), curve(general, 4))
        return report.write(known, out)

    def test_all_seeds(self, known, tmp_path):
        folder = self.hurt(known, tmp_path, (0, 1, 2))
        assert rows_of((folder / 'report.md').read_text(), 'Base')[0][::2] == ['diverged'] * 3
        assert 'Base & diverged' in (folder / 'report.tex').read_text()
        table = {(r['method'], r['metric']): r for r in csv_rows(folder / 'table.csv') if r['scene'] == 'one'}
        assert table['Base', 'general']['mean'] == ''
        assert table['A&B_1 50%', 'general']['pairs'] == '0'

    def test_one_seed(self, known, tmp_path):
        folder = self.hurt(known, tmp_path, (1,))
        text = (folder / 'report.md').read_text()
        assert rows_of(text, 'Base')[0][0].startswith(('63.8 ', '63.9 '))  # 61.2 and 66.5
        assert 'diverged' in text
        assert re.search(r'Base.*(seeds? 1|1 of 3|2 of 3)', text)

    def test_its_last_accuracy_is_no_target(self, known, tmp_path):
        rows = [{'round': 1, 'loss': 1.0, 'accuracy': 0.01}, {'round': 2, 'loss': 9.0, 'accuracy': 0.01}]
        text = (self.hurt(known, tmp_path, (1,), rows) / 'report.md').read_text()
        assert re.search(r'rounds to 63\.[89] %', text)  # not with the 1 % of the other

    def test_its_curve_does_not_cut_those_of_the_others(self, known, tmp_path):
        rows = [{'round': 1, 'loss': 1.0, 'accuracy': 0.01}]
        self.hurt(known, tmp_path, (1,), rows)
        drawn = dict(figures.of(known, report.gather(known, tmp_path)))
        (line,) = [u for u in drawn['curves'].axes[0].lines if u.get_label() == 'Base']
        assert list(line.get_xdata())[-1] == 10


def test_what_is_not_reached_and_what_is_not_known_is_said(known, tmp_path):
    runs = known.some(methods=['Base'], scenes=['one']).runs
    for i, run in enumerate(runs):
        content = summary(run, 0.4, 0.8)
        if i == 0:  # of an older version
            del content['bytes'], content['parameters']
        write(tmp_path, run, content, [{'round': r, 'accuracy': 0.4} for r in range(1, 11)])
    lines = (report.write(known, tmp_path) / 'report.md').read_text().splitlines()
    base = [line for line in lines if line.startswith('| Base')]
    assert '| not reached |' in base[0]
    assert any(line.startswith('| Base (2 of 3 runs) |') for line in base)
    assert all('not reached' not in line for line in lines if line.startswith('| A&B'))  # not run is another thing


def test_a_mean_of_rounds_says_how_many_runs_got_there(known, tmp_path):
    """One of three that is quick and two that never arrive are not a quick method."""
    for run in known.runs:
        if run.scene == 'one':
            rows = curve(0.6, 4) if run.seed == 0 else [{'round': 10, 'loss': 1.0, 'accuracy': 0.3}]
            write(tmp_path, run, summary(run, 0.6, 0.7), rows)
    text = (report.write(known, tmp_path) / 'report.md').read_text()
    assert rows_of(text, 'Base')[0][4] != '4'


def test_values():
    found = {'global_accuracy': 0.5, 'temperature': 3.0, 'text': 'x', 'none': None, 'global_few': 0.25,
             'curve': [(1, 30.0), (2, 61.0), (3, 59.0), (4, 60.0)]}  # fmt: skip
    assert runner.value(found, 'global_accuracy') == 50
    assert runner.value(found, 'global_few') == 25
    assert runner.value(found, 'temperature') == 3
    assert runner.value(found, 'rounds_to:0.6') == 2
    assert runner.value(found, 'rounds_to:0.3') == 1
    for name in ('text', 'none', 'missing', 'rounds_to:0.62'):
        assert math.isnan(runner.value(found, name))
    for percent in range(1, 100):  # shares of 100 in float32, some of them less than the target of that name
        met = {'curve': [(5, 100.0 * float(np.float32(percent) / np.float32(100))), (10, 100.0)]}
        assert runner.value(met, f'rounds_to:{percent / 100}') == 5
        missed = {'curve': [(5, percent - 0.01), (10, 100.0)]}  # by one of 10,000 examples
        assert runner.value(missed, f'rounds_to:{percent / 100}') == 10


@pytest.mark.parametrize(
    ('name', 'number', 'said'),
    [
        ('accuracy', 58.55, '58.6'),  # a float below what it stands for
        ('accuracy', 0.25, '0.3'),
        ('accuracy', -0.65, '-0.7'),
        ('accuracy', 100 * 0.6505, '65.1'),
        ('accuracy', 58.549, '58.5'),
        ('accuracy', math.nan, 'nan'),
        ('bytes', 123456.0, '123456.0'),
        ('loss', 0.123456, '0.1235'),
    ],
)
def test_halves_are_rounded_as_papers_do(name, number, said):
    assert runner.shown(name, number) == said


class TestFigures:
    def test_are_written(self, known, written):
        folder = report.write(known, written)
        drawn = {path.stem for path in folder.glob('*.png')}
        assert drawn == {'curves', 'communication', 'rounds', 'clients', 'groups'}
        text = (folder / 'report.md').read_text()
        for name in drawn:
            assert (folder / f'{name}.png').read_bytes().startswith(b'\x89PNG')
            assert f'![{name}]({name}.png)' in text

    def test_of_earlier_reports_go_and_others_stay(self, known, written, monkeypatch):
        folder = report.write(known, written)
        (folder / 'of_mine.png').write_bytes(b'mine')
        monkeypatch.setattr(report.figures, 'of', lambda *given: [])
        report.write(known, written)
        assert [path.name for path in folder.glob('*.png')] == ['of_mine.png']

    def test_one_evaluation_is_no_curve(self, known, tmp_path):
        for run in known.runs:
            write(tmp_path, run, summary(run, 0.6, 0.7), [{'round': 10, 'loss': 1.0, 'accuracy': 0.6}])
        drawn = dict(figures.of(known, report.gather(known, tmp_path)))
        assert 'clients' in drawn
        assert not {'curves', 'communication'} & set(drawn)

    @pytest.mark.parametrize(
        ('own', 'general', 'personal'),
        [('global_accuracy_trained_last5', False, False), ('personal_accuracy_before', True, False)],
    )
    def test_leave_out_rows_that_look_at_another_model(self, tmp_path, own, general, personal):
        methods = {**SAID['methods'], 'Base': {**SAID['methods']['Base'], 'metrics': {'general': own}}}
        known = Study.of({**SAID, 'methods': methods, 'scenes': {'one': {}}, 'published': {}}, 'byhand')
        for run in known.runs:
            write(tmp_path, run, summary(run, 0.6, 0.7), curve(0.6, 4))
        drawn = dict(figures.of(known, report.gather(known, tmp_path)))
        labels = {line.get_label() for line in drawn['curves'].axes[0].lines}
        assert ('Base' in labels, len(labels) > 0) == (general, True)
        ticks = {tick.get_text() for tick in drawn['clients'].axes[0].get_xticklabels()}
        assert ('Base' in ticks, len(ticks) > 0) == (personal, True)

    def test_show_means_over_seeds_and_what_was_sent(self, known, written):
        drawn = dict(figures.of(known, report.gather(known, written)))
        axes = drawn['curves'].axes[0]
        line = next(u for u in axes.lines if u.get_label() == 'A&B_1 50%')
        assert list(line.get_xdata()) == [1, 3, 4, 5, 6, 7, 8, 9, 10]
        np.testing.assert_allclose(line.get_ydata()[-1], 100 * np.mean(GENERAL['A&B_1 50%']) - 1)
        sent = next(u for u in drawn['communication'].axes[0].lines if u.get_label() == 'A&B_1 50%')
        np.testing.assert_allclose(sent.get_xdata()[-1], 360.0)  # kB of all ten rounds
        assert 'kB' in drawn['communication'].axes[0].get_xlabel()

    def test_show_the_rounds_to_an_accuracy_where_all_seeds_reached_it(self, known, written):
        drawn = dict(figures.of(known, report.gather(known, written), 50.0))
        (axes,) = drawn['rounds'].axes  # in the second scene one method was run
        assert axes.get_title() == 'one, to 50.0 %'
        heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
        assert heights == {'Base': [5], 'A&B_1 50%': [5]}
        assert 'rounds' not in dict(figures.of(known, report.gather(known, written), 99.0))
        assert 'rounds' not in dict(figures.of(known.some(['Base']), report.gather(known, written), 50.0))

    def test_groups_of_classes(self):
        def by_group(*summaries):
            names, group = figures.grouping(summaries)
            return names, [group(each) for each in summaries]

        many = {'class_accuracy': [0.9, 0.5, 0.1], 'class_examples': [80, 15, 5]}
        alike = {'class_accuracy': [0.9, 0.5, 0.1], 'class_examples': [30, 31, 32]}
        assert by_group(many) == (('many', 'medium', 'few'), [pytest.approx([90, 50, 10])])
        assert by_group(alike) == (('0', '1', '2'), [pytest.approx([90, 50, 10])])
        names, values = by_group(alike, many)  # seeds of one scene are grouped in one way
        assert (names, len(values)) == (('many', 'medium', 'few'), 2)
        accuracy = np.linspace(0, 1, 12)
        names, (values,) = by_group({'class_accuracy': accuracy.tolist(), 'class_examples': [5] * 12})
        assert names == ('best third', 'middle', 'worst third')
        np.testing.assert_allclose(
            values, 100 * np.array([accuracy[8:].mean(), accuracy[4:8].mean(), accuracy[:4].mean()])
        )
        ((_, lone, _),) = by_group({'class_accuracy': [0.9, 0.1], 'class_examples': [99, 1]})[1]
        assert math.isnan(lone)

    def test_groups_are_of_tested_classes_by_their_tests(self):
        accuracy, examples = [None, 0.5, 0.9, 0.1], [120, 110, 100, 5]
        told = {'class_accuracy': accuracy, 'class_examples': examples, 'class_tested': [0, 30, 10, 20]}
        names, by_group = figures.grouping([told])
        assert names == ('many', 'medium', 'few')
        group = np.asarray(evaluate.groups(jnp.asarray(examples)))
        many = [c for c in (1, 2) if group[c] == 0]
        want = 100 * np.average([accuracy[c] for c in many], weights=[told['class_tested'][c] for c in many])
        np.testing.assert_allclose(by_group(told)[0], want)
        alike = {'class_accuracy': [0.5, None, 0.25], 'class_examples': [9, 9, 9], 'class_tested': [2, 0, 4]}
        np.testing.assert_array_equal(figures.grouping([alike])[1](alike), [50, np.nan, 25])

    def test_scenes_may_have_other_numbers_of_classes(self, known, tmp_path):
        """As FedNH's Table 1, with CIFAR-10 and CIFAR-100."""
        for run in known.runs:
            content = summary(run, 0.6, 0.7)
            if run.scene != 'one':
                content |= {'class_accuracy': [0.5] * 30, 'class_examples': [10] * 30}
            write(tmp_path, run, content, curve(0.6, 4))
        assert (report.write(known, tmp_path) / 'report.md').exists()

    def test_seeds_may_have_other_groups(self, known, tmp_path):
        """Of parts drawn at random one may be just over the limit."""
        for run in known.runs:
            content = summary(run, 0.6, 0.7) | {'class_examples': [30] * 9 + [14 + run.seed]}
            write(tmp_path, run, content, curve(0.6, 4))
        assert (report.write(known, tmp_path) / 'report.md').exists()


PUBLISHED = Path(__file__).parent.parent / 'benchmarks' / 'published'


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(path.parent.name for path in PUBLISHED.glob('*/report.md')))
def test_reports_in_the_repository_are_those_of_their_runs(name, tmp_path):
    """Every number and note, by what the tables and studies say today."""
    (tmp_path / 'runs').symlink_to(PUBLISHED / 'runs')
    own = PUBLISHED.parent / f'{name}.toml'
    known = Study.read(own) if own.exists() else Study.read(*name.split('-'))
    folder = report.write(known, tmp_path)
    assert folder.name == name
    texts = [path.name for path in (PUBLISHED / name).iterdir() if path.suffix in ('.md', '.tex', '.csv')]
    assert {'report.md', 'report.tex', 'runs.csv', 'table.csv'} <= {*texts}
    for text in texts:
        assert (folder / text).read_text() == (PUBLISHED / name / text).read_text(), text
