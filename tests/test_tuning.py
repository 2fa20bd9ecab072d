"""What the tuner extrapolates, remembers, survives and refuses. Which choice is fastest is not tested by a clock."""

import functools
import json

import jax
import numpy as np
import pytest
import toys

from fedjax_nc import models, simulate, tuning
from fedjax_nc.algorithms import fedavg
from fedjax_nc.experiments import __main__ as shell
from fedjax_nc.experiments import command

SIZES = [40, 3, 0, 17, 22, 8]
DATA = toys.ragged(SIZES)
CHOICES = (tuning.Choice(chunk=1), tuning.Choice(chunk=4), tuning.Choice(chunk=2, rounds_per_call=3))


def build(choice):
    plan = toys.PLAN._replace(tails=choice.tails, narrower=choice.narrower)
    return fedavg.algorithm(toys.task, toys.opt, plan=plan)


def rows(lanes, cap):
    """Batch rows of a round of all clients, by hand."""
    batch, epochs = toys.PLAN[:2]
    needed = sorted((epochs * -(-min(n, cap) // batch) * batch for n in SIZES), reverse=True)
    needed += [0] * (-len(needed) % lanes)
    return lanes * sum(max(needed[i : i + lanes]) for i in range(0, len(needed), lanes))


def on_a_clock(monkeypatch, seconds):
    """Calls take `seconds(lanes, cap)` a round, whatever they take."""
    real = tuning.Trial.call

    def call(self, cap, repeats=1):
        return seconds(self.lanes, cap), real(self, cap)[1]

    monkeypatch.setattr(tuning.Trial, 'call', call)


@pytest.mark.slow
def test_a_round_is_extrapolated_along_its_batch_rows(monkeypatch):
    on_a_clock(monkeypatch, lambda lanes, cap: 2 + rows(lanes, cap) / lanes)
    found = tuning.fastest(build, DATA, CHOICES, seconds=2 + rows(1, 16) - 0.5)
    for tried in found.tried:
        lanes = tried.choice.chunk
        assert tried.seconds == pytest.approx(2 + rows(lanes, 40) / lanes)
    assert found.choice.chunk == 4  # the most lanes, where a step costs the same whatever their number
    assert [t.seconds for t in found.tried] == sorted(t.seconds for t in found.tried)
    on_a_clock(monkeypatch, lambda lanes, cap: rows(lanes, cap))  # and where they cost what they compute
    assert tuning.fastest(build, DATA, CHOICES, seconds=50).choice.chunk == 1


@pytest.mark.slow
def test_short_rounds_are_run_whole(monkeypatch):
    caps = []
    on_a_clock(monkeypatch, lambda lanes, cap: caps.append(cap) or lanes)
    found = tuning.fastest(build, DATA, CHOICES, seconds=1000)
    assert max(caps) == 40
    assert [t.seconds for t in found.tried] == [1, 2, 4]


@pytest.mark.slow
def test_it_really_measures():
    found = tuning.fastest(build, DATA, CHOICES, cohort=4, seconds=0.01, repeats=1)
    assert all(0 < t.seconds < 60 and t.compile_seconds > 0 and not t.problem for t in found.tried)
    assert {t.choice for t in found.tried} == set(CHOICES)
    np.testing.assert_array_equal(DATA.size, SIZES)


@pytest.mark.slow
def test_results_are_remembered(monkeypatch, tmp_path):
    cache, lines, compiled, real = tmp_path / 'there' / 'tuning.json', [], [], tuning.Trial.__init__
    monkeypatch.setattr(tuning.Trial, '__init__', lambda self, *args: compiled.append(1) or real(self, *args))
    few = CHOICES[:2]

    def tried(data=DATA, choices=few, **more):
        compiled.clear()
        found = tuning.fastest(build, data, choices, seconds=0.01, cache=cache, show=lines.append, **more)
        return found, len(compiled)

    first, count = tried()
    assert count == len(lines) == 2
    assert tried() == (first, 0)
    assert tried(choices=few[:1])[1] == 1
    assert tried(cohort=3)[1] == 2
    assert tried(data=toys.ragged([9, 9, 9, 9, 9, 9]))[1] == 2
    assert len(json.loads(cache.read_text())) == 4
    assert tried() == (first, 0)
    for damage in ('{"', json.dumps({name: [[1]] for name in json.loads(cache.read_text())})):
        cache.write_text(damage)
        assert tried(choices=few[:1])[1] == 1


def test_a_choice_that_fails_costs_only_itself(monkeypatch):
    real = tuning.Trial.__init__

    def refuse(self, build, data, choice, cohort):
        if choice.chunk != 4:
            raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of\nmemory')
        real(self, build, data, choice, cohort)

    monkeypatch.setattr(tuning.Trial, '__init__', refuse)
    found = tuning.fastest(build, DATA, CHOICES, seconds=0.01)
    assert found.choice.chunk == 4
    assert found.tried[-1].problem == 'RESOURCE_EXHAUSTED: out of memory'
    assert 'out of memory' in tuning._line(found.tried[-1])
    with pytest.raises(RuntimeError, match='no choice runs here'):
        tuning.fastest(build, DATA, CHOICES[:1], seconds=0.01)


def test_forms_reach_the_model():
    seen = []
    choices = [tuning.Choice(), tuning.Choice('patches')]
    tuning.fastest(lambda choice: seen.append(choice.convolution()) or build(choice), DATA, choices, seconds=0.01)
    assert seen[-2:] == [None, models.conv_patches]


def test_a_form_that_refuses_the_model_costs_only_itself(monkeypatch):
    real = tuning.Trial.__init__

    def refuse(self, build, data, choice, cohort):
        if choice.chunk != 4:
            raise ValueError('this convolution has no rhs_dilation')
        real(self, build, data, choice, cohort)

    monkeypatch.setattr(tuning.Trial, '__init__', refuse)
    found = tuning.fastest(build, DATA, CHOICES, seconds=0.01)
    assert [t.problem for t in found.tried] == ['', *['this convolution has no rhs_dilation'] * 2]
    assert found.choice.chunk == 4
    with pytest.raises(ValueError, match='this convolution has no rhs_dilation'):  # not hidden in another
        tuning.fastest(build, DATA, CHOICES[:1], seconds=0.01)


@pytest.mark.slow
def test_what_comes_to_the_same_is_tried_once():
    several = [tuning.Choice(), tuning.Choice(chunk=len(SIZES)), tuning.Choice(chunk=99), tuning.Choice(chunk=2)]
    assert simulate.default_chunk(build(several[0]).init(toys.KEY, DATA), len(SIZES)) == len(SIZES)
    found = tuning.fastest(build, DATA, several, seconds=0.01)
    assert {t.choice for t in found.tried} == {several[0], several[3]}


def test_smaller_batches_are_extrapolated_by_examples_and_remembered(monkeypatch, tmp_path):
    """They leave hardly any padding: the time of a round goes with what clients have."""
    on_a_clock(monkeypatch, lambda lanes, cap: 2 + sum(min(n, cap) for n in SIZES))
    choice, cache = tuning.Choice(chunk=1, tails=(2, 4)), tmp_path / 'tuning.json'
    found = tuning.fastest(build, DATA, [choice], seconds=40, cache=cache)
    assert found.tried[0].seconds == pytest.approx(2 + sum(SIZES))
    assert 'tails 2, 4' in tuning._line(found.tried[0])
    monkeypatch.setattr(tuning, 'Trial', None)
    assert tuning.fastest(build, DATA, [choice], cache=cache) == found


@pytest.mark.slow
def test_narrower_lanes_are_extrapolated_by_what_they_compute_and_remembered(monkeypatch, tmp_path):
    def steps(lanes, cap):
        left = np.array([*sorted((-(-min(n, cap) // toys.PLAN.batch_size) for n in SIZES), reverse=True), 0, 0])
        busy = (left.reshape(-1, lanes)[..., None] > np.arange(left.max())).sum(1)
        return sum(min(n for n in (1, 2, lanes) if n >= others) for others in busy[busy > 0])

    choice, cache = tuning.Choice(chunk=4, narrower=(1, 2)), tmp_path / 'tuning.json'
    assert steps(4, 40) == 4 + 4 + 1 + 1  # of 3, 2, 2 and 1 batches, and of one more
    on_a_clock(monkeypatch, lambda lanes, cap: 2 + 3 * steps(lanes, cap))
    found = tuning.fastest(build, DATA, [choice], seconds=1, cache=cache)
    assert found.tried[0].seconds == pytest.approx(2 + 3 * steps(4, 40))
    assert 'narrower 1, 2' in tuning._line(found.tried[0])
    monkeypatch.setattr(tuning, 'Trial', None)
    assert tuning.fastest(build, DATA, [choice], cache=cache) == found
    assert tuning.Choice.of(json.loads(json.dumps(choice._asdict()))) == choice


@pytest.mark.slow
def test_what_is_far_behind_is_timed_once(monkeypatch):
    seen, real = [], tuning.Trial.call

    def call(self, cap, repeats=1):
        seen.append((self.lanes, repeats))
        return float({1: 10, 2: 19, 4: 21}[self.lanes]), real(self, cap)[1]

    monkeypatch.setattr(tuning.Trial, 'call', call)
    found = tuning.fastest(build, DATA, [tuning.Choice(chunk=n) for n in (1, 2, 4)], seconds=100, repeats=5)
    assert [t.seconds for t in found.tried] == [10, 19, 21]
    assert {repeats for lanes, repeats in seen if lanes == 4} == {1}
    assert {repeats for lanes, repeats in seen if lanes == 2} == {1, 5}


@pytest.mark.parametrize(
    ('choices', 'said'),
    [((), 'nothing to choose'), ((tuning.Choice('fft'),), "no convolution 'fft'"),
     ((tuning.Choice(rounds_per_call=0),), 'rounds_per_call'), ((tuning.Choice(narrower=2),), 'narrower of a choice'),
     ((tuning.Choice(tails=4),), 'tails of a choice')],
)  # fmt: skip
def test_what_is_no_choice_is_refused(choices, said):
    with pytest.raises(ValueError, match=said):
        tuning.fastest(build, DATA, choices)


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, 'Trial', None)
    (tmp_path / 'file').write_text('')
    for cache in (tmp_path, tmp_path / 'file' / 'tuning.json'):
        with pytest.raises(OSError, match=r'folder|exists|directory'):
            tuning.fastest(build, DATA, CHOICES[:1], cache=cache)


def test_candidates_are_few_and_fit_the_cohort():
    with pytest.raises(ValueError, match='clients must be at least 1'):
        tuning.candidates(0)
    for platform in ('cpu', 'cuda', 'tpu'):
        for clients in (1, 4, 20, 100):
            for convolutions in (True, False):
                found = tuning.candidates(clients, convolutions, platform)
                assert 1 <= len(found) <= 10
                assert len(set(found)) == len(found)
                assert found[0] == tuning.Choice()  # which nobody is to lose by asking
                assert all(choice.chunk is None or choice.chunk <= clients for choice in found)
                ask = functools.partial(tuning.candidates, clients, convolutions, platform)
                fewer = [tuning.Choice(chunk=simulate.even(10, clients), narrower=(1, 2, 4))]
                fewer = fewer if platform == 'cuda' and clients > 4 else []
                tails = [tuning.Choice(chunk=1, tails=(16, 32, 64))]
                assert ask(batch_size=128) == [*found, *tails, *fewer]
                assert ask(batch_size=128, sizes=[256, 100]) == [*found, *tails, *fewer]
                assert ask(batch_size=128, sizes=[256, 129]) == [*found, *tails]  # of as many batches
                assert ask(batch_size=128, sizes=[256, 128]) == [*found, *fewer]
                assert ask(batch_size=128, sizes=[256, 256]) == ask(batch_size=128, sizes=[]) == found
                assert ask(batch_size=10) == [*found, *fewer]
                exact = [choice._replace(precision='highest') for choice in found]
                assert tuning.candidates(clients, convolutions, platform, precisions=(None, 'highest')) == found + exact


@pytest.mark.slow
def test_lanes_that_become_fewer_may_be_asked_for_by_hand(tmp_path, capsys):
    args = ['--dataset', 'digits', '--rounds', '1', '--algorithm', 'fedavg', '--clients', '6', '--max-examples', '300']
    plain = command.main([*args, '--out', str(tmp_path / 'plain')])
    fewer = [*args, '--out', str(tmp_path / 'fewer')]
    found = command.main([*fewer, '--clients-per-chunk', '4', '2', '1'])
    assert found['global_accuracy'] == pytest.approx(plain['global_accuracy'], abs=0.02)
    told = json.loads((tmp_path / 'fewer' / 'config.json').read_text())['tuned']
    assert (told['chunk'], told['narrower']) == (4, [1, 2])
    args[3] = fewer[3] = '2'
    command.main([*fewer, '--clients-per-chunk', '3', '--resume'])  # the rest as it began
    told = json.loads((tmp_path / 'fewer' / 'config.json').read_text())['tuned']
    assert (told['chunk'], told['narrower']) == (3, [1, 2])
    with pytest.raises(ValueError, match='must become fewer, and they are 4, 4, 1'):
        command.main([*args, '--out', str(tmp_path / 'other'), '--clients-per-chunk', '4', '4', '1'])
    assert not (tmp_path / 'other' / 'config.json').exists()
    (tmp_path / 'two.toml').write_text(
        'title = "Two"\nseeds = [0]\nmetrics = {General = "global_accuracy"}\n'
        'methods = {FedAvg = {algorithm = "fedavg"}}\n'
        'setting = {dataset = "digits", clients = 6, rounds = 1, max_examples = 300}\n'
    )
    run = ['run', str(tmp_path / 'two.toml'), '--out', str(tmp_path / 'runs'), '--clients-per-chunk', '4', '2']
    shell.main(run)
    (config,) = (tmp_path / 'runs' / 'runs').glob('*/config.json')
    told = json.loads(config.read_text())['tuned']
    assert (told['chunk'], told['narrower']) == (4, [2])


@pytest.mark.slow
def test_a_run_may_be_tuned_and_goes_on_as_it_began(tmp_path, monkeypatch):
    args = ['--dataset', 'digits', '--rounds', '2', '--algorithm', 'fedavg', '--clients', '6', '--max-examples', '300']
    few = [tuning.Choice(chunk=2, rounds_per_call=2)]
    monkeypatch.setattr(tuning, 'candidates', lambda members, **about: few)
    plain = command.main([*args, '--out', str(tmp_path / 'plain')])
    tuned = command.main([*args, '--out', str(tmp_path / 'tuned'), '--tune'])
    assert tuned['global_accuracy'] == pytest.approx(plain['global_accuracy'], abs=0.02)
    assert len(json.loads((tmp_path / 'tuning.json').read_text())) == 1
    config = json.loads((tmp_path / 'tuned' / 'config.json').read_text())
    assert set(config['tuned']) == set(tuning.Choice._fields)
    monkeypatch.setattr(tuning, 'fastest', None)  # is not asked again
    args[3] = '3'
    more = command.main([*args, '--out', str(tmp_path / 'tuned'), '--resume'])
    assert more['rounds'] == 3
    assert json.loads((tmp_path / 'tuned' / 'config.json').read_text())['tuned'] == config['tuned']
    command.main([*args, '--out', str(tmp_path / 'plain'), '--resume', '--tune'])  # nor of a run begun without
    assert 'tuned' not in json.loads((tmp_path / 'plain' / 'config.json').read_text())
    args[3] = '4'
    command.main([*args, '--out', str(tmp_path / 'tuned'), '--resume', '--clients-per-chunk', '1'])
    assert json.loads((tmp_path / 'tuned' / 'config.json').read_text())['tuned'] == {**config['tuned'], 'chunk': 1}
    with pytest.raises(ValueError, match='--tune measures one device'):
        command.main([*args, '--tune', '--devices', '2'])


def test_short_calls_are_timed_many_times_and_long_ones_as_often_as_asked(monkeypatch):
    calls = []

    def extrapolated(trial, cap, times):
        calls.append(times)
        return spent

    monkeypatch.setattr(tuning.Trial, 'extrapolated', extrapolated)
    trial = tuning.Trial(build, DATA, tuning.Choice(), None)
    for spent, asked in ((0.1, [1, 10]), (1e-4, [1, 400]), (0.8, [1, 3])):  # noqa: B007  # what a round seems to take
        calls.clear()
        trial.seconds(8, 3, least=1.0)
        assert calls == asked
    for spent, asked in ((0.8, [1]), (0.1, [1, 10])):  # noqa: B007
        calls.clear()
        trial.seconds(8, 3, limit=0.01, least=1.0)
        assert calls == asked
