"""``python -m kvswap_torch``."""

from kvswap_torch.cli.app import main

main()
