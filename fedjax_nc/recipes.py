"""Algorithms by name, for scripts that put them side by side. Programs call the factories themselves.

Model, optimizer, plan and first temperature are given and the same for all, whatever each paper took; the rest are the
factories' defaults.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedjax_nc import heads, losses, simulate
from fedjax_nc.algorithms import ccvr, fedavg, fedetf, fedetf_gmv, fedloge, fednh, fedprox, feduh, finetune
from fedjax_nc.base import Algorithm, Array, FederatedData, Model, State
from fedjax_nc.local import ClientOptimizer, Plan
from fedjax_nc.memory import remembering
from fedjax_nc.objective import objective, transformed


def join(stage: Algorithm, key: Array, state: State, data: FederatedData) -> State:
    """How most stages begin: with the server's model alone."""
    return simulate.join(stage, key, state.server, data.num_clients)


class Recipe(NamedTuple):
    """A method from training to personal models."""

    train: Algorithm
    personalize: Algorithm  # a stage of one round on all clients; its generic model is the method's
    calibrate: Algorithm | None = None  # a stage of one round on all clients before it, which makes that model
    enter: Callable[[Algorithm, Array, State, FederatedData], State] = join  # how personalisation begins
    refines: bool = False  # whether the generic model is more than what was trained
    variants: Mapping[str, Algorithm] = {}  # other stages in the place of `personalize`


def fedavg_recipe(model: Model, client_opt: ClientOptimizer, plan: Plan, **_: float | int | None) -> Recipe:
    """FedAvg with a linear head; one more local update makes the personal models."""
    task = objective(model, heads.linear(), losses.cross_entropy)
    return Recipe(fedavg.algorithm(task, client_opt, plan=plan), finetune.algorithm(task, client_opt, plan=plan))


def fedprox_recipe(model: Model, client_opt: ClientOptimizer, plan: Plan, **_: float | int | None) -> Recipe:
    """FedProx at mu = 0.001, as FedETF's comparison ran it."""
    task, mu = objective(model, heads.linear(), losses.cross_entropy), 0.001
    train = fedprox.algorithm(task, client_opt, mu=mu, plan=plan)
    return Recipe(train, finetune.algorithm(task, client_opt, plan=plan, penalty=fedprox.proximal(mu)))


def fedetf_recipe(
    model: Model,
    client_opt: ClientOptimizer,
    plan: Plan,
    *,
    dim: int | None = None,
    scale: float = 1.0,
    **_: float | int | None,
) -> Recipe:
    """FedETF with both stages of personalisation, 20 turns of classifier and projection."""
    train = fedetf.algorithm(model, client_opt, dim=dim, scale=scale, plan=plan)
    return Recipe(train, fedetf.personalize(model, client_opt, plan=plan))


def fedetf_gmv_recipe(
    model: Model, client_opt: ClientOptimizer, plan: Plan, *, rounds: int = 200, **_: float | int | None
) -> Recipe:
    """FedAvg_ETF whose memory acts in the last two fifths of the rounds; one more local update makes it personal."""
    head = heads.etf(learn_scale=False, project=False, unit_features=False)
    train = fedetf_gmv.algorithm(model, client_opt, warm=round(0.6 * rounds), head=head, plan=plan)
    task = remembering(objective(model, head, losses.cross_entropy))
    return Recipe(train, finetune.algorithm(task, client_opt, plan=plan))


def prototypes_recipe(method: Callable[..., Algorithm]) -> Callable[..., Recipe]:
    """FedNH or FedUH with a learned scale; one more local update makes the personal models."""

    def recipe(
        model: Model, client_opt: ClientOptimizer, plan: Plan, *, scale: float = 1.0, **_: float | int | None
    ) -> Recipe:
        task = objective(model, heads.prototypes(), losses.cross_entropy)
        train = method(model, client_opt, scale=scale, plan=plan)
        return Recipe(train, finetune.algorithm(task, client_opt, plan=plan))

    return recipe


def ccvr_recipe(model: Model, client_opt: ClientOptimizer, plan: Plan, **_: float | int | None) -> Recipe:
    """FedAvg calibrated by CCVR. Personal models tune the calibrated head alone: psi has no slope at zero."""
    task, psi = objective(model, heads.linear(), losses.cross_entropy), ccvr.tukey()
    personal = finetune.algorithm(transformed(task, psi), client_opt, plan=plan, parts=('head',))
    train = fedavg.algorithm(task, client_opt, plan=plan)
    return Recipe(train, personal, ccvr.calibrate(task, transform=psi), refines=True)


def fedloge_recipe(model: Model, client_opt: ClientOptimizer, plan: Plan, **_: float | int | None) -> Recipe:
    """FedLoGe: the generic model is the globally realigned one, personal models are the locally realigned ones."""

    def enter(stage: Algorithm, key: Array, state: State, data: FederatedData) -> State:
        return fedloge.stage_state(state)

    train = fedloge.algorithm(model, client_opt, plan=plan)
    variants = {
        'released': fedloge.realign(model, client_opt, plan=plan, mode='released'),
        'tuned': fedloge.realign(model, client_opt, plan=plan, finetune_epochs=15),
    }
    return Recipe(train, fedloge.realign(model, client_opt, plan=plan), None, enter, True, variants)


RECIPES: dict[str, Callable[..., Recipe]] = {
    'fedavg': fedavg_recipe,
    'fedprox': fedprox_recipe,
    'fedetf': fedetf_recipe,
    'fedetf_gmv': fedetf_gmv_recipe,
    'feduh': prototypes_recipe(feduh.algorithm),
    'fednh': prototypes_recipe(fednh.algorithm),
    'ccvr': ccvr_recipe,
    'fedloge': fedloge_recipe,
}
"""(model, client_opt, plan, *, dim, scale, rounds) -> recipe: dimension of FedETF's frame, first temperature of heads
that compare angles, and how long training will be. A method that has no use for one ignores it."""
