"""Who am I, and collectives among the ranks: the only part that knows of MPI."""

from distkeras.communicators._agreement import agree as agree
from distkeras.communicators._agreement import collectively as collectively
from distkeras.communicators._base import Communicator as Communicator
from distkeras.communicators._base import Op as Op
from distkeras.communicators._base import Part as Part
from distkeras.communicators._base import aligned_zeros as aligned_zeros
from distkeras.communicators._device import configure_tensorflow as configure_tensorflow
from distkeras.communicators._hierarchical import (
    HierarchicalCommunicator as HierarchicalCommunicator,
)
from distkeras.communicators._mpi import MPICommunicator as MPICommunicator
from distkeras.communicators._nccl import NCCLCommunicator as NCCLCommunicator
from distkeras.communicators._shared_memory import (
    SharedMemoryCommunicator as SharedMemoryCommunicator,
)
from distkeras.communicators._single import SingleCommunicator as SingleCommunicator
from distkeras.communicators._world import describe as describe
from distkeras.communicators._world import init as init
from distkeras.communicators._world import local_rank as local_rank
from distkeras.communicators._world import local_size as local_size
from distkeras.communicators._world import rank as rank
from distkeras.communicators._world import recover as recover
from distkeras.communicators._world import shutdown as shutdown
from distkeras.communicators._world import size as size
from distkeras.communicators._world import world as world
