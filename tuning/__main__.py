"""``python -m tuning``: the same as ``kvswap-tune``."""

from tuning.cli import app

app(prog_name="python -m tuning")
