"""What own_method.ipynb says in words, in numbers."""

from typing import Any

PICTURES = 4

NUMBERS = """
import json


def said(algorithm):
    try:
        testing.check(algorithm)
    except testing.ContractError as error:
        return [line.split(':')[0] for line in str(error).splitlines()]
    return []


print(json.dumps({
    'broken': {
        'centred': said(centred(small, opt, plan=brief)),
        'wrong': said(right._replace(aggregate=wrong)),
    },
    'all': {name: values.mean(axis=1).tolist() for name, values in accuracy.items()},
    'last': {name: values[:, -5:].mean(axis=1).tolist() for name, values in accuracy.items()},
    'lost': {name: float(np.mean((np.array(run[0][1][10:]) / np.bincount(y)) < 0.5)) for name, run in runs.items()},
    'personal': {name: {way: float(u.mean()) for way, u in panel.items()} for name, panel in spread.items()},
    'right': float(np.mean(np.asarray(guess) == np.asarray(y[known]))),
    'summary': {name: float(summary[name]) for name in ('global_accuracy', 'personal_accuracy')},
}))
"""


def check(seen: dict[str, Any]) -> None:
    assert seen['broken'] == {'centred': ['owned'], 'wrong': ['chunks']}
    average, anchored, by_class = seen['all'].values()
    assert all(b > a + 0.05 for a, b in zip(average, anchored, strict=True))
    assert abs(sum(by_class) - sum(anchored)) / 3 < 0.03
    mean = {name: sum(values) / 3 for name, values in seen['last'].items()}
    assert mean['anchored'] > mean['FedAvg'] + 0.04
    assert abs(mean['anchored, by class'] - mean['anchored']) < 0.02
    assert seen['lost']['anchored'] < 0.5 * seen['lost']['FedAvg']
    personal = seen['personal']
    for panel in personal.values():
        general, own = panel.values()
        assert own > general + 2
    assert abs(personal['anchored, by class']['private head'] - personal['FedAvg']['updated']) < 1
    assert personal['anchored']['updated'] > personal['FedAvg']['updated'] + 0.3
    assert seen['right'] > 0.7
    assert seen['summary']['global_accuracy'] > 0.8
