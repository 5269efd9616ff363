"""How a training step of one Keras backend hands its gradients over."""

from distkeras.backends._batch_norm import batch_norm_layers as batch_norm_layers
from distkeras.backends._batch_norm import synchronized_layers as synchronized_layers
from distkeras.backends._current import Norm as Norm
from distkeras.backends._current import current as current
from distkeras.backends._current import is_supported as is_supported
from distkeras.backends._logs import Logs as Logs
from distkeras.backends._optimizers import (
    indifferent_to_duplicates as indifferent_to_duplicates,
)
from distkeras.backends._optimizers import inner_optimizers as inner_optimizers
from distkeras.backends._optimizers import under_loss_scaling as under_loss_scaling
from distkeras.backends._optimizers import updates as updates
