"""What a study has found: tables in Markdown, LaTeX and CSV, and figures.

Numbers are those of the last round or means over the last ones, as the study's metrics say, never of the best round. A
mean over seeds comes with the standard deviation of a sample (ddof 1). A difference to the baseline is that of pairs of
the same seed, thus of the same partition unless a row changes the clients, and comes with the 95 % interval of
Student's t. Where not all finished seeds have a number, it says how many have.
"""

import csv
import io
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_nc import _checkpoints
from fedjax_nc.experiments import cells, costs, figures, latex, runner
from fedjax_nc.experiments.costs import Cost, Found, mean
from fedjax_nc.experiments.setting import Setting
from fedjax_nc.experiments.study import Study


def write(
    study: Study,
    out: str | Path,
    target: float | None = None,
    *,
    rows: Sequence[str] | None = None,
    scenes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Path:
    """Writes the report of all finished runs, under whatever seeds, and returns its folder.

    That is `out/NAME`, at other scales than `full` `out/NAME-SCALE`, and of a part `-part` more, with `report.md`,
    `report.tex`, `table.csv` and `runs.csv`, and of trained runs `costs.csv` and figures; without matplotlib a warning
    instead of these. Rows without a finished run or a published number are left out.

    Args:
      study: whose finished runs in `out` are told. Its baseline is compared with whether it is among the rows or not.
      out: as for `runner.carry_out`.
      target: accuracy in percent to which rounds are counted; by default the baseline's mean of each scene.
      rows: the methods of a part; all by default.
      scenes: the scenes of a part; all by default.
      seeds: the seeds of a part; all by default.

    Raises:
      ValueError: if no run is finished, or for a name that the study does not have.
    """
    study = study if seeds is None else study.some(seeds=seeds)
    told = study.some(rows, scenes)
    found = gather(study if seeds is not None else study.some(seeds=runner.seeds_of(study, out)), out)
    ours = {cell: runs for cell, runs in found.items() if cell[0] in told.methods and cell[1] in told.scenes}
    if not any(ours.values()):
        why = f': {"; ".join(study.unavailable.values())}' if study.unavailable and not study.runs else ''
        raise ValueError(f'no run of {study.name} is finished in {out}{why or ": carry it out first"}')
    known = {method for (method, _), runs in ours.items() if runs}
    known |= {method for method, scene in told.published if scene in told.scenes}
    told = told.some([method for method in told.methods if method in known])
    part = '' if rows is None and scenes is None and seeds is None else '-part'
    folder = Path(out) / f'{study.name if study.scale == "full" else f"{study.name}-{study.scale}"}{part}'
    folder.mkdir(parents=True, exist_ok=True)
    try:
        drawn = dict(figures.of(told, found, target))
    except ImportError as missing:
        warnings.warn(f'{folder} gets no figures: {missing}', stacklevel=2)
        drawn = {}
    else:
        before = folder / 'report.md'
        shown = re.findall(r'^!\[(.+)\]\(\1\.png\)$', before.read_text() if before.exists() else '', re.M)
        for old in set(shown) - set(drawn):  # and no picture that somebody put there
            (folder / f'{old}.png').unlink(missing_ok=True)
    for name, figure in drawn.items():
        figure.savefig(folder / f'{name}.png', dpi=150)
    texts = {
        'report.md': markdown(told, found, ours, list(drawn), target),
        'report.tex': latex.tables(told, found, target),
        'table.csv': comma(table_rows(told, found)),
        'costs.csv': comma(cost_rows(told, found, target)),
        'runs.csv': comma(run_rows(ours)),
    }
    for name, text in texts.items():
        if text.strip():
            _checkpoints.replace(folder / name, text)
        else:  # frames cost nothing
            (folder / name).unlink(missing_ok=True)
    return folder


def gather(study: Study, out: str | Path) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """The summaries of all finished runs."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in study.runs:
        cell = found.setdefault((run.method, run.scene), {})
        if (summary := runner.summary(run, out)) is not None:
            cell[run.seed] = summary
    return found


def table_rows(study: Study, found: Found) -> list[dict[str, Any]]:
    """A row for each method, scene and metric."""
    rows = []
    for scene in study.scenes:
        for method in study.methods:
            for i, heading in enumerate(study.metrics):
                numbers = cells.values(study, found, method, scene, heading)
                ours = mean(numbers.values())
                gain = cells.difference(numbers, cells.values(study, found, study.baseline, scene, heading))
                theirs = study.published.get((method, scene), ((math.nan, math.nan),) * len(study.metrics))[i]
                rows.append({
                    'method': method, 'scene': scene, 'metric': heading, 'name': study.metric(method, heading),
                    'mean': ours.mean, 'std': ours.std, 'seeds': ours.seeds,
                    'difference': gain.mean, 'difference_low': gain.low, 'difference_high': gain.high,
                    'pairs': gain.pairs, 'published': theirs[0], 'published_std': theirs[1],
                })  # fmt: skip
    return rows


def run_rows(found: Found) -> list[dict[str, Any]]:
    """A row for each finished run, with all single numbers of its summary."""
    rows: list[dict[str, Any]] = []
    for (method, scene), cell in found.items():
        for seed, summary in cell.items():
            flat = {name: value for name, value in summary.items() if isinstance(value, str | int | float)}
            for part in ('bytes', 'seconds', 'parameters'):
                flat |= {f'{part}_{name}': value for name, value in summary.get(part, {}).items()}
            rows.append({'method': method, 'scene': scene, **flat, 'seed': seed})
    return rows


def comma(rows: list[dict[str, Any]]) -> str:
    """CSV, with empty cells for NaN and for what a row lacks."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator='\n')
    writer.writeheader()
    for row in rows:
        writer.writerow({k: '' if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()})
    return text.getvalue()


def markdown(study: Study, found: Found, ours: Found, drawn: list[str], target: float | None = None) -> str:
    """The report as Markdown: of the study's rows among `ours`, with a baseline from all that was found."""
    seeds = ', '.join(map(str, sorted({seed for runs in ours.values() for seed in runs})))
    lines = [f'# {study.title}', '']
    lines += [f'Published: {study.source}.', ''] if study.source else []
    scale = f'Scale: {study.scale}. {study.about}'.strip()
    lines += [scale, '', f'Seeds {seeds}; mean ± standard deviation over seeds (ddof 1), accuracies in %.', '']
    for scene in study.scenes:
        lines += [f'## {scene}', ''] if scene else []
        if scene in study.unavailable:
            lines += [f'Not run: {study.unavailable[scene]}', '']
        lines += [as_run(study, scene), '', *scene_table(study, found, scene), '']
        lines += [*difference_table(study, found, scene), '', *cost_table(costs.of(study, found, scene, target)), '']
    lines += [f'![{name}]({name}.png)\n' for name in drawn]
    missing = [
        f'{method}{", " + scene if scene else ""}: seeds {", ".join(map(str, lacking))}'
        for (method, scene), done in ours.items()
        if (lacking := [seed for seed in study.seeds if seed not in done])
    ]
    lost = [
        f'{method}{", " + scene if scene else ""}, seed {seed}: {summary["diverged"]}'
        for (method, scene), done in ours.items()
        for seed, summary in done.items()
        if 'diverged' in summary
    ]
    for heading, said in (('Not finished', missing), ('Diverged', lost), ('Of several versions', versions(ours))):
        lines += [f'{heading}:', '', *(f'- {line}' for line in said), ''] if said else []
    lines += ['Notes:', '', *(f'- {note}' for note in study.notes), ''] if study.notes else []
    lines += ['Made with:', '', *(f'- {line}' for line in made_with(ours)), '']
    return '\n'.join(lines).replace('\n\n\n', '\n\n')


def versions(found: Found) -> list[str]:
    """Which files of a user's own were not the same in all runs, and in which they were."""
    seen: dict[str, dict[str, list[str]]] = {}
    for (method, scene), done in found.items():
        for seed, summary in done.items():
            for what, digest in summary.get('own', {}).items():
                cell = f'{method}{", " + scene if scene else ""}, seed {seed}'
                seen.setdefault(what, {}).setdefault(digest, []).append(cell)
    return [
        f'{what}: ' + '; '.join(f'file {digest} in {" and ".join(cells)}' for digest, cells in files.items())
        for what, files in seen.items()
        if len(files) > 1
    ]


def as_run(study: Study, scene: str) -> str:
    """What a scene's baseline was run on, or its first row: a smaller scale may have another data set than print."""
    settings = {run.method: run.setting for run in study.runs if run.scene == scene}
    setting = settings.get(study.baseline) or next(iter(settings.values()), None)
    if not isinstance(setting, Setting):  # of a scene that cannot be run, or a frame
        return ''
    clients = f'{setting.clients} clients'
    if setting.cohort < setting.clients:
        clients += f', {setting.cohort} of them a round'
    run = f'Run: {setting.dataset}, {setting.model}, {clients}, {setting.rounds} rounds.'
    if setting.validation:
        run += f' Tested on {100 * setting.validation:g} % of the training examples, held back.'
    return run


def scene_table(study: Study, found: Found, scene: str) -> list[str]:
    """The main table of a scene; what was published stands beside what was found, where there is any."""
    rows = {method: list(cells.row(study, found, method, scene)) for method in study.methods}
    told = [any(pairs[i][1] for pairs in rows.values()) for i in range(len(study.metrics))]
    columns = zip(study.metrics, told, strict=True)
    heads = [name for heading, printed in columns for name in (heading, 'published')[: 1 + printed]]
    lines = [f'| | {" | ".join(map(barred, heads))} |', '|---|' + '---:|' * len(heads)]
    for method, pairs in rows.items():
        row = [text for pair, printed in zip(pairs, told, strict=True) for text in pair[: 1 + printed]]
        lines.append(f'| {barred(method)} | {" | ".join(row)} |')
    return lines


def barred(text: str) -> str:
    """A name in a cell of a Markdown table."""
    return text.replace('|', '\\|')


def difference_table(study: Study, found: Found, scene: str) -> list[str]:
    """Differences to the baseline, seed by seed; nothing where there is no pair."""
    rows = [(method, cells.gained(study, found, method, scene)) for method in study.methods if method != study.baseline]
    lines = [f'| {barred(method)} | {" | ".join(row)} |' for method, row in rows if any(row)]
    if not lines:
        return []
    headings = ' | '.join(map(barred, study.metrics))
    heads = f'| less {barred(study.baseline)}, same seed [95 % interval] | {headings} |'
    return [heads, '|---|' + '---:|' * len(study.metrics), *lines]


def cost_table(told: list[Cost]) -> list[str]:
    """Last round beside the mean of the last, rounds to an accuracy, bytes and time of each method."""
    if not told:
        return []
    heads = cells.cost_headings(told)
    lines = [f'| {" | ".join(["", *heads])} |', '|---|' + '---:|' * len(heads)]
    return lines + [f'| {" | ".join([barred(cells.cost_name(cost)), *cells.cost_row(cost)])} |' for cost in told]


def cost_rows(study: Study, found: Found, target: float | None) -> list[dict[str, Any]]:
    """A row for each method and scene, with what it cost in plain numbers."""
    rows = []
    for scene in study.scenes:
        for cost in costs.of(study, found, scene, target):
            rows.append({
                'method': cost.method, 'scene': scene, 'runs': cost.runs, 'runs_sound': cost.done,
                'last': cost.last.mean, 'last_std': cost.last.std,
                'last_several': cost.several.mean, 'last_several_std': cost.several.std,
                'goal': cost.goal, 'rounds_to_goal': cost.rounds.mean, 'runs_at_goal': cost.rounds.seeds,
                'parameters': cost.parameters, 'client_down': cost.down, 'client_up': cost.up, 'bytes': cost.whole,
                'minutes': cost.minutes,
            })  # fmt: skip
    return rows


def short(commit: str) -> str:
    """Twelve digits of a commit, with the sign that files differed from it."""
    return commit.rstrip('+')[:12] + '+' * commit.endswith('+')


def made_with(found: Found) -> list[str]:
    """Versions and hardware of all runs."""
    said = []
    for cell in found.values():
        for summary in cell.values():
            if 'versions' in summary:
                versions = ', '.join(f'{name} {number}' for name, number in summary['versions'].items())
                commit = f', commit {short(summary["commit"])}' if 'commit' in summary else ''
                said.append(f'{summary["device"]}; {versions}{commit}')
    return sorted(set(said))
