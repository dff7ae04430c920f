"""What Black Forest Labs call the layers of FLUX.2's denoiser, in their code, their single files and adapters for
them."""

from __future__ import annotations

from mstar_diffusion.native import Native, NativeNames

__all__ = ["native_names"]

_AROUND = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out",
}
_DOUBLE = {
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "img_attn.proj": "attn.to_out.0",
    "img_mlp.0": "ff.linear_in",
    "img_mlp.2": "ff.linear_out",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "txt_attn.proj": "attn.to_add_out",
    "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
_QKV = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
_SINGLE = {
    "linear1": "attn.to_qkv_mlp_proj",
    "linear2": "attn.to_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}


def native_names(double: int, single: int) -> NativeNames:
    """Of a denoiser with so many blocks of two streams, and of one."""
    # the last modulation is (shift, scale) there and (scale, shift) in the published layout
    found = {"final_layer.adaLN_modulation.1": Native(("norm_out.linear",), swapped=True)}
    found |= {own: Native((published,)) for own, published in _AROUND.items()}
    for index in range(double):
        own, published = f"double_blocks.{index}", f"transformer_blocks.{index}"
        found |= {f"{own}.{name}": Native((f"{published}.{other}",)) for name, other in _DOUBLE.items()}
        found |= {f"{own}.{name}": Native(tuple(f"{published}.{o}" for o in others)) for name, others in _QKV.items()}
    for index in range(single):
        own, published = f"single_blocks.{index}", f"single_transformer_blocks.{index}"
        found |= {f"{own}.{name}": Native((f"{published}.{other}",)) for name, other in _SINGLE.items()}
    return found
