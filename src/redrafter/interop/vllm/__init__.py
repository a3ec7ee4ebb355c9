"""The recurrent drafter inside vLLM.

`proposer.py` is the adapter for vLLM's first runner, `recorded_chains.py` its drafting as CUDA graphs. `speculator.py`
is the adapter for the second runner, and decides which runner is used; `capture_sizes.py` says which steps vLLM records
there, `device_chains.py` drafts for an engine that keeps its texts on the device. `target.py` is the model as a drafter
sees it, and what the user has set; `measured_depths.py` decides whether a step drafts; `timing.py` says where a step's
time goes. None of them imports vLLM before vLLM loads the plug-in.
"""

from redrafter.interop.vllm.proposer import Proposer
from redrafter.interop.vllm.target import ProposerConfig, check_version

__all__ = ["Proposer", "ProposerConfig", "check_version"]
