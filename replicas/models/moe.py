"""The families with a mixture of experts over Llama's and Qwen3's blocks: Mixtral, Qwen2-MoE (Qwen1.5-MoE), Qwen3-MoE.

Owns:      which layers have experts, and the experts' names in checkpoints.
Never:     chooses experts or multiplies by them (layers/moe.py does).
Source:    Jiang et al. 2024 (arXiv:2401.04088); Qwen1.5-MoE (Qwen team, 2024); Yang et al. 2025 (arXiv:2505.09388).
"""

from collections.abc import Mapping

from replicas.config import ModelConfig
from replicas.layers.layer import Layer, Whole
from replicas.layers.linear import GatedMLP
from replicas.layers.moe import NAMES, MoE
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import Llama, LlamaBlock
from replicas.models.qwen import Qwen3Block


def experts_of(config: ModelConfig, tp: TpGroup, names: tuple[str, str, str] = NAMES) -> MoE:
    """Make a block's experts."""
    assert config.moe is not None, f"{config.architecture} has experts; its config does not say which"
    return MoE(config.moe, tp, names=names)


class MixtralBlock(LlamaBlock):
    """A Llama block whose MLP is experts alone. Checkpoints call them ``block_sparse_moe.experts.3.w1``; the module of
    Transformers 5 has ``mlp.experts.gate_up_proj`` of all experts, which are taken too."""

    def feed_forward(self, config: ModelConfig, index: int, tp: TpGroup) -> MoE:
        return experts_of(config, tp, names=("w1", "w3", "w2"))

    def parts(self) -> Mapping[str, Layer]:
        return {"block_sparse_moe" if name == "mlp" else name: part for name, part in super().parts().items()}

    def wholes(self) -> Mapping[str, Whole]:
        assert isinstance(self.mlp, MoE)
        stacked = {
            f"mlp.{name}": Whole(whole.put, tuple(f"block_sparse_moe.{each}" for each in whole.fills))
            for name, whole in self.mlp.stacked_weights().items()
        }
        return stacked | {"mlp.gate.weight": Whole(self.mlp.gate.slots()["weight"], ("block_sparse_moe.gate.weight",))}


class Mixtral(Llama):
    """MixtralForCausalLM: every block has experts; the chosen ones' weights sum to 1."""

    block = MixtralBlock


class MoEBlock(LlamaBlock):
    """A Llama block with experts, or with an MLP in layers that the config names."""

    def feed_forward(self, config: ModelConfig, index: int, tp: TpGroup) -> GatedMLP | MoE:
        if config.moe is None or index in config.moe.dense_layers:
            return super().feed_forward(config, index, tp)
        return experts_of(config, tp)


class Qwen2Moe(Llama):
    """Qwen2MoeForCausalLM (Qwen1.5-MoE, Qwen2-57B-A14B): biases on queries, keys and values, and beside the experts one
    with a gate that computes every token."""

    block = MoEBlock


class Qwen3MoeBlock(MoEBlock, Qwen3Block):
    """A block with Qwen3's attention and experts."""


class Qwen3Moe(Llama):
    """Qwen3MoeForCausalLM (Qwen3-30B-A3B, Qwen3-235B-A22B): experts beside no shared one."""

    block = Qwen3MoeBlock
