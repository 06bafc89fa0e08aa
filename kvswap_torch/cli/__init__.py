"""The command line: ``python -m kvswap_torch``."""
