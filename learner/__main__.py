"""`python -m argosy.learner CONFIG.json`: one rank of the learner (torchrun starts several).

Exit code 0: training is finished. 3: asked to stop, everything so far is in a checkpoint. Anything else: an error, on
stderr.
"""

import gc
import logging
import os
import sys
import warnings
from pathlib import Path

import torch


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # advice to Megatron's own developers
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from . import ranks  # Megatron warns while it is imported
    from .run import LearnerConfig
    from .trainer import Trainer

    config = LearnerConfig.model_validate_json(Path(sys.argv[1]).read_text())
    trainer = Trainer(config)
    gc.freeze()  # Megatron collects garbage at each checkpoint: 0.4 s a time over what the imports left
    code = trainer.run()
    ranks.stop()
    return code


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except Exception:
        logging.exception("the learner ends")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        # Not sys.exit: Triton's bindings would bury the reason under hundreds of lines about leaked functions.
        os._exit(code)
