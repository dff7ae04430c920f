"""FLUX.2's denoiser: text and picture in two streams that attend to each other, then in one.

Source: diffusers 0.42.1, ``models/transformers/transformer_flux2.py``. Submodules bear the published names. No layer
has a bias; all blocks of a kind share one modulation, which is computed once a step.

References are further tokens behind the picture's, at the noise-free end of the sequence: they are seen and cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import ColumnLinear, Linear, QKVLinear, RowLinear
from mstar.nn.mesh import current_mesh
from mstar.nn.node import Node, Step
from mstar.nn.ops.modulate import Addition, Heads, add, add_modulate, modulate, turn_heads
from mstar.nn.sequence import SequenceShards
from mstar.nn.shards import Division, share
from mstar.spec.errors import SetupError
from mstar_diffusion.dit.attention import TokenAttention, attention_by
from mstar_diffusion.dit.feed_forward import SwiGLU
from mstar_diffusion.dit.modulation import Modulation, Shifted
from mstar_diffusion.dit.rope import AxesRope, Turn, grid, line
from mstar_diffusion.dit.time import time_waves
from mstar_diffusion.layout import refuse_unknown
from mstar_diffusion.rows import row_by_row
from mstar_diffusion.steppers import at_step, clean, euler

__all__ = ["Flux2Config", "Flux2Dit"]

_REFERENCE_TIME = 10
"""The first reference's coordinate on the axis of time, and how far the next ones are apart. The picture's is 0."""
_KNOWN = frozenset(
    (
        "attention_head_dim", "axes_dims_rope", "eps", "guidance_embeds", "in_channels", "joint_attention_dim",
        "mlp_ratio", "num_attention_heads", "num_layers", "num_single_layers", "out_channels", "patch_size",
        "rope_theta", "timestep_guidance_channels"
    )
)  # fmt: skip


@dataclass(frozen=True)
class Flux2Config:
    """``transformer/config.json``. *token*: width of a latent token; *context*: of the text encoder's."""

    token: int
    context: int
    dim: int
    heads: int
    double: int
    single: int
    time: int
    axes: tuple[int, ...]
    mlp_ratio: float = 3.0
    theta: float = 2000.0
    eps: float = 1e-6

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Flux2Config:
        """Raises :class:`SetupError` for what [klein] does not have."""
        where = "transformer/config.json"
        refuse_unknown(config, _KNOWN, where)
        heads, width = int(config["num_attention_heads"]), int(config["attention_head_dim"])
        fixed = {"patch_size": 1, "guidance_embeds": False}
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise SetupError(f"{where}: {key} {config[key]!r} is not supported; {value!r} is")
        if config.get("out_channels") not in (None, config["in_channels"]):
            raise SetupError(f"{where}: out_channels {config['out_channels']!r} differ from in_channels")
        axes = tuple(config["axes_dims_rope"])
        if sum(axes) != width or len(axes) != 4:
            raise SetupError(f"{where}: axes_dims_rope {list(axes)} are not four that add up to a head of {width}")
        return cls(
            token=int(config["in_channels"]),
            context=int(config["joint_attention_dim"]),
            dim=heads * width,
            heads=heads,
            double=int(config["num_layers"]),
            single=int(config["num_single_layers"]),
            time=int(config.get("timestep_guidance_channels", 256)),
            axes=axes,
            mlp_ratio=float(config.get("mlp_ratio", 3.0)),
            theta=float(config.get("rope_theta", 2000)),
            eps=float(config.get("eps", 1e-6)),
        )

    @property
    def head(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        return int(self.dim * self.mlp_ratio)

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.dim, self.eps, elementwise_affine=False)


class FeedForward(nn.Module):
    def __init__(self, config: Flux2Config):
        super().__init__()
        self.linear_in = ColumnLinear(config.dim, 2 * config.hidden, sections=(config.hidden, config.hidden))
        self.act = SwiGLU()
        self.linear_out = RowLinear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_out(self.act(self.linear_in(x)))  # type: ignore[no-any-return]


class JointAttention(nn.Module):
    """Text and picture each have projections of their own, and attend as one sequence, text first."""

    def __init__(self, config: Flux2Config):
        super().__init__()
        dim, heads, head = config.dim, config.heads, config.head
        self.to_qkv = QKVLinear(dim, heads, heads, head, names=("to_q", "to_k", "to_v"))
        self.added_qkv = QKVLinear(dim, heads, heads, head, names=("add_q_proj", "add_k_proj", "add_v_proj"))
        self.heads = self.to_qkv.heads
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            nn.RMSNorm(config.head, config.eps) for _ in range(4)
        )
        self.to_out = nn.ModuleList([RowLinear(dim, dim, unit=head)])
        self.to_add_out = RowLinear(dim, dim, unit=head)

    def forward(self, picture: Tensor, text: Tensor, turn: Turn, attend: TokenAttention) -> tuple[Tensor, Tensor]:
        of_picture = self.to_qkv(picture).unflatten(-1, (3, self.heads, -1))
        of_text = self.added_qkv(text).unflatten(-1, (3, self.heads, -1))
        parts = Heads(of_text, self.norm_added_q, self.norm_added_k), Heads(of_picture, self.norm_q, self.norm_k)
        mixed = attend(*turn_heads(parts, *turn)).flatten(2)
        of_text, of_picture = mixed[:, : text.shape[1]], mixed[:, text.shape[1] :]
        return self.to_out[0](of_picture), self.to_add_out(of_text)


class DoubleBlock(nn.Module):
    def __init__(self, config: Flux2Config):
        super().__init__()
        self.norm1, self.norm1_context, self.norm2, self.norm2_context = (config.norm() for _ in range(4))
        self.attn = JointAttention(config)
        self.ff, self.ff_context = FeedForward(config), FeedForward(config)

    def forward(
        self,
        picture: Tensor,
        text: Tensor,
        steered: tuple[Modulation, Modulation],
        text_steered: tuple[Modulation, Modulation],
        turn: Turn,
        attend: TokenAttention,
    ) -> tuple[Tensor, Tensor]:
        """*picture* and *text* ``[rows, tokens, dim]``; of each the modulation of attention and of the feed-forward.
        *attend*: of the sequence text, picture."""
        (mixing, feeding), (text_mixing, text_feeding) = steered, text_steered
        mixed, text_mixed = self.attn(
            modulate(picture, self.norm1, mixing.scale, mixing.shift),
            modulate(text, self.norm1_context, text_mixing.scale, text_mixing.shift),
            turn,
            attend,
        )
        picture = self._fed(picture, Addition(mixed, mixing.gate), self.norm2, self.ff, feeding)
        return picture, self._fed(
            text, Addition(text_mixed, text_mixing.gate), self.norm2_context, self.ff_context, text_feeding
        )

    @staticmethod
    def _fed(x: Tensor, mixed: Addition, norm: nn.LayerNorm, ff: FeedForward, steered: Modulation) -> Tensor:
        """The stream *x* with attention's share *mixed* and the feed-forward's."""
        x, normed = add_modulate(x, mixed, norm, steered.scale, steered.shift)
        return add(x, Addition(ff(normed), steered.gate))


class ParallelAttention(nn.Module):
    """Attention and feed-forward side by side, with one product before and one after both."""

    def __init__(self, config: Flux2Config):
        super().__init__()
        dim, hidden = config.dim, config.hidden
        sections = (dim, dim, dim, hidden, hidden)
        self.divisions = (Division("heads", config.heads),)
        self.to_qkv_mlp_proj = ColumnLinear(dim, sum(sections), sections=sections)
        self.heads = share(config.heads, self.to_qkv_mlp_proj.tp).length
        width = 3 * self.heads * config.head
        self.parts = (width, self.to_qkv_mlp_proj.out_features - width)
        self.act = SwiGLU()
        self.norm_q, self.norm_k = (nn.RMSNorm(config.head, config.eps) for _ in range(2))
        self.to_out = RowLinear(dim + hidden, dim, sections=(dim, hidden))

    def forward(self, x: Tensor, turn: Turn, attend: TokenAttention) -> Tensor:
        qkv, fed = self.to_qkv_mlp_proj(x).split(self.parts, -1)
        heads = Heads(qkv.unflatten(-1, (3, self.heads, -1)), self.norm_q, self.norm_k)
        return self.to_out(self.act(fed, attend(*turn_heads((heads,), *turn)).flatten(2)))  # type: ignore[no-any-return]


class SingleBlock(nn.Module):
    def __init__(self, config: Flux2Config):
        super().__init__()
        self.norm = config.norm()
        self.attn = ParallelAttention(config)

    def forward(self, x: Tensor, steered: Modulation, turn: Turn, attend: TokenAttention) -> Tensor:
        mixed = self.attn(modulate(x, self.norm, steered.scale, steered.shift), turn, attend)
        return add(x, Addition(mixed, steered.gate))


class TimestepEmbedder(nn.Module):
    def __init__(self, config: Flux2Config):
        super().__init__()
        self.width = config.time
        self.linear_1, self.linear_2 = Linear(config.time, config.dim), Linear(config.dim, config.dim)

    def forward(self, times: Tensor) -> Tensor:
        """*times* ``[rows]`` in the model's dtype."""
        return self.linear_2(F.silu(self.linear_1(time_waves(times, self.width).to(times.dtype))))  # type: ignore[no-any-return]


class OutNorm(nn.Module):
    def __init__(self, config: Flux2Config):
        super().__init__()
        self.linear = Linear(config.dim, 2 * config.dim)
        self.norm = config.norm()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return modulate(x, self.norm, *self.linear(F.silu(time))[:, None].chunk(2, -1))


class Flux2Dit(Node):
    """The denoiser's node. A latent is ``[h, w, token]``: 2 x 2 points of the autoencoder's, normalised.

    :param attention: the option ``attention_backend``.

    Sequence parallelism divides text and picture, references included, each by itself.
    """

    tensor_parallel = True
    sequence_parallel = True

    def __init__(self, config: Flux2Config, attention: str = "sdpa"):
        super().__init__()
        self.config, self.backend, self.sp = config, attention, current_mesh().sp
        self.time_guidance_embed = nn.ModuleDict({"timestep_embedder": TimestepEmbedder(config)})
        self.double_stream_modulation_img = Shifted(config.dim, 2)
        self.double_stream_modulation_txt = Shifted(config.dim, 2)
        self.single_stream_modulation = Shifted(config.dim, 1)
        self.x_embedder = Linear(config.token, config.dim)
        self.context_embedder = Linear(config.context, config.dim)
        self.transformer_blocks = nn.ModuleList(DoubleBlock(config) for _ in range(config.double))
        self.single_transformer_blocks = nn.ModuleList(SingleBlock(config) for _ in range(config.single))
        self.norm_out = OutNorm(config)
        self.proj_out = Linear(config.dim, config.token)
        self.rope = AxesRope(config.axes, config.theta)

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        for name in ("transformer_blocks", "single_transformer_blocks"):
            yield from ((f"{name}.{i}", block) for i, block in enumerate(getattr(self, name)))

    # --- entries ------------------------------------------------------------------------------------------------------
    def prepare(self, step: Step, context: Tensor, length: Tensor) -> dict[str, Any]:
        """*context* ``[rows, L, context]``, padding included: it is seen like text. Returns ``prompt``
        ``[rows, L, dim]``."""
        return {"prompt": row_by_row(self.context_embedder, context)}

    def step(
        self,
        step: Step,
        latent: Tensor,
        prompt: Tensor,
        sigmas: Tensor,
        index: Tensor,
        condition_0: Tensor | None = None,
        condition_1: Tensor | None = None,
        condition_2: Tensor | None = None,
        condition_3: Tensor | None = None,
    ) -> dict[str, Any]:
        """One Euler step. *latent* ``[rows, h, w, token]``; *prompt* of :meth:`prepare`; *sigmas* ``[rows, S]`` and
        *index* ``[rows]`` as :func:`~mstar_diffusion.steppers.euler`'s; the references ``[rows, h', w', token]``."""
        seen = (condition_0, condition_1, condition_2, condition_3)
        with attention_by(self.backend, step.device):
            velocity = row_by_row(partial(self._flow, step), latent, prompt, at_step(sigmas, index), *seen)
        return {
            "latent": euler(latent, velocity, sigmas, index),
            "clean": clean(latent, velocity, sigmas, index),
        }

    # --- one step's maths ---------------------------------------------------------------------------------------------
    def _flow(self, step: Step, latent: Tensor, prompt: Tensor, level: Tensor, *conditions: Tensor | None) -> Tensor:
        """The velocity of *latent* at noise *level* ``[rows]``."""
        height, width = latent.shape[1:3]
        seen = [condition for condition in conditions if condition is not None]
        # the reference rounds the time to the model's dtype twice on its way
        times = (level * 1000).to(latent.dtype) / 1000 * 1000
        time = self.time_guidance_embed["timestep_embedder"](times)
        steered, text_steered = self.double_stream_modulation_img(time), self.double_stream_modulation_txt(time)
        (single,) = self.single_stream_modulation(time)
        tokens = torch.cat([picture.flatten(1, 2) for picture in (latent, *seen)], 1)
        picture, turn = self.x_embedder(tokens), self._turn(latent, prompt, seen)
        behind = prompt.shape[1]
        both = SequenceShards((behind, picture.shape[1]), self.sp)
        attend = TokenAttention(step, both if self.sp.size > 1 else None)
        turn = turn.part(0, behind).own(both, 0).join(turn.part(behind).own(both, 1))
        text, picture = both.own(prompt, 0), both.own(picture, 1)
        for block in self.transformer_blocks:
            picture, text = block(picture, text, steered, text_steered, turn, attend)
        x = torch.cat((text, picture), 1)
        for block in self.single_transformer_blocks:
            x = block(x, single, turn, attend)
        x = both.whole(x, 1)[:, : height * width]
        return self.proj_out(self.norm_out(x, time)).unflatten(1, (height, width))  # type: ignore[no-any-return]

    def _turn(self, latent: Tensor, prompt: Tensor, seen: list[Tensor]) -> Turn:
        """Axes: time, row, column, place in the text."""
        device = latent.device
        places = [line(prompt.shape[1], 4, 3, device), grid(latent.shape[1], latent.shape[2], device, after=1)]
        for number, picture in enumerate(seen, 1):
            places.append(grid(picture.shape[1], picture.shape[2], device, before=(_REFERENCE_TIME * number,), after=1))
        return self.rope(torch.cat(places))  # type: ignore[no-any-return]
