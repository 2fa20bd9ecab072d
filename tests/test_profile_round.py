"""The profile of a round: which operation has which instant, and which kind of work it is."""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BENCHMARKS = Path(__file__).parent.parent / 'benchmarks'


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module('profile_round')


class Event(NamedTuple):
    name: str
    start_ns: float
    duration_ns: float
    stats: Any = ()


class Line(NamedTuple):
    events: list[Event]
    name: str = ''


class Plane(NamedTuple):
    name: str
    lines: list[Line]


class Trace(NamedTuple):
    planes: list[Plane]


PROGRAM = """
HloModule jit_round, is_scheduled=true

%drawn (p: s32[4]) -> s32[4] {
  %p = s32[4]{0} parameter(0)
  %n.1 = s32[4]{0} negate(%p), metadata={op_name="jit(round)/shuffle/neg" stack_frame_id=3}
  ROOT %m.1 = s32[4]{0} select(%b, %n.1, %p)
}

ENTRY %main (a: f32[2,2]) -> f32[2] {
  %dot.1 = f32[2,4]{1,0} dot(%a, %a), metadata={op_name="jit(round)/jvp(MLP)/dot_general"}
  %while.1 = (f32[2]{0}, s32[]) while(%t), condition=%c, body=%d, metadata={op_name="jit(round)/while"}
  %fusion.1 = s32[4]{0} fusion(%i), kind=kLoop, calls=%drawn, metadata={op_name="jit(round)/while"}
  ROOT %call.7 = f32[2]{0} custom-call(%x), custom_call_target="__onednn$convolution"
}
"""


def test_a_compiled_program_is_read(script):
    ops = script.operations(PROGRAM)
    assert ops['dot.1'] == ('f32[2,4]', ['jit(round)/jvp(MLP)/dot_general'], {'dot'})
    assert ops['fusion.1'].kinds == {'parameter', 'negate', 'select'}
    assert {name: script.category(ops[name]) for name in ('dot.1', 'while.1', 'fusion.1', 'call.7')} == {
        'dot.1': 'matrix products',
        'while.1': script.RUNTIME,
        'fusion.1': 'shuffle',  # the result is a loop's, what is fused in it the library's
        'call.7': 'convolutions, forward',
    }


@pytest.mark.parametrize(
    ('path', 'kinds', 'expected'),
    [
        ('jvp(CNN)/Conv_0/ffi_call', '__onednn$convolution', 'convolutions, forward'),
        (
            'transpose(jvp(CNN))/Conv_0/kernel_gradient/ffi_call',
            '__onednn$convolution',
            'convolutions, kernel gradient',
        ),
        ('transpose(jvp(CNN))/Conv_0/input_gradient/conv', 'convolution', 'convolutions, input gradient'),
        ('transpose(jvp(CNN))/Conv_0/conv_general_dilated', 'convolution', 'convolutions, either gradient'),
        ('transpose(jvp(MLP))/Dense_0/transpose', 'parameter dot transpose', 'matrix products'),
        ('transpose(jvp(CNN))/Conv_0/transpose', 'parameter transpose copy', 'copies and transposes'),
        ('transpose(jvp(CNN))/Conv_0/transpose', 'parameter multiply transpose', 'copies and transposes'),
        ('', 'copy', 'copies and transposes'),
        ('jvp(CNN)/convert_element_type', 'parameter convert', 'normalisation, activation, pooling'),
        ('transpose(jvp(CNN))/BatchNorm_0/mul', 'parameter multiply', 'normalisation, activation, pooling'),
        ('jvp()/exp', 'exponential', 'loss and head'),
        ('transpose(jvp(jit(take_along_axis)))/scatter-add', 'scatter', 'loss and head'),
        ('gather/gather', 'gather', 'gather of batches'),
        ('vmap(shuffle)/jit(argsort)/sort', 'sort', 'shuffle'),
        ('vmap(jit(_threefry_fold_in))/while/body/xor', 'xor', 'random keys'),
        ('optimizer/add', 'multiply add', 'optimizer'),
        ('aggregate/dot_general', 'dot', 'aggregation'),
        ('server/div', 'divide', 'server'),
        ('jit(take)/gather', 'gather', 'other operations'),  # the primitive, not the scope
    ],
)
def test_kinds_of_work(script, path, kinds, expected):
    op = script.Op('f32[2]', [f'jit(round)/while/body/{path}'] if path else [], set(kinds.split()))
    assert script.category(op) == expected


def test_every_instant_goes_to_what_runs_in_it(script):
    ask, help, stop = (f'ThreadpoolListener::{name}' for name in ('Record', 'StartRegion', 'StopRegion'))
    first = [
        Event('while.1', 110, 70, [('hlo_op', 'while.1')]),
        Event('ThunkExecutor::Execute', 112, 66),
        Event('dot.1', 120, 30, [('hlo_op', 'dot.1')]),
        Event(ask, 125, 0, [('_p', 5)]),
        Event('end: dot.1', 149, 1),
        Event('ThunkExecutor::Execute (wait for completion)', 160, 16),
        Event('dot.1', 205, 50),  # after the round
    ]
    second = [
        Event(stop, 90, 0),  # of a task that began before the trace
        Event(help, 135, 0, [('_c', 5)]),
        Event('fusion.1', 142, 4, [('hlo_op', 'fusion.1')]),
        Event(stop, 155, 0),
        Event('call.7__onednn$convolution', 162, 8),
    ]
    host = Plane('/host:CPU', [Line([Event(script.ROUND, 100, 100)]), Line(first), Line(second)])
    ((seconds, calls),) = script.attribute(Trace([host]), script.operations(PROGRAM))
    runtime = seconds.pop('while.1') + seconds.pop(script.RUNTIME)
    # The product is alone until 142, has half of the next 4 ns, and runs on in another thread until 155.
    expected = {'dot.1': 33e-9, 'fusion.1': 2e-9, 'call.7': 8e-9, script.IDLE: 38e-9}
    assert seconds == pytest.approx(expected)
    assert runtime == pytest.approx(19e-9)
    assert (calls['dot.1'], calls['call.7']) == (1, 1)


def gpu(script):
    """A round on a GPU: a kernel of a known operation twice, a copy of none, and what the tracer itself cost."""
    busy = [Event('sm90_gemm', at, 15, [('hlo_op', 'dot.1')]) for at in (120, 140)] + [Event('MemcpyD2D', 160, 10)]
    launch = [Event('dot.1', 101, 2, [('hlo_op', 'dot.1')])]
    device = [Line(busy, 'Stream #13(Kernel,MemcpyD2D)'), Line([Event('x', 170, 20)], 'CUPTI overhead')]
    host = [Line([Event(script.ROUND, 100, 100)]), Line(launch)]
    return Trace([Plane('/host:CPU', host), Plane('/device:GPU:0', device)])


def test_a_devices_own_lines_are_preferred(script):
    ((seconds, _),) = script.attribute(gpu(script), script.operations(PROGRAM))
    assert seconds == pytest.approx({'dot.1': 30e-9, 'other operations': 10e-9, script.IDLE: 60e-9})


def test_kernels_are_listed_by_their_own_names(script):
    found = script.kernels.longest(gpu(script), 2)
    assert [(k['name'], k['operation'], k['calls']) for k in found] == [
        ('sm90_gemm', 'dot.1', 1),
        ('MemcpyD2D', '', 0.5),
    ]
    assert [k['seconds'] for k in found] == pytest.approx([15e-9, 5e-9])
    first = script.kernels.markdown([found[0] | {'name': 'a|b' * 40}], 5)[2]
    assert first.count(r'\|') + 5 == first.count('|')  # a name does not make columns
    assert len(first) < 120


def test_a_trace_without_rounds_is_one_line(script):
    with pytest.raises(ValueError, match=r'the trace has no rounds in it: .* try fewer --rounds'):
        script.attribute(Trace([Plane('/host:CPU', [Line([Event('x', 1, 1)])])]), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ('options', 'busy', 'steps'),
    [
        (['--workload', 'W4', '--clients', '40', '--chunk', '2'], ['random keys', 'other operations'], 4),
        (
            ['--clients', '1', '--samples', '8', '--batch-size', '8'],
            ['convolutions, forward', 'copies and transposes'],
            1,
        ),
    ],
    ids=['mlp', 'cnn'],
)
def test_shares_add_up_to_the_round(script, tmp_path, capsys, options, busy, steps):
    path = tmp_path / 'profile.json'
    (result,) = script.main([*options, '--rounds', '2', '--top', '3', '--json', str(path)])
    parts = result['categories']
    assert list(parts) == list(script.CATEGORIES)
    assert sum(part['share'] for part in parts.values()) == pytest.approx(1)
    assert sum(part['seconds'] for part in parts.values()) == pytest.approx(result['traced_seconds_per_round'])
    busy += ['matrix products', 'loss and head', 'shuffle', 'optimizer', 'server', script.RUNTIME]
    assert [name for name in busy if not parts[name]['seconds'] > 0] == []
    gradients = sum(part['seconds'] for name, part in parts.items() if 'gradient' in name)
    assert (gradients > 0) == ('convolutions, forward' in busy)
    assert max(op['calls'] for op in result['operations'] if op['category'] == 'matrix products') == steps
    printed = capsys.readouterr().out
    assert printed.count(' % |') == sum(part['seconds'] > 0 for part in parts.values())
    assert json.loads(path.read_text()) == {'profiles': [result]}


@pytest.mark.parametrize('more', [['--compare', 'pytorch'], ['--tune'], ['--rounds-per-call', '2'], ['--keep', 'host']])
def test_what_takes_more_than_a_round_is_refused(more, script):
    with pytest.raises(ValueError, match='a profile is of one round alone'):
        script.main(more)
