"""Engines by name; each is imported when it is started."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from spanflow.engine.protocol import Engine
from spanflow.errors import EngineUnavailable, QueryError
from spanflow.installing import install_advice


@dataclass(frozen=True, slots=True)
class Factory:
    """Where an engine's class is; its `start(model, **options)` is awaited."""

    module: str
    name: str


#: The engines that can be started.
ENGINES: Mapping[str, Factory] = MappingProxyType(
    {
        "vllm": Factory("spanflow.engine.vllm.client", "VllmEngine"),
        "oracle": Factory("spanflow.engine.oracle", "OracleEngine"),
        "simulator": Factory("spanflow.engine.simulator", "SimulatorEngine"),
    }
)


async def start_engine(name: str, model: str, **options: Any) -> Engine:
    """Start an engine on the running event loop.

    Raises EngineUnavailable for an unknown name or a missing package, QueryError for an option that the
    engine does not have, ModelError for the model.
    """
    factory = ENGINES.get(name)
    if factory is None:
        raise EngineUnavailable(f"no engine is called {name!r}; known engines: {', '.join(sorted(ENGINES))}")
    try:
        module = await asyncio.to_thread(import_module, factory.module)  # some take seconds
        start = getattr(module, factory.name).start
        parameters = inspect.signature(start).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        unknown = sorted(set(options) - set(known))
        # An engine that takes more says itself what it does not have.
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise QueryError(
                f"engine {name!r} has no option {', '.join(map(repr, unknown))}; its options: {', '.join(known)}"
            )
        engine: Engine = await start(model, **options)
    except ImportError as error:
        if (error.name or "").startswith("spanflow."):
            raise
        what = f"needs the package {error.name!r}" if isinstance(error, ModuleNotFoundError) else f"({error})"
        raise EngineUnavailable(f"engine {name!r} does not start here: {what}; {install_advice()}") from error
    return engine
