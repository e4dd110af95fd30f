"""A file that says how a trainer and an engine lay one model over ranks: read, checked, turned into two layouts."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reflux_client.connection import ClientError
from reflux_weightplan.errors import WeightPlanError
from reflux_weightplan.families.base import Model
from reflux_weightplan.families.layouts import Fusing, Parallelism, alone, fsdp, fsdp_experts, parallel
from reflux_weightplan.families.presets import CONFIGS, places
from reflux_weightplan.families.registry import model_of
from reflux_weightplan.spec import SpecLayout

Size = Annotated[int, Field(ge=1, le=65536)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelSection(_Section):
    """The model: a well-known one, or the folder or `config.json` of another."""

    preset: str = ""
    config: Path | None = None


class SideSection(_Section):
    """One side. `fsdp` uses shards and copies, `fsdp-experts` shards and owners, `parallel` the others."""

    kind: Literal["alone", "fsdp", "fsdp-experts", "parallel"] = "alone"
    shards: Size = 1
    copies: Size = 1
    owners: Size = 1
    replicas: Size = 1
    pipeline: Size = 1
    expert_groups: Annotated[int, Field(ge=0, le=65536)] = 0
    tensor: Size = 1
    fused: Fusing = "engine"


class LayoutFile(_Section):
    """The whole file."""

    model: ModelSection
    source: SideSection
    target: SideSection


def load_layouts(path: Path) -> tuple[SpecLayout, SpecLayout]:
    """Reads the source's and the target's layout. Raises `ClientError` naming each key that is wrong."""
    try:
        document = LayoutFile.model_validate(tomllib.loads(path.read_text()))
        model = _model(document.model, path.parent)
        return _layout(model, document.source, "trainer"), _layout(model, document.target, "engine")
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ClientError(f"{path}: {found}") from None
    except (OSError, tomllib.TOMLDecodeError, json.JSONDecodeError, WeightPlanError) as error:
        raise ClientError(f"{path}: {error}") from None


def _model(section: ModelSection, folder: Path) -> Model:
    if section.config is None:
        if section.preset not in CONFIGS:
            raise ClientError(
                f"model.preset is {section.preset!r}; known are {', '.join(CONFIGS)}, or give model.config"
            )
        return model_of(CONFIGS[section.preset])
    file = folder / section.config
    document: dict[str, Any] = json.loads((file / "config.json" if file.is_dir() else file).read_text())
    return model_of(document)


def _layout(model: Model, side: SideSection, name: str) -> SpecLayout:
    match side.kind:
        case "alone":
            return alone(model, places=places(1, name))
        case "fsdp":
            return fsdp(model, side.shards, copies=side.copies, places=places(side.shards * side.copies, name))
        case "fsdp-experts":
            return fsdp_experts(model, side.shards, side.owners, places=places(side.shards * side.owners, name))
        case "parallel":
            sizes = Parallelism(side.replicas, side.pipeline, side.expert_groups, side.tensor)
            return parallel(model, sizes, fused=side.fused, places=places(sizes.ranks, name))
