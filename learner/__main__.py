"""`python -m argosy.learner CONFIG.json`: one rank of the learner (torchrun starts several).

Exit code 0: training is finished. 3: asked to stop, everything so far is in a checkpoint. Anything else: an error, on
stderr.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    die_with_torchrun()
    gc.disable()  # of what the imports make little is garbage, and looking for it takes a fifth of their time
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # advice to Megatron's own developers
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from . import ranks  # Megatron warns while it is imported
    from .run import LearnerConfig
    from .trainer import Trainer

    config = LearnerConfig.model_validate_json(Path(sys.argv[1]).read_text())
    trainer = Trainer(config)
    gc.freeze()  # Megatron collects garbage at each checkpoint: 0.4 s a time over what the imports left
    gc.enable()
    code = trainer.run()
    ranks.stop()
    return code


def die_with_torchrun() -> None:
    """Has the kernel kill this rank when torchrun dies: in a session of its own it would live on, and claim."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked; a rank orphaned even earlier finds no ranks to join
            os._exit(1)


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
