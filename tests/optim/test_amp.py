"""Loss scaling by torch's GradScaler, which unscales gradients before the step."""

import torch
from cases import every_case
from steps import OPTIONS, OURS, TORCH


@every_case
def test_scaled_steps_and_overflows(name, backend, device):
    """An overflow on the first step and one later skip the step whole: no momentum is born from it."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.rand(1030, device=device))]
    twins = [torch.nn.Parameter(params[0].detach().clone())]
    ours = OURS[name](params, backend=backend, **OPTIONS[name])
    expected = TORCH[name](twins, foreach=False, **OPTIONS[name])
    # a scale that stays a power of two: scaling and unscaling are exact
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=100)
    for step in range(6):
        x = torch.rand(1030, device=device)
        overflow = step in (0, 3)
        ours.zero_grad()
        scaler.scale((params[0] * x).sum() * (float("inf") if overflow else 1.0)).backward()
        scaler.step(ours)
        scaler.update()
        if not overflow:
            expected.zero_grad()
            (twins[0] * x).sum().backward()
            expected.step()
        torch.testing.assert_close(params[0], twins[0], rtol=1e-6, atol=1e-7)
        assert bool(ours.state) == (step > 0)
