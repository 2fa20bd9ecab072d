"""Algorithms by name with their papers' settings, for scripts. Programs call the factories themselves."""

from collections.abc import Callable
from typing import NamedTuple

from fedjax_nc import heads, losses
from fedjax_nc.algorithms import fedavg, fedetf, fedprox, finetune
from fedjax_nc.base import Algorithm, Model
from fedjax_nc.local import ClientOptimizer, Plan
from fedjax_nc.objective import objective


class Recipe(NamedTuple):
    """A method from training to personal models."""

    train: Algorithm
    personalize: Algorithm  # a stage of one round on all clients


def fedavg_recipe(
    model: Model, client_opt: ClientOptimizer, plan: Plan, *, dim: int | None = None, scale: float = 1.0
) -> Recipe:
    """FedAvg with a linear head; one more local update makes the personal models."""
    task = objective(model, heads.linear(), losses.cross_entropy)
    return Recipe(fedavg.algorithm(task, client_opt, plan=plan), finetune.algorithm(task, client_opt, plan=plan))


def fedprox_recipe(
    model: Model, client_opt: ClientOptimizer, plan: Plan, *, dim: int | None = None, scale: float = 1.0
) -> Recipe:
    """FedProx at mu = 0.001, as FedETF's comparison ran it."""
    task, mu = objective(model, heads.linear(), losses.cross_entropy), 0.001
    train = fedprox.algorithm(task, client_opt, mu=mu, plan=plan)
    return Recipe(train, finetune.algorithm(task, client_opt, plan=plan, penalty=fedprox.proximal(mu)))


def fedetf_recipe(
    model: Model, client_opt: ClientOptimizer, plan: Plan, *, dim: int | None = None, scale: float = 1.0
) -> Recipe:
    """FedETF with both stages of personalisation, 20 turns of classifier and projection."""
    train = fedetf.algorithm(model, client_opt, dim=dim, scale=scale, plan=plan)
    return Recipe(train, fedetf.personalize(model, client_opt, plan=plan))


RECIPES: dict[str, Callable[..., Recipe]] = {
    'fedavg': fedavg_recipe,
    'fedprox': fedprox_recipe,
    'fedetf': fedetf_recipe,
}
"""(model, client_opt, plan, *, dim, scale) -> recipe; the last two are an ETF's dimension and first temperature."""
