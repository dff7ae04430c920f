"""FLUX.2 [klein]'s worker side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from mstar.nn.model import BuildContext
from mstar.nn.node import Node
from mstar.processing.tokenizer import read_json
from mstar.spec.errors import SetupError
from mstar.weights.names import WeightMap
from mstar_diffusion.flux2.dit import Flux2Config, Flux2Dit
from mstar_diffusion.flux2.names import native_names
from mstar_diffusion.flux2.spec import REFERENCES, Flux2Options
from mstar_diffusion.flux2.vae import Flux2VaeDecoder, Flux2VaeEncoder
from mstar_diffusion.graph import TOKEN, ImageFacts, ImageModel, by_area
from mstar_diffusion.knobs import TEXT_TOKENS
from mstar_diffusion.layout import folder_of, part_config
from mstar_diffusion.native import NativeNames, native_weights
from mstar_diffusion.text import TextEncoder, read_text_config, text_weights
from mstar_diffusion.vae.config import VaeConfig
from mstar_diffusion.vae.nodes import vae_weights

__all__ = ["Flux2Klein"]


class Flux2Klein(ImageModel):
    """The denoiser reads three of the text encoder's layers side by side, a quarter, a half and three quarters of the
    way up. Its weights may also be the authors' single file, beside the folders of the other parts."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.folder = folder_of(context.weights, "FLUX.2 [klein]")
        self.text = read_text_config(self.folder)
        self.dit = Flux2Config.read(part_config(self.folder, "transformer"))
        self.vae = VaeConfig.read(part_config(self.folder, "vae"))
        if not read_json(self.folder, "model_index.json").get("is_distilled", True):
            raise SetupError(
                "model_index.json: is_distilled is false; FLUX.2 [klein]'s base models need guidance and are not "
                "supported: use the distilled ones"
            )
        quarter = self.text.layers // 4
        self.states = (quarter, 2 * quarter, 3 * quarter)
        if self.dit.context != len(self.states) * self.text.hidden:
            raise SetupError(
                f"transformer/config.json: joint_attention_dim {self.dit.context} is not {len(self.states)} times the "
                f"text encoder's hidden_size {self.text.hidden}"
            )

    def facts(self) -> ImageFacts:
        dit = self.dit
        return ImageFacts("model", dit.token, dit.context, dit.dim, dit.heads, dit.head, references=REFERENCES)

    def captured(self) -> Iterator[Mapping[str, int]]:
        options: Flux2Options = self.context.options
        edits = options.capture_sizes if options.capture_edit_sizes is None else options.capture_edit_sizes
        for height, width in by_area(edits):
            rows, columns = height // TOKEN, width // TOKEN
            yield {"h": rows, "w": columns, "P": TEXT_TOKENS, "h0": rows, "w0": columns}
        for height, width in by_area(options.capture_sizes):
            yield {"h": height // TOKEN, "w": width // TOKEN, "P": TEXT_TOKENS}

    def build(self, node: str) -> Node:
        options = self.options
        if node == "text_encoder":
            return TextEncoder(self.text, self.states)
        if node == "dit":
            return Flux2Dit(self.dit, options.attention_backend)
        if node == "vae_encoder":
            return Flux2VaeEncoder(self.vae)
        return Flux2VaeDecoder(self.vae, options.vae_tiling, options.vae_tile, options.vae_compile)

    def weights(self, node: str) -> WeightMap:
        module = self.on_meta(node)
        if isinstance(module, TextEncoder):
            return text_weights(module, self.text)
        if node != "dit":
            return vae_weights(module)
        published = WeightMap.from_module(module, folder="transformer")
        return native_weights(published, self.native_names()) if self.is_native else published

    @property
    def is_native(self) -> bool:
        """Whether the denoiser's weights are the authors' single file."""
        return not any((self.folder / "transformer").glob("*.safetensors")) and any(self.folder.glob("*.safetensors"))

    def native_names(self) -> NativeNames:
        return native_names(self.dit.double, self.dit.single)

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Flux2Dit) and self.is_native:
            weight = module.norm_out.linear.weight
            with torch.no_grad():
                weight.copy_(torch.cat(weight.chunk(2)[::-1]))
        super().loaded(node, module)
