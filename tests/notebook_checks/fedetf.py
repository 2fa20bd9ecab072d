"""What fedetf.ipynb says in words, in numbers."""

from typing import Any

PICTURES = 6

NUMBERS = """
import json
print(json.dumps({
    'agreement': [float(similarity.mean_pairwise_cosine(w)) for w in (unbiased, biased)],
    'follows': float(follows),
    'last': {method: {name: training.last_mean(run.history, name) for name in run.history[-1]}
             for method, run in runs.items()},
    'FedETF personal': curve,
    'FedAvg personal': update,
}))
"""


def check(seen: dict[str, Any]) -> None:
    even, uneven = seen['agreement']
    assert uneven < 0.8 < even
    assert seen['follows'] > 0.8
    etf, average = seen['last']['FedETF'], seen['last']['FedAvg']
    assert etf['accuracy'] > average['accuracy'] + 0.01
    assert etf['NC1'] < average['NC1']
    assert etf['NC2'] < 0.7 * average['NC2']
    assert etf['NC3'] > average['NC3'] + 0.1
    assert len(seen['FedETF personal']) == 12
    for accuracies in (seen['FedETF personal'], seen['FedAvg personal']):
        assert accuracies[0] + 0.02 < accuracies[1] < accuracies[-1] + 0.01
