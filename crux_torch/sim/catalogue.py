"""The models of the paper's simulation (§6.3) and of its trace, from published figures.

Each entry says how many FLOPs a sample takes, which share of a device's peak that training
reached where it was published, and how many bytes are exchanged; everything else follows. The
paper counts eleven models and lists twelve: five open ones, five variants and two of its own, for
which open models of their kind stand in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from crux_torch.errors import CruxError
from crux_torch.fabric.peak import TERA, peak_flops


class WorkloadError(CruxError, ValueError):
    """A model, layout, trace or placement that can't be used: what is wrong, what was expected."""


def _published_peak(device: str, dtype: str) -> float:
    peak = peak_flops(device, dtype)
    assert peak is not None, f"{device} {dtype} is missing from the table of peaks"
    return peak


A100_FLOPS = _published_peak("NVIDIA A100", "bf16")
V100_FLOPS = _published_peak("Tesla V100-SXM2", "fp16")


@dataclass(frozen=True, slots=True)
class Model:
    """What one kind of training job computes and moves, per sample.

    Attributes:
        name: its key in ``MODELS``.
        parameters: those whose gradients are reduced; sharded embedding tables are not.
        flops_per_sample: executed for one sample, forward, backward and recomputation.
        samples_per_gpu: global batch of one iteration over the number of GPUs.
        achieved: share of the device's peak FLOP/s that training reaches without contention.
        gradient_bytes_per_parameter: 2 where gradients are reduced in half precision, else 4.
        layers: of the stack that pipeline and tensor parallelism divide.
        hidden: width of an activation at a layer's boundary; 0 where there is no such stack.
        sequence: positions of a sample.
        exchange_bytes_per_sample: embeddings that a sample needs from tables sharded over all
            GPUs, in bytes; their gradients travel back.
        tensor: GPUs that share a layer, as published.
        pipeline: stages, as published.
        source: where the figures come from and how they were derived.
    """

    name: str
    parameters: float
    flops_per_sample: float
    samples_per_gpu: float
    achieved: float
    gradient_bytes_per_parameter: int
    source: str
    layers: int = 1
    hidden: int = 0
    sequence: int = 1
    exchange_bytes_per_sample: float = 0.0
    tensor: int = 1
    pipeline: int = 1

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one copy of all gradients."""
        return self.parameters * self.gradient_bytes_per_parameter

    @property
    def activation_bytes_per_sample(self) -> float:
        """Bytes at a layer's boundary for one sample, in half precision."""
        return 2.0 * self.sequence * self.hidden

    @property
    def flops_per_gpu(self) -> float:
        """FLOPs of one iteration on one GPU."""
        return self.flops_per_sample * self.samples_per_gpu

    def compute_s(self, peak_flops: float = A100_FLOPS) -> float:
        """Seconds of one iteration's computation on devices of ``peak_flops`` FLOP/s."""
        return self.flops_per_gpu / (peak_flops * self.achieved)

    def with_batch(self, samples_per_gpu: float) -> Model:
        """The same model with another batch."""
        if not samples_per_gpu > 0:
            raise WorkloadError(f"samples_per_gpu is {samples_per_gpu}; expected more than 0")
        return replace(self, samples_per_gpu=samples_per_gpu)


def transformer_flops(
    layers: int, hidden: int, sequence: int, vocabulary: int, predicted: int, recompute: bool
) -> float:
    """FLOPs of one sequence (Narayanan et al., SC '21, equation 3).

    The appendix there counts 24 s h² + 4 s² h FLOPs for a layer forward, twice that backward, once
    more where activations are recomputed, and 6 s h V for the output layer.

    Args:
        layers: of the stack.
        hidden: its width.
        sequence: positions.
        vocabulary: of the output layer.
        predicted: positions whose output is computed; a masked model needs not all of them.
        recompute: whether the forward pass runs again before the backward pass.
    """
    forward = layers * (24.0 * sequence * hidden**2 + 4.0 * sequence**2 * hidden)
    return forward * (4 if recompute else 3) + 6.0 * predicted * hidden * vocabulary


def transformer_parameters(layers: int, hidden: int, sequence: int, vocabulary: int) -> float:
    """Parameters of a stack with learnt positions (Narayanan et al., SC '21, equation 2)."""
    stack = 12.0 * layers * hidden**2 * (1 + 13 / (12 * hidden))
    return stack + (vocabulary + sequence) * hidden


def _megatron(
    name: str,
    layers: int,
    hidden: int,
    achieved_tera: float,
    tensor: int,
    pipeline: int,
    gpus: int,
    batch: int,
) -> Model:
    """A row of Table 1 of Narayanan et al., SC '21: s = 2048, V = 51,200, A100, recomputation."""
    return Model(
        name,
        parameters=transformer_parameters(layers, hidden, 2048, 51_200),
        flops_per_sample=transformer_flops(layers, hidden, 2048, 51_200, 2048, recompute=True),
        samples_per_gpu=batch / gpus,
        achieved=achieved_tera * TERA / A100_FLOPS,
        gradient_bytes_per_parameter=2,
        source=f"Narayanan et al., SC '21, Table 1: {achieved_tera} TFLOP/s a GPU on {gpus} A100",
        layers=layers,
        hidden=hidden,
        sequence=2048,
        tensor=tensor,
        pipeline=pipeline,
    )


def _llama(
    name: str, parameters: float, layers: int, hidden: int, tensor: int, pipeline: int
) -> Model:
    """LLaMA (Touvron et al., 2023): s = 2048, batches of 4M tokens, 380 tokens/s a GPU for 65B.

    6 FLOPs a parameter and token, 12 l h s more for attention; §2.4 gives 380 tokens/s on each of
    2,048 A100, and 4M tokens are 1 sequence on each. The smaller ones reach the same share.
    """

    def flops_per_token(parameters: float, layers: int, hidden: int) -> float:
        return 6 * parameters + 12.0 * layers * hidden * 2048

    return Model(
        name,
        parameters=parameters,
        flops_per_sample=2048 * flops_per_token(parameters, layers, hidden),
        samples_per_gpu=4e6 / 2048 / 2048,
        achieved=380 * flops_per_token(65.2e9, 80, 8192) / A100_FLOPS,
        gradient_bytes_per_parameter=2,
        source="Touvron et al., LLaMA (2023), Table 2 and §2.4; layout as Narayanan et al., SC '21",
        layers=layers,
        hidden=hidden,
        sequence=2048,
        tensor=tensor,
        pipeline=pipeline,
    )


def _bert(name: str, sequence: int, predicted: int, batch: int, sequences_per_s: float) -> Model:
    """BERT-Large: 24 layers, width 1024, vocabulary 30,522 (Devlin et al., 2019).

    NVIDIA DeepLearningExamples, BERT for PyTorch, DGX A100 40GB, one GPU, mixed precision: 415
    sequences/s of 128 tokens in batches of 64, 78 of 512 tokens in batches of 16; its scripts
    predict 20 and 80 masked tokens and reduce gradients in half precision.
    """
    flops = transformer_flops(24, 1024, sequence, 30_522, predicted, recompute=False)
    return Model(
        name,
        parameters=transformer_parameters(24, 1024, 512, 30_522),
        flops_per_sample=flops,
        samples_per_gpu=batch,
        achieved=sequences_per_s * flops / A100_FLOPS,
        gradient_bytes_per_parameter=2,
        source=f"DeepLearningExamples BERT: {sequences_per_s} sequences/s of {sequence} tokens",
        layers=24,
        hidden=1024,
        sequence=sequence,
    )


#: ResNet-50: 4.09 billion multiply-adds forward for 224 x 224 (He et al., 2016; torchvision), two
#: FLOPs each, three times with the backward pass. NVIDIA DeepLearningExamples, ResNet50 v1.5 for
#: PyTorch: 2,470 images/s on one A100 in mixed precision, batches of 256.
_RESNET50_FLOPS = 3 * 2 * 4.09e9
_RESNET_ACHIEVED = 2470 * _RESNET50_FLOPS / A100_FLOPS


def _resnet(name: str, parameters: float, multiply_adds: float, batch: int) -> Model:
    """A residual network by torchvision's counts; native AMP reduces gradients in FP32."""
    return Model(
        name,
        parameters=parameters,
        flops_per_sample=3 * 2 * multiply_adds,
        samples_per_gpu=batch,
        achieved=_RESNET_ACHIEVED,
        gradient_bytes_per_parameter=4,
        source="torchvision's counts; share of peak of ResNet-50 in DeepLearningExamples",
    )


def _nmt_parameters(hidden: int) -> float:
    """Vaswani et al., 2017: 6 layers each way, 12 h² in an encoder's, 16 h² in a decoder's.

    The vocabulary is shared, 33,708 tokens as in DeepLearningExamples.
    """
    return (6 * 12 + 6 * 16) * hidden**2 + 33_708 * hidden


#: DeepLearningExamples, Transformer for PyTorch: 32,153 tokens/s on one V100 in mixed precision,
#: batches of 5,120 tokens; 6 FLOPs a parameter and token. An A100 is taken to reach the same share.
_NMT_ACHIEVED = 32_153 * 6 * _nmt_parameters(1024) / V100_FLOPS


def _nmt(name: str, hidden: int, tokens: int) -> Model:
    """The Transformer for translation; a sample is one target token with its source token."""
    return Model(
        name,
        parameters=_nmt_parameters(hidden),
        flops_per_sample=6 * _nmt_parameters(hidden),
        samples_per_gpu=tokens,
        achieved=_NMT_ACHIEVED,
        gradient_bytes_per_parameter=2,
        source="Vaswani et al., 2017; share of peak of DeepLearningExamples' Transformer on V100",
        layers=12,
        hidden=hidden,
    )


def _mlp(*widths: int) -> int:
    """Multiply-adds of a chain of dense layers, which is also its number of weights."""
    return sum(a * b for a, b in pairwise(widths))


#: DLRM on Criteo Terabyte as in MLPerf and DeepLearningExamples: 26 tables of width 128, dense
#: layers below and above, and the products of all pairs of 27 vectors.
_DLRM_WEIGHTS = _mlp(13, 512, 256, 128) + _mlp(479, 1024, 1024, 512, 256, 1)
_DLRM_FLOPS = 3 * 2 * (_DLRM_WEIGHTS + 27 * 26 // 2 * 128)
#: DeepLearningExamples, DLRM for PyTorch: 875,000 samples/s on one V100 in mixed precision.
_DLRM_ACHIEVED = 875e3 * _DLRM_FLOPS / V100_FLOPS


def _multi_interests(name: str, width: int, history: int) -> Model:
    """MIND (Li et al., CIKM '19); the paper only names it, and its reference leads elsewhere.

    For each of ``history`` clicks a bilinear map; three rounds of routing to 4 interests, two
    products each; two dense layers an interest; 10 sampled negatives. It publishes no throughput:
    the share of peak is that of DLRM, the nearest model that does. The embeddings of history,
    target and negatives are sharded over the GPUs and travel in half precision.
    """
    dense = _mlp(2 * width, 4 * width, width)
    multiply_adds = (
        history * width * width + 3 * 2 * 4 * history * width + 4 * dense + 4 * 11 * width
    )
    return Model(
        name,
        parameters=width * width + dense,
        flops_per_sample=3 * 2 * multiply_adds,
        samples_per_gpu=8192,
        achieved=_DLRM_ACHIEVED,
        gradient_bytes_per_parameter=4,
        source="Li et al., CIKM '19; share of peak of DeepLearningExamples' DLRM on V100",
        exchange_bytes_per_sample=2.0 * width * (history + 11),
    )


def _gpt() -> Model:
    """The paper's GPT: GPT-3 cut to 24 layers of width 1024 (§2.2, footnote 1).

    32 sequences a GPU is the largest power of two whose computation is below the 1.53 s that
    Figure 7 reports for an iteration; the share of peak is that of the 1.7B model, the nearest.
    """
    return Model(
        "gpt",
        parameters=transformer_parameters(24, 1024, 2048, 51_200),
        flops_per_sample=transformer_flops(24, 1024, 2048, 51_200, 2048, recompute=False),
        samples_per_gpu=32,
        achieved=137 * TERA / A100_FLOPS,
        gradient_bytes_per_parameter=2,
        source="Crux §2.2, footnote 1; Narayanan et al., SC '21, Table 1: 137 TFLOP/s for 1.7B",
        layers=24,
        hidden=1024,
        sequence=2048,
    )


def _transformer_nlp() -> Model:
    """Stand-in for the paper's own NLP transformer: NVIDIA NeMo's 4B BERT, 48 layers of 2560.

    NeMo's user guide: 57,287 tokens/s on one node of 8 A100 80GB.
    """
    flops = transformer_flops(48, 2560, 512, 29_056, 512, recompute=False)
    return Model(
        "transformer-nlp",
        parameters=transformer_parameters(48, 2560, 512, 29_056),
        flops_per_sample=flops,
        samples_per_gpu=16,
        achieved=57_287 / 8 / 512 * flops / A100_FLOPS,
        gradient_bytes_per_parameter=2,
        source="NVIDIA NeMo user guide, BERT 4B: 57,287 tokens/s on 8 A100",
        layers=48,
        hidden=2560,
        sequence=512,
    )


def _ctr() -> Model:
    """Stand-in for the paper's own click-through-rate model: MLPerf's DLRM.

    A global batch of 64k on 8 GPUs, as DeepLearningExamples trains it.
    """
    return Model(
        "ctr",
        parameters=_DLRM_WEIGHTS,
        flops_per_sample=_DLRM_FLOPS,
        samples_per_gpu=8192,
        achieved=_DLRM_ACHIEVED,
        gradient_bytes_per_parameter=4,
        source="DeepLearningExamples DLRM: 875,000 samples/s on one V100",
        exchange_bytes_per_sample=2.0 * 26 * 128,
    )


#: The models of §6.3.
PAPER_MODELS: tuple[Model, ...] = (
    _bert("bert", 512, 80, 16, 78),
    _bert("bert-128", 128, 20, 64, 415),
    _gpt(),
    _megatron("gpt-7b", 36, 4096, 142, tensor=4, pipeline=1, gpus=128, batch=512),
    _resnet("resnet", 25.56e6, 4.09e9, 256),
    _resnet("resnet-152", 60.19e6, 11.51e9, 128),
    _nmt("nmt", 1024, 5120),
    _nmt("nmt-base", 512, 5120),
    _multi_interests("multi-interests", 64, 50),
    _multi_interests("multi-interests-large", 128, 100),
    _ctr(),
    _transformer_nlp(),
)
#: Further ones that the published list of jobs names.
TRACE_MODELS: tuple[Model, ...] = (
    _megatron("gpt-3b", 30, 3072, 138, tensor=2, pipeline=1, gpus=64, batch=512),
    # GPT-3's 13B (Brown et al., 2020, Table 2.1), at the share of the 18.4B row, the nearest.
    _megatron("gpt-13b", 40, 5120, 135, tensor=8, pipeline=1, gpus=256, batch=1024),
    _llama("llama-7b", 6.7e9, 32, 4096, tensor=1, pipeline=1),
    _llama("llama-13b", 13.0e9, 40, 5120, tensor=2, pipeline=1),
    _llama("llama-30b", 32.5e9, 60, 6656, tensor=4, pipeline=2),
    _llama("llama-65b", 65.2e9, 80, 8192, tensor=8, pipeline=2),
)
MODELS: dict[str, Model] = {model.name: model for model in PAPER_MODELS + TRACE_MODELS}


def model(name: str) -> Model:
    """The model of that name.

    Raises:
        WorkloadError: there is none.
    """
    if name not in MODELS:
        raise WorkloadError(f"model {name!r} is unknown; expected one of {', '.join(MODELS)}")
    return MODELS[name]
