"""A LightningModule and its Trainer, with the devices and the strategy that scripts for torchrun give it."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from serverless_gpu import distributed


class Regression(lightning.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        x = torch.arange(32.0).reshape(16, 2) / 32
        return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=2)


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train():
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, datamodule=Data())
    weights = trainer.strategy.all_gather(model.layer.weight.detach())
    return trainer.world_size, trainer.global_step, torch.equal(weights[0], weights[1]), model


if __name__ == "__main__":
    results = train.distributed()
    assert [result[:3] for result in results] == [(2, 8, True)] * 2, results
    model = results[0][3]
    assert isinstance(model, Regression) and model.hparams.lr == 0.1
    print("done")
