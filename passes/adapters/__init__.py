"""Train few weights beside those of a model, which stay as they are."""

from passes.adapters.adapter import Adapter as Adapter
from passes.adapters.head import Head as Head
from passes.adapters.lora import LoadedLoRA as LoadedLoRA
from passes.adapters.lora import LoRA as LoRA

__all__ = ["Adapter", "Head", "LoRA", "LoadedLoRA"]
