"""The TensorFlow backend, by the names that `backends.current()` promises."""

from distkeras.backends._tensorflow_build import build
from distkeras.backends._tensorflow_exchange import TensorFlowExchange
from distkeras.backends._tensorflow_iterator import first_batches
from distkeras.backends._tensorflow_norm import GradientNorm
from distkeras.backends._tensorflow_optimizers import find_optimizers
from distkeras.backends._tensorflow_optimizers import overrides_train_step
from distkeras.backends._tensorflow_read import Reader
from distkeras.backends._tensorflow_read import read_variables
from distkeras.backends._tensorflow_snapshot import Snapshot
from distkeras.backends._tensorflow_step import make_test_function
from distkeras.backends._tensorflow_step import make_train_function

exchange = TensorFlowExchange
train_function = make_train_function
test_function = make_test_function
snapshot = Snapshot
gradient_norm = GradientNorm
reader = Reader

__all__ = [
    "build",
    "exchange",
    "find_optimizers",
    "first_batches",
    "gradient_norm",
    "overrides_train_step",
    "read_variables",
    "reader",
    "snapshot",
    "test_function",
    "train_function",
]
