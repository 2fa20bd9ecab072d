"""Experiments: a run as plain data, and the one place where it is carried out. Names and files live here; the floors
below are functions without any.

setting: what tells one run from another, read from JSON or TOML and written as JSON
recipes: methods by name
pipeline: a run from its data to its summary
command: a run from a command line
"""

from fedjax_nc.experiments import recipes as recipes
from fedjax_nc.experiments.pipeline import run as run
from fedjax_nc.experiments.setting import Setting as Setting
