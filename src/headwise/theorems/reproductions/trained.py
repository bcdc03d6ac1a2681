"""Results about trained decoders: attention sinks, heads that can go, logits that grow."""

from __future__ import annotations

from typing import Final

from headwise.theorems.reproductions.trained_pruning import (
    pruning_of_a_model,
    pruning_of_the_embedded,
)
from headwise.theorems.reproductions.trained_sharpness import sharpness
from headwise.theorems.reproductions.trained_sinks import sinks_of_a_model, sinks_of_the_embedded
from headwise.theorems.statement import Kind, Textbook, Theorem

__all__ = ["THEOREMS"]

THEOREMS: Final = (
    Theorem(
        name="xiao-sinks",
        on="embedded model",
        title="A sliding window needs the first tokens",
        statement=(
            "A trained decoder whose queries see only the last W keys predicts far worse than one"
            " that also keeps the first few tokens, whatever these say: many heads put most of"
            " their weight there when they have nothing to look for."
        ),
        latex=(
            r"\mathrm{ppl}\bigl(j > i - W\bigr) \gg"
            r" \mathrm{ppl}\bigl(j > i - W + c \;\text{ or }\; j < c\bigr)"
        ),
        conditions=(
            "heads of the model are sinks: a mean weight above 0.3 on the first token",
            "the window is a mask alone: positions stay what they are",
        ),
        source="Xiao et al. 2023 (arXiv:2309.17453), section 3, table 1",
        kind=Kind.REGULARITY,
        prediction="the perplexity of the window is at least 1.5 times that with 4 first tokens",
        estimator=(
            "perplexity of the second half of pieces of 512 tokens with a window of 128 keys; the"
            " interval is over pieces"
        ),
        random=sinks_of_the_embedded,
        model=sinks_of_a_model,
        textbook=(
            Textbook(
                "a window loses what lies before it",
                "most of the loss is the missing sink: 4 tokens that say nothing bring it back",
            ),
        ),
        reproduces=(
            "Xiao et al. 2023: Llama-2-13B has perplexity 5158 with a window, 5.40 with 4 first"
            " tokens kept, over long texts with a moving cache"
        ),
    ),
    Theorem(
        name="michel-prunable-heads",
        on="embedded model",
        title="A fifth of the heads can go",
        statement=(
            "With heads ordered by the mean size of the loss's derivative in their gate, the least"
            " important fifth of a trained decoder can be removed at once for little, and for less"
            " than a fifth chosen at random."
        ),
        latex=(
            r"I_m = \mathbb{E}_x \left| \frac{\partial L(x)}{\partial \xi_m} \right|, \qquad"
            r" O = \sum_m \xi_m A^m X W_{VO}^m"
        ),
        conditions=(
            "a trained model: at random weights no head is more important than another",
            "importance is divided by its l2 norm in each layer, and measured on other text",
        ),
        source="Michel et al. 2019 (arXiv:1905.10650), sections 4.1 and 4.2; Voita et al. 2019",
        kind=Kind.REGULARITY,
        prediction="the loss rises by less than 0.3 nats, and by less than at random",
        estimator=(
            "mean loss on text that the order was not chosen on; the interval is over random"
            " choices of as many heads"
        ),
        random=pruning_of_the_embedded,
        model=pruning_of_a_model,
        textbook=(
            Textbook(
                "most heads are useless",
                "few matter alone, but others can take their place only where these remain: many"
                " at random cost much more than as many of the least important",
            ),
        ),
        reproduces=(
            "Michel et al. 2019: 20 % of the heads of a translation model and 40 % of BERT's can"
            " be removed without a noticeable loss"
        ),
    ),
    Theorem(
        name="wortsman-logit-growth",
        title="Large attention logits worsen the loss",
        statement=(
            "Models trained with queries and keys of a fixed size √κ each lose what attention gives"
            " them as κ grows: at κ = 10³ the loss is clearly higher than at κ = 1, and at 10⁴"
            " it is worse than that of counts of pairs."
        ),
        latex=(
            r"q = \sqrt{\kappa}\, \frac{z_q}{\mathrm{rms}(z_q)}, \quad"
            r" k = \sqrt{\kappa}\, \frac{z_k}{\mathrm{rms}(z_k)}, \qquad"
            r" \left| s_{ij} \right| \le \kappa \sqrt{d_k}"
        ),
        conditions=(
            "κ stands during the whole training",
            "logits grow with κ: nothing divides them again",
        ),
        source="Wortsman et al. 2023 (arXiv:2309.14322), sections 3.1 and 3.4",
        kind=Kind.REGULARITY,
        prediction="a loss higher by at least 0.1 at κ = 10³; above that of pairs at κ = 10⁴",
        estimator=(
            "loss of two-layer models of bytes after a short training, on text that was held out;"
            " the interval is over seeds"
        ),
        random=sharpness,
        textbook=(
            Textbook(
                "large logits make training diverge",
                "here they do not: with a norm on queries and keys training goes on, and rows that"
                " are one-hot from the start learn nothing",
            ),
        ),
        reproduces=(
            "Wortsman et al. 2023: the loss worsens from logits of about 10³ on, and is worse than"
            " that of a bigram model at 10⁴"
        ),
    ),
)
