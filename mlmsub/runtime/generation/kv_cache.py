"""A static key/value cache: fixed addresses, so that a decode step can be a CUDA graph."""

import torch


class CacheCursor:
    """Where a forward pass stands in the key/value caches; one for all layers of a model.

    ``capacity``: tokens that a row's cache holds. ``positions`` [batch, new]: where this pass's tokens go; None while
    a prompt is read, whose tokens go to 0, 1, ... ``reach``: a pass looks at this many entries of the cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.reach = capacity
        self.positions: torch.Tensor | None = None
        self._visible: dict[int | None, torch.Tensor] = {}

    def move(self, positions: torch.Tensor | None, reach: int | None = None) -> None:
        self.positions, self.reach = positions, reach or self.capacity
        self._visible = {}

    def visible(self, window: int | None) -> torch.Tensor:
        """[batch, 1, new, reach], True where a token may look; made once per pass and kind of layer."""
        if window not in self._visible:
            assert self.positions is not None
            keys = torch.arange(self.reach, device=self.positions.device)
            self._visible[window] = visible(self.positions[:, None, :, None], keys, window)
        return self._visible[window]


class KeyValueCache:
    """The keys and values of one layer [batch, heads, capacity, width], at addresses that never change.

    Going back is writing again: what lies beyond a row's position is seen by no one.
    """

    def __init__(self, cursor: CacheCursor) -> None:
        self.cursor = cursor
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [new, batch, heads, width]. The first write makes the cache in their shape."""
        positions = self.cursor.positions
        if self._stored is None:
            # zeros: a masked entry still is a factor, and zero times NaN is NaN
            key_cache, value_cache = (
                new.new_zeros(new.shape[1], new.shape[2], self.cursor.capacity, new.shape[3]) for new in (key, value)
            )
            self._stored = key_cache, value_cache
        for cache, new in zip(self._stored, (key, value), strict=True):
            if positions is None:
                cache[:, :, : new.shape[0]] = new.permute(1, 2, 0, 3)
            else:
                rows = torch.arange(positions.shape[0], device=positions.device)
                cache[rows[:, None], :, positions] = new.transpose(0, 1)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [batch, heads, reach, width]."""
        assert self._stored is not None
        keys, values = self._stored
        return keys[:, :, : self.cursor.reach], values[:, :, : self.cursor.reach]


def visible(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys a query may see: none after it, and with a window only those at most that far before it."""
    distance = query_positions - key_positions
    return distance >= 0 if window is None else (distance >= 0) & (distance <= window)
