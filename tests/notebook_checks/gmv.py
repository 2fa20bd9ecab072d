"""What gmv.ipynb says in words, in numbers."""

from typing import Any

PICTURES = 6

NUMBERS = """
import json
middle, end = slice(WARM - 25, WARM), slice(-25, None)
print(json.dumps({
    'before': {name: float(values[:, middle].mean()) for name, values in accuracy.items()},
    'after': {name: float(values[:, end].mean()) for name, values in accuracy.items()},
    'jumps': {name: float(values[:, end].std(axis=1).mean()) for name, values in accuracy.items()},
    'same at first': [
        float(np.abs(accuracy[a] - accuracy[b])[:, :15].max())
        for a, b in (('FedAvg', 'FedAvg + GMV'), ('FedAvg + ETF', 'FedAvg + ETF & GMV'))
    ],
    'norm': strengths['norm'].mean(axis=0).tolist(),
    'margin': strengths['margin'].mean(axis=0).tolist(),
    'shift': np.asarray(shift).tolist(),
    'held': {name: float(u[held].mean()) for name, u in spread.items()},
    'lacked': {name: float(u[~held].mean()) for name, u in spread.items()},
    'least lacked': {name: float(u[~held].reshape(CLIENTS, -1).mean(axis=1).min()) for name, u in spread.items()},
    'agree': {name: float(similarity.prototype_consistency(rows, held).mean) for name, rows in means.items()},
    'to memory': {name: float(np.linalg.norm(rows - mu, axis=2)[held].mean()) for name, rows in means.items()},
    'apart': {
        name: float(np.linalg.norm(rows - (rows * held[..., None]).sum(axis=0) / holders, axis=2)[held].mean())
        for name, rows in means.items()
    },
    'bytes': {name: bytes_of(name)._asdict() for name in ('FedAvg', 'FedAvg + ETF', 'FedAvg + ETF & GMV')},
}))
"""


def check(seen: dict[str, Any]) -> None:
    after, jumps = seen['after'], seen['jumps']
    assert max(seen['same at first']) < 0.03  # a prediction or two on the edge; later rounding alone can part FedAvg's
    before = seen['before']
    assert abs(before['FedAvg'] - before['FedAvg + GMV']) < 0.04
    assert abs(before['FedAvg + ETF'] - before['FedAvg + ETF & GMV']) < 0.01
    assert after['FedAvg'] + 0.03 < after['FedAvg + GMV'] < after['FedAvg + ETF'] < after['FedAvg + ETF & GMV']
    assert after['FedAvg'] + 0.1 < after['FedAvg + ETF']
    assert after['FedAvg + ETF'] + 0.01 < after['FedAvg + ETF & GMV']
    assert abs(after['FedAvg + ETF & GMV'] - after['FedAvg + ETF, lower rate']) < 0.005
    assert jumps['FedAvg + ETF & GMV'] < 0.4 * jumps['FedAvg + ETF']

    norm, margin = seen['norm'], seen['margin']
    assert norm[128] == 0 < norm[131]  # collected from round 131 on
    assert norm[-1] < norm[148]
    assert margin[-1] < margin[148]
    shift = seen['shift']
    for c, row in enumerate(shift):
        assert row[c] == max(row)
        assert 4 < row[c] < 8
        assert max(row[:c] + row[c + 1 :]) < 3

    held, lacked = seen['held'], seen['lacked']
    assert held['without memory'] > held['received'] + 0.01
    assert lacked['without memory'] < lacked['received'] - 0.02
    assert abs(held['with memory'] - held['received']) < 0.01
    assert abs(lacked['with memory'] - lacked['received']) < 0.01
    assert seen['least lacked']['without memory'] < seen['least lacked']['received'] - 0.05
    assert seen['agree']['with memory'] > seen['agree']['without memory']
    assert seen['apart']['with memory'] < 0.7 * seen['apart']['without memory']
    assert seen['to memory']['with memory'] > 0.8 * seen['to memory']['without memory']

    sent = seen['bytes']
    extra = sent['FedAvg + ETF & GMV']['up'] - sent['FedAvg + ETF']['up']
    assert extra == 4 * (10 * 64 + 10)
    assert round(100 * extra / sent['FedAvg']['up']) == 7
    assert sent['FedAvg + ETF']['once'] >= 4 * 640
