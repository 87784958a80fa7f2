"""The Trainer of Lightning with a fused optimizer.

pip install '.[integrations]'
python lightning_trainer.py
"""

import argparse

import pytorch_lightning as lightning
import torch
from torch import nn

import fused_lwlr


class Module(lightning.LightningModule):
    """A perceptron; all that matters here is `configure_optimizers`."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = fused_lwlr.SGD(self.named_parameters(), lr=0.5, momentum=0.9, scaling=fused_lwlr.LARS(0.01))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

x = torch.randn(512, 20)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
trainer = lightning.Trainer(max_epochs=args.epochs, logger=False, enable_checkpointing=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
print(f"training loss {trainer.callback_metrics['loss']:.3f}")
