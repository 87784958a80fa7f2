"""`python -m fused_lwlr` is the command `fused-lwlr`, also for `torchrun -m fused_lwlr`."""

from fused_lwlr.command.main import main

if __name__ == "__main__":
    main()
