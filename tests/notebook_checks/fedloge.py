"""What fedloge.ipynb says in words, in numbers."""

from typing import Any

PICTURES = 6

NUMBERS = """
import json
everything = {**tables, 'dense': dense}
print(json.dumps({
    'counts': np.asarray(counts).tolist(),
    'quality': {
        name: [float(u) for u in frames.frame_quality(trained[name][0][-1].server.variables.fixed['v'])]
        for name in pair
    },
    'bottom': {name: float(np.mean([f.bottom for f in found[name]])) for name in pair},
    'variance': {
        name: float(np.mean([scatter(f)[:, half].sum(axis=1) / scatter(f).sum(axis=1) for f in found[name]]))
        for name in pair
    },
    'silent': {name: float(np.mean([f.mean[:, half] == 0 for f in found[name]])) for name in pair},
    'others': {
        name: float(np.mean([np.median(f.relative[:, half][f.mean[:, half] > 0]) for f in found[name]]))
        for name in pair
    },
    'masked': float(np.mean(zeros)),
    'pruned': {f'{name} {d}': pruned(name, d).mean(axis=0).tolist() for name in pair for d in (False, True)},
    'norms': {
        'FedAvg': np.mean(global_heads('FedAvg', 'head'), axis=0).tolist(),
        'FedLoGe': np.mean(global_heads('FedLoGe', 'aux'), axis=0).tolist(),
    },
    'follows': float(follows),
    'general': {name: np.asarray(evaluate.accuracy(t)).mean(axis=0).tolist() for name, t in everything.items()},
    'groups': {
        name: np.asarray(evaluate.group_accuracy(t, groups)).mean(axis=0).tolist() for name, t in everything.items()
    },
    'short': int((drawn < wanted).sum()),
    'personal': {name: values.mean(axis=0).tolist() for name, values in personal.items()},
    'spread': {name: values.std(axis=0).tolist() for name, values in personal.items()},
}))
"""


def check(seen: dict[str, Any]) -> None:
    assert sum(seen['counts']) == 402
    assert (seen['counts'][0], seen['counts'][-1]) == (143, 2)
    dense, sparse = (seen['quality'][name] for name in ('FedLoGe, dense ETF', 'FedLoGe'))
    assert all(abs(q[2] - 96.38) < 0.05 for q in (dense, sparse))
    assert abs(sparse[5] - 0.6) < 0.001

    def both(what: str) -> tuple[float, float]:
        return seen[what]['FedLoGe, dense ETF'], seen[what]['FedLoGe']

    of_dense, of_sparse = both('bottom')
    assert of_sparse < 0.5 * of_dense
    of_dense, of_sparse = both('variance')
    assert of_sparse < 0.1 < 0.15 < of_dense
    of_dense, of_sparse = both('silent')
    assert of_sparse > of_dense + 0.04
    of_dense, of_sparse = both('others')
    assert of_sparse > of_dense
    assert abs(seen['masked'] - 0.6) < 0.03
    for name in ('FedLoGe, dense ETF', 'FedLoGe'):
        negligible, dominant = seen['pruned'][f'{name} False'], seen['pruned'][f'{name} True']
        assert negligible[3] > negligible[0] - 0.02
        assert dominant[1] < dominant[0] - 0.03
    assert seen['pruned']['FedLoGe True'][1] < seen['pruned']['FedLoGe, dense ETF True'][1] - 0.1

    for norms in seen['norms'].values():
        assert min(norms[:4]) > max(norms[6:])
    assert seen['follows'] > 0.8

    general, groups = seen['general'], seen['groups']
    before, after = (groups[f'FedLoGe, {name}'] for name in ('global head', 'realigned'))
    for look in range(1, 10):
        assert 0.13 < after[look][2] - before[look][2] < 0.4
        assert after[look][0] < before[look][0]
    gain = [a - b for a, b in zip(general['FedLoGe, realigned'], general['FedLoGe, global head'], strict=True)]
    assert gain[2] > 0.03
    assert gain[-1] < 0.02
    assert general['FedETF'][1] > general['FedAvg'][1] + 0.05
    assert abs(general['FedLoGe, realigned'][-1] - general['dense'][-1]) < 0.04
    for look in range(10):
        assert general['FedAvg, realigned'][look] > general['FedLoGe, realigned'][look] - 0.01

    assert seen['short'] > 0
    personal = seen['personal']
    realigned, trained = personal['FedLoGe, realigned'], personal['FedLoGe, realigned and trained']
    for look in range(1, 6):
        assert realigned[look] > personal['FedLoGe, private heads'][look]
        assert realigned[look] > personal['FedAvg, general model'][look]
    assert abs(realigned[-1] - personal['FedAvg, one more update'][-1]) < 0.01
    for look in range(6):
        assert trained[look] == max(values[look] for values in personal.values())
    ahead = trained[-1] - personal['FedAvg, one more update'][-1]
    assert 0 < ahead < seen['spread']['FedAvg, one more update'][-1] + 0.005
