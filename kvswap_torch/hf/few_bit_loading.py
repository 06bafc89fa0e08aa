"""Models whose linear layers are quantised while they are loaded, one tensor after the other.

transformers loads a checkpoint tensor by tensor, and asks a quantiser what becomes of each: here a
`FewBitLinear` in the place of its layer. So a model never has more than one tensor that is not in
few bits yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvswap_torch.few_bits import FewBitLinear, bits_by_layer, check_format, put_in_place
from kvswap_torch.process_memory import give_back_memory

METHOD = "kvswap_few_bits"


@register_quantization_config(METHOD)
class FewBitConfig(QuantizationConfigMixin):
    """As ``from_pretrained(quantization_config=)`` takes it.

    Parameters
    ----------
    weights
        ``int8`` or ``int4``.
    """

    def __init__(self, weights: str = "int8", **others: Any):
        self.quant_method = METHOD
        self.weights = weights


@register_quantizer(METHOD)
class FewBitQuantizer(HfQuantizer):
    """What transformers asks while it loads."""

    requires_calibration = False
    is_trainable = False

    def __init__(self, quantization_config: FewBitConfig, **named: Any):
        super().__init__(quantization_config, **named)
        self._bits: dict[str, int] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **named: Any) -> None:
        places = device_map.values() if isinstance(device_map, dict) else [device_map or "cpu"]
        for place in {str(each) for each in places}:
            check_format(self.quantization_config.weights, place)

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> Any:
        self._bits = bits_by_layer(model, self.quantization_config.weights)
        return model

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        give_back_memory()  # of the tensors in their own type
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **named: Any) -> bool:
        layer, _, parameter = param_name.rpartition(".")
        return parameter == "weight" and layer in self._bits

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantise(self._bits)

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return False


class _Quantise(ConversionOps):
    """Puts a layer of few bits in the place of the one whose weight has come."""

    def __init__(self, bits: dict[str, int]):
        self._bits = bits

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        full_layer_name: str | None = None,
        missing_keys: Any = None,
        **named: Any,
    ) -> dict[str, torch.Tensor]:
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        name = full_layer_name.rpartition(".")[0]
        few = FewBitLinear.of(model.get_submodule(name), weight, self._bits[name])
        few._is_hf_initialized = True
        put_in_place(model, name, few)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}
