"""What ccvr.ipynb says in words, in numbers."""

from typing import Any

PICTURES = 6

NUMBERS = """
import json
print(json.dumps({
    'cka': {
        f'{title}, {kind}': values.mean(axis=0).tolist()
        for title, panel in agreement.items() for kind, values in panel.items()
    },
    'follows': [float(follows[t].mean()) for t in (1, ROUNDS, LONG)],
    'accuracy': {name: percent(found).tolist() for name, found in tables.items()},
    'by rank': {name: values.mean(axis=0).tolist() for name, values in ranked.items()},
    'verdicts': [int(which.sum()) for which, _, _ in verdicts.values()],
    'sweep': [float(values.mean()) for values in sweep.values()],
    'before': dict(zip(map(str, STOPS), before.mean(axis=0).tolist())),
    'later': dict(zip(map(str, STOPS), later.mean(axis=0).tolist())),
    'others': {name: [float(u.mean()) for u in pair] for name, pair in gains.items()},
    'smaller': {kind: float(values.mean()) for kind, values in smaller.items()},
    'sizes': [*sizes.values(), weights],
    'off': [float(np.abs(joined.mean[c] - real[y_real == c].mean(axis=0)).max()) for c in range(10)],
}))
"""


def check(seen: dict[str, Any]) -> None:
    cka = seen['cka']
    for layers in cka.values():
        assert sorted(layers, reverse=True) == layers
    lost = []
    for t in (1, 5):
        even, skewed = cka[f'round {t}, dealt out evenly'], cka[f'round {t}, Dirichlet(0.05)']
        lost.append([a - b for a, b in zip(even, skewed, strict=True)])
        assert min(lost[-1]) > 0
    assert sorted(lost[1]) == lost[1]
    first, then, last = seen['follows']
    assert first > 0.8
    assert first > then + 0.1 > last + 0.2 > 0.3
    assert max(seen['off']) < 1e-4

    plain, calibrated, bound = (seen['accuracy'][name] for name in ('FedAvg', 'CCVR', 'oracle'))
    assert all(b > a + 2 for a, b in zip(plain, calibrated, strict=True))
    gain, gap = (sum(u) / 5 - sum(v) / 5 for u, v in ((calibrated, plain), (bound, calibrated)))
    assert gain > 8
    assert abs(gap) < 2.5
    plain, calibrated, bound = (seen['by rank'][name] for name in ('FedAvg', 'CCVR', 'oracle'))
    for better in (calibrated, bound):
        assert better[0] > plain[0] + 25
        assert sum(better[-2:]) < sum(plain[-2:])
    _, mended, spoilt, _ = seen['verdicts']
    assert mended > 3 * spoilt

    one, ten, hundred, thousand = seen['sweep']
    start = sum(seen['accuracy']['FedAvg']) / 5
    assert one + 5 < ten < hundred < thousand + 1
    assert ten - start > 0.6 * (hundred - start)
    assert one - start < 0.5 * (hundred - start)
    before, later = seen['before'], seen['later']
    assert later['2'] > before['10']
    assert 0 < later['20'] - before['20'] < 8
    assert later['1'] > before['1'] + 40

    others = seen['others']
    assert all(after > before + 8 for before, after in others.values())
    assert abs(others['FedProx'][1] - others['FedAvg'][1]) < 2
    assert others['clsnorm'][0] < others['FedAvg'][0]
    assert others['clsnorm'][1] < others['FedAvg'][1] - 1
    smaller = seen['smaller']
    assert smaller['diag'] < smaller['full'] - 0.5
    assert smaller['tied'] > smaller['full'] - 2
    assert seen['sizes'] == [21_450, 2_730, 1_290, 13_130]
