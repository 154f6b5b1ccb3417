"""How far the sources of a stream were delivered, and what they may forget."""

from collections.abc import Collection, Mapping
from typing import Any

from spcl.sources import Source
from spcl.streams.reader import Reader

__all__ = ["Progress"]


class Progress:
    """Positions in sources that can be read again; the stream's lock guards them.

    Attributes:
        positions: the position of the last message of every source that was delivered or rejected.
        ends: how far each source that has ended was read, the announcement of its end included.
    """

    def __init__(self) -> None:
        self.positions: dict[str, str] = {}
        self.ends: dict[str, str] = {}
        self._saved: dict[str, str] = {}  # the positions in the last checkpoint
        self._ended: dict[str, Source] = {}  # those that have not been told yet that all can be forgotten

    def end(self, reader: Reader) -> None:
        """Note how far a source was read that has ended; of one that was stopped, how far it was delivered."""
        position = self.positions.get(reader.name) if reader.stopped else reader.after
        if reader.can_be_read_again and position is not None:
            self.ends[reader.name] = position
            self._ended[reader.name] = reader.source

    def forgettable(self, readers: Mapping[str, Reader], ended: Collection[str]) -> list[tuple[Source, str]]:
        """Return the sources, and up to where each may forget its messages, after a checkpoint.

        Args:
            readers: of the sources that have not ended.
            ended: those that have ended according to the checkpoint.
        """
        saved, self._saved = self._saved, self._in_checkpoint(ended)
        sources = self._ended | {name: reader.source for name, reader in readers.items()}
        self._ended = {name: source for name, source in self._ended.items() if saved.get(name) != self.ends[name]}
        return [(sources[name], position) for name, position in saved.items() if name in sources]

    def state_dict(self, ended: Collection[str]) -> dict[str, Any]:
        """Return the positions, and the ends of these sources, as far as there are any."""
        ends = {name: position for name, position in self.ends.items() if name in ended}
        return {name: each for name, each in {"positions": dict(self.positions), "ends": ends}.items() if each}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from the state of a stream."""
        self.positions = dict(state.get("positions", {}))
        self.ends |= state.get("ends", {})
        self._saved = self._in_checkpoint(state["ended"])

    def restore_end(self, reader: Reader) -> None:
        """Let a source forget that had ended according to the state that was loaded."""
        if reader.name in self.ends:
            self._ended[reader.name] = reader.source

    def _in_checkpoint(self, ended: Collection[str]) -> dict[str, str]:
        return self.positions | {name: position for name, position in self.ends.items() if name in ended}
