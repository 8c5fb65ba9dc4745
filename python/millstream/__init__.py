"""Detector events built over RDMA into accelerator memory; cards; a soft RDMA device.

Modules:

- :mod:`millstream.streams`: stream files and multi-fragment packets as NumPy arrays
- :mod:`millstream.events`: accepted events (HDF5) as NumPy, Awkward and Arrow arrays
- :mod:`millstream.cards`: cards on the network; :class:`Card` is one
- :mod:`millstream.evb`: runs of the event builder; :class:`EventBuilder` is one
- :mod:`millstream.stencil`: five-point Jacobi sweeps on cards
- :mod:`millstream.model`: predictions for a site; :class:`Site` is one
- :mod:`millstream.soft_rdma`: programs on the soft device
- :mod:`millstream.pytest_plugin`: the same as pytest fixtures
"""

from . import _program

with _program.soft_device_in_environment():
    # The module loads a verbs library while it is loaded itself: the soft device, unless this machine has an adapter.
    from . import _millstream

from ._millstream import CardError, FormatError, __version__
from .cards import Card, EmulatedCard
from .evb import EventBuilder, RunFailed
from .model import Site
from .program import ProgramFailed, program

__all__ = [
    "Card",
    "CardError",
    "EmulatedCard",
    "EventBuilder",
    "FormatError",
    "ProgramFailed",
    "RunFailed",
    "Site",
    "__version__",
    "program",
]
