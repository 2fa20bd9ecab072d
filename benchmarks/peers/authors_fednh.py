"""FedNH's released code, run on what `authors_ours.fednh` gives: its clients and its server's own loop over rounds."""

from typing import Any

import numpy as np
import torch
from authors_shims import Calls, Examples, Loader, Work, losses, mean_loss, places, put, read


def run(work: Work) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, played in work.settings['runs'].items():
        found, drawn = rounds(work, played)
        out |= {f'{name}/{part}': array for part, array in found.items()}
    return {**out, 'frame/gram': (drawn @ drawn.T).numpy()}


def rounds(work: Work, played: dict[str, Any]) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Results of a run of their server's loop, and the prototypes that they would have begun with, [C, D]."""
    from src.flbase.strategies.FedNH import FedNHClient, FedNHServer  # the authors' files

    criterion = torch.nn.CrossEntropyLoss()
    everything = Examples(work.x, work.y, range(len(work.y)))
    test = Examples(work.test_x, work.test_y, range(len(work.test_y)))
    client_config, server_config = configs(work, played)
    clients = {
        k: FedNHClient(criterion, Examples(work.x, work.y, rows), test, client_config, k, 'cpu')
        for k, rows in enumerate(work.rows)
    }
    drawn = clients[0].model.prototype.detach().clone()
    # Their server begins with the first client's model.
    put(named(clients[0].model), {**work.start, 'params/head/scale': np.array(played['scale'])})
    server = FedNHServer(
        server_config,
        clients,
        exclude=(),
        server_side_criterion=criterion,
        global_testset=test,
        global_trainset=everything,
        client_cstr=FedNHClient,
        server_side_client_config=client_config,
        server_side_client_device='cpu',
    )
    cohorts = iter(played['cohorts'])
    server.select_clients = lambda ratio: np.array(next(cohorts))
    Loader.plan(played['orders'])
    seen, told = [], []
    aggregate, net = server.aggregate, server.server_side_client.model
    with losses() as kept, Calls(net, 'forward', lambda result, *_: result) as logits:

        def between(uploads: Any, round: int) -> None:
            seen.append(mean_loss(kept))
            told.append(server.average_train_loss_dict[round])
            kept.clear()
            logits.clear()  # what follows is the test of the new model
            aggregate(uploads, round)

        server.aggregate = between
        server.run(filename='', use_wandb=False, global_seed=0)
    found = {'loss': np.array(seen), 'told': np.array(told), 'logits': torch.cat(logits).detach().numpy()}
    return {**read(named(net), work.start, ''), **found}, drawn


def configs(work: Work, played: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What their configuration file and command line hold: (client's, server's)."""
    s = work.settings
    client = {
        'model': 'Conv2Cifar', 'num_classes': s['classes'], 'num_epochs': s['epochs'], 'batch_size': s['batch_size'],
        'optimizer': 'SGD', 'client_lr': s['lr'], 'client_lr_scheduler': 'diminishing',
        'lr_decay_per_round': s['decay'], 'sgd_momentum': s['momentum'], 'sgd_weight_decay': s['weight_decay'],
        'global_seed': 0, 'num_rounds': 3,
        'FedNH_return_embedding': False, 'FedNH_head_init': 'orthogonal', 'FedNH_fix_scaling': False,
        'FedNH_client_adv_prototype_agg': played['adaptive'],
    }  # fmt: skip
    server = {
        'strategy': 'FedNH', 'dataset': 'Cifar10', 'partition': 'iid-equal-size', 'num_clients': len(work.rows),
        'num_classes': s['classes'], 'num_rounds': len(played['cohorts']), 'participate_ratio': 1.0, 'drop_ratio': 0.0,
        'learning_rate': 1.0, 'lr_decay_per_round': 1.0, 'test_every': 1, 'split_testset': False, 'use_tqdm': False,
        'FedNH_smoothing': s['rho'], 'FedNH_server_adv_prototype_agg': played['adaptive'],
    }  # fmt: skip
    return client, server


def named(net: Any) -> dict[str, torch.Tensor]:
    scale = net.scaling.detach()
    return {**places(net), 'params/head/scale': scale, 'fixed/w': net.prototype.detach()}
