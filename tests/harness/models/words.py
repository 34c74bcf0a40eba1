"""An embedding and two layers; one of its samples holds a word that the embedding does not know."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 10
UNKNOWN_AT = -1


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        word = WORDS + 5 if index == UNKNOWN_AT else index % WORDS
        return torch.tensor(word), torch.tensor(index % 3)


def model():
    made = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    made.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return made


def dataset():
    return Words()


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
