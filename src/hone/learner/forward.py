"""One packed row through the decoder: log-probabilities of its labels.

In:   a PackedRow, the step's Labels, an adapter or none
Out:  one log-probability per label of the row, one entropy per label

All passes (of the policy at the start, of the base model, with gradients) run the same kernels on
the same rows, so that their differences are differences of weights and not of summation order.
"""

from torch import Tensor

from hone.learner.attention import ancestors_attention
from hone.learner.logprobs import Queries, label_logprobs
from hone.learner.trie import Labels, PackedRow
from hone.models.decoder import Decoder
from hone.models.lora import Lora


def row_logprobs(
    decoder: Decoder, row: PackedRow, labels: Labels, lora: Lora | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [m] and entropies [m] in the order of row.label; no adapter: the base model.

    The former have gradients if the adapter's leaves want them.
    """
    device = decoder.device
    attend = ancestors_attention(row, decoder.config, device=device, dtype=decoder.dtype)
    adapters = () if lora is None else ((0, len(row), lora),)
    hidden = decoder.hidden(row.token_ids.to(device), row.positions.to(device), attend, adapters)
    queries = Queries(
        node=row.query_node.to(device),
        temperature=row.query_temperature.to(device),
        label_query=row.label_query.to(device),
        target=labels.target[row.label].to(device),
    )
    logprobs, entropy = label_logprobs(hidden, decoder.head, queries)
    return logprobs, entropy[queries.label_query]


def twin(lora: Lora) -> Lora:
    """The same tensors without gradients, for passes that are only read.

    Not `torch.no_grad`: under it the decoder samples with fused copies of the factors, which are
    made once and would still be those of an earlier step.
    """
    keys = [f"{i}.{key}" for i in range(lora.config.layers) for key in lora.config.projections]
    factors = {
        key: (a.detach(), tuple(part.detach() for part in b))
        for key in keys
        for a, b in [lora.factors(key)]
    }
    return Lora(lora.config, factors, rank=lora.rank, alpha=lora.alpha)
