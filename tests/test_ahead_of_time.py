"""Rounds compiled for accelerators that are not there: how programs are read, rows kept and refusals worded."""

import importlib
import json
import math
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import toys

from fedjax_nc import local, losses, simulate
from fedjax_nc.algorithms import fedavg
from fedjax_nc.heads import linear
from fedjax_nc.objective import objective

BENCHMARKS = Path(__file__).parent.parent / 'benchmarks'


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module('ahead_of_time')


@pytest.fixture
def programs(bench):
    return importlib.import_module('programs')


@pytest.fixture
def estimates(bench):
    return importlib.import_module('estimates')


PROGRAM = """
HloModule jit_round, is_scheduled=true

%moved (p.1: f32[500,1000]) -> f32[1000,500] {
  %p.1 = f32[500,1000]{1,0:T(8,128)} parameter(0)
  ROOT %t.1 = f32[1000,500]{1,0:T(8,128)(2,1)S(1)} transpose(%p.1), dimensions={1,0}
}

%picked (p.2: u8[60000,32,32,3], p.3: s32[10]) -> f32[10,32,32,3] {
  %p.2 = u8[60000,32,32,3]{3,2,1,0} parameter(0)
  %p.3 = s32[10]{0} parameter(1)
  %g.1 = u8[10,32,32,3]{3,2,1,0} gather(%p.2, %p.3), offset_dims={1,2,3}
  ROOT %c.1 = f32[10,32,32,3]{3,2,1,0} convert(%g.1)
}

%stored (p.4: f32[20,8], p.5: f32[1,8], p.6: s32[]) -> f32[20,8] {
  %p.4 = f32[20,8]{1,0} parameter(0)
  %p.5 = f32[1,8]{1,0} parameter(1)
  %p.6 = s32[] parameter(2)
  ROOT %u.1 = f32[20,8]{1,0} dynamic-update-slice(%p.4, %p.5, %p.6, %p.6)
}

%lane (l: (s32[], f32[8])) -> (s32[], f32[8]) {
  %l = (s32[], f32[8]{0}) parameter(0)
  %x.1 = f32[8]{0} get-tuple-element(%l), index=1
  %n.1 = f32[8]{0} negate(%x.1), backend_config={"estimated_cycles":"7"}
  ROOT %r.1 = (s32[], f32[8]{0}) tuple(%x.1, %n.1)
}

%more (l.2: (s32[], f32[8])) -> pred[] {
  %four = s32[]{:T(128)} constant(4)
  %l.2 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%l.2), index=0
  ROOT %lt.1 = pred[] compare(%i.1, %four), direction=LT
}

%batches (s: (s32[], f32[8], f32[500,1000])) -> (s32[], f32[8], f32[500,1000]) {
  %s = (s32[], f32[8]{0}, /*index=2*/f32[500,1000]{1,0}) parameter(0)
  %x.2 = f32[8]{0} get-tuple-element(%s), index=1
  %y.2 = f32[500,1000]{1,0} get-tuple-element(%s), index=2
  %w.2 = f32[8,8]{1,0:T(8,128)} add(%x.2, %x.2), metadata={op_name="jvp(CNN)/dot"}, "estimated_cycles":"100"
  %a.2 = f32[1000,500]{1,0} fusion(%y.2), kind=kLoop, calls=%moved, op_name="jvp(CNN)/t", "estimated_cycles":"1000"
  %k.2 = (f32[9,4,4]{2,1,0}, u8[4096]{0}) custom-call(%w.2, %x.2), window={size=3x3}, custom_call_target="a$convFilter"
  %k.3 = (f32[9,4,4]{2,1,0}, u8[0]{0}) custom-call(%w.2), window={size=32x32}, custom_call_target="a$convForward"
  %b.2 = f32[8]{0} get-tuple-element((s32[], f32[8]{0}) %loop.2), index=1
  %loop.2 = (s32[], f32[8]{0}) while(%s), condition=%more, body=%lane
  ROOT %r.2 = (s32[], f32[8]{0}, f32[500,1000]{1,0}) tuple(%x.2, %b.2, %y.2)
}

%unknown (l.3: (s32[], f32[8])) -> pred[] {
  %l.3 = (s32[], f32[8]{0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%l.3), index=0
  ROOT %lt.3 = pred[] compare(%i.3, %i.3), direction=LT
}

%clients (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]{0}) parameter(0)
  %o.1 = f32[8]{0} get-tuple-element(%q), index=1
  %o.2 = f64[8]{0} convert(%o.1), backend_config={"estimated_cycles":"5"}
  ROOT %loop.1 = (s32[], f32[8]{0}) while(%q), condition=%unknown, body=%batches
}

ENTRY %main (a: f32[2,2], b: u8[60000,32,32,3]) -> f32[2] {
  %a = f32[2,2]{1,0} parameter(0)
  %b = u8[60000,32,32,3]{3,2,1,0} parameter(1)
  %i = s32[10]{0} custom-call(), custom_call_target="draw"
  %f.1 = f32[10,32,32,3]{3,2,1,0} fusion(%b, %i), kind=kLoop, calls=%picked
  %big = f32[20,8]{1,0} copy(%a), backend_config={"estimated_cycles":"1"}
  %row = f32[1,8]{1,0} copy(%a)
  %off = (f32[2,2]{1,0}, f32[2,2]{1,0}, u32[]) copy-start(%a)
  %f.2 = f32[20,8]{1,0} fusion(%big, %row, %i), kind=kLoop, calls=%stored
  %c.9 = (f32[2,2]{1,0}, f32[8]{0}) all-reduce(%a, %row), channel_id=1
  %c.10 = f32[2,2,20]{2,1,0} convolution(%a, %a), window={size=3x3x20 lhs_dilate=1x1x20}, dim_labels=01b2f_01i2o->01b2f
  %c.11 = f32[2,2,20]{2,1,0} convolution(%a, %a), window={size=16x16x20}, dim_labels=01b2f_01i2o->01b2f
  ROOT %rounds = (s32[], f32[8]{0}) while(%a), condition=%unknown, body=%clients, "known_trip_count":{"n":"20"}
}
"""


def test_loops_and_their_cycles(programs):
    program = programs.parse(PROGRAM)
    assert program.entry == 'main'
    whole = programs.loop(program)
    assert [body.trips for body in whole.every()] == [1, 20, None, 4]  # noted, unknown, from the condition
    step = programs.step(whole)
    assert step.trips is None
    assert [op.name for _, op in step.ops][3:5] == ['w.2', 'a.2']

    def cycles(within, op):
        return op.cycles

    assert step.total(cycles) == 100 + 1000 + 4 * 7
    assert whole.total(cycles, but=step) == 1 + 20 * 5
    assert whole.total(cycles) == 1 + 20 * (5 + 1128)


def test_bytes_that_kernels_read_and_write(programs):
    program = programs.parse(PROGRAM)

    def of(within, name):
        return programs.traffic(program, within, program.computations[within][name])

    image = 32 * 32 * 3
    assert of('main', 'f.1') == 10 * image + 40 + 40 * image  # rows of the pool, not the pool
    assert of('main', 'f.2') == 32 + 40 + 32  # one row in place, where it goes
    assert of('main', 'off') == 16 + 16
    assert of('batches', 'k.2') == 4 * (64 + 8) + 4 * 144  # not the library's workspace
    assert of('batches', 'a.2') == 2 * 2_000_000
    assert of('batches', 'x.2') == of('batches', 'loop.2') == 0
    assert programs.size('(bf16[3,5]{1,0:T(8,128)(2,1)}, pred[7], s4[6], f32[], token[])') == 30 + 7 + 3 + 4


def test_what_should_not_be_in_a_program(programs):
    program = programs.parse(PROGRAM)
    batches = program.computations['batches']
    assert programs.copied(program, batches['a.2']) == 2_000_000
    assert programs.copied(program, batches['w.2']) == 0
    assert programs.degenerate(program) == 2  # of the custom calls one, of the convolutions one
    assert programs.collectives(program) == (1, 16 + 32)
    assert programs.doubles(program) == 1


def test_text_that_is_no_program(programs):
    with pytest.raises(ValueError, match='no entry'):
        programs.parse('HloModule nothing')


def test_a_program_compiled_here(programs, data):
    task = objective(toys.tiny, linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(8, 2))
    state = simulate.init(algorithm, jax.random.key(0), data)
    round = jax.jit(simulate.make_round(algorithm, chunk=1))
    program = programs.parse(round.lower(jax.random.key(0), state, data).compile().as_text())
    whole = programs.loop(program)
    step = programs.step(whole)
    assert step is not None
    assert step.trips is None  # as many as a client has batches
    read = step.total(lambda within, op: programs.traffic(program, within, op))
    weights = 4 * sum(u.size for u in jax.tree.leaves(state.server))
    assert 3 * weights < read < 1e6
    assert whole.total(lambda within, op: op is not None, but=step) > 0
    assert (programs.doubles(program), programs.degenerate(program), programs.collectives(program)) == (0, 0, (0, 0))


@pytest.mark.parametrize('lanes', [1, 3, 8])
def test_steps_and_padding_are_those_of_the_round(estimates, data, lanes):
    task = objective(toys.tiny, linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(32, 2))
    state = simulate.init(algorithm, jax.random.key(0), data)
    report = jax.jit(simulate.make_round(algorithm, chunk=lanes))(jax.random.key(0), state, data)[1]
    steps, padded = estimates.schedule(np.asarray(data.size), lanes, 1, 32, 2)
    np.testing.assert_allclose(padded, report.padded_work, rtol=1e-5)
    assert steps == np.asarray(report.info.steps).reshape(-1, lanes).max(axis=1).sum()


def test_the_busiest_of_several_devices(estimates):
    sizes = np.array([40, 10, 20, 30])
    assert estimates.schedule(sizes, 1, 2, 10, 1) == (5, 0.0)  # 40 and 10 beside 30 and 20
    assert estimates.schedule(sizes, 2, 2, 10, 3) == (12, pytest.approx(1 - 100 / 120))


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (['--target', 'moon'], "'moon' is neither h100 nor a TPU topology"),
        (['--workload', 'W9'], "invalid choice: 'W9'"),
        (['--conv', 'fast'], "'fast' is not one of default, by_platform"),
        (['--chunk', '0'], "'0' is not a whole number of at least 1"),
        (['--python', 'gpu=python'], "'gpu=python' is not KIND=PYTHON with one of tpu, cuda"),
    ],
)
def test_a_bad_argument_is_one_line(bench, capsys, tmp_path, options, expected):
    with pytest.raises(SystemExit) as ended:
        bench.main(['--out', str(tmp_path), *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(said.splitlines()) == 1
    assert said.startswith('ahead_of_time.py: error: ')
    assert expected in said


def test_what_a_target_needs_is_said(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(bench.targets.PACKAGES, 'tpu', ('jax', 'a_compiler_that_nobody_has'))
    with pytest.raises(ValueError, match=r'which TPU topologies need: .*libtpu==.*--python tpu=PYTHON'):
        bench.main(['--target', 'v5e:2x2', '--out', str(tmp_path)])
    with pytest.raises(ValueError, match='/nowhere/python lacks'):
        bench.main(['--target', 'h100', '--python', 'cuda=/nowhere/python', '--out', str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_an_h100_needs_the_jax_that_describes_it(bench, monkeypatch):
    monkeypatch.setattr(bench.targets, 'DESCRIBED', '0.0.1')
    with pytest.raises(ValueError, match=r'an H100 is described with jax 0\.0\.1, and this is'):
        bench.targets.devices('h100')


ROW = {
    'device': 'TPU v5 lite', 'devices': 1, 'cohort': 20, 'lanes': 1, 'lower_seconds': 1.0, 'compile_seconds': 2.0,
    'argument_bytes': 2e7, 'temporary_bytes': 1e7, 'total_bytes': 3e7, 'fits': True, 'chip_bytes': 16e9,
    'assumed_speed': 1.5e9, 'estimate_bytes': 4e7, 'steps': 80, 'padded_work': 0.25, 'commit': '', 'step': 6e5,
    'seconds': 0.032, 'rest_seconds': 0.003, 'kernels': 60.0, 'kernels_round': 5000.0, 'silent_bytes': 1e6,
    'large_copies_bytes': 0.0, 'degenerate': 2, 'collectives': 0, 'collective_bytes': 0, 'float64': 0,
}  # fmt: skip


def test_rows_that_are_there_are_not_made_again(bench, monkeypatch, capsys, tmp_path):
    calls, failing, known = [], {'W2'}, {'fedjax_nc': '1', 'jax': '2'}

    def made(wanted, python, args):
        calls.append(wanted)
        return {'error': 'took more | than that'} if wanted.workload in failing else ROW

    monkeypatch.setattr(bench, 'made', made)
    monkeypatch.setattr(bench, 'versions', lambda kind, python: known)
    command = ['--workload', 'W1', 'W2', '--chunk', 'default', '5', '--out', str(tmp_path)]
    assert len(bench.main(command)) == len(calls) == 4
    said = capsys.readouterr().out
    assert said.startswith("Compilers' estimates, no measurement.\n")
    assert '| v5e:1x1 | W1 | default | 1 (default) | float32 | 3 |' in said
    assert '| took more / than that |' in said
    table = [line for line in said.splitlines() if line.startswith('|')]
    assert len({line.count(' | ') for line in table}) == 1
    failing.clear()
    bench.main(command)
    assert [wanted.workload for wanted in calls[4:]] == ['W2', 'W2']  # what failed is tried again
    bench.main([*command, '--again'])
    assert len(calls) == 10
    known = {**known, 'jax': '3'}
    bench.main(command)
    assert len(calls) == 14
    assert len([json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()]) == 14


def test_a_process_that_fails_or_takes_too_long_is_a_row(bench, monkeypatch, tmp_path):
    wanted = bench.Wanted('v5e:1x1', 'W4', None, None, 1, 'float32')
    program = tmp_path / 'program.py'
    monkeypatch.setattr(bench, '__file__', str(program))
    args = bench.arguments(['--out', str(tmp_path), '--limit', '20'])
    program.write_text('import sys; sys.exit("first line\\nno room: 20 GB of 16")')
    assert bench.made(wanted, sys.executable, args) == {'error': 'no room: 20 GB of 16'}
    program.write_text('import os; os.abort()')
    assert 'ended with' in bench.made(wanted, sys.executable, args)['error']
    program.write_text('import json, sys; print("a warning"); print(json.dumps({"said": sys.argv[1:]}))')
    said = bench.made(wanted, sys.executable, args)['said']
    assert bench.estimates.Wanted(*bench.wanted(bench.arguments(said))[0]) == wanted
    args.limit = 1
    program.write_text('import time; time.sleep(60)')
    assert bench.made(wanted, sys.executable, args) == {'error': 'took more than 1 s'}


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'target'), [('tpu', 'v5e:1x1'), ('tpu', 'v5e:2x2'), ('cuda', 'h100')])
def test_a_round_compiled_for_an_accelerator(bench, monkeypatch, tmp_path, kind, target):
    # AOT_PYTHON='tpu=/path/to/python cuda=...' pytest -m slow tests/test_ahead_of_time.py
    given = os.environ.get('AOT_PYTHON', '').split()
    if not any(text.startswith(f'{kind}=') for text in given):
        pytest.skip(f'no Python that compiles for {target} is named in AOT_PYTHON')
    monkeypatch.delenv('XLA_FLAGS', raising=False)  # this suite's are for another version of jaxlib
    (row,) = bench.main(['--target', target, '--workload', 'W4', '--out', str(tmp_path), '--python', *given])
    assert 'error' not in row
    assert row['fits']
    assert all(row[name] > 0 and math.isfinite(row[name]) for name in ('step', 'seconds', 'compile_seconds', 'steps'))
    assert row['float64'] == row['degenerate'] == 0
    assert (row['collectives'] > 0) == (row['devices'] > 1)
