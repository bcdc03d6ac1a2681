"""W_Q, W_K, W_V and W_O of every head of a model: read, checked, and by heads.

Headwise's own models and those of transformers are read by the same code, from a table that says
where each family keeps its weights (``layouts``). Nothing is guessed: a family that is not in the
table is refused, and what is read is checked against what the model computes (``validation``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwise.circuits.layer_weights import HeadWeights, LayerWeights, RotaryUse
from headwise.circuits.matrices import check_finite, matrix
from headwise.circuits.norms import HeadNorm, NormFold
from headwise.circuits.places import Places
from headwise.circuits.reading import Reading, layout_of, norm_at, read_layer
from headwise.circuits.validation import validated
from headwise.errors import ModelError
from headwise.models.attention import MultiHeadAttention
from headwise.models.embedding import TokenEmbedding, Unembedding
from headwise.observation.survey import survey

__all__ = ["HeadNorm", "HeadWeights", "LayerWeights", "NormFold", "RotaryUse", "head_weights"]

_TRANSFORM = (
    "the head has a layer of its own between the last norm and the table, so no linear map leads"
    " from the stream to the logits"
)
# What stands before the table in the heads of BERT, RoBERTa (its head), DistilBERT and ELECTRA.
_TRANSFORMS = (
    "predictions.transform", "lm_head.dense", "vocab_transform", "generator_predictions.dense",
)  # fmt: skip


def head_weights(model: nn.Module, *, validate: bool = True) -> HeadWeights:
    """The weights of every head, in the order in which the model has them.

    Query head h reads key-value head h // (heads / kv_heads). Weights are views of the model's own:
    nothing is copied, and changing them changes the model. In latent attention (DeepSeek) W_K and
    W_V are products of two, and so is W_Q where queries have a latent vector too.

    Args:
        model: a model of ``headwise.models``, or one of transformers of a known family.
        validate: run a few tokens (or a picture) through the model, and require that queries, keys,
            values and outputs computed from the extracted weights are the model's.

    Raises:
        ModelError: an unknown family, quantised or missing weights, or weights that do not
            validate.
        NonFiniteError: a NaN or an infinity in a weight, by name and place.

    Example:
        >>> from headwise.models import build, preset
        >>> found = head_weights(build(preset("tiny")))
        >>> found.layers[0].query.shape, found.layers[1].qk().shape
        (torch.Size([4, 32, 8]), torch.Size([4, 32, 32]))
    """
    found = survey(model)
    sites = list(found.modules.values())
    places = Places(model, sites)
    layouts = {site.path: layout_of(places, site) for site in sites}
    readings = [read_layer(places, site, layouts[site.path]) for site in sites]
    family = str(found.about["architecture"])
    layers = [reading.weights for reading in readings]
    final = _final_norm(places, readings[-1])
    if validate:
        try:
            layers = validated(model, found, family, readings, final)
        except ModelError:
            for name, parameter in model.named_parameters():  # or a NaN elsewhere is the reason
                check_finite(name, parameter.detach())
            raise
    embedding, unembedding, notes = _tables(model, places)
    for name, table in (("the embedding", embedding), ("the unembedding", unembedding)):
        check_finite(name, table)
    return HeadWeights(
        layers=tuple(layers),
        embedding=embedding,
        unembedding=unembedding,
        final_norm=final[1],
        context=found.about["context"],
        family=family,
        validated=validate,
        notes=notes,
    )


def _final_norm(places: Places, last: Reading) -> tuple[str, NormFold | None]:
    """Where the norm that the logits read is, and the norm: that of the last stack."""
    layout = layout_of(places, last.site)
    path = places.first(layout.final, last.site)
    return path, norm_at(places, path, layout)


def _tables(model: Any, places: Places) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """The table of tokens and that of logits, as far as the stream reads and gives them."""
    if any(isinstance(module, MultiHeadAttention) for module in places.modules.values()):
        return _own_tables(places)
    try:
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # several towers, each with its own
        return None, None, ("the model has no table of tokens of its own",)
    embedding = table.weight.detach() if isinstance(table, nn.Embedding) else None
    if head is None:
        return embedding, None, ()
    if any(path.endswith(_TRANSFORMS) for path in places.modules):
        return embedding, None, (_TRANSFORM,)
    return embedding, matrix("the unembedding", head), ()


def _own_tables(places: Places) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    modules = places.modules.values()
    source = next((m for m in modules if isinstance(m, TokenEmbedding)), None)
    head = next((m for m in modules if isinstance(m, Unembedding)), None)
    embedding = None if source is None else source.tokens.weight.detach()
    if head is None:
        return embedding, None, ()
    if head.transform is not None:
        return embedding, None, (_TRANSFORM,)
    if head.weight is not None:
        return embedding, head.weight.detach().T, ()
    return embedding, None if embedding is None else embedding.T, ()
