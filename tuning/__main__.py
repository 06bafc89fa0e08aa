"""``python -m kvswap_torch.tuning``: the same as ``kvswap-tune``."""

from kvswap_torch.tuning.cli import app

app(prog_name="python -m kvswap_torch.tuning")
