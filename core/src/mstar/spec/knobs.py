"""Knobs: the request parameters of a model, as pydantic models.

One class per family says names, types, bounds, defaults and help. Validation, the error that names the nearest valid
value, the OpenAPI schema, the docs table and the playground's form all come from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from mstar.spec.errors import DeploymentError, RequestError, nearest

__all__ = ["Finite", "Knobs", "SamplingKnobs", "TextOptions", "nearest_bound", "read_options", "validate_knobs"]


def _finite(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Finite = Annotated[float, BeforeValidator(_finite)]


class Knobs(BaseModel):
    """Base of a family's knobs: unknown names are refused, values are never coerced silently.

    A subclass may restate a knob with nothing but a new default (``temperature: float = 0.6``): bounds, strictness and
    description are then inherited.

    :cvar may_change_nothing: knobs whose effect small sample requests may not show; the conformance suite then asks
        only that somebody reads them.
    """

    may_change_nothing: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _not_coerced(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would read ``"5"`` and ``True`` as numbers, ``"yes"`` and 1 as a flag."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = [_bare(kind) for kind in get_args(annotation) or (annotation,)]
        if isinstance(value, bool) and any(choice == value and choice is not value for choice in _choices(annotation)):
            raise ValueError("must be a number, not a boolean")  # Python holds 1 and True to be equal
        if bool in kinds:
            if isinstance(value, int | float | str) and not isinstance(value, bool) and type(value) not in kinds:
                raise ValueError("must be true or false")
        elif (int in kinds or float in kinds) and str not in kinds and isinstance(value, str | bytes | bool):
            raise ValueError(f"must be a number, not a {'boolean' if isinstance(value, bool) else 'text'}")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        inherited = {n: f for base in reversed(cls.__mro__[1:]) for n, f in getattr(base, "model_fields", {}).items()}
        restated = False
        for name, field in cls.model_fields.items():
            parent = inherited.get(name)
            if parent is not None and field is not parent and not field.metadata and field.description is None:
                cls.__pydantic_fields__[name] = merged = copy(parent)
                merged.default = field.default
                restated = True
        if restated:
            cls.model_rebuild(force=True)


class SamplingKnobs(Knobs):
    """The knobs of every model that samples tokens. A family subclasses it to change defaults or bounds."""

    temperature: Finite = Field(1.0, ge=0, le=100, description="0 is greedy; higher is more varied.")
    top_p: Finite = Field(1.0, gt=0, le=1, description="Keep the most likely tokens that sum to this probability.")
    top_k: int = Field(0, ge=0, description="Keep this many of the most likely tokens; 0 keeps all.", strict=True)
    min_p: Finite = Field(0.0, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest.")
    repetition_penalty: Finite = Field(1.0, ge=0.01, le=10, description="Above 1: tokens seen before get less likely.")
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2, description="Lowers a token by how often it was generated.")
    presence_penalty: Finite = Field(0.0, ge=-2, le=2, description="Lowers tokens that were generated at all.")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same answer.", strict=True
    )
    max_tokens: int | None = Field(None, ge=1, description="The most tokens to generate.", strict=True)
    min_tokens: int = Field(0, ge=0, description="Do not stop before this many tokens.", strict=True)
    ignore_eos: bool = Field(False, description="Go on after the end-of-text token.", strict=True)


class TextOptions(Knobs):
    """The deployment's options (``model_kwargs``) of every model whose processor is
    :class:`~mstar.processing.chat.TextProcessor`. A family with further ones subclasses it."""

    max_tokens: int | None = Field(
        None, ge=2, description="Longest prompt and answer together; default: what the model allows.", strict=True
    )
    default_max_tokens: int = Field(1024, ge=1, description="Longest answer to a request that names none.", strict=True)

    @classmethod
    def of(cls, options: Any) -> TextOptions:
        """*options*, or the defaults for a model whose options are of another class."""
        return options if isinstance(options, TextOptions) else cls()


K = TypeVar("K", bound="Knobs")


def validate_knobs(cls: type[K], values: dict[str, Any], *, where: str = "") -> K:
    """Build *cls* from *values*, or raise :class:`RequestError` that names the field, the fault and the nearest value.

    :param where: prefix of field names in the error (``"model_kwargs."``).
    """
    try:
        knobs = cls.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise RequestError(_explain(cls, name, first), param=where + name, code=_code(first)) from None
    for name, value in knobs:
        # JSON has integers of any size; workers and tensors have 64 bits
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            near = 2**63 - 1 if value > 0 else -(2**63)
            message = f"{name!r}: {str(value)[:80]!r} is beyond 64 bits; the nearest valid value is {near}"
            raise RequestError(message, param=where + name)
    return knobs


def read_options(cls: type[K], values: dict[str, Any]) -> K:
    """A model's options from a deployment's ``model_kwargs``. Raises :class:`DeploymentError` with every fault."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        faults = _innermost(error.errors(include_url=False))
        names = [".".join(str(part) for part in fault["loc"]) for fault in faults]
        raise DeploymentError(
            (f"model_kwargs.{name}", _explain(cls, name, fault)) for name, fault in zip(names, faults, strict=True)
        ) from None


def _innermost(faults: Sequence[Any]) -> list[Any]:
    """*faults* without those of lists that count as too short because of faults in their entries."""
    places = [fault["loc"] for fault in faults]

    def holds_another(place: tuple[Any, ...]) -> bool:
        return any(len(other) > len(place) and other[: len(place)] == place for other in places)

    return [fault for fault in faults if not (fault["type"] == "too_short" and holds_another(fault["loc"]))]


def _fields_at(cls: type[BaseModel], place: tuple[Any, ...]) -> tuple[str, Mapping[str, FieldInfo], str]:
    """Of a fault's *place*: the section that it lies in (``"section."``), the fields there, and which one it is."""
    section, known = "", cls.model_fields
    for part in place[:-1]:
        inner = known[part].annotation if part in known else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        section, known = f"{section}{part}.", inner.model_fields
    return section, known, ".".join(str(part) for part in place)[len(section) :]


def _code(fault: Any) -> str:
    return "unknown_parameter" if fault["type"] == "extra_forbidden" else "invalid_value"


def _explain(cls: type[Knobs], name: str, fault: Any) -> str:
    section, known, last = _fields_at(cls, fault["loc"])
    if fault["type"] == "extra_forbidden":
        hint = nearest(section + last, [section + key for key in known])
        return f"unknown parameter {name!r}{hint or '; there are none'}"
    choices = _choices(known[last].annotation) if last in known else []
    if choices and fault["type"] in ("literal_error", "enum"):
        return f"{name!r}: {str(fault['input'])[:80]!r} is none of its values{_nearest_choice(fault['input'], choices)}"
    context = fault.get("ctx", {})
    if fault["type"] in ("too_short", "too_long") and "actual_length" in context:
        bound = f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
        entries = f"{context['actual_length'] or 'none'}"
        return f"{name!r}: must have {bound} entr{'y' if bound.endswith(' 1') else 'ies'}, and has {entries}"
    if "multiple_of" in context and last in known:
        near = _nearest_multiple(fault["input"], context["multiple_of"], known[last].metadata)
        return f"{name!r}: must be a multiple of {context['multiple_of']}, got {str(fault['input'])[:80]!r}{near}"
    reason = fault["msg"].removeprefix("Value error, ")
    message = f"{name!r}: {reason[:1].lower()}{reason[1:]}, got {str(fault['input'])[:80]!r}"
    return message + nearest_bound(context)


def nearest_bound(context: Mapping[str, Any]) -> str:
    """``"; the nearest valid value is …"`` for a number out of the bound that *context*, of pydantic's fault, names;
    else ``""``."""
    valid = next((context[k] for k in ("ge", "gt", "le", "lt") if k in context), None)
    if valid is None:
        return ""
    if isinstance(valid, int) and ("gt" in context or "lt" in context):  # whole numbers have a next one
        return f"; the nearest valid value is {valid + 1 if 'gt' in context else valid - 1}"
    beside = "just above " if "gt" in context else "just below " if "lt" in context else ""
    return f"; the nearest valid value is {beside}{valid}"


def _nearest_multiple(value: Any, multiple: int, metadata: Sequence[Any]) -> str:
    """The multiple nearest to *value* within the bounds that a field's *metadata* names."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    bounds = {name: getattr(rule, name) for rule in metadata for name in ("ge", "le") if hasattr(rule, name)}
    near = round(value / multiple)
    near = max(near, -(-bounds["ge"] // multiple)) if "ge" in bounds else near
    near = min(near, bounds["le"] // multiple) if "le" in bounds else near
    return f"; the nearest valid value is {near * multiple}"


def _bare(annotation: Any) -> Any:
    """The type below what a union's part is annotated with (:data:`Finite`)."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _nearest_choice(value: Any, choices: list[Any]) -> str:
    numbers = [choice for choice in choices if isinstance(choice, int | float)]
    if numbers and isinstance(value, int | float):
        return f"; the nearest valid value is {min(numbers, key=lambda number: abs(number - value))}"
    return nearest(str(value), map(str, choices))


def _choices(annotation: Any) -> list[Any]:
    """The values of a ``Literal`` or an ``Enum``, also inside a union."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [member.value for member in annotation]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]
