"""Shows where the time of a round goes.

    python benchmarks/profile_round.py --workload W1 --data-dir ~/data
    python benchmarks/profile_round.py --workload W4 --rounds 20 --top 12 --json w4.json
Workloads and options are those of rounds_per_second.py, but for what takes more than one round; how to read the tables
is explained in benchmarks/README.md.

Every instant of a round is given to the operations that run in it, in equal parts where several threads work on
different ones. Where none does, it is the runtime's ("loops and scheduling") if a thread of the runtime is between two
operations, and the host's if not. So the shares add up to the whole round. On a CPU the work that an operation hands to
other threads counts as its own, until the last of them is done. On a GPU operations are those of its queues, and the
kernels are listed by their own names, too. CUDA graphs hide which operation a kernel belongs to:
XLA_FLAGS=--xla_gpu_enable_command_buffer= turns them off.
"""

import argparse
import collections
import datetime
import heapq
import itertools
import math
import re
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import kernels
import results
import rounds_per_second

CATEGORIES = (
    'convolutions, forward',
    'convolutions, input gradient',
    'convolutions, kernel gradient',
    'convolutions, either gradient',
    'matrix products',
    'normalisation, activation, pooling',
    'loss and head',
    'copies and transposes',
    'gather of batches',
    'shuffle',
    'random keys',
    'optimizer',
    'aggregation',
    'server',
    'other operations',
    'loops and scheduling',
    'host and idle',
)
SCOPES = {
    'input_gradient': 'convolutions, input gradient',
    'kernel_gradient': 'convolutions, kernel gradient',
    'gather': 'gather of batches',
    'shuffle': 'shuffle',
    'optimizer': 'optimizer',
    'aggregate': 'aggregation',
    'server': 'server',
}
"""Names that the library gives with `jax.named_scope` to what is its own."""
UNKNOWN, RUNTIME, IDLE = CATEGORIES[-3:]
ROUND = 'round of the profile'
MOVES = {
    'bitcast', 'broadcast', 'concatenate', 'constant', 'copy', 'dynamic-slice', 'dynamic-update-slice',
    'get-tuple-element', 'iota', 'pad', 'parameter', 'reshape', 'rev', 'reverse', 'slice', 'transpose', 'tuple',
}  # fmt: skip
"""Opcodes and primitives that compute nothing."""


class Op(NamedTuple):
    """One instruction of a compiled program."""

    shape: str
    paths: list[str]  # where it and what is fused in it come from: 'jit(round)/while/body/jvp(MLP)/Dense_0/dot_general'
    kinds: set[str]  # opcodes and library calls in it


def operations(program: str) -> dict[str, Op]:
    """The instructions of a compiled program, `compiled.as_text()`, by name."""
    found, members = dict[str, Op](), collections.defaultdict[str, list[Op]](list)
    computation = ''
    for line in program.splitlines():  # computations stand above those that call them
        if begins := re.match(r'(?:ENTRY )?%(\S+) \(.*\{$', line):
            computation = begins[1]
        elif op := re.match(r'\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\(', line):
            name, shape, kind = op.groups()
            paths, kinds = re.findall('op_name="([^"]*)"', line), {kind}
            if kind == 'fusion':
                for called in re.findall(r'calls=%([^\s,]+)', line):
                    paths += [path for inner in reversed(members[called]) for path in inner.paths]
                    kinds |= set[str]().union(*(inner.kinds for inner in members[called]))
            kinds |= set(re.findall('custom_call_target="([^"]+)"', line))
            found[name] = Op(shape.split('{')[0], paths, kinds - {'fusion', 'custom-call'})
            members[computation].append(found[name])
    return found


def scoped(paths: Iterable[str]) -> str | None:
    """The category of the first of the library's own scopes in some paths, whose last parts are JAX's primitives."""
    names = (name for path in paths for name in re.split('[/()]+', path.rpartition('/')[0]))
    return next((SCOPES[name] for name in names if name in SCOPES), None)


def category(op: Op) -> str:
    """Which of `CATEGORIES` an instruction belongs to. Of a fused one, the result decides where it can."""
    path = ' '.join(op.paths[:1])
    if op.kinds & {'while', 'call', 'conditional'}:
        return RUNTIME
    if own := scoped(op.paths[:1]):
        return own
    if any(re.search('conv(?!ert)', kind, re.IGNORECASE) for kind in op.kinds):
        return 'convolutions, either gradient' if 'transpose(' in path else 'convolutions, forward'
    if any(re.search('dot|gemm|matmul', kind) for kind in op.kinds):
        return 'matrix products'
    if fused := scoped(op.paths):
        return fused
    if op.kinds <= MOVES or path.rpartition('/')[2] in MOVES:
        return 'copies and transposes'
    if 'threefry' in path:
        return 'random keys'
    if re.search(r'jvp\((jit\(\w+\))?\)', path):  # differentiated, and outside of the model
        return 'loss and head'
    return 'normalisation, activation, pooling' if 'jvp(' in path else 'other operations'


class Step(NamedTuple):
    """One thing that happens on a thread. Each 'begin' and each 'help' has its 'end'."""

    time: float  # ns
    thread: int
    kind: str
    value: Any = None  # begin: instruction, RUNTIME or IDLE; ask and help: number of the task that others are asked for


def steps(thread: int, events: Iterable[Any], ops: Container[str], other: str | None = None) -> Iterator[Step]:
    """What happens on one thread, in order. What is no operation counts as `other`, or not at all."""
    ends = list[float]()  # of what has begun; infinite for tasks, which end with an event of their own
    for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
        now, stats = event.start_ns, dict(event.stats)
        while ends and ends[-1] <= now:
            yield Step(ends.pop(), thread, 'end')
        if event.name == 'ThreadpoolListener::Record':
            yield Step(now, thread, 'ask', stats['_p'])
        elif event.name == 'ThreadpoolListener::StartRegion':
            ends.append(math.inf)
            yield Step(now, thread, 'help', stats['_c'])
        elif event.name == 'ThreadpoolListener::StopRegion':
            while math.inf in ends:
                yield Step(now, thread, 'end')
                if ends.pop() == math.inf:
                    break
        elif event.duration_ns > 0:
            name = str(stats.get('hlo_op', event.name)).split('__')[0]  # oneDNN's calls carry its name too
            waits = IDLE if '(wait' in name else RUNTIME if name.startswith('ThunkExecutor') else None
            if begun := name if name in ops else waits or other:
                ends.append(now + event.duration_ns)
                yield Step(now, thread, 'begin', begun)
    yield from (Step(end, thread, 'end') for end in reversed(ends) if end < math.inf)


class Spent(NamedTuple):
    """One round, by instruction, RUNTIME and IDLE."""

    seconds: collections.Counter[str]
    calls: collections.Counter[str]


def attribute(trace: jax.profiler.ProfileData, ops: dict[str, Op]) -> list[Spent]:
    """The rounds of a trace.

    Raises:
      ValueError: if it has none.
    """
    lines = [list(line.events) for plane in trace.planes for line in plane.lines]
    marks = [event for events in lines for event in events if event.name == ROUND]
    if not marks:
        raise ValueError('the trace has no rounds in it: the profiler was cut off, so try fewer --rounds')
    bounds = [Step(t, -1, 'bound') for t in sorted(t for e in marks for t in (e.start_ns, e.start_ns + e.duration_ns))]
    queues = kernels.streams(trace)
    other = UNKNOWN if queues else None  # a kernel is work, whatever it is for; on a CPU threads have other events, too
    threads = [steps(i, events, ops, other) for i, events in enumerate(queues or lines)]
    work = {UNKNOWN} | {name for name, op in ops.items() if category(op) != RUNTIME}
    rounds, running, before, timed = list[Spent](), dict[int, str](), 0.0, False
    stacks, asked = collections.defaultdict[int, list[str]](list), dict[int, str]()
    for now, thread, kind, value in heapq.merge(bounds, *threads, key=lambda step: step.time):
        if timed:
            shared = [name for name in running.values() if name in work] or [next(iter(running.values()), IDLE)]
            for name in shared:
                rounds[-1].seconds[name] += (now - before) / len(shared) / 1e9
        before, stack = now, stacks[thread]
        if kind == 'bound':
            timed = not timed
            rounds += [Spent(collections.Counter(), collections.Counter())] if timed else []
        elif kind == 'ask':
            asked[value] = stack[-1] if stack else IDLE
        elif kind == 'end':
            stack.pop()
        else:
            stack.append(value if kind == 'begin' else asked.pop(value, IDLE))
            if timed and kind == 'begin':
                rounds[-1].calls[value] += 1
        running.pop(thread, None)
        if stack and stack[-1] != IDLE:
            running[thread] = stack[-1]
    return rounds


def profile(row: rounds_per_second.Row, rounds: int) -> dict[str, Any]:
    """Plays rounds of one cohort as they are, and as many traced. The fastest is what others disturbed least."""
    key = jax.random.key(0)
    row.round(key, timed=False)  # warms up
    for _ in range(rounds):
        row.round(key)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(rounds):
                with jax.profiler.TraceAnnotation(ROUND):
                    row.round(key, timed=False)
        (path,) = Path(folder).rglob('*.xplane.pb')
        trace = jax.profiler.ProfileData.from_file(str(path))
    ops = operations(row.step.as_text())
    seconds, calls = min(attribute(trace, ops), key=lambda spent: spent.seconds.total())
    total, table = seconds.total(), dict.fromkeys(CATEGORIES, 0.0)
    for name, spent in seconds.items():
        table[category(ops[name]) if name in ops else name] += spent
    return {
        'conv': row.conv, 'chunk': row.chunk, 'seconds_per_round': min(row.seconds),
        'traced_seconds_per_round': total,
        'categories': {name: {'share': spent / total, 'seconds': spent} for name, spent in table.items()},
        'operations': [
            {'name': name, 'category': category(ops[name]), 'seconds': spent, 'calls': calls[name],
             'shape': ops[name].shape, 'path': next(iter(ops[name].paths), '')}
            for name, spent in seconds.most_common() if name in ops
        ],
        'kernels': kernels.longest(trace, rounds),
        'note': kernels.NONE if jax.default_backend() == 'gpu' and not kernels.streams(trace) else '',
    }  # fmt: skip


def markdown(result: dict[str, Any], top: int) -> str:
    """The categories that have a share, and the `top` longest operations."""
    plain, traced = (f'{1e3 * result[name]:.4g} ms' for name in ('seconds_per_round', 'traced_seconds_per_round'))
    title = (
        f'{result["workload"]}: {result["algorithm"]}, {result["model"]}, {result["cohort"]} of {result["clients"]} '
        f'clients, batch {result["batch_size"]}, epochs {result["epochs"]}, {result["data"]}, {result["precision"]}; '
        f'form {result["conv"]}, chunk {result["chunk"]}; fastest round {plain}, traced {traced}.'
    )
    lines = [title, '', '| | share | ms |', '| --- | --- | --- |']
    for name, part in result['categories'].items():
        if part['seconds']:
            lines.append(f'| {name} | {100 * part["share"]:.1f} % | {1e3 * part["seconds"]:.4g} |')
    if top:
        lines += ['', '| operation | result | from | calls | ms |', '| --- | --- | --- | --- | --- |']
    for op in result['operations'][:top]:
        path = '/'.join(op['path'].split('/')[-3:])
        cells = (op['name'], op['shape'], path, f'{op["calls"]}', f'{1e3 * op["seconds"]:.3g}')
        lines.append(f'| {" | ".join(cells)} |')
    if top and result['kernels']:
        lines += ['', *kernels.markdown(result['kernels'], top)]
    lines += ['', result['note']] if result['note'] else []
    versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items())
    return '\n'.join([*lines, '', f'{result["date"]}, {result["device"]}. {versions}.'])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = rounds_per_second.Parser(prog='profile_round.py', description=__doc__)
    parser.add_argument(
        '--top', type=rounds_per_second.count, default=0, help='also print this many of the longest operations'
    )
    return rounds_per_second.arguments(argv, parser)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = arguments(argv)
    if args.compare or args.tune or max(args.rounds_per_call) > 1 or args.keep in ('host', 'disk'):
        raise ValueError(
            'a profile is of one round alone: leave --compare, --tune, --rounds-per-call and states on host or disk to '
            'rounds_per_second.py'
        )
    work = rounds_per_second.settle(args)
    rounds_per_second.prepare(max(count or 1 for count in args.devices), args.tf32)
    clients, source = rounds_per_second.load(args, work)
    made = []
    for each in itertools.product(args.conv, args.chunk, args.devices):
        row = rounds_per_second.Row(args, work, clients, *each)
        made.append({
            'workload': args.workload, **work._asdict(), 'data': source, 'precision': args.precision,
            'date': datetime.date.today().isoformat(), 'device': results.device(),
            'versions': rounds_per_second.versions(args),
            **profile(row, args.rounds),
        })  # fmt: skip
        print(markdown(made[-1], args.top))
    if args.json:
        results.write(args.json, {'profiles': made})
    return made


if __name__ == '__main__':
    try:
        main()
    except (ValueError, OSError) as problem:
        sys.exit(f'profile_round.py: error: {" ".join(str(problem).split())}')
