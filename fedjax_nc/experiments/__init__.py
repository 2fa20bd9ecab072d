"""Experiments: runs and studies as plain data, and the one place where they are carried out. Names and files live
here; the floors below are functions without any.

- setting: what tells one run from another, read from JSON or TOML and written as either
- parts: heads, losses, server optimizers and frames by name
- recipes, networks: methods and models by name; own: how those of users have one
- scene: from a setting to its data and its method
- measures: what is measured of a run; probes: what else may be
- pipeline: a run from its data to its summary; finished: one that is done, and its models
- seeds: runs that differ in their seed alone, in one program
- geometry: frames, measured without training
- study: methods x scenes x seeds, and published tables (`tables/*.toml`)
- runner: carries out what is missing of a study
- report, costs, figures: what a study has found
- traffic, provenance: bytes that are sent; versions, commit, processor, memory
- command: a run from a command line; `python -m fedjax_nc.experiments` is that of studies
"""

from fedjax_nc.experiments import recipes as recipes
from fedjax_nc.experiments.finished import Finished as Finished
from fedjax_nc.experiments.finished import load as load
from fedjax_nc.experiments.pipeline import run as run
from fedjax_nc.experiments.setting import Setting as Setting
from fedjax_nc.experiments.study import Study as Study

__all__ = ['Finished', 'Setting', 'Study', 'load', 'recipes', 'run']
