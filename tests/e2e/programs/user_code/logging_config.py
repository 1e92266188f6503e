"""Logging that the script sets up for itself and each rank for itself."""

import logging
import logging.config

from serverless_gpu import distributed

FORMAT = "%(levelname)s %(name)s: %(message)s"
CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": FORMAT}},
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"},
        "file": {"class": "logging.FileHandler", "formatter": "plain", "filename": "train.log", "delay": True},
    },
    "root": {"level": "INFO", "handlers": ["console", "file"]},
}
logger = logging.getLogger("trainer")


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(rank=0):
    logging.config.dictConfig(CONFIG)
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logger.info("started")
    logger.error("rank %d ends", rank)
    logging.captureWarnings(True)
    return logger.name


if __name__ == "__main__":
    logging.config.dictConfig(CONFIG)
    logger.info("before")
    assert train.distributed() == ["trainer", "trainer"]
    logger.info("after")
    with open("train.log") as file:
        lines = file.read().splitlines()
    assert lines[0] == "INFO trainer: before" and lines[-1] == "INFO trainer: after", lines
    assert sorted(lines[1:-1]) == ["ERROR trainer: rank 0 ends", "ERROR trainer: rank 1 ends", "INFO trainer: started"]
    print("done")
