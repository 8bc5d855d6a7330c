"""The learner: models, objectives, training and publishing on Megatron-core.

Importing this package makes Megatron importable without CUDA (see megatron_cpu), so it comes before `megatron.core`.
"""

import warnings

from .megatron_cpu import install

if install():
    # What Megatron says on a machine without CUDA about packages that only help with it.
    warnings.filterwarnings("ignore", message=".*(absl.logging|Apex|Transformer Engine|CUDA).*", module="megatron")
