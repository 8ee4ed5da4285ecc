"""A package as a kernel of the Hugging Face Hub: ``python -m kernel_reference.hub lightning_attn OUT``.

The library ``kernels`` imports such a kernel from a folder of its own, without installing anything. So what is
installed here is copied to ``OUT/build/torch-universal`` with kernel_reference inside, imports made relative, and ops
in a namespace of their own, so that the installed package and other versions may be loaded beside it. Layers for
``kernelize`` are in the package's ``layers.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kernel_reference.errors import fail

SHARED = "kernel_reference"
VARIANT = "torch-universal"
# What a call of a kernel never imports.
_LEFT_OUT = {"integrations", "testing", "bench", "hub.py", "__pycache__", "py.typed"}


def build(package: str, out: Path, version: int = 1) -> Path:
    """Write the tree of an installed package.

    Args:
        package: its import name, as ``lightning_attn``.
        out: a folder, new or empty.
        version: of the kernel, as the hub counts it.

    Returns:
        The folder of the one variant, ``out/build/torch-universal``.

    Raises:
        ValueError: the package has no ``layers.py``, or the folder is not empty.
    """
    source = _folder_of(package)
    if not (source / "layers.py").is_file():
        fail("package", "one with layers (layers.py)", package)
    if out.exists() and any(out.iterdir()):
        fail("out", "a new or empty folder", out)
    variant = out / "build" / VARIANT
    sources = {variant: source, variant / SHARED: _folder_of(SHARED)}
    for target, folder in sources.items():
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=lambda _, names: _LEFT_OUT.intersection(names))
    files = sorted(variant.rglob("*.py"))
    hashed = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    identity = f"_{package}_{hashed}"
    for file in files:
        file.write_text(_apart(file.read_text(), package, identity, len(file.relative_to(variant).parts)))
    with (variant / "__init__.py").open("a") as root:
        root.write("\nfrom . import layers as layers\n")
    metadata = {
        "id": identity,
        "name": package.replace("_", "-"),
        "version": version,
        "license": "Apache-2.0",
        "python-depends": ["einops"],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        fail("package", "an installed one", package)
    return Path(spec.origin).parent


def _apart(text: str, package: str, identity: str, depth: int) -> str:
    """A module's text with relative imports, from so many folders below the root, and the package's name replaced."""

    def relative(found: re.Match[str]) -> str:
        indent, name, rest = found.groups()
        path = (SHARED if name == SHARED else "") + rest
        return f"{indent}from {'.' * depth}{path.removeprefix('.')} import"

    text = re.sub(rf"^([ \t]*)from ({package}|{SHARED})((?:\.\w+)*) import", relative, text, flags=re.MULTILINE)
    # What is left names ops, or a module to be imported later.
    return re.sub(rf"\b{package}\b", identity, text)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kernel_reference.hub", description=__doc__)
    parser.add_argument("package")
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", type=int, default=1, help="of the kernel on the hub (default 1)")
    chosen = parser.parse_args(arguments)
    print(build(chosen.package, chosen.out, chosen.version))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
