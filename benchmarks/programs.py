"""Reads compiled programs, `compiled.as_text()`: what the step of a round consists of, by what the compiler wrote down.

Nothing is measured. Cycles are the TPU compiler's own estimates; bytes are those that the operations of a step name as
operands and results, which is what a GPU's kernels read and write at least.
"""

import collections
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

WIDTHS = {'pred': 8, 'token': 0, 'c64': 64, 'c128': 128}  # in bits; other types end with theirs
FREE = {
    'after-all', 'bitcast', 'call', 'conditional', 'constant', 'get-tuple-element', 'iota', 'optimization-barrier',
    'parameter', 'partition-id', 'replica-id', 'tuple', 'while',
}  # fmt: skip
"""Opcodes that are no kernel of their own."""
PARTS = {'dynamic-slice', 'gather', 'slice'}
"""Opcodes that read no more of their first operand than they hand on."""
MOVES = {
    'bitcast', 'broadcast', 'concatenate', 'constant', 'copy', 'dynamic-slice', 'get-tuple-element', 'pad', 'parameter',
    'reshape', 'reverse', 'slice', 'transpose', 'tuple',
}  # fmt: skip
"""Opcodes that compute nothing."""
LARGE = 1_000_000
"""Bytes from which on a copy counts as large."""
IMAGE = 8
"""From this height and width on, a convolution's window is no kernel but an image."""


class Op(NamedTuple):
    """One instruction."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    line: str

    @property
    def path(self) -> str:
        """Where it comes from, as 'jit(round)/while/body/jvp(MLP)/Dense_0/dot_general'."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ''

    @property
    def called(self) -> list[str]:
        """Computations that it calls."""
        lists = re.findall(r'(?:to_apply|calls|\w+_computations?)=(\{[^}]*\}|%?[^\s,)]+)', self.line)
        return [name for names in lists for name in re.findall(r'[^\s,%{}]+', names)]

    @property
    def cycles(self) -> int:
        """What a TPU's compiler estimates; 0 where it says nothing."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found else 0


Computation = dict[str, Op]


class Program(NamedTuple):
    """The computations of a program by name, each with its instructions in order."""

    computations: dict[str, Computation]
    entry: str


class Loop(NamedTuple):
    """The body of a loop."""

    ops: list[tuple[str, Op]]  # with the computations they stand in; those of loops inside it are not among them
    inner: list['Loop']
    trips: int | None  # how often it runs, where that is known when compiling

    def total(self, measure: Callable[[str, Op], float], but: 'Loop | None' = None) -> float:
        """The sum of a number for each instruction, without those of the loop `but`.

        A loop inside that runs an unknown number of times counts once.
        """
        return sum(measure(within, op) for within, op in self.ops) + sum(
            (1 if loop.trips is None else loop.trips) * loop.total(measure, but)
            for loop in self.inner
            if loop is not but
        )

    def every(self) -> Iterator['Loop']:
        """Itself and the loops inside it, outer ones first."""
        yield self
        for loop in self.inner:
            yield from loop.every()


def parse(text: str) -> Program:
    """Reads the text of a program.

    Raises:
      ValueError: for text without an entry.
    """
    computations, entry, current = dict[str, Computation](), '', dict[str, Op]()
    for line in text.splitlines():
        if begins := re.match(r'(ENTRY )?%?(\S+) \(.*\{\s*$', line):
            current = computations[begins[2]] = {}
            entry = begins[2] if begins[1] else entry
        elif op := re.match(r'\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\(', line):
            current[op[1]] = Op(op[1], op[2], op[3], _operands(line, op.end()), line)
    if not entry:
        raise ValueError('this is not the text of a compiled program: it has no entry')
    return Program(computations, entry)


def _operands(line: str, start: int) -> list[str]:
    """Names up to the parenthesis that closes the one before `start`; layouts have parentheses of their own."""
    depth = 1
    for at in range(start, len(line)):
        depth += {'(': 1, ')': -1}.get(line[at], 0)
        if not depth:
            return re.findall(r'%([^\s,()]+)', line[start:at])
    return []


def size(shape: str) -> int:
    """Bytes of a shape such as 'f32[5,3]{1,0}' or of a tuple of them."""
    total = 0
    for name, dims in re.findall(r'([a-z]\w*)\[([\d,<=]*)\]', shape):
        bits = WIDTHS[name] if name in WIDTHS else int(re.search(r'\d+', name)[0])
        total += math.prod(int(n.lstrip('<=')) for n in dims.split(',') if n) * bits
    return total // 8


def loop(program: Program, name: str = '', trips: int | None = 1) -> Loop:
    """The program as loops within loops, from its entry or another computation."""
    ops, inner = list[tuple[str, Op]](), list[Loop]()
    name = name or program.entry
    for op in program.computations[name].values():
        ops.append((name, op))
        if op.kind == 'while':
            inner.append(loop(program, re.search(r'body=%?([^\s,]+)', op.line)[1], _trips(program, op)))
        elif op.kind in ('call', 'conditional', 'async-start'):
            for called in op.called:
                below = loop(program, called)
                ops, inner = ops + below.ops, inner + below.inner
    return Loop(ops, inner, trips)


def _trips(program: Program, op: Op) -> int | None:
    """How often a loop runs: as the compiler notes, or where its condition compares the counter with a constant."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', op.line):
        return int(known[1])
    condition = program.computations[re.search(r'condition=%?([^\s,]+)', op.line)[1]]
    root = next(each for each in condition.values() if each.line.lstrip().startswith('ROOT '))
    if root.kind == 'compare' and 'direction=LT' in root.line:
        bound = condition[root.operands[1]].line
        if limit := re.search(r' constant\((\d+)\)', bound):
            return int(limit[1])
    return None


def step(whole: Loop) -> Loop | None:
    """The body of the loop over batches: the one with the most differentiated instructions; None if none has any."""
    bodies = [body for outer in whole.every() for body in outer.inner]
    counts = [sum('jvp(' in op.line for _, op in body.ops) for body in bodies]
    return bodies[counts.index(max(counts))] if any(counts) else None


def traffic(program: Program, within: str, op: Op) -> int:
    """Bytes that an instruction reads and writes. Of what is sliced, gathered or updated in place, only the part."""
    if op.kind in FREE or op.kind.endswith(('-done', '-update')):
        return 0
    siblings = program.computations[within]
    operands = [siblings[name] for name in op.operands if name in siblings]
    if op.kind == 'fusion':
        return _fused(program.computations[op.called[0]], operands)
    shapes = [each.shape for each in operands]
    if op.kind.endswith('-start'):  # whose result names its operands again
        return 2 * sum(map(size, shapes))
    if op.kind in PARTS:
        return 2 * size(op.shape) + sum(map(size, shapes[1:]))
    if op.kind == 'dynamic-update-slice':
        return 2 * size(shapes[1])
    return size(_results(op)) + sum(map(size, shapes))


def _results(op: Op) -> str:
    """The shape of what an instruction makes, without the room in which a library works: bytes after the result."""
    return re.sub(r', u8\[\d+\]\{0\}\)$', ')', op.shape) if op.kind == 'custom-call' else op.shape


def _fused(body: Computation, operands: list[Op]) -> int:
    users = collections.defaultdict[str, list[tuple[Op, int]]](list)
    for op in body.values():
        for place, name in enumerate(op.operands):
            users[name].append((op, place))

    def read(name: str, whole: int) -> int:
        """Bytes read of a value through those who use it."""
        total = 0
        for user, place in users[name]:
            if user.kind in PARTS and place == 0:
                total += size(user.shape)
            elif user.kind == 'bitcast':
                total += read(user.name, whole)
            elif user.kind != 'dynamic-update-slice' or place > 0:
                return whole
        return min(total, whole)

    def written(op: Op) -> int:
        if op.kind == 'tuple':
            return sum(written(body[name]) for name in op.operands)
        if op.kind == 'bitcast' and op.operands[0] in body:
            return written(body[op.operands[0]])
        return size(body[op.operands[1]].shape if op.kind == 'dynamic-update-slice' else op.shape)

    total = written(next(op for op in body.values() if op.line.lstrip().startswith('ROOT ')))
    for op in body.values():
        if op.kind == 'parameter':
            number = int(re.search(r'parameter\((\d+)\)', op.line)[1])
            total += read(op.name, size(operands[number].shape if number < len(operands) else op.shape))
    return total


def copied(program: Program, op: Op) -> int:
    """Bytes of the result of a copy or a transpose, alone or fused with nothing but other moves; 0 for all else."""
    kinds = {op.kind}
    if op.kind == 'fusion':
        kinds = {inner.kind for inner in program.computations[op.called[0]].values()}
    return size(op.shape) if kinds <= MOVES and kinds & {'copy', 'transpose'} else 0


def degenerate(program: Program) -> int:
    """Convolutions whose window is an image: kernel gradients that were made forward convolutions.

    Lanes may be one more dimension of a window, so it is two large ones that count.
    """
    found = 0
    for body in program.computations.values():
        for op in body.values():
            window = re.search(r'window=\{size=([\dx]+)', op.line)
            if window and (op.kind == 'convolution' or re.search('custom_call_target="[^"]*conv', op.line)):
                found += sum(int(n) >= IMAGE for n in window[1].split('x')) >= 2
    return found


def collectives(program: Program) -> tuple[int, int]:
    """How many operations talk to other devices, and the bytes of their results."""
    kinds = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute'
    found = [
        size(op.shape)
        for body in program.computations.values()
        for op in body.values()
        if re.fullmatch(f'({kinds})(-start)?', op.kind)
    ]
    return len(found), sum(found)


def doubles(program: Program) -> int:
    """Instructions that make numbers of double precision."""
    return sum(bool(re.search(r'\b(f64|c128)\[', op.shape)) for b in program.computations.values() for op in b.values())
