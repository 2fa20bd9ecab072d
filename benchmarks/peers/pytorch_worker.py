"""Federated rounds as one writes them by hand in PyTorch, in the form that is asked for."""

import serving
from torch_rounds import FORMS

if __name__ == '__main__':
    channel = serving.Channel()
    channel.serve(FORMS[channel.form](serving.load(channel.path)))
