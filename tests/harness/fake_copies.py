"""Copies of a device that is the CPU: they are made by a thread of their own, when the test lets it."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch

TIMEOUT_S = 60.0


class FakeCopies:
    """Holds all tensors but those that it made itself; ``going`` lets copies to the host be made."""

    def __init__(self) -> None:
        self.going = Event()
        self.going.set()
        self.threads = self.landed = self.brought = self.admitted = self._moments = 0
        self._hosts: set[int] = set()
        self._engine = ThreadPoolExecutor(1)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._hosts and tensor.device.type == "cpu"

    def to_host(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401
        host = self.buffer(tensor)
        # Until it is made, the copy has values that nobody sent.
        host.view(-1).view(torch.uint8).fill_(113)
        made = self._engine.submit(self._copy, host, tensor)
        return SimpleNamespace(tensor=host, wait=lambda: made.result(TIMEOUT_S))

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._hosts.add(host.untyped_storage()._cdata)
        return host

    def moment(self) -> object:
        self._moments += 1
        return self._moments

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, since: object) -> None:
        assert since in range(1, self._moments + 1)
        tensor.copy_(host)
        self.landed += 1

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        self.brought += 1
        return host.clone()

    def admit(self, tensors: Iterable[torch.Tensor]) -> None:
        self.admitted += len(list(tensors))

    def prepare_thread(self) -> None:
        self.threads += 1

    def _copy(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        assert self.going.wait(TIMEOUT_S)
        host.copy_(tensor)
