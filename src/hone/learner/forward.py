"""Run one packed row through the model: log-probabilities of its labels.

In:   a PackedRow, the step's Labels, an adapter or none
Out:  one log-probability per label of the row, one entropy per label

All passes (old policy, reference, training) run the same kernels on the same rows, with or without
gradients. Their differences are differences of weights and not of summation order.
"""

from torch import Tensor

from hone.learner.body import Body, as_body
from hone.learner.logprobs import Queries, label_logprobs
from hone.learner.offload import to_device
from hone.learner.trie import Labels, PackedRow
from hone.models.decoder import Decoder
from hone.models.lora import Lora


def row_logprobs(
    model: Decoder | Body, row: PackedRow, labels: Labels, lora: Lora | None, *, like: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [m] and entropies [m] in the order of row.label; no adapter: the base model.

    The log-probabilities have gradients, unless the caller runs this under `torch.no_grad`. `like` is
    the length of another row, whose compiled code this one may use.
    """
    body = as_body(model)
    row = body.arranged(row, like)
    queries = Queries(
        node=row.query_node,
        temperature=row.query_temperature,
        label_query=row.label_query,
        target=labels.target[row.label],
    )
    logprobs, entropy = label_logprobs(body.hidden(row, lora), body.head, queries)
    return logprobs, entropy[to_device(row.label_query, entropy.device)]
