"""The server: its app, and the phases that it runs, each from its beginning or from its newest checkpoint."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedjax_nc import _checkpoints, checks, saving
from fedjax_nc._checkpoints import Row
from fedjax_nc._progress import Progress
from fedjax_nc.base import State, Tree
from fedjax_nc.flower import _plan, _sites, _wire
from fedjax_nc.flower._plan import Agreement
from fedjax_nc.flower._rounds import TESTED, Asking, Patience, Server
from fedjax_nc.training import DivergedError


def server_app(
    agreed: Agreement,
    out: str | Path | Callable[[Context], str | Path],
    *,
    least: int | None = None,
    patience: Patience = Patience(),  # noqa: B008
    nodes: Mapping[int, int] | None = None,
    sizes: Mapping[int, int] | None = None,
    most: float = _wire.MOST,
    measure: Callable[[int, State], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    on_round: Callable[[str, Row, State], None] | None = None,
    progress: bool = True,
) -> ServerApp:
    """The Flower server of a consortium.

    Each round asks its cohort, drawn as in simulation, and goes on with those that answer in time and as they must; the
    others are nobody, as in `simulate.make_round`. What sites send is added up in the order in which simulation adds
    it, whenever it came. Everything is on disk after every round: started again with the same agreement and directory,
    the server goes on where it was.

    Args:
      agreed: what all have in common.
      out: directory of the run, or a function that finds it in Flower's context. It gets `sites.json`, and a folder for
        each phase: checkpoints and tables, as those of `training.run`; `sites.jsonl`, for each round whose messages
        counted (`sites`) and who else was drawn (`away`), why messages were `refused`, and by site `bytes_up`,
        `bytes_down` and, without secure aggregation, the `seconds` until it answered; and `model.safetensors` at the
        end.
      least: sites that must have answered for a round to count; it is asked again otherwise. By default two, for a
        mean of one is that site's message; one where a cohort is one site. With `agreed.secure` its own `least` holds,
        too.
      patience: how long to wait.
      nodes: from Flower's node ids, as `flwr supernode list` tells them, to the numbers of sites. By default the first
        node that says that it is a site is that site, as long as it is there: for those who trust each other.
      sizes: from the numbers of sites to the most examples that each may say it has, which are its weight; any number
        by default.
      most: largest absolute value in a message that passes.
      measure: from the number of a phase and its state, whose `clients` are (), to further numbers of a row.
      evaluate_every: rounds after which sites test the model on tests of their own: 'accuracy' is the generic model's
        and 'personal_accuracy' that of their own ones, of sites that have had a round of the phase, over all examples.
        After the last round of a phase they always do, and keep the model; see `client_app`.
      on_round: called with a phase's name, a row and the state, as above, after they are on disk.
      progress: whether to say how far it is.

    Returns:
      The app, for `[tool.flwr.app.components]`. Its rows hold `round`, `loss` (not with secure aggregation), `sites`
      that answered, `asked`, `refused` (what they sent was not taken), `bytes_up`, `bytes_down`, `seconds`.

    Raises:
      ValueError: for an agreement that cannot be carried out. The running app raises RuntimeError if fewer than `least`
        sites answer for `patience.start` seconds, `training.DivergedError` if the server's state is not finite, and
        ValueError or `training.CheckpointError` if `out` belongs to another run.
    """
    kinds = _plan.checked(agreed)
    checks.kind('patience', patience, Patience)
    for name, seconds in patience._asdict().items():
        if seconds is not None:
            checks.number(name, seconds)
    if least is None:
        least = min([2, *(phase.cohort or agreed.clients for phase in agreed.phases)])
    checks.whole('least', least)
    checks.number('most', most, open_low=True)
    if evaluate_every is not None:
        checks.whole('evaluate_every', evaluate_every)
    if nodes is not None and sorted(nodes.values()) != sorted(set(nodes.values()) & set(range(agreed.clients))):
        raise ValueError(f'nodes must name sites 0 to {agreed.clients - 1}, each once')
    if sizes is not None:
        if not set(sizes) <= set(range(agreed.clients)):
            raise ValueError(f'sizes must be of sites 0 to {agreed.clients - 1}, not {sorted(sizes)}')
        for k, size in sizes.items():
            checks.whole(f'sizes[{k}]', size)
    if agreed.secure is not None:
        least = max(least, agreed.secure.least)
    for phase in agreed.phases:
        if least > (phase.cohort or agreed.clients):
            raise ValueError(
                f'a round of {phase.name} asks {phase.cohort or agreed.clients} sites, and could never count: '
                f'least must be at most that, not {least}'
            )
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        folder = Path(out(context) if callable(out) else out)
        with _checkpoints.holding(folder):
            sites = _sites.Sites(grid, agreed, folder / 'sites.json', nodes, sizes)
            server = Server(grid, context, agreed, kinds, sites, patience, least, most)
            sites.gather(least, patience.start, patience.hello)
            server.admit()
            run(server, folder, measure, evaluate_every, on_round, progress)

    return app


def run(
    server: Server,
    out: Path,
    measure: Callable[[int, State], Mapping[str, float]] | None,
    evaluate_every: int | None,
    on_round: Callable[[str, Row, State], None] | None,
    progress: bool,
) -> None:
    """All phases, from the beginning or from the newest checkpoint."""
    agreed = server.agreed
    begun: list[tuple[Tree, Tree]] = []
    counted: list[np.ndarray] = []
    for number, phase in enumerate(agreed.phases):
        state, begin = server.begin(number, begun[-1][1] if begun else None)
        accepted = np.zeros(agreed.clients, np.int32)
        folder = f'{number}-{phase.name}'
        files = _checkpoints.Files(out / folder, {'agreement': server.name})
        history, held = files.restore(State(state, jnp.asarray(accepted)), phase.key)
        state, accepted = held.server, np.array(held.clients)
        begun.append((begin, state))
        counted.append(accepted)
        first = len(history)
        step = server.step(number)
        with Progress(phase.name, first, phase.rounds, show=progress) as bar:
            failing = time.monotonic()
            while len(history) < phase.rounds:
                t, began = len(history), time.monotonic()
                server.sites.greet(server.patience.hello)
                server.admit()
                key = jax.random.fold_in(phase.key, t)
                asking = Asking(number, t + 1, key, state, [b for b, _ in begun], counted)
                answers = server.ask(asking)
                if answers.missing:
                    if time.monotonic() - failing > server.patience.start:
                        raise RuntimeError(f'round {t + 1} of {phase.name}: {answers.missing}')
                    _sites.warn(f'round {t + 1} of {phase.name} is asked for again: {answers.missing}')
                    time.sleep(min(1.0, server.patience.start / 10))
                    continue
                after, loss, finite = step(key, state, answers)
                if not finite:
                    raise DivergedError(
                        f'round {t + 1} of {phase.name} left the server not finite, and is not kept: messages are too '
                        'large to be added up. Begin a new run with a lower rate, or with `most` in server_app'
                    )
                accepted[answers.there] = t + 1
                state = after
                begun[-1] = begin, state
                row: Row = {'round': t + 1, **loss, **answers.told, 'seconds': time.monotonic() - began}
                away = sorted(set(answers.ids.tolist()) - set(answers.there))
                about = {'round': t + 1, 'sites': answers.there, 'away': away, **answers.each}
                # Of a round done again the last line holds.
                _checkpoints.append(out / folder / 'sites.jsonl', json.dumps(about))
                if measure is not None:
                    found = {name: float(u) for name, u in measure(number, State(state, ())).items()}
                    if taken := sorted({*found} & {*row, *TESTED}):
                        raise ValueError(
                            f'{taken[0]!r} is what rows say themselves: give that number of measure another name'
                        )
                    row |= found
                if t + 1 == phase.rounds or (evaluate_every is not None and (t + 1) % evaluate_every == 0):
                    row |= server.tested(asking._replace(round=t + 2, server=state))
                history.append(row)
                files.log([row])
                files.save(t + 1, State(state, jnp.asarray(accepted)), phase.key, history)
                failing = time.monotonic()
                if on_round is not None:
                    on_round(phase.name, row, State(state, ()))
                bar.at(t + 1, _shown(row))
            if first == phase.rounds:  # for sites that were away at the end
                server.tested(Asking(number, first + 1, phase.key, state, [b for b, _ in begun], counted))
        if server.kinds[number].generic:
            model = out / folder / 'model.safetensors'
            saving.save(model, phase.algorithm, State(state, ()), _plan.blank(agreed, server.sites.sizes))


def _shown(row: Row) -> str:
    text = [f'{row["sites"]:.0f} of {row["asked"]:.0f} sites']
    text += [f'{name} {row[name]:.3f}' for name in ('loss', 'accuracy') if name in row]
    return ', '.join([*text, f'{row["seconds"]:.1f} s'])
