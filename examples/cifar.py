"""One federated run, by default FedETF's published setting for CIFAR-10.

    python examples/cifar.py --data-dir ~/data --out runs/fedetf
    python examples/cifar.py --algorithm fedavg --dataset digits --rounds 30 --out runs/digits
    python examples/cifar.py --algorithm fedprox --head etf --loss balanced_softmax --out runs/fedprox_etf
    python examples/cifar.py --algorithm fedprox --options mu=0.1 --partition shards --out runs/fedprox

Writes into --out: config.json, metrics.jsonl, metrics.csv, summary.json, seconds.json, accuracy.png, model.safetensors
and checkpoints/.
"""

from fedjax_nc.experiments import command


def main(argv: list[str] | None = None) -> dict:
    return command.main(argv, prog='cifar.py', description=__doc__)


if __name__ == '__main__':
    command.script(main, 'cifar.py')
