"""What transformers' ``generate(custom_generate=...)`` loads; the function is in the package."""

from kvswap_torch.integrations.generating import generate

__all__ = ["generate"]
