"""A Hydra program: one composed configuration, which the ranks get, and its output directory."""

import os

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(cfg: DictConfig, folder: str, rank=0):
    with open(f"{folder}/rank-{rank}", "w") as file:
        file.write(OmegaConf.to_yaml(cfg, resolve=True))
    return cfg.name, cfg.optimizer.lr * cfg.steps


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    folder = HydraConfig.get().runtime.output_dir
    results = train.distributed(cfg, folder)
    assert results == [(f"{cfg.optimizer.kind}-{cfg.steps}", cfg.optimizer.lr * cfg.steps)] * 2, results
    assert {"rank-0", "rank-1"} <= set(os.listdir(folder))
    print(results[0])


if __name__ == "__main__":
    main()
    print("done")
