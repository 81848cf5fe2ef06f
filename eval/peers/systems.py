"""What is compared: systems, each a program with a precision, and their methods of decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

PLAIN, PREDICTOR = "plain", "predictor"
ORACLE, CHARGED = "oracle", "charged"  # followed by an acceptance length
LENGTHS = (2, 3, 4, 5)
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
OURS = "ours"


def draft_depth(length: int) -> int:
    """Of the chain of which `length - 1` tokens are accepted: some more than that, as a drafter cannot know."""
    return 2 * length - 1


@dataclass(frozen=True)
class Peer:
    """A program of `scripts`.

    Attributes:
        title: as tables name it.
        precisions: that it has.
        packages: of its environment; none are needed where it runs in ours.
        removed: what these bring and nothing here needs.
        flags: of the compiler, where packages are compiled for an x86 CPU.
        converts: whether it loads a format of its own.
        labels: what it calls a precision itself.
    """

    title: str
    script: str
    precisions: Sequence[str]
    packages: Sequence[str] = ()
    removed: Sequence[str] = ()
    flags: str = ""
    converts: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    backend: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.script == OURS

    def label(self, precision: str) -> str:
        return dict(self.labels).get(precision, precision)


PEERS = {
    "transformers": Peer("transformers", "hugging_face", ("float32", "bfloat16")),
    "openvino-genai": Peer(
        "OpenVINO GenAI",
        "genai",
        PRECISIONS,
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
        removed=("torchvision",),  # whose build for a GPU breaks the import of transformers beside a torch for the CPU
        converts=True,
    ),
    "llama.cpp": Peer(
        "llama.cpp",
        "llama",
        PRECISIONS,
        ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        # Its products by whole matrices crash on the CPUs that have them: ggml-org/llama.cpp, issue 20824.
        flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16",
        converts=True,
        labels=(("int8", "Q8_0"), ("int4", "Q4_0")),
    ),
    OURS: Peer("ours", OURS, PRECISIONS),
    "ours-openvino": Peer("ours on OpenVINO", OURS, PRECISIONS, backend="openvino"),
}


@dataclass(frozen=True)
class System:
    """One row of a table before its methods."""

    peer: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.peer} {self.precision}"

    @property
    def title(self) -> str:
        return f"{PEERS[self.peer].title}, {PEERS[self.peer].label(self.precision)}"

    def methods(self, shipped: bool) -> list[str]:
        """Plain first, as the oracle foretells its answers."""
        if not PEERS[self.peer].is_ours:
            return [PLAIN]
        if shipped:
            return [PLAIN, PREDICTOR]
        return [PLAIN, *(f"{kind} {length}" for kind in (ORACLE, CHARGED) for length in LENGTHS)]
