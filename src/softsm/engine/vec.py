"""The vector engine's vocabulary, in which the functions of `isa/registry.micro` are written.

Kinds and masks (vec_types), rows and lanes (vec_rows), lane exchange (vec_lanes), single operations and conversions
(vec_ops), directed rounding (vec_round), small floats (vec_small) and PTX's composed arithmetic (vec_math).
"""

from softsm.engine.vec_lanes import *  # noqa: F403
from softsm.engine.vec_math import *  # noqa: F403
from softsm.engine.vec_ops import *  # noqa: F403
from softsm.engine.vec_round import *  # noqa: F403
from softsm.engine.vec_rows import *  # noqa: F403
from softsm.engine.vec_small import *  # noqa: F403
from softsm.engine.vec_types import *  # noqa: F403
