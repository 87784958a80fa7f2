"""Parts of the zoo's networks, their inputs, and comparison of the results."""

import torch
from torch import nn


class Net(nn.Module):
    """Named modules, and a function of them and an image of 3 x 8 x 8 that gives 4 logits."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def conv(width_in, width, kernel=3, **options):
    return nn.Conv2d(width_in, width, kernel, padding=kernel // 2, **{"bias": False, **options})


def logits(m, x):
    return m.head(x.mean((2, 3)))


def head(width=6):
    return nn.Linear(width, 4)


def of(*names):
    return dict.fromkeys(names, 1)


def data(size=16, dtype=torch.float32, image=8):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(size, 3, image, image, generator=generator, dtype=dtype),
        torch.randint(0, 4, (size,), generator=generator),
    )


def found(model, result):
    """Names of the layers in a result, and exponents by name."""
    params = {param: name for name, param in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    assert [params[weight] for weight in result.weights] == list(result.names)
    biases = {params[bias]: power for bias, power in result.biases}
    norms = {modules[module]: power for module, power in result.norms}
    examined = [name for name, param in model.named_parameters() if param.dim() > 1 and param.requires_grad]
    assert [name for name in result.cosines if not name.endswith("]")] == examined
    assert result.slices == ()
    assert [name for name in examined if name not in result.reasons] == list(result.names)
    return list(result.names), biases, norms
