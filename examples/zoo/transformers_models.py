"""Define tiny configurations of transformers' architectures, without downloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from comparison import optimizers
from in_torch import EXPORTERS, TorchCase
from in_torch import warm_up as warm_up
from torch import nn

import passes

WORDS, LENGTH = 29, 6
DROPOUTS = (
    "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "classifier_dropout", "embedding_dropout",
    "mlp_dropout", "final_dropout", "hidden_act_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
    "classifier_dropout_prob", "feat_proj_dropout", "ff_dropout", "seq_classif_dropout", "summary_last_dropout",
    "drop_path_rate",
)  # fmt: skip


class Output(nn.Module):
    """Return one output of a model for positional inputs; `masked` names a mask of the last, which hides nothing."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], output: str, masked: str) -> None:
        super().__init__()
        self.model, self.inputs, self.output, self.masked = model, inputs, output, masked

    def forward(self, x, y=None):
        named = dict(zip(self.inputs, (x, y), strict=False))
        if self.masked:
            named[self.masked] = torch.ones_like(x if y is None else y)
        return self.model(**named)[self.output]


def build(name: str, sizes: dict[str, Any], inputs: Sequence[str], output: str, masked: str) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes)
    for dropout in DROPOUTS:
        if isinstance(getattr(config, dropout, None), float):
            setattr(config, dropout, 0.0)
    config._attn_implementation = "eager"
    return Output(kind(config), inputs, output, masked)


def words(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(3, WORDS, (batch, LENGTH)),)


def sentences(batch: int) -> tuple[torch.Tensor, ...]:
    return *words(batch), torch.randint(3, WORDS, (batch, LENGTH - 1))


def images(size: int = 16) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randn(batch, 3, size, size),)


def case(
    name: str,
    draw: Callable[[int], tuple[torch.Tensor, ...]] = words,
    inputs: Sequence[str] = ("input_ids",),
    output: str = "logits",
    masked: str = "",
    axis: int = -1,
    rate: float = 0.01,
    freeze: str | None = None,
    ways: Sequence[str] = EXPORTERS,
    **sizes: Any,
) -> TorchCase:
    return TorchCase(
        partial(build, name, sizes, inputs, output, masked),
        draw,
        loss=passes.CrossEntropy(axis=axis) if output == "logits" else passes.MeanSquaredError(),
        optimizers=optimizers(rate),
        freeze=freeze,
        ways=ways,
    )


MASK = "attention_mask"
UNFOLDED = (*EXPORTERS, "dynamo unfolded, dynamic")
# The names of sizes in most configurations.
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
}
LLAMA = {**SMALL, "masked": MASK, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
SEQUENCES = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "use_cache": False,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {"inputs": ("input_ids", "decoder_input_ids"), "draw": sentences}
VISION = {"image_size": 16, "patch_size": 8, "num_labels": 5}


def vision(sizes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in sizes.items() if k not in ("vocab_size", "max_position_embeddings")}


CASES = {
    "BERT, masked words, tied": case("BertForMaskedLM", **SMALL),
    "BERT, classification": case("BertForSequenceClassification", axis=1, **SMALL),
    "RoBERTa": case("RobertaForMaskedLM", **{**SMALL, "max_position_embeddings": LENGTH + 1}, **TOKENS),
    "ALBERT, shared layers": case("AlbertForMaskedLM", embedding_size=8, **{**SMALL, "num_hidden_layers": 2}),
    "DistilBERT": case("DistilBertForMaskedLM", vocab_size=WORDS, dim=16, n_layers=1, n_heads=2, hidden_dim=24,
                       max_position_embeddings=LENGTH),
    "ELECTRA": case("ElectraForPreTraining", embedding_size=8, axis=-1, **SMALL),
    "DeBERTa-v2": case("DebertaV2ForMaskedLM", ways=UNFOLDED,
                       relative_attention=True, pos_att_type=["p2c", "c2p"], **SMALL),
    "ModernBERT": case("ModernBertForMaskedLM", global_attn_every_n_layers=1, **SMALL, **TOKENS, cls_token_id=1,
                       sep_token_id=2),
    "GPT-2, tied": case("GPT2LMHeadModel", masked=MASK, vocab_size=WORDS, n_positions=LENGTH, n_embd=16,
                        n_layer=1, n_head=2, use_cache=False, **TOKENS),
    "GPT-NeoX, rotary": case("GPTNeoXForCausalLM", masked=MASK, use_cache=False, **SMALL, **TOKENS),
    "OPT": case("OPTForCausalLM", vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                ffn_dim=24, max_position_embeddings=LENGTH, word_embed_proj_dim=16, use_cache=False, **TOKENS),
    "BLOOM, ALiBi": case("BloomForCausalLM", vocab_size=WORDS, hidden_size=16, n_layer=1, n_head=2, use_cache=False,
                         **TOKENS),
    "Llama": case("LlamaForCausalLM", **LLAMA, **TOKENS),
    "Qwen2, tied": case("Qwen2ForCausalLM", tie_word_embeddings=True, **LLAMA, **TOKENS),
    "Gemma3, tied": case("Gemma3ForCausalLM", sliding_window=4, **LLAMA, **TOKENS),
    "Mamba": case("MambaForCausalLM", vocab_size=WORDS, hidden_size=8, state_size=4, num_hidden_layers=1, expand=2,
                  conv_kernel=3, time_step_rank=2, use_cache=False, **TOKENS),
    "BART": case("BartForConditionalGeneration",
                 max_position_embeddings=LENGTH, **BOTH, **SEQUENCES, **TOKENS),
    "T5": case("T5ForConditionalGeneration", ways=UNFOLDED,
               vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
               use_cache=False, **BOTH, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0),
    "Marian, sines": case("MarianMTModel", max_position_embeddings=LENGTH, decoder_start_token_id=1, **BOTH,
                          **SEQUENCES, **TOKENS),
    "Whisper": case("WhisperForConditionalGeneration",
                    lambda batch: (torch.randn(batch, 8, 12), torch.randint(3, WORDS, (batch, 5))),
                    ("input_features", "decoder_input_ids"), num_mel_bins=8, max_source_positions=6,
                    max_target_positions=16, decoder_start_token_id=1, **SEQUENCES, **TOKENS,
                    masked="decoder_attention_mask"),
    "ViT": case("ViTForImageClassification", images(), ("pixel_values",), axis=1, **vision(SMALL), **VISION),
    "SegFormer": case("SegformerForSemanticSegmentation", images(32), ("pixel_values",), axis=1, depths=[1, 1],
                      hidden_sizes=[8, 8], num_encoder_blocks=2, num_attention_heads=[1, 1], sr_ratios=[2, 1],
                      patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3,
                      rate=1e-3),
    "CLIP": case("CLIPModel", lambda batch: (*words(batch), *images()(batch)), ("input_ids", "pixel_values"),
                 "logits_per_image", text_config={**SMALL, **TOKENS}, vision_config={**vision(SMALL), **VISION},
                 projection_dim=8),
    "Wav2Vec2": case("Wav2Vec2ForCTC", ways=UNFOLDED, draw=lambda batch: (torch.randn(batch, 200),),
                     inputs=("input_values",), axis=-1,
                     rate=1e-3, conv_dim=[8, 8], conv_kernel=[5, 3], conv_stride=[4, 2],
                     num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_feat_extract_layers=2,
                     apply_spec_augment=False, **SMALL),
}  # fmt: skip
