"""What `accelerator.py` has found, as Markdown."""

from collections.abc import Iterable
from typing import Any

import kernels

GOALS = {'eager PyTorch': 10, 'the fastest PyTorch': 3}
Record = dict[str, Any]


def markdown(records: list[Record], left: list[str], command: str) -> str:
    """All parts that have rows, what became of the others, and where it was measured."""
    done = {part: [r for r in records if r['part'] == part and r['state'] == 'done'] for part in 'abcd'}
    lines = ['## Forms, lanes, precision', '', *forms(done['a']), ''] if done['a'] else []
    lines += ['## Beside PyTorch', '', *peers(done['b']), ''] if done['b'] else []
    for record in done['c']:
        lines += [f'## Profile of {record["what"]}', '', *profile(record['result']), '']
    name = 'Trial' if any(r['tiny'] for r in done['d']) else "FedETF's Table 1, alpha 0.1"
    lines += [f'## {name}', '', *accuracies(done['d']), ''] if done['d'] else []
    other = [f'- {r["row"]}: {r["state"]}, {r["why"]}' for r in records if r['state'] != 'done']
    other += [f'- {r["row"]}: {note}' for r in records for note in r['notes'] if note.startswith('Not compared')]
    lines += ['## Not done', '', *other, ''] if other else []
    lines += [f'Rows left: {len(left)}, next "{left[0]}"; the same command goes on.', ''] if left else []
    return '\n'.join([*lines, *where(records), '', f'    {command}'])


def where(records: list[Record]) -> list[str]:
    """Dates, devices and versions. Rows of several devices must not be compared."""
    results = [r['result'] for r in records if r['result']]
    told = [result['versions'] for result in results]
    told += [peer['versions'] for result in results for peer in result.get('peers', {}).values()]
    versions = '; '.join(dict.fromkeys(', '.join(f'{k} {v}' for k, v in each.items()) for each in told))
    devices = list(dict.fromkeys(result['device'] for result in results))
    dates = list(dict.fromkeys(r['date'] for r in records))
    lines = (
        [f'{" to ".join(dates[:: max(1, len(dates) - 1)])}, {" and ".join(devices)}. {versions}.'] if results else []
    )
    if len(devices) > 1:
        lines += ['', 'Rows are of several devices: compare within a row only.']
    data = {result['data'] for result in results if 'data' in result}
    return lines + (['', f'Images: {", ".join(sorted(data))}.'] if data else [])


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    return [f'| {" | ".join(cells)} |' for cells in (heads, ['---'] * len(heads), *rows)]


def exactness(result: Record) -> str:
    """The type of the numbers, and on a GPU whether float32 may be TF32."""
    tf32 = result['versions'].get('tf32')
    return result['precision'] + (f', TF32 {tf32}' if tf32 and result['precision'] == 'float32' else '')


def forms(records: list[Record]) -> list[str]:
    rows = []
    for record in records:
        result = record['result']
        (row,) = result['rows']
        rows.append([
            result['workload'], row['conv'], row['chunk'], exactness(result),
            f'{row["seconds_per_round"]:.4g}', f'{row["median_seconds_per_round"]:.4g}',
            f'{row["samples_per_second"]:.4g}', f'{row["model_flops_per_second"] / 1e9:.4g}',
            f'{100 * row["share_of_matmul"]:.3g} %', f'{100 * row["padded_work"]:.0f} %',
            f'{row["compile_seconds"]:.3g}', f'{row["memory_bytes"] / 2**20:.0f}' if row['memory_bytes'] else '?',
        ])  # fmt: skip
    heads = (
        'workload',
        'form',
        'lanes',
        'precision',
        's/round',
        'median',
        'samples/s',
        'GFLOP/s',
        'of matmul',
        'padded',
    )
    return table([*heads, 'compile s', 'MiB'], rows)


def peers(records: list[Record]) -> list[str]:
    """Each form of PyTorch beside the best of ours in the same process's turns, and how far the goals are reached."""
    rows, ratios = [], dict[tuple[str, str], dict[str, float]]()
    for record in records:
        result = record['result']
        (ours,) = result['rows']
        key = result['workload'], exactness(result)
        for name, ratio in ours['ratios'].items():
            seconds = result['peers'][name]['seconds_per_round']
            shown = [ours['conv'], ours['chunk'], f'{ours["seconds_per_round"]:.4g}', name, f'{seconds:.4g}']
            rows.append([*key, *shown, f'{ratio:.2f}'])
            ratios.setdefault(key, {})[name] = ratio
    lines = table(['workload', 'precision', 'form', 'lanes', 'ours, s/round', 'peer', 's/round', 'peer / ours'], rows)
    for (workload, precision), known in ratios.items():
        fastest = min(known, key=lambda name: known[name])
        found = {'eager PyTorch': known.get('PyTorch'), f'the fastest PyTorch, {fastest}': known[fastest]}
        for (name, ratio), goal in zip(found.items(), GOALS.values(), strict=True):
            if ratio is not None:
                verdict = 'reached' if ratio >= goal else 'missed'
                lines += ['', f'{workload}, {precision}: {ratio:.2f} times as fast as {name}; goal {goal}, {verdict}.']
    return lines


def profile(result: Record) -> list[str]:
    traced = f'{1e3 * result["traced_seconds_per_round"]:.4g} ms a round, traced'
    parts = [
        [name, f'{100 * part["share"]:.1f} %', f'{1e3 * part["seconds"]:.4g}']
        for name, part in result['categories'].items()
        if part['seconds']
    ]
    lines = [f'Form {result["conv"]}, {result["chunk"]} lanes, {exactness(result)}; {traced}.', '']
    lines += table(['', 'share', 'ms'], parts)
    lines += ['', *kernels.markdown(result['kernels'], 20)] if result['kernels'] else []
    return lines + (['', result['note']] if result['note'] else [])


def accuracies(records: list[Record]) -> list[str]:
    rows = []
    for record in records:
        found = record['result']
        shown = [f'{100 * found[name]:.2f}' if name in found else '' for name in NAMES]
        rows.append([record['what'], *shown, f'{found["rounds"]}', f'{found["rounds_per_second"]:.3g}'])
    return table(['method', 'general', 'personal', 'rounds', 'rounds/s'], rows)


NAMES = ('global_accuracy_last5', 'personal_accuracy')
