"""How the results of `rounds_per_second.py` are printed and kept."""

from typing import Any

from fedjax_nc.experiments.pipeline import write as write
from fedjax_nc.experiments.provenance import device as device


def markdown(result: dict[str, Any]) -> str:
    """What was run, a table of our rows and the peers, and with what."""
    sampled = '' if result['cohort'] == result['clients'] else f', {result["cohort"]} sampled'
    title = (
        f'{result["workload"]}: {result["algorithm"]}, {result["model"]}, {result["clients"]} clients{sampled}, batch '
        f'{result["batch_size"]}, epochs {result["epochs"]}, {result["data"]}, {result["precision"]}; '
        f'{result["model_flops_per_round"] / 1e9:.3g} GFLOP a round; {result["rounds"]} timed calls.'
    )
    peers = result['peers']
    names = [
        'form', 'chunk', 'devices', 's/round', 'median', 'samples/s', 'GFLOP/s', 'of matmul', 'padded',
        'compile s', 'MiB',
    ]  # fmt: skip
    torch = [name for name in peers if name.startswith('PyTorch')]
    names += [f'{name} / ours' for name in peers] + (['fastest PyTorch / ours'] if len(torch) > 1 else [])
    table = [names, ['---'] * len(names)]
    for row in result['rows']:
        cells = [
            row['conv'], row['chunk'], str(row['devices']),
            f'{row["seconds_per_round"]:.4g}', f'{row["median_seconds_per_round"]:.4g}',
            f'{row["samples_per_second"]:.4g}', f'{row["model_flops_per_second"] / 1e9:.3g}',
            f'{100 * row["share_of_matmul"]:.3g} %', f'{100 * row["padded_work"]:.0f} %',
            f'{row["compile_seconds"]:.2g}', f'{row["memory_bytes"] / 2**20:.0f}' if row['memory_bytes'] else '?',
        ]  # fmt: skip
        ratios = [row['ratios'][name] for name in peers]
        ratios += [min(row['ratios'][name] for name in torch)] if len(torch) > 1 else []
        table.append(cells + [f'{ratio:.2f}' for ratio in ratios])
    for name, peer in peers.items():
        speed = result['model_flops_per_round'] / peer['seconds_per_round']
        best, median = f'{peer["seconds_per_round"]:.4g}', f'{peer["median_seconds_per_round"]:.4g}'
        share = f'{100 * speed / result["matmul_flops_per_second"]:.3g} %'
        cells = [name, '', '', best, median, '', f'{speed / 1e9:.3g}', share]
        table.append(cells + [''] * (len(names) - len(cells)))
    on_device = f'{result["peak_device_bytes"] / 2**20:.0f} MiB on the device, ' if result['peak_device_bytes'] else ''
    told = [
        ', '.join(f'{package} {version}' for package, version in versions.items())
        for versions in (result['versions'], *(peer['versions'] for peer in peers.values()))
    ]
    versions = '; '.join(dict.fromkeys(told))
    notes = (
        f'{result["date"]}, {result["device"]}. Matrix product {result["matmul_flops_per_second"] / 1e9:.4g} GFLOP/s. '
        f'Peak of all rows: {on_device}{result["peak_process_bytes"] / 2**20:.0f} MiB of the process. {versions}.'
    )
    lines = [f'| {" | ".join(cells)} |' for cells in table]
    return '\n'.join([title, '', *lines, '', notes])
