"""FedETF's released code, run on what `authors_ours.fedetf` gives: nodes, client, server and personal updates."""

import copy
from typing import Any

import numpy as np
import torch
from authors_shims import Calls, Examples, Loader, Work, losses, mean_loss, places, put, read

HEADS = ('linear_proto', 'linear_head')


def run(work: Work) -> dict[str, np.ndarray]:
    import args as options  # the authors' files
    import client_funct
    import nodes
    import server_funct
    import utils

    s = work.settings
    args = utils.set_server_method(with_settings(options.args_parser(), s, len(work.rows)))
    pool, test = (Examples(x, y, range(len(y))) for x, y in ((work.x, work.y), (work.test_x, work.test_y)))
    weights = [len(rows) / sum(map(len, work.rows)) for rows in work.rows]

    def node(k: int) -> Any:
        """A node as their main script makes it, number -1 for the server, with our first weights."""
        mine = Examples(work.test_x, work.test_y, test.idxs) if k < 0 else list(work.rows[k])  # to be shuffled in place
        made = nodes.Node(k, mine, test if k < 0 else pool, args)
        drawn.append(made.model.proto_classifier.proto)
        made.model.proto_classifier.proto = torch.zeros_like(drawn[-1])
        put(named(made.model), work.start)
        return made

    drawn: list[torch.Tensor] = []
    out: dict[str, np.ndarray] = {}
    for name, played in s['runs'].items():
        central, held = node(-1), {k: node(k) for k in range(len(work.rows))}
        Loader.plan(played['orders'])
        told, seen = [], []
        for cohort in played['cohorts']:
            with losses() as kept:
                held, said = client_funct.Client_update(args, held, central, cohort)
            told.append(said)
            seen.append(mean_loss(kept))
            central = server_funct.Server_update(args, central, held, cohort, weights)
        out |= read(named(central.model), work.start, f'{name}/')
        out |= {f'{name}/loss': np.array(seen), f'{name}/told': np.array(told)}
        with Calls(torch, 'matmul', lambda result, *_: result) as kept:
            utils.validate(args, central, which_dataset='local')
        order = central.local_data.dataset.idxs
        out[f'{name}/logits'] = torch.cat(kept)[np.argsort(order)].numpy()

        k = played.get('personal')
        for which in ('anew', 'carried') if k is not None else ():
            mine = node(k) if which == 'anew' else copy.deepcopy(held[k])
            Loader.plan(played['personal_orders'])
            client_funct.Client_personalization(args, {0: mine}, central, [0])
            out |= read(named(mine.model), work.start, f'{which}/')
    v = drawn[0]
    return {**out, 'frame/gram': (v.T @ v).numpy()}


def with_settings(args: Any, s: dict[str, Any], clients: int) -> Any:
    """The options of their command line and main script; nothing is held out for tests."""
    args.client_method, args.dataset, args.local_model = 'fedetf', 'cifar10', s['model']
    args.node_num, args.E, args.batchsize, args.lr = clients, s['epochs'], s['batch_size'], s['lr']
    args.momentum, args.local_wd_rate = s['momentum'], s['weight_decay']
    args.client_valid_ratio = args.server_valid_ratio = 0.0
    return args


def named(net: Any) -> dict[str, torch.Tensor]:
    proj = net.linear_proto
    return {
        **places(net, *HEADS),
        'params/head/proj/w': proj.weight.detach().T,
        'params/head/proj/b': proj.bias.detach(),
        'params/head/scale': net.scaling_train.detach(),
        'fixed/v': net.proto_classifier.proto.detach(),
    }
