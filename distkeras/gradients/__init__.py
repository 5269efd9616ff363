"""Gradients: the plan that all ranks agree on, and their exchange on the host."""

from distkeras.gradients._channel import Counters as Counters
from distkeras.gradients._clock import StepClock as StepClock
from distkeras.gradients._exchange import GradientExchange as GradientExchange
from distkeras.gradients._plan import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from distkeras.gradients._plan import Bucket as Bucket
from distkeras.gradients._plan import Gradient as Gradient
from distkeras.gradients._plan import Placement as Placement
from distkeras.gradients._plan import Plan as Plan
from distkeras.gradients._plan import canonical_path as canonical_path
from distkeras.gradients._plan import check_bucket_bytes as check_bucket_bytes
from distkeras.gradients._plan import make_plan as make_plan
from distkeras.gradients._rows import Rows as Rows
from distkeras.gradients._rows import nonzero_rows as nonzero_rows
from distkeras.gradients._wire import Compression as Compression
from distkeras.gradients._wire import Wire as Wire
from distkeras.gradients._wire import make_wire as make_wire
