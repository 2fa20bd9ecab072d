import contextlib
import csv
import dataclasses
import io
import json
import math
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import toys

from fedjax_nc import (
    _checkpoints,
    _progress,
    _training,
    aggregators,
    evaluate,
    footprint,
    heads,
    local,
    losses,
    models,
    population,
    privacy,
    simulate,
    training,
)  # fmt: skip
from fedjax_nc.algorithms import fedavg, fedetf, fedetf_gmv, fednh, fedprox, latest
from fedjax_nc.data import federate
from fedjax_nc.objective import objective

algorithm = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, persist_momentum=True)
plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)


def begin(data):
    return simulate.init(algorithm, toys.KEY, data)


def run(data, rounds, state=None, **kwargs):
    def measure(state):
        return {'accuracy': evaluate.accuracy(evaluate.generic(algorithm, state, data.x, data.y, toys.CLASSES))}

    return training.run(algorithm, toys.KEY, state or begin(data), data, rounds=rounds, cohort=4, evaluate=measure,
                        eval_last=1, progress=False, **kwargs)  # fmt: skip


def go(algorithm, data, progress=False, **kwargs):
    """A run of another algorithm, from its first state."""
    state = simulate.init(algorithm, toys.KEY, data)
    return training.run(algorithm, toys.KEY, state, data, progress=progress, **kwargs)


@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):
    """Five rounds without a break."""
    out = tmp_path_factory.mktemp('whole')
    return run(data, 5, eval_every=2, out=out), out


@contextlib.contextmanager
def compiled():
    """The names of what is compiled meanwhile."""
    names = []

    def listen(event, duration, **about):
        if event == '/jax/core/compile/backend_compile_duration':
            names.append(about.get('fun_name'))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def lines(out):
    return [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]


def without_time(history):
    return [{k: v for k, v in row.items() if k not in ('seconds', 'compile_seconds')} for row in history]


def test_a_pause_between_checkpoints_leaves_out_all_but_the_first_and_the_last(data, tmp_path):
    run(data, 4, out=tmp_path, checkpoint_pause=1e6)
    assert sorted(path.name for path in (tmp_path / 'checkpoints').iterdir() if path.name.isdigit()) == ['1', '4']
    seen = []
    run(data, 5, out=tmp_path / 'several', checkpoint_pause=1e6, rounds_per_call=3, eval_every=9,
        on_round=lambda row, state: seen.append(int(state.server.round)))  # fmt: skip
    assert seen == [3, 3, 3, 5, 5]  # no call ends for a checkpoint
    with pytest.raises(ValueError, match='checkpoint_pause must not be negative'):
        run(data, 4, checkpoint_pause=-1.0)


@pytest.mark.slow
@pytest.mark.parametrize('enough', [
    lambda row, state: row['round'] == 1,
    lambda row, state: np.float32(row['loss']) > 0,
    lambda row, state: state.server.round >= 1,
], ids=['python', 'numpy', 'jax'])  # fmt: skip
@pytest.mark.parametrize('rounds_per_call', [1, 2])
def test_who_watches_may_end_it_and_it_goes_on_as_if_nobody_had(data, whole, rounds_per_call, enough, tmp_path):
    ended = run(data, 5, out=tmp_path, eval_every=2, checkpoint_every=5, rounds_per_call=rounds_per_call,
                on_round=enough)  # fmt: skip
    assert [row['round'] for row in ended.history] == [*range(1, rounds_per_call + 1)]
    assert len(lines(tmp_path)) == int(ended.state.server.round) == rounds_per_call
    resumed = run(data, 5, out=tmp_path, eval_every=2, resume=True, on_round=lambda row, state: 'goes on')
    toys.same(resumed.state, whole[0].state)
    assert without_time(resumed.history) == without_time(whole[0].history)


def test_with_a_pause_checkpoints_need_not_wait_for_an_evaluation(data, tmp_path):
    """Rounds may take minutes, and a run may be evaluated only at its end."""

    def stopped(row, state):
        if row['round'] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(data, 4, eval_every=4, out=tmp_path, checkpoint_pause=1e-9, on_round=stopped)
    assert {path.name for path in (tmp_path / 'checkpoints').iterdir() if path.name.isdigit()} == {'1', '2'}


def test_rounds_are_those_of_the_engine(data, whole):
    state, step = begin(data), jax.jit(simulate.make_round(algorithm, cohort=4))
    for t in range(5):
        state, report = step(jax.random.fold_in(toys.KEY, t), state, data)
    toys.same(whole[0].state, state, atol=1e-6)
    np.testing.assert_allclose(whole[0].history[-1]['loss'], report.loss, rtol=1e-5)


def test_history_log_and_table_agree(whole):
    result, out = whole
    assert [row['round'] for row in result.history] == [1, 2, 3, 4, 5]
    assert ['accuracy' in row for row in result.history] == [False, True, False, True, True]
    assert lines(out) == result.history
    with (out / 'metrics.csv').open() as file:
        table = list(csv.DictReader(file))
    assert [float(row['loss']) for row in table] == [row['loss'] for row in result.history]
    assert table[0]['accuracy'] == ''
    assert result.compile_seconds == sum(row.get('compile_seconds', 0) for row in result.history) > 0
    assert result.rounds_per_second > 0


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(data, whole, tmp_path):
    first = run(data, 3, eval_every=2, out=tmp_path, checkpoint_every=1)
    resumed = run(data, 5, eval_every=2, out=tmp_path, resume=True)
    toys.same(resumed.state, whole[0].state)
    # Round 3 was the last of the first run, which evaluates its last.
    assert 'accuracy' in first.history[-1]
    rows = without_time(resumed.history)
    rows[2].pop('accuracy')
    assert rows == without_time(whole[0].history)
    assert lines(tmp_path) == resumed.history


def test_work_after_the_last_checkpoint_is_done_again(data, whole, tmp_path):
    """As after a crash: the log is ahead of the checkpoint, and its last line was cut."""
    run(data, 2, eval_every=2, out=tmp_path)
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"round": 3, "loss": 0.1}\n{"round": 4, "lo')
    resumed = run(data, 5, eval_every=2, out=tmp_path, resume=True)
    assert without_time(lines(tmp_path)) == without_time(resumed.history) == without_time(whole[0].history)


def test_finished_run_resumes_to_itself(data, whole, tmp_path):
    shutil.copytree(whole[1], tmp_path / 'copy')
    again = run(data, 5, eval_every=2, out=tmp_path / 'copy', resume=True)
    toys.same(again.state, whole[0].state)
    assert again.history == whole[0].history
    assert again.rounds_per_second == whole[0].rounds_per_second


def test_several_rounds_a_call_give_the_same_run(data, whole):
    several = run(data, 5, eval_every=2, rounds_per_call=2)
    toys.same(several.state, whole[0].state, atol=1e-6)
    assert [row['round'] for row in several.history] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ('args', 'due', 'want'),
    [
        ((0, 5, 1), (), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        ((0, 7, 3), (2, 4, 6), [(0, 2), (2, 4), (4, 6), (6, 7)]),
        ((4, 9, 10), (5, 6), [(4, 5), (5, 6), (6, 9)]),
        ((5, 5, 1), (), []),
    ],
)
def test_calls_end_wherever_something_is_due(args, due, want):
    assert list(_training.calls(*args, lambda t: t in due)) == want


def test_the_last_rounds_are_evaluated_whatever_the_interval(data):
    history = training.run(algorithm, toys.KEY, begin(data), data, rounds=8, evaluate=lambda s: {'accuracy': 0.5},
                           eval_every=4, eval_last=3, rounds_per_call=5, progress=False).history  # fmt: skip
    assert [row['round'] for row in history if 'accuracy' in row] == [4, 6, 7, 8]


@pytest.mark.parametrize(
    ('found', 'said'),
    [
        ({'loss': 0.5}, "'loss' is what each row says"),
        ({'round': 3}, "'round' is what"),
        ({'seconds': 0}, "'seconds' is what"),
        ({'compile_seconds': 0}, "'compile_seconds' is what"),
        ({'f1': np.ones(3)}, r"metric 'f1' of evaluate must be one number, not an array \(3,\)"),
        ({'f1': 'high'}, "metric 'f1' .* not 'high'"),
        (0.5, 'scalars by name'),
    ],
)
def test_metrics_that_are_none(data, found, said):
    with pytest.raises(ValueError, match=said):
        go(plain, data, rounds=1, evaluate=lambda state: found)


def test_rounds_share_a_call_where_nothing_is_due(data, monkeypatch):
    alone, made, calls = go(plain, data, rounds=10), [], _training.calls
    monkeypatch.setattr(_training, 'calls', lambda *args: made.extend(calls(*args)) or iter(made))
    together = go(plain, data, rounds=10, rounds_per_call=4)
    assert made == [(0, 4), (4, 8), (8, 10)]
    toys.same(together.state, alone.state, atol=1e-6)


def test_a_limit_that_is_no_number(data):
    for wrong in ('x', math.nan, -1.0):
        with pytest.raises(ValueError, match='memory_limit'):
            go(plain, data, rounds=1, memory_limit=wrong)


def test_tokens_beyond_the_vocabulary_are_thought_of():
    embedding = models.from_functions(
        lambda key, x: jax.random.normal(key, (50, 4)), lambda table, x: jnp.take(table, x, axis=0).mean(1)
    )
    tokens = np.random.default_rng(0).integers(0, 60, (40, 6)).astype(np.int32)
    clients = federate(tokens, np.arange(40) % 2, np.split(np.arange(40), 4))
    task = objective(embedding, heads.linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, toys.opt, plan=toys.PLAN)
    with pytest.raises(training.DivergedError, match=r'round 1: .* see that none is beyond its vocabulary'):
        go(algorithm, clients, rounds=2)


def test_nan_stops_the_run_names_the_round_and_keeps_the_last_good_checkpoint(data, tmp_path):
    wild = fedavg.algorithm(toys.task, lambda round: optax.sgd(jnp.where(round < 2, 0.1, 1e30)), plan=toys.PLAN)
    said = r'round 3.* of 8 clients are not finite: .*lower learning rate.*checkpoint is that of round 2'
    with pytest.raises(training.DivergedError, match=said):
        go(wild, data, rounds=4, out=tmp_path, checkpoint_every=1)
    resumed = go(wild, data, rounds=2, out=tmp_path, resume=True)
    assert len(resumed.history) == 2
    assert bool(jnp.isfinite(resumed.state.server.variables.params['head']['w']).all())


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (
            lambda d: d._replace(x=d.x.at[d.index[3, 2]].set(jnp.nan)),
            '1 of 8 clients are not finite: 3; examples of client 3 hold NaN or infinity: mend the data',
        ),
        (
            lambda d: d._replace(y=d.y + 7),
            '8 of 8 clients .*; labels of client 0 go from 7 to .*, and the data have 5 classes',
        ),
    ],
)
def test_what_is_wrong_with_the_data_is_not_blamed_on_the_rate(data, change, said):
    with pytest.raises(training.DivergedError, match=f'round 1.*{said}'):
        go(plain, change(data), rounds=2)


def test_a_diverging_server_is_not_blamed_on_clients(data):
    wild = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, server_opt=optax.sgd(jnp.inf))
    with pytest.raises(training.DivergedError, match=r'no client is broken: .*lower rates'):
        go(wild, data, rounds=2)


def test_broken_clients_are_counted_where_the_server_stays_finite(data, capsys):
    bad = data._replace(x=data.x.at[data.index[jnp.array([2, 6]), 0]].set(jnp.inf))
    for robust in (
        fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, aggregate=aggregators.stacked(aggregators.krum(2))),
        privacy.private(plain, clip=1.0, noise_multiplier=0.0, cohort=8),
    ):
        with pytest.warns(UserWarning, match=r'round 1: 2 of 8 clients .*: 2, 6; examples of client 2 ') as said:
            history = go(robust, bad, rounds=3, progress=True).history
        assert len(said) == 1
        assert [row['broken'] for row in history] == [2, 2, 2]
        assert all(math.isfinite(row['loss']) for row in history)
        assert '2 of 8 clients not finite' in capsys.readouterr().err


def test_a_second_run_does_not_overwrite_the_first(data, whole):
    with pytest.raises(ValueError, match='already holds a run'):
        run(data, 5, out=whole[1])


def test_damaged_checkpoint_is_put_aside_for_the_one_before_it(data, whole, tmp_path):
    run(data, 2, out=tmp_path)

    def damage(round):
        for file in (tmp_path / 'checkpoints' / str(round)).rglob('*'):
            if file.is_file() and file.parent.name != str(round):
                file.write_bytes(b'damaged')

    damage(2)
    with pytest.warns(UserWarning, match=r'round 2 is damaged and now lies in .*damaged-2; going on from round 1'):
        resumed = run(data, 5, out=tmp_path, checkpoint_every=1, resume=True)
    toys.same(resumed.state, whole[0].state)
    assert (tmp_path / 'damaged-2').is_dir()
    assert lines(tmp_path) == resumed.history
    for round in (4, 5):
        damage(round)
    with pytest.raises(training.CheckpointError, match=r'no checkpoint can be read: .*checkpoints/5.*checkpoints/4'):
        run(data, 6, out=tmp_path, resume=True)
    assert {'4', '5'} <= {path.name for path in (tmp_path / 'checkpoints').iterdir()}


def test_tables_are_renewed_when_a_run_is_resumed(data, whole, tmp_path):
    """As after a kill between a checkpoint and its table."""
    shutil.copytree(whole[1], tmp_path / 'copy')
    for name in ('metrics.csv', 'metrics.jsonl'):
        kept = (tmp_path / 'copy' / name).read_text().splitlines(keepends=True)
        (tmp_path / 'copy' / name).write_text(''.join(kept[:-2]))
    run(data, 5, eval_every=2, out=tmp_path / 'copy', resume=True)
    for name in ('metrics.csv', 'metrics.jsonl'):
        assert (tmp_path / 'copy' / name).read_bytes() == (whole[1] / name).read_bytes()


def test_a_flipped_bit_is_never_restored(data, tmp_path):
    """A bit of every file of a checkpoint, one at a time: the same arrays, or none."""
    state, history = begin(data), [{'round': 1, 'loss': 0.123456789}]
    files = _checkpoints.Files(tmp_path, {'algorithm': 'x'})
    files.save(1, state, toys.KEY, history)
    rng, caught = np.random.default_rng(0), 0
    for path in sorted(p for p in (tmp_path / 'checkpoints' / '1').rglob('*') if p.is_file() and p.stat().st_size):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            rows, restored = files.read(1, state, toys.KEY)
        except (_checkpoints.DamagedError, training.CheckpointError):
            caught += 1
        else:
            assert rows == history
            toys.same(restored, state)
        path.write_bytes(good)
    assert caught > 3


def test_a_directory_is_held_by_one_run(data, tmp_path):
    code = (
        'import sys, pathlib; from fedjax_nc import _checkpoints\n'
        'with _checkpoints.holding(pathlib.Path(sys.argv[1])): print("held", flush=True); input()'
    )
    args = [sys.executable, '-c', code, str(tmp_path)]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == 'held\n'
        for resume in (False, True):
            with pytest.raises(ValueError, match='in use by another run'):
                run(data, 1, out=tmp_path, resume=resume)
        holder.kill()  # a dead holder does not block
        holder.wait()
    assert [path.name for path in tmp_path.iterdir()] == ['.lock']
    with _checkpoints.holding(tmp_path):  # and whoever holds it may hold it again
        assert len(run(data, 1, out=tmp_path).history) == 1


def test_clients_with_no_loss_are_warned_of_even_under_a_mean(data):
    """Their messages are finite, and so is the server."""
    bad = data._replace(y=data.y.at[data.index[3, 2]].set(77))
    with pytest.warns(UserWarning, match='1 of 8 clients are not finite: 3; labels of client 3 go from . to 77'):
        history = go(plain, bad, rounds=2).history
    assert [row['broken'] for row in history] == [1, 1]


@pytest.mark.parametrize('what', ['arrays', 'description'])
def test_whole_files_with_other_content_are_damaged_too(data, tmp_path, monkeypatch, what):
    """As if storage had returned the file of another round: nothing but the checksums can tell."""
    files, state = _checkpoints.Files(tmp_path), begin(data)
    with monkeypatch.context() as patched:
        if what == 'arrays':
            patched.setattr(_checkpoints._fingerprint, 'of_arrays', lambda tree: 32 * '0')
        else:
            patched.setattr(_checkpoints, '_checksum', lambda content: 32 * '0')
        files.save(1, state, toys.KEY, [{'round': 1}])
    with pytest.raises(_checkpoints.DamagedError, match=f'its {what}'):
        files.read(1, state, toys.KEY)


def test_a_checkpoint_that_cannot_be_read_now_is_left_where_it_is(data, tmp_path, monkeypatch):
    files, state = _checkpoints.Files(tmp_path), begin(data)
    for round in (1, 2):
        files.save(round, state, toys.KEY, round * [{'round': 1}])

    def fail(*args, **kwargs):
        raise OSError(5, 'Input/output error')

    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, 'restore', fail)
        with pytest.raises(training.CheckpointError, match=r'checkpoints/2 cannot be read: .*try again'):
            files.restore(state, toys.KEY)
    assert len(files.restore(state, toys.KEY)[0]) == 2


def test_checkpoints_of_another_kind_are_not_called_damaged(data, tmp_path):
    kept = population.init(algorithm, toys.KEY, data)
    training.run(algorithm, toys.KEY, kept, data, rounds=2, cohort=4, out=tmp_path, progress=False)
    with pytest.raises(training.CheckpointError, match=r'begun with a state of population.init, and '):
        run(data, 3, out=tmp_path, resume=True)
    old = _checkpoints.Files(tmp_path / 'old')
    with old.manager() as manager:
        manager.save(1, args=ocp.args.Composite(
            run=ocp.args.JsonSave({'key': [0, 7], 'history': [{'round': 1}]})))  # fmt: skip
    with pytest.raises(training.CheckpointError, match='of a version without checksums'):
        old.restore(begin(data), toys.KEY)


def test_a_run_is_resumed_with_other_numbers_that_change_nothing(data, whole, tmp_path):
    state = begin(data)
    training.run(algorithm, toys.KEY, state, data, rounds=1, out=tmp_path, progress=False)
    again = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    done = training.run(
        again, toys.KEY, begin(data), data, rounds=np.int64(3), cohort=8, chunk=3, eval_every=2, checkpoint_every=1,
        out=tmp_path, resume=True, progress=False,
    )  # fmt: skip
    assert len(done.history) == 3


def test_a_checkpoint_that_is_not_written_is_an_error(data, tmp_path):
    files = _checkpoints.Files(tmp_path)
    files.save(2, begin(data), toys.KEY, [{'round': 1}, {'round': 2}])
    with pytest.raises(training.CheckpointError, match='round 1 was not written'):
        files.save(1, begin(data), toys.KEY, [{'round': 1}])


def test_a_disk_that_is_full_is_told_as_such(data, tmp_path, monkeypatch):
    """The library below calls it a wrong value."""

    def full(*args, **kwargs):
        raise ValueError('OUT_OF_RANGE: No space left\non device')

    monkeypatch.setattr(_checkpoints._orbax().CheckpointManager, 'save', full)
    with pytest.raises(
        training.CheckpointError, match='round 1 was not written: OUT_OF_RANGE: No space left on device'
    ):
        training.run(algorithm, toys.KEY, begin(data), data, rounds=2, out=tmp_path, checkpoint_every=1, progress=False)


@pytest.mark.parametrize('number', [jnp.int32, np.int64])
def test_numbers_of_jax_and_numpy_are_taken(data, number):
    want, got = (
        training.run(algorithm, toys.KEY, begin(data), data, rounds=1, cohort=of(3), chunk=of(2), progress=False)
        for of in (int, number)
    )
    toys.same(want.state, got.state)


def test_a_plan_of_jax_arrays_is_refused():
    with pytest.raises(ValueError, match=r"plan must hold numbers of Python's"):
        fedavg.algorithm(toys.task, toys.opt, plan=local.Plan(jnp.int32(16), 1))


@pytest.mark.slow
def test_without_jit_a_run_can_be_debugged(data):
    small = toys.ragged([9, 5])
    plan = local.Plan(8, 1)
    task = fedavg.algorithm(toys.task, toys.opt, plan=plan)
    ends = []
    for off in (False, True):
        with jax.disable_jit(off):
            state = simulate.init(task, toys.KEY, small)
            ends.append(training.run(task, toys.KEY, state, small, rounds=2, chunk=1, progress=False))
    toys.same(ends[0].state, ends[1].state, atol=1e-5)


def test_a_run_is_not_resumed_as_another(data, tmp_path):
    def named(opt=toys.opt, **kwargs):
        return fedavg.algorithm(toys.task, opt, plan=toys.PLAN, **kwargs)

    go(named(), data, rounds=2, out=tmp_path)
    for other in (
        named(penalty=fedprox.proximal(0.1)),
        named(local.sgd(0.06)),
        named(lambda round: optax.sgd(0.05)),
        fedprox.algorithm(toys.task, toys.opt, mu=0.0, plan=toys.PLAN),
    ):
        with pytest.raises(training.CheckpointError, match='another algorithm: resume it with'):
            go(other, data, rounds=2, out=tmp_path, resume=True)
    with pytest.raises(training.CheckpointError, match='another data: resume'):
        go(named(), data._replace(x=data.x.at[0, 0].add(1e-3)), rounds=2, out=tmp_path, resume=True)
    with pytest.raises(training.CheckpointError, match='another cohort: resume'):
        go(named(), data, cohort=3, rounds=2, out=tmp_path, resume=True)
    assert len(go(named(), data, rounds=3, out=tmp_path, resume=True).history) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_lines_in_a_pipe(data, capsys):
    go(plain, data, rounds=3, progress=True, name='toy')
    told = capsys.readouterr().err.splitlines()
    assert told[0] == 'toy: round 0 of 3, compiling'
    assert told[1].startswith('toy: round 1 of 3, loss ')
    assert told[-1].startswith('toy: round 3 of 3, loss ')
    assert not any('\r' in line for line in told)


def test_the_time_that_is_left_is_that_of_rounds_alone(monkeypatch, capsys):
    now = iter([100.0, 160.0, 160.0, 160.0, 170.0, 170.0])  # a minute of compiling, then a second a round
    monkeypatch.setattr(_progress.time, 'monotonic', lambda: next(now))
    with _progress.Progress('toy', 0, 100) as bar:
        bar.compiling()
        bar.at(1, 'loss 1')
        bar.at(11, 'loss 1')
    told = capsys.readouterr().err.splitlines()
    assert 'left' not in told[1]
    assert told[2].endswith(', 01:29 left')


@pytest.mark.parametrize('columns', [40, 120])
def test_progress_shows_loss_and_accuracy_however_narrow_the_terminal(monkeypatch, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    monkeypatch.setattr(sys, 'stderr', screen := Terminal())
    history = [{'round': 1, 'loss': 1.23456, 'accuracy': 0.51234, 'seconds': 0.5}]
    with _progress.Progress('fedavg', 0, 200) as bar:
        bar.compiling()
        assert 'compiling' in screen.getvalue()
        bar.at(12, _training.shown(history, 8))
    last = screen.getvalue().replace('\r', '\n').split('\n')
    assert any('12/200, loss 1.235, accuracy 0.512' in line[:columns] for line in last)


def test_checkpoint_of_another_model_is_refused(data, tmp_path):
    run(data, 1, out=tmp_path)
    other = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    with pytest.raises(training.CheckpointError, match='checkpoints/1'):
        training.run(other, toys.KEY, simulate.init(other, toys.KEY, data), data, rounds=2, out=tmp_path, resume=True,
                     progress=False)  # fmt: skip


def test_checkpoint_of_another_key_is_refused(data, tmp_path):
    run(data, 1, out=tmp_path)
    with pytest.raises(training.CheckpointError, match='belongs to another run'):
        training.run(algorithm, jax.random.key(99), begin(data), data, rounds=2, out=tmp_path, resume=True,
                     progress=False)  # fmt: skip


def test_fewer_rounds_than_were_run_are_refused(data, whole):
    with pytest.raises(ValueError, match='already holds 5 rounds, more than the 3'):
        run(data, 3, eval_every=2, out=whole[1], resume=True)


def test_a_run_that_cannot_fit_is_refused_before_its_first_round(data, tmp_path):
    state = begin(data)
    with pytest.raises(MemoryError, match=r'needs about .* GiB and can have 9.31e-07 GiB'):
        run(data, 1, state=state, out=tmp_path, memory_limit=1000)
    assert [path.name for path in tmp_path.iterdir()] == ['.lock']
    assert len(run(data, 1, state=state, out=tmp_path).history) == 1  # the state was not used up


def test_what_is_free_is_the_limit_unless_there_shall_be_none(data, whole, monkeypatch):
    monkeypatch.setattr(footprint, '_available', lambda: 0)
    with pytest.raises(MemoryError, match='no chunk would fit'):
        run(data, 1)
    assert without_time(run(data, 1, memory_limit=math.inf).history)[0]['loss'] == whole[0].history[0]['loss']


@pytest.mark.parametrize(
    ('kwargs', 'match'),
    [
        ({'rounds': 0}, 'rounds must be'),
        ({'rounds': 2.5}, 'whole number'),
        ({'rounds': 2, 'eval_every': 0}, 'eval_every must be'),
        ({'rounds': 2, 'resume': True}, 'pass out='),
        ({'rounds': 2, 'key': 0}, 'key must be a random key'),
        ({'rounds': 2, 'state': None}, 'state must be a State'),
    ],
)
def test_bad_numbers_are_refused(data, kwargs, match):
    with pytest.raises(ValueError, match=match):
        training.run(**{'algorithm': algorithm, 'key': toys.KEY, 'state': begin(data), 'data': data, **kwargs})


def test_last_mean_counts_evaluated_rounds_only():
    history = [{'round': i, **({'accuracy': i / 10} if i % 2 else {})} for i in range(1, 13)]
    np.testing.assert_allclose(training.last_mean(history), np.mean([3, 5, 7, 9, 11]) / 10)
    assert np.isnan(training.last_mean([{'round': 1}]))


@pytest.mark.slow
@pytest.mark.parametrize(
    'algorithm',
    [
        fedetf.algorithm(toys.noisy, toys.opt, persist_momentum=True, plan=toys.PLAN),
        fedetf_gmv.algorithm(toys.noisy, toys.opt, warm=1, features='online', plan=toys.PLAN),
        latest.keep(fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)),
    ],
    ids=['fedetf', 'fedetf_gmv', 'fednh'],
)
def test_memories_prototypes_and_clients_models_survive_a_resumption(algorithm, data, tmp_path):
    def go(rounds, out, **kwargs):
        state = simulate.init(algorithm, toys.KEY, data)
        return training.run(
            algorithm, toys.KEY, state, data, rounds=rounds, cohort=4, out=out, progress=False, **kwargs
        ).state

    go(2, tmp_path / 'halves')
    toys.same(go(3, tmp_path / 'halves', resume=True), go(3, tmp_path / 'whole'))


def test_a_line_that_was_torn_does_not_take_the_next_with_it(tmp_path):
    path = tmp_path / 'rows.jsonl'
    _checkpoints.append(path, '{"round": 1}')
    path.write_bytes(path.read_bytes() + b'{"rou')
    for t in (2, 3):
        _checkpoints.append(path, f'{{"round": {t}}}')
    assert path.read_text().splitlines() == ['{"round": 1}', '{"rou', '{"round": 2}', '{"round": 3}']


@pytest.mark.parametrize(('begin', 'program'), [(simulate.init, 'jit(rounds)'), (population.init, 'jit(told)')])
def test_a_run_after_one_like_it_compiles_no_round(data, begin, program):
    def rounds(algorithm, n, **how):
        return training.run(
            algorithm, toys.KEY, begin(algorithm, toys.KEY, data), data, rounds=n, progress=False, **how
        )

    kept = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    first = rounds(kept, 1, cohort=2)
    with compiled() as programs:
        again = rounds(kept, 1, cohort=2)
        assert program not in programs
        rounds(kept, 1, cohort=3)
        assert program in programs
    toys.same(first.state.server, again.state.server)


FACTOR = 1.0


def test_what_an_algorithm_takes_from_its_module_may_change_between_runs(data, monkeypatch):
    settings = {'factor': 1.0}

    def client(key, server, client, data):
        message, client, info = plain.client(key, server, client, data)
        return message, client, info._replace(loss=info.loss * FACTOR * settings['factor'])

    scaled = plain._replace(client=client)
    (once,) = go(scaled, data, rounds=1).history
    settings['factor'] = 2.0
    (twice,) = go(scaled, data, rounds=1).history
    monkeypatch.setattr(sys.modules[__name__], 'FACTOR', 2.0)
    (more,) = go(scaled, data, rounds=1).history
    np.testing.assert_allclose([twice['loss'], more['loss']], [2 * once['loss'], 4 * once['loss']], rtol=1e-6)


def test_functions_that_cannot_be_told_apart_are_compiled_anew(data):
    @dataclasses.dataclass(eq=True)
    class Client:
        rate: np.ndarray

        def __call__(self, *given):
            return plain.client(*given)

    (row,) = go(plain._replace(client=Client(np.ones(2))), data, rounds=1).history
    assert row['loss'] == go(plain, data, rounds=1).history[0]['loss']
