"""FedLoGe's released code, run on what `authors_ours.fedloge` gives: local updates, averages, realignment and tests."""

import copy
import types
from typing import Any

import numpy as np
import torch
from authors_shims import Calls, Examples, Loader, Work, losses, mean_loss, places, put, read
from torch import Tensor, nn

HEADS = ('projection', 'linear')


def run(work: Work) -> dict[str, np.ndarray]:
    import options  # the authors' files
    from model import model_res
    from util import fedavg, update_baseline

    s = work.settings
    args = options.args_parser()
    args.num_users, args.local_ep, args.local_bs = len(work.rows), s['epochs'], s['batch_size']
    args.lr, args.momentum, args.num_classes, args.device = s['lr'], s['momentum'], s['classes'], 'cpu'
    pool, test = (Examples(x, y, range(len(y))) for x, y in ((work.x, work.y), (work.test_x, work.test_y)))
    sizes = [len(rows) for rows in work.rows]
    out: dict[str, np.ndarray] = {}
    for name, played in s['runs'].items():
        net = model_res.ResNet(model_res.BasicBlock, s['blocks'], num_classes=s['classes'])
        width = net.linear.in_features
        frozen, aux, *private = (nn.Linear(width, s['classes']) for _ in range(2 + len(work.rows)))
        put({**named(net), **head(frozen, 'fixed/', 'v'), **head(aux, 'params/aux/')}, work.start)
        for k, mine in enumerate(private):
            put(head(mine, ''), {'w': work.start['private/w'][k], 'b': work.start['private/b'][k]})
        Loader.plan(played['orders'])
        seen, told = [], []
        for cohort in played['cohorts']:
            bodies, heads = [], []
            with losses() as kept:
                for k in cohort:
                    update = update_baseline.LocalUpdate(args, pool, work.rows[k])
                    body, mine, private[k], said = update.update_weights_gaux(
                        net=copy.deepcopy(net), g_head=copy.deepcopy(frozen), g_aux=copy.deepcopy(aux),
                        l_head=private[k], epoch=args.local_ep, loss_switch='None',
                    )  # fmt: skip
                    bodies.append(body)
                    heads.append(mine)
                    told.append(said)
            seen.append(3 * mean_loss(kept))  # three losses of each batch, and we report their sum
            net.load_state_dict(fedavg.FedAvg_noniid(bodies, [sizes[k] for k in cohort]))
            aux = fedavg.FedAvg_noniid_classifier(heads, [sizes[k] for k in cohort])
        out |= read({**named(net), **head(aux, 'params/aux/')}, work.start, f'{name}/')
        out |= {f'{name}/private/w': stacked([mine.weight.T for mine in private])}
        out |= {f'{name}/private/b': stacked([mine.bias for mine in private])}
        out |= {f'{name}/loss': np.array(seen), f'{name}/told': np.array(told)}

    # The last run goes on to its realignment.
    tested = types.SimpleNamespace(get_args=lambda: args, global_test_distribution=np.bincount(work.test_y),
                                   local_test_distribution=np.array(s['counts']))  # fmt: skip
    with chosen() as logits:
        update_baseline.globaltest(copy.deepcopy(net), copy.deepcopy(frozen), test, args, dataset_class=tested)
    out['frozen/logits'] = stacked(logits)[0]
    realigned = copy.deepcopy(aux)
    with chosen() as logits:
        update_baseline.globaltest_calibra(copy.deepcopy(net), realigned, test, args, dataset_class=tested)
    out |= {'generic/w': realigned.weight.T.detach().numpy(), 'generic/b': realigned.bias.detach().numpy()}
    out['generic/logits'] = stacked(logits)[0]
    personal, answers = [], []
    for k, rows in enumerate(work.rows):
        _, mine, own, _ = update_baseline.LocalUpdate(args, pool, rows).update_weights_norm_init(
            net=copy.deepcopy(net), g_head=copy.deepcopy(frozen), g_aux=copy.deepcopy(aux),
            l_head=copy.deepcopy(private[k]), seed=0, net_glob=net, epoch=0,
        )  # fmt: skip
        personal.append(mine)
        with chosen() as logits:
            update_baseline.localtest(copy.deepcopy(net), copy.deepcopy(mine), own, test, tested, range(len(test)), k)
        answers.append(torch.cat(logits))
    out['personal/w'] = stacked([mine.weight.T for mine in personal])
    out['personal/b'] = stacked([mine.bias for mine in personal])
    # Only classes that the client holds: the others have logits of -1e10 or so here.
    out['personal/logits'] = np.where(np.array(s['counts'])[:, None] > 0, stacked(answers), 0.0)
    return out


def chosen() -> Calls:
    """Keeps what their tests take the largest entry of."""
    return Calls(torch, 'max', lambda result, values, *_: values)


def stacked(tensors: list[Tensor]) -> np.ndarray:
    return torch.stack(tensors).detach().numpy()


def named(net: nn.Module) -> dict[str, Tensor]:
    return places(net, *HEADS)


def head(layer: Any, prefix: str, weight: str = 'w') -> dict[str, Tensor]:
    return {f'{prefix}{weight}': layer.weight.detach().T, f'{prefix}b': layer.bias.detach()}
