"""An engine that is wrong on purpose: `python benchmarks/noisy_engine.py CONFIG.json SIGMA`.

Invariant: SGLang never serves the learner's weights but a copy, in which every tensor has noise of its own added,
normal with SIGMA times that tensor's standard deviation. The noise is drawn anew for each version, and is the same
whenever that version is loaded again.
"""

import logging
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from argosy.actors.engine_server import EngineServer
from argosy.actors.settings import ActorConfig
from argosy.buffer import WeightVersion
from safetensors.torch import load_file, save_file


class NoisyEngine(EngineServer):
    def __init__(self, config: ActorConfig, sigma: float) -> None:
        self._noisy, self._sigma = config.run_dir / "noisy", sigma
        shutil.rmtree(self._noisy, ignore_errors=True)
        super().__init__(config.model_copy(update={"model": self._disturb(config.model, 0)}))

    def _update(self, weights: WeightVersion) -> bool:
        copy = self._disturb(Path(weights.path), weights.version)
        served = super()._update(replace(weights, path=str(copy)))
        for folder in self._noisy.iterdir():
            if str(folder) != self._serving.path:
                shutil.rmtree(folder)
        return served

    def _disturb(self, model: Path, version: int) -> Path:
        copy = self._noisy / f"v{version:06d}"
        shutil.copytree(model, copy, symlinks=True, dirs_exist_ok=True)
        generator = torch.Generator().manual_seed(version)
        for file in copy.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in sorted(tensors.items()):
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + (self._sigma * tensor.float().std() * noise).to(tensor.dtype)
            save_file(tensors, file, metadata={"format": "pt"})
        return copy


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    NoisyEngine(ActorConfig.read(Path(sys.argv[1])), float(sys.argv[2])).run()
