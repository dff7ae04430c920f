"""Z-Image's worker side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from mstar.nn.model import BuildContext
from mstar.nn.node import Node
from mstar.weights.names import WeightMap
from mstar_diffusion.dit.patches import from_channels_last
from mstar_diffusion.graph import TOKEN, ImageFacts, ImageModel, by_area
from mstar_diffusion.layout import folder_of, part_config
from mstar_diffusion.native import Native, NativeNames
from mstar_diffusion.text import TextEncoder, read_text_config, text_weights
from mstar_diffusion.vae.config import VaeConfig
from mstar_diffusion.vae.nodes import VaeDecoder, vae_weights
from mstar_diffusion.z_image.dit import ZImageConfig, ZImageDit
from mstar_diffusion.z_image.spec import ZImageOptions

__all__ = ["ZImage", "ZImageVaeDecoder"]


class ZImageVaeDecoder(VaeDecoder):
    """FLUX.1's autoencoder; latents are ``(encoded - shift) * scaling``."""

    def latents(self, tokens: Tensor) -> Tensor:
        return from_channels_last(tokens) / self.config.scaling + self.config.shift


class ZImage(ImageModel):
    """Its text encoder's last layer but one is what the denoiser reads."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        weights = folder_of(context.weights, "Z-Image")
        self.text = read_text_config(weights)
        self.dit = ZImageConfig.read(part_config(weights, "transformer"))
        self.vae = VaeConfig.read(part_config(weights, "vae"))

    def facts(self) -> ImageFacts:
        dit = self.dit
        return ImageFacts("float32", dit.token, self.text.hidden, dit.dim, dit.heads, dit.head, guided=True)

    def captured(self) -> Iterator[Mapping[str, int]]:
        options: ZImageOptions = self.context.options
        for height, width in by_area(options.capture_sizes):
            for tokens in sorted(options.capture_text_tokens, reverse=True):
                yield {"h": height // TOKEN, "w": width // TOKEN, "P": tokens}

    def build(self, node: str) -> Node:
        options = self.options
        if node == "text_encoder":
            return TextEncoder(self.text, (self.text.layers - 1,))
        if node == "dit":
            return ZImageDit(self.dit, options.attention_backend)
        return ZImageVaeDecoder(self.vae, options.vae_tiling, options.vae_tile, options.vae_compile)

    def weights(self, node: str) -> WeightMap:
        module = self.on_meta(node)
        if isinstance(module, TextEncoder):
            return text_weights(module, self.text)
        return WeightMap.from_module(module, folder="transformer") if node == "dit" else vae_weights(module)

    def native_names(self) -> NativeNames:
        names = {
            "x_embedder": Native(("all_x_embedder.2-1",)),
            "final_layer.linear": Native(("all_final_layer.2-1.linear",)),
            "final_layer.adaLN_modulation.1": Native(("all_final_layer.2-1.adaLN_modulation.1",)),
        }
        kinds = {"layers": self.dit.layers, "noise_refiner": self.dit.refiners, "context_refiner": self.dit.refiners}
        for kind, count in kinds.items():
            for block in (f"{kind}.{index}.attention" for index in range(count)):
                names[f"{block}.qkv"] = Native(tuple(f"{block}.to_{part}" for part in "qkv"))
                names[f"{block}.out"] = Native((f"{block}.to_out.0",))
        return names
