"""Z-Image's denoiser: caption and picture in one sequence, through one kind of block.

Source: diffusers 0.42.1, ``models/transformers/transformer_z_image.py``, of which this is the text-to-picture mode.
Submodules bear the published names.

A caption is padded to a multiple of 32 tokens and a picture too, with learned tokens that are seen like all others. The
caption does not depend on the noise: two blocks refine it once, and two refine the picture alone before both meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import Linear, MergedLinear, QKVLinear, RowLinear
from mstar.nn.mesh import current_mesh
from mstar.nn.node import Node, Step
from mstar.nn.ops.modulate import Addition, Heads, add, add_modulate, modulate, turn_heads
from mstar.nn.sequence import SequenceShards
from mstar.spec.errors import SetupError
from mstar_diffusion.dit.attention import TokenAttention, attention_by
from mstar_diffusion.dit.feed_forward import SwiGLU
from mstar_diffusion.dit.rope import AxesRope, Turn, grid, line
from mstar_diffusion.dit.time import time_waves
from mstar_diffusion.guidance import away_from
from mstar_diffusion.layout import refuse_unknown
from mstar_diffusion.rows import row_by_row
from mstar_diffusion.steppers import at_step, clean, euler

__all__ = ["MULTIPLE", "ZImageConfig", "ZImageDit"]

MULTIPLE = 32
"""Captions and pictures are padded to a multiple of so many tokens."""

_TIME = 256
"""Width of the vector that a noise level becomes; *dim* where that is less."""
_TIME_HIDDEN = 1024
_PATCH = 2
_HEAD_EPS = 1e-5
_KNOWN = frozenset(
    (
        "all_f_patch_size", "all_patch_size", "axes_dims", "axes_lens", "cap_feat_dim", "dim", "in_channels",
        "n_heads", "n_kv_heads", "n_layers", "n_refiner_layers", "norm_eps", "qk_norm", "rope_theta",
        "siglip_feat_dim", "t_scale"
    )
)  # fmt: skip


@dataclass(frozen=True)
class ZImageConfig:
    """``transformer/config.json``. *channels*: of the latents; a token is 2 x 2 of their points."""

    channels: int
    dim: int
    layers: int
    refiners: int
    heads: int
    caption: int
    axes: tuple[int, ...]
    eps: float = 1e-5
    theta: float = 256.0
    time_scale: float = 1000.0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ZImageConfig:
        """Raises :class:`SetupError` for what this family does not have."""
        where = "transformer/config.json"
        refuse_unknown(config, _KNOWN, where)
        heads = int(config["n_heads"])
        fixed = {
            "all_patch_size": [_PATCH],
            "all_f_patch_size": [1],
            "n_kv_heads": heads,
            "qk_norm": True,
            "siglip_feat_dim": None,
        }
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise SetupError(f"{where}: {key} {config[key]!r} is not supported; {value!r} is")
        axes = tuple(config["axes_dims"])
        if sum(axes) * heads != config["dim"]:
            raise SetupError(f"{where}: axes_dims {list(axes)} do not add up to a head of {config['dim']} / {heads}")
        return cls(
            channels=int(config["in_channels"]),
            dim=int(config["dim"]),
            layers=int(config["n_layers"]),
            refiners=int(config["n_refiner_layers"]),
            heads=heads,
            caption=int(config["cap_feat_dim"]),
            axes=axes,
            eps=float(config.get("norm_eps", 1e-5)),
            theta=float(config.get("rope_theta", 256.0)),
            time_scale=float(config.get("t_scale", 1000.0)),
        )

    @property
    def head(self) -> int:
        return self.dim // self.heads

    @property
    def token(self) -> int:
        return _PATCH * _PATCH * self.channels


class Attention(nn.Module):
    def __init__(self, config: ZImageConfig):
        super().__init__()
        dim, head = config.dim, config.head
        self.to_qkv = QKVLinear(dim, config.heads, config.heads, head, names=("to_q", "to_k", "to_v"))
        self.heads = self.to_qkv.heads
        self.norm_q, self.norm_k = (nn.RMSNorm(head, _HEAD_EPS) for _ in range(2))
        self.to_out = nn.ModuleList([RowLinear(dim, dim, unit=head)])

    def forward(self, x: Tensor, turn: Turn, attend: TokenAttention) -> Tensor:
        heads = Heads(self.to_qkv(x).unflatten(-1, (3, self.heads, -1)), self.norm_q, self.norm_k)
        return self.to_out[0](attend(*turn_heads((heads,), *turn)).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        hidden = int(dim / 3 * 8)
        self.w13 = MergedLinear(dim, {"w1": hidden, "w3": hidden})
        self.act = SwiGLU()
        self.w2 = RowLinear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w13(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Each part is normed before and after. *modulated*: a noise level scales what goes in and weighs what comes
    out."""

    def __init__(self, config: ZImageConfig, modulated: bool):
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config.dim)
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = (
            nn.RMSNorm(config.dim, config.eps) for _ in range(4)
        )
        time = min(config.dim, _TIME)
        self.adaLN_modulation = nn.ModuleList([Linear(time, 4 * config.dim, bias=True)] if modulated else [])

    def forward(self, x: Tensor, turn: Turn, attend: TokenAttention, time: Tensor | None = None) -> Tensor:
        """*x* ``[rows, tokens, dim]``, *time* ``[rows, 256]``."""
        vectors: Sequence[Tensor | None] = (None,) * 4
        if time is not None:
            vectors = self.adaLN_modulation[0](time)[:, None].chunk(4, -1)
        scale, gate, mlp_scale, mlp_gate = vectors
        mixed = self.attention(modulate(x, self.attention_norm1, scale), turn, attend)
        mixing = Addition(mixed, gate, self.attention_norm2, bounded=True)
        x, normed = add_modulate(x, mixing, self.ffn_norm1, mlp_scale)
        return add(x, Addition(self.feed_forward(normed), mlp_gate, self.ffn_norm2, bounded=True))


class TimeEmbedder(nn.Module):
    def __init__(self, out: int):
        super().__init__()
        self.mlp = nn.ModuleDict({"0": Linear(_TIME, _TIME_HIDDEN, True), "2": Linear(_TIME_HIDDEN, out, True)})

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp["2"](F.silu(self.mlp["0"](time_waves(times, _TIME).to(dtype))))  # type: ignore[no-any-return]


class FinalLayer(nn.Module):
    def __init__(self, config: ZImageConfig):
        super().__init__()
        self.norm_final = nn.LayerNorm(config.dim, 1e-6, elementwise_affine=False)
        self.linear = Linear(config.dim, config.token, True)
        self.adaLN_modulation = nn.ModuleDict({"1": Linear(min(config.dim, _TIME), config.dim, True)})

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale = self.adaLN_modulation["1"](F.silu(time))[:, None]
        return self.linear(modulate(x, self.norm_final, scale))  # type: ignore[no-any-return]


class SingleRope(AxesRope):
    """Angles are rounded to float32 before their cosines are taken, by the function of the reference."""

    def turned(self, angles: Tensor) -> Turn:
        points = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())
        return Turn(points.real.contiguous(), points.imag.contiguous())


class ZImageDit(Node):
    """The denoiser's node. A latent is ``[h, w, token]``: 2 x 2 points of the autoencoder's, its channels last.

    :param attention: the option ``attention_backend``.

    Sequence parallelism divides picture and caption, each by itself; what is made of the caption alone
    (:meth:`prepare`), once a picture, every rank makes for itself.
    """

    tensor_parallel = True
    sequence_parallel = True

    def __init__(self, config: ZImageConfig, attention: str = "sdpa"):
        super().__init__()
        self.config, self.backend, self.sp = config, attention, current_mesh().sp
        dim = config.dim
        self.all_x_embedder = nn.ModuleDict({"2-1": Linear(config.token, dim, True)})
        self.all_final_layer = nn.ModuleDict({"2-1": FinalLayer(config)})
        self.noise_refiner = nn.ModuleList(Block(config, True) for _ in range(config.refiners))
        self.context_refiner = nn.ModuleList(Block(config, False) for _ in range(config.refiners))
        self.t_embedder = TimeEmbedder(min(dim, _TIME))
        self.cap_embedder = nn.ModuleList([nn.RMSNorm(config.caption, config.eps), Linear(config.caption, dim, True)])
        self.x_pad_token, self.cap_pad_token = (nn.Parameter(torch.empty(1, dim)) for _ in range(2))
        self.layers = nn.ModuleList(Block(config, True) for _ in range(config.layers))
        self.rope = SingleRope(config.axes, config.theta)

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        for name in ("noise_refiner", "layers"):
            yield from ((f"{name}.{i}", block) for i, block in enumerate(getattr(self, name)))

    # --- entries ------------------------------------------------------------------------------------------------------
    def prepare(self, step: Step, context: Tensor, length: Tensor) -> dict[str, Any]:
        """*context* ``[rows, L, caption]``, of which *length* ``[rows]`` tokens are the caption; *L* is a multiple of
        32. Returns ``prompt`` ``[rows, L, dim]``, refined."""
        with attention_by(self.backend, step.device):
            return {"prompt": row_by_row(partial(self._refined, step), context, length)}

    def step(self, step: Step, latent: Tensor, prompt: Tensor, sigmas: Tensor, index: Tensor) -> dict[str, Any]:
        """One Euler step. *latent* float32 ``[rows, h, w, token]``; *prompt* of :meth:`prepare`; *sigmas* ``[rows, S]``
        and *index* ``[rows]`` as :func:`~mstar_diffusion.steppers.euler`'s."""
        velocity = self.velocity(step, latent, prompt, sigmas, index)["velocity"]
        return {
            "latent": euler(latent, velocity, sigmas, index),
            "clean": clean(latent, velocity, sigmas, index),
        }

    def velocity(self, step: Step, latent: Tensor, prompt: Tensor, sigmas: Tensor, index: Tensor) -> dict[str, Any]:
        """``velocity`` ``[rows, h, w, token]``, float32; arguments as :meth:`step`'s."""
        with attention_by(self.backend, step.device):
            return {"velocity": -row_by_row(partial(self._flow, step), latent, prompt, at_step(sigmas, index)).float()}

    def guide(
        self, step: Step, latent: Tensor, cond: Tensor, uncond: Tensor, scale: Tensor, sigmas: Tensor, index: Tensor
    ) -> dict[str, Any]:
        """Guidance, whose scale is 0 where there is none, and one Euler step."""
        velocity = away_from(cond, uncond, scale)
        return {
            "latent": euler(latent, velocity, sigmas, index),
            "clean": clean(latent, velocity, sigmas, index),
        }

    # --- one step's maths ---------------------------------------------------------------------------------------------
    def _refined(self, step: Step, context: Tensor, length: Tensor) -> Tensor:
        x: Tensor = self.cap_embedder[1](self.cap_embedder[0](context))
        padding = torch.arange(x.shape[1], device=x.device) >= length[:, None]
        x = torch.where(padding[..., None], self.cap_pad_token, x)
        turn, attend = self._caption_turn(x), TokenAttention(step)
        for block in self.context_refiner:
            x = block(x, turn, attend)
        return x

    def _flow(self, step: Step, latent: Tensor, prompt: Tensor, level: Tensor) -> Tensor:
        """What the network says of *latent* at noise *level* ``[rows]``: the velocity towards the picture."""
        _, height, width, _ = latent.shape
        time = self.t_embedder((1000 - level * 1000) / 1000 * self.config.time_scale, prompt.dtype)
        x = self.all_x_embedder["2-1"](latent.flatten(1, 2).to(prompt.dtype))
        points = height * width
        padding = -points % MULTIPLE
        x = torch.cat((x, self.x_pad_token.expand(x.shape[0], padding, -1)), 1) if padding else x
        places = grid(height, width, x.device, before=(prompt.shape[1] + 1,))
        turn = self.rope(F.pad(places, (0, 0, 0, padding)))
        picture = SequenceShards((points + padding,), self.sp)
        both = picture.beside(prompt.shape[1])
        divided = self.sp.size > 1
        x, turn = picture.own(x), turn.own(picture, 0)
        attend = TokenAttention(step, picture if divided else None)
        for block in self.noise_refiner:
            x = block(x, turn, attend, time)
        x, turn = torch.cat((x, both.own(prompt, 1)), 1), turn.join(self._caption_turn(prompt).own(both, 1))
        attend = TokenAttention(step, both if divided else None)
        for block in self.layers:
            x = block(x, turn, attend, time)
        flow = both.whole(self.all_final_layer["2-1"](x, time))
        return flow[:, :points].unflatten(1, (height, width))  # type: ignore[no-any-return, no-untyped-call]

    def _caption_turn(self, caption: Tensor) -> Turn:
        return self.rope(line(caption.shape[1], 3, 0, caption.device, start=1))  # type: ignore[no-any-return]
