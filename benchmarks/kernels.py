"""The kernels that a GPU ran, by the names that its driver gives them; a trace of a CPU has none."""

import collections
from typing import Any

import jax

NONE = (
    'The trace holds no kernels, so that only the host is shown: CUPTI is missing, or may not be used (NVIDIA calls it '
    'ERR_NVGPUCTRPERM).'
)


def streams(trace: jax.profiler.ProfileData) -> list[list[Any]]:
    """The events of each queue of each accelerator.

    A device's plane has further lines, such as the tracer's own costs or whole modules. What a GPU calls streams is
    'XLA Ops' of a TPU; of other devices all lines are taken.
    """
    lines = [line for plane in trace.planes if plane.name.startswith('/device:') for line in plane.lines]
    queues = [line for line in lines if line.name.startswith(('Stream', 'XLA Ops'))]
    return [list(line.events) for line in queues or lines]


def longest(trace: jax.profiler.ProfileData, rounds: int) -> list[dict[str, Any]]:
    """Kernels and copies, the longest first: calls and seconds of an average round, and from which operation."""
    seconds, calls = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for event in (event for events in streams(trace) for event in events if event.duration_ns > 0):
        known = event.name, str(dict(event.stats).get('hlo_op', ''))
        seconds[known] += event.duration_ns / 1e9 / rounds
        calls[known] += 1
    return [
        {'name': name, 'operation': op, 'calls': calls[name, op] / rounds, 'seconds': spent}
        for (name, op), spent in seconds.most_common()
    ]


def markdown(found: list[dict[str, Any]], top: int) -> list[str]:
    """The lines of a table of the `top` longest kernels."""
    lines = ['| kernel | operation | calls | ms |', '| --- | --- | --- | --- |']
    for kernel in found[:top]:
        name = kernel['name'].replace('|', r'\|')
        name = name if len(name) <= 80 else f'{name[:77]}...'
        lines.append(f'| {name} | {kernel["operation"]} | {kernel["calls"]:.4g} | {1e3 * kernel["seconds"]:.3g} |')
    return lines
