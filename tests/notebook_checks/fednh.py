"""What fednh.ipynb says in words, in numbers."""

from typing import Any

PICTURES = 6

NUMBERS = """
import json


def rare(name, rate):
    return float(np.mean([spirals[name, rate, seed][1][4:] for seed in range(SPIRALS)]))


print(json.dumps({
    'distance': dict(zip(map(str, DIMS), best)),
    'chance': dict(zip(map(str, DIMS), middle.tolist())),
    'rare': {name: [rare(name, rate) for rate in RATES] for name in tasks},
    'length': np.median(length, axis=0).tolist(),
    'general': {f'{name} {dim}': final(run).tolist() for (name, dim), run in runs.items()},
    'early': {f'{name} {dim}': float(run[2]['accuracy'][:, :15].mean()) for (name, dim), run in runs.items()},
    'signed': float(final(signed).mean()),
    'follows': {name: float(runs[name, 32][2]['follows'][:, -1].mean()) for name in METHODS},
    'gap': {name: float(runs[name, 32][2]['gap'][:, -1].mean()) for name in METHODS},
    'personal': {f'{name} {dim}': np.nanmean(found, axis=(0, 2)).tolist() for (name, dim), found in pm.items()},
    'by hand': [float(np.nanmax(np.abs(u - v))) for u, v in zip(by_hand, (pm_v, pm_l))],
    'reach': {
        name: float(min(np.linalg.norm(np.maximum(vectors(u.server.variables), 0), axis=1).min()
                        for u in runs[name, 8][1]))
        for name in ('FedUH', 'FedNH')
    },
}))
"""


def check(seen: dict[str, Any]) -> None:
    best, chance = seen['distance'], seen['chance']
    etf = (40 / 19) ** 0.5
    assert all(best[d] > chance[d] + 0.2 for d in best)
    assert all(abs(best[d] - etf) < 1e-3 for d in ('19', '32'))
    assert all(abs(best[d] - 2**0.5) < 1e-3 for d in ('10', '14', '18'))

    free, uniform = seen['rare']['free'], seen['rare']['uniform']
    assert free[0] < 35 < 60 < uniform[0]
    assert uniform[1] > free[1] + 10
    assert uniform[2] - free[2] < 0.6 * (uniform[0] - free[0])
    assert max(seen['length'][4:]) < min(seen['length'][:2])

    general, early = seen['general'], seen['early']
    uh, nh, average = (general[f'{name} 32'] for name in ('FedUH', 'FedNH', 'FedAvg'))
    assert all(b > max(a, c) for a, b, c in zip(uh, nh, average, strict=True))
    lead = sum(nh) / len(nh) - max(sum(uh) / len(uh), sum(average) / len(average))
    assert 1.5 < lead < 4
    assert abs(sum(uh) - sum(average)) / len(uh) < 1.5
    assert early['FedNH 32'] > early['FedUH 32'] + 1
    assert early['FedUH 32'] > early['FedAvg 32'] + 4
    small = {name: sum(general[f'{name} 8']) / len(uh) for name in ('FedUH', 'FedNH', 'FedAvg')}
    assert small['FedUH'] < 50 < small['FedAvg'] < small['FedNH']
    assert seen['signed'] > small['FedUH'] + 20
    assert seen['reach']['FedUH'] < 0.3
    assert seen['reach']['FedNH'] > 0.9

    personal = seen['personal']
    for i in (0, 1):
        level = [personal[f'{name} 32'][i] for name in ('FedUH', 'FedNH', 'FedAvg')]
        assert max(level) - min(level) < 2
        assert personal['FedNH 8'][i] < personal['FedAvg 8'][i]
    assert max(seen['by hand']) < 1e-3

    follows, gap = seen['follows'], seen['gap']
    assert follows['FedNH'] > 0.85
    assert follows['FedNH'] > follows['FedAvg'] + 0.1 > follows['FedUH'] + 0.2
    assert abs(gap['FedUH']) < 0.01
    assert 0.2 < gap['FedNH'] < gap['FedAvg']
